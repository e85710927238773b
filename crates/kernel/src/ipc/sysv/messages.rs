//! Message queues (msgsnd(2), msgrcv(2)).

use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::now_s;
use super::permissions::Permissions;
use super::registry::Object;
use crate::errno::{Errno, Result};
use crate::fs::file::Events;
use crate::sync::KernelCell;
use crate::task::ids::Pid;
use crate::task::wait::WaitQueue;

/// Bytes that a new queue takes (`MSGMNB`).
pub const QUEUE_BYTES: u64 = 16384;

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Its type, 1 or more.
    pub kind: i64,
    /// The text.
    pub text: Vec<u8>,
}

/// Which message a receiver takes (msgrcv(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The first.
    Any,
    /// The first of a type.
    Kind(i64),
    /// The first of any other type (`MSG_EXCEPT`).
    Except(i64),
    /// The first of the lowest type up to this one.
    Lowest(i64),
}

impl Wanted {
    fn takes(self, kind: i64) -> bool {
        match self {
            Self::Any => true,
            Self::Kind(wanted) => kind == wanted,
            Self::Except(unwanted) => kind != unwanted,
            Self::Lowest(highest) => kind <= highest,
        }
    }
}

/// A message that is wanted, and by whom.
#[derive(Clone, Copy, Debug)]
pub struct Wish {
    /// Which.
    pub wanted: Wanted,
    /// Bytes that the receiver has room for.
    pub room: usize,
    /// Whether a longer one is cut (`MSG_NOERROR`) or refused (`E2BIG`).
    pub is_cut: bool,
    /// Process of the receiver.
    pub pid: Pid,
}

impl Wish {
    fn accepts(&self, message: &Message) -> bool {
        self.is_cut || message.text.len() <= self.room
    }
}

/// Somebody who waits for a message.
pub struct Receiver {
    wish: Wish,
    outcome: KernelCell<Option<Result<Message>>>,
    /// Where the thread waits.
    pub queue: WaitQueue,
}

impl Receiver {
    /// What has come; `EAGAIN`: look again.
    pub fn take_outcome(&self) -> Option<Result<Message>> {
        self.outcome.borrow_mut().take()
    }

    fn end(&self, outcome: Result<Message>) {
        *self.outcome.borrow_mut() = Some(outcome);
        self.queue.wake_all(Events::IN);
    }
}

/// A queue.
pub struct MessageQueue {
    permissions: KernelCell<Permissions>,
    state: KernelCell<State>,
    /// Those who wait for room.
    pub senders: WaitQueue,
}

/// What changes.
pub struct State {
    messages: VecDeque<Message>,
    receivers: VecDeque<Arc<Receiver>>,
    is_removed: bool,
    /// Bytes of all messages.
    pub bytes: u64,
    /// Most bytes of all messages.
    pub bytes_max: u64,
    /// When a message was sent, received, and the queue changed last, in seconds
    /// since the epoch.
    pub times_s: [i64; 3],
    /// Process of the last message sent.
    pub last_sender: u32,
    /// Process of the last message received.
    pub last_receiver: u32,
}

const SENT: usize = 0;
const RECEIVED: usize = 1;
const CHANGED: usize = 2;

impl Object for MessageQueue {
    fn permissions(&self) -> &KernelCell<Permissions> {
        &self.permissions
    }
}

impl State {
    /// Number of messages.
    pub fn count(&self) -> usize {
        self.messages.len()
    }

    fn find(&self, wanted: Wanted) -> Option<usize> {
        let fitting = self.messages.iter().enumerate().filter(|(_, m)| wanted.takes(m.kind));
        match wanted {
            Wanted::Lowest(_) => fitting.min_by_key(|(_, message)| message.kind),
            _ => fitting.into_iter().next(),
        }
        .map(|(index, _)| index)
    }

    /// The receiver that takes a message, and those who wait for it but have too
    /// little room.
    fn receiver_of(&mut self, message: &Message) -> (Option<Arc<Receiver>>, Vec<Arc<Receiver>>) {
        let mut too_small = Vec::new();
        while let Some(index) =
            self.receivers.iter().position(|other| other.wish.wanted.takes(message.kind))
        {
            let Some(receiver) = self.receivers.remove(index) else { break };
            if receiver.wish.accepts(message) {
                return (Some(receiver), too_small);
            }
            too_small.push(receiver);
        }
        (None, too_small)
    }
}

impl MessageQueue {
    /// An empty queue.
    pub fn new(permissions: Permissions) -> Self {
        let state = State {
            messages: VecDeque::new(),
            receivers: VecDeque::new(),
            is_removed: false,
            bytes: 0,
            bytes_max: QUEUE_BYTES,
            times_s: [0, 0, now_s()],
            last_sender: 0,
            last_receiver: 0,
        };
        Self {
            permissions: KernelCell::new(permissions),
            state: KernelCell::new(state),
            senders: WaitQueue::new(),
        }
    }

    /// Looks at the state.
    pub fn look<R>(&self, look: impl FnOnce(&State) -> R) -> R {
        look(&self.state.borrow_mut())
    }

    /// Sends a message, to one who waits for it if there is one; `EAGAIN` without
    /// room, `EIDRM` if the queue is gone.
    pub fn send(&self, message: &mut Option<Message>, pid: Pid) -> Result<()> {
        let mut state = self.state.borrow_mut();
        if state.is_removed {
            return Err(Errno::EIDRM);
        }
        let Some(sent) = message.take() else { return Ok(()) };
        let len = sent.text.len() as u64;
        if state.bytes + len > state.bytes_max || state.count() as u64 >= state.bytes_max {
            *message = Some(sent);
            return Err(Errno::EAGAIN);
        }
        state.last_sender = pid.number();
        state.times_s[SENT] = now_s();
        let (receiver, too_small) = state.receiver_of(&sent);
        match receiver {
            Some(receiver) => {
                state.last_receiver = receiver.wish.pid.number();
                state.times_s[RECEIVED] = now_s();
                drop(state);
                receiver.end(Ok(sent));
            }
            None => {
                state.bytes += len;
                state.messages.push_back(sent);
                drop(state);
            }
        }
        too_small.iter().for_each(|receiver| receiver.end(Err(Errno::E2BIG)));
        Ok(())
    }

    /// Takes a message; `ENOMSG` if there is none, `E2BIG` if it is too long.
    pub fn take(&self, wish: &Wish) -> Result<Message> {
        let message = {
            let mut state = self.state.borrow_mut();
            if state.is_removed {
                return Err(Errno::EIDRM);
            }
            let index = state.find(wish.wanted).ok_or(Errno::ENOMSG)?;
            if !wish.accepts(&state.messages[index]) {
                return Err(Errno::E2BIG);
            }
            let message = state.messages.remove(index).ok_or(Errno::ENOMSG)?;
            state.bytes -= message.text.len() as u64;
            state.last_receiver = wish.pid.number();
            state.times_s[RECEIVED] = now_s();
            message
        };
        self.senders.wake_all(Events::OUT);
        Ok(message)
    }

    /// A copy of the message at an index (`MSG_COPY`); `ENOMSG`, `E2BIG`.
    pub fn copy(&self, index: i64, wish: &Wish) -> Result<Message> {
        let state = self.state.borrow_mut();
        let index = usize::try_from(index).map_err(|_| Errno::ENOMSG)?;
        let message = state.messages.get(index).ok_or(Errno::ENOMSG)?;
        if message.text.len() <= wish.room {
            Ok(message.clone())
        } else {
            Err(if wish.is_cut { Errno::EINVAL } else { Errno::E2BIG })
        }
    }

    /// Waits in line for a message.
    pub fn line_up(&self, wish: Wish) -> Arc<Receiver> {
        let receiver =
            Arc::new(Receiver { wish, outcome: KernelCell::new(None), queue: WaitQueue::new() });
        self.state.borrow_mut().receivers.push_back(receiver.clone());
        receiver
    }

    /// Leaves the line.
    pub fn give_up(&self, receiver: &Arc<Receiver>) {
        self.state.borrow_mut().receivers.retain(|other| !Arc::ptr_eq(other, receiver));
    }

    /// `IPC_SET`: those who wait look again.
    pub fn changed(&self, bytes_max: u64) {
        {
            let mut state = self.state.borrow_mut();
            state.bytes_max = bytes_max;
            state.times_s[CHANGED] = now_s();
        }
        self.end_waiting(Errno::EAGAIN);
    }

    /// `IPC_RMID`: those who wait hear of it.
    pub fn removed(&self) {
        self.state.borrow_mut().is_removed = true;
        self.end_waiting(Errno::EIDRM);
    }

    fn end_waiting(&self, error: Errno) {
        let receivers = core::mem::take(&mut self.state.borrow_mut().receivers);
        receivers.iter().for_each(|receiver| receiver.end(Err(error)));
        self.senders.wake_all(Events::OUT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Sandbox;

    fn send(queue: &MessageQueue, kind: i64, len: usize) -> Result<()> {
        queue.send(&mut Some(Message { kind, text: vec![kind as u8; len] }), Pid::new(1))
    }

    fn wish(wanted: Wanted) -> Wish {
        Wish { wanted, room: 100, is_cut: false, pid: Pid::new(2) }
    }

    fn kind(queue: &MessageQueue, wanted: Wanted) -> Result<i64> {
        queue.take(&wish(wanted)).map(|message| message.kind)
    }

    #[test]
    fn messages_are_taken_by_type() {
        let _sandbox = Sandbox::new();
        let queue = MessageQueue::new(Permissions::default());
        for kind in [5, 3, 4, 3, 9] {
            send(&queue, kind, 10).unwrap();
        }
        assert_eq!(kind(&queue, Wanted::Kind(4)), Ok(4));
        assert_eq!(kind(&queue, Wanted::Lowest(5)), Ok(3));
        assert_eq!(kind(&queue, Wanted::Except(5)), Ok(3));
        assert_eq!(kind(&queue, Wanted::Any), Ok(5));
        assert_eq!(kind(&queue, Wanted::Lowest(8)), Err(Errno::ENOMSG));
        assert_eq!(queue.copy(0, &wish(Wanted::Any)).unwrap().kind, 9);
        assert_eq!(queue.look(|state| (state.count(), state.bytes)), (1, 10));
    }

    #[test]
    fn who_waits_gets_the_message_at_once() {
        let _sandbox = Sandbox::new();
        let queue = MessageQueue::new(Permissions::default());
        let small = queue.line_up(Wish { room: 5, ..wish(Wanted::Any) });
        let other = queue.line_up(wish(Wanted::Kind(8)));
        let any = queue.line_up(wish(Wanted::Any));
        send(&queue, 7, 10).unwrap();
        assert_eq!(small.take_outcome(), Some(Err(Errno::E2BIG)));
        assert!(other.take_outcome().is_none());
        assert_eq!(any.take_outcome().unwrap().unwrap().kind, 7);
        assert_eq!(queue.look(State::count), 0);
        queue.removed();
        assert_eq!(other.take_outcome(), Some(Err(Errno::EIDRM)));
        assert_eq!(send(&queue, 1, 1), Err(Errno::EIDRM));
    }

    #[test]
    fn a_full_queue_takes_no_more() {
        let _sandbox = Sandbox::new();
        let queue = MessageQueue::new(Permissions::default());
        send(&queue, 1, QUEUE_BYTES as usize - 1).unwrap();
        assert_eq!(send(&queue, 1, 2), Err(Errno::EAGAIN));
        assert_eq!(send(&queue, 1, 1), Ok(()));
        assert_eq!(send(&queue, 1, 0), Ok(()));
    }
}
