//! What the host processes of one sandbox share: memory and a socket that wakes them. Both are
//! made for it alone, are charged to its control group as it touches them, and
//! reach nothing else.

use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use thaw_abi::layout::ARENA_FILE_SIZE;

/// What has been given out.
#[derive(Debug, Default)]
pub struct Granted {
    has_memory: bool,
    wake_socket: WakeSocket,
}

/// How much of the wake socket has been given out.
#[derive(Debug, Default)]
enum WakeSocket {
    /// Neither end.
    #[default]
    Unasked,
    /// The end that sends; this is the other.
    Half(OwnedFd),
    /// Both.
    Given,
}

impl Granted {
    /// Whether nothing was given out.
    pub fn is_empty(&self) -> bool {
        !self.has_memory && matches!(self.wake_socket, WakeSocket::Unasked)
    }

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

    /// The wake socket: first the end that sends, then the one that receives; `EEXIST`
    /// the third time. Sockets and not an eventfd, since a sandbox may receive from
    /// any descriptor, but read none.
    pub fn wake_socket(&mut self) -> Result<OwnedFd, Errno> {
        match std::mem::replace(&mut self.wake_socket, WakeSocket::Given) {
            WakeSocket::Unasked => {
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                let ends = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
                let (sends, receives) =
                    ends.inspect_err(|_| self.wake_socket = WakeSocket::Unasked)?;
                self.wake_socket = WakeSocket::Half(receives);
                Ok(sends)
            }
            WakeSocket::Half(receives) => Ok(receives),
            WakeSocket::Given => Err(Errno::EXIST),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::fstat;
    use rustix::net::{RecvFlags, SendFlags, recv, send};

    #[test]
    fn each_is_granted_once_and_a_wake_socket_has_two_ends() {
        let mut shared = Granted::default();
        let file = shared.memory_file().unwrap();
        assert_eq!(fstat(&file).unwrap().st_size as u64, ARENA_FILE_SIZE);
        assert_eq!(fstat(&file).unwrap().st_blocks, 0);
        assert!(ftruncate(&file, 0).is_err());
        assert_eq!(shared.memory_file().unwrap_err(), Errno::EXIST);
        let (sends, receives) = (shared.wake_socket().unwrap(), shared.wake_socket().unwrap());
        assert_eq!(shared.wake_socket().unwrap_err(), Errno::EXIST);
        send(&sends, b"!", SendFlags::empty()).unwrap();
        assert_eq!(recv(&receives, &mut [0; 8], RecvFlags::empty()).unwrap().1, 1);
    }
}
