//! Memory in a swap file: how a host process gives up its own, how the arena that several share
//! is given back, and how both come back.
//!
//! | memory | in the file | comes back |
//! | --- | --- | --- |
//! | of one address space, and its gate | by the number of the space | mapped when it is touched, in its host process |
//! | of the arena: heap, pages, shared anonymous memory | once | read into the arena's file |
//!
//! Nothing here uses the heap as long as that is not back.
#![allow(unsafe_code)]

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use thaw_abi::control::Hibernate;
use thaw_abi::image::{Mapping, SOURCE_ZERO};
use thaw_abi::layout::{
    GATE_BASE, GATE_END, GUEST_MAX, INDEX_BASE, INDEX_MAX, KERNEL_BASE, MAPPINGS_BASE, MAPPINGS_MAX,
};

use super::image::Mappings;
use super::{AddressSpace, arena, file_parts, lazy, populate, shm};
use crate::errno::{Errno, Result};
use crate::platform::machine::{HostFiles, Machine, Memory, Populate, Vcpus};
use crate::platform::memory::{GuestRange, KernelRange};
use crate::platform::message;

/// Where the table of mappings lies in the file.
static TABLE_AT: AtomicU64 = AtomicU64::new(0);
/// How many mappings it has.
static TABLE_LEN: AtomicU32 = AtomicU32::new(0);
/// Bytes of the file.
static FILE_LEN: AtomicU64 = AtomicU64::new(0);

/// How often the sandbox has been hibernated in this boot.
static TIMES: AtomicU32 = AtomicU32::new(0);

/// Notes what the file is that memory is taken back from, all of it in the kernel's variables,
/// which stay.
pub fn note(command: &Hibernate) {
    TIMES.fetch_add(1, Relaxed);
    TABLE_AT.store(command.mappings_at, Relaxed);
    TABLE_LEN.store(command.mapping_count, Relaxed);
    FILE_LEN.store(command.file_len, Relaxed);
}

/// A number of the time since the sandbox was hibernated last, which none of its copies has; 0 if it was not in
/// this boot. From then on, memory may come from a swap file.
pub fn epoch() -> u64 {
    match TIMES.load(Relaxed) {
        0 => 0,
        times => crate::state::generation() << 32 | u64::from(times),
    }
}

/// An error if the file is shorter than it was: a touch of what is missing would end the
/// program, or this kernel, without a reason.
pub fn is_whole() -> Result<()> {
    let mut last = [0u8];
    let last_at = FILE_LEN.load(Relaxed).checked_sub(1).ok_or(Errno::EINVAL)?;
    match Machine::pread(lazy::file(), last[..].as_mut().into(), last_at)? {
        0 => Err(Errno::EIO),
        _ => Ok(()),
    }
}

/// Unmaps all that the file holds and this host process has for itself, page tables included, and
/// gives back what it does not need as long as it waits.
pub fn give_up() -> Result<()> {
    Machine::unmap(GuestRange::ALL)?;
    for (start, len) in [
        (GATE_BASE, GATE_END - GATE_BASE),
        (INDEX_BASE, INDEX_MAX),
        // The table of the file that it was hibernated over before.
        (MAPPINGS_BASE, MAPPINGS_MAX),
    ] {
        // SAFETY: the file, or the index, holds all that anybody refers to in there, and it is
        // back before anybody of this host process uses it.
        Machine::unmap(unsafe { KernelRange::new(start, len) })?;
    }
    arena::unmap_saved()?;
    file_parts::forget();
    lazy::forget_plan();
    populate::forget();
    message::discard_buffers();
    Machine::discard_stacks();
    Ok(())
}

/// The mappings of the file. No more than one caller has them at a time in a host process.
pub fn table() -> Result<Mappings<'static>> {
    let (at, len) = (TABLE_AT.load(Relaxed), TABLE_LEN.load(Relaxed));
    Ok(Mappings::in_file(lazy::file(), at, len, 0)?.0)
}

/// Reads the shared arena's memory back. From then on there is a heap in this host process.
pub fn take_back_arena() -> Result<()> {
    arena::map_saved()?;
    let mut mappings = table()?;
    let is_stored =
        |mapping: &Mapping| mapping.start >= KERNEL_BASE && mapping.source != SOURCE_ZERO;
    for stored in mappings.iter().filter(is_stored) {
        // Where this fails, reading fails too, and says why.
        let _ = Machine::populate(stored.start, stored.len, Populate::Write);
        // SAFETY: the arena is mapped, and nobody uses what is saved of it before it is back.
        unsafe { lazy::read(&stored) }?;
    }
    mappings.forget()
}

/// Plans, or makes, the mappings of an address space, which has this number in the file, in its
/// host process. The heap is back.
pub fn take_back(space: &AddressSpace, number: u32) -> Result<()> {
    let mut mappings = table()?;
    let own = mappings.iter().filter(|mapping| is_of(mapping, number));
    own.filter(|mapping| mapping.start < GATE_END).try_for_each(|gate| lazy::map(&gate))?;
    let guest = |mapping: &Mapping| is_of(mapping, number) && mapping.start >= GATE_END;
    // In a plan, flags say whether the mapping was made.
    let planned = mappings.iter().filter(guest).map(|mapping| Mapping { flags: 0, ..mapping });
    lazy::initialize(planned.chain(lazy::known_index()), lazy::Granularity::Mapping)?;
    mappings.forget()?;
    space.shared_anonymous().iter().try_for_each(shm::map)
}

/// Whether a mapping is of the guest's memory, or the gate, of the address space with a number.
fn is_of(mapping: &Mapping, number: u32) -> bool {
    mapping.space() == number && mapping.start < GUEST_MAX
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Sandbox;
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::FileExt;
    use thaw_abi::image::MAPPING_SPACE_SHIFT;

    use crate::platform::machine::HostFd;

    #[test]
    fn a_swap_file_that_was_cut_off_is_noticed_before_it_is_mapped() {
        let _sandbox = Sandbox::new();
        let file = tempfile();
        file.write_all_at(&[7; 5000], 0).unwrap();
        lazy::set_files(HostFd::new(file.as_raw_fd()), None);
        let is_whole_of = |file_len| {
            note(&Hibernate { file_len, ..bytemuck::Zeroable::zeroed() });
            is_whole()
        };
        is_whole_of(5000).unwrap();
        assert_eq!(is_whole_of(5001), Err(Errno::EIO));
        assert_eq!(is_whole_of(u64::MAX / 2), Err(Errno::EIO));
        assert_eq!(is_whole_of(0), Err(Errno::EINVAL));
    }

    #[test]
    fn an_address_space_takes_back_its_own_and_nothing_of_the_kernel() {
        let mapping = |start, space: u32| Mapping {
            start,
            len: 4096,
            flags: space << MAPPING_SPACE_SHIFT,
            ..bytemuck::Zeroable::zeroed()
        };
        assert!(is_of(&mapping(GATE_BASE, 3), 3) && is_of(&mapping(0x10_0000, 3), 3));
        assert!(!is_of(&mapping(0x10_0000, 0), 3) && !is_of(&mapping(KERNEL_BASE, 0), 0));
    }

    fn tempfile() -> File {
        let path = std::env::temp_dir().join(std::format!("thaw-swap-{}", std::process::id()));
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path);
        std::fs::remove_file(&path).unwrap();
        file.unwrap()
    }
}
