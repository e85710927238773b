//! One message queue (mq_send(3), mq_receive(3)).
//!
//! As on Linux, a message goes to the thread that has waited longest, if one waits: it is never in the
//! queue. Until that thread has taken it, it keeps its place among the messages that the queue may hold.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::cmp::Reverse;

use super::Charge;
use super::notification::Registration;
use crate::errno::{Errno, Result};
use crate::fs::file::{Events, File, Stat};
use crate::fs::inode::{Attributes, Timestamp};
use crate::io::Sink;
use crate::sync::KernelCell;
use crate::task::Process;
use crate::task::wait::WaitQueue;

/// Priorities are below this (`MQ_PRIO_MAX`).
pub const PRIORITIES: u32 = 32768;
/// `/proc/sys/fs/mqueue/msg_max`: most messages that an ordinary user may ask for.
pub const MESSAGES_MAX: u64 = 10;
/// `/proc/sys/fs/mqueue/msgsize_max`: longest message that an ordinary user may ask for.
pub const MESSAGE_BYTES_MAX: u64 = 8192;
/// The same for those with `CAP_SYS_RESOURCE` (`HARD_MSGMAX`, `HARD_MSGSIZEMAX`).
const MESSAGES_MAX_OF_ALL: u64 = 65536;
const MESSAGE_BYTES_MAX_OF_ALL: u64 = 16 << 20;

/// Bytes of Linux' `struct msg_msg` and `struct posix_msg_tree_node`, which count for each message.
const MESSAGE_HEAD: u64 = 48;
const PRIORITY_HEAD: u64 = 48;

/// What a read(2) shows at most (`FILENT_SIZE`).
const STATUS_LEN: u64 = 80;
/// Device number of the file system of queues.
const DEVICE: u64 = 19;
const S_IFREG: u32 = 0o100000;

/// How much a queue may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Messages.
    pub messages: u64,
    /// Bytes of a message.
    pub message_bytes: u64,
}

impl Default for Size {
    /// `msg_default` and `msgsize_default` of `/proc/sys/fs/mqueue`.
    fn default() -> Self {
        Self { messages: 10, message_bytes: 8192 }
    }
}

impl Size {
    /// The same; `EINVAL` if it is nothing or too much.
    pub fn checked(self, is_privileged: bool) -> Result<Self> {
        let (messages, bytes) = match is_privileged {
            true => (MESSAGES_MAX_OF_ALL, MESSAGE_BYTES_MAX_OF_ALL),
            false => (MESSAGES_MAX, MESSAGE_BYTES_MAX),
        };
        let fits = (1..=messages).contains(&self.messages);
        if fits && (1..=bytes).contains(&self.message_bytes) {
            Ok(self)
        } else {
            Err(Errno::EINVAL)
        }
    }

    /// Bytes that count against limits (getrlimit(2), `RLIMIT_MSGQUEUE`).
    pub fn bytes(self) -> Result<u64> {
        let text = self.messages.checked_mul(self.message_bytes).ok_or(Errno::EOVERFLOW)?;
        let heads = self.messages.checked_mul(MESSAGE_HEAD + PRIORITY_HEAD);
        heads.and_then(|heads| heads.checked_add(text)).ok_or(Errno::EOVERFLOW)
    }
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// The higher one is received first.
    pub priority: u32,
    /// Content.
    pub text: Vec<u8>,
}

/// A thread that waits for a message.
#[derive(Default)]
pub struct Receiver {
    message: KernelCell<Option<Message>>,
    /// Where it waits.
    pub queue: WaitQueue,
}

/// A queue.
pub struct Queue {
    /// How much it may hold.
    pub size: Size,
    state: KernelCell<State>,
    attributes: KernelCell<Attributes>,
    /// Those who wait for room.
    pub senders: WaitQueue,
    watchers: WaitQueue,
    _charge: Charge,
}

struct State {
    name: Vec<u8>,
    is_linked: bool,
    /// By priority, then by age.
    messages: BTreeMap<(Reverse<u32>, u64), Vec<u8>>,
    next_number: u64,
    bytes: u64,
    receivers: VecDeque<Arc<Receiver>>,
    /// Messages that receivers have got and not taken.
    handed: u64,
    registration: Option<Registration>,
}

impl State {
    fn put(&mut self, message: Message) {
        self.bytes += message.text.len() as u64;
        self.messages.insert((Reverse(message.priority), self.next_number), message.text);
        self.next_number += 1;
    }

    fn take(&mut self) -> Option<Message> {
        let ((Reverse(priority), _), text) = self.messages.pop_first()?;
        self.bytes -= text.len() as u64;
        Some(Message { priority, text })
    }
}

impl Queue {
    /// An empty queue.
    pub(super) fn new(
        name: Vec<u8>,
        size: Size,
        (uid, gid): (u32, u32),
        permissions: u32,
        ino: u64,
        charge: Charge,
    ) -> Self {
        let now = Timestamp::now();
        let attributes = Attributes {
            dev: DEVICE,
            ino,
            mode: S_IFREG | permissions & 0o7777,
            uid,
            gid,
            nlink: 1,
            size: STATUS_LEN,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            ..Attributes::default()
        };
        let state = State {
            name,
            is_linked: true,
            messages: BTreeMap::new(),
            next_number: 0,
            bytes: 0,
            receivers: VecDeque::new(),
            handed: 0,
            registration: None,
        };
        Self {
            size,
            state: KernelCell::new(state),
            attributes: KernelCell::new(attributes),
            senders: WaitQueue::new(),
            watchers: WaitQueue::new(),
            _charge: charge,
        }
    }

    /// Owner, mode and the like.
    pub fn attributes(&self) -> Attributes {
        self.attributes.get()
    }

    /// Number of messages.
    pub fn count(&self) -> u64 {
        self.state.borrow_mut().messages.len() as u64
    }

    /// It has no name any more.
    pub(super) fn unlinked(&self) {
        self.state.borrow_mut().is_linked = false;
        let mut attributes = self.attributes.borrow_mut();
        attributes.nlink = 0;
        attributes.ctime = Timestamp::now();
    }

    fn note_use(&self) {
        let now = Timestamp::now();
        let mut attributes = self.attributes.borrow_mut();
        (attributes.atime, attributes.mtime, attributes.ctime) = (now, now, now);
    }

    /// `EAGAIN` if there is no room for another message.
    pub fn check_room(&self) -> Result<()> {
        let state = self.state.borrow_mut();
        let held = state.messages.len() as u64 + state.handed;
        if held < self.size.messages { Ok(()) } else { Err(Errno::EAGAIN) }
    }

    /// Sends a message to the thread that has waited longest, or puts it into the queue; `EAGAIN`
    /// without room.
    pub fn send(&self, message: Message) -> Result<()> {
        self.check_room()?;
        self.note_use();
        let receiver = self.state.borrow_mut().receivers.pop_front();
        if let Some(receiver) = receiver {
            self.state.borrow_mut().handed += 1;
            *receiver.message.borrow_mut() = Some(message);
            receiver.queue.wake_all(Events::IN);
            return Ok(());
        }
        let registration = {
            let mut state = self.state.borrow_mut();
            let was_empty = state.messages.is_empty();
            state.put(message);
            if was_empty { state.registration.take() } else { None }
        };
        if let Some(registration) = registration {
            registration.tell();
        }
        self.watchers.wake_all(Events::IN | Events::RDNORM);
        Ok(())
    }

    /// Takes the oldest message of the highest priority; `EAGAIN` if there is none.
    pub fn receive(&self) -> Result<Message> {
        let message = self.state.borrow_mut().take().ok_or(Errno::EAGAIN)?;
        self.note_use();
        self.has_room();
        Ok(message)
    }

    fn has_room(&self) {
        self.senders.wake_all(Events::OUT);
        self.watchers.wake_all(Events::OUT | Events::WRNORM);
    }

    /// Adds a thread to those that wait for a message.
    pub fn line_up(&self) -> Arc<Receiver> {
        let receiver = Arc::new(Receiver::default());
        self.state.borrow_mut().receivers.push_back(receiver.clone());
        receiver
    }

    /// What the thread has got.
    pub fn take_handed(&self, receiver: &Receiver) -> Option<Message> {
        let message = receiver.message.borrow_mut().take()?;
        self.state.borrow_mut().handed -= 1;
        self.has_room();
        Some(message)
    }

    /// The thread waits no more. A message that it has got and not taken is lost with it.
    pub fn give_up(&self, receiver: &Receiver) {
        let is_it = |other: &Arc<Receiver>| core::ptr::eq(Arc::as_ptr(other), receiver);
        self.state.borrow_mut().receivers.retain(|other| !is_it(other));
        drop(self.take_handed(receiver));
    }

    /// Has a process told of the next message that comes to the empty queue; `EBUSY` if another one
    /// is told already.
    pub fn register(&self, registration: Registration) -> Result<()> {
        let old = {
            let mut state = self.state.borrow_mut();
            if state.registration.as_ref().is_some_and(|known| known.process().is_some()) {
                return Err(Errno::EBUSY);
            }
            state.registration.replace(registration)
        };
        drop(old);
        Ok(())
    }

    /// Tells a process nothing any more.
    pub fn forget(&self, process: &Process) {
        let removed = self.state.borrow_mut().registration.take_if(|known| known.is_of(process));
        if let Some(registration) = removed {
            registration.cancel();
        }
    }

    fn status(&self) -> String {
        let state = self.state.borrow_mut();
        let (kind, signal) = state.registration.as_ref().map_or((0, 0), Registration::numbers);
        let process = state.registration.as_ref().and_then(Registration::process);
        let pid = process.map_or(0, |process| process.pid.for_caller());
        format!(
            "QSIZE:{:<10} NOTIFY:{kind:<5} SIGNO:{signal:<5} NOTIFY_PID:{pid:<6}\n",
            state.bytes
        )
    }
}

impl File for Queue {
    fn read(&self, sink: &mut Sink<'_>, offset: u64) -> Result<usize> {
        let text = self.status();
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(text.len());
        sink.put(&text.as_bytes()[start..])
    }

    fn seekable(&self) -> bool {
        true
    }

    fn size(&self) -> u64 {
        STATUS_LEN
    }

    fn poll(&self) -> Events {
        let mut events = Events::empty();
        if self.count() > 0 {
            events |= Events::IN | Events::RDNORM;
        }
        if self.check_room().is_ok() {
            events |= Events::OUT | Events::WRNORM;
        }
        events
    }

    fn wait_queue(&self) -> Option<&WaitQueue> {
        Some(&self.watchers)
    }

    fn stat(&self) -> Result<Stat> {
        Ok(self.attributes().to_stat())
    }

    fn description(&self) -> String {
        let state = self.state.borrow_mut();
        let deleted = if state.is_linked { "" } else { " (deleted)" };
        format!("/{}{deleted}", String::from_utf8_lossy(&state.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::file::OpenFlags;
    use crate::ipc::mqueue::notification::Notice;
    use crate::ipc::mqueue::{Request, open, unlink};
    use crate::task::current_process;
    use crate::task::signal::Signal;
    use crate::task::thread::current;
    use crate::testing::Sandbox;

    fn queue(messages: u64) -> Arc<Queue> {
        let size = Some(Size { messages, message_bytes: 8 });
        let flags = OpenFlags::RDWR | OpenFlags::CREAT;
        let request = Request { flags, permissions: 0o600, size };
        open(&current_process(), b"queue", &request).unwrap()
    }

    fn message(priority: u32, text: &[u8]) -> Message {
        Message { priority, text: text.to_vec() }
    }

    #[test]
    fn the_highest_priority_comes_first_and_then_the_oldest() {
        let _sandbox = Sandbox::new();
        let queue = queue(4);
        for (priority, text) in [(1, b"a"), (3, b"b"), (1, b"c"), (3, b"d")] {
            queue.send(message(priority, text)).unwrap();
        }
        assert_eq!(queue.send(message(9, b"e")), Err(Errno::EAGAIN));
        let taken: Vec<_> = (0..4).map(|_| queue.receive().unwrap().text).collect();
        assert_eq!(taken, [b"b", b"d", b"a", b"c"]);
        assert_eq!(queue.receive(), Err(Errno::EAGAIN));
    }

    #[test]
    fn who_waits_gets_the_message_and_it_keeps_its_place_until_it_is_taken() {
        let _sandbox = Sandbox::new();
        let queue = queue(1);
        let receiver = queue.line_up();
        queue.send(message(1, b"a")).unwrap();
        assert_eq!((queue.count(), queue.check_room()), (0, Err(Errno::EAGAIN)));
        assert_eq!(queue.poll(), Events::empty());
        assert_eq!(queue.take_handed(&receiver), Some(message(1, b"a")));
        assert_eq!(queue.check_room(), Ok(()));
        queue.give_up(&receiver);
        assert_eq!(queue.take_handed(&receiver), None);
    }

    #[test]
    fn the_program_that_has_asked_for_a_signal_gets_it_and_no_other() {
        let _sandbox = Sandbox::new();
        let (queue, thread) = (queue(4), current());
        let process = &thread.process;
        let signal = Signal::from_number(10).unwrap();
        let is_told = |executions: u32| {
            let notice = Notice::Signal(Some(signal), 7);
            queue.register(Registration::new(process, notice)).unwrap();
            *process.executions.borrow_mut() += executions;
            queue.send(message(1, b"a")).unwrap();
            queue.receive().unwrap();
            process.signals.borrow_mut().pending.pop_front().is_some()
        };
        assert!(is_told(0) && !is_told(1));
    }

    #[test]
    fn a_queue_counts_until_name_and_descriptors_are_gone() {
        let _sandbox = Sandbox::new();
        let queue = queue(10);
        unlink(&current_process(), b"queue").unwrap();
        assert_eq!(unlink(&current_process(), b"queue"), Err(Errno::ENOENT));
        let counted = || super::super::all().account.borrow_mut().queues;
        assert_eq!(counted(), 1);
        drop(queue);
        assert_eq!(counted(), 0);
    }

    #[test]
    fn sizes_are_bounded() {
        let size = |messages, message_bytes| Size { messages, message_bytes };
        assert!(size(10, 8192).checked(false).is_ok() && size(11, 1).checked(false).is_err());
        assert!(size(0, 1).checked(true).is_err() && size(1, 0).checked(true).is_err());
        assert!(size(65536, 16 << 20).checked(true).is_ok());
        assert_eq!(size(10, 8192).bytes(), Ok(82880));
        assert_eq!(size(u64::MAX, 2).bytes(), Err(Errno::EOVERFLOW));
    }
}
