//! Starting a process that the host asks for.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;

use thaw_abi::remote::{EXEC_TERMINAL, EXECS_MAX, Exec, ExecStarted, MSG_EXEC_STARTED};

use super::program::{self, Strings};
use super::refusal::Refusal;
use super::stream::{self, StreamEnd};
use super::terminal::{Relay, Terminal};
use super::user;
use crate::errno::Errno;
use crate::exec::{self, PreparedProgram};
use crate::fs::Context;
use crate::fs::fd_table::OnExec;
use crate::fs::file::{OpenFile, OpenFlags};
use crate::host::control;
use crate::platform::machine::{HostFd, Machine, Processes};
use crate::platform::registers::TrapFrame;
use crate::state::{OfBoot, ProcessFiles, kernel};
use crate::task::process::FIRST_PID;
use crate::task::timers::cpu_limit;
use crate::task::work::{self, Next, Work};
use crate::task::{Credentials, Process, Thread, current_process, host_process};

/// Begins to do what a message says; what comes of it is told later.
///
/// # Errors
/// Nothing comes of it.
pub fn start(exec: &Exec, tail: &[u8], fds: &[i32]) -> Result<(), Refusal> {
    // From here on they are closed whatever happens.
    let ends = fds.iter().enumerate();
    // The first is standard input, or the terminal.
    let ends: Vec<_> =
        ends.map(|(number, &fd)| StreamEnd::new(HostFd::new(fd), number == 0)).collect();
    let wanted = if exec.flags & EXEC_TERMINAL != 0 { 1 } else { 3 };
    let strings = Strings::parse(exec, tail).filter(|_| ends.len() == wanted);
    let strings = strings.ok_or("the host's message is incomplete")?;
    if !Machine::may_fork() {
        return Err("its function says `processes = 1`, so it cannot have another process; \
                    remove that from [limits] of its thaw.toml and build it again"
            .into());
    }
    let first = kernel().tasks.process(FIRST_PID).ok_or("the sandbox is about to end")?;
    let credentials = first.credentials.borrow_mut().clone();
    let files = ProcessFiles::new(kernel().fs.namespace.clone());
    let starter = Starter { exec: *exec, strings, ends, boot: OfBoot::new(()) };
    work::start(b"exec", credentials, files, Box::new(starter));
    Ok(())
}

/// What starts a process: a thread of the kernel's own.
struct Starter {
    exec: Exec,
    strings: Strings,
    ends: Vec<Arc<StreamEnd>>,
    /// In which it was asked for.
    boot: OfBoot<()>,
}

/// A process that is about to run.
struct Newborn {
    thread: Arc<Thread>,
    /// Its streams, or its terminal.
    ends: Vec<Weak<StreamEnd>>,
    /// Its terminal, if it has one.
    relay: Option<Relay>,
}

impl Work for Starter {
    fn run(self: Box<Self>) -> Next {
        let (id, boot) = (self.exec.id, self.boot);
        match (*self).make().and_then(|newborn| newborn.publish(id, boot)) {
            Ok(Some(relay)) => relay.run(),
            // In a copy nobody waits for it, or knows of it.
            Err(refusal) if boot.get().is_some() => super::refuse(id, &refusal),
            Ok(None) | Err(_) => {}
        }
        Next::End
    }
}

impl Starter {
    /// Makes the process, of which nobody knows yet.
    fn make(self) -> Result<Newborn, Refusal> {
        let Self { exec, strings, ends, .. } = self;
        let first = kernel().tasks.process(FIRST_PID).ok_or("the sandbox is about to end")?;
        let own = current_process();
        own.enter_mounts(&first);
        let mut variables = Vec::new();
        if !strings.user.is_empty() {
            let user = find_user(&strings.user)?;
            *own.credentials.borrow_mut() = user.credentials;
            variables = user.environment;
        }
        let context = Context::current();
        let cwd = program::directory(&context, &strings.workdir)?;
        own.fs().borrow_mut().cwd = cwd.clone();
        let mut context = context;
        context.cwd = cwd;
        let inherited: Vec<Vec<u8>> = {
            let bytes = first.environment.borrow_mut();
            bytes.split(|&byte| byte == 0).map(<[u8]>::to_vec).collect()
        };
        let envp = program::merged(&[&inherited, &variables, &strings.envp]);
        let name = strings.argv.first().cloned().unwrap_or_default();
        let program = program::find(&context, strings.argv, envp)?;
        let process = new_process(&first, &own.credentials.borrow_mut(), context);
        let refused = |error| Refusal::of_program(&name, error);
        let prepared = program.prepare(&process).map_err(refused)?;
        let after = prepared.credentials(&process.credentials.borrow_mut()).map_err(refused)?;
        exec::take_credentials(&process, after);
        let weak = ends.iter().map(Arc::downgrade).collect();
        let relay = open_streams(&exec, &process, ends)?;
        let thread = Thread::new(process.pid.main_thread(), process, TrapFrame::zeroed());
        let loader = Loader { id: exec.id, boot: OfBoot::new(()), name, program: prepared };
        *thread.work.borrow_mut() = Some(Box::new(loader));
        Ok(Newborn { thread, ends: weak, relay })
    }
}

fn find_user(name: &[u8]) -> Result<user::User, String> {
    user::find(&Context::current(), name).map_err(|error| {
        let name = name.escape_ascii();
        match error {
            Errno::ENOENT => alloc::format!(
                "/etc/passwd and /etc/group of the sandbox do not know {name}; name another user, \
                 or its number"
            ),
            error => alloc::format!("the user {name} cannot be looked up: {}", error.name()),
        }
    })
}

/// A process as the first one, but for its user and its directory.
fn new_process(first: &Process, credentials: &Credentials, context: Context) -> Arc<Process> {
    let files = ProcessFiles::new(kernel().fs.namespace.clone());
    files.enter_mounts(first);
    files.fs().borrow_mut().cwd = context.cwd.clone();
    let pid = kernel().tasks.new_id().process();
    let process = Process::from_outside(pid, credentials.clone(), files);
    process.limits.set(first.limits.get());
    let process = Arc::new(process);
    cpu_limit::watch(&process);
    process
}

/// Gives the process its standard streams; its terminal, if it is to have one.
fn open_streams(
    exec: &Exec,
    process: &Arc<Process>,
    mut ends: Vec<Arc<StreamEnd>>,
) -> Result<Option<Relay>, Refusal> {
    if exec.flags & EXEC_TERMINAL == 0 {
        for (number, end) in ends.into_iter().enumerate() {
            let flags = if number == 0 { OpenFlags::empty() } else { OpenFlags::WRONLY };
            give(process, stream::open(end, flags));
        }
        return Ok(None);
    }
    let owner = {
        let credentials = process.credentials.borrow_mut();
        (credentials.uid, credentials.gid)
    };
    let no_terminal = |_| "the sandbox has too many terminals; close some";
    let terminal = Terminal::new(owner, &exec.window).map_err(no_terminal)?;
    let file = terminal.open_for(process.session()).map_err(no_terminal)?;
    (0..3).for_each(|_| give(process, file.clone()));
    Ok(ends.pop().map(|end| Relay { terminal, end, leader: process.clone() }))
}

fn give(process: &Process, file: Arc<OpenFile>) {
    // A table with three files at most has room for another one.
    let _ = process.files.borrow_mut().borrow_mut().insert(file, OnExec::Keep, u64::MAX);
}

impl Newborn {
    /// Has the process run in a host process of its own; its terminal, if it has one.
    /// There is none if this is a copy by now.
    fn publish(self, id: u64, boot: OfBoot<()>) -> Result<Option<Relay>, Refusal> {
        let process = self.thread.process.clone();
        let terminal = self.relay.as_ref().map(|relay| &relay.terminal.pty);
        let remote = &kernel().remote;
        let outcome = match boot.get() {
            Some(()) if remote.note(process.pid, id, terminal, self.ends) => {
                host_process::fork_empty(process.mm(), &self.thread)
            }
            Some(()) => Err(Errno::EUSERS),
            None => Err(Errno::ESTALE),
        };
        let Err(error) = outcome else { return Ok(self.relay) };
        // Nobody has ever known it.
        drop(kernel().remote.forget(process.pid));
        process.mm().detach();
        crate::task::process::Resources::release(&**process);
        let reason = match error {
            Errno::EUSERS => alloc::format!(
                "it has {EXECS_MAX} processes already that were started from outside; wait until \
                 one has ended"
            ),
            Errno::EAGAIN => "it has as many processes as `processes` in [limits] allows; end \
                              some, or raise that"
                .into(),
            error => alloc::format!("no process can be made for it: {}", error.name()),
        };
        Err(reason.into())
    }
}

/// What the new process does first, in its own host process: it loads its program.
struct Loader {
    id: u64,
    /// In which the host has this number for it.
    boot: OfBoot<()>,
    name: Vec<u8>,
    program: PreparedProgram,
}

impl Work for Loader {
    fn run(self: Box<Self>) -> Next {
        let Self { id, boot, name, program } = *self;
        let thread = crate::task::current();
        if boot.get().is_some() {
            let started = ExecStarted { id, pid: thread.process.pid.number(), reserved: 0 };
            control::send(MSG_EXEC_STARTED, 0, bytemuck::bytes_of(&started), &[]);
        }
        match program.load(&thread.process) {
            Ok(frame) => {
                thread.frame().set(frame);
                exec::reset_thread(&thread, &name);
                Next::EnterGuest
            }
            Err(error) => {
                let name = name.escape_ascii();
                crate::console!("thaw kernel: {name} cannot be loaded: {error:?}");
                Next::Killed
            }
        }
    }
}
