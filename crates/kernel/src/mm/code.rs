//! What the platform wants to know of the guest's code, where it replaces system call sites
//! ([`SystemCallSites`](crate::platform::machine::SystemCallSites)).

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::ops::Range;

use super::backing::MmapSource;
use super::space::AddressSpace;
use super::vma::{Vma, VmaFlags};
use crate::platform::machine::{Code, KnownSite, PROT_EXEC, SiteCode};
use crate::state::kernel;
use crate::sync::KernelCell;

/// Most files with known sites: a shell script runs some dozens of programs.
const FILES_MAX: usize = 64;
/// Most known sites of a file.
const SITES_MAX: usize = 128;
/// Most pages of a file with known sites: a process that patches them copies each. Those of the C library
/// lie on 54, of which a program uses a dozen.
const PAGES_MAX: usize = 32;

/// The sites at which programs have trapped, in files of the lower layer. Those files never change, so a
/// site in one is a site for every program that maps it. Where there is no room, new sites are not
/// remembered.
#[derive(Default)]
pub struct KnownSites {
    /// By blob number.
    files: KernelCell<BTreeMap<u32, FileSites>>,
}

/// By offset of the `syscall` in the file.
type FileSites = BTreeMap<u64, SiteCode>;

impl KnownSites {
    /// Remembers a site.
    pub fn remember(&self, blob: u32, offset: u64, code: SiteCode) {
        let mut files = self.files.borrow_mut();
        if !files.contains_key(&blob) && files.len() >= FILES_MAX {
            return;
        }
        let sites = files.entry(blob).or_default();
        if sites.len() < SITES_MAX && has_room_on_page(sites, offset) {
            sites.insert(offset, code);
        }
    }

    /// Calls `each` with those in a part of a file, in order, and their offsets.
    pub fn for_each(&self, blob: u32, part: Range<u64>, each: &mut dyn FnMut(u64, SiteCode)) {
        let files = self.files.borrow_mut();
        if let Some(sites) = files.get(&blob) {
            sites.range(part).for_each(|(&offset, &code)| each(offset, code));
        }
    }
}

/// Whether a page has a site already, or there may be one more page that has.
fn has_room_on_page(sites: &FileSites, offset: u64) -> bool {
    let page = offset & !4095;
    let mut pages: Vec<u64> = sites.keys().map(|offset| offset & !4095).collect();
    pages.dedup();
    pages.len() < PAGES_MAX || pages.contains(&page)
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

    fn known_sites(&self, address: u64) -> Option<Vec<KnownSite>> {
        let (blob, vma) = lower_layer_code(self, address)?;
        let part = vma.offset..vma.offset.saturating_add(vma.len());
        let mut found = Vec::new();
        kernel().known_sites.for_each(blob, part, &mut |offset, code| {
            found.push(KnownSite { syscall: vma.start + (offset - vma.offset), code });
        });
        Some(found)
    }

    fn remember_site(&self, site: &KnownSite) {
        if let Some((blob, vma)) = lower_layer_code(self, site.syscall) {
            let offset = vma.offset + (site.syscall - vma.start);
            kernel().known_sites.remember(blob, offset, site.code);
        }
    }
}

/// The area around an address with the blob number of its file, if it is code of the lower layer. Areas that
/// an image has are left out: most of their sites are patched there.
fn lower_layer_code(space: &AddressSpace, address: u64) -> Option<(u32, Vma)> {
    let vma = space.find(address)?;
    let is_fresh = vma.prot & PROT_EXEC != 0 && !vma.flags.contains(VmaFlags::FROM_IMAGE);
    match vma.file.as_deref()?.source {
        MmapSource::Blob(blob) if is_fresh => Some((blob, vma)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(known: &KnownSites, blob: u32, part: Range<u64>) -> Vec<u64> {
        let mut found = Vec::new();
        known.for_each(blob, part, &mut |offset, _| found.push(offset));
        found
    }

    #[test]
    fn sites_are_found_in_their_part_of_their_file_in_order() {
        let known = KnownSites::default();
        for offset in [0x3000, 0x1000, 0x2000] {
            known.remember(7, offset, SiteCode::default());
        }
        known.remember(8, 0x1800, SiteCode::default());
        assert_eq!(of(&known, 7, 0..0x3000), [0x1000, 0x2000]);
        assert_eq!(of(&known, 9, 0..u64::MAX), []);
    }

    #[test]
    fn what_programs_can_have_remembered_is_bounded() {
        let known = KnownSites::default();
        for blob in 0..2 * FILES_MAX as u32 {
            for offset in 0..2 * SITES_MAX as u64 {
                known.remember(blob, offset, SiteCode::default());
            }
        }
        assert_eq!(of(&known, FILES_MAX as u32 - 1, 0..u64::MAX).len(), SITES_MAX);
        assert_eq!(of(&known, FILES_MAX as u32, 0..u64::MAX), []);
    }

    #[test]
    fn pages_that_a_program_has_to_copy_are_bounded() {
        let known = KnownSites::default();
        for page in 0..2 * PAGES_MAX as u64 {
            known.remember(1, page << 12, SiteCode::default());
        }
        known.remember(1, 8, SiteCode::default());
        assert_eq!(of(&known, 1, 0..u64::MAX).len(), PAGES_MAX + 1, "a known page takes more");
    }
}
