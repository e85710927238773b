//! Shared mappings of upper-layer files.
//!
//! A mapping starts out empty; the first touch of a page faults and brings it
//! in ([`page_in`]). As long as the sandbox has one host process, a page lives
//! in one place at a time: in the page store of the file system, or in one of
//! its mappings, and any other use of the page takes it back. So all see the
//! same bytes although the memory is private to the host process, which is what
//! lets it be frozen, copied and thawed like all other memory. Once several
//! host processes share the arena, the page store is shared memory itself, and
//! a mapping maps its pages.

use super::AddressSpace;
use crate::errno::Result;
use crate::platform::memory::{GuestRange, Window};

/// `SEGV_MAPERR`: there is nothing at the address (sigaction(2)).
pub const SEGV_MAPERR: i32 = 1;

/// Brings in the page of a mapping of an upper-layer file in `space`, the running one, that a fault at
/// `address` waits for; `false` if there is none. A private mapping waits for pages that its file did
/// not have when it was made ([`super::absent`]). `code` is the fault's `si_code`: a page
/// that is there and does not allow what was tried need not come.
pub fn page_in(space: &AddressSpace, address: u64, code: i32) -> bool {
    if code != SEGV_MAPERR {
        return false;
    }
    let Some(vma) = space.find(address) else { return false };
    let Some(file) = vma.upper() else { return false };
    if vma.prot == 0 {
        return false;
    }
    space.settle();
    let at = address & !4095;
    if vma.shared_upper().is_none() {
        return space.copy_in(&vma, &**file, at) == Ok(true);
    }
    let placed = file.lend_around(at, vma.start..vma.end, vma.offset / 4096, vma.prot);
    if let Ok(Some(Placed::Shared { page })) = placed {
        space.note_shown(at, page);
    }
    matches!(placed, Ok(Some(_)))
}

/// Where a page that was brought in is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placed {
    /// In the mapping, and nowhere else.
    Moved,
    /// In the page store, which the mapping shows.
    Shared {
        /// Where it lies there.
        page: u64,
    },
}

/// Maps a page of the page store in guest memory.
pub fn place_page(address: u64, bytes: &[u8; 4096], prot: u32) -> Result<Placed> {
    if crate::mm::arena::is_shared() {
        let page = bytes.as_ptr() as u64;
        crate::mm::arena::map_page(page, address, prot)?;
        return Ok(Placed::Shared { page });
    }
    move_in(address, bytes, prot).map(|()| Placed::Moved)
}

/// Maps a page of private memory with these bytes in guest memory.
pub(super) fn move_in(address: u64, bytes: &[u8; 4096], prot: u32) -> Result<()> {
    // Filled elsewhere, lest another vCPU sees it empty.
    let mut window = Window::anonymous(4096)?;
    window.bytes_mut().copy_from_slice(bytes);
    window.move_to(GuestRange::new(address, 4096)?, prot)
}

/// Takes a page that [`place_page`] has mapped out of guest memory.
pub fn take_page(address: u64, bytes: &mut [u8; 4096]) {
    // Moved away first, lest another vCPU writes to it behind the copy.
    if let Ok(mut window) = GuestRange::new(address, 4096).and_then(Window::of_guest) {
        bytes.copy_from_slice(window.bytes_mut());
    }
}
