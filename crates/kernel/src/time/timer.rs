//! Kernel timers: callbacks at points of the guest's monotonic clock.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::Instant;
use crate::platform::saved::Saved;
use crate::state::kernel;
use crate::sync::KernelCell;

/// Something to be done at a deadline.
pub trait TimerCallback: Saved + Send + Sync {
    /// The deadline has passed.
    fn fire(&self, now: Instant);

    /// Whether the deadline came from a clock that goes on while the sandbox is frozen. Then `fire`
    /// is also called after a thaw, and sets the timer again if it is not due.
    fn goes_on_frozen(&self) -> bool {
        false
    }
}

/// Names a timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TimerId {
    deadline: Instant,
    number: u64,
}

/// All timers of the sandbox.
#[derive(Default)]
pub struct Timers {
    state: KernelCell<State>,
}

#[derive(Default)]
struct State {
    last_number: u64,
    queue: BTreeMap<TimerId, Arc<dyn TimerCallback>>,
}

/// Adds a timer.
pub fn add(deadline: Instant, callback: Arc<dyn TimerCallback>) -> TimerId {
    let mut state = kernel().timers.state.borrow_mut();
    state.last_number += 1;
    let id = TimerId { deadline, number: state.last_number };
    state.queue.insert(id, callback);
    id
}

/// Removes a timer; nothing happens if it has fired.
pub fn cancel(id: TimerId) {
    let removed = kernel().timers.state.borrow_mut().queue.remove(&id);
    drop(removed);
}

/// Fires all timers that are due; `false` if none was.
pub fn fire_due() -> bool {
    if kernel().timers.state.borrow_mut().queue.is_empty() {
        return false;
    }
    let now = Instant::now();
    let mut any = false;
    loop {
        let mut state = kernel().timers.state.borrow_mut();
        let due = state.queue.first_key_value().is_some_and(|(id, _)| id.deadline <= now);
        let fired = if due { state.queue.pop_first() } else { None };
        drop(state);
        let Some((_, callback)) = fired else { return any };
        callback.fire(now);
        any = true;
    }
}

/// After a thaw: has the timers look again whose clocks went on meanwhile.
pub fn look_again() {
    let mut state = kernel().timers.state.borrow_mut();
    let of_such_clocks = state.queue.iter().filter(|(_, callback)| callback.goes_on_frozen());
    let ids: Vec<TimerId> = of_such_clocks.map(|(&id, _)| id).collect();
    let callbacks: Vec<_> = ids.iter().filter_map(|id| state.queue.remove(id)).collect();
    drop(state);
    let now = Instant::now();
    callbacks.iter().for_each(|callback| callback.fire(now));
}

/// How many timers are to fire.
pub fn count() -> usize {
    kernel().timers.state.borrow_mut().queue.len()
}

/// The next deadline.
pub fn next_deadline() -> Option<Instant> {
    kernel().timers.state.borrow_mut().queue.first_key_value().map(|(id, _)| id.deadline)
}

/// Nanoseconds to the next deadline.
pub fn time_to_next() -> Option<u64> {
    Some(next_deadline()?.0.saturating_sub(Instant::now().0))
}
