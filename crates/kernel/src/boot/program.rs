//! Starting a program in a fresh sandbox.
#![allow(unsafe_code)]

use alloc::sync::Arc;
use alloc::vec::Vec;

use thaw_abi::control::{
    EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND, FLAG_ENTRY_STDIN, FLAG_INIT, FLAG_SECRETS,
    FLAG_TRACE_SYSCALLS, MSG_STDIO, ROOTFS_INDEX, Start,
};
use thaw_abi::cpu::Baseline;

use crate::errno::{Errno, Result};
use crate::exec::script::Missing;
use crate::exec::{Program, script, take_credentials};
use crate::fs::fd_table::OnExec;
use crate::fs::open::open_program;
use crate::fs::walk::Follow;
use crate::fs::{CGROUP_FS, Context, FileSystems, LowerLayer, SYS_FS, Views};
use crate::host::control::{self, Message};
use crate::host::{blobs, phases, stdio};
use crate::mm::pages::PageAllocator;
use crate::mm::{heap, lazy};
use crate::net::outside;
use crate::platform::cpu;
use crate::platform::machine::{HostFd, HostFiles, Machine};
use crate::state::{Config, Kernel, ProcessFiles, install, kernel};
use crate::sync::KernelCell;
use crate::task::Credentials;
use crate::task::process::FIRST_PID;
use crate::task::{Process, Thread, host_process, scheduler};
use crate::time::random::Generator;

/// Strings of a start command.
pub(super) struct Strings {
    pub hostname: Vec<u8>,
    pub workdir: Vec<u8>,
    path: Vec<u8>,
    pub argv: Vec<Vec<u8>>,
    pub envp: Vec<Vec<u8>>,
    /// A letter and a path each.
    pub mounts: Vec<Vec<u8>>,
}

/// What the kernel shows as files.
pub fn views() -> Views {
    Views {
        proc: crate::procfs::root,
        sys: crate::sysfs::root(SYS_FS),
        cgroup: crate::sysfs::cgroup_root(CGROUP_FS),
    }
}

/// Carries out a start command: afterwards the program is ready to run.
pub fn start(message: &Message) -> Result<()> {
    heap::create()?;
    let (command, tail) = message.split::<Start>()?;
    let command = *command;
    let (strings, rest) = parse_strings(tail, &command).ok_or(Errno::EINVAL)?;
    if !rest.is_empty() {
        return Err(Errno::EINVAL);
    }
    let index = message.fds().first().copied();
    take_standard_streams(command.flags)?;
    if let Some(level) = Baseline::from_flags(command.flags) {
        // Without its own answers, the program would see the processor's.
        if !cpu::is_remembered() {
            return Err(Errno::EINVAL);
        }
        cpu::hold_to(level);
    }
    crate::syscall::trace::enable(command.flags & FLAG_TRACE_SYSCALLS != 0);

    let lower = if command.rootfs == ROOTFS_INDEX {
        let fd = HostFd::new(index.ok_or(Errno::EINVAL)?);
        map_index(fd, command.index_len)?;
        LowerLayer::index(command.index_len)?
    } else {
        LowerLayer::host()?
    };
    let mut random = Generator::new(command.seed);
    let mut boot_id = [0u8; 16];
    random.fill(&mut boot_id);
    let config = Config {
        port: command.port as u16,
        cpus: command.cpus.max(1),
        memory_limit: command.memory_limit,
        flags: command.flags,
        entry_signal: command.entry_signal,
    };
    // SAFETY: the area is the page store's, and this is the only one.
    let pages = unsafe { PageAllocator::of_sandbox() };
    let root = install(Kernel {
        window: KernelCell::new(command.window),
        ..Kernel::new(config, random, pages)
    });
    heap::set_root(root);
    *kernel().namespaces.uts.hostname.borrow_mut() = strings.hostname.clone();
    kernel().fs.set(FileSystems::new(lower, views())?);
    kernel().fs.set_boot_id(boot_id);
    let owner = (command.uid, command.gid);
    for (number, mount) in strings.mounts.iter().enumerate() {
        let Some((&kind, at)) = mount.split_first() else { return Err(Errno::EINVAL) };
        if let Err(error) = kernel().fs.mount_extra(number as u32, kind, at, owner) {
            say(b"nothing can be mounted on ", at, &[b": ", error.name().as_bytes()].concat())
        }
    }
    if command.flags & FLAG_SECRETS != 0 {
        crate::secrets::mount()?;
    }
    let thread = first_thread(&command, strings)?;
    phases::mapped();
    scheduler::start(&thread);
    Ok(())
}

/// Receives the standard streams into the numbers 0 to 2, the only ones that the
/// filter lets be read.
fn take_standard_streams(flags: u32) -> Result<()> {
    (0..3).map(HostFd::new).for_each(Machine::close);
    let message = control::receive_second_command();
    if message.kind != MSG_STDIO || message.fds() != [0, 1, 2] {
        return Err(Errno::EINVAL);
    }
    for (stream, &fd) in message.fds().iter().enumerate() {
        // A function's requests come to its copies, not to itself.
        if stream > 0 || flags & FLAG_ENTRY_STDIN == 0 {
            stdio::set(stream, fd);
        }
    }
    Ok(())
}

/// Maps the rootfs index into its window.
fn map_index(fd: HostFd, len: u64) -> Result<()> {
    lazy::map(&lazy::index(fd, len)?)?;
    let index =
        thaw_abi::rootfs::Index::parse(lazy::index_bytes(len)?).map_err(|_| Errno::EINVAL)?;
    blobs::initialize(index.blobs().len() as u32)
}

/// The strings of a start command, and what follows them.
pub(super) fn parse_strings<'a>(tail: &'a [u8], command: &Start) -> Option<(Strings, &'a [u8])> {
    let mut rest = tail;
    let mut next = || {
        let end = rest.iter().position(|&byte| byte == 0)?;
        let string = rest[..end].to_vec();
        rest = &rest[end + 1..];
        Some(string)
    };
    let (hostname, workdir, path) = (next()?, next()?, next()?);
    let mut several = |count: u32| (0..count).map(|_| next()).collect::<Option<Vec<_>>>();
    let argv = several(command.argv_count)?;
    let envp = several(command.env_count)?;
    let mounts = several(command.mount_count)?;
    Some((Strings { hostname, workdir, path, argv, envp, mounts }, rest))
}

fn first_thread(command: &Start, strings: Strings) -> Result<Arc<Thread>> {
    let namespace = kernel().fs.namespace.clone();
    let credentials = Credentials::of_user(command.uid, command.gid);
    let process = Arc::new(Process::first(credentials, ProcessFiles::new(namespace)));
    host_process::begin(process.mm());
    kernel().tasks.processes.borrow_mut().insert(FIRST_PID, process.clone());
    let main = FIRST_PID.main_thread();
    let thread =
        Thread::new(main, process.clone(), crate::platform::registers::TrapFrame::zeroed());
    process.threads.borrow_mut().push(thread.clone());
    kernel().tasks.threads.borrow_mut().insert(main, thread.clone());
    kernel().tasks.usage.forked();
    // File systems ask who is calling: let the new thread be the caller.
    thread.with_identity(|| load(&process, strings, &thread))?;
    Ok(thread)
}

/// Gives the process its working directory, and the sandbox the files that say where names
/// are looked up; how its paths are walked then.
pub(super) fn surroundings(process: &Process, workdir: &[u8]) -> Context {
    let mut context = Context::current();
    if !workdir.is_empty() {
        let Ok(cwd) = crate::fs::walk::walk(&context, &context.root, workdir, Follow::Yes) else {
            say(
                b"the working directory ",
                workdir,
                b" does not exist in the sandbox; name one that does",
            )
        };
        if !cwd.is_directory() {
            say(
                b"the working directory ",
                workdir,
                b" is not a directory in the sandbox; name one that is",
            )
        }
        process.fs().borrow_mut().cwd = cwd.clone();
        context.cwd = cwd;
    }
    let hostname = kernel().namespaces.uts.hostname.borrow_mut().clone();
    if outside::reach().v4 {
        if let Err(error) = outside::provide_files(&context, &hostname) {
            say(b"/etc/resolv.conf", b" cannot be made: ", error.name().as_bytes());
        }
    } else if let Err(error) = crate::net::resolver_files::provide_own_name(&context, &hostname) {
        say(b"/etc/hosts", b" cannot be made: ", error.name().as_bytes());
    }
    context
}

fn load(process: &Arc<Process>, strings: Strings, thread: &Arc<Thread>) -> Result<()> {
    let context = surroundings(process, &strings.workdir);
    for stream in 0..3 {
        let file = crate::fs::stdio::open(crate::fs::stdio::Stream(stream));
        process.files.borrow_mut().borrow_mut().insert(file, OnExec::Keep, u64::MAX)?;
    }
    if kernel().config.get().flags & FLAG_INIT != 0 {
        crate::remote::init::become_init(process, thread)?;
        *process.environment.borrow_mut() = crate::exec::stack::joined(&strings.envp);
        return Ok(());
    }
    let program = find_program(&context, strings)?;
    let name = program.argv.first().cloned().unwrap_or_default();
    let loaded = program.prepare(process).and_then(|program| {
        // As by execve(2), from the user that was asked for.
        let credentials = program.credentials(&process.credentials.borrow_mut())?;
        take_credentials(process, credentials);
        program.load(process)
    });
    let frame = match loaded {
        Ok(frame) => frame,
        Err(Errno::ENOEXEC) => cannot_be_run(&name,
            b" is not a program that this machine can run; give a 64-bit x86 ELF file or a script",
        ),
        Err(Errno::ENOENT) => lacks_loader(&name),
        Err(Errno::EACCES | Errno::EPERM) => say(
            b"the host does not let ",
            &name,
            b" be mapped as a program: its files lie on a file system that is mounted noexec, or a rule \
              such as MemoryDenyWriteExecute= forbids it; `thaw doctor` says which",
        ),
        Err(error) => {
            cannot_be_run(&name, &[b" cannot be started: ", error.name().as_bytes()].concat())
        }
    };
    thread.frame().set(frame);
    crate::exec::reset_thread(thread, &name);
    Ok(())
}

/// Finds the program as a shell does: names without a slash along `PATH`.
fn find_program(context: &Context, strings: Strings) -> Result<Program> {
    let name = if strings.path.is_empty() {
        strings.argv.first().cloned().ok_or(Errno::EINVAL)?
    } else {
        strings.path
    };
    let search = strings.envp.iter().find_map(|variable| variable.strip_prefix(b"PATH="));
    let search =
        search.unwrap_or(b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin").to_vec();
    let mut problem = Errno::ENOENT;
    for candidate in candidates(&name, &search) {
        let start = context.cwd.clone();
        match Program::open(
            context,
            &start,
            &candidate,
            Follow::Yes,
            strings.argv.clone(),
            strings.envp.clone(),
        ) {
            Ok(program) => return Ok(program),
            Err(Errno::ENOENT | Errno::ENOTDIR) => {
                if let Some(missing) = script::missing_interpreter(context, &candidate) {
                    lacks_interpreter(context, &search, &candidate, &missing);
                }
            }
            Err(error) => problem = error,
        }
    }
    match problem {
        Errno::ENOENT => {
            let after: [&[u8]; 3] = [
                b" does not exist in the sandbox; check the path, or add it to the root file \
                  system, for a function with `programs = [\"",
                &name,
                b"\"]` in [runtime] of thaw.toml",
            ];
            is_not_there(&name, &after.concat())
        }
        Errno::EACCES => cannot_be_run(&name, b" may not be executed; check its permissions"),
        error => cannot_be_run(&name, &[b" cannot be opened: ", error.name().as_bytes()].concat()),
    }
}

/// The program cannot start without another file, or several.
fn lacks_interpreter(context: &Context, search: &[u8], name: &[u8], missing: &Missing) -> ! {
    let mut programs = [b"\"", base_name(&missing.interpreter), b"\""].concat();
    // env(1) looks up the program that the script is for.
    if let Some(argument) = missing.looked_up()
        && !candidates(argument, search).iter().any(|at| exists(context, at))
    {
        programs.extend([b", \"", argument, b"\""].concat());
    }
    let after: [&[u8]; 5] = [
        b" needs the interpreter ",
        &missing.interpreter,
        b", which the sandbox does not have; add it to the root file system, for a function with \
          `programs = [",
        &programs,
        b"]` in [runtime] of thaw.toml",
    ];
    cannot_be_run(name, &after.concat())
}

/// The program cannot start without the dynamic linker that it names.
fn lacks_loader(name: &[u8]) -> ! {
    cannot_be_run(
        name,
        b" needs the interpreter that its ELF header names, which the sandbox does not have; add \
          it to the root file system, for a function by `programs` in [runtime] of thaw.toml",
    )
}

/// Where a program of this name may lie, as a shell finds it.
fn candidates(name: &[u8], search: &[u8]) -> Vec<Vec<u8>> {
    if name.contains(&b'/') {
        return alloc::vec![name.to_vec()];
    }
    search.split(|&b| b == b':').map(|directory| [directory, b"/", name].concat()).collect()
}

fn exists(context: &Context, path: &[u8]) -> bool {
    open_program(context, &context.cwd, path, Follow::Yes).is_ok()
}

/// The last part of a path.
fn base_name(path: &[u8]) -> &[u8] {
    path.rsplit(|&byte| byte == b'/').next().unwrap_or(path)
}

/// Tells the host that there is no such program, and ends the sandbox.
fn is_not_there(name: &[u8], after: &[u8]) -> ! {
    super::cannot_start(EXIT_NOT_FOUND, &[name, after].concat())
}

/// Tells the host why the program cannot be executed, and ends the sandbox.
fn cannot_be_run(name: &[u8], after: &[u8]) -> ! {
    super::cannot_start(EXIT_NOT_EXECUTABLE, &[name, after].concat())
}

/// Tells the host why nothing can start, and ends the sandbox.
fn say(before: &[u8], name: &[u8], after: &[u8]) -> ! {
    super::fail(&[before, name, after].concat())
}
