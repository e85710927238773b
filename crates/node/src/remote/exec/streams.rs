//! The streams of processes: sockets whose other ends the sandbox has, and who reads them.

use super::super::output::Stream;
use super::Exec;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thaw_sandbox::unread_by_peer;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::OwnedWriteHalf;

/// How long output is waited for when a process has ended and others have its streams still.
const LAST_OUTPUT: Duration = Duration::from_millis(100);
/// How long, and for how many bytes, its streams are read in all once it has ended: what it has printed
/// itself lies in the buffers of two sockets.
const LAST_PATIENCE: Duration = Duration::from_secs(5);
const LAST_BYTES: usize = 4 << 20;
/// Bytes read at a time.
const CHUNK: usize = 16 << 10;

/// The sockets of a process: this daemon's, from which it reads, and the sandbox'.
pub(super) struct Sockets {
    pub ours: Vec<(Stream, Box<dyn AsyncRead + Send + Unpin>)>,
    theirs: Vec<OwnedFd>,
}

impl Sockets {
    /// Those of one with a terminal, or with three streams; and where what is typed goes, if that is
    /// open.
    pub fn new(has_terminal: bool, is_open: bool) -> io::Result<(Self, Input)> {
        let (input, their_input) = pair()?;
        let (from_terminal, to_stdin) = input.into_split();
        let mut sockets = Self { ours: Vec::new(), theirs: vec![their_input] };
        if has_terminal {
            sockets.ours.push((Stream::Stdout, Box::new(from_terminal)));
        } else {
            for stream in [Stream::Stdout, Stream::Stderr] {
                let (reader, writer) = pair()?;
                sockets.ours.push((stream, Box::new(reader)));
                sockets.theirs.push(writer);
            }
        }
        let input = if is_open { Input::Open(to_stdin) } else { Input::None };
        Ok((sockets, input))
    }

    pub fn lent(&self) -> Vec<BorrowedFd<'_>> {
        self.theirs.iter().map(AsFd::as_fd).collect()
    }
}

/// Where standard input, or what is typed at a terminal, goes.
#[derive(Debug, Default)]
pub(super) enum Input {
    /// More may come.
    Open(OwnedWriteHalf),
    /// Nothing more comes; what was written may not be read yet.
    Ended(OwnedWriteHalf),
    /// It is at its end.
    #[default]
    None,
}

impl Input {
    /// Whether more may come.
    pub fn is_open(&self) -> bool {
        matches!(self, Self::Open(_))
    }

    /// Whether the sandbox has read all that was written.
    pub fn is_read(&self) -> bool {
        let (Self::Open(socket) | Self::Ended(socket)) = self else { return true };
        let socket: &UnixStream = socket.as_ref();
        unread_by_peer(socket.as_fd()).is_ok_and(|bytes| bytes == 0)
    }

    /// Nothing more comes: the sandbox sees the end behind what was written.
    pub async fn end(&mut self) {
        if let Self::Open(mut socket) = mem::take(self) {
            // One that is broken has no end.
            let _ = socket.shutdown().await;
            *self = Self::Ended(socket);
        }
    }
}

/// Two connected, non-blocking sockets: this daemon's, and the sandbox's.
fn pair() -> io::Result<(UnixStream, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    Ok((UnixStream::from_std(StdUnixStream::from(ours))?, theirs))
}

impl Exec {
    /// Keeps what it prints, until nobody has its streams any more, or it has ended and nothing
    /// more comes for a moment. If it has got others by then, they are read next.
    pub(super) fn collect(
        self: &Arc<Self>,
        streams: Vec<(Stream, Box<dyn AsyncRead + Send + Unpin>)>,
    ) {
        let exec = self.clone();
        let number = {
            let mut number = 0;
            self.streams.send_modify(|streams| {
                *streams += 1;
                number = *streams;
            });
            number
        };
        tokio::spawn(async move {
            let reading = exec.reading.lock().await;
            exec.read_all(streams).await;
            drop(reading);
            let mut streams = exec.streams.subscribe();
            tokio::select! {
                // Whoever reads to the end wants to know how it ended.
                _ = exec.ended() => {}
                // Others are read, and end what it prints.
                _ = streams.wait_for(|newest| *newest != number) => return,
            }
            if *exec.streams.borrow() == number {
                *exec.stdin.lock().await = Input::None;
                exec.output.end();
            }
        });
    }

    async fn read_all(self: &Arc<Self>, streams: Vec<(Stream, Box<dyn AsyncRead + Send + Unpin>)>) {
        let readers = streams.into_iter().map(|(stream, reader)| {
            let exec = self.clone();
            tokio::spawn(async move { exec.read_to_end(stream, reader).await })
        });
        for reader in readers.collect::<Vec<_>>() {
            // They do not panic.
            let _ = reader.await;
        }
    }

    async fn read_to_end(&self, stream: Stream, mut reader: Box<dyn AsyncRead + Send + Unpin>) {
        let mut buffer = vec![0; CHUNK];
        let (mut patience, mut room) = (LAST_PATIENCE, LAST_BYTES);
        loop {
            let (began, has_ended) = (Instant::now(), self.state().is_final());
            let read = tokio::select! {
                biased;
                read = reader.read(&mut buffer) => read,
                () = self.is_over(LAST_OUTPUT.min(patience)) => return,
            };
            let Ok(count @ 1..) = read else { return };
            if has_ended {
                // Whoever else holds its streams may go on printing for ever.
                patience = patience.saturating_sub(began.elapsed());
                room = room.saturating_sub(count);
            }
            self.output.put(stream, &buffer[..count]).await;
            if patience.is_zero() || room == 0 {
                return;
            }
        }
    }

    /// Waits until it has ended, and a moment more.
    async fn is_over(&self, moment: Duration) {
        let _ = self.ended().await;
        tokio::time::sleep(moment).await;
    }
}
