//! Telling a process that a message has come to an empty queue (mq_notify(3)).

use alloc::sync::{Arc, Weak};

use super::queue::Queue;
use crate::fs::file::OpenFile;
use crate::ipc::namespace;
use crate::platform::saved::Saved;
use crate::task::Process;
use crate::task::current_process;
use crate::task::signal::{Signal, SignalInfo, send_to_process};

/// `SI_MESGQ`: sent since a message has come.
const SI_MESGQ: i32 = -3;

/// Bytes that a thread of the C library waits for (`SIGEV_THREAD`).
pub const COOKIE_LEN: usize = 32;
/// `NOTIFY_WOKENUP`: a message has come.
const WOKEN: u8 = 1;
/// `NOTIFY_REMOVED`: there will be no notification.
const REMOVED: u8 = 2;

/// Where a cookie goes: the socket from which a thread of the C library reads.
pub trait CookieSocket: Saved + Send + Sync {
    /// Brings a cookie; it is lost if the socket is full.
    fn bring(&self, cookie: &[u8; COOKIE_LEN]);
}

/// How a process is told.
pub enum Notice {
    /// `SIGEV_NONE`: not at all.
    Nothing,
    /// `SIGEV_SIGNAL`: by a signal, unless its number is 0, with a value.
    Signal(Option<Signal>, u64),
    /// `SIGEV_THREAD`: by a cookie.
    Cookie([u8; COOKIE_LEN], Arc<dyn CookieSocket>),
}

/// A process that is to be told, once.
pub struct Registration {
    process: Weak<Process>,
    /// How many programs the process had executed before this one, which alone knows of the signal.
    executions: u32,
    /// How.
    notice: Notice,
}

impl Registration {
    /// Tells a process in this way.
    pub fn new(process: &Arc<Process>, notice: Notice) -> Self {
        let executions = process.executions.get();
        Self { process: Arc::downgrade(process), executions, notice }
    }

    /// Its process, unless that has ended: queues without a name do not hear of the end.
    pub fn process(&self) -> Option<Arc<Process>> {
        self.process.upgrade().filter(|process| !process.is_zombie())
    }

    /// Whether it is one of this process.
    pub fn is_of(&self, process: &Process) -> bool {
        core::ptr::eq(self.process.as_ptr(), process)
    }

    /// A message has come, sent by the running process.
    pub fn tell(&self) {
        match &self.notice {
            Notice::Nothing | Notice::Signal(None, _) => {}
            Notice::Signal(Some(signal), value) => self.send(*signal, *value),
            Notice::Cookie(cookie, socket) => socket.bring(&with_end(cookie, WOKEN)),
        }
    }

    fn send(&self, signal: Signal, value: u64) {
        let same = |process: &Arc<Process>| process.executions.get() == self.executions;
        let Some(process) = self.process().filter(same) else { return };
        let mut info = SignalInfo::from_process(signal, SI_MESGQ, &current_process());
        info.payload[1] = value;
        send_to_process(&process, info);
    }

    /// Nobody will be told.
    pub fn cancel(&self) {
        if let Notice::Cookie(cookie, socket) = &self.notice {
            socket.bring(&with_end(cookie, REMOVED));
        }
    }

    /// What `/proc` and a read(2) show: the kind and the number of the signal.
    pub fn numbers(&self) -> (u32, u32) {
        match self.notice {
            Notice::Signal(signal, _) => (0, signal.map_or(0, Signal::number)),
            Notice::Nothing => (1, 0),
            Notice::Cookie(..) => (2, 0),
        }
    }
}

fn with_end(cookie: &[u8; COOKIE_LEN], end: u8) -> [u8; COOKIE_LEN] {
    let mut cookie = *cookie;
    cookie[COOKIE_LEN - 1] = end;
    cookie
}

/// A process closes a descriptor: if that is one of a queue, the queue tells it nothing any more
/// (mq_close(3)).
pub fn descriptor_closed(process: &Process, open: &OpenFile) {
    if let Some(queue) = open.downcast::<Queue>() {
        queue.forget(process);
    }
}

/// A process has ended, and with it its descriptors.
pub fn process_ended(process: &Process) {
    for namespace in namespace::all() {
        namespace.queues.all().iter().for_each(|queue| queue.forget(process));
    }
}
