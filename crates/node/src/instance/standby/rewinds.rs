//! Instances that are put back into the state before their request.

use super::super::launch::RewindInfo;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use thaw_sandbox::RewindError;

/// Counts an instance that runs and will be ready again, until it is, or has ended.
pub(in crate::instance) struct Lent {
    pub count: Arc<AtomicUsize>,
    /// Processor time that it had had when it was put back; `None`: it is new.
    pub time: Option<Duration>,
}

impl Lent {
    pub fn new(count: &Arc<AtomicUsize>, time: Option<Duration>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self { count: count.clone(), time }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What became of the instances that were to be put back.
#[derive(Default)]
pub(super) struct Rewinds {
    pub under_way: AtomicU64,
    pub done: AtomicU64,
    pub refusals: Mutex<Refusals>,
}

/// The instances that could not be put back.
#[derive(Default)]
pub(super) struct Refusals {
    pub by_reason: BTreeMap<&'static str, u64>,
    pub last: Option<String>,
}

impl Rewinds {
    pub fn refuse(&self, error: &RewindError) {
        let mut refusals = self.refusals.lock().expect("no holder panics");
        *refusals.by_reason.entry(error.reason().name()).or_default() += 1;
        refusals.last = Some(error.to_string());
    }

    pub fn info(&self, lent: usize) -> RewindInfo {
        let refusals = self.refusals.lock().expect("no holder panics");
        let reasons = refusals.by_reason.iter().map(|(name, count)| ((*name).to_owned(), *count));
        RewindInfo {
            under_way: self.under_way.load(Ordering::Acquire),
            done: self.done.load(Ordering::Relaxed),
            lent: lent as u64,
            refused: refusals.by_reason.values().sum(),
            reasons: reasons.collect(),
            last_refusal: refusals.last.clone(),
            measured: None,
        }
    }
}
