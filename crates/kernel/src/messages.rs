//! Messages of the host, which come while the sandbox runs.

use alloc::vec::Vec;

use bytemuck::Pod;
use thaw_abi::control::{
    Checkpoint, Connection, Described, HostName, Limits, MSG_CHECKPOINT, MSG_CONNECTION,
    MSG_DESCRIBE, MSG_DESCRIBED, MSG_FREEZE, MSG_HIBERNATE, MSG_HIBERNATE_SEALED, MSG_HOST_NAME,
    MSG_LIMITS, MSG_MEMORY_IS_BACK, MSG_OOM_KILLED, MSG_OUT_OF_MEMORY, MSG_OUTGOING, MSG_RENEWED,
    MSG_REPLY, MSG_REST, MSG_SIGNAL, MSG_TRIM, MSG_TWIN_READ, MSG_WAKE, MSG_WINDOW_SIZE,
    OutOfMemory, Outgoing, PROCESS_MEMORY_MAX, ProcessMemory, Rest, Signal as SignalMessage,
    WindowSize,
};

use thaw_abi::remote::{MSG_EXEC, MSG_EXECS_WAIT};

use crate::console;
use crate::host::control::{self, Kept};
use crate::platform::machine::{HostFd, HostFiles, Machine};
use crate::state::kernel;
use crate::syscall::activity;
use crate::task::freeze_request;
use crate::task::host_process::{self, twins};
use crate::task::oom_killer;
use crate::task::process::FIRST_PID;
use crate::task::scheduler::RunState;
use crate::task::signal::{SI_KERNEL, SIGWINCH, Signal, SignalInfo, send_to_process};

/// Does what a message says.
pub fn handle(message: &Kept) {
    host_process::count_request();
    match message.kind {
        MSG_CONNECTION => {
            if let Some(&fd) = message.fds.first() {
                crate::net::deliver_connection(&body::<Connection>(message), HostFd::new(fd));
            }
        }
        MSG_SIGNAL => {
            let number = body::<SignalMessage>(message).number;
            Signal::from_number(number).into_iter().for_each(signal_from_host);
        }
        MSG_WINDOW_SIZE => {
            kernel().window.set(body::<WindowSize>(message));
            signal_from_host(SIGWINCH);
        }
        MSG_EXEC..=MSG_EXECS_WAIT => crate::remote::handle(message),
        MSG_FREEZE => freeze_request::request(),
        MSG_CHECKPOINT => {
            // An older host says nothing about it.
            let is_said = message.body.len() >= size_of::<Checkpoint>();
            let checkpoint = if is_said { body(message) } else { Checkpoint::default() };
            freeze_request::request_at_once(&checkpoint);
            host_process::interrupt_everybody();
        }
        MSG_TWIN_READ => twins::end(),
        MSG_RENEWED => {
            // Nobody reads it any more.
            twins::end();
            if freeze_request::host_renewed() {
                host_process::go_on();
            }
            crate::net::host_renewed();
            kernel().volumes.renew();
        }
        MSG_REST => freeze_request::request_rest(&body::<Rest>(message)),
        MSG_DESCRIBE => describe(),
        MSG_LIMITS => kernel().change_limits(&body::<Limits>(message)),
        MSG_OUT_OF_MEMORY => out_of_memory(message),
        MSG_MEMORY_IS_BACK => oom_killer::memory_is_back(),
        MSG_HOST_NAME => crate::net::own_name::change(body::<HostName>(message).name()),
        MSG_OUTGOING => crate::net::outside::open(body::<Outgoing>(message).flags),
        MSG_WAKE => freeze_request::withdraw_rest(),
        // The sandbox has gone on since it was at rest: the file is out of date.
        MSG_HIBERNATE | MSG_HIBERNATE_SEALED => {
            message.fds.iter().for_each(|&fd| Machine::close(HostFd::new(fd)))
        }
        // The same: what was compared may have changed.
        MSG_TRIM => {}
        // To a request that was made without waiting.
        MSG_REPLY => crate::net::answered(message),
        kind => console!("thaw kernel: the host sent a message of unknown kind {kind}"),
    }
}

/// A signal that the host forwards (Ctrl-C, `kill` of `thaw run`).
fn signal_from_host(signal: Signal) {
    if freeze_request::takes_signal_from_host(signal) || crate::fs::tty::host::signal(signal) {
        return;
    }
    if let Some(process) = kernel().tasks.process(FIRST_PID) {
        send_to_process(&process, SignalInfo::new(signal, SI_KERNEL));
    }
}

/// Ends a process, and tells the host which.
fn out_of_memory(message: &Kept) {
    let count = body::<OutOfMemory>(message).count as usize;
    let said = message.body[size_of::<OutOfMemory>()..].chunks_exact(size_of::<ProcessMemory>());
    let memory: Vec<ProcessMemory> =
        said.take(count.min(PROCESS_MEMORY_MAX)).map(bytemuck::pod_read_unaligned).collect();
    let killed = oom_killer::kill_one(&memory);
    control::send(MSG_OOM_KILLED, 0, bytemuck::bytes_of(&killed), &[]);
}

/// Tells the host what the program does, for people who wait for its entry point.
fn describe() {
    let kernel = kernel();
    let mut described = Described::default();
    for (place, port) in described.ports.iter_mut().zip(kernel.net.tcp.ports.listened()) {
        *place = port;
    }
    let threads = kernel.tasks.all_threads();
    let mut busy = None;
    for thread in threads.iter().filter(|one| one.sched.get().state == RunState::Runnable) {
        described.runnable += 1;
        (described.process, described.name) = (thread.process.pid.number(), thread.name.get());
        busy = Some(thread.tid());
    }
    activity::tell(&threads, busy);
    control::send(MSG_DESCRIBED, 0, bytemuck::bytes_of(&described), &[]);
}

fn body<T: Pod>(message: &Kept) -> T {
    bytemuck::pod_read_unaligned(&message.body[..size_of::<T>()])
}
