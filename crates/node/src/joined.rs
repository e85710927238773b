//! Connections of which the gateway only copies the bytes, when their daemon ends in order: each is
//! kept for the next one before that.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use tokio::sync::watch;

/// What all such connections of a node hear and say.
pub(crate) struct Joined {
    leaving: watch::Sender<bool>,
    /// Those that may be left to the next daemon, and are not yet.
    moving: AtomicUsize,
}

impl Default for Joined {
    fn default() -> Self {
        Self { leaving: watch::Sender::new(false), moving: AtomicUsize::new(0) }
    }
}

impl Joined {
    /// Has all of them kept for the next daemon.
    pub(crate) fn leave(&self) {
        self.leaving.send_replace(true);
    }

    /// The daemon serves them on.
    pub(crate) fn stay(&self) {
        self.leaving.send_replace(false);
    }

    /// Hears whether the daemon leaves.
    pub(crate) fn subscribe(&self) -> watch::Receiver<bool> {
        self.leaving.subscribe()
    }

    /// How many are still to be kept.
    pub(crate) fn moving(&self) -> usize {
        self.moving.load(SeqCst)
    }
}

/// One that is to be kept if the daemon leaves, as long as it lives.
pub(crate) struct Moving(Arc<Joined>);

impl Moving {
    pub(crate) fn new(joined: &Arc<Joined>) -> Self {
        joined.moving.fetch_add(1, SeqCst);
        Self(joined.clone())
    }
}

impl Drop for Moving {
    fn drop(&mut self) {
        self.0.moving.fetch_sub(1, SeqCst);
    }
}
