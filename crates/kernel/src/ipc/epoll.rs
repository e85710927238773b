//! epoll(7): interest sets and the list of what is ready.
//!
//! An [`Item`] is one watched descriptor. It waits in the watched file's wait
//! queue for good; a wake-up puts it on the set's ready list. A report takes
//! items from that list, asks each file what is possible now, and puts the
//! level-triggered ones back. Nothing here allocates after the item was added.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, Ordering};

use bitflags::bitflags;

use crate::errno::{Errno, Result};
use crate::fs::file::{Events, File, OpenFile};
use crate::sync::KernelCell;
use crate::task::wait::{WaitQueue, WaitToken, Waiter};

/// How deep interest sets may watch each other (epoll_ctl(2), `ELOOP`).
const MAX_NESTING: usize = 4;

bitflags! {
    /// Input flags of `epoll_ctl` that are not events.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Mode: u32 {
        /// `EPOLLEXCLUSIVE`.
        const EXCLUSIVE = 1 << 28;
        /// `EPOLLWAKEUP`: meaningless here, since nothing suspends the sandbox.
        const WAKEUP = 1 << 29;
        /// `EPOLLONESHOT`.
        const ONESHOT = 1 << 30;
        /// `EPOLLET`.
        const EDGE = 1 << 31;
    }
}

/// `struct epoll_event` of the x86-64 ABI, which is packed (epoll_event(3type)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, packed)]
pub struct EpollEvent {
    /// Events and modes.
    pub events: u32,
    /// The guest's own number.
    pub data: u64,
}

/// What is asked for.
#[derive(Clone, Copy, Debug)]
struct Interest {
    events: Events,
    mode: Mode,
    data: u64,
    /// False after a one-shot report, until the interest is renewed.
    armed: bool,
}

impl Interest {
    fn new(event: EpollEvent) -> Self {
        // What a file cannot help but report is always asked for.
        let events = Events::from_bits_truncate(event.events) | Events::ERR | Events::HUP;
        Self { events, mode: Mode::from_bits_truncate(event.events), data: event.data, armed: true }
    }
}

/// One watched descriptor.
struct Item {
    this: Weak<Item>,
    set: Weak<Shared>,
    file: Weak<OpenFile>,
    interest: KernelCell<Interest>,
    /// On the ready list.
    queued: AtomicBool,
    token: KernelCell<Option<WaitToken>>,
}

impl Item {
    /// What may be reported now; empty when disarmed or closed.
    fn ready(&self, file: &OpenFile) -> Events {
        let interest = self.interest.get();
        if !interest.armed {
            return Events::empty();
        }
        file.file.poll() & interest.events
    }

    fn forget(&self) {
        let token = self.token.borrow_mut().take();
        let file = self.file.upgrade();
        let queue = file.as_ref().and_then(|file| file.file.wait_queue());
        if let (Some(token), Some(queue)) = (token, queue) {
            queue.unregister(token);
        }
    }
}

impl Waiter for Item {
    fn wake(&self, events: Events) {
        let interest = self.interest.get();
        if !interest.armed || (!events.is_empty() && !events.intersects(interest.events)) {
            return;
        }
        let (Some(set), Some(this)) = (self.set.upgrade(), self.this.upgrade()) else { return };
        if !self.queued.swap(true, Ordering::Relaxed) {
            set.state.borrow_mut().ready.push_back(this);
        }
        set.queue.wake_all(Events::IN | Events::RDNORM);
    }
}

/// A descriptor as an interest set knows it: its number and the open file
/// that it referred to when it was added (epoll(7), question 6).
type Key = (i32, usize);

#[derive(Default)]
struct State {
    items: BTreeMap<Key, Arc<Item>>,
    ready: VecDeque<Arc<Item>>,
}

struct Shared {
    state: KernelCell<State>,
    queue: WaitQueue,
    /// Interest sets that watch this one, for the nesting limit.
    watchers: KernelCell<Vec<Weak<Shared>>>,
}

impl Shared {
    /// How many interest sets lie above this one.
    fn height_above(&self) -> usize {
        let watchers: Vec<_> =
            self.watchers.borrow_mut().iter().filter_map(Weak::upgrade).collect();
        watchers.iter().map(|above| above.height_above() + 1).max().unwrap_or(0)
    }

    /// How many interest sets lie below this one; `ELOOP` if `top` is one of
    /// them or the nesting is too deep.
    fn depth_below(&self, top: &Shared, level: usize) -> Result<usize> {
        if core::ptr::eq(self, top) || level > MAX_NESTING {
            return Err(Errno::ELOOP);
        }
        let files: Vec<_> =
            self.state.borrow_mut().items.values().filter_map(|item| item.file.upgrade()).collect();
        let mut depth = 0;
        for file in files {
            if let Some(nested) = file.downcast::<Epoll>() {
                depth = depth.max(nested.shared.depth_below(top, level + 1)? + 1);
            }
        }
        Ok(depth)
    }
}

/// An epoll instance.
pub struct Epoll {
    shared: Arc<Shared>,
}

impl Default for Epoll {
    fn default() -> Self {
        Self::new()
    }
}

impl Epoll {
    /// An empty interest set.
    pub fn new() -> Self {
        let shared = Shared {
            state: KernelCell::default(),
            queue: WaitQueue::new(),
            watchers: KernelCell::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// `EPOLL_CTL_ADD`. `EPERM` if readiness of the file never changes.
    pub fn add(&self, fd: i32, file: &Arc<OpenFile>, event: EpollEvent) -> Result<()> {
        let queue = file.file.wait_queue().ok_or(Errno::EPERM)?;
        let interest = Interest::new(event);
        let nested = file.downcast::<Epoll>();
        if interest.mode.contains(Mode::EXCLUSIVE) {
            let allowed = Events::IN | Events::OUT | Events::ERR | Events::HUP;
            let modes = Mode::EXCLUSIVE | Mode::WAKEUP | Mode::EDGE;
            if nested.is_some() || event.events & !(allowed.bits() | modes.bits()) != 0 {
                return Err(Errno::EINVAL);
            }
        }
        let key = (fd, Arc::as_ptr(file) as usize);
        {
            // Descriptors that were closed while they were watched leave their
            // items behind until the number is used again.
            let mut state = self.shared.state.borrow_mut();
            if state.items.contains_key(&key) {
                return Err(Errno::EEXIST);
            }
            while let Some(stale) = stale_key(&state.items, fd) {
                state.items.remove(&stale);
            }
        }
        if let Some(nested) = nested {
            let depth = nested.shared.depth_below(&self.shared, 0)?;
            if depth + 1 + self.shared.height_above() > MAX_NESTING {
                return Err(Errno::ELOOP);
            }
            let mut watchers = nested.shared.watchers.borrow_mut();
            watchers.retain(|watcher| watcher.strong_count() > 0);
            watchers.push(Arc::downgrade(&self.shared));
        }
        let item = Arc::new_cyclic(|this| Item {
            this: this.clone(),
            set: Arc::downgrade(&self.shared),
            file: Arc::downgrade(file),
            interest: KernelCell::new(interest),
            queued: AtomicBool::new(false),
            token: KernelCell::new(None),
        });
        {
            let mut state = self.shared.state.borrow_mut();
            state.items.insert(key, item.clone());
            // Every item fits, so that a wake-up never allocates.
            let missing = state.items.len().saturating_sub(state.ready.len());
            state.ready.reserve(missing);
        }
        let token = queue.register(item.clone());
        *item.token.borrow_mut() = Some(token);
        self.queue_if_ready(&item, file);
        Ok(())
    }

    /// `EPOLL_CTL_MOD`.
    pub fn modify(&self, fd: i32, file: &Arc<OpenFile>, event: EpollEvent) -> Result<()> {
        let item = self.item(fd, file)?;
        let interest = Interest::new(event);
        if interest.mode.contains(Mode::EXCLUSIVE)
            || item.interest.get().mode.contains(Mode::EXCLUSIVE)
        {
            return Err(Errno::EINVAL);
        }
        item.interest.set(interest);
        self.queue_if_ready(&item, file);
        Ok(())
    }

    /// `EPOLL_CTL_DEL`.
    pub fn remove(&self, fd: i32, file: &Arc<OpenFile>) -> Result<()> {
        let item = self.item(fd, file)?;
        item.forget();
        let mut state = self.shared.state.borrow_mut();
        state.items.remove(&(fd, Arc::as_ptr(file) as usize));
        if item.queued.load(Ordering::Relaxed) {
            state.ready.retain(|other| !Arc::ptr_eq(other, &item));
        }
        drop(state);
        if let Some(nested) = file.downcast::<Epoll>() {
            let mut watchers = nested.shared.watchers.borrow_mut();
            if let Some(at) =
                watchers.iter().position(|w| core::ptr::eq(w.as_ptr(), Arc::as_ptr(&self.shared)))
            {
                watchers.remove(at);
            }
        }
        Ok(())
    }

    fn item(&self, fd: i32, file: &Arc<OpenFile>) -> Result<Arc<Item>> {
        let key = (fd, Arc::as_ptr(file) as usize);
        self.shared.state.borrow_mut().items.get(&key).cloned().ok_or(Errno::ENOENT)
    }

    fn queue_if_ready(&self, item: &Arc<Item>, file: &OpenFile) {
        if item.ready(file).is_empty() {
            return;
        }
        if !item.queued.swap(true, Ordering::Relaxed) {
            self.shared.state.borrow_mut().ready.push_back(item.clone());
        }
        self.shared.queue.wake_all(Events::IN | Events::RDNORM);
    }

    /// Passes up to `max` ready descriptors to `emit` and returns how many.
    /// An error of `emit` ends the report; it is returned only if it came first.
    pub fn report(
        &self,
        max: usize,
        mut emit: impl FnMut(usize, EpollEvent) -> Result<()>,
    ) -> Result<usize> {
        let mut done = 0;
        let candidates = self.shared.state.borrow_mut().ready.len();
        for _ in 0..candidates {
            if done == max {
                break;
            }
            let Some(item) = self.shared.state.borrow_mut().ready.pop_front() else { break };
            item.queued.store(false, Ordering::Relaxed);
            let Some(file) = item.file.upgrade() else { continue };
            let events = item.ready(&file);
            if events.is_empty() {
                continue;
            }
            let interest = item.interest.get();
            if let Err(error) =
                emit(done, EpollEvent { events: events.bits(), data: interest.data })
            {
                if !item.queued.swap(true, Ordering::Relaxed) {
                    self.shared.state.borrow_mut().ready.push_front(item);
                }
                return if done > 0 { Ok(done) } else { Err(error) };
            }
            done += 1;
            if interest.mode.contains(Mode::ONESHOT) {
                item.interest.borrow_mut().armed = false;
            } else if !interest.mode.contains(Mode::EDGE)
                && !item.queued.swap(true, Ordering::Relaxed)
            {
                self.shared.state.borrow_mut().ready.push_back(item);
            }
        }
        Ok(done)
    }

    /// Where to wait for something to report.
    pub fn queue(&self) -> &WaitQueue {
        &self.shared.queue
    }
}

/// A dead item of descriptor `fd`.
fn stale_key(items: &BTreeMap<Key, Arc<Item>>, fd: i32) -> Option<Key> {
    let of_fd = items.range((fd, 0)..=(fd, usize::MAX));
    of_fd.into_iter().find(|(_, item)| item.file.strong_count() == 0).map(|(key, _)| *key)
}

impl File for Epoll {
    fn tells_async(&self) -> bool {
        false
    }

    fn poll(&self) -> Events {
        let candidates = self.shared.state.borrow_mut().ready.len();
        for _ in 0..candidates {
            let Some(item) = self.shared.state.borrow_mut().ready.pop_front() else { break };
            item.queued.store(false, Ordering::Relaxed);
            let Some(file) = item.file.upgrade() else { continue };
            if !item.ready(&file).is_empty() {
                if !item.queued.swap(true, Ordering::Relaxed) {
                    self.shared.state.borrow_mut().ready.push_front(item);
                }
                return Events::IN | Events::RDNORM;
            }
        }
        Events::empty()
    }

    fn wait_queue(&self) -> Option<&WaitQueue> {
        Some(&self.shared.queue)
    }

    fn details(&self) -> String {
        let items = self.shared.state.borrow_mut().items.clone();
        let line = |(fd, _): &Key, item: &Item| {
            let interest = item.interest.get();
            let events = interest.events.bits() | interest.mode.bits();
            format!("tfd: {fd:8} events: {events:8x} data: {:16x} \n", interest.data)
        };
        items.iter().map(|(key, item)| line(key, item)).collect()
    }

    fn description(&self) -> String {
        "anon_inode:[eventpoll]".to_string()
    }
}

impl Drop for Epoll {
    fn drop(&mut self) {
        let (items, ready) = {
            let mut state = self.shared.state.borrow_mut();
            (core::mem::take(&mut state.items), core::mem::take(&mut state.ready))
        };
        for item in items.values() {
            item.forget();
        }
        drop(ready);
    }
}

#[cfg(test)]
#[path = "epoll_tests.rs"]
mod tests;
