//! What the platform wants to know of the guest's code, where it replaces system call sites
//! ([`SystemCallSites`](crate::platform::machine::SystemCallSites)).

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::ops::Range;

use super::backing::MmapSource;
use super::space::AddressSpace;
use super::vma::{Vma, VmaFlags};
use crate::platform::machine::{Code, KnownSite, PROT_EXEC};
use crate::state::kernel;
use crate::sync::KernelCell;

/// Most files with known sites: a shell script runs some dozens of programs.
const FILES_MAX: usize = 64;
/// Most known sites of a file: the C library has some 400, of which a program comes by a few dozens.
const SITES_MAX: usize = 128;

/// Sites that programs have come by, in files of the lower layer. Those never change, so that the next
/// program that maps one has them replaced at once. Later ones than there is room for stay unknown.
#[derive(Default)]
pub struct KnownSites {
    /// By blob number: offset of the `syscall` → [`KnownSite::prefix`].
    files: KernelCell<BTreeMap<u32, BTreeMap<u64, u8>>>,
}

impl KnownSites {
    /// Remembers a site.
    pub fn remember(&self, blob: u32, offset: u64, prefix: u8) {
        let mut files = self.files.borrow_mut();
        if !files.contains_key(&blob) && files.len() >= FILES_MAX {
            return;
        }
        let sites = files.entry(blob).or_default();
        if sites.len() < SITES_MAX {
            sites.insert(offset, prefix);
        }
    }

    /// Calls `each` with those in a part of a file, in order: offset and [`KnownSite::prefix`].
    pub fn for_each(&self, blob: u32, part: Range<u64>, each: &mut dyn FnMut(u64, u8)) {
        let files = self.files.borrow_mut();
        if let Some(sites) = files.get(&blob) {
            sites.range(part).for_each(|(&offset, &prefix)| each(offset, prefix));
        }
    }
}

impl Code for AddressSpace {
    /// File-backed, executable, private memory is the only kind in which system call sites
    /// are patched.
    fn protection(&self, start: u64, end: u64) -> Option<u32> {
        let vma = self.find(start)?;
        let patchable = end <= vma.end
            && vma.prot & PROT_EXEC != 0
            && !vma.flags.contains(VmaFlags::SHARED)
            && (vma.file.is_some() || vma.flags.contains(VmaFlags::VDSO));
        patchable.then_some(vma.prot)
    }

    fn text_around(&self, address: u64) -> Option<(u64, u64)> {
        let vma = self.find(address)?;
        Some((vma.start, vma.end))
    }

    fn known_sites(&self, address: u64) -> Vec<KnownSite> {
        let mut found = Vec::new();
        if let Some((blob, vma)) = unchanging(self.find(address)) {
            let part = vma.offset..vma.offset.saturating_add(vma.len());
            kernel().known_sites.for_each(blob, part, &mut |offset, prefix| {
                found.push(KnownSite { syscall: vma.start + (offset - vma.offset), prefix });
            });
        }
        found
    }

    fn remember_site(&self, site: KnownSite) {
        if let Some((blob, vma)) = unchanging(self.find(site.syscall)) {
            let offset = vma.offset + (site.syscall - vma.start);
            kernel().known_sites.remember(blob, offset, site.prefix);
        }
    }
}

/// An area with the blob number of its file, if it is code of the lower layer. Code that comes from an
/// image has its patches.
fn unchanging(area: Option<Vma>) -> Option<(u32, Vma)> {
    let vma = area?;
    let is_fresh = vma.prot & PROT_EXEC != 0 && !vma.flags.contains(VmaFlags::FROM_IMAGE);
    match vma.file.as_deref()?.source {
        MmapSource::Blob(blob) if is_fresh => Some((blob, vma)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(known: &KnownSites, blob: u32, part: Range<u64>) -> Vec<(u64, u8)> {
        let mut found = Vec::new();
        known.for_each(blob, part, &mut |offset, prefix| found.push((offset, prefix)));
        found
    }

    #[test]
    fn sites_are_found_in_their_part_of_their_file_in_order() {
        let known = KnownSites::default();
        for (offset, prefix) in [(0x3000, 3), (0x1000, 1), (0x2000, 2)] {
            known.remember(7, offset, prefix);
        }
        known.remember(8, 0x1800, 9);
        assert_eq!(of(&known, 7, 0..0x3000), [(0x1000, 1), (0x2000, 2)]);
        assert_eq!(of(&known, 9, 0..u64::MAX), []);
    }

    #[test]
    fn what_a_program_can_have_remembered_is_bounded() {
        let known = KnownSites::default();
        for blob in 0..2 * FILES_MAX as u32 {
            for offset in 0..2 * SITES_MAX as u64 {
                known.remember(blob, offset, 0);
            }
        }
        assert_eq!(of(&known, FILES_MAX as u32 - 1, 0..u64::MAX).len(), SITES_MAX);
        assert_eq!(of(&known, FILES_MAX as u32, 0..u64::MAX), []);
    }
}
