//! Instances that are gone, of which something is kept by their numbers: that they are sandboxes, their rules
//! and limits. Whoever keeps it hears of those alone, and does not look at all the others.

use super::NodeState;
use std::mem;

impl NodeState {
    /// An instance is gone, or soon will be.
    pub(crate) fn departs(&self, id: u64) {
        self.departures.lock().expect("no holder panics").push(id);
    }

    /// An instance is gone that was a sandbox or not.
    pub(crate) fn is_gone(&self, id: u64, was_sandbox: bool) {
        if was_sandbox || self.egress.knows(id) || self.limits.of(id).is_some() {
            self.departs(id);
        }
    }

    /// Those that are gone, or soon will be, since this was called last.
    pub(crate) fn take_departures(&self) -> Vec<u64> {
        mem::take(&mut *self.departures.lock().expect("no holder panics"))
    }
}
