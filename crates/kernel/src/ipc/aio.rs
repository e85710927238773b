//! Linux' asynchronous input and output (io_setup(2)): contexts, and what has been done in them.
//!
//! What is submitted is done at once, so a context holds results only. Its id is the address of a page
//! that Linux would let programs read the results from. Here the page is empty and lacks the number by
//! which libraries know that they may, so they make the call.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;

use bytemuck::{Pod, Zeroable};

use crate::errno::{Errno, Result};
use crate::fs::file::Events;
use crate::sync::KernelCell;
use crate::task::Process;
use crate::task::ids::Pid;
use crate::task::wait::WaitQueue;

/// `/proc/sys/fs/aio-max-nr`: most requests that all contexts hold together.
pub const REQUESTS_MAX: u64 = 65536;

/// `struct io_event`: the result of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Event {
    /// `aio_data` of the request.
    pub data: u64,
    /// Address of the request.
    pub request: u64,
    /// Bytes, or an error.
    pub result: i64,
    /// Nothing.
    pub second: i64,
}

/// A context.
pub struct Context {
    capacity: u64,
    state: KernelCell<State>,
    /// Where to wait for results.
    pub queue: WaitQueue,
}

#[derive(Default)]
struct State {
    events: VecDeque<Event>,
    /// Requests whose results are not there yet.
    running: u64,
    is_gone: bool,
}

/// A place for a result. Dropped without one, it is free again.
pub struct Place {
    context: Arc<Context>,
}

impl Place {
    /// Puts the result into the context.
    pub fn complete(self, event: Event) {
        self.context.state.borrow_mut().events.push_back(event);
        self.context.queue.wake_all(Events::IN);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.context.state.borrow_mut().running -= 1;
    }
}

impl Context {
    fn new(requests: u64) -> Self {
        Self { capacity: requests, state: KernelCell::default(), queue: WaitQueue::new() }
    }

    /// Takes a place for the result of a request; `EAGAIN` if there is none.
    pub fn begin(self: &Arc<Self>) -> Result<Place> {
        let mut state = self.state.borrow_mut();
        if state.is_gone {
            return Err(Errno::EINVAL);
        }
        if state.events.len() as u64 + state.running >= self.capacity {
            return Err(Errno::EAGAIN);
        }
        state.running += 1;
        drop(state);
        Ok(Place { context: self.clone() })
    }

    /// How many requests may be submitted in one call.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Takes the oldest result; `EINVAL` if the context is gone.
    pub fn take(&self) -> Result<Option<Event>> {
        let mut state = self.state.borrow_mut();
        if state.is_gone { Err(Errno::EINVAL) } else { Ok(state.events.pop_front()) }
    }

    fn end(&self) {
        let mut state = self.state.borrow_mut();
        state.is_gone = true;
        let events = core::mem::take(&mut state.events);
        drop(state);
        drop(events);
        self.queue.wake_all(Events::IN);
    }
}

/// The contexts of all processes, by their addresses. Saved.
#[derive(Default)]
pub struct Contexts {
    by_address: KernelCell<BTreeMap<(Pid, u64), Arc<Context>>>,
    /// Requests that they hold together.
    requests: KernelCell<u64>,
}

impl Contexts {
    /// Requests that all contexts hold: `/proc/sys/fs/aio-nr`.
    pub fn requests(&self) -> u64 {
        self.requests.get()
    }

    /// `EINVAL` if a context for so many requests cannot be; `EAGAIN` if there are too many.
    pub fn check(&self, requests: u64) -> Result<()> {
        // So many results no ring of Linux has.
        const FAR_TOO_MANY: u64 = 0x1000_0000 / size_of::<Event>() as u64;
        if requests == 0 || requests > FAR_TOO_MANY {
            return Err(Errno::EINVAL);
        }
        let all = self.requests().saturating_add(requests);
        if all > REQUESTS_MAX { Err(Errno::EAGAIN) } else { Ok(()) }
    }

    /// Makes a context of a process at an address.
    pub fn add(&self, process: &Process, address: u64, requests: u64) {
        let context = Arc::new(Context::new(requests));
        *self.requests.borrow_mut() += requests;
        let old = self.by_address.borrow_mut().insert((process.pid, address), context);
        if let Some(old) = old {
            self.end(&old);
        }
    }

    /// Ends a context that has been taken out.
    fn end(&self, context: &Context) {
        *self.requests.borrow_mut() -= context.capacity;
        context.end();
    }

    /// The context of a process at an address; `EINVAL`.
    pub fn find(&self, process: &Process, address: u64) -> Result<Arc<Context>> {
        let found = self.by_address.borrow_mut().get(&(process.pid, address)).cloned();
        found.ok_or(Errno::EINVAL)
    }

    /// Removes a context; `EINVAL`.
    pub fn remove(&self, process: &Process, address: u64) -> Result<()> {
        let removed = self.by_address.borrow_mut().remove(&(process.pid, address));
        let removed = removed.ok_or(Errno::EINVAL)?;
        self.end(&removed);
        Ok(())
    }

    /// A process has other memory, or has ended: its contexts are gone.
    pub fn remove_all(&self, process: &Process) {
        while let Some(context) = self.take_one(process.pid) {
            self.end(&context);
        }
    }

    fn take_one(&self, pid: Pid) -> Option<Arc<Context>> {
        let mut all = self.by_address.borrow_mut();
        let (&key, _) = all.range((pid, 0)..=(pid, u64::MAX)).next()?;
        all.remove(&key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::current_process;
    use crate::testing::Sandbox;

    #[test]
    fn contexts_are_bounded_and_belong_to_a_process() {
        let _sandbox = Sandbox::new();
        let (contexts, process) = (Contexts::default(), current_process());
        assert_eq!(contexts.check(0), Err(Errno::EINVAL));
        assert_eq!(contexts.check(REQUESTS_MAX + 1), Err(Errno::EAGAIN));
        contexts.add(&process, 4096, REQUESTS_MAX - 1);
        contexts.add(&process, 1 << 20, 1);
        assert_eq!(contexts.check(1), Err(Errno::EAGAIN));
        assert!(contexts.find(&process, 8192).is_err());
        let context = contexts.find(&process, 4096).unwrap();
        assert_eq!(
            (contexts.remove(&process, 1 << 20), contexts.requests()),
            (Ok(()), REQUESTS_MAX - 1)
        );
        contexts.remove_all(&process);
        assert_eq!(contexts.requests(), 0);
        assert_eq!(context.take(), Err(Errno::EINVAL));
        assert!(context.begin().is_err());
    }

    #[test]
    fn results_take_the_places_of_requests() {
        let _sandbox = Sandbox::new();
        let context = Arc::new(Context::new(2));
        let (first, second) = (context.begin().unwrap(), context.begin().unwrap());
        assert!(matches!(context.begin(), Err(Errno::EAGAIN)));
        drop(first);
        second.complete(Event { data: 7, ..Event::default() });
        let third = context.begin().unwrap();
        assert!(context.begin().is_err());
        drop(third);
        assert_eq!(context.take().unwrap().unwrap().data, 7);
        assert_eq!(context.take(), Ok(None));
    }
}
