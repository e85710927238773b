//! TCP sockets whose connection leads outside.

use alloc::sync::Arc;

use super::address::Endpoint;
use super::host_stream::{Ending, HostStream};
use super::outside::{self, Opened};
use super::socket::{IN, OUT};
use super::tcp::{State, TcpSocket};
use crate::errno::{Errno, Result};
use crate::fs::file::Events;
use crate::platform::machine::{HostFiles, Machine};
use crate::state::kernel;
use crate::task::host_poll::Kind;

/// A connection that is a socket of the host.
#[derive(Clone)]
pub(super) struct Outside {
    pub stream: Arc<HostStream>,
    pub peer: Endpoint,
    pub stage: Stage,
    /// Whether the policy lets copies make it again.
    reconnects: bool,
    /// Whether copies of what is frozen now do so.
    sleeps: bool,
}

/// A connection of the frozen time that is made again when it is first used
/// (Catalyzer §3.3), as if it had been open all the while.
#[derive(Clone, Copy)]
pub(super) struct Dormant {
    pub peer: Endpoint,
    /// The request for the new socket.
    asked: Option<u64>,
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
    /// As [`Stage::Connecting`], of a connection that the program has had for long.
    Reconnecting,
}

impl Stage {
    /// Whether the host's connect is in progress.
    pub fn is_connecting(self) -> bool {
        matches!(self, Self::Connecting | Self::Reconnecting)
    }
}

impl Outside {
    /// What a further connect(2) says.
    pub fn connect_again(&mut self) -> Result<()> {
        match self.stage {
            Stage::Connecting => Err(Errno::EALREADY),
            Stage::Connected => self.announce(),
            Stage::Announced | Stage::Reconnecting => Err(Errno::EISCONN),
        }
    }

    /// What a connect(2) that waits says.
    pub fn announce(&mut self) -> Result<()> {
        if self.stage == Stage::Connecting {
            return Err(Errno::EAGAIN);
        }
        if self.stage == Stage::Connected {
            self.stage = Stage::Announced;
        }
        Ok(())
    }
}

impl Dormant {
    /// It can be written to, as an idle connection can; that is all.
    pub fn poll(&self) -> Events {
        if self.asked.is_none() { OUT } else { Events::empty() }
    }
}

impl TcpSocket {
    /// Begins to connect to an address outside; `EINPROGRESS` if that goes well.
    pub(super) fn connect_outside(&self, to: Endpoint) -> Result<()> {
        let source = outside::source_address(to.ip).inspect_err(|_| outside::no_way_to(to))?;
        self.bind_source(source)?;
        let sequence = outside::ask_for_stream(to, self.this.clone());
        *self.state.borrow_mut() = State::Asking { to, sequence };
        Err(Errno::EINPROGRESS)
    }

    /// The host has answered request `sequence`, with a socket whose connect is
    /// in progress if all is well.
    pub fn opened_outside(&self, sequence: u64, outcome: Result<Opened>) {
        let asked = match &*self.state.borrow_mut() {
            State::Asking { to, sequence: own } if *own == sequence => {
                Some((*to, Stage::Connecting))
            }
            State::Dormant(Dormant { peer, asked: Some(own) }) if *own == sequence => {
                Some((*peer, Stage::Reconnecting))
            }
            _ => None,
        };
        match (asked, outcome) {
            (Some((peer, stage)), Ok(Opened { fd, reconnects })) => {
                let queue = self.common.queue.clone();
                let stream = Arc::new(HostStream::of_this_boot(fd, Kind::Connecting, queue));
                *self.state.borrow_mut() =
                    State::Outside(Outside { stream, peer, stage, reconnects, sleeps: false });
                kernel().net.outside.note_made(&self.this);
                if reconnects {
                    kernel().net.outside.may_sleep(&self.this);
                }
                // Over a short way it has succeeded by now.
                self.settle();
            }
            (Some((peer, Stage::Reconnecting)), Err(_)) => self.lose(peer),
            (Some(_), Err(error)) => self.fail(connect_error(error)),
            (None, Ok(Opened { fd, .. })) => Machine::close(fd),
            (None, Err(_)) => {}
        }
        self.common.queue.wake_all(IN | OUT | Events::ERR | Events::HUP);
    }

    /// Finds out how a connect to the outside that is in progress has ended.
    pub(super) fn settle(&self) {
        let Some(link) = self.outside().filter(|link| link.stage.is_connecting()) else { return };
        let again = link.stage == Stage::Reconnecting;
        match link.stream.connect_outcome() {
            Err(Errno::EAGAIN) => {}
            Ok(()) => {
                if let State::Outside(link) = &mut *self.state.borrow_mut() {
                    link.stage = if again { Stage::Announced } else { Stage::Connected };
                }
            }
            Err(error) => {
                link.stream.close(Ending::OwnOnly);
                if again { self.lose(link.peer) } else { self.fail(error) }
            }
        }
    }

    /// The connection to `peer` is one that was reset.
    fn lose(&self, peer: Endpoint) {
        let stream = HostStream::lost(self.common.queue.clone());
        *self.state.borrow_mut() = State::Outside(Outside {
            stream: Arc::new(stream),
            peer,
            stage: Stage::Announced,
            reconnects: false,
            sleeps: false,
        });
    }

    /// Before a freeze: copies are to make this connection again only if nothing
    /// is on its way in either direction, which would be lost. The next freeze asks again.
    pub(super) fn prepare_for_sleep(&self) {
        if let State::Outside(link) = &mut *self.state.borrow_mut() {
            let loses_nothing = match link.stage {
                Stage::Connected | Stage::Announced => link.stream.is_at_rest(),
                Stage::Reconnecting => true,
                Stage::Connecting => false,
            };
            link.sleeps = link.reconnects && loses_nothing;
        }
    }

    /// Where the connection leads, if it is open and copies will find it reset.
    pub(super) fn lost_peer(&self) -> Option<Endpoint> {
        match &*self.state.borrow_mut() {
            State::Outside(link) if !link.sleeps && link.stream.is_live() => Some(link.peer),
            _ => None,
        }
    }

    /// After a thaw: the connection is made again when it is used; `false` if it
    /// is not one of those.
    pub(super) fn fall_asleep(&self) -> bool {
        let mut state = self.state.borrow_mut();
        let peer = match &*state {
            State::Outside(link) if link.sleeps => link.peer,
            State::Dormant(dormant) => dormant.peer,
            _ => return false,
        };
        *state = State::Dormant(Dormant { peer, asked: None });
        true
    }

    /// Whether the connection sleeps; to whom it leads.
    pub(super) fn dormant_peer(&self) -> Option<Endpoint> {
        match &*self.state.borrow_mut() {
            State::Dormant(dormant) => Some(dormant.peer),
            State::Outside(link) if link.stage == Stage::Reconnecting => Some(link.peer),
            _ => None,
        }
    }

    /// The program sends or receives: has a connection that sleeps made again.
    pub(super) fn awaken(&self) {
        let State::Dormant(Dormant { peer, asked: None }) = *self.state.borrow_mut() else {
            return;
        };
        let asked = Some(outside::ask_for_stream(peer, self.this.clone()));
        *self.state.borrow_mut() = State::Dormant(Dormant { peer, asked });
    }

    /// The connection to the outside, if it has one or will.
    pub(super) fn outside(&self) -> Option<Outside> {
        match &*self.state.borrow_mut() {
            State::Outside(link) => Some(link.clone()),
            _ => None,
        }
    }

    /// The stream to the outside, once it is connected.
    pub(super) fn outside_stream(&self) -> Option<Arc<HostStream>> {
        self.settle();
        self.outside().filter(|link| !link.stage.is_connecting()).map(|link| link.stream)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::address::AF_INET;
    use crate::net::tcp::TcpNetwork;
    use crate::platform::machine::HostFd;
    use crate::testing::Sandbox;
    use std::io::{Read, Write};
    use std::os::fd::IntoRawFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_freeze_in_the_middle_of_a_conversation_says_nothing_about_the_next() {
        let _sandbox = Sandbox::new();
        let (mut own, mut peer) = UnixStream::pair().unwrap();
        own.set_nonblocking(true).unwrap();
        let socket = Arc::new(TcpNetwork::new()).socket(AF_INET, &Arc::default());
        let queue = socket.common.queue.clone();
        let fd = HostFd::new(own.try_clone().unwrap().into_raw_fd());
        let link = Outside {
            stream: Arc::new(HostStream::of_this_boot(fd, Kind::Socket, queue)),
            peer: Endpoint { ip: std::net::Ipv4Addr::LOCALHOST.into(), port: 5432 },
            stage: Stage::Announced,
            reconnects: true,
            sleeps: false,
        };
        *socket.state.borrow_mut() = State::Outside(link);
        let sleeps = || {
            socket.prepare_for_sleep();
            socket.outside().unwrap().sleeps
        };
        assert!(sleeps());
        peer.write_all(b"half an answer").unwrap();
        assert!(!sleeps(), "copies would lose what is on its way");
        own.read_exact(&mut [0; 14]).unwrap();
        assert!(sleeps());
        assert!(socket.fall_asleep());
    }
}
