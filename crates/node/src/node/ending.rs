//! The end of a node: what the gateway and the instances are told of it.

use super::NodeState;
use std::sync::atomic::Ordering;

impl NodeState {
    /// Whether the node takes no more clients.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Whether it also refuses the requests of those that it has, and ends its instances.
    pub(crate) fn is_ending(&self) -> bool {
        self.is_draining() && !self.is_leaving()
    }

    /// Whether its instances are about to be left to the next daemon.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Relaxed)
    }

    /// Takes no more requests from now on: all instances end.
    pub(crate) fn begin_to_end(&self) {
        self.leaving.store(false, Ordering::SeqCst);
        self.joined.stay();
        self.draining.store(true, Ordering::SeqCst);
    }

    /// Takes no more clients from now on: the instances are left to the next daemon.
    pub(crate) fn begin_to_leave(&self) {
        self.leaving.store(true, Ordering::SeqCst);
        self.draining.store(true, Ordering::SeqCst);
    }
}
