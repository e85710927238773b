//! Making sockets for a sandbox.

use std::io::IoSlice;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use thaw_abi::network::{RESOLVER_ADDRESS, RESOLVER_PORT};

use super::dns::{self, lookup};
use super::names::Names;
use super::policy::{EgressPolicy, Verdict};
use super::rate::Rate;
use super::rule::Transport;
use crate::message;

/// How long a sandbox may leave an answer unread that came late.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(5);

/// The sockets of one sandbox.
#[derive(Debug)]
pub(crate) struct Sockets {
    names: Arc<Names>,
    rate: Rate,
    /// The control socket, for answers that come late.
    control: OwnedFd,
}

/// What became of a request for a socket.
#[derive(Debug)]
pub(crate) enum Opening {
    /// A socket whose connection is made or in progress.
    Opened(OwnedFd),
    /// Names are looked up first; the answer goes straight to the sandbox.
    Later,
}

/// A destination that a sandbox has asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Destination {
    pub address: SocketAddr,
    pub transport: Transport,
}

impl Sockets {
    /// For a sandbox with this policy and this (host's end of the) control socket.
    pub fn new(policy: Arc<EgressPolicy>, control: OwnedFd) -> Self {
        Self { names: Names::new(policy), rate: Rate::new(), control }
    }

    /// Makes the socket that request `sequence` asks for. Never blocks.
    pub fn open(&mut self, to: Destination, sequence: u64) -> Result<Opening, Errno> {
        if !self.rate.take(Instant::now()) {
            return Err(Errno::AGAIN);
        }
        let resolver = SocketAddr::from((RESOLVER_ADDRESS, RESOLVER_PORT));
        if SocketAddr::new(to.address.ip().to_canonical(), to.address.port()) == resolver {
            return self.open_resolver(to.transport).map(Opening::Opened);
        }
        let names = match self.names.judge(to.address, to.transport) {
            Verdict::Allowed(address) => {
                return connect(address, to.transport).map(Opening::Opened);
            }
            Verdict::Denied => return Err(Errno::ACCESS),
            Verdict::IfNamed(names) => names,
        };
        // A thawed copy knows addresses that its host has not told it in this
        // life: they are allowed if they are still those of an allowed name.
        let slot = self.names.lookup_slot().ok_or(Errno::AGAIN)?;
        let control = rustix::io::dup(&self.control)?;
        let known = self.names.clone();
        let job = move || {
            for name in names {
                known.look_up(&name);
            }
            drop(slot);
            let outcome = match known.judge(to.address, to.transport) {
                Verdict::Allowed(address) => connect(address, to.transport),
                _ => Err(Errno::ACCESS),
            };
            answer_late(&control, sequence, outcome);
        };
        lookup::submit(job).map_err(|_| Errno::AGAIN)?;
        Ok(Opening::Later)
    }

    fn open_resolver(&self, transport: Transport) -> Result<OwnedFd, Errno> {
        let framing = match transport {
            Transport::Tcp => dns::Framing::Stream,
            Transport::Udp => dns::Framing::Packets,
        };
        let slot = self.names.channel_slot().ok_or(Errno::AGAIN)?;
        dns::open(framing, &self.names, slot)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
    }
}

/// Makes a socket and begins to connect it. Never blocks.
pub(super) fn connect(to: SocketAddr, transport: Transport) -> Result<OwnedFd, Errno> {
    let family = match to {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let kind = match transport {
        Transport::Tcp => SocketType::STREAM,
        Transport::Udp => SocketType::DGRAM,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, kind, flags, None)?;
    if transport == Transport::Tcp {
        // The sandbox cannot set options. Its kernel gathers small writes where
        // that is wanted, and a dead peer must not hold an instance for ever.
        sockopt::set_tcp_nodelay(&socket, true)?;
        sockopt::set_socket_keepalive(&socket, true)?;
    }
    match rustix::net::connect(&socket, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(errno) => Err(errno),
    }
}

/// Sends an answer from a thread that may wait.
fn answer_late(control: &OwnedFd, sequence: u64, outcome: Result<OwnedFd, Errno>) {
    let (errno, socket) = match outcome {
        Ok(socket) => (0, Some(socket)),
        Err(errno) => (errno.raw_os_error(), None),
    };
    let reply = message::reply(sequence, errno, &[]);
    let deadline = Instant::now() + UNREAD_TIMEOUT;
    loop {
        let descriptors: Vec<_> = socket.iter().map(AsFd::as_fd).collect();
        match message::send(control, &[IoSlice::new(&reply)], &descriptors) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            // Sent, or nobody is left to read it.
            _ => return,
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        if matches!(poll(&mut [PollFd::new(control, PollFlags::OUT)], Some(&left)), Ok(0)) {
            // It does not read what it has asked for: end it as a violator would be.
            let _ = rustix::net::shutdown(control, rustix::net::Shutdown::Both);
            return;
        }
    }
}
