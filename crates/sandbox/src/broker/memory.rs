//! What the host processes of one sandbox share: memory and a bell. Both are
//! made for it alone, are charged to its control group as it touches them, and
//! reach nothing else.

use std::os::fd::OwnedFd;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use thaw_abi::layout::ARENA_FILE_SIZE;

/// What has been given out.
#[derive(Debug, Default)]
pub struct Shared {
    has_memory: bool,
    has_bell: bool,
}

impl Shared {
    /// The memory file; `EEXIST` the second time. Its size is sealed, so that no
    /// process of the sandbox can take pages from under the others.
    pub fn memory_file(&mut self) -> Result<OwnedFd, Errno> {
        if self.has_memory {
            return Err(Errno::EXIST);
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("thaw-arena", flags)?;
        ftruncate(&file, ARENA_FILE_SIZE)?;
        fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
        self.has_memory = true;
        Ok(file)
    }

    /// The bell; `EEXIST` the second time.
    pub fn bell(&mut self) -> Result<OwnedFd, Errno> {
        if self.has_bell {
            return Err(Errno::EXIST);
        }
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        self.has_bell = true;
        Ok(bell)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::fstat;

    #[test]
    fn each_is_granted_once() {
        let mut shared = Shared::default();
        let file = shared.memory_file().unwrap();
        assert_eq!(fstat(&file).unwrap().st_size as u64, ARENA_FILE_SIZE);
        assert_eq!(fstat(&file).unwrap().st_blocks, 0);
        assert!(ftruncate(&file, 0).is_err());
        assert_eq!(shared.memory_file().unwrap_err(), Errno::EXIST);
        shared.bell().unwrap();
        assert_eq!(shared.bell().unwrap_err(), Errno::EXIST);
    }
}
