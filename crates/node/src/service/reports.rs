//! What supervisors report of their instances, and what follows from it: who waits hears of free
//! places, and a function whose instances crash backs off.

use super::Service;
use crate::asleep::Asleep;
use crate::boots::BootRecord;
use crate::health::Verdict;
use crate::instance::{Change, End, LimitSetting};
use crate::remote::Execs;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thaw_home::clock::monotonic_ns;
use thaw_home::config::{ByteSize, EntryKind};
use thaw_sandbox::LimitReached;

impl Service {
    /// A boot is complete.
    pub(crate) fn booted(&self, boot: BootRecord) {
        let id = boot.instance;
        self.shared.booted(boot);
        self.is_up(id);
    }

    /// An instance that was booted for no client runs.
    pub(crate) fn came_up(&self, id: u64) {
        self.is_up(id);
        self.changed.notify_waiters();
    }

    /// An instance runs, perhaps after its client has gone: whoever waits can end it now.
    fn is_up(&self, id: u64) {
        let is_idle = self.slots().get_mut(&id).is_some_and(|slot| {
            slot.change(Change::Booted { connections: slot.connections });
            slot.state.is_idle()
        });
        if is_idle {
            self.place_freed(id, true);
        }
    }

    /// An instance whose boot is known has answered.
    pub(crate) fn answered(&self, boot: &BootRecord) {
        self.shared.answered(boot);
    }

    /// The egress policy has denied connections of an instance.
    pub(crate) fn count_egress(&self, made: u64, denied: u64) {
        self.shared.metrics().egress(self.name(), made, denied);
    }

    /// A process of one of its sandboxes was ended, since the memory of that was used up.
    pub(crate) fn count_oom_kill(&self) {
        self.shared.metrics().oom_kill(self.name());
    }

    /// Whether no instance of the function has looked for a program of this name in vain before, and few
    /// others were looked for.
    pub(crate) fn is_first_lack_of(&self, program: &str) -> bool {
        self.missing_programs.is_news(program)
    }

    /// An instance has lost a connection.
    pub(crate) fn disconnected(&self, id: u64) {
        let mut slots = self.slots();
        let Some(slot) = slots.get_mut(&id) else { return };
        let is_idle = slot.disconnected();
        slots.perhaps_free.insert(id);
        drop(slots);
        self.place_freed(id, is_idle);
    }

    /// An instance has come with places that are free: whoever waits for it, or for another one, finds
    /// them.
    pub(super) fn places_came(&self) {
        self.changed.notify_waiters();
        self.freed.notify_waiters();
    }

    /// A place of an instance is free; perhaps it has no other work.
    pub(super) fn place_freed(&self, id: u64, is_idle: bool) {
        self.changed.notify_one();
        self.freed.notify_waiters();
        if !is_idle {
            return;
        }
        if self.is_retired() {
            self.evict_retired(id);
        } else if self.evict_beyond_quota(id) {
            // The quota was lowered while it was busy.
        } else {
            self.tenant.room().stir();
            self.shared.instance_is_idle();
        }
    }

    /// Since when an instance has been idle, if it is.
    pub(crate) fn idle_since(&self, id: u64) -> Option<Instant> {
        self.slots().get(&id)?.idle_since
    }

    /// An instance is gone, which was just woken from sleep or not. Gives what there is to say if
    /// nobody has expected that.
    pub(crate) fn remove(
        &self,
        id: u64,
        end: &End,
        woken_from: Option<Arc<Asleep>>,
        execs: &Arc<Execs>,
    ) -> Option<String> {
        let (slot, sleeps_on, was_woken, was_held) = {
            // It is never in none of both lists for anybody who looks.
            let mut slots = self.slots();
            let slot = slots.remove(&id);
            let is_unwanted = slot.as_ref().is_some_and(|slot| slot.is_unwanted);
            let woken_from = woken_from.filter(|_| !is_unwanted);
            let was_woken = woken_from.is_some();
            let sleeps_on =
                woken_from.is_some_and(|asleep| self.sleeps_on(&mut slots, asleep, execs, end));
            let was_held = !sleeps_on && slots.held.remove(&id);
            (slot, sleeps_on, was_woken, was_held)
        };
        if !sleeps_on {
            // Whoever learns of the end finds this, too.
            execs.close();
            self.shared.is_gone(id, was_held);
        }
        if was_woken {
            self.did_not_wake(id, sleeps_on, end);
        }
        // A program that has read its standard input ends; how is its client's matter.
        let has_done_its_work =
            self.config.entry.kind == EntryKind::Stdin && matches!(end, End::Exited(_));
        // The failures of its connections are counted one by one.
        let is_unnoticed = slot.as_ref().is_none_or(|slot| slot.connections == 0);
        let was_told = slot.is_none_or(|slot| !slot.state.takes_connections() && !slot.is_lost);
        let expected = was_told || has_done_its_work;
        let unexpected = (!expected).then(|| end.to_string());
        if let Some(why) = &unexpected {
            tracing::warn!(function = %self.name(), instance = id, "an instance ended: {why}");
        }
        self.shared.ended(self.name(), expected);
        if !expected && end.is_crash() {
            self.crashed();
            if is_unnoticed {
                self.note(Verdict::Failed);
            }
        }
        self.freed.notify_waiters();
        self.changed.notify_waiters();
        unexpected
    }

    /// Which setting an instance had for a limit, and its value.
    pub(crate) fn setting_of(&self, id: u64, limit: LimitReached) -> Option<LimitSetting> {
        match limit {
            LimitReached::Memory => Some(LimitSetting::Memory(ByteSize(self.limits_of(id).memory))),
            LimitReached::CpuTime => self.config.limits.cpu_time.map(LimitSetting::CpuTime),
        }
    }

    /// How long the function still backs off after many crashes, if it does.
    pub fn backs_off(&self) -> Option<Duration> {
        self.crashes.backs_off(monotonic_ns())
    }

    fn crashed(&self) {
        let Some(backoff) = self.crashes.note(monotonic_ns()) else { return };
        tracing::warn!(
            function = %self.name(),
            "{} instances crashed within a minute; the function backs off for {} s and is frozen anew",
            self.config.limits.crashes,
            backoff.as_secs()
        );
        self.shared.metrics().backed_off(self.name());
        self.shared.refreshes().want(self.name().clone(), self.version);
    }

    /// The function has been frozen anew: whoever was guessing its addresses begins again.
    pub(crate) fn end_backoff(&self) {
        self.crashes.end_backoff();
    }
}
