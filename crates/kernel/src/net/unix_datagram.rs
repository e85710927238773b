//! Unix datagram sockets (unix(7)).

use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;

use super::address::{AF_UNIX, SocketAddress, UnixName};
use super::inbox::{Datagram, Inbox};
use super::socket::{
    Blocking, Common, IN, MessageFlags, OUT, Outgoing, PeerCredentials, Protocol, Received,
    ShutdownHow, SocketType,
};
use super::sockets::{ConnectionState, Listed};
use super::unix_names::{Binding, Named, Names};
use super::unix_stream::DEFAULT_SEND_BUFFER;
use crate::errno::{Errno, Result};
use crate::fs::anonymous::InodeNumbers;
use crate::fs::file::Events;
use crate::io::{Sink, Source};
use crate::sync::KernelCell;
use crate::task::wait::WaitQueue;

/// `net.unix.max_dgram_qlen`: datagrams that wait at a socket which is not
/// connected to their sender.
const QUEUE_MAX: usize = 10;

/// A Unix datagram socket.
pub struct UnixDatagram {
    this: Weak<UnixDatagram>,
    common: Common,
    names: Arc<Names>,
    inbox: KernelCell<Inbox>,
    state: KernelCell<State>,
    binding: KernelCell<Option<Binding>>,
}

#[derive(Default)]
struct State {
    peer: Option<Peer>,
    reading_shut: bool,
    writing_shut: bool,
    closed: bool,
    /// Senders that found no room.
    waiting: Vec<Arc<WaitQueue>>,
}

#[derive(Clone)]
struct Peer {
    socket: Weak<UnixDatagram>,
    name: UnixName,
    credentials: Option<PeerCredentials>,
}

impl UnixDatagram {
    /// A fresh socket.
    pub fn new(names: &Arc<Names>, inodes: &Arc<InodeNumbers>) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: this.clone(),
            common: Common::new(AF_UNIX, SocketType::Datagram, 0, inodes.next()),
            names: names.clone(),
            inbox: KernelCell::default(),
            state: KernelCell::default(),
            binding: KernelCell::new(None),
        })
    }

    /// Two sockets connected to each other (socketpair(2)).
    pub fn pair(names: &Arc<Names>, inodes: &Arc<InodeNumbers>) -> (Arc<Self>, Arc<Self>) {
        let (first, second) = (Self::new(names, inodes), Self::new(names, inodes));
        let peer = |socket: &Arc<Self>| Peer {
            socket: Arc::downgrade(socket),
            name: UnixName::Unnamed,
            credentials: Some(PeerCredentials::of_peer()),
        };
        first.state.borrow_mut().peer = Some(peer(&second));
        second.state.borrow_mut().peer = Some(peer(&first));
        (first, second)
    }

    fn own_name(&self) -> UnixName {
        self.binding.borrow_mut().as_ref().map_or(UnixName::Unnamed, |binding| binding.name.clone())
    }

    fn find(&self, name: &UnixName) -> Result<Arc<UnixDatagram>> {
        let Named::Datagram(socket) = self.names.find(name)? else { return Err(Errno::EPROTOTYPE) };
        let socket = socket.upgrade().ok_or(Errno::ECONNREFUSED)?;
        if !socket.takes_from(self) {
            return Err(Errno::EPERM);
        }
        Ok(socket)
    }

    fn is_connected_to(&self, other: &UnixDatagram) -> bool {
        self.state.borrow_mut().peer.as_ref().is_some_and(|peer| peer.socket.ptr_eq(&other.this))
    }

    /// A connected socket takes datagrams from its peer only.
    fn takes_from(&self, sender: &UnixDatagram) -> bool {
        self.state.borrow_mut().peer.is_none() || self.is_connected_to(sender)
    }

    fn send_limit(&self) -> usize {
        self.common
            .options
            .borrow_mut()
            .send_buffer
            .map_or(DEFAULT_SEND_BUFFER, |bytes| bytes as usize)
    }

    /// Whether a datagram from `sender` finds room here.
    fn has_room_for(&self, sender: &UnixDatagram) -> bool {
        let (len, charge) = {
            let inbox = self.inbox.borrow_mut();
            (inbox.len(), inbox.charge())
        };
        charge < sender.send_limit() && (len <= QUEUE_MAX || self.is_connected_to(sender))
    }

    fn wait_for_room(&self, queue: &Arc<WaitQueue>) {
        let mut state = self.state.borrow_mut();
        if !state.waiting.iter().any(|other| Arc::ptr_eq(other, queue)) {
            state.waiting.push(queue.clone());
        }
    }

    fn wake_senders(&self) {
        let waiting = core::mem::take(&mut self.state.borrow_mut().waiting);
        waiting.iter().for_each(|queue| queue.wake_all(OUT | Events::WRBAND));
    }
}

impl Protocol for UnixDatagram {
    fn common(&self) -> &Common {
        &self.common
    }

    fn bind(&self, address: &SocketAddress) -> Result<()> {
        self.names.bind_to(address, &self.binding, Named::Datagram(self.this.clone()))
    }

    fn listed(&self) -> Option<Listed> {
        let peer = self.state.borrow_mut().peer.as_ref().map(|peer| peer.socket.upgrade());
        let state = match peer {
            Some(_) => ConnectionState::Established,
            None => ConnectionState::Close,
        };
        let peer_ino = peer.flatten().map_or(0, |peer| peer.common.ino);
        let receive_queue = self.inbox.borrow_mut().first_len();
        Some(Listed { receive_queue, peer_ino, ..Listed::new(state) })
    }

    fn connect(&self, address: &SocketAddress, _blocking: Blocking) -> Result<()> {
        let peer = match address {
            SocketAddress::Unspecified => None,
            SocketAddress::Unix(name) => {
                let socket = Arc::downgrade(&self.find(name)?);
                Some(Peer { socket, name: name.clone(), credentials: None })
            }
            _ => return Err(Errno::EINVAL),
        };
        self.state.borrow_mut().peer = peer;
        self.common.queue.wake_all(OUT);
        Ok(())
    }

    fn local_address(&self) -> SocketAddress {
        SocketAddress::Unix(self.own_name())
    }

    fn peer_address(&self) -> Result<SocketAddress> {
        let state = self.state.borrow_mut();
        state
            .peer
            .as_ref()
            .map(|peer| SocketAddress::Unix(peer.name.clone()))
            .ok_or(Errno::ENOTCONN)
    }

    fn send(&self, source: &mut Source<'_>, message: &mut Outgoing) -> Result<usize> {
        if message.flags.contains(MessageFlags::OOB) {
            return Err(Errno::EOPNOTSUPP);
        }
        if source.remaining() > self.send_limit().saturating_sub(32) {
            return Err(Errno::EMSGSIZE);
        }
        let (peer, writing_shut) = {
            let state = self.state.borrow_mut();
            (state.peer.clone(), state.writing_shut)
        };
        let to = match (&message.to, peer) {
            (Some(SocketAddress::Unix(name)), _) => self.find(name)?,
            (Some(_), _) => return Err(Errno::EINVAL),
            (None, None) => return Err(Errno::ENOTCONN),
            (None, Some(peer)) => {
                match peer.socket.upgrade().filter(|peer| !peer.state.borrow_mut().closed) {
                    Some(peer) => peer,
                    None => {
                        // The peer is gone: say so once, then be unconnected.
                        self.state.borrow_mut().peer = None;
                        return Err(Errno::ECONNREFUSED);
                    }
                }
            }
        };
        if writing_shut || to.state.borrow_mut().reading_shut {
            return Err(Errno::EPIPE);
        }
        if !to.has_room_for(self) {
            to.wait_for_room(&self.common.queue);
            return Err(Errno::EAGAIN);
        }
        let bytes = source.take_all(usize::MAX)?;
        let len = bytes.len();
        if message.ancillary.credentials.is_none() {
            message.ancillary.credentials = message.sender;
        }
        let ancillary = core::mem::take(&mut message.ancillary);
        let from = match self.own_name() {
            UnixName::Unnamed => None,
            name => Some(SocketAddress::Unix(name)),
        };
        to.inbox.borrow_mut().push(Datagram { bytes, from, ancillary, arrival: None });
        to.common.queue.wake_all(IN);
        Ok(len)
    }

    fn receive(&self, sink: &mut Sink<'_>, flags: MessageFlags) -> Result<Received> {
        if flags.contains(MessageFlags::OOB) {
            return Err(Errno::EOPNOTSUPP);
        }
        let outcome = self.inbox.borrow_mut().receive(sink, flags);
        match outcome {
            // As on Linux, who does not wait is not told of the end.
            Err(Errno::EAGAIN)
                if self.state.borrow_mut().reading_shut
                    && !flags.contains(MessageFlags::DONTWAIT) =>
            {
                Ok(Received::default())
            }
            Ok(received) => {
                self.wake_senders();
                Ok(received)
            }
            outcome => outcome,
        }
    }

    fn shutdown(&self, how: ShutdownHow) -> Result<()> {
        {
            // As on Linux, it need not be connected.
            let mut state = self.state.borrow_mut();
            state.reading_shut |= how.reads();
            state.writing_shut |= how.writes();
        }
        self.common.queue.wake_all(IN | OUT | Events::RDHUP | Events::HUP);
        self.wake_senders();
        Ok(())
    }

    fn poll(&self) -> Events {
        let (peer, reading_shut, writing_shut) = {
            let state = self.state.borrow_mut();
            (state.peer.clone(), state.reading_shut, state.writing_shut)
        };
        let mut events = Events::empty();
        if !self.inbox.borrow_mut().is_empty() {
            events |= IN;
        }
        if reading_shut {
            events |= IN | Events::RDHUP;
        }
        if reading_shut && writing_shut {
            events |= Events::HUP;
        }
        let full =
            peer.and_then(|peer| peer.socket.upgrade()).filter(|peer| !peer.has_room_for(self));
        match full {
            Some(peer) => peer.wait_for_room(&self.common.queue),
            None => events |= OUT | Events::WRBAND,
        }
        events
    }

    fn readable_bytes(&self) -> Result<usize> {
        Ok(self.inbox.borrow_mut().first_len())
    }

    fn peer_credentials(&self) -> Option<PeerCredentials> {
        self.state.borrow_mut().peer.as_ref().and_then(|peer| peer.credentials)
    }

    fn close(&self) {
        self.state.borrow_mut().closed = true;
        let binding = self.binding.borrow_mut().take();
        if let Some(binding) = binding {
            self.names.release(binding);
        }
        let unread = self.inbox.borrow_mut().take_all();
        self.wake_senders();
        // May close other files, which travelled here: last, and without a lock.
        drop(unread);
    }
}
