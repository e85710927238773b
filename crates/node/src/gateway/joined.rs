//! Connections of which the gateway only copies the bytes, such as WebSockets. A daemon that ends in
//! order leaves them to the next one: it copies what it has read, reads no more, and has the monitor
//! keep both sockets. Those of clients that speak TLS end with their daemon, which alone has the keys.

use super::wire::ClientIo;
use crate::clock::monotonic_ns;
use crate::edge::Addresses;
use crate::instance::{ConnectionNote, JoinedOrphan, LetGo};
use crate::joined::Moving;
use crate::service::Service;
use crate::upstream::Tap;
use std::future::poll_fn;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use thaw_sandbox::{KeptForSuccessor, keep_connection};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

/// Bytes that are read ahead in each direction.
const BUFFER: usize = 8 << 10;
/// How long a reader may take for what was read ahead before its connection ends with the daemon.
const FLUSH_PATIENCE: Duration = Duration::from_secs(2);

/// Whose connection it is.
pub(super) struct Place {
    pub service: Arc<Service>,
    /// Number of the instance.
    pub instance: u64,
    /// Number of the connection.
    pub connection: u64,
    pub addresses: Addresses,
}

impl Place {
    fn keep(
        &self,
        client: BorrowedFd<'_>,
        instance: BorrowedFd<'_>,
    ) -> io::Result<Option<KeptForSuccessor>> {
        let note = ConnectionNote {
            instance: self.instance,
            id: self.connection,
            peer: self.addresses.client,
            local: self.addresses.gateway,
            accepted_ns: monotonic_ns(),
            wants_head_only: false,
        };
        let note = serde_json::to_string(&note).expect("plain data");
        keep_connection(client, Some(instance), &note)
    }
}

/// One of the two sockets.
pub(super) trait Side: AsyncRead + AsyncWrite + Unpin {
    /// Its socket, if the bytes in it are those that are copied.
    fn socket(&self) -> Option<BorrowedFd<'_>>;
}

impl Side for ClientIo {
    fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.plain_socket()
    }
}

impl Side for Tap {
    fn socket(&self) -> Option<BorrowedFd<'_>> {
        Some(Tap::socket(self))
    }
}

impl Side for TcpStream {
    fn socket(&self) -> Option<BorrowedFd<'_>> {
        Some(self.as_fd())
    }
}

impl Side for UnixStream {
    fn socket(&self) -> Option<BorrowedFd<'_>> {
        Some(self.as_fd())
    }
}

/// What goes in one direction.
#[derive(Debug, Default)]
struct Half {
    bytes: Vec<u8>,
    /// So many of them were written.
    written: usize,
    /// The writer may not have passed on all that it has taken.
    is_unflushed: bool,
    /// The reader has come to its end.
    is_read: bool,
    /// The writer was told so.
    is_done: bool,
}

impl Half {
    fn new(read_ahead: &[u8]) -> Self {
        Self { bytes: read_ahead.to_vec(), ..Self::default() }
    }

    /// Nothing of it is in this process.
    fn is_empty(&self) -> bool {
        self.written == self.bytes.len() && !self.is_unflushed
    }

    /// Copies as far as that goes now; notes in `moved` when something did.
    fn poll(
        &mut self,
        context: &mut Context<'_>,
        (reader, may_read): (&mut impl Side, bool),
        writer: &mut impl Side,
        moved: &mut Option<Instant>,
    ) -> Poll<io::Result<()>> {
        while !self.is_done {
            if self.written < self.bytes.len() {
                let left = &self.bytes[self.written..];
                let count = ready!(Pin::new(&mut *writer).poll_write(context, left))?;
                if count == 0 {
                    return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                }
                self.written += count;
                self.is_unflushed = true;
                *moved = Some(Instant::now());
                continue;
            }
            if self.is_read {
                ready!(Pin::new(&mut *writer).poll_shutdown(context))?;
                (self.is_done, self.is_unflushed) = (true, false);
                continue;
            }
            let read = match may_read {
                true => self.poll_read(context, reader),
                false => Poll::Pending,
            };
            match read {
                Poll::Ready(result) => {
                    result?;
                    *moved = Some(Instant::now());
                }
                Poll::Pending if self.is_unflushed => {
                    ready!(Pin::new(&mut *writer).poll_flush(context))?;
                    self.is_unflushed = false;
                    return Poll::Pending;
                }
                Poll::Pending => return Poll::Pending,
            }
        }
        Poll::Ready(Ok(()))
    }

    fn poll_read(
        &mut self,
        context: &mut Context<'_>,
        reader: &mut impl Side,
    ) -> Poll<io::Result<()>> {
        self.bytes.resize(BUFFER, 0);
        let mut buffer = ReadBuf::new(&mut self.bytes);
        let read = Pin::new(reader).poll_read(context, &mut buffer);
        let count = buffer.filled().len();
        self.bytes.truncate(count);
        self.written = 0;
        ready!(read)?;
        self.is_read = count == 0;
        Poll::Ready(Ok(()))
    }
}

/// Both ends, and what was read of one and not written to the other yet.
pub(super) struct Pair<C, I> {
    client: C,
    instance: I,
    to_instance: Half,
    to_client: Half,
}

/// How copying has stopped.
enum Stop {
    /// The connection has ended.
    Ended(io::Result<()>),
    /// The daemon leaves, and nothing was read that is not written.
    Leaving,
}

impl<C: Side, I: Side> Pair<C, I> {
    /// With what was read ahead of each.
    pub fn new(client: C, instance: I, from_client: &[u8], from_instance: &[u8]) -> Self {
        let (to_instance, to_client) = (Half::new(from_client), Half::new(from_instance));
        Self { client, instance, to_instance, to_client }
    }

    /// Both sockets, if others may go on with them.
    fn sockets(&self) -> Option<(BorrowedFd<'_>, BorrowedFd<'_>)> {
        Some((self.client.socket()?, self.instance.socket()?))
    }

    fn poll(
        &mut self,
        context: &mut Context<'_>,
        may_read: bool,
        moved: &mut Option<Instant>,
    ) -> Poll<Stop> {
        let Self { client, instance, to_instance, to_client } = self;
        let there = to_instance.poll(context, (client, may_read), instance, moved);
        let back = to_client.poll(context, (instance, may_read), client, moved);
        match (there, back) {
            (Poll::Ready(Err(error)), _) | (_, Poll::Ready(Err(error))) => {
                Poll::Ready(Stop::Ended(Err(error)))
            }
            (Poll::Ready(Ok(())), Poll::Ready(Ok(()))) => Poll::Ready(Stop::Ended(Ok(()))),
            _ if !may_read && to_instance.is_empty() && to_client.is_empty() => {
                Poll::Ready(Stop::Leaving)
            }
            _ => Poll::Pending,
        }
    }

    /// Copies until one side has ended, nothing has moved for `keep_alive`, or reading is over and
    /// all is written.
    async fn copy(&mut self, may_read: bool, keep_alive: Duration) -> Stop {
        let mut last = Instant::now();
        loop {
            let mut moved = None;
            let copied = poll_fn(|context| self.poll(context, may_read, &mut moved));
            tokio::select! {
                stop = copied => return stop,
                () = sleep_until(last + keep_alive) => {}
            }
            match moved {
                Some(at) => last = at,
                None => return Stop::Ended(Err(io::ErrorKind::TimedOut.into())),
            }
        }
    }
}

/// A connection whose bytes are copied.
pub(super) struct Joint<C, I> {
    place: Place,
    pair: Pair<C, I>,
    /// `None`: it ends with this daemon.
    moving: Option<Moving>,
}

impl<C: Side, I: Side> Joint<C, I> {
    pub fn begin(place: Place, pair: Pair<C, I>) -> Self {
        let moving = pair.sockets().map(|_| Moving::new(place.service.shared()));
        if let Some(table) = place.service.table_of(place.instance)
            && moving.is_some()
        {
            table.join(place.connection);
        }
        Self { place, pair, moving }
    }

    /// Copies until the connection has ended, and calls `finish` then. If the daemon leaves it to the
    /// next one, this does not end.
    ///
    /// # Errors
    /// Why it has ended.
    pub async fn run(mut self, finish: impl FnOnce()) -> io::Result<()> {
        let mut leaving = self.place.service.shared().joined().subscribe();
        let keep_alive = self.place.service.keep_alive();
        let ended = loop {
            let is_told = async {
                match self.moving.is_some() {
                    true => drop(leaving.wait_for(|is_leaving| *is_leaving).await),
                    false => std::future::pending().await,
                }
            };
            tokio::select! {
                stop = self.pair.copy(true, keep_alive) => {
                    if let Stop::Ended(ended) = stop {
                        break ended;
                    }
                }
                () = is_told => {
                    let copied = self.pair.copy(false, keep_alive);
                    match timeout(FLUSH_PATIENCE, copied).await {
                        Ok(Stop::Ended(ended)) => break ended,
                        Ok(Stop::Leaving) => self.rest(&mut leaving).await,
                        Err(_) => self.moving = None,
                    }
                }
            }
        };
        let Self { pair, moving, .. } = self;
        // Both ends see the end before the instance is asked for its own.
        drop(pair);
        finish();
        drop(moving);
        ended
    }

    /// Has the monitor keep both sockets, until the daemon stays after all.
    async fn rest(&mut self, leaving: &mut watch::Receiver<bool>) {
        let Some((client, instance)) = self.pair.sockets() else { return };
        match self.place.keep(client, instance) {
            Ok(Some(kept)) => {
                self.moving = None;
                let _ = leaving.wait_for(|is_leaving| !*is_leaving).await;
                drop(kept);
                self.moving = Some(Moving::new(self.place.service.shared()));
            }
            Ok(None) => self.moving = None,
            Err(error) => {
                tracing::debug!("a connection ends with this daemon: {error}");
                self.moving = None;
            }
        }
    }
}

/// Goes on with a connection whose bytes an earlier daemon has copied. Its instance has it.
pub(crate) fn join_inherited(service: &Arc<Service>, orphan: JoinedOrphan) {
    let JoinedOrphan { instance, connection, addresses, client, far } = orphan;
    let place = Place { service: service.clone(), instance, connection, addresses };
    let service = service.clone();
    let finish = move || service.let_go(instance, connection, LetGo::Answered);
    let admitted = place.service.shared().admission().admit();
    let streams = TcpStream::from_std(client.into())
        .and_then(|client| Ok((client, UnixStream::from_std(far.into())?)));
    let (client, far) = match streams {
        Ok(streams) => streams,
        Err(error) => {
            tracing::warn!("a connection of the daemon before this one ends: {error}");
            return finish();
        }
    };
    let joint = Joint::begin(place, Pair::new(client, far, &[], &[]));
    tokio::spawn(async move {
        let _admitted = admitted;
        if let Err(error) = joint.run(finish).await {
            tracing::debug!("a connection of another protocol has ended: {error}");
        }
    });
}
