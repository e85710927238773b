//! Connections to ports on which something inside an instance listens, from outside.
//!
//! The instance's kernel gives its listener the other end of a pair of sockets; the bytes pass
//! through this daemon, so that they can come from any client.

use crate::remote::RemoteChannel;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use thaw_sandbox::RemoteMessage;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

/// What the `Upgrade` header says for a connection to a port of a sandbox.
pub const PORT_PROTOCOL: &str = "thaw-port";
/// How long a sandbox may take to say whether somebody listens.
const PATIENCE: Duration = Duration::from_secs(20);

/// Why there is no connection: one sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PortProblem {
    /// Nobody listens there.
    #[error(
        "nothing in the sandbox listens on port {0}; start a server there, on any address of the \
         sandbox"
    )]
    Closed(u16),
    /// There are too many connections.
    #[error("{0}")]
    Full(String),
    /// The sandbox cannot, or has ended.
    #[error("{0}")]
    Refused(String),
}

/// A connection to a port of an instance.
#[derive(Debug)]
pub struct PortStream {
    stream: UnixStream,
    _place: OwnedSemaphorePermit,
}

impl PortStream {
    /// Connects to a port, 1 to 65,535; this holds a place among the instance's connections.
    ///
    /// # Errors
    /// See [`PortProblem`].
    pub(crate) async fn open(
        channel: &dyn RemoteChannel,
        port: u16,
        place: OwnedSemaphorePermit,
        sent: impl FnOnce(),
    ) -> Result<Self, PortProblem> {
        let sockets = sockets().map_err(lost)?;
        Self::over(sockets, channel, port, place, sent).await
    }

    /// The same with sockets that are there: this end, and the sandbox's.
    ///
    /// # Errors
    /// See [`PortProblem`].
    pub(crate) async fn over(
        (ours, theirs): (OwnedFd, OwnedFd),
        channel: &dyn RemoteChannel,
        port: u16,
        place: OwnedSemaphorePermit,
        sent: impl FnOnce(),
    ) -> Result<Self, PortProblem> {
        channel.send_remote(RemoteMessage::port(port), &[theirs.as_fd()]).map_err(lost)?;
        drop(theirs);
        sent();
        let mut stream = UnixStream::from_std(StdUnixStream::from(ours)).map_err(lost)?;
        match timeout(PATIENCE, stream.read_i32_le()).await {
            Ok(Ok(0)) => Ok(Self { stream, _place: place }),
            Ok(Ok(libc::ECONNREFUSED)) => Err(PortProblem::Closed(port)),
            Ok(Ok(errno)) => Err(lost(io::Error::from_raw_os_error(errno))),
            Ok(Err(error)) => Err(lost(error)),
            Err(_) => Err(PortProblem::Refused(format!(
                "the sandbox did not answer within {} s; if its image was built by an older \
                 version of thaw, build it again",
                PATIENCE.as_secs()
            ))),
        }
    }
}

/// The sockets of a connection: this end, and the sandbox's.
///
/// # Errors
/// The host has no sockets left.
pub(crate) fn sockets() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

fn lost(error: io::Error) -> PortProblem {
    PortProblem::Refused(format!("the sandbox cannot be reached ({error}); try again"))
}

impl AsyncRead for PortStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for PortStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
