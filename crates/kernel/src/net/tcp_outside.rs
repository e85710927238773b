//! TCP sockets whose connection leads outside.

use alloc::sync::Arc;

use super::address::Endpoint;
use super::host_poll::Kind;
use super::host_stream::{Ending, HostStream};
use super::outside;
use super::socket::{IN, OUT};
use super::tcp::{State, TcpSocket};
use crate::errno::{Errno, Result};
use crate::fs::file::Events;
use crate::ipc::seam;
use crate::platform::host::{self, HostFd};

/// A connection that is a socket of the host.
#[derive(Clone)]
pub(super) struct Outside {
    pub stream: Arc<HostStream>,
    pub peer: Endpoint,
    pub stage: Stage,
}

/// How far a connection to the outside has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The host's connect is in progress.
    Connecting,
    /// It has succeeded, which connect(2) has not said yet.
    Connected,
    /// connect(2) has said so.
    Announced,
}

impl Outside {
    /// What a further connect(2) says.
    pub fn connect_again(&mut self) -> Result<()> {
        match self.stage {
            Stage::Connecting => Err(Errno::EALREADY),
            Stage::Connected => self.announce(),
            Stage::Announced => Err(Errno::EISCONN),
        }
    }

    /// What a connect(2) that waits says.
    pub fn announce(&mut self) -> Result<()> {
        if self.stage == Stage::Connecting {
            return Err(Errno::EAGAIN);
        }
        self.stage = Stage::Announced;
        Ok(())
    }
}

impl TcpSocket {
    /// Begins to connect to an address outside; `EINPROGRESS` if that goes well.
    pub(super) fn connect_outside(&self, to: Endpoint) -> Result<()> {
        let source = outside::source_address(to.ip)?;
        self.bind_source(source)?;
        let sequence = seam::ask_for_stream(to, self.this.clone());
        *self.state.lock() = State::Asking { to, sequence };
        Err(Errno::EINPROGRESS)
    }

    /// The host has answered request `sequence`, with a socket whose connect is
    /// in progress if all is well.
    pub fn opened_outside(&self, sequence: u64, outcome: Result<HostFd>) {
        let to = match &*self.state.lock() {
            State::Asking { to, sequence: own } if *own == sequence => Some(*to),
            _ => None,
        };
        match (to, outcome) {
            (Some(peer), Ok(fd)) => {
                let queue = self.common.queue.clone();
                let stream = seam::host_stream(fd, Kind::Connecting, queue);
                let stage = Stage::Connecting;
                *self.state.lock() = State::Outside(Outside { stream, peer, stage });
                // Over a short way it has succeeded by now.
                self.settle();
            }
            (Some(_), Err(error)) => self.fail(connect_error(error)),
            (None, Ok(fd)) => host::close(fd),
            (None, Err(_)) => {}
        }
        self.common.queue.wake_all(IN | OUT | Events::ERR | Events::HUP);
    }

    /// Finds out how a connect to the outside that is in progress has ended.
    pub(super) fn settle(&self) {
        let Some(Outside { stream, stage: Stage::Connecting, .. }) = self.outside() else { return };
        match stream.connect_outcome() {
            Err(Errno::EAGAIN) => {}
            Ok(()) => {
                if let State::Outside(link) = &mut *self.state.lock() {
                    link.stage = Stage::Connected;
                }
            }
            Err(error) => {
                stream.close(Ending::OwnOnly);
                self.fail(error);
            }
        }
    }

    /// The connection to the outside, if it has one or will.
    pub(super) fn outside(&self) -> Option<Outside> {
        match &*self.state.lock() {
            State::Outside(link) => Some(link.clone()),
            _ => None,
        }
    }

    /// The stream to the outside, once it is connected.
    pub(super) fn outside_stream(&self) -> Option<Arc<HostStream>> {
        self.settle();
        self.outside().filter(|link| link.stage != Stage::Connecting).map(|link| link.stream)
    }
}

/// What connect(2) makes of an error of the host.
fn connect_error(error: Errno) -> Errno {
    match error {
        // Too many sockets in too short a time: the same as no port left.
        Errno::EAGAIN => Errno::EADDRNOTAVAIL,
        error => error,
    }
}
