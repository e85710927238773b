//! What sandboxes can make this process keep for volumes, and how much of it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use rustix::process::{Resource, getrlimit};

/// Most files of volumes that a sandbox has open at a time.
pub(super) const OPEN_MAX: usize = 256;
/// Most descriptors that a process keeps for all sandboxes at a time: of open files, and of
/// files that hold locks.
const DESCRIPTORS_MAX: u64 = 4096;
/// So many there are even if the process may have few.
const DESCRIPTORS_MIN: u64 = 512;
/// The part of the descriptors that a process may have which is for volumes.
const DESCRIPTORS_PART: u64 = 16;
/// Most ranges that a sandbox has locked in the files of its volumes.
pub(super) const RANGES_MAX: usize = 1024;
/// Most bytes of a listing.
pub(super) const LISTING_MAX: usize = 8 << 20;
/// Most bytes of the listings of all sandboxes.
const LISTINGS_OF_ALL_MAX: usize = 128 << 20;

/// Most descriptors that volumes take in a process that may have `limit`: whoever shares them
/// out leaves room for these.
pub fn volume_descriptors(limit: u64) -> u64 {
    (limit / DESCRIPTORS_PART).clamp(DESCRIPTORS_MIN, DESCRIPTORS_MAX)
}

/// Something that there is only so much of, for all sandboxes of this process.
#[derive(Debug)]
pub(super) struct Pool {
    used: Mutex<usize>,
    max: usize,
}

impl Pool {
    pub fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { used: Mutex::new(0), max })
    }

    fn used(&self) -> MutexGuard<'_, usize> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How much of something there is.
#[derive(Debug)]
enum Bound {
    Fixed(usize),
    /// Half of what others leave in a pool, so that no one has all of it.
    HalfOfRest(Arc<Pool>),
    /// What others leave in a pool.
    Rest(Arc<Pool>),
}

/// Something that somebody may have so much of.
#[derive(Debug)]
pub(super) struct Gauge {
    /// Of a pool's, it changes while the pool is locked.
    used: AtomicUsize,
    bound: Bound,
}

impl Gauge {
    fn new(bound: Bound) -> Arc<Self> {
        Arc::new(Self { used: AtomicUsize::new(0), bound })
    }

    /// Takes `count`; nothing if there are fewer left.
    pub fn take(self: &Arc<Self>, count: usize) -> Option<Taken> {
        let mut taken = Taken { gauge: self.clone(), count: 0 };
        taken.resize(count).then_some(taken)
    }

    /// Counts `new` where `old` was; whether there is so much. Less than before is always there.
    fn change(&self, old: usize, new: usize) -> bool {
        let (pool, parts) = match &self.bound {
            Bound::Fixed(max) => {
                let change = |used: usize| (used - old).checked_add(new).filter(|used| used <= max);
                let order = Ordering::Relaxed;
                return self.used.fetch_update(order, order, change).is_ok();
            }
            Bound::HalfOfRest(pool) => (pool, 2),
            Bound::Rest(pool) => (pool, 1),
        };
        let mut used_by_all = pool.used();
        let used = self.used.load(Ordering::Relaxed);
        let of_others = *used_by_all - used;
        let Some(wanted) = (used - old).checked_add(new) else { return false };
        if new > old && wanted > (pool.max - of_others) / parts {
            return false;
        }
        self.used.store(wanted, Ordering::Relaxed);
        *used_by_all = of_others + wanted;
        true
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
        let is_changed = self.gauge.change(self.count, count);
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

/// What all sandboxes of a process have together.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    descriptors: Arc<Pool>,
    listings: Arc<Pool>,
}

impl Shared {
    pub fn new(descriptors: usize, listings: usize) -> Self {
        Self { descriptors: Pool::new(descriptors), listings: Pool::new(listings) }
    }

    /// That of this process.
    fn of_this_process() -> &'static Self {
        static ALL: LazyLock<Shared> = LazyLock::new(|| {
            let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
            Shared::new(volume_descriptors(limit) as usize, LISTINGS_OF_ALL_MAX)
        });
        &ALL
    }

    /// What a tenant has of it.
    pub fn of_tenant(&self) -> VolumeShare {
        self.share(Bound::HalfOfRest)
    }

    fn share(&self, bound: impl Fn(Arc<Pool>) -> Bound) -> VolumeShare {
        VolumeShare {
            descriptors: Gauge::new(bound(self.descriptors.clone())),
            listings: Gauge::new(bound(self.listings.clone())),
        }
    }
}

/// What the sandboxes of one tenant may make this process keep for volumes together: half of what
/// others leave.
#[derive(Clone, Debug)]
pub struct VolumeShare {
    pub(super) descriptors: Arc<Gauge>,
    pub(super) listings: Arc<Gauge>,
}

impl Default for VolumeShare {
    fn default() -> Self {
        Shared::of_this_process().of_tenant()
    }
}

impl VolumeShare {
    /// For the sandbox of a process that has no others: all that there is.
    pub fn whole() -> Self {
        Shared::of_this_process().share(Bound::Rest)
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
        Self {
            open: Gauge::new(Bound::Fixed(OPEN_MAX)),
            ranges: Gauge::new(Bound::Fixed(RANGES_MAX)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_takes_half_of_what_others_leave() {
        let shared = Shared::new(100, 0);
        let (one, two) = (shared.of_tenant().descriptors, shared.of_tenant().descriptors);
        assert!(one.take(51).is_none());
        let mut first = one.take(30).unwrap();
        let second = one.take(20).unwrap();
        assert!(one.take(1).is_none());
        assert!(two.take(26).is_none());
        let others = two.take(25).unwrap();
        // What one has beyond its share by now, it keeps, and it may have less.
        assert!(one.take(1).is_none() && first.resize(29) && !first.resize(30));
        drop((first, second, others));
        assert_eq!(*shared.descriptors.used(), 0);
        assert!(two.take(50).is_some());
    }

    #[test]
    fn descriptors_of_volumes_are_a_part_of_those_of_the_process() {
        for (limit, expected) in
            [(256, 512), (1024, 512), (16_384, 1024), (65_536, 4096), (u64::MAX, 4096)]
        {
            assert_eq!(volume_descriptors(limit), expected, "{limit}");
        }
    }
}
