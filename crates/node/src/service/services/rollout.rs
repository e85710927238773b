//! Which version of a function gets a request.

use crate::service::Service;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use thaw_store::HeaderRule;

/// A function that is served: the version that gets its requests, and those that get a share.
#[derive(Clone)]
pub struct Served {
    active: Arc<Service>,
    split: Option<Arc<Split>>,
}

/// The share of a version that is not the active one.
pub struct ShareOf {
    /// The version.
    pub service: Arc<Service>,
    /// Of a hundred requests so many.
    pub percent: u8,
    /// Requests with this header go there in any case.
    pub header: Option<HeaderRule>,
}

struct Split {
    shares: Vec<ShareOf>,
    /// Requests that were given to a version by chance.
    chosen: AtomicU64,
}

impl Served {
    /// A function with one version.
    pub fn whole(active: Arc<Service>) -> Self {
        Self { active, split: None }
    }

    /// The same with shares for others, which are 100 percent together at most.
    pub fn split(active: Arc<Service>, shares: Vec<ShareOf>) -> Self {
        let split = Split { shares, chosen: AtomicU64::new(0) };
        let split = (!split.shares.is_empty()).then(|| Arc::new(split));
        Self { active, split }
    }

    /// The version that gets what the others leave.
    pub fn active(&self) -> &Arc<Service> {
        &self.active
    }

    /// All versions that get requests, the active one first.
    pub fn services(&self) -> impl Iterator<Item = &Arc<Service>> {
        [&self.active].into_iter().chain(self.shares().iter().map(|share| &share.service))
    }

    /// The versions beside the active one, with what they get: percents, and a header.
    pub(crate) fn portions(&self) -> impl Iterator<Item = (u32, u8, &Option<HeaderRule>)> {
        let shares = self.shares().iter();
        shares.map(|share| (share.service.version(), share.percent, &share.header))
    }

    /// Whether the headers of a request matter.
    pub(crate) fn looks_at_headers(&self) -> bool {
        self.shares().iter().any(|share| share.header.is_some())
    }

    /// The version for a request of which `has` knows whether it has a header: by that, or else
    /// by chance.
    pub(crate) fn choose(&self, has: impl Fn(&HeaderRule) -> bool) -> Arc<Service> {
        let Some(split) = &self.split else { return self.active.clone() };
        let by_header = |share: &&ShareOf| share.header.as_ref().is_some_and(&has);
        let by_header = split.shares.iter().find(by_header);
        by_header.map_or_else(|| self.by_chance(split), |share| share.service.clone())
    }

    fn by_chance(&self, split: &Split) -> Arc<Service> {
        let mut drawn = mix(split.chosen.fetch_add(1, Relaxed)) % 100;
        for share in &split.shares {
            match drawn.checked_sub(u64::from(share.percent)) {
                None => return share.service.clone(),
                Some(rest) => drawn = rest,
            }
        }
        self.active.clone()
    }

    fn shares(&self) -> &[ShareOf] {
        self.split.as_ref().map_or(&[], |split| &split.shares)
    }
}

/// A number that looks drawn by chance, of each count another one: splitmix64 (Steele, Lea and
/// Flood, "Fast splittable pseudorandom number generators", 2014). Two clients that take turns
/// do not get a version each.
fn mix(count: u64) -> u64 {
    let mut z = count.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_even() {
        let mut hits = [0_u32; 100];
        (0..100_000).for_each(|count| hits[(mix(count) % 100) as usize] += 1);
        // Six standard deviations of a binomial distribution with p = 1/100.
        assert!(hits.iter().all(|hits| (811..1189).contains(hits)), "{hits:?}");
    }
}
