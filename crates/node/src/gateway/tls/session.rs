//! A connection within TLS whose handshake another daemon has made, or rustls in this one. Its keys
//! do not change any more: one that wants others ends.

use super::broken::Broken;
use super::keys::{Kind, PLAIN_MAX};
use super::written::State;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Records in a row with nothing in them that a client may send.
const EMPTY_MAX: u32 = 32;
/// Level and descriptions of alerts (RFC 8446 §6).
const WARNING: u8 = 1;
const FATAL: u8 = 2;
const CLOSE_NOTIFY: u8 = 0;
const USER_CANCELED: u8 = 90;

/// Makes and reads the records of a connection.
pub(in crate::gateway) struct Session<S> {
    stream: S,
    pub(super) state: State,
    /// What was decrypted.
    pub(super) plain: Vec<u8>,
    /// So many bytes of it were read.
    read: usize,
    /// Records in a row with nothing in them.
    empty: u32,
    /// Why it cannot go on.
    broken: Option<Broken>,
}

impl<S> Session<S> {
    pub(super) fn new(stream: S, state: State) -> Self {
        Self { stream, state, plain: Vec::new(), read: 0, empty: 0, broken: None }
    }

    /// With what somebody else has decrypted.
    pub(super) fn with_unread(self, plain: Vec<u8>) -> Self {
        Self { plain, ..self }
    }

    pub(super) fn get_ref(&self) -> &S {
        &self.stream
    }

    /// What is to be known to go on, but for what [`Self::settle`] returns.
    pub(super) fn state(&self) -> &State {
        &self.state
    }

    /// Takes what was decrypted and not read.
    ///
    /// # Errors
    /// The connection has failed.
    pub(super) fn settle(&mut self) -> io::Result<Vec<u8>> {
        self.check()?;
        let mut unread = std::mem::take(&mut self.plain);
        unread.drain(..std::mem::take(&mut self.read));
        Ok(unread)
    }

    fn check(&self) -> io::Result<()> {
        self.broken.map_or(Ok(()), |broken| Err(broken.into()))
    }

    /// Opens the record of that length at the beginning of what was read.
    fn open(&mut self, length: usize) -> Result<(), Broken> {
        let State { inbox, read, peer_has_ended, .. } = &mut self.state;
        let record = inbox.peek_mut(length);
        let (kind, place) = read.open(record)?;
        let is_empty = match Content::of(kind, &record[place])? {
            Content::Data(plain) => {
                (self.plain, self.read) = (plain.to_vec(), 0);
                plain.is_empty()
            }
            Content::Nothing => true,
            Content::End => {
                *peer_has_ended = true;
                false
            }
        };
        inbox.consume(length);
        self.empty = if is_empty { self.empty + 1 } else { 0 };
        match self.empty > EMPTY_MAX {
            true => Err(Broken::Empty),
            false => Ok(()),
        }
    }
}

/// What a record says.
enum Content<'a> {
    Data(&'a [u8]),
    /// Something that is ignored.
    Nothing,
    /// Nothing more comes.
    End,
}

impl<'a> Content<'a> {
    fn of(kind: Kind, content: &'a [u8]) -> Result<Self, Broken> {
        match (kind, content) {
            (Kind::DATA, plain) => Ok(Self::Data(plain)),
            (Kind::ALERT, [_, CLOSE_NOTIFY]) => Ok(Self::End),
            // `close_notify` follows (RFC 8446 §6.1).
            (Kind::ALERT, [_, USER_CANCELED]) => Ok(Self::Nothing),
            (Kind::ALERT, [_, description]) => Err(Broken::Alert(*description)),
            (Kind::HANDSHAKE, _) => Err(Broken::NewKeys),
            _ => Err(Broken::Unexpected),
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Session<S> {
    /// Tells the client why the connection ends, as far as its socket takes that now.
    fn fail(&mut self, context: &mut Context<'_>, broken: Broken) -> io::Error {
        self.broken = Some(broken);
        let State { write, unsent, has_ended, .. } = &mut self.state;
        if let Some(alert) = broken.alert()
            && !*has_ended
            && write.seal(Kind::ALERT, &[FATAL, alert], unsent).is_ok()
        {
            let _ = self.poll_send(context);
        }
        broken.into()
    }

    /// Sends what is sealed.
    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let unsent = &mut self.state.unsent;
        while !unsent.is_empty() {
            match ready!(Pin::new(&mut self.stream).poll_write(context, unsent))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                count => drop(unsent.drain(..count)),
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Opens records until there is something to read; false at the end.
    pub(super) fn poll_open(&mut self, context: &mut Context<'_>) -> Poll<io::Result<bool>> {
        self.check()?;
        while self.read == self.plain.len() {
            if self.state.peer_has_ended {
                return Poll::Ready(Ok(false));
            }
            let opened = match self.state.inbox.first() {
                Ok(Some(length)) => self.open(length),
                Ok(None) => {
                    let filled = self.state.inbox.poll_fill(&mut self.stream, context);
                    if ready!(filled)? == 0 {
                        // Somebody may have cut it (RFC 8446 §6.1).
                        return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
                    }
                    Ok(())
                }
                Err(broken) => Err(broken),
            };
            if let Err(broken) = opened {
                return Poll::Ready(Err(self.fail(context, broken)));
            }
        }
        Poll::Ready(Ok(true))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Session<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if ready!(self.poll_open(context))? {
            let unread = &self.plain[self.read..];
            let count = unread.len().min(buffer.remaining());
            buffer.put_slice(&unread[..count]);
            self.read += count;
        }
        if self.read == self.plain.len() {
            // A connection on which nothing comes needs no memory.
            (self.plain, self.read) = (Vec::new(), 0);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Session<S> {
    /// Seals one record when all earlier ones are sent, so that no more than one waits.
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check()?;
        if self.state.has_ended {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        ready!(self.poll_send(context))?;
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let State { write, unsent, .. } = &mut self.state;
        let count = bytes.len().min(PLAIN_MAX);
        let sealed = match write.are_worn_out() {
            true => Err(Broken::WornOut),
            false => write.seal(Kind::DATA, &bytes[..count], unsent),
        };
        if let Err(broken) = sealed {
            return Poll::Ready(Err(self.fail(context, broken)));
        }
        // The bytes are taken, whatever becomes of the record: an error comes again with the next call.
        let _ = self.poll_send(context);
        Poll::Ready(Ok(count))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_send(context))?;
        // A connection on which nothing goes needs no memory.
        self.state.unsent = Vec::new();
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let is_broken = self.broken.is_some();
        let State { write, unsent, has_ended, .. } = &mut self.state;
        if !*has_ended && !is_broken {
            write.seal(Kind::ALERT, &[WARNING, CLOSE_NOTIFY], unsent)?;
            *has_ended = true;
        }
        ready!(self.poll_send(context))?;
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
