//! What sandboxes can make this process keep for volumes, and how much of it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

/// Most files of volumes that a sandbox has open at a time.
pub(super) const OPEN_MAX: usize = 256;
/// Most descriptors that this process keeps for all sandboxes at a time: of open files, and of
/// files that hold locks.
pub(super) const OPEN_OF_ALL_MAX: usize = 4096;
/// Most ranges that a sandbox has locked in the files of its volumes.
pub(super) const RANGES_MAX: usize = 1024;
/// Most bytes of a listing.
pub(super) const LISTING_MAX: usize = 8 << 20;
/// Most bytes of the listings of all sandboxes.
const LISTINGS_OF_ALL_MAX: usize = 128 << 20;

/// Something that there is only so much of.
#[derive(Debug)]
pub(super) struct Gauge {
    used: AtomicUsize,
    max: usize,
}

impl Gauge {
    pub fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { used: AtomicUsize::new(0), max })
    }

    /// Takes `count`; nothing if there are fewer left.
    pub fn take(self: &Arc<Self>, count: usize) -> Option<Taken> {
        let mut taken = Taken { gauge: self.clone(), count: 0 };
        taken.resize(count).then_some(taken)
    }
}

/// What is taken of a gauge, until it is dropped.
#[derive(Debug)]
pub(super) struct Taken {
    gauge: Arc<Gauge>,
    count: usize,
}

impl Taken {
    /// Takes more, up to `count` in all, or gives some back; whether there was enough left.
    pub fn resize(&mut self, count: usize) -> bool {
        let (old, max) = (self.count, self.gauge.max);
        let change = |used: usize| (used - old).checked_add(count).filter(|&used| used <= max);
        let order = Ordering::Relaxed;
        let is_changed = self.gauge.used.fetch_update(order, order, change).is_ok();
        if is_changed {
            self.count = count;
        }
        is_changed
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.resize(0);
    }
}

/// Of all sandboxes of this process.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    pub descriptors: Arc<Gauge>,
    pub listings: Arc<Gauge>,
}

impl Shared {
    pub fn new(descriptors: usize, listings: usize) -> Self {
        Self { descriptors: Gauge::new(descriptors), listings: Gauge::new(listings) }
    }

    /// The one of this process.
    pub fn of_this_process() -> Self {
        static ALL: LazyLock<Shared> =
            LazyLock::new(|| Shared::new(OPEN_OF_ALL_MAX, LISTINGS_OF_ALL_MAX));
        ALL.clone()
    }
}

/// Of one sandbox, in all of its volumes.
#[derive(Clone, Debug)]
pub(in crate::broker) struct Share {
    pub(super) open: Arc<Gauge>,
    pub(super) ranges: Arc<Gauge>,
}

impl Default for Share {
    fn default() -> Self {
        Self { open: Gauge::new(OPEN_MAX), ranges: Gauge::new(RANGES_MAX) }
    }
}
