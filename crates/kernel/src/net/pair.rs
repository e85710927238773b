//! Two connected sockets: what TCP over loopback and connected Unix sockets
//! have in common.

use alloc::sync::Arc;

use super::incoming::Incoming;
use super::socket::{IN, MessageFlags, OUT, Outgoing, Received, ShutdownHow};
use super::sockets::ConnectionState;
use crate::errno::{Errno, Result};
use crate::fs::file::Events;
use crate::io::{Sink, Source};
use crate::sync::KernelCell;
use crate::task::signal;
use crate::task::thread::current;
use crate::task::wait::WaitQueue;

/// Where the two protocols differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavor {
    /// Data is on its way when a send returns; what became of it is learnt later.
    Tcp,
    /// The sender sees the receiver's state.
    Unix,
}

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The one that connected.
    First,
    /// The one that was accepted.
    Second,
}

impl End {
    /// The one at the other side.
    pub fn other(self) -> End {
        match self {
            End::First => End::Second,
            End::Second => End::First,
        }
    }
}

struct Side {
    /// Bytes on their way to this side.
    incoming: Incoming,
    /// `SHUT_RD` was called here.
    reading_shut: bool,
    /// `SHUT_WR` was called here.
    writing_shut: bool,
    closed: bool,
    /// The connection was reset: nothing goes on from here.
    reset: bool,
    error: Option<Errno>,
    /// Something could not be sent from here and somebody may wait for room.
    wants_room: bool,
    /// Most bytes that may be on their way from here.
    send_limit: usize,
    /// `SO_PASSCRED` is on here.
    wants_credentials: bool,
}

/// The state that two connected sockets share.
pub struct Pair {
    flavor: Flavor,
    sides: KernelCell<[Side; 2]>,
    queues: [Arc<WaitQueue>; 2],
}

impl Pair {
    /// Connects two sockets with these wait queues; `incoming` makes an empty
    /// queue for either direction.
    pub fn new(
        flavor: Flavor,
        queues: [Arc<WaitQueue>; 2],
        send_limits: [usize; 2],
        incoming: impl Fn() -> Incoming,
    ) -> Arc<Self> {
        let side = |send_limit| Side {
            incoming: incoming(),
            reading_shut: false,
            writing_shut: false,
            closed: false,
            reset: false,
            error: None,
            wants_room: false,
            send_limit,
            wants_credentials: false,
        };
        Arc::new(Self { flavor, sides: KernelCell::new(send_limits.map(side)), queues })
    }

    fn queue(&self, end: End) -> &WaitQueue {
        &self.queues[end as usize]
    }

    /// Changes the most bytes that may be on their way from `end`.
    pub fn set_send_limit(&self, end: End, limit: usize) {
        self.sides.borrow_mut()[end as usize].send_limit = limit;
        self.queue(end).wake_all(OUT);
    }

    /// Says whether `end` wants to know who sent what it receives (`SO_PASSCRED`).
    pub fn set_wants_credentials(&self, end: End, wanted: bool) {
        self.sides.borrow_mut()[end as usize].wants_credentials = wanted;
    }

    /// Says whether `end` reads urgent bytes with the others (`SO_OOBINLINE`).
    pub fn set_urgent_inline(&self, end: End, inline: bool) {
        let mut sides = self.sides.borrow_mut();
        if let Some(stream) = sides[end as usize].incoming.as_stream() {
            stream.set_urgent_inline(inline);
        }
    }

    /// Whether the next byte that `end` reads is urgent.
    pub fn is_at_urgent(&self, end: End) -> bool {
        let mut sides = self.sides.borrow_mut();
        sides[end as usize].incoming.as_stream().is_some_and(|stream| stream.is_at_urgent())
    }

    /// Sends from `end`.
    pub fn send(&self, end: End, source: &mut Source<'_>, message: &mut Outgoing) -> Result<usize> {
        let urgent = message.flags.contains(MessageFlags::OOB);
        let sent = {
            let mut sides = self.sides.borrow_mut();
            let [first, second] = &mut *sides;
            let (me, peer) = if end == End::First { (first, second) } else { (second, first) };
            // Only TCP tells of an error before it tells of the broken pipe.
            if self.flavor == Flavor::Unix && (me.writing_shut || peer.closed || peer.reading_shut)
            {
                return Err(Errno::EPIPE);
            }
            if let Some(error) = me.error.take() {
                return Err(error);
            }
            if me.writing_shut || me.reset {
                return Err(Errno::EPIPE);
            }
            match self.flavor {
                Flavor::Tcp if peer.closed => {
                    // As much as is on the way at once goes out; the answer is a
                    // reset (RFC 9293, 3.10.7.1).
                    let len = source.remaining().min(me.send_limit);
                    source.advance(len);
                    me.reset = true;
                    me.error = Some(Errno::EPIPE);
                    Ok(len)
                }
                Flavor::Tcp if peer.reading_shut && peer.writing_shut => {
                    // Data for who has said that it neither reads nor writes
                    // any more: both ends are reset (tcp_rcv_state_process).
                    let len = source.remaining().min(me.send_limit);
                    source.advance(len);
                    (me.reset, peer.reset) = (true, true);
                    (me.error, peer.error) = (Some(Errno::EPIPE), Some(Errno::ECONNRESET));
                    Ok(len)
                }
                _ => {
                    if (me.wants_credentials || peer.wants_credentials)
                        && message.ancillary.credentials.is_none()
                    {
                        message.ancillary.credentials = message.sender;
                    }
                    let outcome = peer.incoming.push(source, message, me.send_limit);
                    if source.remaining() > 0 {
                        me.wants_room = true;
                    }
                    if let (true, Ok(1..), Some(stream)) =
                        (urgent, &outcome, peer.incoming.as_stream())
                    {
                        stream.mark_urgent();
                    }
                    outcome
                }
            }
        }?;
        let news = if urgent && sent > 0 { Events::PRI } else { Events::empty() };
        self.queue(end.other()).wake_all(IN | Events::HUP | news);
        Ok(sent)
    }

    /// Receives at `end`.
    pub fn receive(&self, end: End, sink: &mut Sink<'_>, flags: MessageFlags) -> Result<Received> {
        let (received, room) = {
            let mut sides = self.sides.borrow_mut();
            let [first, second] = &mut *sides;
            let (me, peer) = if end == End::First { (first, second) } else { (second, first) };
            if flags.contains(MessageFlags::OOB) {
                let stream = me.incoming.as_stream().ok_or(Errno::EOPNOTSUPP)?;
                return stream.take_urgent(sink, flags);
            }
            if !me.incoming.is_readable() {
                if let Some(stream) = me.incoming.as_stream()
                    && stream.is_at_urgent()
                    && !flags.contains(MessageFlags::PEEK)
                {
                    // A program that is about to hear of it by SIGURG gets it.
                    if signal::is_pending(&current()) {
                        return Err(Errno::EAGAIN);
                    }
                    stream.skip_urgent();
                }
                return self.receive_nothing(me, peer);
            }
            // Packets wait behind an error, bytes go before it.
            if let (Incoming::Packets(_), Some(error)) = (&me.incoming, me.error) {
                me.error = None;
                return Err(error);
            }
            let received = me.incoming.pop(sink, flags)?;
            let room = peer.wants_room && self.has_room(peer, me);
            if room {
                peer.wants_room = false;
            }
            (received, room)
        };
        if room {
            self.queue(end.other()).wake_all(OUT | Events::WRBAND);
        }
        Ok(received)
    }

    /// What a receive from an empty queue says.
    fn receive_nothing(&self, me: &mut Side, peer: &Side) -> Result<Received> {
        let ended = peer.writing_shut || peer.closed;
        match self.flavor {
            Flavor::Tcp if ended && !me.reset => return Ok(Received::default()),
            // The end of the stream came before the reset.
            Flavor::Tcp if ended && me.error == Some(Errno::EPIPE) => {
                return Ok(Received::default());
            }
            _ => {}
        }
        if let Some(error) = me.error.take() {
            return Err(error);
        }
        if ended || me.reset || me.reading_shut {
            return Ok(Received::default());
        }
        Err(Errno::EAGAIN)
    }

    fn has_room(&self, me: &Side, peer: &Side) -> bool {
        let used = peer.incoming.charge();
        match self.flavor {
            // sk_stream_is_writeable: a third is free.
            Flavor::Tcp => me.send_limit.saturating_sub(used) >= used / 2,
            // unix_writable: at most a quarter is used.
            Flavor::Unix => used.saturating_mul(4) <= me.send_limit,
        }
    }

    /// What is possible at `end`.
    pub fn poll(&self, end: End) -> Events {
        let mut sides = self.sides.borrow_mut();
        let [first, second] = &mut *sides;
        let (me, peer) = if end == End::First { (first, second) } else { (second, first) };
        let unix = self.flavor == Flavor::Unix;
        let read_ended = me.reading_shut || peer.writing_shut || peer.closed || me.reset;
        let write_ended =
            me.writing_shut || me.reset || (unix && (peer.reading_shut || peer.closed));
        let mut events = Events::empty();
        if me.error.is_some() {
            events |= Events::ERR;
        }
        if read_ended {
            events |= IN | Events::RDHUP;
        }
        if me.incoming.is_readable() {
            events |= IN;
        }
        if me.incoming.as_stream().is_some_and(|stream| stream.has_urgent()) {
            events |= Events::PRI;
        }
        if read_ended && write_ended {
            events |= Events::HUP;
        }
        if self.has_room(me, peer) || (!unix && write_ended) {
            events |= OUT;
            if unix {
                events |= Events::WRBAND;
            }
        } else {
            me.wants_room = true;
        }
        events
    }

    /// Bytes that `end` can read.
    pub fn readable_bytes(&self, end: End) -> usize {
        let mut sides = self.sides.borrow_mut();
        let incoming = &mut sides[end as usize].incoming;
        let border = incoming.as_stream().map_or(usize::MAX, |stream| stream.before_urgent());
        incoming.readable_bytes().min(border)
    }

    /// Bytes from `end` that the other side has not read.
    pub fn unsent_bytes(&self, end: End) -> usize {
        self.sides.borrow_mut()[end.other() as usize].incoming.readable_bytes()
    }

    /// Takes the pending error of `end`.
    pub fn take_error(&self, end: End) -> Option<Errno> {
        self.sides.borrow_mut()[end as usize].error.take()
    }

    /// Whether the connection has ended for `end`, as TCP sees it (`TCP_CLOSE`):
    /// by a reset, or because both sides have said that they send no more.
    pub fn has_ended(&self, end: End) -> bool {
        let sides = self.sides.borrow_mut();
        let (me, peer) = (&sides[end as usize], &sides[end.other() as usize]);
        me.reset || (me.writing_shut && (peer.writing_shut || peer.closed))
    }

    /// The state of the connection for `end`, as TCP sees it.
    pub fn state(&self, end: End) -> ConnectionState {
        if self.has_ended(end) {
            return ConnectionState::Close;
        }
        let sides = self.sides.borrow_mut();
        let (me, peer) = (&sides[end as usize], &sides[end.other() as usize]);
        match (me.writing_shut, peer.writing_shut || peer.closed) {
            (true, _) => ConnectionState::FinWait2,
            (false, true) => ConnectionState::CloseWait,
            (false, false) => ConnectionState::Established,
        }
    }

    /// shutdown(2) at `end`. `ENOTCONN` if a TCP connection has ended.
    pub fn shutdown(&self, end: End, how: ShutdownHow) -> Result<()> {
        if self.flavor == Flavor::Tcp && self.has_ended(end) {
            return Err(Errno::ENOTCONN);
        }
        {
            let mut sides = self.sides.borrow_mut();
            let me = &mut sides[end as usize];
            me.reading_shut |= how.reads();
            me.writing_shut |= how.writes();
        }
        self.queue(end).wake_all(IN | OUT | Events::RDHUP | Events::HUP);
        self.queue(end.other()).wake_all(IN | OUT | Events::RDHUP | Events::HUP);
        Ok(())
    }

    /// Closes `end`. The peer learns of it by a reset if data was left unread
    /// or `reset` asks for it, by an end of file otherwise.
    pub fn close(&self, end: End, how: Closing) {
        let unread = {
            let mut sides = self.sides.borrow_mut();
            let [first, second] = &mut *sides;
            let (me, peer) = if end == End::First { (first, second) } else { (second, first) };
            if me.closed {
                return;
            }
            me.closed = true;
            let unread = me.incoming.take_all();
            if (how == Closing::Reset || !unread.is_empty()) && !peer.closed {
                peer.error = Some(Errno::ECONNRESET);
                peer.reset = true;
            }
            unread
        };
        self.queue(end.other()).wake_all(IN | OUT | Events::RDHUP | Events::HUP | Events::ERR);
        // May close other files, which travelled here: last, and without a lock.
        drop(unread);
    }
}

/// How an end is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closing {
    /// As it comes.
    Normal,
    /// With a reset (`SO_LINGER` with time 0; a connection never accepted).
    Reset,
}
