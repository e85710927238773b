//! The end of a version that is served no longer: what it serves may go on for a while, and its
//! sandboxes until they are told to end.

use super::{Service, Slot, Slots};
use crate::health::{Requests, Verdict};
use crate::instance::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use thaw_home::clock::monotonic_ns;
use tokio::time::{Instant, sleep};

/// How often it is looked whether there is somebody to serve.
const LOOK: Duration = Duration::from_millis(100);

impl Service {
    /// Whether it is served no longer.
    pub(crate) fn is_retired(&self) -> bool {
        self.retired.load(SeqCst)
    }

    /// It is served no longer: its idle instances end now, each other one when it has answered
    /// and its connections are idle. Its sandboxes stay.
    pub(crate) fn retire_from_service(&self) {
        self.retired.store(true, SeqCst);
        self.retire_step();
    }

    /// Its function is gone: its sandboxes are instances as all others.
    pub(crate) fn hold_none(&self) {
        let mut slots = self.slots();
        slots.holds_none = true;
        let held = std::mem::take(&mut slots.held);
        drop(slots);
        // They end as all others do, and nobody tells that they were sandboxes.
        held.into_iter().for_each(|id| self.shared.departs(id));
    }

    /// Ends what is idle, and has connections that were handed over end as soon as they are.
    fn retire_step(&self) {
        self.retire_others();
        let mut slots = self.slots();
        for slot in slots.others() {
            slot.table.tell(Command::Retire);
        }
    }

    /// Ends all instances but sandboxes: idle ones and those that are asleep now, and every other
    /// one after its last connection.
    pub(crate) fn retire_others(&self) {
        self.end_others_asleep();
        self.slots().others().for_each(Slot::retire);
    }

    /// Ends all instances but sandboxes, whatever they do; how many there are.
    fn kill_others(&self) -> usize {
        let mut slots = self.slots();
        let mut ended = 0;
        for slot in slots.others() {
            slot.end();
            slot.table.tell(Command::End);
            ended += 1;
        }
        ended
    }

    /// The numbers of live instances that are no sandboxes.
    pub(crate) fn ids_of_others(&self) -> Vec<u64> {
        let slots = self.slots();
        slots.all.keys().copied().filter(|id| !slots.held.contains(id)).collect()
    }

    /// How many sandboxes it has, those included that are asleep.
    pub(crate) fn held_count(&self) -> usize {
        let slots = self.slots();
        slots.held.iter().filter(|id| slots.contains_key(id) || slots.asleep.contains(**id)).count()
    }

    /// Follows a service that was retired to its end, which comes after the function's `limits.drain`
    /// at the latest, or with its last sandbox. `is_in_use` says whether somebody else may begin
    /// something on it.
    pub(crate) async fn wind_up(self: Arc<Self>, is_in_use: impl Fn(&Arc<Self>) -> bool) {
        let deadline = Instant::now() + self.config.limits.drain.0;
        let mut is_told = false;
        while self.instance_count() + self.asleep_count() > 0 || is_in_use(&self) {
            sleep(LOOK).await;
            self.retire_step();
            if Instant::now() >= deadline {
                let ended = self.kill_others();
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
            slot.table.tell(Command::Stop);
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
    pub fn report_again(&self) {
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

impl Slots {
    /// The live instances that are no sandboxes.
    pub(super) fn others(&mut self) -> impl Iterator<Item = &mut Slot> {
        let Self { all, held, .. } = self;
        all.iter_mut().filter(|(id, _)| !held.contains(id)).map(|(_, slot)| slot)
    }
}
