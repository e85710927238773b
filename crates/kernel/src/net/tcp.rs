//! TCP sockets (tcp(7)): listening ones, and connections over loopback.
//!
//! There is no network: a connect finds the listening socket, and the two ends
//! share a [`Pair`]. A connection that the host hands in enters the same
//! accept queue as a [`super::host_connection::HostConnection`]. What leads
//! outside is in [`super::tcp_outside`].

use alloc::collections::VecDeque;
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;
use core::net::IpAddr;

use super::address::{AF_INET6, Endpoint, SocketAddress};
use super::host_stream::Ending;
use super::incoming::Incoming;
use super::namespace::Scope;
use super::options;
use super::pair::{Closing, End, Flavor, Pair};
use super::ports::{BindOptions, PortTable};
use super::socket::{
    Blocking, Common, IN, MessageFlags, OUT, Outgoing, Protocol, Received, ShutdownHow, SocketType,
};
use super::sockets::{ConnectionState, Listed};
use super::tcp_outside::{Dormant, Outside, Stage};
use crate::errno::{Errno, Result};
use crate::fs::anonymous::InodeNumbers;
use crate::fs::file::Events;
use crate::io::{Sink, Source};
use crate::sync::KernelCell;

/// `IPPROTO_TCP`.
pub const IPPROTO_TCP: u32 = 6;
/// `net.core.somaxconn`.
const BACKLOG_MAX: i32 = 4096;
/// Send and receive buffer together, unless `SO_SNDBUF` says otherwise: as much
/// as Linux puts on the way over loopback.
const DEFAULT_IN_FLIGHT: usize = 2_626_560;
/// What the receiver's side adds to an explicit `SO_SNDBUF`.
const RECEIVE_SHARE: usize = 131_072;

/// What TCP sockets share.
pub struct TcpNetwork {
    /// Bound ports.
    pub ports: PortTable<TcpSocket>,
    /// Where they reach.
    scope: Scope,
}

/// A TCP socket.
pub struct TcpSocket {
    pub(super) this: Weak<TcpSocket>,
    pub(super) common: Common,
    network: Arc<TcpNetwork>,
    inodes: Arc<InodeNumbers>,
    pub(super) state: KernelCell<State>,
    /// Where it is bound.
    bound: KernelCell<Option<Bound>>,
}

#[derive(Clone, Copy)]
struct Bound {
    endpoint: Endpoint,
    /// In the port table, to be released; false for accepted sockets.
    owns_port: bool,
}

pub(super) enum State {
    Idle,
    Listening(Listener),
    /// Waits for room in the listener's accept queue.
    Connecting {
        to: Endpoint,
    },
    Connected(Link),
    /// Waits for the host to make a socket to the outside.
    Asking {
        to: Endpoint,
        sequence: u64,
    },
    /// Connected to the outside, or about to be.
    Outside(Outside),
    /// Was connected to the outside when the program was frozen.
    Dormant(Dormant),
    /// A connect has failed; the next call hears about it.
    Failed,
}

#[derive(Clone)]
pub(super) struct Link {
    pair: Arc<Pair>,
    end: End,
    peer: Endpoint,
    /// Whether connect(2) has said so.
    announced: bool,
}

pub(super) struct Listener {
    backlog: usize,
    /// Connections to be accepted.
    queue: VecDeque<Arc<dyn Protocol>>,
    /// Sockets that wait for room in the queue.
    waiting: VecDeque<Weak<TcpSocket>>,
}

impl Default for TcpNetwork {
    fn default() -> Self {
        Self::new()
    }
}

impl TcpNetwork {
    /// Without sockets.
    pub const fn new() -> Self {
        Self::within(Scope::SANDBOX)
    }

    /// Without sockets, of a namespace.
    pub const fn within(scope: Scope) -> Self {
        Self { ports: PortTable::new(), scope }
    }

    /// A fresh socket of `family`.
    pub fn socket(self: &Arc<Self>, family: u16, inodes: &Arc<InodeNumbers>) -> Arc<TcpSocket> {
        TcpSocket::new(self.clone(), inodes.clone(), family, State::Idle, None)
    }
}

impl TcpSocket {
    fn new(
        network: Arc<TcpNetwork>,
        inodes: Arc<InodeNumbers>,
        family: u16,
        state: State,
        bound: Option<Bound>,
    ) -> Arc<Self> {
        let common = Common::new(family, SocketType::Stream, IPPROTO_TCP, inodes.next());
        Arc::new_cyclic(|this| Self {
            this: this.clone(),
            common,
            network,
            inodes,
            state: KernelCell::new(state),
            bound: KernelCell::new(bound),
        })
    }

    fn link(&self) -> Option<Link> {
        match &*self.state.borrow_mut() {
            State::Connected(link) => Some(link.clone()),
            _ => None,
        }
    }

    /// Puts a connection into the accept queue, whatever its length; gives it
    /// back if the socket does not listen.
    pub fn deliver(
        &self,
        connection: Arc<dyn Protocol>,
    ) -> core::result::Result<(), Arc<dyn Protocol>> {
        match &mut *self.state.borrow_mut() {
            State::Listening(listener) => listener.queue.push_back(connection),
            _ => return Err(connection),
        }
        self.common.queue.wake_all(IN);
        Ok(())
    }

    /// Whether it listens and nobody waits to be accepted.
    pub fn waits_for_clients(&self) -> bool {
        matches!(&*self.state.borrow_mut(), State::Listening(listener) if listener.queue.is_empty())
    }

    /// Options that accepted sockets take over.
    pub fn inherited_options(&self) -> super::options::Options {
        self.common.options.borrow_mut().clone()
    }

    fn bind_to(&self, endpoint: Endpoint) -> Result<Endpoint> {
        let options = {
            let options = self.common.options.borrow_mut();
            BindOptions {
                reuse_address: options.flag(options::REUSEADDR),
                reuse_port: options.flag(options::REUSEPORT),
                v6_only: self.common.family == AF_INET6 && options.flag(options::V6ONLY),
                datagram: false,
            }
        };
        let endpoint = self.network.ports.bind(&self.this, endpoint, options)?;
        self.bound.set(Some(Bound { endpoint, owns_port: true }));
        Ok(endpoint)
    }

    /// The endpoint it is bound to, binding it to an ephemeral port if need be.
    fn bound_or_any(&self) -> Result<Endpoint> {
        match self.bound.get() {
            Some(bound) => Ok(bound.endpoint),
            None => self.bind_to(Endpoint::wildcard(self.common.family)),
        }
    }

    /// Chooses the source address of a connection to the outside.
    pub(super) fn bind_source(&self, ip: IpAddr) -> Result<()> {
        self.bound_or_any()?;
        if let Some(Bound { endpoint, .. }) = &mut *self.bound.borrow_mut()
            && endpoint.ip.is_unspecified()
        {
            endpoint.ip = ip;
        }
        Ok(())
    }

    /// Whether a connect is in progress.
    fn is_connecting(&self) -> bool {
        match &*self.state.borrow_mut() {
            State::Connecting { .. } | State::Asking { .. } | State::Dormant(_) => true,
            State::Outside(link) => link.stage.is_connecting(),
            _ => false,
        }
    }

    fn send_limit(&self) -> usize {
        match self.common.options.borrow_mut().send_buffer {
            Some(bytes) => bytes as usize + RECEIVE_SHARE,
            None => DEFAULT_IN_FLIGHT,
        }
    }

    /// Tries to connect to the listener at `to`.
    fn establish(&self, to: Endpoint) -> Attempt {
        let Some(listener) = self.network.ports.listener(to) else { return Attempt::Refused };
        let Some(local) = self.bound.get() else { return Attempt::Refused };
        // The source address is chosen when the connection is made.
        let local = if local.endpoint.ip.is_unspecified() {
            Bound { endpoint: Endpoint { ip: to.ip, ..local.endpoint }, ..local }
        } else {
            local
        };
        {
            let mut state = listener.state.borrow_mut();
            let State::Listening(queue) = &mut *state else { return Attempt::Refused };
            if queue.queue.len() > queue.backlog {
                queue.waiting.push_back(self.this.clone());
                return Attempt::Full;
            }
        }
        self.bound.set(Some(local));
        let accepted = Self::new(
            self.network.clone(),
            self.inodes.clone(),
            listener.common.family,
            State::Idle,
            Some(Bound { endpoint: to, owns_port: false }),
        );
        *accepted.common.options.borrow_mut() = listener.inherited_options();
        let queues = [self.common.queue.clone(), accepted.common.queue.clone()];
        let limits = [self.send_limit(), accepted.send_limit()];
        let pair = Pair::new(Flavor::Tcp, queues, limits, Incoming::stream);
        let link = |end, peer, announced| {
            State::Connected(Link { pair: pair.clone(), end, peer, announced })
        };
        *accepted.state.borrow_mut() = link(End::Second, local.endpoint, true);
        *self.state.borrow_mut() = link(End::First, to, false);
        self.options_changed();
        accepted.options_changed();
        match listener.deliver(accepted) {
            Ok(()) => Attempt::Connected,
            Err(_) => Attempt::Refused,
        }
    }

    /// A place in the accept queue has become free. Whether there is none any more.
    fn retry(&self) -> bool {
        let State::Connecting { to } = *self.state.borrow_mut() else { return false };
        let attempt = self.establish(to);
        match attempt {
            Attempt::Full => return true,
            Attempt::Connected => {}
            Attempt::Refused => self.fail(Errno::ECONNREFUSED),
        }
        self.common.queue.wake_all(IN | OUT | Events::ERR | Events::HUP);
        matches!(attempt, Attempt::Connected)
    }

    /// The first of those that wait for a place in the accept queue.
    fn next_waiting(&self) -> Option<Weak<Self>> {
        match &mut *self.state.borrow_mut() {
            State::Listening(listener) => listener.waiting.pop_front(),
            _ => None,
        }
    }

    pub(super) fn fail(&self, error: Errno) {
        *self.state.borrow_mut() = State::Failed;
        *self.common.error.borrow_mut() = Some(error);
        self.release_port();
    }

    fn release_port(&self) {
        let bound = self.bound.borrow_mut().take();
        if let Some(Bound { endpoint, owns_port: true }) = bound {
            self.network.ports.release(&self.this, endpoint.port);
        }
    }
}

enum Attempt {
    Connected,
    /// The accept queue has no room.
    Full,
    Refused,
}

fn inet(address: &SocketAddress, family: u16) -> Result<Endpoint> {
    match (address, family) {
        (SocketAddress::V4(endpoint), f) if f != AF_INET6 => Ok(*endpoint),
        (SocketAddress::V6(endpoint), AF_INET6) => Ok(*endpoint),
        (SocketAddress::V4(_), _) => Err(Errno::EINVAL),
        _ => Err(Errno::EAFNOSUPPORT),
    }
}

impl Protocol for TcpSocket {
    fn common(&self) -> &Common {
        &self.common
    }

    fn bind(&self, address: &SocketAddress) -> Result<()> {
        let endpoint = inet(address, self.common.family)?;
        if self.bound.get().is_some() || !matches!(&*self.state.borrow_mut(), State::Idle) {
            return Err(Errno::EINVAL);
        }
        self.network.scope.check_source(endpoint.ip)?;
        if !endpoint.is_local() {
            return Err(Errno::EADDRNOTAVAIL);
        }
        self.bind_to(endpoint).map(drop)
    }

    fn listen(&self, backlog: i32) -> Result<()> {
        // A negative backlog is a very large one: the comparison is unsigned.
        let backlog =
            if (0..=BACKLOG_MAX).contains(&backlog) { backlog } else { BACKLOG_MAX } as usize;
        match &mut *self.state.borrow_mut() {
            State::Idle => {}
            State::Listening(listener) => {
                listener.backlog = backlog;
                return Ok(());
            }
            _ => return Err(Errno::EINVAL),
        }
        let endpoint = self.bound_or_any()?;
        self.network.ports.listen(&self.this, endpoint.port)?;
        let listener = Listener { backlog, queue: VecDeque::new(), waiting: VecDeque::new() };
        *self.state.borrow_mut() = State::Listening(listener);
        Ok(())
    }

    fn is_listening(&self) -> bool {
        matches!(&*self.state.borrow_mut(), State::Listening(_))
    }

    fn listed(&self) -> Option<Listed> {
        self.settle();
        let of = |state, remote, receive_queue| {
            let listed = Listed::new(state);
            Some(Listed { remote: Some(remote), receive_queue, ..listed })
        };
        match &*self.state.borrow_mut() {
            State::Idle | State::Failed => None,
            State::Listening(Listener { backlog, queue, .. }) => Some(Listed {
                receive_queue: queue.len(),
                send_queue: *backlog,
                ..Listed::new(ConnectionState::Listen)
            }),
            // A SYN that has not been answered is in the queue, too.
            State::Connecting { to } | State::Asking { to, .. } => {
                of(ConnectionState::SynSent, *to, 0)
                    .map(|listed| Listed { send_queue: 1, ..listed })
            }
            State::Connected(Link { pair, end, peer, .. }) => match pair.state(*end) {
                ConnectionState::Close => None,
                state => of(state, *peer, pair.readable_bytes(*end)),
            },
            State::Outside(link) if link.stage == Stage::Connecting => {
                of(ConnectionState::SynSent, link.peer, 0)
            }
            State::Outside(link) => {
                of(link.stream.state()?, link.peer, link.stream.readable_bytes())
            }
            State::Dormant(dormant) => of(ConnectionState::Established, dormant.peer, 0),
        }
    }

    fn waiting_connections(&self) -> Vec<Arc<dyn Protocol>> {
        match &*self.state.borrow_mut() {
            State::Listening(listener) => listener.queue.iter().cloned().collect(),
            _ => Vec::new(),
        }
    }

    fn accept(&self) -> Result<Arc<dyn Protocol>> {
        let connection = match &mut *self.state.borrow_mut() {
            State::Listening(listener) => listener.queue.pop_front().ok_or(Errno::EAGAIN)?,
            _ => return Err(Errno::EINVAL),
        };
        // Some may have been closed, or have given up.
        while let Some(waiting) = self.next_waiting() {
            if waiting.upgrade().is_some_and(|socket| socket.retry()) {
                break;
            }
        }
        Ok(connection)
    }

    fn connect(&self, address: &SocketAddress, blocking: Blocking) -> Result<()> {
        self.settle();
        match &mut *self.state.borrow_mut() {
            State::Idle => {}
            State::Listening(_) => return Err(Errno::EISCONN),
            State::Connecting { .. } | State::Asking { .. } => return Err(Errno::EALREADY),
            State::Outside(link) => return link.connect_again(),
            State::Dormant(_) => return Err(Errno::EISCONN),
            State::Connected(link) if !link.announced => {
                link.announced = true;
                return Ok(());
            }
            State::Connected(_) => return Err(Errno::EISCONN),
            state @ State::Failed => {
                *state = State::Idle;
                self.common.take_error()?;
            }
        }
        if *address == SocketAddress::Unspecified {
            return Ok(());
        }
        let to = inet(address, self.common.family)?.as_destination();
        self.network.scope.check_destination(to.ip)?;
        if !to.is_local() {
            return self.connect_outside(to);
        }
        self.bound_or_any()?;
        let attempt = self.establish(to);
        match (attempt, blocking) {
            (Attempt::Connected, Blocking::Yes) => {
                self.connect(address, blocking)?;
                self.common.queue.wake_all(OUT);
                Ok(())
            }
            (Attempt::Refused, Blocking::Yes) => {
                self.release_port();
                Err(Errno::ECONNREFUSED)
            }
            (Attempt::Connected, Blocking::No) => {
                // As on Linux, where the answer cannot come while the socket is
                // locked: even over loopback a connect is in progress first.
                self.common.queue.wake_all(OUT);
                Err(Errno::EINPROGRESS)
            }
            (Attempt::Refused, Blocking::No) => {
                self.fail(Errno::ECONNREFUSED);
                self.common.queue.wake_all(IN | OUT | Events::ERR | Events::HUP);
                Err(Errno::EINPROGRESS)
            }
            (Attempt::Full, _) => {
                *self.state.borrow_mut() = State::Connecting { to };
                Err(Errno::EINPROGRESS)
            }
        }
    }

    fn finish_connect(&self) -> Result<()> {
        self.settle();
        match &mut *self.state.borrow_mut() {
            State::Connecting { .. } | State::Asking { .. } => Err(Errno::EAGAIN),
            State::Outside(link) => link.announce(),
            State::Dormant(_) => Ok(()),
            State::Connected(link) => {
                link.announced = true;
                Ok(())
            }
            state => {
                *state = State::Idle;
                self.common.take_error()?;
                Err(Errno::ECONNREFUSED)
            }
        }
    }

    fn local_address(&self) -> SocketAddress {
        let endpoint =
            self.bound.get().map_or(Endpoint::wildcard(self.common.family), |bound| bound.endpoint);
        endpoint.for_family(self.common.family)
    }

    fn peer_address(&self) -> Result<SocketAddress> {
        if let Some(stream) = self.outside_stream() {
            let link = self.outside().filter(|_| stream.is_live()).ok_or(Errno::ENOTCONN)?;
            return Ok(link.peer.for_family(self.common.family));
        }
        let link = self.link();
        if link.as_ref().is_some_and(|link| link.pair.has_ended(link.end)) {
            return Err(Errno::ENOTCONN);
        }
        let peer = link.map(|link| link.peer).or_else(|| self.dormant_peer());
        peer.map(|peer| peer.for_family(self.common.family)).ok_or(Errno::ENOTCONN)
    }

    fn send(&self, source: &mut Source<'_>, message: &mut Outgoing) -> Result<usize> {
        if let Some(stream) = self.outside_stream() {
            return stream.send(source, message);
        }
        self.awaken();
        let Some(link) = self.link() else {
            self.common.take_error()?;
            return Err(if self.is_connecting() { Errno::EAGAIN } else { Errno::EPIPE });
        };
        link.pair.send(link.end, source, message)
    }

    fn receive(&self, sink: &mut Sink<'_>, flags: MessageFlags) -> Result<Received> {
        if let Some(stream) = self.outside_stream() {
            return stream.receive(sink, flags);
        }
        self.awaken();
        let Some(link) = self.link() else {
            self.common.take_error()?;
            return Err(if self.is_connecting() { Errno::EAGAIN } else { Errno::ENOTCONN });
        };
        link.pair.receive(link.end, sink, flags)
    }

    fn shutdown(&self, how: ShutdownHow) -> Result<()> {
        if let Some(stream) = self.outside_stream() {
            return stream.shutdown(how);
        }
        if let Some(link) = self.link() {
            return link.pair.shutdown(link.end, how);
        }
        let listener = {
            let mut state = self.state.borrow_mut();
            match &*state {
                // Stops listening; the port stays bound.
                State::Listening(_) if how.reads() => core::mem::replace(&mut *state, State::Idle),
                State::Listening(_) => return Ok(()),
                _ => return Err(Errno::ENOTCONN),
            }
        };
        self.end_listening(listener);
        self.common.queue.wake_all(IN | OUT | Events::HUP | Events::RDHUP);
        Ok(())
    }

    fn poll(&self) -> Events {
        if let Some(stream) = self.outside_stream() {
            return stream.poll();
        }
        let error = if self.common.error.get().is_some() { Events::ERR } else { Events::empty() };
        let events = match &*self.state.borrow_mut() {
            State::Idle => OUT | Events::HUP,
            State::Listening(listener) if listener.queue.is_empty() => Events::empty(),
            State::Listening(_) => IN,
            State::Connecting { .. } | State::Asking { .. } | State::Outside(_) => Events::empty(),
            State::Dormant(dormant) => dormant.poll(),
            State::Failed => IN | OUT | Events::HUP | Events::RDHUP,
            State::Connected(link) => link.pair.poll(link.end),
        };
        events | error
    }

    fn readable_bytes(&self) -> Result<usize> {
        match &*self.state.borrow_mut() {
            State::Listening(_) => Err(Errno::EINVAL),
            State::Connected(link) => Ok(link.pair.readable_bytes(link.end)),
            State::Outside(link) => Ok(link.stream.readable_bytes()),
            _ => Ok(0),
        }
    }

    fn is_at_urgent(&self) -> Result<bool> {
        Ok(self.link().is_some_and(|link| link.pair.is_at_urgent(link.end)))
    }

    fn unsent_bytes(&self) -> usize {
        self.link().map_or(0, |link| link.pair.unsent_bytes(link.end))
    }

    fn take_error(&self) -> Option<Errno> {
        if let Some(stream) = self.outside_stream() {
            return stream.take_error();
        }
        let own = self.common.error.borrow_mut().take();
        own.or_else(|| self.link().and_then(|link| link.pair.take_error(link.end)))
    }

    fn options_changed(&self) {
        if let Some(link) = self.link() {
            link.pair.set_send_limit(link.end, self.send_limit());
            let inline = self.common.options.borrow_mut().flag(options::OOBINLINE);
            link.pair.set_urgent_inline(link.end, inline);
        }
    }

    fn close(&self) {
        let state = core::mem::replace(&mut *self.state.borrow_mut(), State::Idle);
        self.release_port();
        match state {
            State::Connected(link) => {
                let abort = self.common.options.borrow_mut().linger == Some(0);
                link.pair.close(link.end, if abort { Closing::Reset } else { Closing::Normal });
            }
            State::Outside(link) => {
                link.stream.close(Ending::OwnOnly);
            }
            state => self.end_listening(state),
        }
    }

    fn abort(&self) {
        if let Some(link) = self.link() {
            link.pair.close(link.end, Closing::Reset);
        }
        self.close();
    }
}

impl TcpSocket {
    /// Resets what was never accepted and refuses those who wait.
    fn end_listening(&self, state: State) {
        let State::Listening(listener) = state else { return };
        for connection in listener.queue {
            connection.abort();
        }
        for socket in listener.waiting.iter().filter_map(Weak::upgrade) {
            socket.retry();
        }
    }
}

#[cfg(test)]
#[path = "tcp_tests.rs"]
mod tests;
