//! Reading the host's clocks without a host call, through the host's vdso.
#![allow(unsafe_code)]

use core::sync::atomic::{AtomicU64, Ordering};

use thaw_abi::filter::{CPU_CLOCK, CPU_CLOCK_OF_THREAD};

use super::HostProcesses;
use super::calls::{hostcall, nr};
use crate::machine::{Clocks, nanoseconds};

/// Address of the host's `__vdso_clock_gettime`; 0 if there is none.
static CLOCK_GETTIME: AtomicU64 = AtomicU64::new(0);

impl Clocks for HostProcesses {
    fn find_clocks(vdso: u64) {
        if vdso != 0 {
            // SAFETY: the host says that its vdso is mapped there.
            let address = unsafe { find_symbol(vdso, b"__vdso_clock_gettime") };
            CLOCK_GETTIME.store(address.unwrap_or(0), Ordering::Relaxed);
        }
    }

    fn guest_clock() -> &'static AtomicU64 {
        &CLOCK_GETTIME
    }

    fn read_clock(clock: u32) -> (i64, i64) {
        let function = CLOCK_GETTIME.load(Ordering::Relaxed);
        if function == 0 {
            crate::panic::die_with("the host has no vdso clock; see `thaw doctor`");
        }
        let mut time = [0i64; 2];
        // SAFETY: the function that the host's vdso documents (vdso(7)).
        unsafe {
            let function: extern "C" fn(i32, *mut i64) -> i32 = core::mem::transmute(function);
            function(clock as i32, time.as_mut_ptr());
        }
        (time[0], time[1])
    }

    fn own_cpu_ns() -> u64 {
        /// The calling thread stands for itself.
        const SELF: u32 = 0;
        cpu_ns(cpu_clock_of(SELF) | CPU_CLOCK_OF_THREAD)
    }

    fn process_cpu_ns(pid: u32) -> u64 {
        cpu_ns(cpu_clock_of(pid))
    }
}

/// The clock of the CPU time of a process (`MAKE_PROCESS_CPUCLOCK` in linux/posix-timers.h).
fn cpu_clock_of(pid: u32) -> u32 {
    !pid << 3 | CPU_CLOCK
}

/// A clock of CPU time, in nanoseconds; 0 if there is none.
fn cpu_ns(clock: u32) -> u64 {
    let mut time = [0i64; 2];
    // SAFETY: `time` is a `struct timespec` and may be written to.
    let read = unsafe {
        hostcall(nr::CLOCK_GETTIME, [clock.into(), time.as_mut_ptr() as u64, 0, 0, 0, 0])
    };
    read.map_or(0, |_| nanoseconds((time[0], time[1])))
}

/// Finds a symbol in a mapped ELF object by walking its dynamic section.
///
/// # Safety
/// A complete ELF object must be mapped at `base`.
unsafe fn find_symbol(base: u64, name: &[u8]) -> Option<u64> {
    const PT_LOAD: u32 = 1;
    const PT_DYNAMIC: u32 = 2;
    const DT_HASH: u64 = 4;
    const DT_STRTAB: u64 = 5;
    const DT_SYMTAB: u64 = 6;
    const DT_GNU_HASH: u64 = 0x6fff_fef5;
    // SAFETY: all reads are inside the object, as its own tables say.
    unsafe {
        let read16 = |at: u64| (at as *const u16).read_unaligned();
        let read32 = |at: u64| (at as *const u32).read_unaligned();
        let read64 = |at: u64| (at as *const u64).read_unaligned();
        let headers = base + read64(base + 32);
        let (mut bias, mut dynamic) = (base, 0);
        for i in 0..read16(base + 56) as u64 {
            let header = headers + i * 56;
            match read32(header) {
                PT_LOAD if read64(header + 8) == 0 => bias = base.wrapping_sub(read64(header + 16)),
                PT_DYNAMIC => dynamic = read64(header + 16),
                _ => {}
            }
        }
        let mut at = bias.wrapping_add(dynamic);
        let (mut strings, mut symbols, mut count) = (0, 0, 0u64);
        while read64(at) != 0 {
            let value = bias.wrapping_add(read64(at + 8));
            match read64(at) {
                DT_STRTAB => strings = value,
                DT_SYMTAB => symbols = value,
                DT_HASH => count = read32(value + 4) as u64,
                // The GNU table has no count; a vdso has few symbols and the
                // strings follow the symbols.
                DT_GNU_HASH if count == 0 => count = u64::MAX,
                _ => {}
            }
            at += 16;
        }
        if strings == 0 || symbols == 0 {
            return None;
        }
        if count == u64::MAX {
            count = strings.saturating_sub(symbols) / 24;
        }
        for i in 0..count {
            let symbol = symbols + i * 24;
            let at = strings + read32(symbol) as u64;
            let matches = name
                .iter()
                .chain(&[0])
                .enumerate()
                .all(|(i, &b)| ((at + i as u64) as *const u8).read() == b);
            if matches && read16(symbol + 6) != 0 {
                return Some(bias.wrapping_add(read64(symbol + 8)));
            }
        }
    }
    None
}
