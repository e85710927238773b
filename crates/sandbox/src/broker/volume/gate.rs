//! What holds back changes of a volume while its files are copied or exchanged.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Lets requests that change something pass, or have them wait.
#[derive(Default)]
pub(super) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Requests that have passed and are not done.
    under_way: usize,
    is_closed: bool,
}

/// A request that has passed.
pub(super) struct Passed<'a>(&'a Gate);

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the gate is open.
    pub fn pass(&self) -> Passed<'_> {
        let waiting = self.changed.wait_while(self.state(), |state| state.is_closed);
        waiting.unwrap_or_else(PoisonError::into_inner).under_way += 1;
        Passed(self)
    }

    /// Lets nobody pass from now on, and waits until all who have passed are done. Whether that was
    /// so in time; the gate is as before otherwise.
    pub fn close(&self, until: Instant) -> bool {
        let mut state = self.state();
        if state.is_closed {
            return false;
        }
        state.is_closed = true;
        while state.under_way > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                state.is_closed = false;
                self.changed.notify_all();
                return false;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Whether it lets nobody pass.
    pub fn is_closed(&self) -> bool {
        self.state().is_closed
    }

    /// Lets everybody pass again.
    pub fn open(&self) {
        self.state().is_closed = false;
        self.changed.notify_all();
    }
}

impl Drop for Passed<'_> {
    fn drop(&mut self) {
        self.0.state().under_way -= 1;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
    use std::time::Duration;

    #[test]
    fn a_closed_gate_holds_back_and_waits_for_those_who_have_passed() {
        let gate = Gate::default();
        let soon = || Instant::now() + Duration::from_millis(20);
        let passed = gate.pass();
        assert!(!gate.close(soon()), "one has passed");
        drop(passed);
        assert!(gate.close(soon()));
        assert!(!gate.close(soon()), "it is closed");
        let has_passed = AtomicBool::new(false);
        std::thread::scope(|threads| {
            threads.spawn(|| {
                drop(gate.pass());
                has_passed.store(true, SeqCst);
            });
            std::thread::sleep(Duration::from_millis(50));
            assert!(!has_passed.load(SeqCst));
            gate.open();
        });
        assert!(has_passed.load(SeqCst));
    }
}
