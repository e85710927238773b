//! Environment variables that change how sandboxes run, for finding faults.

use std::path::PathBuf;
use std::sync::OnceLock;
use thaw_abi::control::{FLAG_NO_PATCHING, FLAG_TRACE_SYSCALLS};
use thaw_sandbox::{ConsoleRate, Kernel, KernelError};

/// `FLAG_*` of the boot command that the environment asks for:
/// `THAW_TRACE=syscalls` and `THAW_NO_PATCHING=1`.
pub fn flags() -> u32 {
    let set = |name: &str, value: &str| std::env::var_os(name).is_some_and(|v| v == value);
    let mut flags = 0;
    if set("THAW_TRACE", "syscalls") {
        flags |= FLAG_TRACE_SYSCALLS;
    }
    if set("THAW_NO_PATCHING", "1") {
        flags |= FLAG_NO_PATCHING;
    }
    flags
}

/// How much of what the kernels of sandboxes say is passed on: all of it if it is a
/// trace.
pub fn console_rate() -> ConsoleRate {
    match flags() & FLAG_TRACE_SYSCALLS {
        0 => ConsoleRate::Limited,
        _ => ConsoleRate::Lossless,
    }
}

/// Seconds by which triggers see a later time than the host's clock says: the number in the file
/// that `THAW_CLOCK` names, so that tests can move it; mostly 0.
pub fn clock_ahead() -> i64 {
    static FILE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let file = FILE.get_or_init(|| {
        std::env::var_os("THAW_CLOCK").filter(|path| !path.is_empty()).map(PathBuf::from)
    });
    let text = file.as_ref().and_then(|file| std::fs::read_to_string(file).ok());
    text.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Whether memory is short, whatever the host says: as long as the file is there that `THAW_PRESSURE`
/// names, so that tests need no such host. `None`: the host knows.
pub fn is_memory_short() -> Option<bool> {
    static FILE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let file = FILE.get_or_init(|| {
        std::env::var_os("THAW_PRESSURE").filter(|path| !path.is_empty()).map(PathBuf::from)
    });
    file.as_ref().map(|file| file.exists())
}

/// Whether memory that is to be written to swap files waits: as long as the file is there that
/// `THAW_SLOW_SWAP` names, so that tests need no slow disk.
pub fn is_swap_slow() -> bool {
    static FILE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let file = FILE.get_or_init(|| {
        std::env::var_os("THAW_SLOW_SWAP").filter(|path| !path.is_empty()).map(PathBuf::from)
    });
    file.as_ref().is_some_and(|file| file.exists())
}

/// The kernel to run: the one inside this program, or the ELF file that
/// `THAW_KERNEL` names, for kernel development. It is read once.
///
/// # Errors
/// The file is not a kernel.
pub fn kernel() -> Result<Kernel, KernelError> {
    static KERNEL: OnceLock<Result<Kernel, KernelError>> = OnceLock::new();
    let read = || match std::env::var_os("THAW_KERNEL").filter(|path| !path.is_empty()) {
        Some(path) => Kernel::from_elf(std::fs::read(path).unwrap_or_default()),
        None => Kernel::embedded(),
    };
    KERNEL.get_or_init(read).clone()
}
