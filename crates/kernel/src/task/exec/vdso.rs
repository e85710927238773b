//! The guest's vdso (vdso(7)): clocks without a system call.
//!
//! The object is built from `vdso.S`. Its functions call [`clock`] through the
//! gate, which reads the host's clock and adds the guest's offset.

use crate::errno::Result;
use crate::mm::space::{MapRequest, Placement};
use crate::mm::vma::VmaFlags;
use crate::platform::clock as host_clock;
use crate::platform::host::{PROT_EXEC, PROT_READ, PROT_WRITE};
use crate::platform::user::UserAddress;
use crate::task::Process;

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/vdso.so"));

/// Maps the vdso and returns its address.
pub fn map(process: &Process) -> Result<u64> {
    let len = OBJECT.len() as u64;
    let start = process.mm().map(MapRequest {
        placement: Placement::Hint(0),
        len,
        prot: PROT_READ | PROT_WRITE,
        flags: VmaFlags::VDSO,
        file: None,
        offset: 0,
    })?;
    UserAddress(start).write_bytes(OBJECT)?;
    process.mm().protect(start, len.next_multiple_of(4096), PROT_READ | PROT_EXEC)?;
    Ok(start)
}

/// A time in two registers.
#[repr(C)]
pub struct Time {
    /// Seconds, or -1 for a clock that wants a system call.
    seconds: i64,
    nanoseconds: i64,
}

/// Reads a guest clock. Runs on the guest's stack, outside of the kernel lock:
/// it may only read what does not change while the guest runs.
pub extern "C" fn clock(clock: u32) -> Time {
    match clock {
        // CLOCK_REALTIME and its coarse variant, CLOCK_TAI.
        0 | 5 => read(host_clock::REALTIME, 0),
        // CLOCK_MONOTONIC, raw, coarse.
        1 | 4 | 6 => read(host_clock::MONOTONIC, crate::state::kernel().clocks.offset()),
        7 => read(host_clock::BOOTTIME, 0),
        _ => Time { seconds: -1, nanoseconds: 0 },
    }
}

fn read(clock: u32, offset: u64) -> Time {
    const NS: u64 = 1_000_000_000;
    let (seconds, nanoseconds) = host_clock::read(clock);
    if offset == 0 {
        return Time { seconds, nanoseconds };
    }
    let ns =
        (seconds as u64).wrapping_mul(NS).wrapping_add(nanoseconds as u64).wrapping_add(offset);
    Time { seconds: (ns / NS) as i64, nanoseconds: (ns % NS) as i64 }
}
