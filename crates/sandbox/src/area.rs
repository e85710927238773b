//! The parts of a sandbox's address space that travel in images.

use thaw_abi::PAGE_SIZE;
use thaw_abi::layout::{
    GATE_BASE, GATE_END, GUEST_MAX, GUEST_MIN, HEAP_BASE, HEAP_MAX, PAGES_BASE, PAGES_MAX,
    SHM_BASE, SHM_MAX,
};

/// Whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Area {
    /// The guest's.
    Guest,
    /// The kernel's: gate, heap, pages, shared anonymous memory.
    Kernel,
}

/// Whose memory a range is that may be saved or mapped; `None` for every other
/// range, an unaligned one, an empty one, and one that overflows.
pub(crate) fn area_of(start: u64, len: u64) -> Option<Area> {
    let end = start.checked_add(len)?;
    if len == 0 || !start.is_multiple_of(PAGE_SIZE) || !len.is_multiple_of(PAGE_SIZE) {
        return None;
    }
    let within = |base: u64, limit: u64| base <= start && end <= limit;
    if within(GUEST_MIN, GUEST_MAX) {
        return Some(Area::Guest);
    }
    let kernel = within(GATE_BASE, GATE_END)
        || within(HEAP_BASE, HEAP_BASE + HEAP_MAX)
        || within(PAGES_BASE, PAGES_BASE + PAGES_MAX)
        || within(SHM_BASE, SHM_BASE + SHM_MAX);
    kernel.then_some(Area::Kernel)
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_abi::layout::{BOOT_BASE, INDEX_BASE, KERNEL_BASE};

    #[test]
    fn only_saved_areas_pass() {
        assert_eq!(area_of(0x40_0000, 0x1000), Some(Area::Guest));
        assert_eq!(area_of(GATE_BASE, GATE_END - GATE_BASE), Some(Area::Kernel));
        assert_eq!(area_of(HEAP_BASE, 0x1000), Some(Area::Kernel));
        assert_eq!(area_of(PAGES_BASE, PAGES_MAX), Some(Area::Kernel));
        for (start, len) in [
            (KERNEL_BASE, 0x1000),
            (BOOT_BASE, 0x1000),
            (INDEX_BASE, 0x1000),
            (0, 0x1000),
            (GUEST_MIN - 0x1000, 0x2000),
            (GUEST_MAX - 0x1000, 0x2000),
            (HEAP_BASE + HEAP_MAX - 0x1000, 0x2000),
            (0x40_0000, 0),
            (0x40_0001, 0x1000),
            (0x40_0000, 0x1001),
            (0xffff_ffff_ffff_f000, 0x1000),
            (0x40_0000, u64::MAX),
        ] {
            assert_eq!(area_of(start, len), None, "{start:#x} {len:#x}");
        }
    }
}
