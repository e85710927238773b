//! Connections of which the gateway only copies the bytes, such as WebSockets. A daemon that ends in
//! order leaves them to the next one: it reads no more, and has the monitor keep both sockets, and a
//! file in memory with what it has read and not written yet. To wait until that is written would not
//! do: an instance may read nothing before somebody takes what it writes. If the client speaks TLS, the
//! file has the keys of the connection, too ([`super::left`]).

use super::left::{Left, LeftFile};
use super::tls::{State, Tls};
use super::wire::Wire;
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
use thaw_home::clock::monotonic_ns;
use thaw_sandbox::{KeptForSuccessor, keep_connection};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

/// Bytes that are read ahead in each direction.
const BUFFER: usize = 8 << 10;

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
        others: &[BorrowedFd<'_>],
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
        keep_connection(client, others, &note)
    }
}

/// One of the two ends.
pub(super) trait Side: AsyncRead + AsyncWrite + Unpin {
    /// Its socket; `None`: it has failed.
    fn socket(&self) -> Option<BorrowedFd<'_>>;

    /// Has all of its state where [`Self::tls`] shows it, but for what it returns: what was decrypted
    /// and not read.
    ///
    /// # Errors
    /// It has failed, and ends.
    fn settle(&mut self) -> io::Result<Vec<u8>> {
        Ok(Vec::new())
    }

    /// What is to be known to go on with its socket if the bytes in it are TLS.
    fn tls(&self) -> Option<&State> {
        None
    }
}

impl Side for Tap {
    fn socket(&self) -> Option<BorrowedFd<'_>> {
        Some(Tap::socket(self))
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
        // An earlier daemon may have sealed something that it has not sent.
        Self { bytes: read_ahead.to_vec(), is_unflushed: true, ..Self::default() }
    }

    /// What was read and not written yet.
    fn left(&self) -> &[u8] {
        &self.bytes[self.written..]
    }

    /// Copies as far as that goes now; notes in `moved` when something did.
    fn poll(
        &mut self,
        context: &mut Context<'_>,
        reader: &mut impl Side,
        writer: &mut impl Side,
        moved: &mut Option<Instant>,
    ) -> Poll<io::Result<()>> {
        while !self.is_done {
            if self.written < self.bytes.len() {
                let count = ready!(Pin::new(&mut *writer).poll_write(context, self.left()))?;
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
            match self.poll_read(context, reader) {
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
        moved: &mut Option<Instant>,
    ) -> Poll<io::Result<()>> {
        let Self { client, instance, to_instance, to_client } = self;
        let there = to_instance.poll(context, client, instance, moved);
        let back = to_client.poll(context, instance, client, moved);
        match (there, back) {
            (Poll::Ready(Err(error)), _) | (_, Poll::Ready(Err(error))) => Poll::Ready(Err(error)),
            (Poll::Ready(Ok(())), Poll::Ready(Ok(()))) => Poll::Ready(Ok(())),
            _ => Poll::Pending,
        }
    }

    /// A file with what was read and not written yet, and the keys if there are some; `None`: there is
    /// nothing.
    ///
    /// # Errors
    /// A side has failed, or there is no memory.
    fn left(&mut self) -> io::Result<Option<LeftFile>> {
        self.to_instance.bytes.append(&mut self.client.settle()?);
        self.to_client.is_unflushed = true;
        self.to_client.bytes.append(&mut self.instance.settle()?);
        let (there, back) = (self.to_instance.left(), self.to_client.left());
        LeftFile::write(there, back, self.client.tls())
    }

    /// Copies until both sides have ended, or nothing has moved for `keep_alive`.
    ///
    /// # Errors
    /// Why it has ended otherwise.
    async fn copy(&mut self, keep_alive: Duration) -> io::Result<()> {
        let mut last = Instant::now();
        loop {
            let mut moved = None;
            let copied = poll_fn(|context| self.poll(context, &mut moved));
            tokio::select! {
                ended = copied => return ended,
                () = sleep_until(last + keep_alive) => {}
            }
            match moved {
                Some(at) => last = at,
                None => return Err(io::ErrorKind::TimedOut.into()),
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
        let moving = pair.sockets().map(|_| Moving::new(place.service.shared().joined()));
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
            let rested = tokio::select! {
                ended = self.pair.copy(keep_alive) => break ended,
                () = is_told => self.rest(&mut leaving).await,
            };
            if rested.is_err() {
                break rested;
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
    ///
    /// # Errors
    /// The connection cannot go on, here or elsewhere.
    async fn rest(&mut self, leaving: &mut watch::Receiver<bool>) -> io::Result<()> {
        let left = self.pair.left()?;
        let kept = self.keep(left.as_ref());
        self.moving = None;
        match kept {
            Ok(Some(kept)) => {
                let _ = leaving.wait_for(|is_leaving| !*is_leaving).await;
                drop(kept);
                self.moving = Some(Moving::new(self.place.service.shared().joined()));
            }
            Ok(None) => {}
            Err(error) => tracing::debug!("a connection ends with this daemon: {error}"),
        }
        // From now on bytes are sealed here, under the keys in the file.
        left.map_or(Ok(()), LeftFile::wipe)
    }

    fn keep(&self, left: Option<&LeftFile>) -> io::Result<Option<KeptForSuccessor>> {
        let Some((client, instance)) = self.pair.sockets() else { return Ok(None) };
        let others: Vec<_> = [instance].into_iter().chain(left.map(AsFd::as_fd)).collect();
        self.place.keep(client, &others)
    }
}

/// Goes on with a connection whose bytes an earlier daemon has copied. Its instance has it.
pub(crate) fn join_inherited(service: &Arc<Service>, orphan: JoinedOrphan) {
    let JoinedOrphan { instance, connection, addresses, client, far, left } = orphan;
    let place = Place { service: service.clone(), instance, connection, addresses };
    let service = service.clone();
    let finish = move || service.let_go(instance, connection, LetGo::Answered);
    let admitted = place.service.shared().admission().admit();
    let pair = left.map_or(Ok(Left::default()), Left::take).and_then(|left| {
        // Whatever the daemon before this one has made of them.
        rustix::io::ioctl_fionbio(&client, true)?;
        rustix::io::ioctl_fionbio(&far, true)?;
        let client = TcpStream::from_std(client.into())?;
        let client = match left.tls {
            Some(state) => Wire::Tls(Tls::inherited(client, state)),
            None => Wire::Plain(client),
        };
        let far = UnixStream::from_std(far.into())?;
        Ok(Pair::new(client, far, &left.to_instance, &left.to_client))
    });
    let pair = match pair {
        Ok(pair) => pair,
        Err(error) => {
            tracing::warn!("a connection of the daemon before this one ends: {error}");
            return finish();
        }
    };
    let joint = Joint::begin(place, pair);
    tokio::spawn(async move {
        let _admitted = admitted;
        if let Err(error) = joint.run(finish).await {
            tracing::debug!("a connection of another protocol has ended: {error}");
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio::time::timeout;

    fn pair(
        from_client: &[u8],
        from_instance: &[u8],
    ) -> (Pair<UnixStream, UnixStream>, UnixStream, UnixStream) {
        let (client, near) = UnixStream::pair().unwrap();
        let (far, instance) = UnixStream::pair().unwrap();
        (Pair::new(near, far, from_client, from_instance), client, instance)
    }

    const LONG: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn bytes_and_ends_go_both_ways() {
        let (mut pair, mut client, mut instance) = pair(b"ahead ", b"first ");
        let copied = tokio::spawn(async move { pair.copy(LONG).await });
        client.write_all(b"question").await.unwrap();
        client.shutdown().await.unwrap();
        let mut heard = Vec::new();
        instance.read_to_end(&mut heard).await.unwrap();
        assert_eq!(heard, b"ahead question");
        // The other direction goes on.
        instance.write_all(b"answer").await.unwrap();
        drop(instance);
        heard.clear();
        client.read_to_end(&mut heard).await.unwrap();
        assert_eq!(heard, b"first answer");
        copied.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_connection_on_which_nothing_moves_ends() {
        let (mut pair, _client, _instance) = pair(b"", b"");
        let ended = pair.copy(Duration::from_millis(20)).await.unwrap_err();
        assert_eq!(ended.kind(), io::ErrorKind::TimedOut);
    }

    /// Neither end reads, so that bytes stay in the gateway.
    #[tokio::test]
    async fn what_was_read_and_not_written_is_left_to_the_next_daemon() {
        let (mut first, mut client, mut instance) = pair(b"", b"");
        let sent: Vec<u8> = (0..1 << 20).map(|byte| (byte % 251) as u8).collect();
        let mut written = [0, 0];
        let mut before = None;
        // Until nothing more fits in either direction.
        while before != Some(written) || written.contains(&0) {
            before = Some(written);
            let _ = timeout(Duration::from_millis(300), async {
                let copying = first.copy(LONG);
                let [sent_there, sent_back] = &mut written;
                let there = fill(&mut client, &sent, sent_there);
                let back = fill(&mut instance, &sent, sent_back);
                let _ = tokio::join!(copying, there, back);
            })
            .await;
        }
        let file = first.left().unwrap().expect("both are full");
        let left = Left::take(file.as_fd().try_clone_to_owned().unwrap()).unwrap();
        assert!(!left.to_instance.is_empty() && !left.to_client.is_empty());
        let Pair { client: near, instance: far, .. } = first;
        let mut second = Pair::new(near, far, &left.to_instance, &left.to_client);
        tokio::spawn(async move { second.copy(LONG).await });
        for (end, written) in [(&mut instance, written[0]), (&mut client, written[1])] {
            let mut heard = vec![0; written];
            timeout(LONG, end.read_exact(&mut heard)).await.unwrap().unwrap();
            assert!(heard == sent[..written]);
        }
    }

    #[tokio::test]
    async fn what_was_sealed_and_not_sent_is_sent() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let near = listener.accept().await.unwrap().0;
        let (far, _instance) = UnixStream::pair().unwrap();
        let near = Wire::Tls(Tls::inherited(near, State::for_test()));
        let mut pair = Pair::new(near, far, b"", b"");
        tokio::spawn(async move { pair.copy(LONG).await });
        let mut heard = [0; 8];
        timeout(LONG, client.read_exact(&mut heard)).await.expect("it comes").unwrap();
        assert_eq!(&heard, b"a record");
    }

    async fn fill(end: &mut UnixStream, bytes: &[u8], written: &mut usize) {
        while let Ok(count) = end.write(&bytes[*written..]).await {
            *written += count;
        }
    }
}
