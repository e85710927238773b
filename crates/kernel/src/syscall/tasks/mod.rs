//! System calls on processes, threads and their attributes.

mod capabilities;
mod children;
pub mod clone;
pub mod comparing;
mod credentials;
pub mod futex;
mod groups;
pub mod namespaces;
pub mod pidfd;
pub mod posix_timers;
pub mod ptrace;
mod scheduling;
pub mod seccomp;
pub mod signals;
pub mod timers;

use alloc::borrow::Cow;
pub use capabilities::{capget, capset};
pub use children::*;
pub use credentials::*;
pub use groups::*;
pub use scheduling::*;

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::Ordering::Relaxed;

use crate::args::{Fd, Flags, PidNumber, SignalNumber, UserPtr, UserString, Word};
use crate::errno::{Errno, Result};
use crate::exec::{ARGUMENTS_MAX, Program, missing};
use crate::fs::Context;
use crate::fs::walk::Follow;
use crate::platform::machine::{Machine, Memory, ThreadState, Threads};
use crate::platform::user::UserAddress;
use crate::state::{RELEASE, VERSION, kernel};
use crate::task::ids::Tid;
use crate::task::process::{RLIMIT_CPU, ResourceLimit};
use crate::task::ptrace::access;
use crate::task::signal::Signal;
use crate::task::timers::cpu_limit;
use crate::task::usage::LOAD_BITS;
use crate::task::uts::UtsNamespace;
use crate::task::{Capabilities, Process, current, current_process, exit, fork_id};

/// getpid(2).
pub fn getpid() -> Result<u64> {
    let process = current_process();
    let stack = UserAddress(current().frame().rsp());
    let generation = kernel().generation.get();
    Ok(fork_id::process_id(&process, generation, stack))
}

/// gettid(2).
pub fn gettid() -> Result<Tid> {
    Ok(current().tid())
}

/// exit_group(2).
pub fn exit_group(code: u32) -> Result<()> {
    exit::exit_group(code)
}

/// exit(2).
pub fn exit(code: u32) -> Result<()> {
    exit::exit_thread(crate::task::process::ExitStatus::Exited(code as u8))
}

/// execve(2).
pub fn execve(path: UserString, argv: UserAddress, envp: UserAddress) -> Result<u64> {
    let context = Context::current();
    let start = context.cwd.clone();
    execute(&context, &start, path, argv, envp, Follow::Yes)
}

/// execveat(2).
pub fn execveat(
    dirfd: Fd,
    path: UserString,
    argv: UserAddress,
    envp: UserAddress,
    Flags(flags): Flags,
) -> Result<u64> {
    const AT_SYMLINK_NOFOLLOW: u32 = 0x100;
    const AT_EMPTY_PATH: u32 = 0x1000;
    if flags & !(AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH) != 0 {
        return Err(Errno::EINVAL);
    }
    let context = Context::current();
    if flags & AT_EMPTY_PATH != 0 && path.read_path()?.is_empty() {
        let (argv, envp) = read_arguments(argv, envp)?;
        let program = Program::open_descriptor(&context, dirfd, argv, envp)?;
        let name = program.name.clone();
        return crate::exec::replace_program(program, &name);
    }
    let start = match path.read_path()?.first() {
        None => return Err(Errno::ENOENT),
        Some(b'/') => Cow::Borrowed(&context.root),
        Some(_) => context.start(dirfd)?,
    };
    let follow = if flags & AT_SYMLINK_NOFOLLOW != 0 { Follow::No } else { Follow::Yes };
    execute(&context, &start, path, argv, envp, follow)
}

fn execute(
    context: &Context,
    start: &crate::fs::path::Path,
    path: UserString,
    argv: UserAddress,
    envp: UserAddress,
    follow: Follow,
) -> Result<u64> {
    let path = path.read_path()?;
    let (argv, envp) = read_arguments(argv, envp)?;
    let program = Program::open(context, start, &path, follow, argv, envp);
    let done = program.and_then(|program| crate::exec::replace_program(program, &path));
    done.inspect_err(|&error| missing::not_executed(context, start, &path, error))
}

/// The strings of an `argv` or an environment, without their ends.
type Strings = Vec<Vec<u8>>;

/// Reads arguments and environment. There is always an `argv[0]`.
fn read_arguments(argv: UserAddress, envp: UserAddress) -> Result<(Strings, Strings)> {
    let mut budget = ARGUMENTS_MAX;
    let mut argv = read_strings(argv, &mut budget)?;
    let envp = read_strings(envp, &mut budget)?;
    if argv.is_empty() {
        argv.push(Vec::new());
    }
    Ok((argv, envp))
}

/// Reads a NULL-terminated array of strings; `E2BIG` beyond the budget.
fn read_strings(array: UserAddress, budget: &mut usize) -> Result<Vec<Vec<u8>>> {
    let mut strings = Vec::new();
    if array.is_null() {
        return Ok(strings);
    }
    for i in 0.. {
        let pointer: u64 = array.offset(i * 8).read()?;
        if pointer == 0 {
            break;
        }
        let string = UserAddress(pointer).read_string(*budget).map_err(|error| match error {
            Errno::ENAMETOOLONG => Errno::E2BIG,
            error => error,
        })?;
        *budget = budget.checked_sub(string.len() + 9).ok_or(Errno::E2BIG)?;
        strings.push(string);
    }
    Ok(strings)
}

/// set_tid_address(2).
pub fn set_tid_address(at: UserPtr<u32>) -> Result<Tid> {
    let thread = current();
    thread.clear_child_tid.store(at.0.0, Relaxed);
    Ok(thread.tid())
}

/// set_robust_list(2).
pub fn set_robust_list(UserAddress(head): UserAddress, size: usize) -> Result<()> {
    const HEAD_SIZE: usize = 24;
    if size != HEAD_SIZE {
        return Err(Errno::EINVAL);
    }
    current().robust_list.store(head, Relaxed);
    Ok(())
}

/// get_robust_list(2).
pub fn get_robust_list(tid: PidNumber, head: UserPtr<u64>, size: UserPtr<u64>) -> Result<()> {
    let thread = tid.thread()?;
    access::check(&thread.process)?;
    head.write(&thread.robust_list.load(Relaxed))?;
    size.write(&24u64)
}

// What arch_prctl(2) is asked for, of the caller and of a tracee.
const ARCH_SET_GS: u32 = 0x1001;
const ARCH_SET_FS: u32 = 0x1002;
const ARCH_GET_FS: u32 = 0x1003;
const ARCH_GET_GS: u32 = 0x1004;

/// arch_prctl(2).
pub fn arch_prctl(Flags(code): Flags, argument: UserAddress) -> Result<i32> {
    const ARCH_GET_CPUID: u32 = 0x1011;
    const ARCH_SET_CPUID: u32 = 0x1012;
    match code {
        ARCH_SET_FS if argument.0 >= thaw_abi::layout::GUEST_MAX => Err(Errno::EPERM),
        ARCH_SET_FS => {
            Machine::set_fs_base(argument.0);
            Ok(0)
        }
        ARCH_GET_FS => {
            argument.write(&Machine::fs_base())?;
            Ok(0)
        }
        ARCH_GET_GS => {
            argument.write(&current().context.gs_base())?;
            Ok(0)
        }
        ARCH_SET_GS if argument.0 >= thaw_abi::layout::GUEST_MAX => Err(Errno::EPERM),
        ARCH_SET_GS => {
            current().context.set_gs_base(argument.0);
            Machine::keep_own_gs(&current().context);
            Ok(0)
        }
        ARCH_GET_CPUID => Ok(1),
        ARCH_SET_CPUID => Err(Errno::ENODEV),
        _ => Err(Errno::EINVAL),
    }
}

/// `struct new_utsname`: six fields of 65 bytes.
pub fn uname(to: UserAddress) -> Result<()> {
    let mut name = [0u8; 6 * 65];
    let names = current_process().namespaces().uts.clone();
    let hostname = names.hostname.borrow_mut().clone();
    let domainname = names.shown_domainname();
    let fields: [&[u8]; 6] =
        [b"Linux", &hostname, RELEASE.as_bytes(), VERSION.as_bytes(), b"x86_64", &domainname];
    for (i, field) in fields.iter().enumerate() {
        let len = field.len().min(64);
        name[i * 65..i * 65 + len].copy_from_slice(&field[..len]);
    }
    to.write_bytes(&name)
}

/// sethostname(2).
pub fn sethostname(from: UserString, len: usize) -> Result<()> {
    let names = current_process().namespaces().uts.clone();
    *names.hostname.borrow_mut() = new_name(&names, from, len)?;
    Ok(())
}

/// setdomainname(2).
pub fn setdomainname(from: UserString, len: usize) -> Result<()> {
    let names = current_process().namespaces().uts.clone();
    *names.domainname.borrow_mut() = Some(new_name(&names, from, len)?);
    Ok(())
}

fn new_name(names: &UtsNamespace, from: UserString, len: usize) -> Result<Vec<u8>> {
    let owner = names.common.owner();
    current_process().credentials.borrow_mut().require_in(owner, Capabilities::SYS_ADMIN)?;
    if len > 64 {
        return Err(Errno::EINVAL);
    }
    let mut name = alloc::vec![0; len];
    from.read_bytes(&mut name)?;
    Ok(name)
}

/// `struct sysinfo`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct SystemInfo {
    uptime: i64,
    loads: [u64; 3],
    total_ram: u64,
    free_ram: u64,
    shared_ram: u64,
    buffer_ram: u64,
    total_swap: u64,
    free_swap: u64,
    processes: u16,
    pad: [u16; 3],
    total_high: u64,
    free_high: u64,
    unit: u32,
    tail: u32,
}

/// Binary places of `SystemInfo::loads` (`SI_LOAD_SHIFT`).
const LOADS_SHIFT: u32 = 16;

/// sysinfo(2).
pub fn sysinfo(to: UserAddress) -> Result<()> {
    let total = kernel().memory_total();
    let used = crate::mm::heap::bytes_in_use() + kernel().pages.borrow_mut().bytes_in_use();
    let info = SystemInfo {
        uptime: (crate::time::clock::boottime_ns() / 1_000_000_000) as i64,
        loads: kernel().tasks.usage.loads().map(|load| load << (LOADS_SHIFT - LOAD_BITS)),
        total_ram: total,
        free_ram: total.saturating_sub(used),
        processes: kernel().tasks.threads.borrow_mut().len() as u16,
        unit: 1,
        ..bytemuck::Zeroable::zeroed()
    };
    to.write(&info)
}

/// prctl(2).
pub fn prctl(
    option: u32,
    argument: UserAddress,
    Word(second): Word,
    Word(third): Word,
    Word(fourth): Word,
) -> Result<u64> {
    const PR_SET_PDEATHSIG: u32 = 1;
    const PR_GET_PDEATHSIG: u32 = 2;
    const PR_GET_DUMPABLE: u32 = 3;
    const PR_SET_DUMPABLE: u32 = 4;
    const PR_SET_NAME: u32 = 15;
    const PR_GET_NAME: u32 = 16;
    const PR_GET_TSC: u32 = 25;
    const PR_SET_TSC: u32 = 26;
    /// The counter can be read.
    const PR_TSC_ENABLE: u32 = 1;
    const PR_SET_TIMERSLACK: u32 = 29;
    const PR_GET_TIMERSLACK: u32 = 30;
    const PR_SET_CHILD_SUBREAPER: u32 = 36;
    const PR_GET_CHILD_SUBREAPER: u32 = 37;
    const PR_SET_VMA: u32 = 0x5356_4d41;
    let thread = current();
    match option {
        PR_SET_NAME => {
            let mut name = [0u8; 16];
            // The name ends at its terminator or after 15 bytes.
            for (i, byte) in name[..15].iter_mut().enumerate() {
                *byte = argument.offset(i as u64).read()?;
                if *byte == 0 {
                    break;
                }
            }
            thread.name.set(name);
            Ok(0)
        }
        PR_GET_NAME => {
            argument.write_bytes(&thread.name.get())?;
            Ok(0)
        }
        PR_GET_DUMPABLE => Ok(thread.process.dumpable.get() as u64),
        PR_SET_DUMPABLE if argument.0 > 1 => Err(Errno::EINVAL),
        PR_SET_DUMPABLE => {
            thread.process.dumpable.set(argument.0 == 1);
            Ok(0)
        }
        PR_SET_PDEATHSIG => {
            let number = u32::try_from(argument.0).map_err(|_| Errno::EINVAL)?;
            thread.process.parent_death_signal.set(SignalNumber(number).or_probe()?);
            Ok(0)
        }
        PR_GET_PDEATHSIG => {
            let signal = thread.process.parent_death_signal.get();
            argument.write(&signal.map_or(0, Signal::number)).map(|()| 0)
        }
        PR_SET_CHILD_SUBREAPER => {
            thread.process.is_subreaper.set(argument.0 != 0);
            Ok(0)
        }
        PR_GET_CHILD_SUBREAPER => {
            argument.write(&(thread.process.is_subreaper.get() as i32))?;
            Ok(0)
        }
        PR_GET_TIMERSLACK => Ok(thread.timer_slack.get().current_ns),
        PR_SET_TIMERSLACK => {
            thread.timer_slack.set(thread.timer_slack.get().with(argument.0));
            Ok(0)
        }
        PR_GET_TSC => argument.write(&PR_TSC_ENABLE).map(|()| 0),
        PR_SET_TSC if argument.0 as u32 == PR_TSC_ENABLE => Ok(0),
        // Names of anonymous memory are optional (CONFIG_ANON_VMA_NAME).
        PR_SET_VMA => Err(Errno::EINVAL),
        _ => seccomp::prctl(option, argument.0, UserPtr::new(UserAddress(second)))
            .or_else(|| capabilities::prctl(option, [argument.0, second, third, fourth]))
            .unwrap_or(Err(Errno::EINVAL)),
    }
}

/// prlimit64(2).
pub fn prlimit64(
    pid: PidNumber,
    resource: usize,
    new: UserAddress,
    old: UserAddress,
) -> Result<()> {
    let process = pid.process()?;
    if !may_look_at_limits(&process) {
        return Err(Errno::EPERM);
    }
    limit(&process, resource, new, old)
}

/// Whether the running process may read and change the limits of another (`check_prlimit_permission`
/// in kernel/sys.c).
fn may_look_at_limits(process: &Process) -> bool {
    let own = current_process();
    if own.pid == process.pid {
        return true;
    }
    let own = own.credentials.borrow_mut().clone();
    let other = process.credentials.borrow_mut();
    own.can(Capabilities::SYS_RESOURCE)
        || other.users() == [own.uid; 3] && other.groups_of_process() == [own.gid; 3]
}

/// getrlimit(2).
pub fn getrlimit(resource: usize, to: UserAddress) -> Result<()> {
    limit(&current().process, resource, UserAddress::NULL, to)
}

/// setrlimit(2).
pub fn setrlimit(resource: usize, from: UserAddress) -> Result<()> {
    limit(&current().process, resource, from, UserAddress::NULL)
}

fn limit(
    process: &Arc<Process>,
    resource: usize,
    new: UserAddress,
    old: UserAddress,
) -> Result<()> {
    let current_limit = *process.limits.borrow_mut().get(resource).ok_or(Errno::EINVAL)?;
    if !new.is_null() {
        let wanted: ResourceLimit = new.read()?;
        if wanted.current > wanted.maximum {
            return Err(Errno::EINVAL);
        }
        let privileged = current_process().credentials.borrow_mut().can(Capabilities::SYS_RESOURCE);
        let above_files =
            resource == crate::task::process::RLIMIT_NOFILE && wanted.maximum > 1 << 20;
        if above_files || wanted.maximum > current_limit.maximum && !privileged {
            return Err(Errno::EPERM);
        }
        process.limits.borrow_mut()[resource] = wanted;
        if resource == RLIMIT_CPU {
            cpu_limit::watch(process);
        }
    }
    old.write_if_some(&current_limit)
}

/// personality(2): kept and given back.
pub fn personality(Flags(persona): Flags) -> Result<u64> {
    const ONLY_ASKS: u32 = u32::MAX;
    let process = current_process();
    let before = process.personality.get();
    if persona != ONLY_ASKS {
        process.personality.set(persona);
    }
    Ok(before.into())
}

/// reboot(2): nobody has the right to it.
pub fn reboot(Flags(first): Flags, Flags(second): Flags, Flags(command): Flags) -> Result<()> {
    const FIRST: u32 = 0xfee1_dead;
    const SECOND: [u32; 4] = [0x2812_1969, 0x0512_1996, 0x1604_1998, 0x2011_2000];
    /// `LINUX_REBOOT_CMD_*`: CAD_OFF, RESTART, POWER_OFF, KEXEC, CAD_ON, RESTART2, HALT, SW_SUSPEND.
    const COMMANDS: [u32; 8] = [
        0,
        0x0123_4567,
        0x4321_fedc,
        0x4558_4543,
        0x89ab_cdef,
        0xa1b2_c3d4,
        0xcdef_0123,
        0xd000_fce2,
    ];
    current_process().credentials.borrow_mut().require(Capabilities::SYS_ADMIN)?;
    let is_known = first == FIRST && SECOND.contains(&second) && COMMANDS.contains(&command);
    Err(if is_known { Errno::EPERM } else { Errno::EINVAL })
}

/// membarrier(2): with one virtual CPU every barrier is in place; otherwise the
/// host is made to interrupt all processors on which the sandbox runs.
pub fn membarrier(command: i32, _: UserAddress, _: u64) -> Result<u64> {
    const QUERY: i32 = 0;
    const SUPPORTED: u64 = 1 | 2 | 4 | 8 | 16;
    match command {
        QUERY => Ok(SUPPORTED),
        command if command > 0 && SUPPORTED & command as u64 == command as u64 => {
            if crate::task::host_process::own_host_process().vcpu_count() > 1 {
                Machine::barrier()?;
            }
            Ok(0)
        }
        _ => Err(Errno::EINVAL),
    }
}

/// getrandom(2).
pub fn getrandom(to: UserAddress, len: usize, Flags(flags): Flags) -> Result<usize> {
    const NONBLOCK: u32 = 1;
    const RANDOM: u32 = 2;
    const INSECURE: u32 = 4;
    if flags & !(NONBLOCK | RANDOM | INSECURE) != 0
        || flags & (RANDOM | INSECURE) == RANDOM | INSECURE
    {
        return Err(Errno::EINVAL);
    }
    let len = len.min(i32::MAX as usize);
    let mut done = 0;
    let mut chunk = [0u8; 256];
    while done < len {
        let step = (len - done).min(chunk.len());
        kernel().random.borrow_mut().fill(&mut chunk[..step]);
        to.offset(done as u64).write_bytes(&chunk[..step])?;
        done += step;
    }
    Ok(len)
}
