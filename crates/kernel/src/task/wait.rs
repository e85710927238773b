//! Wait queues: how threads, and epoll instances, learn that something changed.
//!
//! Under the kernel lock there are no lost wake-ups: a thread tests its
//! condition, registers and blocks without anybody else running in between.

use alloc::sync::Arc;
use alloc::vec::Vec;
use bitflags::bitflags;

use crate::errno::{Errno, Result};
use crate::platform::saved::Saved;
use crate::sync::KernelCell;
use crate::time::Instant;

bitflags! {
    /// Readiness, with the values of poll(2) and epoll_ctl(2).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Events: u32 {
        /// There is data to read.
        const IN = 0x001;
        /// There is urgent data.
        const PRI = 0x002;
        /// Writing is possible.
        const OUT = 0x004;
        /// Error condition; always reported.
        const ERR = 0x008;
        /// Hang up; always reported.
        const HUP = 0x010;
        /// Invalid descriptor; poll(2) only.
        const NVAL = 0x020;
        /// As `IN`.
        const RDNORM = 0x040;
        /// Priority band data can be read.
        const RDBAND = 0x080;
        /// As `OUT`.
        const WRNORM = 0x100;
        /// Priority data may be written.
        const WRBAND = 0x200;
        /// The peer has shut down its writing half.
        const RDHUP = 0x2000;
    }
}

/// Somebody who can wait in a [`WaitQueue`].
pub trait Waiter: Saved + Send + Sync {
    /// Called when what the queue stands for has changed. `events` says what
    /// may have become true; it is a hint, the waiter looks again.
    fn wake(&self, events: Events);
}

/// Names a registration in a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WaitToken(u64);

impl WaitToken {
    /// No registration.
    pub const NONE: WaitToken = WaitToken(0);
}

/// Those who wait for one thing, in order of arrival.
#[derive(Default)]
pub struct WaitQueue {
    state: KernelCell<QueueState>,
}

#[derive(Default)]
struct QueueState {
    next_token: u64,
    waiters: Vec<(WaitToken, Arc<dyn Waiter>)>,
}

impl WaitQueue {
    /// An empty queue.
    pub const fn new() -> Self {
        Self { state: KernelCell::new(QueueState { next_token: 0, waiters: Vec::new() }) }
    }

    /// Adds a waiter, to be woken until it is removed with [`WaitQueue::unregister`].
    pub fn register(&self, waiter: Arc<dyn Waiter>) -> WaitToken {
        let mut state = self.state.borrow_mut();
        state.next_token += 1;
        let token = WaitToken(state.next_token);
        state.waiters.push((token, waiter));
        token
    }

    /// Adds a waiter again where it was before, with the token of then: it has waited for
    /// longer than those who came meanwhile.
    pub fn register_at(&self, place: WaitToken, waiter: Arc<dyn Waiter>) -> WaitToken {
        if place == WaitToken::NONE {
            return self.register(waiter);
        }
        let mut state = self.state.borrow_mut();
        let at = state.waiters.partition_point(|(token, _)| token.0 < place.0);
        state.waiters.insert(at, (place, waiter));
        place
    }

    /// Removes a waiter.
    pub fn unregister(&self, token: WaitToken) {
        self.state.borrow_mut().waiters.retain(|(other, _)| *other != token);
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.state.borrow_mut().waiters.is_empty()
    }

    /// Wakes everybody.
    pub fn wake_all(&self, events: Events) {
        // Waking may change this queue (a nested epoll), so look anew after
        // each waiter. Tokens rise along the queue; whoever comes while this
        // goes on is not woken.
        let (mut after, last) = {
            let state = self.state.borrow_mut();
            match state.waiters.first() {
                Some((first, _)) => (first.0 - 1, state.next_token),
                None => return,
            }
        };
        loop {
            let waiter = {
                let state = self.state.borrow_mut();
                let next = state.waiters.partition_point(|(token, _)| token.0 <= after);
                match state.waiters.get(next) {
                    Some((token, waiter)) if token.0 <= last => {
                        after = token.0;
                        waiter.clone()
                    }
                    _ => return,
                }
            };
            waiter.wake(events);
        }
    }
}

/// The places of one thread in the queues that it waits on.
#[derive(Default)]
pub struct Places {
    first: [WaitToken; 4],
    /// Those that are more.
    further: Vec<WaitToken>,
}

impl Places {
    /// The place in the queue with this index.
    pub fn of(&mut self, index: usize) -> &mut WaitToken {
        let inline = self.first.len();
        if index < inline {
            return &mut self.first[index];
        }
        if self.further.len() <= index - inline {
            self.further.resize(index - inline + 1, WaitToken::NONE);
        }
        &mut self.further[index - inline]
    }
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// Somebody woke the thread; the condition may or may not hold.
    Woken,
    /// The deadline has passed.
    TimedOut,
    /// A signal is pending for the thread.
    Interrupted,
}

/// Repeats `attempt` until it yields something, waiting on `queues` in between. Who was
/// woken in vain keeps its place: a thread that fills a pipe again and again does not
/// keep the others from ever writing.
///
/// Errors: `Errno::ETIMEDOUT` when `deadline` passes, `Errno::ERESTARTSYS` when
/// a signal arrives; callers map them to what their man page says.
pub fn wait_until<T>(
    queues: &[&WaitQueue],
    deadline: Option<Instant>,
    mut attempt: impl FnMut() -> Option<Result<T>>,
) -> Result<T> {
    let mut places = Places::default();
    loop {
        if let Some(outcome) = attempt() {
            return outcome;
        }
        match super::scheduler::block_in_turn(queues, deadline, &mut places) {
            Wake::Woken => {}
            Wake::TimedOut => {
                return attempt().unwrap_or(Err(Errno::ETIMEDOUT));
            }
            Wake::Interrupted => {
                return attempt().unwrap_or(Err(Errno::ERESTARTSYS));
            }
        }
    }
}

/// Like [`wait_until`], but signals do not end the wait: only a condition that
/// is sure to come is worth it. A thread that has to end stops waiting
/// (`Errno::EINTR`).
pub fn wait_uninterruptibly<T>(
    queue: &WaitQueue,
    mut attempt: impl FnMut() -> Option<Result<T>>,
) -> Result<T> {
    loop {
        if let Some(outcome) = attempt() {
            return outcome;
        }
        if super::thread::current().is_dying() {
            return Err(Errno::EINTR);
        }
        super::scheduler::block_uninterruptibly(queue);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::{AtomicU32, Ordering};

    struct Counter(AtomicU32);
    impl Waiter for Counter {
        fn wake(&self, _: Events) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn who_was_woken_in_vain_comes_before_newer_ones() {
        struct Named(u32, Arc<KernelCell<Vec<u32>>>);
        impl Waiter for Named {
            fn wake(&self, _: Events) {
                self.1.borrow_mut().push(self.0);
            }
        }
        let (queue, woken) = (WaitQueue::new(), Arc::new(KernelCell::new(Vec::new())));
        let waiter = |name| Arc::new(Named(name, woken.clone()));
        let mut places = [Places::default(), Places::default()];
        for place in &mut places {
            *place.of(5) = queue.register_at(*place.of(5), waiter(0));
        }
        // The first gets what it wants and comes again; the second does not.
        for place in &mut places {
            queue.unregister(*place.of(5));
        }
        queue.register_at(WaitToken::NONE, waiter(1));
        queue.register_at(*places[1].of(5), waiter(2));
        queue.wake_all(Events::OUT);
        assert_eq!(*woken.borrow_mut(), [2, 1]);
    }

    #[test]
    fn wakes_until_unregistered() {
        let queue = WaitQueue::new();
        let counter = Arc::new(Counter(AtomicU32::new(0)));
        let token = queue.register(counter.clone());
        queue.wake_all(Events::IN);
        queue.unregister(token);
        queue.wake_all(Events::IN);
        assert_eq!(counter.0.load(Ordering::Relaxed), 1);
        assert!(queue.is_empty());
    }
}
