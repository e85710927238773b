//! `execve`: loading programs.

mod credentials;
pub mod elf;
pub mod missing;
pub mod script;
pub mod stack;
pub mod vdso;

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::Ordering::Relaxed;

use credentials::Privileges;

use crate::args::Fd;
use crate::errno::{Errno, Result};
use crate::fs::Context;
use crate::fs::file::OpenFile;
use crate::fs::open::{open_program, open_program_at};
use crate::fs::path::Path;
use crate::fs::walk::Follow;
use crate::io::Sink;
use crate::ipc::mqueue::notification;
use crate::platform::machine::{Machine, SystemCallSites, ThreadState, Threads};
use crate::platform::registers::TrapFrame;
use crate::state::kernel;
use crate::task::thread::{Thread, current};
use crate::task::wait::wait_uninterruptibly;
use crate::task::{Credentials, Process, exit, host_process, ptrace, signal};

/// Most bytes of arguments and environment together: a quarter of the default
/// stack limit, as on Linux (execve(2), "Limits on size").
pub const ARGUMENTS_MAX: usize = 2 << 20;

/// A program to run.
pub struct Program {
    /// The executable, or the interpreter of a script.
    pub file: Arc<OpenFile>,
    /// What the program sees as `AT_EXECFN`.
    pub name: Vec<u8>,
    /// Arguments.
    pub argv: Vec<Vec<u8>>,
    /// Environment.
    pub envp: Vec<Vec<u8>>,
}

impl Program {
    /// Opens a program by path; scripts become a call of their interpreter.
    pub fn open(
        context: &Context,
        start: &Path,
        path: &[u8],
        follow: Follow,
        argv: Vec<Vec<u8>>,
        envp: Vec<Vec<u8>>,
    ) -> Result<Self> {
        let file = open_program(context, start, path, follow)?;
        let program = Self { file, name: path.to_vec(), argv, envp };
        script::resolve(context, program)
    }

    /// Opens the program behind a descriptor (execveat(2), `AT_EMPTY_PATH`).
    pub fn open_descriptor(
        context: &Context,
        fd: Fd,
        argv: Vec<Vec<u8>>,
        envp: Vec<Vec<u8>>,
    ) -> Result<Self> {
        let place = fd.file()?.path.clone().ok_or(Errno::EACCES)?;
        let file = open_program_at(context, place)?;
        let name = alloc::format!("/dev/fd/{}", fd.0).into_bytes();
        script::resolve(context, Self { file, name, argv, envp })
    }

    /// Does all that can fail while the old program is still there: reads the headers of
    /// the program and its interpreter and counts the arguments.
    pub fn prepare(self, process: &Process) -> Result<PreparedProgram> {
        let main = elf::Object::read(&self.file)?;
        let interpreter = match &main.interpreter {
            Some(path) => {
                let context = Context::of(process);
                let file = open_program(&context, &context.root, path, Follow::Yes)?;
                Some((elf::Object::read(&file)?, file))
            }
            None => None,
        };
        let arguments: usize = self.argv.iter().chain(&self.envp).map(|s| s.len() + 9).sum();
        if arguments > ARGUMENTS_MAX {
            return Err(Errno::E2BIG);
        }
        Ok(PreparedProgram { program: self, main, interpreter })
    }
}

/// A program of which all is known that execve(2) can refuse.
pub struct PreparedProgram {
    program: Program,
    main: elf::Object,
    interpreter: Option<(elf::Object, Arc<OpenFile>)>,
}

impl PreparedProgram {
    /// Who executes it with these credentials becomes; `EPERM` and `EINVAL` because of the
    /// capabilities of the file.
    pub fn credentials(&self, old: &Credentials) -> Result<Credentials> {
        let privileges = match &self.program.file.path {
            // Its set-user-ID bits and capabilities have no effect (mount(2)).
            Some(path) if !path.may_give_privileges(&old.user_namespace) => Privileges::default(),
            Some(path) => Privileges::of(&**path.inode())?,
            None => Privileges::default(),
        };
        credentials::after_exec(old, &privileges)
    }

    /// The same for a process whose tracer may not have what the file gives (`LSM_UNSAFE_PTRACE` in
    /// security/commoncap.c): it gets nothing of that.
    fn credentials_held_back(&self, process: &Process) -> Credentials {
        let old = process.credentials.borrow_mut().clone();
        let held_back = Credentials { no_new_privileges: true, ..old.clone() };
        match self.credentials(&held_back) {
            Ok(new) => Credentials { no_new_privileges: old.no_new_privileges, ..new },
            Err(_) => old,
        }
    }

    /// Replaces the process' memory with the program and returns the registers
    /// it starts with. After an error there is no program to return to.
    pub fn load(self, process: &Process) -> Result<TrapFrame> {
        let Self { program, main, interpreter } = self;
        process.mm().clear()?;
        process.mm().gate.create(vdso::slots())?;
        let layout = stack::Layout::of(process);
        process.mm().set_mmap_top(layout.mmap_top);
        let loaded = main.map(process, &program.file, elf::Role::Program)?;
        process.mm().set_brk_start(layout.brk_start(loaded.end));
        let (entry, interpreter_base) = match &interpreter {
            Some((object, file)) => {
                let at = object.map(process, file, elf::Role::Interpreter)?;
                (at.entry, at.base)
            }
            None => (loaded.entry, 0),
        };
        let vdso = vdso::map(process)?;
        let rsp = stack::build(process, &program, &loaded, interpreter_base, vdso, &layout)?;
        process.executable.borrow_mut().clone_from(&program.file.path);
        Ok(TrapFrame::at(entry, rsp))
    }
}

/// Replaces the program of the running process (execve(2)). An error leaves the old
/// one as it was; the process ends if the new one fails to load after that.
pub fn replace_program(program: Program, path: &[u8]) -> Result<u64> {
    let thread = current();
    let process = &thread.process;
    let prepared = program.prepare(process)?;
    let credentials = prepared.credentials(&process.credentials.borrow_mut())?;
    // Nothing but a host that has no process left fails from here on.
    let old = ptrace::events::for_tracer(thread.tid());
    become_only_thread(&thread)?;
    exit::leave_memory(&thread);
    if process.mm().users() > 1 {
        host_process::move_to_new_space()?;
    }
    exit::release_memory(process);
    // Nothing waits from here on until the new program has its memory: nobody begins to trace it in between.
    let held_back = ptrace::holds_back(&thread).then(|| prepared.credentials_held_back(process));
    take_credentials(process, held_back.unwrap_or(credentials));
    process.mm().begin_program();
    let frame = match prepared.load(process) {
        Ok(frame) => frame,
        Err(error) => {
            crate::console!("thaw kernel: {} cannot be loaded: {error:?}", path.escape_ascii());
            exit::killed_by(signal::SIGKILL)
        }
    };
    crate::state::kernel().aio.remove_all(process);
    // execve(2): a table that is shared with other processes is copied.
    process.unshare_files();
    let closed = process.files.borrow_mut().borrow_mut().close_on_exec();
    for open in &closed {
        open.release_record_locks();
        notification::descriptor_closed(process, open);
    }
    drop(closed);
    reset_thread(&thread, path);
    thread.context.set_fs_base(0);
    Machine::set_fs_base(0);
    thread.context.set_gs_base(0);
    Machine::forget_own_gs();
    thread.context.reset_fpu();
    thread.frame().set(frame);
    ptrace::events::executed(old);
    Ok(frame.rax)
}

/// What a user may not ask of a program that has more rights (`PER_CLEAR_ON_SETID` in Linux' personality.h):
/// `READ_IMPLIES_EXEC`, `ADDR_COMPAT_LAYOUT`, `MMAP_PAGE_ZERO`, `ADDR_NO_RANDOMIZE`.
const PERSONALITY_OF_USER: u32 = 0x0040_0000 | 0x0020_0000 | 0x0010_0000 | 0x0004_0000;

/// Gives a process what a program makes of it. Nobody looks into one that has more than before
/// (`PR_GET_DUMPABLE`, prctl(2)).
pub fn take_credentials(process: &Process, new: Credentials) {
    let mut own = process.credentials.borrow_mut();
    process.dumpable.set(!new.has_other_ids() && own.permitted.contains(new.permitted));
    *process.program_users.borrow_mut() = own.user_namespace.clone();
    if new.is_secure {
        process.personality.set(process.personality.get() & !PERSONALITY_OF_USER);
    }
    *own = new;
}

/// Ends all other threads of the process; the running one becomes the main
/// thread, whichever it was (execve(2), "Effect on process attributes").
fn become_only_thread(thread: &Thread) -> Result<()> {
    let process = &thread.process;
    if thread.is_dying() {
        // Another thread does the same or ends the process, and waits for this one.
        return Err(Errno::EAGAIN);
    }
    exit::end_threads(process, Some(thread));
    wait_uninterruptibly(&process.thread_ended, || {
        (process.threads.borrow_mut().len() == 1).then_some(Ok(()))
    })?;
    let main = process.pid.main_thread();
    let old = thread.tid();
    if old != main {
        let mut threads = kernel().tasks.threads.borrow_mut();
        if let Some(this) = threads.remove(&thread.tid()) {
            this.set_tid(main);
            threads.insert(main, this);
        }
        drop(threads);
        process.pid_namespace.dismiss(old);
        kernel().tasks.tracees.rename_tracer(old, main);
    }
    Ok(())
}

/// What `execve` changes in the thread besides memory and registers.
pub fn reset_thread(thread: &Thread, name: &[u8]) {
    let base = name.rsplit(|&b| b == b'/').next().unwrap_or(name);
    let mut short = [0u8; 16];
    let len = base.len().min(15);
    short[..len].copy_from_slice(&base[..len]);
    thread.name.set(short);
    thread.process.family.borrow_mut().has_executed = true;
    *thread.process.executions.borrow_mut() += 1;
    thread.process.missing_program.borrow_mut().clear();
    thread.process.signals.borrow_mut().reset_for_exec();
    thread.process.posix_timers.remove_all();
    let mut signals = thread.signals.borrow_mut();
    signals.alternate_stack =
        signal::AlternateStack { flags: signal::SS_DISABLE, ..Default::default() };
    drop(signals);
    thread.clear_child_tid.store(0, Relaxed);
    thread.robust_list.store(0, Relaxed);
}

/// Reads `len` bytes at `offset`; `ENOEXEC` if the file is shorter.
fn read_exact(file: &OpenFile, offset: u64, len: usize) -> Result<Vec<u8>> {
    let mut bytes = alloc::vec![0; len];
    let mut done = 0;
    while done < len {
        let mut sink = Sink::kernel(&mut bytes[done..]);
        match file.file.read(&mut sink, offset + done as u64)? {
            0 => return Err(Errno::ENOEXEC),
            count => done += count,
        }
    }
    Ok(bytes)
}
