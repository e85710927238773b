//! The end of a sandbox whose kernel has found a bug in itself.
#![allow(unsafe_code)]

use core::fmt::{self, Write};
use core::sync::atomic::{AtomicBool, Ordering};

use crate::errno::Errno;
use crate::machine::{HostFd, HostFiles, Machine, Processes, Threads};
use crate::upcalls;

/// Exit code of a sandbox whose kernel has panicked.
pub const PANIC_EXIT_CODE: u64 = 134;

/// Text in a fixed buffer, written to the console in one piece.
pub struct Console {
    buffer: [u8; 512],
    len: usize,
}

impl Console {
    /// An empty buffer.
    pub const fn new() -> Self {
        Self { buffer: [0; 512], len: 0 }
    }

    /// Writes out what the buffer holds. Where the host has no memory for it, waits for some, but not long.
    pub fn flush(&mut self) {
        const ATTEMPTS: u32 = 100;
        const PAUSE_NS: u64 = 1_000_000;
        let console = HostFd::new(thaw_abi::layout::CONSOLE_FD);
        for _ in 0..ATTEMPTS {
            match Machine::write(console, self.buffer[..self.len].into()) {
                Err(Errno::ENOMEM | Errno::ENOBUFS) => drop(Machine::poll(&mut [], Some(PAUSE_NS))),
                _ => break,
            }
        }
        self.len = 0;
    }
}

impl Default for Console {
    fn default() -> Self {
        Self::new()
    }
}

impl Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for &byte in text.as_bytes() {
            if self.len == self.buffer.len() {
                self.flush();
            }
            self.buffer[self.len] = byte;
            self.len += 1;
        }
        Ok(())
    }
}

/// Prints a line on the console.
#[macro_export]
macro_rules! console {
    ($($arg:tt)*) => {{
        use core::fmt::Write;
        let mut console = $crate::panic::Console::new();
        let _ = writeln!(console, $($arg)*);
        console.flush();
    }};
}

static PANICKING: AtomicBool = AtomicBool::new(false);

/// Prints the panic with a backtrace of return addresses and ends the sandbox.
pub fn die(info: &core::panic::PanicInfo<'_>) -> ! {
    if !PANICKING.swap(true, Ordering::Relaxed) {
        console!("thaw kernel {info}");
        print_stack(frame_pointer());
        tell_others();
    }
    end_all()
}

/// Ends the sandbox with this reason.
pub fn die_with(reason: &str) -> ! {
    if !PANICKING.swap(true, Ordering::Relaxed) {
        console!("thaw kernel panicked: {reason}");
        tell_others();
    }
    end_all()
}

/// Lets the kernel tell the other host processes, if it is there yet.
pub(crate) fn tell_others() {
    if let Some(kernel) = upcalls::registered() {
        kernel.panicked();
    }
}

/// Ends this host process, and each of the others when it comes to the kernel.
pub fn end_all() -> ! {
    crate::kernel_lock::abandon();
    Machine::exit(PANIC_EXIT_CODE)
}

fn frame_pointer() -> u64 {
    let rsp: u64;
    // SAFETY: reads a register.
    unsafe { core::arch::asm!("mov {}, rsp", out(reg) rsp, options(nomem, nostack)) };
    rsp
}

/// Prints the words on the stack that look like return addresses: `addr2line
/// -e KERNEL.elf` turns them into functions (docs/debugging.md).
pub fn print_stack(rsp: u64) {
    use thaw_abi::layout::KERNEL_BASE;
    let top = Machine::stack_end(rsp);
    let mut console = Console::new();
    let _ = write!(console, "stack:");
    let mut at = rsp & !7;
    let mut printed = 0;
    while at < top && printed < 40 {
        // SAFETY: `at` lies on the stack that is in use.
        let word = unsafe { (at as *const u64).read() };
        if (KERNEL_BASE..KERNEL_BASE + (16 << 20)).contains(&word) {
            let _ = write!(console, " {word:#x}");
            printed += 1;
        }
        at += 8;
    }
    let _ = writeln!(console);
    console.flush();
}
