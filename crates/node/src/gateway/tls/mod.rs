//! TLS with clients. rustls speaks it, from the handshake on, as long as the daemon lives that has agreed
//! on the keys. A connection of another protocol that is left to the next daemon goes on with a record
//! layer of this module's own ([`Session`]), since the state of rustls cannot be written down
//! (docs/decisions/0085). To have all of that state at hand, rustls gets each record only once it is
//! whole ([`Records`]).

mod broken;
mod inbox;
mod keys;
mod records;
mod session;
#[cfg(test)]
mod tests;
mod written;

pub(super) use records::Records;
pub(super) use session::Session;
pub(super) use written::State;

use std::io::{self, IoSlice, Read, Write};
use std::mem;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

/// A client's connection within TLS.
pub(super) struct Tls {
    layer: Layer,
    /// The client was told that nothing more comes.
    is_shut: bool,
}

/// Who makes and reads its records.
enum Layer {
    Rustls(Box<TlsStream<Records<TcpStream>>>),
    Own(Box<Session<TcpStream>>),
    /// It could not go on.
    Ended,
}

impl Tls {
    /// One whose handshake is done.
    pub fn agreed(stream: TlsStream<Records<TcpStream>>) -> Self {
        Self { layer: Layer::Rustls(Box::new(stream)), is_shut: false }
    }

    /// One that an earlier daemon has left.
    pub fn inherited(stream: TcpStream, state: State) -> Self {
        Self { layer: Layer::Own(Box::new(Session::new(stream, state))), is_shut: false }
    }

    /// Its socket, in which there is ciphertext.
    pub fn socket(&self) -> Option<BorrowedFd<'_>> {
        match &self.layer {
            Layer::Rustls(stream) => Some(stream.get_ref().0.get_ref().as_fd()),
            Layer::Own(session) => Some(session.get_ref().as_fd()),
            Layer::Ended => None,
        }
    }

    /// What another daemon has to know to go on, after [`Self::settle`].
    pub fn state(&self) -> Option<&State> {
        match &self.layer {
            Layer::Own(session) => Some(session.state()),
            Layer::Rustls(_) | Layer::Ended => None,
        }
    }

    /// Has the connection go on without rustls. Returns what was decrypted and not read.
    ///
    /// # Errors
    /// The connection has failed before, and ends.
    pub fn settle(&mut self) -> io::Result<Vec<u8>> {
        let mut session = match mem::replace(&mut self.layer, Layer::Ended) {
            Layer::Rustls(stream) => Box::new(take_apart(*stream, self.is_shut)?),
            Layer::Own(session) => session,
            Layer::Ended => return Err(io::ErrorKind::NotConnected.into()),
        };
        let unread = session.settle()?;
        self.layer = Layer::Own(session);
        Ok(unread)
    }
}

/// Takes a connection away from rustls, with all that it has read and not sent.
fn take_apart<S>(stream: TlsStream<Records<S>>, is_shut: bool) -> io::Result<Session<S>>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (records, mut connection) = stream.into_inner();
    let (stream, inbox) = records.into_parts()?;
    let now = connection.process_new_packets().map_err(io::Error::other)?;
    let mut unread = vec![0; now.plaintext_bytes_to_read()];
    connection.reader().read_exact(&mut unread)?;
    if !is_shut {
        // An answer to new keys of the client's is queued only by whatever is sent next. Nothing is, once
        // the client was told so.
        let _ = connection.writer().write(&[])?;
    }
    let mut unsent = Vec::new();
    while connection.wants_write() {
        connection.write_tls(&mut unsent)?;
    }
    let version = connection.protocol_version();
    let secrets = connection.dangerous_extract_secrets().map_err(io::Error::other)?;
    let (read, write) = keys::of(version, secrets)?;
    let (has_ended, peer_has_ended) = (is_shut, now.peer_has_closed());
    let state = State { read, write, inbox, unsent, has_ended, peer_has_ended };
    Ok(Session::new(stream, state).with_unread(unread))
}

/// Does the same with whoever makes the records.
macro_rules! either {
    ($tls:expr, $stream:ident => $do:expr) => {
        match &mut $tls.layer {
            Layer::Rustls($stream) => $do,
            Layer::Own($stream) => $do,
            Layer::Ended => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    };
}

impl AsyncRead for Tls {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_read(context, buffer))
    }
}

impl AsyncWrite for Tls {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        either!(self, stream => Pin::new(stream).poll_write(context, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self, stream => Pin::new(stream).poll_write_vectored(context, bytes))
    }

    fn is_write_vectored(&self) -> bool {
        matches!(self.layer, Layer::Rustls(_))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_flush(context))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.is_shut = true;
        either!(self, stream => Pin::new(stream).poll_shutdown(context))
    }
}
