//! Patching of system call sites.
//!
//! A site that traps is rewritten into an indirect jump through a slot of
//! the gate's table to a trampoline, which performs the instructions that had to
//! move, puts the return address into `rcx` (as `syscall` does) and enters the
//! kernel. Two kinds of sites are known:
//!
//! - One instruction *before* the `syscall` moves: `mov $nr,%eax` and its
//!   relatives. The two bytes left where `syscall` was are the upper half of the
//!   slot's address, `01 00`, which decode as `add %eax,(%rax)` and fault for any
//!   system call number: a thread that jumps there, or was about to execute it,
//!   is restarted in the trampoline.
//! - Instructions *behind* the `syscall` move ([`site`]). The jump begins
//!   where the `syscall` was. Nothing in the text may jump to an instruction that
//!   moves, and threads that are about to execute one go on in the trampoline: at
//!   once, or when a signal handler returns to it
//!   ([`SystemCallSites::relocated`]).
//!
//! The gate is saved with the image, and so are the patched pages, so a thawed
//! program never traps at a site it has used before.
#![allow(unsafe_code)]

mod jumps;
mod site;

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use thaw_abi::layout::{GATE_BASE, GATE_CODE_BASE, GATE_CODE_SIZE, GATE_END, GATE_TABLE_SIZE};

use super::HostProcesses;
use super::entry;
use crate::errno::{Errno, Result};
use crate::machine::{
    Clocks, Code, KnownSite, Memory, PROT_EXEC, PROT_READ, PROT_WRITE, Patched, Patience, Sharing,
    SiteCode, SystemCallSites, VdsoSlots,
};
use crate::memory::{GuestRange, KernelRange};
use crate::registers::Frame;
use crate::sync::KernelCell;
use crate::user::UserAddress;

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
    state: KernelCell<State>,
}

#[derive(Clone, Default)]
struct State {
    used: u64,
    /// End of the part of the gate that is mapped: the table and the
    /// trampolines so far.
    mapped_end: u64,
    /// Address of a displaced `syscall` → where a thread there goes on.
    sites: BTreeMap<u64, u64>,
    /// Address of an instruction that has moved from behind a `syscall`.
    moved: BTreeMap<u64, Moved>,
    traps: Traps,
    /// Where the mappings begin whose known sites have been patched.
    prepared: Vec<u64>,
    /// Nothing is patched: somebody looks at the code.
    is_original: bool,
}

/// How often the sites that were met last have trapped.
#[derive(Clone)]
struct Traps([(u64, u32); 64]);

impl Default for Traps {
    fn default() -> Self {
        Self([(0, 0); 64])
    }
}

impl Traps {
    /// Of a site that cannot be patched.
    const HOPELESS: u32 = u32::MAX;

    fn slot(&mut self, syscall: u64) -> &mut (u64, u32) {
        &mut self.0[(syscall >> 2) as usize % 64]
    }

    /// Counts one more at `syscall`, and returns how many there were in a row; `None` if
    /// the site has been given up.
    fn count(&mut self, syscall: u64) -> Option<u32> {
        let slot = self.slot(syscall);
        let before = if slot.0 == syscall { slot.1 } else { 0 };
        if before == Self::HOPELESS {
            return None;
        }
        *slot = (syscall, before.saturating_add(1).min(Self::HOPELESS - 1));
        Some(slot.1)
    }

    /// Remembers that the site cannot be patched, as long as the traps of others leave
    /// room: to search the text again at each trap takes longer than many traps.
    fn give_up(&mut self, syscall: u64) {
        *self.slot(syscall) = (syscall, Self::HOPELESS);
    }
}

/// Where an instruction has gone.
#[derive(Clone, Copy)]
struct Moved {
    to: u64,
    /// Where the jump lies that has taken its place, and its slot.
    jump: u64,
    slot: u64,
}

/// The text has to be searched for jumps before instructions behind a `syscall` move, which
/// costs more than a patch. With [`Patience::NONE`] that does not matter.
const TRAPS_BEFORE_SEARCH: u32 = 64;

/// Most mappings of an address space whose known sites are patched at once.
const PREPARED_MAX: usize = 64;

/// Bytes of the patch: an indirect jump through an absolute address.
const JUMP_SIZE: usize = 7;

impl SystemCallSites for Gate {
    fn copy(&self) -> Self {
        Self { state: KernelCell::new(self.state.borrow_mut().clone()) }
    }

    fn create(&self, vdso: VdsoSlots) -> Result<()> {
        let mapped = {
            let mut state = self.state.borrow_mut();
            let before = core::mem::take(&mut *state);
            state.mapped_end = FIRST_MAPPED_END;
            before.mapped_end
        };
        if mapped > FIRST_MAPPED_END {
            HostProcesses::unmap(part_of_gate(FIRST_MAPPED_END, mapped))?;
        }
        let table = part_of_gate(GATE_BASE, FIRST_MAPPED_END);
        HostProcesses::map_anonymous(table, PROT_READ | PROT_WRITE, Sharing::Private)?;
        let first = [
            &raw const entry::thaw_syscall_entry as u64,
            vdso.clock,
            HostProcesses::guest_clock() as *const _ as u64,
            vdso.offsets,
        ];
        // SAFETY: mapped above, and used by nobody yet.
        unsafe { (GATE_BASE as *mut [u64; 4]).write(first) };
        HostProcesses::protect(table, PROT_READ | PROT_EXEC)
    }

    fn mapped_range(&self) -> (u64, u64) {
        (GATE_BASE, self.state.borrow_mut().mapped_end.saturating_sub(GATE_BASE))
    }

    fn patch(&self, frame: &Frame, code: &dyn Code, patience: Patience) -> Patched {
        let syscall = frame.rip().wrapping_sub(2);
        if self.state.borrow_mut().is_original {
            return Patched::Nothing;
        }
        // Counted as far as the traps of other sites do not come in between.
        let Some(counted) = self.state.borrow_mut().traps.count(syscall) else {
            return Patched::Nothing;
        };
        let traps = if patience.traps == Patience::NONE { u32::MAX } else { counted };
        if let Some(site) = KnownSite::of(frame, syscall) {
            return self.patch_movable(site, code, traps >= patience.traps);
        }
        if traps < TRAPS_BEFORE_SEARCH || !patience.may_move_behind || code_at(syscall).is_none() {
            return Patched::Nothing;
        }
        match self.patch_behind(frame, code) {
            Ok(()) => Patched::Behind,
            Err(_) => {
                self.state.borrow_mut().traps.give_up(syscall);
                Patched::Nothing
            }
        }
    }

    fn restart_address(&self, rip: u64) -> u64 {
        let syscall = rip.wrapping_sub(2);
        match UserAddress(syscall).read::<[u8; 2]>() {
            Ok([0x0f, 0x05]) => syscall,
            _ => self.state.borrow_mut().sites.get(&syscall).copied().unwrap_or(syscall),
        }
    }

    fn restart_displaced(&self, frame: &Frame) -> bool {
        let target = self.state.borrow_mut().sites.get(&frame.rip()).copied();
        let Some(target) = target else { return false };
        // Only if the patch is still there; the memory may hold something else now.
        match UserAddress(frame.rip()).read::<[u8; 2]>() {
            Ok([0x01, 0x00]) => {
                frame.set_rip(target);
                true
            }
            _ => false,
        }
    }

    fn relocated(&self, rip: u64) -> u64 {
        let Some(moved) = self.state.borrow_mut().moved.get(&rip).copied() else { return rip };
        // Only if the jump is still there; the memory may hold something else now.
        match UserAddress(moved.jump).read::<[u8; JUMP_SIZE]>() {
            Ok(bytes) if bytes == jump_through(moved.slot) => moved.to,
            _ => rip,
        }
    }

    fn as_seen(&self, rip: u64) -> u64 {
        if !(GATE_CODE_BASE..GATE_END).contains(&rip) {
            return rip;
        }
        let state = self.state.borrow_mut();
        let moved = state.moved.iter().map(|(original, moved)| (*original, moved.to));
        let displaced = state.sites.iter().map(|(syscall, entry)| (*syscall, *entry));
        let mut all = moved
            .chain(displaced)
            .filter(|(original, _)| *original < GATE_CODE_BASE || *original >= GATE_END);
        all.find(|(_, to)| *to == rip).map_or(rip, |(original, _)| original)
    }

    fn is_being_written(&self, frame: &Frame, code: &dyn Code) -> bool {
        const INSTRUCTION_FETCH: u64 = 0x10;
        /// Intel SDM vol. 2, 2.3.11.
        const LONGEST_INSTRUCTION: u64 = 15;
        let at = frame.address();
        frame.error() & INSTRUCTION_FETCH != 0
            && at.wrapping_sub(frame.rip()) < LONGEST_INSTRUCTION
            && ((GATE_BASE..self.state.borrow_mut().mapped_end).contains(&at)
                || code.protection(at, at + 1).is_some())
    }

    fn put_back(&self, code: &dyn Code) {
        self.state.borrow_mut().is_original = true;
        for replaced in self.replaced_before().into_iter().chain(self.replaced_behind()) {
            // What fails stays a jump, which does what the code did.
            let _: Result<()> = replaced.put_back(code);
        }
    }

    fn replace_again(&self) {
        self.state.borrow_mut().is_original = false;
    }
}

impl Gate {
    /// Patches a site whose last instruction before the `syscall` can move: with all known sites of its
    /// mapping if it is one of them, else if `is_time`.
    fn patch_movable(&self, site: KnownSite, code: &dyn Code, is_time: bool) -> Patched {
        self.prepare_mapping(site.syscall, code);
        if !site.is_there() {
            return Patched::Before;
        }
        code.remember_site(&site);
        if !is_time {
            return Patched::Nothing;
        }
        if self.patch_before(&[site], code).is_err() {
            self.state.borrow_mut().traps.give_up(site.syscall);
            return Patched::Nothing;
        }
        Patched::Before
    }

    /// Patches the known sites of the mapping around `address`, the first time that a program traps there.
    /// What fails is left to the trap.
    fn prepare_mapping(&self, address: u64, code: &dyn Code) {
        let Some((start, end)) = code.text_around(address) else { return };
        let is_prepared = {
            let state = self.state.borrow_mut();
            state.prepared.len() >= PREPARED_MAX || state.prepared.contains(&start)
        };
        let Some(mut known) = (!is_prepared).then(|| code.known_sites(address)).flatten() else {
            return;
        };
        self.state.borrow_mut().prepared.push(start);
        known.retain(|site| site.start() >= start && site.end() <= end && site.is_there());
        let _: Result<()> = self.patch_before(&known, code);
    }

    /// Moves the instructions before `syscall`s of one mapping, in the order of their addresses.
    fn patch_before(&self, sites: &[KnownSite], code: &dyn Code) -> Result<()> {
        let (Some(first), Some(last)) = (sites.first(), sites.last()) else { return Ok(()) };
        let (start, end) = (first.start(), last.end());
        let protection = code.protection(start, end).ok_or(Errno::EFAULT)?;
        let trampolines = self.reserve_all(sites.len())?;
        let texts: Vec<Text> = sites.iter().map(KnownSite::trampoline).collect();
        self.write(trampolines.iter().zip(&texts))?;
        let all = || sites.iter().zip(&trampolines);
        for (site, trampoline) in all() {
            let entry = trampoline.code + u64::from(site.code.prefix);
            self.state.borrow_mut().sites.insert(site.syscall, entry);
        }
        write_code(start, end, protection, || {
            all().try_for_each(|(site, trampoline)| site.write_jump(trampoline.slot))
        })
    }

    /// Moves the instructions behind the `syscall` that `frame` returns from.
    fn patch_behind(&self, frame: &Frame, code: &dyn Code) -> Result<()> {
        let (syscall, behind) = (frame.rip() - 2, frame.rip());
        let mut bytes = [0u8; site::BEHIND];
        UserAddress(behind).read_bytes(&mut bytes)?;
        let suffix = site::suffix(&bytes, JUMP_SIZE - 2).ok_or(Errno::ENOEXEC)?;
        let end = behind + suffix.len() as u64;
        let protection = code.protection(syscall, end).ok_or(Errno::EFAULT)?;
        let text_around = code.text_around(syscall).ok_or(Errno::EFAULT)?;
        let boundaries = suffix.boundaries().map(|offset| behind + offset as u64);
        if jumps::lead_to(boundaries, text_around)? {
            return Err(Errno::ENOEXEC);
        }

        let trampoline = self.reserve()?;
        let mut text = Text::new();
        let entry = trampoline.code;
        let after = entry + ENTRY_SIZE;
        text.push_entry(after);
        text.push(&bytes[..suffix.len()]);
        text.push_jump(end);
        let slot = trampoline.slot;
        self.write([(&trampoline, &text)].into_iter())?;
        {
            let mut state = self.state.borrow_mut();
            // Of a thread that waits in the system call.
            state.sites.insert(after - 2, entry);
            state.moved.insert(syscall, Moved { to: entry, jump: syscall, slot });
            for offset in suffix.boundaries() {
                let moved = Moved { to: after + offset as u64, jump: syscall, slot };
                state.moved.insert(behind + offset as u64, moved);
            }
        }
        let mut patch = [NOP; site::BEHIND + 2];
        patch[..JUMP_SIZE].copy_from_slice(&jump_through(slot));
        let patch = &patch[..2 + suffix.len()];
        write_code(syscall, end, protection, || UserAddress(syscall).write_bytes(patch))?;
        frame.set_rip(after);
        Ok(())
    }

    /// The sites whose last instruction before the `syscall` has moved.
    fn replaced_before(&self) -> Vec<Replaced> {
        let sites = self.state.borrow_mut().sites.clone();
        let of_text = sites.iter().filter(|(site, _)| !(GATE_CODE_BASE..GATE_END).contains(*site));
        of_text.filter_map(|(&syscall, &entry)| Replaced::before(syscall, entry)).collect()
    }

    /// The sites at which instructions behind the `syscall` have moved.
    fn replaced_behind(&self) -> Vec<Replaced> {
        let moved = self.state.borrow_mut().moved.clone();
        let first = moved.iter().filter(|(original, moved)| **original == moved.jump);
        first.filter_map(|(_, moved)| Replaced::behind(*moved)).collect()
    }

    /// Takes room for trampolines, or for none.
    fn reserve_all(&self, count: usize) -> Result<Vec<Trampoline>> {
        let used = self.state.borrow_mut().used;
        let all: Result<Vec<_>> = (0..count).map(|_| self.reserve()).collect();
        all.inspect_err(|_| self.state.borrow_mut().used = used)
    }

    /// Takes room for a trampoline.
    fn reserve(&self) -> Result<Trampoline> {
        let mut state = self.state.borrow_mut();
        let index = FIRST_SITE + state.used;
        if index >= SLOTS || (index + 1) * TRAMPOLINE_SIZE > GATE_CODE_SIZE {
            return Err(Errno::ENOMEM);
        }
        let trampoline = Trampoline {
            slot: GATE_BASE + index * 8,
            code: GATE_CODE_BASE + index * TRAMPOLINE_SIZE,
        };
        let code_end = (trampoline.code + TRAMPOLINE_SIZE).next_multiple_of(4096);
        if code_end > state.mapped_end {
            let more = part_of_gate(state.mapped_end, code_end);
            HostProcesses::map_anonymous(more, PROT_READ | PROT_EXEC, Sharing::Private)?;
            state.mapped_end = code_end;
        }
        state.used += 1;
        Ok(trampoline)
    }

    /// Writes trampolines that no jump leads to yet.
    fn write<'a>(
        &self,
        trampolines: impl Iterator<Item = (&'a Trampoline, &'a Text)>,
    ) -> Result<()> {
        let mapped = part_of_gate(GATE_BASE, self.state.borrow_mut().mapped_end);
        HostProcesses::protect(mapped, PROT_READ | PROT_WRITE)?;
        for (trampoline, text) in trampolines {
            // SAFETY: slot and code lie inside the gate, which is writable now, and
            // no jump leads to them yet.
            unsafe {
                (trampoline.slot as *mut u64).write(trampoline.code);
                core::ptr::copy_nonoverlapping(
                    text.bytes.as_ptr(),
                    trampoline.code as *mut u8,
                    text.bytes.len(),
                );
            }
        }
        HostProcesses::protect(mapped, PROT_READ | PROT_EXEC)
    }
}

/// Pages of the gate.
fn part_of_gate(start: u64, end: u64) -> KernelRange {
    debug_assert!(GATE_BASE <= start && end <= GATE_END);
    // SAFETY: nothing refers to the gate's memory but the guest's code.
    unsafe { KernelRange::new(start, end - start) }
}

impl KnownSite {
    /// The site of a trapped system call, if it is of this form.
    fn of(frame: &Frame, syscall: u64) -> Option<Self> {
        let bytes = code_at(syscall)?;
        let registers = site::Registers {
            rax: frame.orig_rax(),
            rdi: frame.rdi(),
            rsi: frame.rsi(),
            rdx: frame.rdx(),
        };
        let prefix = site::prefix(&bytes, &registers)? as u8;
        Some(Self { syscall, code: SiteCode { bytes, prefix } })
    }

    fn start(&self) -> u64 {
        self.syscall.saturating_sub(self.code.prefix.into())
    }

    fn end(&self) -> u64 {
        self.syscall + 2
    }

    /// The instruction that moves, and the `syscall`.
    fn replaced(&self) -> &[u8] {
        &self.code.bytes[site::BEFORE - 2 - usize::from(self.code.prefix)..]
    }

    /// Whether its code lies there, and was not replaced.
    fn is_there(&self) -> bool {
        let from = site::BEFORE - self.replaced().len();
        code_at(self.syscall).is_some_and(|bytes| bytes[from..] == *self.replaced())
    }

    /// What its jump leads to.
    fn trampoline(&self) -> Text {
        let mut text = Text::new();
        text.push(&self.replaced()[..self.code.prefix.into()]);
        text.push_entry(self.end());
        text
    }

    /// Writes the jump in the place of both instructions.
    fn write_jump(&self, slot: u64) -> Result<()> {
        // Nops first: the jump ends with the `syscall`, so that its last two bytes,
        // which fault, lie where that was.
        let len = self.replaced().len();
        let mut patch = [NOP; site::BEFORE];
        patch[len - JUMP_SIZE..len].copy_from_slice(&jump_through(slot));
        UserAddress(self.start()).write_bytes(&patch[..len])
    }
}

/// The bytes up to the end of a `syscall` instruction, if there is one at an address.
fn code_at(syscall: u64) -> Option<[u8; site::BEFORE]> {
    let mut bytes = [0; site::BEFORE];
    let from = syscall.wrapping_add(2).wrapping_sub(site::BEFORE as u64);
    UserAddress(from).read_bytes(&mut bytes).ok()?;
    (bytes[site::BEFORE - 2..] == site::SYSCALL).then_some(bytes)
}

/// Rewrites code between two addresses of a mapping. A vCPU that executes in these pages
/// meanwhile faults and comes back ([`SystemCallSites::is_being_written`]).
fn write_code(start: u64, end: u64, protection: u32, write: impl Fn() -> Result<()>) -> Result<()> {
    let first_page = start & !4095;
    let pages = GuestRange::new(first_page, end - first_page)?;
    let written = HostProcesses::protect(pages, PROT_READ | PROT_WRITE).and_then(|()| write());
    // The range had this protection a moment ago, and no area is split for it.
    HostProcesses::protect(pages, protection)?;
    written
}

const NOP: u8 = 0x90;

/// `jmp *slot`, the slot being in the low 2 GiB.
fn jump_through(slot: u64) -> [u8; JUMP_SIZE] {
    let mut jump = [0xff, 0x24, 0x25, 0, 0, 0, 0];
    jump[3..].copy_from_slice(&(slot as u32).to_le_bytes());
    jump
}

/// A site that was replaced.
struct Replaced {
    /// Where its code begins.
    start: u64,
    /// Where the jump lies, and its slot.
    jump: u64,
    slot: u64,
    /// The code that it had.
    original: Vec<u8>,
}

impl Replaced {
    /// The site of a `syscall` that lies in the trampoline with this entry now.
    fn before(syscall: u64, entry: u64) -> Option<Self> {
        let index = entry.checked_sub(GATE_CODE_BASE)? / TRAMPOLINE_SIZE;
        let code = GATE_CODE_BASE + index * TRAMPOLINE_SIZE;
        let mut original = alloc::vec![0; (entry - code) as usize];
        UserAddress(code).read_bytes(&mut original).ok()?;
        original.extend_from_slice(&site::SYSCALL);
        let start = syscall.checked_sub(entry - code)?;
        let jump = (syscall + 2).checked_sub(JUMP_SIZE as u64)?;
        Some(Self { start, jump, slot: GATE_BASE + index * 8, original })
    }

    /// The site of a `syscall` behind which instructions have moved. Its trampoline ends with a jump to
    /// what follows them.
    fn behind(moved: Moved) -> Option<Self> {
        let Moved { to: entry, jump, slot } = moved;
        let mut text = [0; TRAMPOLINE_SIZE as usize - ENTRY_SIZE as usize];
        UserAddress(entry + ENTRY_SIZE).read_bytes(&mut text).ok()?;
        let ends_at = |len: &usize| {
            let mut end = Text::new();
            end.push_jump(jump + 2 + *len as u64);
            text[*len..].starts_with(&end.bytes[..end.at])
        };
        let len = (JUMP_SIZE - 2..=site::BEHIND).find(ends_at)?;
        let original = [&site::SYSCALL, &text[..len]].concat();
        Some(Self { start: jump, jump, slot, original })
    }

    /// Writes the code back if the jump is still there; the memory may hold something else now.
    fn put_back(&self, code: &dyn Code) -> Result<()> {
        let end = self.start + self.original.len() as u64;
        if UserAddress(self.jump).read::<[u8; JUMP_SIZE]>()? != jump_through(self.slot) {
            return Ok(());
        }
        let protection = code.protection(self.start, end).ok_or(Errno::EFAULT)?;
        write_code(self.start, end, protection, || {
            UserAddress(self.start).write_bytes(&self.original)
        })
    }
}

/// Room for a trampoline, and the slot that leads to it.
struct Trampoline {
    slot: u64,
    code: u64,
}

/// Machine code being written.
struct Text {
    bytes: [u8; TRAMPOLINE_SIZE as usize],
    at: usize,
}

/// Bytes of [`Text::push_entry`].
const ENTRY_SIZE: u64 = 10 + JUMP_SIZE as u64;

impl Text {
    fn new() -> Self {
        Self { bytes: [NOP; TRAMPOLINE_SIZE as usize], at: 0 }
    }

    /// The system call, which returns to `after`: `movabs $after,%rcx; jmp *GATE_BASE`.
    fn push_entry(&mut self, after: u64) {
        self.push(&[0x48, 0xb9]);
        self.push(&after.to_le_bytes());
        self.push(&jump_through(GATE_BASE));
    }

    /// `jmp *0(%rip)`, followed by the address.
    fn push_jump(&mut self, to: u64) {
        self.push(&[0xff, 0x25, 0, 0, 0, 0]);
        self.push(&to.to_le_bytes());
    }

    fn push(&mut self, bytes: &[u8]) {
        self.bytes[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_site_that_cannot_be_patched_is_not_tried_again() {
        let (mut traps, site, same_slot) = (Traps::default(), 0x40_1000, 0x40_1000 + 64 * 4);
        assert_eq!((traps.count(site), traps.count(site)), (Some(1), Some(2)));
        traps.give_up(site);
        assert_eq!((traps.count(site), traps.count(site)), (None, None));
        assert_eq!(traps.count(same_slot), Some(1));
        assert_eq!(traps.count(site), Some(1), "forgotten for another");
    }

    #[test]
    fn slots_leave_a_faulting_instruction() {
        for index in [0, 1, SLOTS - 1] {
            let slot = (GATE_BASE + index * 8) as u32;
            assert_eq!(slot.to_le_bytes()[2..], [0x01, 0x00]);
        }
    }

    #[test]
    fn trampolines_have_room_for_all_that_moves() {
        let most = ENTRY_SIZE + site::BEHIND as u64 + 14;
        assert!(most <= TRAMPOLINE_SIZE);
        assert!(site::BEFORE as u64 + ENTRY_SIZE <= TRAMPOLINE_SIZE);
    }
}
