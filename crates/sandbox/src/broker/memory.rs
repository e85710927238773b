//! What the host processes of one sandbox share: memory and a bell. Both are
//! made for it alone, are charged to its control group as it touches them, and
//! reach nothing else.

use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use thaw_abi::layout::ARENA_FILE_SIZE;

/// What has been given out.
#[derive(Debug, Default)]
pub struct Shared {
    has_memory: bool,
    bell: Bell,
}

/// How much of the bell has been given out.
#[derive(Debug, Default)]
enum Bell {
    /// Neither end.
    #[default]
    Unasked,
    /// The end that is rung; this is the other.
    Half(OwnedFd),
    /// Both.
    Given,
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

    /// The bell: first the end that is rung, then the one that hears it; `EEXIST`
    /// the third time. Sockets and not an eventfd, since a sandbox may receive from
    /// any descriptor, but read none.
    pub fn bell(&mut self) -> Result<OwnedFd, Errno> {
        match std::mem::replace(&mut self.bell, Bell::Given) {
            Bell::Unasked => {
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                let ends = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
                let (rung, hears) = ends.inspect_err(|_| self.bell = Bell::Unasked)?;
                self.bell = Bell::Half(hears);
                Ok(rung)
            }
            Bell::Half(hears) => Ok(hears),
            Bell::Given => Err(Errno::EXIST),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::fstat;
    use rustix::net::{RecvFlags, SendFlags, recv, send};

    #[test]
    fn each_is_granted_once_and_a_bell_has_two_ends() {
        let mut shared = Shared::default();
        let file = shared.memory_file().unwrap();
        assert_eq!(fstat(&file).unwrap().st_size as u64, ARENA_FILE_SIZE);
        assert_eq!(fstat(&file).unwrap().st_blocks, 0);
        assert!(ftruncate(&file, 0).is_err());
        assert_eq!(shared.memory_file().unwrap_err(), Errno::EXIST);
        let (rung, hears) = (shared.bell().unwrap(), shared.bell().unwrap());
        assert_eq!(shared.bell().unwrap_err(), Errno::EXIST);
        send(&rung, b"!", SendFlags::empty()).unwrap();
        assert_eq!(recv(&hears, &mut [0; 8], RecvFlags::empty()).unwrap().1, 1);
    }
}
