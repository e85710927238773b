//! The end of a version that is served no longer: what it serves may go on for a while.

use super::Service;
use crate::clock::monotonic_ns;
use crate::health::{Requests, Verdict};
use crate::instance::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// How often it is looked whether there is somebody to serve.
const LOOK: Duration = Duration::from_millis(100);

impl Service {
    /// Whether it is served no longer.
    pub(crate) fn is_retired(&self) -> bool {
        self.retired.load(SeqCst)
    }

    /// It is served no longer: its idle instances end now, each other one when it has answered
    /// and its connections are idle.
    pub(crate) fn retire_from_service(&self) {
        self.retired.store(true, SeqCst);
        self.end_sleep();
        self.retire_step();
    }

    /// Ends what is idle, and has connections that were handed over end as soon as they are.
    fn retire_step(&self) {
        self.retire_all();
        for slot in self.slots().values() {
            slot.table.tell(Command::Retire);
        }
    }

    /// Follows a service that was retired to its end, which comes after the function's `limits.drain`
    /// at the latest. `is_held` says whether somebody else may begin something on it.
    pub(crate) async fn wind_up(self: Arc<Self>, is_held: impl Fn(&Arc<Self>) -> bool) {
        let deadline = Instant::now() + self.config.limits.drain.0;
        let mut is_told = false;
        while self.instance_count() > 0 || is_held(&self) {
            sleep(LOOK).await;
            self.retire_step();
            if Instant::now() >= deadline {
                let ended = self.kill_all();
                if ended > 0 && !std::mem::replace(&mut is_told, true) {
                    let (function, version) = (self.name(), self.version);
                    let drain = self.config.limits.drain;
                    tracing::info!(%function, version, "ended {ended} instances that were still busy {drain} after their version was replaced or removed");
                }
            }
        }
    }

    /// An instance has become idle, which nobody wants any more.
    pub(super) fn evict_retired(&self, id: u64) {
        if self.retire_if_idle(id)
            && let Some(slot) = self.slots().get(&id)
        {
            slot.table.tell(Command::End);
        }
    }

    /// How many requests it has had, and how many failed, since it is served here.
    pub fn requests(&self) -> Requests {
        self.health.total()
    }

    /// Counts the failures of a version from nothing: all requests go to it from now on.
    pub(crate) fn watch_anew(&self) {
        self.health.begin_anew();
    }

    /// It could not be taken out of service, which is tried again while its requests fail.
    pub(crate) fn report_again(&self) {
        self.health.say_again(monotonic_ns());
    }

    /// Notes what became of a request.
    pub(crate) fn note(&self, verdict: Verdict) {
        if let Some(reason) = self.health.note(verdict, monotonic_ns())
            && !self.is_retired()
        {
            self.shared.failures().report(self.name().clone(), self.version, reason);
        }
    }
}
