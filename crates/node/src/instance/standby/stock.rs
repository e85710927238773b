//! What is there for the next boots.

use super::policy::BootPolicy;
use crate::logs::{InstanceLog, InstancePipes};
use crate::tenants::Lease;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thaw_sandbox::{ReadySandbox, Template};

/// After this long without a boot that found nothing ready, one instance fewer
/// is kept.
const DECAY: Duration = Duration::from_secs(10);
/// Copies that a template has forked ahead: a fork that somebody waits for takes three times
/// as long, and at times milliseconds, since the host has a new process wait for its turn.
const FORKED_AHEAD: usize = 1;

/// An instance that was booted ahead.
pub(super) struct Ready {
    pub held: ReadySandbox,
    pub log: InstanceLog,
    /// Its share of what the tenant may have, unless a boot that is about to use it has
    /// taken it.
    pub lease: Option<Lease>,
    /// Processor time that it had had when it was put back, if that counts.
    pub time: Option<Duration>,
}

/// A copy that a template has forked ahead.
pub(super) struct Forked {
    pub held: ReadySandbox,
    /// For its output, which it gets with its connection.
    pub pipes: InstancePipes,
    /// As that of [`Ready`].
    pub lease: Option<Lease>,
}

/// A template and its share of what the tenant may have.
pub(super) struct Leased {
    pub template: Arc<Template>,
    pub lease: Lease,
}

/// All of it, and how much of it is wanted.
pub(super) struct Stock {
    pub ready: VecDeque<Ready>,
    /// Instances to be kept, adjusted by demand.
    pub target: usize,
    /// When a boot last found nothing, or the target last fell.
    pub changed: Instant,
    pub template: Option<Leased>,
    /// Of this template, and of the one before.
    pub forked: VecDeque<Forked>,
    /// One of them was taken, and nobody has been told so.
    pub forked_was_taken: bool,
    /// Not before then is another template tried, or a copy forked ahead.
    pub template_after: Option<Instant>,
    /// There are no boots any more.
    pub closed: bool,
}

impl Stock {
    /// Nothing yet.
    pub fn new(policy: BootPolicy) -> Self {
        Self {
            ready: VecDeque::new(),
            target: policy.least(),
            changed: Instant::now(),
            template: None,
            forked: VecDeque::new(),
            forked_was_taken: false,
            template_after: None,
            closed: false,
        }
    }

    /// An instance that is ready. Notes the demand if there is none, and none comes back.
    pub fn take(&mut self, policy: BootPolicy, comes_back: bool) -> Option<Ready> {
        // One that was put back just now has its memory in the processor's caches.
        let next = match policy.rewind {
            Some(_) => VecDeque::pop_back,
            None => VecDeque::pop_front,
        };
        while let Some(ready) = next(&mut self.ready) {
            if !ready.held.has_ended() {
                return Some(ready);
            }
        }
        if comes_back {
            return None;
        }
        // Somebody may be booting until the target is reached: it must not run
        // away from them while boots find nothing. Instances that come back serve many
        // requests, so one is enough for each that found none.
        let more = match policy.rewind {
            Some(_) => self.target.saturating_add(1),
            None => self.target.saturating_mul(2),
        };
        self.target = more.clamp(policy.least(), policy.most());
        self.changed = Instant::now();
        None
    }

    /// Adjusts the target, and returns what is not wanted any more.
    pub fn prune(&mut self, policy: BootPolicy, lease: impl Fn() -> Option<Lease>) -> Vec<Ready> {
        if self.changed.elapsed() > DECAY {
            self.target = self.target.saturating_sub(1);
            self.changed = Instant::now();
        }
        self.target = self.target.clamp(policy.least(), policy.most());
        let (mut keep, mut surplus) = (VecDeque::new(), Vec::new());
        // The newest are at the end.
        for mut ready in self.ready.drain(..).rev() {
            // A boot that has taken its room may have failed.
            ready.lease = ready.lease.or_else(&lease);
            let may_stay = !ready.held.has_ended() && ready.lease.is_some();
            if may_stay && keep.len() < self.target {
                keep.push_front(ready);
            } else {
                surplus.push(ready);
            }
        }
        self.ready = keep;
        surplus
    }

    /// Whether there are fewer instances of `plan` than there should be, with those that are
    /// lent.
    pub fn wants_more(&self, plan: &Arc<thaw_sandbox::BootPlan>, lent: usize) -> bool {
        let fresh = self.ready.iter().filter(|ready| Arc::ptr_eq(ready.held.plan(), plan)).count();
        !self.closed && fresh + lent < self.target
    }

    /// Puts a template in the place of another one, whose room it has without a lease of its
    /// own. Returns what is to be ended: itself if nobody wants it, or there is no room.
    pub fn put_template(
        &mut self,
        template: Arc<Template>,
        lease: Option<Lease>,
    ) -> Option<Arc<Template>> {
        let old = self.template.take();
        let (old, freed) = old.map(|old| (old.template, old.lease)).unzip();
        match lease.or(freed) {
            Some(lease) if !self.closed && !lease.is_beyond_quota() => {
                self.template = Some(Leased { template, lease });
                old
            }
            _ => Some(template),
        }
    }

    /// A copy that was forked ahead.
    pub fn take_forked(&mut self) -> Option<Forked> {
        while let Some(forked) = self.forked.pop_front() {
            self.forked_was_taken = true;
            if !forked.held.has_ended() {
                return Some(forked);
            }
        }
        None
    }

    /// Whether there are fewer copies ahead of this template than there should be. One that
    /// was given up meanwhile gets no more.
    pub fn wants_forked(&self, template: &Arc<Template>) -> bool {
        let is_current =
            self.template.as_ref().is_some_and(|leased| Arc::ptr_eq(&leased.template, template));
        !self.closed && is_current && self.forked.len() < FORKED_AHEAD
    }

    /// Takes the copies out that have ended, are of another plan, or have no room.
    pub fn prune_forked(
        &mut self,
        plan: &Arc<thaw_sandbox::BootPlan>,
        lease: impl Fn() -> Option<Lease>,
    ) -> Vec<Forked> {
        let (mut keep, mut surplus) = (VecDeque::new(), Vec::new());
        for mut forked in self.forked.drain(..) {
            // A boot that has taken its room may have failed.
            forked.lease = forked.lease.or_else(&lease);
            let is_fresh = Arc::ptr_eq(forked.held.plan(), plan) && !forked.held.has_ended();
            if is_fresh && forked.lease.is_some() {
                keep.push_back(forked);
            } else {
                surplus.push(forked);
            }
        }
        self.forked = keep;
        surplus
    }

    /// Adds a copy that was forked ahead; returns it if nobody wants it, or the quota was
    /// lowered meanwhile.
    pub fn add_forked(&mut self, forked: Forked) -> Option<Forked> {
        if self.closed || forked.lease.as_ref().is_some_and(Lease::is_beyond_quota) {
            return Some(forked);
        }
        self.forked.push_back(forked);
        None
    }

    /// Adds an instance; returns the one that it replaces, or itself if nobody wants it, or
    /// the quota was lowered while it was booted.
    pub fn add(&mut self, ready: Ready) -> Option<Ready> {
        if self.closed || ready.lease.as_ref().is_some_and(Lease::is_beyond_quota) {
            return Some(ready);
        }
        self.ready.push_back(ready);
        if self.ready.len() > self.target { self.ready.pop_front() } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::super::policy::GROWTH_MAX;
    use super::*;

    #[test]
    fn demand_raises_the_target_only_so_far() {
        let policy = BootPolicy { ready: 3, rewind: None, template: false, automatic: true };
        let mut stock = Stock::new(policy);
        assert!(stock.take(policy, false).is_none());
        assert_eq!(stock.target, 6);
        // What is being put back will do.
        assert!(stock.take(policy, true).is_none());
        assert_eq!(stock.target, 6);
        for _ in 0..100 {
            assert!(stock.take(policy, false).is_none());
        }
        assert_eq!(stock.target, 3 * GROWTH_MAX);
    }
}
