//! System calls on processes, threads and their attributes.

mod capabilities;
mod children;
mod credentials;
mod groups;
mod scheduling;

pub use capabilities::{capget, capset};
pub use children::*;
pub use credentials::*;
pub use groups::*;
pub use scheduling::*;

use alloc::vec::Vec;
use core::sync::atomic::Ordering::Relaxed;

use crate::args::Args;
use crate::errno::{Errno, Result};
use crate::exec::{ARGUMENTS_MAX, Program};
use crate::fs::Context;
use crate::fs::walk::Follow;
use crate::platform::user::UserAddress;
use crate::state::{RELEASE, VERSION, kernel};
use crate::task::process::ResourceLimit;
use crate::task::{Capabilities, current, current_process, exit, fork_id};

/// getpid(2).
pub fn getpid(_args: &Args) -> Result<u64> {
    let process = current_process();
    let stack = UserAddress(current().frame().rsp());
    let generation = kernel().generation.get();
    Ok(fork_id::process_id(process, generation, stack))
}

/// gettid(2).
pub fn gettid(_args: &Args) -> Result<u64> {
    Ok(current().tid() as u64)
}

/// exit_group(2).
pub fn exit_group(args: &Args) -> Result<u64> {
    exit::exit_group(args.u32(0))
}

/// exit(2).
pub fn exit(args: &Args) -> Result<u64> {
    exit::exit_thread(crate::task::process::ExitStatus::Exited(args.u32(0) as u8))
}

/// execve(2).
pub fn execve(args: &Args) -> Result<u64> {
    let context = Context::current();
    let start = context.cwd.clone();
    execute(&context, &start, args.address(0), args.address(1), args.address(2), Follow::Yes)
}

/// execveat(2).
pub fn execveat(args: &Args) -> Result<u64> {
    const AT_SYMLINK_NOFOLLOW: u32 = 0x100;
    const AT_EMPTY_PATH: u32 = 0x1000;
    let flags = args.u32(4);
    if flags & !(AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH) != 0 {
        return Err(Errno::EINVAL);
    }
    let context = Context::current();
    if flags & AT_EMPTY_PATH != 0 && args.address(1).read_path()?.is_empty() {
        let (argv, envp) = read_arguments(args.address(2), args.address(3))?;
        let program = Program::open_descriptor(&context, args.fd(0), argv, envp)?;
        let name = program.name.clone();
        return crate::exec::replace_program(program, &name);
    }
    let start = context.start(args.fd(0))?;
    let follow = if flags & AT_SYMLINK_NOFOLLOW != 0 { Follow::No } else { Follow::Yes };
    execute(&context, &start, args.address(1), args.address(2), args.address(3), follow)
}

fn execute(
    context: &Context,
    start: &crate::fs::path::Path,
    path: UserAddress,
    argv: UserAddress,
    envp: UserAddress,
    follow: Follow,
) -> Result<u64> {
    let path = path.read_path()?;
    let (argv, envp) = read_arguments(argv, envp)?;
    let program = Program::open(context, start, &path, follow, argv, envp)?;
    crate::exec::replace_program(program, &path)
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
pub fn set_tid_address(args: &Args) -> Result<u64> {
    let thread = current();
    thread.clear_child_tid.store(args.u64(0), Relaxed);
    Ok(thread.tid() as u64)
}

/// set_robust_list(2).
pub fn set_robust_list(args: &Args) -> Result<u64> {
    const HEAD_SIZE: usize = 24;
    if args.usize(1) != HEAD_SIZE {
        return Err(Errno::EINVAL);
    }
    current().robust_list.store(args.u64(0), Relaxed);
    Ok(0)
}

/// get_robust_list(2).
pub fn get_robust_list(args: &Args) -> Result<u64> {
    let thread = match args.u32(0) {
        0 => crate::task::thread::current_arc(),
        tid => kernel().tasks.thread(tid).ok_or(Errno::ESRCH)?,
    };
    args.address(1).write(&thread.robust_list.load(Relaxed))?;
    args.address(2).write(&24u64)?;
    Ok(0)
}

/// arch_prctl(2).
pub fn arch_prctl(args: &Args) -> Result<u64> {
    const ARCH_SET_GS: u32 = 0x1001;
    const ARCH_GET_GS: u32 = 0x1004;
    const ARCH_SET_FS: u32 = 0x1002;
    const ARCH_GET_FS: u32 = 0x1003;
    const ARCH_GET_CPUID: u32 = 0x1011;
    const ARCH_SET_CPUID: u32 = 0x1012;
    match args.u32(0) {
        ARCH_SET_FS if args.u64(1) >= thaw_abi::layout::GUEST_MAX => Err(Errno::EPERM),
        ARCH_SET_FS => {
            crate::platform::segment::set_fs_base(args.u64(1));
            Ok(0)
        }
        ARCH_GET_FS => {
            args.address(1).write(&crate::platform::segment::fs_base())?;
            Ok(0)
        }
        ARCH_GET_GS => {
            args.address(1).write(&current().context.gs_base())?;
            Ok(0)
        }
        ARCH_SET_GS if args.u64(1) >= thaw_abi::layout::GUEST_MAX => Err(Errno::EPERM),
        ARCH_SET_GS => {
            current().context.set_gs_base(args.u64(1));
            crate::platform::segment::close_entry_if_wanted(&current().context);
            Ok(0)
        }
        ARCH_GET_CPUID => Ok(1),
        ARCH_SET_CPUID => Err(Errno::ENODEV),
        _ => Err(Errno::EINVAL),
    }
}

/// `struct new_utsname`: six fields of 65 bytes.
pub fn uname(args: &Args) -> Result<u64> {
    let mut name = [0u8; 6 * 65];
    let hostname = kernel().hostname.lock().clone();
    let fields: [&[u8]; 6] =
        [b"Linux", &hostname, RELEASE.as_bytes(), VERSION.as_bytes(), b"x86_64", b"(none)"];
    for (i, field) in fields.iter().enumerate() {
        let len = field.len().min(64);
        name[i * 65..i * 65 + len].copy_from_slice(&field[..len]);
    }
    args.address(0).write_bytes(&name)?;
    Ok(0)
}

/// sethostname(2).
pub fn sethostname(args: &Args) -> Result<u64> {
    current_process().credentials.lock().require(Capabilities::SYS_ADMIN)?;
    if args.usize(1) > 64 {
        return Err(Errno::EINVAL);
    }
    let mut name = alloc::vec![0; args.usize(1)];
    args.address(0).read_bytes(&mut name)?;
    *kernel().hostname.lock() = name;
    Ok(0)
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

/// sysinfo(2).
pub fn sysinfo(args: &Args) -> Result<u64> {
    let total = kernel().memory_total();
    let used = crate::mm::heap::bytes_in_use() + kernel().pages.lock().bytes_in_use();
    let info = SystemInfo {
        uptime: (crate::time::clock::boottime_ns() / 1_000_000_000) as i64,
        total_ram: total,
        free_ram: total.saturating_sub(used),
        processes: kernel().tasks.threads.lock().len() as u16,
        unit: 1,
        ..bytemuck::Zeroable::zeroed()
    };
    args.address(0).write(&info)?;
    Ok(0)
}

/// prctl(2).
pub fn prctl(args: &Args) -> Result<u64> {
    const PR_SET_PDEATHSIG: u32 = 1;
    const PR_GET_PDEATHSIG: u32 = 2;
    const PR_GET_DUMPABLE: u32 = 3;
    const PR_SET_DUMPABLE: u32 = 4;
    const PR_SET_NAME: u32 = 15;
    const PR_GET_NAME: u32 = 16;
    const PR_SET_TIMERSLACK: u32 = 29;
    const PR_GET_TIMERSLACK: u32 = 30;
    const PR_SET_CHILD_SUBREAPER: u32 = 36;
    const PR_GET_CHILD_SUBREAPER: u32 = 37;
    const PR_SET_VMA: u32 = 0x5356_4d41;
    let thread = current();
    match args.u32(0) {
        PR_SET_NAME => {
            let mut name = [0u8; 16];
            // The name ends at its terminator or after 15 bytes.
            for (i, byte) in name[..15].iter_mut().enumerate() {
                *byte = args.address(1).offset(i as u64).read()?;
                if *byte == 0 {
                    break;
                }
            }
            thread.name.set(name);
            Ok(0)
        }
        PR_GET_NAME => {
            args.address(1).write_bytes(&thread.name.get())?;
            Ok(0)
        }
        PR_GET_DUMPABLE => Ok(thread.process.dumpable.get() as u64),
        PR_SET_DUMPABLE if args.u64(1) > 1 => Err(Errno::EINVAL),
        PR_SET_DUMPABLE => {
            thread.process.dumpable.set(args.u64(1) == 1);
            Ok(0)
        }
        PR_SET_PDEATHSIG if args.u64(1) > 64 => Err(Errno::EINVAL),
        PR_SET_PDEATHSIG => {
            thread.process.parent_death_signal.set(args.u32(1));
            Ok(0)
        }
        PR_GET_PDEATHSIG => {
            args.address(1).write(&(thread.process.parent_death_signal.get() as i32))?;
            Ok(0)
        }
        PR_SET_CHILD_SUBREAPER => {
            thread.process.is_subreaper.set(args.u64(1) != 0);
            Ok(0)
        }
        PR_GET_CHILD_SUBREAPER => {
            args.address(1).write(&(thread.process.is_subreaper.get() as i32))?;
            Ok(0)
        }
        PR_GET_TIMERSLACK => Ok(50_000),
        // The host chooses.
        PR_SET_TIMERSLACK => Ok(0),
        // Names of anonymous memory are optional (CONFIG_ANON_VMA_NAME).
        PR_SET_VMA => Err(Errno::EINVAL),
        _ => capabilities::prctl(args).unwrap_or(Err(Errno::EINVAL)),
    }
}

/// prlimit64(2).
pub fn prlimit64(args: &Args) -> Result<u64> {
    let process = of_process(args.i32(0))?;
    limit(&process, args.usize(1), args.address(2), args.address(3))
}

/// getrlimit(2).
pub fn getrlimit(args: &Args) -> Result<u64> {
    limit(current_process(), args.usize(0), UserAddress::NULL, args.address(1))
}

/// setrlimit(2).
pub fn setrlimit(args: &Args) -> Result<u64> {
    limit(current_process(), args.usize(0), args.address(1), UserAddress::NULL)
}

fn limit(
    process: &crate::task::Process,
    resource: usize,
    new: UserAddress,
    old: UserAddress,
) -> Result<u64> {
    let current_limit = *process.limits.lock().get(resource).ok_or(Errno::EINVAL)?;
    if !new.is_null() {
        let wanted: ResourceLimit = new.read()?;
        if wanted.current > wanted.maximum {
            return Err(Errno::EINVAL);
        }
        let privileged = current_process().credentials.lock().can(Capabilities::SYS_RESOURCE);
        let above_files =
            resource == crate::task::process::RLIMIT_NOFILE && wanted.maximum > 1 << 20;
        if above_files || wanted.maximum > current_limit.maximum && !privileged {
            return Err(Errno::EPERM);
        }
        process.limits.lock()[resource] = wanted;
    }
    old.write_if_some(&current_limit)?;
    Ok(0)
}

/// personality(2): Linux, and nothing else.
pub fn personality(args: &Args) -> Result<u64> {
    match args.u32(0) {
        0 | u32::MAX => Ok(0),
        // ADDR_NO_RANDOMIZE would show at the next execve.
        0x0004_0000 => Ok(0),
        _ => Err(Errno::EINVAL),
    }
}

/// Calls that need privileges on the host
/// fail as for an unprivileged process.
pub fn not_permitted(_args: &Args) -> Result<u64> {
    Err(Errno::EPERM)
}

/// Calls that a kernel may be built without.
pub fn not_configured(_args: &Args) -> Result<u64> {
    Err(Errno::ENOSYS)
}

/// membarrier(2): with one virtual CPU every barrier is in place; otherwise the
/// host is made to interrupt all processors on which the sandbox runs.
pub fn membarrier(args: &Args) -> Result<u64> {
    const QUERY: i32 = 0;
    const SUPPORTED: u64 = 1 | 2 | 4 | 8 | 16;
    match args.i32(0) {
        QUERY => Ok(SUPPORTED),
        command if command > 0 && SUPPORTED & command as u64 == command as u64 => {
            if crate::task::host_process::own_host_process().vcpu_count() > 1 {
                crate::platform::vcpu::barrier()?;
            }
            Ok(0)
        }
        _ => Err(Errno::EINVAL),
    }
}

/// getrandom(2).
pub fn getrandom(args: &Args) -> Result<u64> {
    const NONBLOCK: u32 = 1;
    const RANDOM: u32 = 2;
    const INSECURE: u32 = 4;
    let flags = args.u32(2);
    if flags & !(NONBLOCK | RANDOM | INSECURE) != 0
        || flags & (RANDOM | INSECURE) == RANDOM | INSECURE
    {
        return Err(Errno::EINVAL);
    }
    let len = args.usize(1).min(i32::MAX as usize);
    let mut done = 0;
    let mut chunk = [0u8; 256];
    while done < len {
        let step = (len - done).min(chunk.len());
        kernel().random.lock().fill(&mut chunk[..step]);
        args.address(0).offset(done as u64).write_bytes(&chunk[..step])?;
        done += step;
    }
    Ok(len as u64)
}
