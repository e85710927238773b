//! A socket from which rustls reads whole records only.

use super::inbox::Inbox;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Gives a record to its reader once all of it is there, and never bytes of two in one read. So rustls,
/// which reads until it has something decrypted or there is nothing more, never keeps a part of one.
pub(in crate::gateway) struct Records<S> {
    stream: S,
    inbox: Inbox,
    /// Bytes of the present record that the reader has not read yet.
    begun: usize,
    /// These are no records: rustls gets them as they are, and refuses them with its alert.
    is_misframed: bool,
}

impl<S> Records<S> {
    /// Over the bytes of a client of which nothing was read.
    pub fn new(stream: S) -> Self {
        Self { stream, inbox: Inbox::default(), begun: 0, is_misframed: false }
    }

    /// The socket.
    pub fn get_ref(&self) -> &S {
        &self.stream
    }

    /// The socket, and what was read of it and not given on.
    ///
    /// # Errors
    /// The reader has a part of a record, or these are no records.
    pub(super) fn into_parts(self) -> io::Result<(S, Inbox)> {
        match self.begun == 0 && !self.is_misframed {
            true => Ok((self.stream, self.inbox)),
            false => Err(io::Error::other("a record was read in part")),
        }
    }
}

impl<S: AsyncRead + Unpin> Records<S> {
    /// Waits until the reader may have something; false at the end.
    fn poll_begin(&mut self, context: &mut Context<'_>) -> Poll<io::Result<bool>> {
        while self.begun == 0 {
            match self.inbox.first() {
                Ok(Some(length)) if !self.is_misframed => self.begun = length,
                Ok(None) => {
                    let filled = self.inbox.poll_fill(&mut self.stream, context);
                    if ready!(filled)? == 0 {
                        return Poll::Ready(Ok(false));
                    }
                }
                Ok(Some(_)) | Err(_) => {
                    self.is_misframed = true;
                    self.begun = self.inbox.held().len();
                }
            }
        }
        Poll::Ready(Ok(true))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Records<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if ready!(self.poll_begin(context))? {
            let count = self.begun.min(buffer.remaining());
            buffer.put_slice(self.inbox.peek_mut(count));
            self.inbox.consume(count);
            self.begun -= count;
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Records<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
