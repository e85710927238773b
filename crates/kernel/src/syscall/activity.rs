//! What threads call while somebody waits for the program's entry point. Nothing is counted
//! before the host has asked once.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;
use core::cmp::Reverse;

use thaw_abi::control::{ACTIVITY_NAMES_MAX, Activity, MSG_ACTIVITY};

use super::{Entry, trace};
use crate::host::control;
use crate::state::{OfBoot, kernel};
use crate::sync::KernelCell;
use crate::task::scheduler::RunState;
use crate::task::{current, ids::Tid, thread::Thread};
use crate::time::timer;

/// Most pairs of thread and call that are told apart.
const PAIRS_MAX: usize = 4096;
/// How many calls of a thread are named.
const NAMED: usize = 3;

/// The calls since the host has asked last, of each boot its own.
#[derive(Default)]
pub struct Recent {
    calls: KernelCell<Option<OfBoot<Calls>>>,
}

impl Recent {
    /// Nobody asks copies before they run: forgets all.
    pub fn prepare_freeze(&self) {
        *self.calls.borrow_mut() = None;
    }
}

#[derive(Default)]
struct Calls {
    all: u64,
    /// By thread and name of the call.
    by_thread: BTreeMap<(u32, &'static str), u64>,
}

impl Calls {
    fn add(&mut self, thread: u32, name: &'static str) {
        self.all += 1;
        if self.by_thread.len() < PAIRS_MAX || self.by_thread.contains_key(&(thread, name)) {
            *self.by_thread.entry((thread, name)).or_default() += 1;
        }
    }

    /// The calls that a thread has made most, the most frequent one first.
    fn most_of(&self, thread: u32) -> String {
        let own = self.by_thread.range((thread, "")..).take_while(|((of, _), _)| *of == thread);
        let mut own: Vec<_> = own.map(|((_, name), count)| (Reverse(*count), *name)).collect();
        own.sort_unstable();
        let names: Vec<&str> = own.iter().take(NAMED).map(|(_, name)| *name).collect();
        let mut text = names.join(", ");
        text.truncate(ACTIVITY_NAMES_MAX);
        text
    }
}

/// The current thread makes a call.
pub(super) fn count(entry: Option<&Entry>) {
    let name = entry.map_or("an unknown one", |entry| entry.name);
    let mut calls = kernel().calls.recent.calls.borrow_mut();
    OfBoot::of_this(&mut calls).add(current().tid().number(), name);
}

/// Tells the host what `threads` have done since it asked last, and which calls `busy` has made
/// most.
pub fn tell(threads: &[impl AsRef<Thread>], busy: Option<Tid>) {
    let is_uninterruptible = |thread: &Thread| {
        matches!(thread.sched.get().state, RunState::Uninterruptible | RunState::Forking)
    };
    let calls = core::mem::take(OfBoot::of_this(&mut kernel().calls.recent.calls.borrow_mut()));
    let activity = Activity {
        calls: calls.all,
        timers: timer::count() as u32,
        uninterruptible: threads.iter().filter(|one| is_uninterruptible(one.as_ref())).count()
            as u32,
        is_first: u32::from(!trace::begin_to_count()),
        reserved: 0,
    };
    let names = busy.map(|busy| calls.most_of(busy.number())).unwrap_or_default();
    control::send(MSG_ACTIVITY, 0, bytemuck::bytes_of(&activity), names.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_frequent_calls_of_a_thread_come_first() {
        let mut calls = Calls::default();
        for (thread, name, times) in
            [(1, "read", 9), (2, "futex", 2), (2, "poll", 5), (2, "read", 1), (2, "write", 1)]
        {
            (0..times).for_each(|_| calls.add(thread, name));
        }
        assert_eq!(calls.all, 18);
        assert_eq!(calls.most_of(2), "poll, futex, read");
        assert_eq!(calls.most_of(1), "read");
        assert_eq!(calls.most_of(3), "");
    }

    #[test]
    fn what_is_counted_has_a_bound() {
        let mut calls = Calls::default();
        (0..2 * PAIRS_MAX as u32).for_each(|thread| calls.add(thread, "read"));
        assert_eq!((calls.all, calls.by_thread.len()), (2 * PAIRS_MAX as u64, PAIRS_MAX));
    }
}
