//! The guest's vdso (vdso(7)): clocks without a system call.
//!
//! The object is built from `vdso.S`. Its functions call [`clock`] through the
//! gate, which reads the host's clock and adds the guest's offset.

use crate::errno::Result;
use crate::mm::space::{MapRequest, Placement};
use crate::mm::vma::VmaFlags;
use crate::platform::machine::{Clocks, Machine, PROT_EXEC, PROT_READ, PROT_WRITE, VdsoSlots};
use crate::platform::user::UserAddress;
use crate::state::kernel;
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
        0 | 5 => read(Machine::REALTIME, 0),
        // CLOCK_MONOTONIC, raw, coarse.
        1 | 4 | 6 => read(Machine::MONOTONIC, kernel().clocks.offset()),
        7 => read(Machine::BOOTTIME, kernel().clocks.boottime_offset()),
        _ => Time { seconds: -1, nanoseconds: 0 },
    }
}

/// Where the object finds [`clock`] and the offsets.
pub fn slots() -> VdsoSlots {
    VdsoSlots {
        clock: clock as *const () as u64,
        offsets: kernel().clocks.offset_parts() as *const _ as u64,
    }
}

fn read(clock: u32, offset: u64) -> Time {
    const NS: u64 = 1_000_000_000;
    let (seconds, nanoseconds) = Machine::read_clock(clock);
    if offset == 0 {
        return Time { seconds, nanoseconds };
    }
    let ns =
        (seconds as u64).wrapping_mul(NS).wrapping_add(nanoseconds as u64).wrapping_add(offset);
    Time { seconds: (ns / NS) as i64, nanoseconds: (ns % NS) as i64 }
}

#[cfg(test)]
mod tests {
    use super::OBJECT;

    fn number<const N: usize>(at: usize) -> u64 {
        let mut bytes = [0; 8];
        bytes[..N].copy_from_slice(&OBJECT[at..at + N]);
        u64::from_le_bytes(bytes)
    }

    /// It is mapped as it is: what the headers say of addresses must hold for
    /// offsets, or the C library finds nothing and makes system calls instead.
    #[test]
    fn addresses_are_offsets() {
        const PT_LOAD: u64 = 1;
        const PT_DYNAMIC: u64 = 2;
        const PF_W: u64 = 2;
        let (first, size, count) = (number::<8>(32), number::<2>(54), number::<2>(56));
        let mut kinds = Vec::new();
        for header in (0..count).map(|i| (first + i * size) as usize) {
            let kind = number::<4>(header);
            kinds.push(kind);
            if kind == PT_LOAD || kind == PT_DYNAMIC {
                assert_eq!(number::<8>(header + 8), number::<8>(header + 16), "kind {kind}");
                assert_eq!(number::<4>(header + 4) & PF_W, 0, "kind {kind}");
            }
        }
        kinds.retain(|kind| *kind == PT_LOAD || *kind == PT_DYNAMIC);
        assert_eq!(kinds, [PT_LOAD, PT_DYNAMIC]);
    }
}
