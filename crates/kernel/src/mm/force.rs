//! Writing to guest memory as a debugger does: also where the guest may not (`FOLL_FORCE` in Linux'
//! mm/gup.c).

use super::lazy;
use super::space::AddressSpace;
use super::vma::VmaFlags;
use crate::errno::{Errno, Result};
use crate::platform::machine::{Machine, Memory, PROT_READ, PROT_WRITE};
use crate::platform::memory::GuestRange;
use crate::platform::user::UserAddress;

/// What may be written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The memory that the guest may write to.
    AsGuest,
    /// Private memory, too, that it may not write to: breakpoints lie in code.
    Forced,
}

impl AddressSpace {
    /// Writes up to the first page that cannot be written to; how many bytes. In the running host
    /// process only.
    pub fn write_some(&self, to: UserAddress, bytes: &[u8], access: Access) -> Result<usize> {
        to.check(bytes.len())?;
        let mut done = 0;
        while done < bytes.len() {
            let at = to.offset(done as u64);
            let len = (4096 - (at.0 & 4095) as usize).min(bytes.len() - done);
            if self.write_in_page(at, &bytes[done..done + len], access).is_err() {
                break;
            }
            done += len;
        }
        Ok(done)
    }

    fn write_in_page(&self, at: UserAddress, bytes: &[u8], access: Access) -> Result<()> {
        let area = self.find(at.0).ok_or(Errno::EFAULT)?;
        if access == Access::AsGuest || area.prot & PROT_WRITE != 0 {
            return at.write_bytes(bytes);
        }
        if area.flags.contains(VmaFlags::SHARED) {
            return Err(Errno::EFAULT);
        }
        self.settle();
        let page = at.0 & !4095;
        lazy::map_range(page, page + 4096);
        if area.prot != 0 {
            // A page of a file that comes when it is touched has to be there.
            at.read::<u8>()?;
        }
        let range = || GuestRange::new(page, 4096);
        Machine::protect(range()?, PROT_READ | PROT_WRITE)?;
        let written = at.write_bytes(bytes);
        Machine::protect(range()?, area.prot)?;
        written
    }
}
