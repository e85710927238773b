//! What this daemon cannot leave to the next one: its monitor keeps so much and no more.

use std::sync::Arc;
use std::time::Duration;
use thaw_sandbox::monitor::MonitorLink;
use tokio::time::{Instant, MissedTickBehavior, interval};

/// How often it is looked whether the monitor has refused something.
const LOOK: Duration = Duration::from_secs(1);
/// After so long without a refusal, the next one is said again.
const QUIET: Duration = Duration::from_secs(60);

/// Says when the monitor begins to refuse what is to outlive this daemon, until the task is
/// dropped.
pub async fn watch_refusals(link: Arc<MonitorLink>) {
    let mut refusals = Refusals::default();
    let mut ticks = interval(LOOK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let now = ticks.tick().await;
        if let Some(new) = refusals.begin(link.refusals(), now) {
            tracing::warn!(
                new,
                "the monitor did not keep everything for the next daemon, so instances or \
                 connections would end with this one; raise the monitor's limit of open files \
                 (`ulimit -Hn`, or `LimitNOFILE=` in its unit), of which it may use half"
            );
        }
    }
}

/// What is known of refusals.
#[derive(Debug, Default)]
struct Refusals {
    total: u64,
    last: Option<Instant>,
}

impl Refusals {
    /// How many are new, if they are the first for some time.
    fn begin(&mut self, total: u64, now: Instant) -> Option<u64> {
        let new = total.checked_sub(self.total).filter(|&new| new > 0)?;
        let is_first = self.last.is_none_or(|last| now.duration_since(last) >= QUIET);
        (self.total, self.last) = (total, Some(now));
        is_first.then_some(new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_said_when_they_begin() {
        let mut refusals = Refusals::default();
        let begin = Instant::now();
        let mut at = |seconds, total| refusals.begin(total, begin + Duration::from_secs(seconds));
        assert_eq!([at(0, 0), at(1, 0)], [None; 2]);
        assert_eq!(at(2, 3), Some(3));
        // They go on for longer than a minute, and are said once.
        assert!((3..100).all(|second| at(second, second + 1).is_none()));
        assert_eq!([at(100, 100), at(159, 100)], [None; 2]);
        assert_eq!(at(160, 107), Some(7));
    }
}
