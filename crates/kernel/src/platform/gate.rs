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
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use thaw_abi::layout::{GATE_BASE, GATE_CODE_BASE, GATE_CODE_SIZE, GATE_END, GATE_TABLE_SIZE};

use super::entry::TrapFrame;
use super::host;
use super::user::UserAddress;
use crate::errno::Result;
use crate::state::kernel;
use crate::sync::Lock;
use crate::task::carrier;

const SLOTS: u64 = GATE_TABLE_SIZE / 8;
const TRAMPOLINE_SIZE: u64 = 48;
/// End of the gate of a fresh sandbox: the table and one page of trampolines.
const FIRST_MAPPED_END: u64 = GATE_CODE_BASE + 4096;
const _: () = assert!(GATE_CODE_BASE + GATE_CODE_SIZE == GATE_END);

/// Slots before this one lead to the kernel for everybody.
const FIRST_SITE: u64 = 8;

/// The gate's book-keeping, for one address space.
#[derive(Default)]
pub struct Gate {
    state: Lock<State>,
}

impl Gate {
    /// That of a forked address space, which has a copy of the gate's memory.
    pub fn copy(&self) -> Self {
        Self { state: Lock::new(self.state.lock().clone()) }
    }
}

#[derive(Clone, Default)]
struct State {
    used: u64,
    /// End of the part of the gate that is mapped: the table and the
    /// trampolines so far.
    mapped_end: u64,
    /// Address of a displaced `syscall` → where a thread there goes on.
    sites: BTreeMap<u64, u64>,
}

/// How the instructions around a `syscall` look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Site {
    /// Bytes before the `syscall` instruction that move into the trampoline.
    prefix: usize,
    /// Bytes behind it that do.
    suffix: usize,
}

/// Bytes looked at before the end of the `syscall` instruction.
const BEFORE: usize = 9;
/// Bytes looked at behind it.
const BEHIND: usize = 6;

/// Recognizes the site from the bytes around the `syscall`. What moves must be
/// one whole instruction, so that no jump can lead inside it.
fn recognize(bytes: &[u8; BEFORE + BEHIND], number: u64) -> Option<Site> {
    if bytes[7..9] != [0x0f, 0x05] {
        return None;
    }
    // read(2) in the C library: je or jne; xor %eax,%eax; syscall; cmp $-4096,%rax.
    // The `xor` is too short for a jump, so the `cmp` moves too; within this
    // sequence of one function nothing jumps to it.
    if number == 0
        && matches!(bytes[3], 0x74 | 0x75)
        && bytes[5..7] == [0x31, 0xc0]
        && bytes[9..] == COMPARE
    {
        return Some(Site { prefix: 2, suffix: 6 });
    }
    let immediate =
        |at: usize| i32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    // 48 c7 c0 imm32: mov $nr,%rax, as Go emits. Tested first, because its
    // immediate may look like the next pattern.
    if bytes[..3] == [0x48, 0xc7, 0xc0] && immediate(3) as i64 as u64 == number {
        return Some(Site { prefix: 7, suffix: 0 });
    }
    // b8 imm32: mov $nr,%eax. That the immediate is the number in rax tells it
    // from five bytes that are something else.
    if bytes[2] == 0xb8 && immediate(3) as u32 as u64 == number {
        return Some(Site { prefix: 5, suffix: 0 });
    }
    // 4c 8b 4c 24 08: mov 8(%rsp),%r9, in syscall(3) of the C library.
    if bytes[2..7] == [0x4c, 0x8b, 0x4c, 0x24, 0x08] {
        return Some(Site { prefix: 5, suffix: 0 });
    }
    None
}

/// Maps the gate of an address space that gets a new program, and fills in the
/// way to the kernel.
pub fn create(gate: &Gate) -> Result<()> {
    let len = FIRST_MAPPED_END - GATE_BASE;
    let mapped = {
        let mut state = gate.state.lock();
        let before = core::mem::take(&mut *state);
        state.mapped_end = FIRST_MAPPED_END;
        before.mapped_end
    };
    if mapped > FIRST_MAPPED_END {
        host::unmap(FIRST_MAPPED_END, mapped - FIRST_MAPPED_END)?;
    }
    host::map_anonymous(GATE_BASE, len, host::PROT_READ | host::PROT_WRITE)?;
    let slots = GATE_BASE as *mut u64;
    // SAFETY: mapped above. Slot 0 leads to the kernel's fast door, slot 1 is
    // for the vdso.
    unsafe {
        slots.write(&raw const super::entry::thaw_syscall_entry as u64);
        slots.add(1).write(crate::task::exec::vdso::clock as *const () as u64);
    }
    host::protect(GATE_BASE, len, host::PROT_READ | host::PROT_EXEC)
}

impl Gate {
    /// The part of the gate that is mapped: start and bytes.
    pub fn mapped_range(&self) -> (u64, u64) {
        (GATE_BASE, self.state.lock().mapped_end - GATE_BASE)
    }
}

/// Of the running process.
fn gate() -> &'static Gate {
    &carrier::own_space().gate
}

/// `cmp $-4096,%rax`: is it an error?
const COMPARE: [u8; 6] = [0x48, 0x3d, 0x00, 0xf0, 0xff, 0xff];
/// Bytes of the patch: an indirect jump through an absolute address.
const JUMP_SIZE: usize = 7;

/// Rewrites the site of a trapped system call if its form is known. Failure
/// leaves the site as it is: the trap is always correct.
pub fn try_patch(frame: &mut TrapFrame) {
    if kernel().config.get().flags & thaw_abi::control::FLAG_NO_PATCHING != 0 {
        return;
    }
    let syscall = frame.rip.wrapping_sub(2);
    if !is_worth_it(syscall) || !carrier::own_space().carrier.is_alone() {
        // Nobody may execute what is being rewritten. A later trap will do it.
        return;
    }
    let mut bytes = [0u8; BEFORE + BEHIND];
    if UserAddress(syscall.wrapping_sub(7)).read_bytes(&mut bytes).is_err() {
        return;
    }
    let Some(site) = recognize(&bytes, frame.orig_rax) else { return };
    let start = syscall - site.prefix as u64;
    let end = frame.rip + site.suffix as u64;
    let Some(protection) = crate::mm::code_protection(start, end) else { return };
    let Ok(trampoline) = add_trampoline(&bytes, site, syscall) else { return };

    // Nops first: the jump ends with the `syscall`, so that its last two bytes,
    // which fault, lie where that was. With a suffix the nops lead a thread at
    // the `syscall` into the jump instead.
    let mut patch = [0x90u8; BEFORE + BEHIND];
    let len = site.prefix + 2 + site.suffix;
    let jump = if site.suffix == 0 { len - JUMP_SIZE } else { site.prefix };
    if jump == 2 {
        patch[..2].copy_from_slice(&[0x66, 0x90]);
    }
    patch[jump..jump + 3].copy_from_slice(&[0xff, 0x24, 0x25]);
    patch[jump + 3..jump + 7].copy_from_slice(&(trampoline.slot as u32).to_le_bytes());
    let first_page = start & !4095;
    let pages = (end - first_page).next_multiple_of(4096);
    if host::protect(first_page, pages, host::PROT_READ | host::PROT_WRITE).is_ok() {
        let written = UserAddress(start).write_bytes(&patch[..len]);
        // The range was executable a moment ago; if this fails the program
        // faults, which is all that is left to do.
        let _ = host::protect(first_page, pages, protection);
        if written.is_ok() && site.suffix > 0 {
            // This very call returns behind instructions that have moved.
            frame.rip = trampoline.after;
        }
    }
}

/// Whether a site is likely to be used often enough. A program that is being
/// started gets every site patched, since the patches travel in its image. In a
/// copy, which may live for one request, a patch costs more than a few traps:
/// there the second trap decides.
fn is_worth_it(syscall: u64) -> bool {
    const SLOTS: usize = 64;
    static SEEN: [AtomicU64; SLOTS] = [const { AtomicU64::new(0) }; SLOTS];
    if kernel().generation.get() == 0 {
        return true;
    }
    let slot = &SEEN[(syscall >> 2) as usize % SLOTS];
    slot.swap(syscall, Relaxed) == syscall
}

/// Where the parts of a new trampoline are.
struct Trampoline {
    slot: u64,
    /// Where the displaced system call returns to.
    after: u64,
}

/// Writes the trampoline of a site: prefix, return address into `rcx`, jump to
/// the kernel; with a suffix that, and the jump back, follow.
fn add_trampoline(bytes: &[u8; BEFORE + BEHIND], site: Site, syscall: u64) -> Result<Trampoline> {
    let mut state = gate().state.lock();
    let index = FIRST_SITE + state.used;
    if index >= SLOTS || (index + 1) * TRAMPOLINE_SIZE > GATE_CODE_SIZE {
        return Err(crate::errno::Errno::ENOMEM);
    }
    let slot = GATE_BASE + index * 8;
    let code = GATE_CODE_BASE + index * TRAMPOLINE_SIZE;
    let prefix = &bytes[7 - site.prefix..7];
    let suffix = &bytes[9..9 + site.suffix];
    let mut text = Text { bytes: [0x90; TRAMPOLINE_SIZE as usize], at: 0 };
    text.push(prefix);
    let entry = code + text.at as u64;
    const MOV_AND_JUMP: u64 = 10 + JUMP_SIZE as u64;
    let after = if site.suffix == 0 { syscall + 2 } else { entry + MOV_AND_JUMP };
    // movabs $after,%rcx; jmp *GATE_BASE
    text.push(&[0x48, 0xb9]);
    text.push(&after.to_le_bytes());
    text.push(&[0xff, 0x24, 0x25]);
    text.push(&(GATE_BASE as u32).to_le_bytes());
    if site.suffix > 0 {
        // jmp *0(%rip), followed by the address
        text.push(suffix);
        text.push(&[0xff, 0x25, 0, 0, 0, 0]);
        text.push(&(syscall + 2 + site.suffix as u64).to_le_bytes());
    }

    let code_end = (code + TRAMPOLINE_SIZE).next_multiple_of(4096);
    if code_end > state.mapped_end {
        let more = code_end - state.mapped_end;
        host::map_anonymous(state.mapped_end, more, host::PROT_READ | host::PROT_EXEC)?;
        state.mapped_end = code_end;
    }
    let mapped = state.mapped_end - GATE_BASE;
    host::protect(GATE_BASE, mapped, host::PROT_READ | host::PROT_WRITE)?;
    // SAFETY: slot and code lie inside the gate, which is writable now and not
    // in use by any other vCPU.
    unsafe {
        (slot as *mut u64).write(code);
        core::ptr::copy_nonoverlapping(text.bytes.as_ptr(), code as *mut u8, text.bytes.len());
    }
    host::protect(GATE_BASE, mapped, host::PROT_READ | host::PROT_EXEC)?;
    state.used += 1;
    state.sites.insert(syscall, entry);
    if site.suffix > 0 {
        state.sites.insert(after - 2, entry);
    }
    Ok(Trampoline { slot, after })
}

/// Machine code being written.
struct Text {
    bytes: [u8; TRAMPOLINE_SIZE as usize],
    at: usize,
}

impl Text {
    fn push(&mut self, bytes: &[u8]) {
        self.bytes[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }
}

/// Where a thread goes that is to execute again the system call that it
/// returned from at `rip`: the instruction, or the trampoline that replaced it.
pub fn restart_address(rip: u64) -> u64 {
    let syscall = rip.wrapping_sub(2);
    match UserAddress(syscall).read::<[u8; 2]>() {
        Ok([0x0f, 0x05]) => syscall,
        _ => gate().state.lock().sites.get(&syscall).copied().unwrap_or(syscall),
    }
}

/// If the frame faulted at a displaced `syscall`: sends it to the trampoline.
pub fn restart_displaced(frame: &mut TrapFrame) -> bool {
    let target = gate().state.lock().sites.get(&frame.rip).copied();
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
        let bytes = |before: [u8; 9]| {
            let mut all = [0x90u8; BEFORE + BEHIND];
            all[..BEFORE].copy_from_slice(&before);
            all
        };
        let libc = bytes([0x90, 0x90, 0xb8, 0x27, 0, 0, 0, 0x0f, 0x05]);
        assert_eq!(recognize(&libc, 39), Some(Site { prefix: 5, suffix: 0 }));
        assert_eq!(recognize(&libc, 40), None, "the immediate is not the number in rax");
        let go = bytes([0x48, 0xc7, 0xc0, 0x27, 0, 0, 0, 0x0f, 0x05]);
        assert_eq!(recognize(&go, 39), Some(Site { prefix: 7, suffix: 0 }));
        let generic = bytes([0x90, 0x90, 0x4c, 0x8b, 0x4c, 0x24, 0x08, 0x0f, 0x05]);
        assert_eq!(recognize(&generic, 1), Some(Site { prefix: 5, suffix: 0 }));
        let other = bytes([0x90, 0x90, 0x90, 0x89, 0xd0, 0x90, 0x90, 0x0f, 0x05]);
        assert_eq!(recognize(&other, 1), None);
    }

    #[test]
    fn recognizes_read_with_its_comparison() {
        let mut read = [
            0x85, 0xc0, 0x90, 0x74, 0x13, 0x31, 0xc0, 0x0f, 0x05, 0x48, 0x3d, 0x00, 0xf0, 0xff,
            0xff,
        ];
        assert_eq!(recognize(&read, 0), Some(Site { prefix: 2, suffix: 6 }));
        read[10] = 0x3c;
        assert_eq!(recognize(&read, 0), None);
    }
}
