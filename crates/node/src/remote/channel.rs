//! What reaches an instance.

use std::io;
use std::os::fd::BorrowedFd;
use thaw_sandbox::RemoteMessage;

/// Says something about processes and files inside an instance.
pub trait RemoteChannel: Send + Sync {
    /// Says it, with sockets.
    ///
    /// # Errors
    /// The instance has ended, or does not take what it is given.
    fn send_remote(&self, _message: RemoteMessage, _sockets: &[BorrowedFd<'_>]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Whether its kernel can have processes from outside go on in another boot, and under another
    /// daemon: one of this build can.
    fn can_have_execs_go_on(&self) -> bool {
        false
    }
}
