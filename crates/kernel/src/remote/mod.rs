//! Processes and files that the host asks for, without any program inside that would serve it.
//!
//! A message of the host ([`thaw_abi::remote`]) starts a thread of the kernel's own, which acts as
//! the user that the message names. For a process it finds the program, makes an address space, a
//! process and a host process for it, and then ends, or passes on what goes between the process'
//! terminal and the host. For files it serves one session over a socket.
//!
//! Such a process has no parent, as one that has entered a container from outside: the program in
//! the sandbox is told of nothing. Its streams are sockets of this boot. In a copy the host may have
//! it go on, with other sockets; otherwise they are at their end, and nobody is told when the
//! process ends.
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`process`] | starting a process |
//! | [`program`] | finding its program, user and environment |
//! | [`refusal`] | why there is none |
//! | [`stream`] | its standard streams |
//! | [`terminal`] | its terminal |
//! | [`files`] | sessions over files |
//! | [`watch`] | telling what happens to files |
//! | [`port`] | connections to ports on which programs listen |
//! | [`init`] | the first process of a sandbox without a program |

pub mod files;
pub mod init;
mod port;
mod process;
mod program;
mod refusal;
mod stream;
mod terminal;
mod tree;
mod user;
mod watch;

use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use bytemuck::Pod;
use thaw_abi::control::WindowSize;
use thaw_abi::remote::{
    EXECS_MAX, Exec, ExecEnded, ExecFailed, ExecGoesOn, ExecSignal, ExecStarted, ExecWindow,
    FILE_SESSIONS_MAX, MSG_EXEC, MSG_EXEC_ENDED, MSG_EXEC_GOES_ON, MSG_EXEC_SIGNAL,
    MSG_EXEC_STARTED, MSG_EXEC_WINDOW, MSG_EXECS_GO_ON, MSG_EXECS_WAIT, MSG_EXECS_WAITING,
    MSG_FILES, MSG_PORT,
};

use refusal::Refusal;
use stream::{HostSocket, StreamEnd, Streams};

use crate::fs::tty::job;
use crate::fs::tty::pty::Pty;
use crate::fs::tty::termios::WinSize;
use crate::host::control::{self, Kept};
use crate::platform::machine::{HostFd, HostFiles, Machine};
use crate::state::{OfBoot, kernel};
use crate::sync::KernelCell;
use crate::task::Process;
use crate::task::ids::Pid;
use crate::task::process::{ExitStatus, Life};
use crate::task::signal::{SI_KERNEL, Signal, SignalInfo, send_to_process};

/// What was asked for from outside and is still there. Saved.
#[derive(Default)]
pub struct Remote {
    processes: KernelCell<Vec<Known>>,
    /// The sandbox' ends of what they print and read.
    pub streams: Streams,
    /// Sessions over files.
    sessions: AtomicU32,
}

/// A process that the host has asked for.
struct Known {
    pid: Pid,
    /// The host's number for it, in this boot or in the one before.
    id: u64,
    /// The host knows it in this boot.
    is_known: OfBoot<()>,
    terminal: Option<Weak<Pty>>,
    /// Its streams, or its terminal.
    ends: Vec<Weak<StreamEnd>>,
    /// How it has ended, before the host has said whether it goes on.
    ended: Option<ExitStatus>,
}

impl Known {
    /// Whether the host knows it by this number in this boot.
    fn is(&self, id: u64) -> bool {
        self.id == id && self.is_known.get().is_some()
    }
}

/// Does what a message says.
pub fn handle(message: &Kept) {
    let outcome = match message.kind {
        MSG_EXEC => read(message).map(|(exec, tail)| start_process(&exec, tail, &message.fds)),
        MSG_EXEC_SIGNAL => read(message).map(|(signal, _)| send_signal(&signal)),
        MSG_EXEC_WINDOW => read(message).map(|(window, _)| resize(&window)),
        MSG_PORT => read(message).map(|(port, _)| port::connect(&port, &message.fds)),
        MSG_EXEC_GOES_ON => read(message).map(|(which, _)| go_on(&which, &message.fds)),
        MSG_EXECS_GO_ON => {
            kernel().remote.end_others();
            Some(())
        }
        MSG_EXECS_WAIT => {
            kernel().remote.streams.wait_for_host();
            control::send(MSG_EXECS_WAITING, 0, &[], &[]);
            Some(())
        }
        MSG_FILES => {
            let tail = message.body.get(size_of::<thaw_abi::remote::Files>()..);
            tail.map(|tail| start_session(tail, &message.fds))
        }
        _ => None,
    };
    if outcome.is_none() {
        crate::console!(
            "thaw kernel: the host sent an incomplete message of kind {}",
            message.kind
        );
        close(&message.fds);
    }
}

fn read<T: Pod>(message: &Kept) -> Option<(T, &[u8])> {
    let (head, tail) = message.body.split_at_checked(size_of::<T>())?;
    Some((bytemuck::pod_read_unaligned(head), tail))
}

fn close(fds: &[i32]) {
    fds.iter().for_each(|&fd| Machine::close(HostFd::new(fd)));
}

/// Takes what the message has brought: whoever does not need the descriptors closes them.
fn start_process(exec: &Exec, tail: &[u8], fds: &[i32]) {
    if let Err(refusal) = process::start(exec, tail, fds) {
        refuse(exec.id, &refusal);
    }
}

/// Tells the host why there is no process.
fn refuse(id: u64, refusal: &Refusal) {
    // It may quote names of any length.
    const LONGEST: usize = 1024;
    let body = ExecFailed { id };
    let reason = refusal.reason.as_bytes();
    let reason = &reason[..reason.len().min(LONGEST)];
    control::send(refusal.kind, 0, bytemuck::bytes_of(&body), reason);
}

fn start_session(tail: &[u8], fds: &[i32]) {
    let &[fd] = fds else { return close(fds) };
    let sessions = &kernel().remote.sessions;
    if sessions.load(Relaxed) as usize >= FILE_SESSIONS_MAX {
        // The host knows the bound, too, and sees the end of the stream.
        return close(fds);
    }
    sessions.fetch_add(1, Relaxed);
    let user = tail.split(|&byte| byte == 0).next().unwrap_or_default();
    files::start(HostFd::new(fd), user.to_vec());
}

/// A session has ended.
fn session_ended() {
    kernel().remote.sessions.fetch_sub(1, Relaxed);
}

fn send_signal(message: &ExecSignal) {
    let (Some(signal), Some(pid)) =
        (Signal::from_number(message.number), kernel().remote.pid_of(message.id))
    else {
        return;
    };
    if message.group != 0 {
        job::signal_process_group(pid.led_group(), signal);
    } else if let Some(process) = kernel().tasks.process(pid) {
        send_to_process(&process, SignalInfo::new(signal, SI_KERNEL));
    }
}

fn resize(message: &ExecWindow) {
    let terminal = kernel().remote.terminal_of(message.id);
    if let Some(pty) = terminal {
        pty.resize(window_size(&message.window));
    }
}

fn window_size(window: &WindowSize) -> WinSize {
    WinSize { rows: window.rows, columns: window.columns, ..WinSize::default() }
}

/// A process of an earlier boot, or of an earlier daemon, goes on, with these sockets.
fn go_on(which: &ExecGoesOn, fds: &[i32]) {
    let sockets = fds.iter().map(|&fd| HostFd::new(fd));
    let Some(known) = kernel().remote.take(which.earlier, fds.len()) else {
        close(fds);
        return refuse(which.id, &"it has ended".into());
    };
    for (end, fd) in known.ends.iter().zip(sockets) {
        match end.upgrade() {
            Some(end) => end.go_on(fd),
            // Nobody has it open any more, which the host sees.
            None => drop(HostSocket::new(fd)),
        }
    }
    let started = ExecStarted { id: which.id, pid: known.pid.number(), reserved: 0 };
    control::send(MSG_EXEC_STARTED, 0, bytemuck::bytes_of(&started), &[]);
    match known.ended {
        Some(status) => tell_end(which.id, status),
        None => {
            let known = Known { id: which.id, is_known: OfBoot::new(()), ..known };
            kernel().remote.processes.borrow_mut().push(known);
        }
    }
}

/// The last thread of a process has ended: the host is told if it has asked for it.
pub fn process_ended(process: &Process) {
    let remote = &kernel().remote;
    let Some(known) = remote.forget(process.pid) else { return };
    let Life::Zombie(status) = process.life.get() else { return };
    if known.is_known.get().is_some() {
        tell_end(known.id, status);
    } else if remote.streams.are_awaited() {
        remote.processes.borrow_mut().push(Known { ended: Some(status), ..known });
    }
}

fn tell_end(id: u64, status: ExitStatus) {
    let (code, signal) = match status {
        ExitStatus::Exited(code) => (code.into(), 0),
        ExitStatus::Killed(signal) => (0, signal.number()),
    };
    let ended = ExecEnded { id, code, signal };
    control::send(MSG_EXEC_ENDED, 0, bytemuck::bytes_of(&ended), &[]);
}

impl Remote {
    /// Notes a process that is about to run; `false` if there are too many.
    fn note(
        &self,
        pid: Pid,
        id: u64,
        terminal: Option<&Arc<Pty>>,
        ends: Vec<Weak<StreamEnd>>,
    ) -> bool {
        let mut processes = self.processes.borrow_mut();
        let has_room = processes.len() < EXECS_MAX;
        if has_room {
            let (terminal, is_known) = (terminal.map(Arc::downgrade), OfBoot::new(()));
            processes.push(Known { pid, id, is_known, terminal, ends, ended: None });
        }
        has_room
    }

    fn forget(&self, pid: Pid) -> Option<Known> {
        let mut processes = self.processes.borrow_mut();
        let at = processes.iter().position(|known| known.pid == pid)?;
        Some(processes.swap_remove(at))
    }

    /// Takes out a process that has so many streams: one of an earlier boot if there is one.
    fn take(&self, id: u64, streams: usize) -> Option<Known> {
        let mut processes = self.processes.borrow_mut();
        let is_it = |known: &Known| known.id == id && known.ends.len() == streams;
        let is_of_earlier = |known: &Known| known.is_known.get().is_none() && is_it(known);
        let at = processes.iter().position(is_of_earlier);
        let at = at.or_else(|| processes.iter().position(is_it))?;
        Some(processes.swap_remove(at))
    }

    /// The host has said which processes of an earlier boot go on.
    fn end_others(&self) {
        self.streams.end_others();
        self.processes.borrow_mut().retain(|known| known.ended.is_none());
    }

    fn pid_of(&self, id: u64) -> Option<Pid> {
        let processes = self.processes.borrow_mut();
        processes.iter().find(|known| known.is(id)).map(|known| known.pid)
    }

    fn terminal_of(&self, id: u64) -> Option<Arc<Pty>> {
        let processes = self.processes.borrow_mut();
        let known = processes.iter().find(|known| known.is(id))?;
        known.terminal.as_ref()?.upgrade()
    }
}
