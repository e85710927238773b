//! Unix sockets with connections: `SOCK_STREAM` and `SOCK_SEQPACKET` (unix(7)).

use alloc::collections::VecDeque;
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;

use super::address::{AF_UNIX, SocketAddress, UnixName};
use super::incoming::Incoming;
use super::options;
use super::pair::{Closing, End, Flavor, Pair};
use super::socket::{
    Blocking, Common, IN, MessageFlags, OUT, Outgoing, PeerCredentials, Protocol, Received,
    ShutdownHow, SocketType,
};
use super::sockets::{ConnectionState, Listed};
use super::unix_names::{Binding, Named, Names};
use crate::errno::{Errno, Result};
use crate::fs::anonymous::InodeNumbers;
use crate::fs::file::Events;
use crate::io::{Sink, Source};
use crate::sync::KernelCell;
use crate::task::wait::WaitQueue;

/// `net.core.wmem_default`.
pub const DEFAULT_SEND_BUFFER: usize = 212_992;
/// `net.core.somaxconn`.
const BACKLOG_MAX: i32 = 4096;

/// A Unix socket with connections.
pub struct UnixStream {
    this: Weak<UnixStream>,
    common: Common,
    names: Arc<Names>,
    inodes: Arc<InodeNumbers>,
    state: KernelCell<State>,
    binding: KernelCell<Option<Binding>>,
}

enum State {
    Idle,
    Listening(Listener),
    Connected(Link),
}

struct Listener {
    backlog: usize,
    queue: VecDeque<Arc<UnixStream>>,
    /// Who waits for room in the queue.
    waiting: Vec<Arc<WaitQueue>>,
    /// Who called listen(2).
    credentials: PeerCredentials,
}

#[derive(Clone)]
struct Link {
    pair: Arc<Pair>,
    end: End,
    /// Name of this end, if it has none by itself: an accepted socket's is its listener's.
    local: UnixName,
    peer: UnixName,
    /// Inode number of the other end.
    peer_ino: u64,
    peer_credentials: PeerCredentials,
}

impl UnixStream {
    /// A fresh socket.
    pub fn new(names: &Arc<Names>, inodes: &Arc<InodeNumbers>, kind: SocketType) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: this.clone(),
            common: Common::new(AF_UNIX, kind, 0, inodes.next()),
            names: names.clone(),
            inodes: inodes.clone(),
            state: KernelCell::new(State::Idle),
            binding: KernelCell::new(None),
        })
    }

    /// Two sockets connected to each other (socketpair(2)).
    pub fn pair(
        names: &Arc<Names>,
        inodes: &Arc<InodeNumbers>,
        kind: SocketType,
    ) -> (Arc<Self>, Arc<Self>) {
        let first = Self::new(names, inodes, kind);
        let second = Self::new(names, inodes, kind);
        let own = PeerCredentials::of_peer();
        first.join(&second, UnixName::Unnamed, [own, own]);
        (first, second)
    }

    /// Connects `self` to `other`, which has the given name. `credentials` are
    /// those of `self` and `other`.
    fn join(&self, other: &UnixStream, name: UnixName, credentials: [PeerCredentials; 2]) {
        let queues = [self.common.queue.clone(), other.common.queue.clone()];
        let limits = [self.send_limit(), other.send_limit()];
        let pair = match self.common.kind {
            SocketType::Stream => Pair::new(Flavor::Unix, queues, limits, Incoming::stream),
            _ => Pair::new(Flavor::Unix, queues, limits, Incoming::packets),
        };
        let own_name = self.own_name();
        *other.state.borrow_mut() = State::Connected(Link {
            pair: pair.clone(),
            end: End::Second,
            local: name.clone(),
            peer: own_name.clone(),
            peer_ino: self.common.ino,
            peer_credentials: credentials[0],
        });
        *self.state.borrow_mut() = State::Connected(Link {
            pair,
            end: End::First,
            local: own_name,
            peer: name,
            peer_ino: other.common.ino,
            peer_credentials: credentials[1],
        });
        self.options_changed();
        other.options_changed();
    }

    fn own_name(&self) -> UnixName {
        self.binding.borrow_mut().as_ref().map_or(UnixName::Unnamed, |binding| binding.name.clone())
    }

    fn link(&self) -> Option<Link> {
        match &*self.state.borrow_mut() {
            State::Connected(link) => Some(link.clone()),
            _ => None,
        }
    }

    /// The connection without its names, for the paths that carry data.
    fn ends(&self) -> Option<(Arc<Pair>, End)> {
        match &*self.state.borrow_mut() {
            State::Connected(link) => Some((link.pair.clone(), link.end)),
            _ => None,
        }
    }

    fn send_limit(&self) -> usize {
        self.common
            .options
            .borrow_mut()
            .send_buffer
            .map_or(DEFAULT_SEND_BUFFER, |bytes| bytes as usize)
    }
}

impl Protocol for UnixStream {
    fn common(&self) -> &Common {
        &self.common
    }

    fn bind(&self, address: &SocketAddress) -> Result<()> {
        self.names.bind_to(address, &self.binding, Named::Stream(self.this.clone()))
    }

    fn listen(&self, backlog: i32) -> Result<()> {
        if self.binding.borrow_mut().is_none() {
            return Err(Errno::EINVAL);
        }
        let backlog =
            if (0..=BACKLOG_MAX).contains(&backlog) { backlog } else { BACKLOG_MAX } as usize;
        let waiting = match &mut *self.state.borrow_mut() {
            state @ State::Idle => {
                *state = State::Listening(Listener {
                    backlog,
                    queue: VecDeque::new(),
                    waiting: Vec::new(),
                    credentials: PeerCredentials::of_peer(),
                });
                Vec::new()
            }
            State::Listening(listener) => {
                listener.backlog = backlog;
                core::mem::take(&mut listener.waiting)
            }
            State::Connected(_) => return Err(Errno::EINVAL),
        };
        waiting.iter().for_each(|queue| queue.wake_all(OUT));
        Ok(())
    }

    fn is_listening(&self) -> bool {
        matches!(&*self.state.borrow_mut(), State::Listening(_))
    }

    fn listed(&self) -> Option<Listed> {
        Some(match &*self.state.borrow_mut() {
            State::Idle => Listed::new(ConnectionState::Close),
            State::Listening(Listener { backlog, queue, .. }) => Listed {
                receive_queue: queue.len(),
                send_queue: *backlog,
                ..Listed::new(ConnectionState::Listen)
            },
            State::Connected(link) => Listed {
                receive_queue: link.pair.readable_bytes(link.end),
                send_queue: link.pair.unsent_bytes(link.end),
                peer_ino: link.peer_ino,
                ..Listed::new(ConnectionState::Established)
            },
        })
    }

    fn waiting_connections(&self) -> Vec<Arc<dyn Protocol>> {
        match &*self.state.borrow_mut() {
            State::Listening(listener) => {
                listener.queue.iter().map(|socket| socket.clone() as Arc<dyn Protocol>).collect()
            }
            _ => Vec::new(),
        }
    }

    fn accept(&self) -> Result<Arc<dyn Protocol>> {
        let (socket, waiting) = match &mut *self.state.borrow_mut() {
            State::Listening(listener) => match listener.queue.pop_front() {
                Some(socket) => (socket, core::mem::take(&mut listener.waiting)),
                None => return Err(Errno::EAGAIN),
            },
            _ => return Err(Errno::EINVAL),
        };
        waiting.iter().for_each(|queue| queue.wake_all(OUT));
        Ok(socket)
    }

    fn connect(&self, address: &SocketAddress, _blocking: Blocking) -> Result<()> {
        let SocketAddress::Unix(name) = address else { return Err(Errno::EINVAL) };
        let Named::Stream(listener) = self.names.find(name)? else { return Err(Errno::EPROTOTYPE) };
        let listener = listener.upgrade().ok_or(Errno::ECONNREFUSED)?;
        if listener.common.kind != self.common.kind {
            return Err(Errno::EPROTOTYPE);
        }
        match &*self.state.borrow_mut() {
            State::Idle => {}
            State::Listening(_) => return Err(Errno::EINVAL),
            State::Connected(_) => return Err(Errno::EISCONN),
        }
        let theirs = match &mut *listener.state.borrow_mut() {
            State::Listening(queue) => {
                if queue.queue.len() > queue.backlog {
                    if !queue.waiting.iter().any(|other| Arc::ptr_eq(other, &self.common.queue)) {
                        queue.waiting.push(self.common.queue.clone());
                    }
                    return Err(Errno::EAGAIN);
                }
                queue.credentials
            }
            _ => return Err(Errno::ECONNREFUSED),
        };
        let accepted = Self::new(&self.names, &self.inodes, self.common.kind);
        // Like Linux, an accepted socket passes credentials if its listener does.
        *accepted.common.options.borrow_mut() = listener.common.options.borrow_mut().clone();
        self.join(&accepted, listener.own_name(), [PeerCredentials::of_peer(), theirs]);
        if let State::Listening(queue) = &mut *listener.state.borrow_mut() {
            queue.queue.push_back(accepted);
        }
        listener.common.queue.wake_all(IN);
        self.common.queue.wake_all(OUT);
        Ok(())
    }

    fn local_address(&self) -> SocketAddress {
        let name = match self.own_name() {
            UnixName::Unnamed => self.link().map_or(UnixName::Unnamed, |link| link.local),
            name => name,
        };
        SocketAddress::Unix(name)
    }

    fn peer_address(&self) -> Result<SocketAddress> {
        self.link().map(|link| SocketAddress::Unix(link.peer)).ok_or(Errno::ENOTCONN)
    }

    fn send(&self, source: &mut Source<'_>, message: &mut Outgoing) -> Result<usize> {
        let ends = self.ends();
        if message.flags.contains(MessageFlags::OOB) {
            return Err(Errno::EOPNOTSUPP);
        }
        if message.to.is_some() && self.common.kind == SocketType::Stream {
            return Err(if ends.is_some() { Errno::EISCONN } else { Errno::EOPNOTSUPP });
        }
        let (pair, end) = ends.ok_or(Errno::ENOTCONN)?;
        pair.send(end, source, message)
    }

    fn receive(&self, sink: &mut Sink<'_>, flags: MessageFlags) -> Result<Received> {
        if flags.contains(MessageFlags::OOB) {
            return Err(Errno::EOPNOTSUPP);
        }
        let Some((pair, end)) = self.ends() else {
            return Err(if self.common.kind == SocketType::Stream {
                Errno::EINVAL
            } else {
                Errno::ENOTCONN
            });
        };
        pair.receive(end, sink, flags)
    }

    fn shutdown(&self, how: ShutdownHow) -> Result<()> {
        match self.ends() {
            Some((pair, end)) => pair.shutdown(end, how),
            // As on Linux, it need not be connected; it cannot send anyway.
            None => Ok(()),
        }
    }

    fn poll(&self) -> Events {
        match &*self.state.borrow_mut() {
            State::Idle => OUT | Events::WRBAND | Events::HUP,
            State::Listening(listener) if listener.queue.is_empty() => Events::empty(),
            State::Listening(_) => IN,
            State::Connected(link) => link.pair.poll(link.end),
        }
    }

    fn readable_bytes(&self) -> Result<usize> {
        match &*self.state.borrow_mut() {
            State::Listening(_) => Err(Errno::EINVAL),
            State::Connected(link) => Ok(link.pair.readable_bytes(link.end)),
            State::Idle => Ok(0),
        }
    }

    fn unsent_bytes(&self) -> usize {
        self.ends().map_or(0, |(pair, end)| pair.unsent_bytes(end))
    }

    fn peer_credentials(&self) -> Option<PeerCredentials> {
        match &*self.state.borrow_mut() {
            State::Connected(link) => Some(link.peer_credentials),
            State::Listening(listener) => Some(listener.credentials),
            State::Idle => None,
        }
    }

    fn take_error(&self) -> Option<Errno> {
        self.ends().and_then(|(pair, end)| pair.take_error(end))
    }

    fn options_changed(&self) {
        if let Some((pair, end)) = self.ends() {
            let wanted = self.common.options.borrow_mut().flag(options::PASSCRED);
            pair.set_wants_credentials(end, wanted);
            pair.set_send_limit(end, self.send_limit());
        }
    }

    fn close(&self) {
        let state = core::mem::replace(&mut *self.state.borrow_mut(), State::Idle);
        let binding = self.binding.borrow_mut().take();
        if let Some(binding) = binding {
            self.names.release(binding);
        }
        match state {
            State::Idle => {}
            State::Connected(link) => link.pair.close(link.end, Closing::Normal),
            State::Listening(listener) => {
                for socket in listener.queue {
                    socket.abort();
                }
                listener.waiting.iter().for_each(|queue| queue.wake_all(OUT));
            }
        }
    }

    fn abort(&self) {
        if let Some((pair, end)) = self.ends() {
            pair.close(end, Closing::Reset);
        }
        self.close();
    }
}

#[cfg(test)]
#[path = "unix_tests.rs"]
mod tests;
