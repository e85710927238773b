//! Patching of system call sites.
//!
//! The first trap at a site rewrites `mov $nr,%eax; syscall` into an indirect
//! jump through a slot of the gate's table to a trampoline, which performs the
//! displaced `mov`, puts the return address into `rcx` (as `syscall` does) and
//! enters the kernel. The two bytes left where `syscall` was are the upper half
//! of the slot's address, `01 00`, which decode as `add %eax,(%rax)` and fault
//! for any system call number: a thread that jumps there, or was about to
//! execute it, is restarted in the trampoline.
//!
//! The gate is saved with the image, and so are the patched pages, so a thawed
//! program never traps at a site it has used before.
#![allow(unsafe_code)]

use alloc::collections::BTreeMap;

use thaw_abi::layout::{GATE_BASE, GATE_CODE_BASE, GATE_CODE_SIZE, GATE_END, GATE_TABLE_SIZE};

use super::entry::TrapFrame;
use super::host;
use super::user::UserAddress;
use crate::errno::Result;
use crate::state::kernel;
use crate::sync::Lock;

const SLOTS: u64 = GATE_TABLE_SIZE / 8;
const TRAMPOLINE_SIZE: u64 = 32;

/// The gate's book-keeping.
#[derive(Default)]
pub struct Gate {
    state: Lock<State>,
}

#[derive(Default)]
struct State {
    used: u64,
    /// Address of a displaced `syscall` → where a thread there goes on.
    sites: BTreeMap<u64, u64>,
}

/// How the instruction before a `syscall` looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Site {
    /// Bytes before the `syscall` instruction that move into the trampoline.
    prefix: usize,
}

/// Recognizes the site from the nine bytes that end with the `syscall`. The
/// prefix must be one whole instruction, so that no jump can lead inside it.
fn recognize(bytes: &[u8; 9], number: u64) -> Option<Site> {
    if bytes[7..] != [0x0f, 0x05] {
        return None;
    }
    let immediate = |at: usize| i32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    // 48 c7 c0 imm32: mov $nr,%rax, as Go emits. Tested first, because its
    // immediate may look like the next pattern.
    if bytes[..3] == [0x48, 0xc7, 0xc0] && immediate(3) as i64 as u64 == number {
        return Some(Site { prefix: 7 });
    }
    // b8 imm32: mov $nr,%eax. That the immediate is the number in rax tells it
    // from five bytes that are something else.
    if bytes[2] == 0xb8 && immediate(3) as u32 as u64 == number {
        return Some(Site { prefix: 5 });
    }
    // 4c 8b 4c 24 08: mov 8(%rsp),%r9, in syscall(3) of the C library.
    if bytes[2..7] == [0x4c, 0x8b, 0x4c, 0x24, 0x08] {
        return Some(Site { prefix: 5 });
    }
    None
}

/// Maps the gate of a fresh sandbox and fills in the way to the kernel.
pub fn create() -> Result<()> {
    host::map_anonymous(GATE_BASE, GATE_END - GATE_BASE, host::PROT_READ | host::PROT_WRITE)?;
    // SAFETY: mapped above; slot 0 leads to the kernel's fast door.
    unsafe { (GATE_BASE as *mut u64).write(&raw const super::entry::thaw_syscall_entry as u64) };
    host::protect(GATE_BASE, GATE_END - GATE_BASE, host::PROT_READ | host::PROT_EXEC)
}

/// Rewrites the site of a trapped system call if its form is known. Failure
/// leaves the site as it is: the trap is always correct.
pub fn try_patch(frame: &TrapFrame) {
    if kernel().config.get().flags & thaw_abi::control::FLAG_NO_PATCHING != 0 {
        return;
    }
    let syscall = frame.rip.wrapping_sub(2);
    let mut bytes = [0u8; 9];
    if UserAddress(syscall.wrapping_sub(7)).read_bytes(&mut bytes).is_err() {
        return;
    }
    let Some(site) = recognize(&bytes, frame.orig_rax) else { return };
    let start = syscall - site.prefix as u64;
    let Some(protection) = crate::mm::code_protection(start, frame.rip) else { return };
    let prefix = &bytes[7 - site.prefix..7];
    let Ok(slot) = add_trampoline(prefix, syscall) else { return };

    let mut patch = [0x90u8; 9];
    let jump = site.prefix + 2 - 7;
    patch[..jump].copy_from_slice(&[0x66, 0x90][..jump]);
    patch[jump..jump + 3].copy_from_slice(&[0xff, 0x24, 0x25]);
    patch[jump + 3..jump + 7].copy_from_slice(&(slot as u32).to_le_bytes());
    let first_page = start & !4095;
    let len = (frame.rip - first_page).next_multiple_of(4096);
    if host::protect(first_page, len, host::PROT_READ | host::PROT_WRITE).is_ok() {
        let _ = UserAddress(start).write_bytes(&patch[..site.prefix + 2]);
        // The range was executable a moment ago; if this fails the program
        // faults, which is all that is left to do.
        let _ = host::protect(first_page, len, protection);
    }
}

/// Writes the trampoline of a site and returns the address of its slot.
fn add_trampoline(prefix: &[u8], syscall: u64) -> Result<u64> {
    let mut state = kernel().gate.state.lock();
    let index = state.used + 1;
    if index >= SLOTS || index * TRAMPOLINE_SIZE >= GATE_CODE_SIZE {
        return Err(crate::errno::Errno::ENOMEM);
    }
    let slot = GATE_BASE + index * 8;
    let code = GATE_CODE_BASE + index * TRAMPOLINE_SIZE;
    let mut bytes = [0x90u8; TRAMPOLINE_SIZE as usize];
    let after_prefix = prefix.len();
    bytes[..after_prefix].copy_from_slice(prefix);
    let mut at = after_prefix;
    // movabs $return,%rcx
    bytes[at..at + 2].copy_from_slice(&[0x48, 0xb9]);
    bytes[at + 2..at + 10].copy_from_slice(&(syscall + 2).to_le_bytes());
    at += 10;
    // jmp *GATE_BASE
    bytes[at..at + 3].copy_from_slice(&[0xff, 0x24, 0x25]);
    bytes[at + 3..at + 7].copy_from_slice(&(GATE_BASE as u32).to_le_bytes());

    host::protect(GATE_BASE, GATE_END - GATE_BASE, host::PROT_READ | host::PROT_WRITE)?;
    // SAFETY: slot and code lie inside the gate, which is writable now and not
    // in use by any other vCPU.
    unsafe {
        (slot as *mut u64).write(code);
        core::ptr::copy_nonoverlapping(bytes.as_ptr(), code as *mut u8, bytes.len());
    }
    host::protect(GATE_BASE, GATE_END - GATE_BASE, host::PROT_READ | host::PROT_EXEC)?;
    state.used = index;
    state.sites.insert(syscall, code + after_prefix as u64);
    Ok(slot)
}

/// Where a thread goes that is to execute again the system call that it
/// returned from at `rip`: the instruction, or the trampoline that replaced it.
pub fn restart_address(rip: u64) -> u64 {
    let syscall = rip.wrapping_sub(2);
    match UserAddress(syscall).read::<[u8; 2]>() {
        Ok([0x01, 0x00]) => kernel().gate.state.lock().sites.get(&syscall).copied().unwrap_or(syscall),
        _ => syscall,
    }
}

/// If the frame faulted at a displaced `syscall`: sends it to the trampoline.
pub fn restart_displaced(frame: &mut TrapFrame) -> bool {
    let target = kernel().gate.state.lock().sites.get(&frame.rip).copied();
    let Some(target) = target else { return false };
    // Only if the patch is still there; the memory may hold something else now.
    match UserAddress(frame.rip).read::<[u8; 2]>() {
        Ok([0x01, 0x00]) => {
            frame.rip = target;
            true
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_leave_a_faulting_instruction() {
        for index in [0, 1, SLOTS - 1] {
            let slot = (GATE_BASE + index * 8) as u32;
            assert_eq!(slot.to_le_bytes()[2..], [0x01, 0x00]);
        }
    }

    #[test]
    fn recognizes_the_usual_sites() {
        let libc = [0x90, 0x90, 0xb8, 0x27, 0, 0, 0, 0x0f, 0x05];
        assert_eq!(recognize(&libc, 39), Some(Site { prefix: 5 }));
        assert_eq!(recognize(&libc, 40), None, "the immediate is not the number in rax");
        let go = [0x48, 0xc7, 0xc0, 0x27, 0, 0, 0, 0x0f, 0x05];
        assert_eq!(recognize(&go, 39), Some(Site { prefix: 7 }));
        let generic = [0x90, 0x90, 0x4c, 0x8b, 0x4c, 0x24, 0x08, 0x0f, 0x05];
        assert_eq!(recognize(&generic, 1), Some(Site { prefix: 5 }));
        let other = [0x90, 0x90, 0x90, 0x89, 0xd0, 0x90, 0x90, 0x0f, 0x05];
        assert_eq!(recognize(&other, 1), None);
    }
}
