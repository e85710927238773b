//! Hibernation: when an instance gives up its memory, and who hears of it.

use super::{IDLE_CHECK_MIN, Supervisor, idle_check};
use crate::instance::{
    HibernateReply, HibernatedInstance, HibernationTerms, PauseReply, SwapStorage, WakeReply,
};
use std::time::Duration;
use thaw_sandbox::{Awake, AwakeCause, Timers};
use tokio::sync::oneshot;
use tokio::time::Instant;

/// How long until it is tried again to hibernate an instance.
const HIBERNATE_AGAIN: Duration = Duration::from_millis(100);
/// The same after it has failed.
const HIBERNATE_AFTER_FAILURE: Duration = Duration::from_secs(60);
/// The same at most, for one that is paused and has failed again and again.
const HIBERNATE_KEPT_MAX: Duration = Duration::from_secs(30 * 60);
/// How long it may take to come to rest: longer than anybody waits for it.
const REST_MAX: Duration = Duration::from_secs(75);
/// CPU time that an instance at rest may have used since it has said so. One that has used more
/// has woken.
const USED_AT_REST_MAX: Duration = Duration::from_millis(5);

/// Whether an instance is awake, as its supervisor knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sleep {
    Awake,
    /// It was asked to give up its memory.
    Begun,
    /// Nothing in it runs, and its memory is being written.
    Resting,
    /// The same, and somebody has paused it: if its memory cannot be written, it rests with it.
    Paused,
    /// It is paused, and its memory could not be written.
    Kept,
    Hibernated,
}

impl Sleep {
    /// Whether its memory is being written, or is to be.
    pub fn is_under_way(self) -> bool {
        matches!(self, Self::Begun | Self::Resting | Self::Paused)
    }

    /// Whether somebody has paused it, and it has its memory.
    pub fn is_paused(self) -> bool {
        matches!(self, Self::Paused | Self::Kept)
    }

    /// Whether it has said that nothing in it runs. It may have woken since.
    fn has_rested(self) -> bool {
        matches!(self, Self::Resting | Self::Paused | Self::Kept | Self::Hibernated)
    }
}

impl Supervisor {
    /// Whether it has its memory, and was not asked to give it up.
    pub(super) fn is_awake(&self) -> bool {
        self.sleep == Sleep::Awake
    }

    /// Has an instance that is idle `since` then give up its memory if it is time. When to look
    /// again.
    pub(super) fn hibernate_if_idle(
        &mut self,
        since: std::time::Instant,
        now: Instant,
    ) -> Option<Instant> {
        let after = self.service.config().limits.hibernate_after?.0;
        if self.sleep != Sleep::Awake || self.rest.is_some() {
            // Only a request changes that, and then the time begins anew.
            return Some(now + after.max(IDLE_CHECK_MIN));
        }
        let due = Instant::from_std(since + after);
        let due = self.hibernate_not_before.map_or(due, |not_before| due.max(not_before));
        if due > now {
            return Some(due);
        }
        match self.begin_hibernation() {
            Ok(()) => Some(now + after.max(IDLE_CHECK_MIN)),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                Some(now + HIBERNATE_AGAIN)
            }
            Err(error) => {
                self.not_hibernated(&error.to_string());
                self.hibernate_not_before
            }
        }
    }

    /// Has the instance give up its memory now, unless that has failed a short while ago.
    pub(super) fn relieve(&mut self, now: Instant) {
        if self.sleep != Sleep::Awake {
            // One that is paused is written, or tried again later.
            return;
        }
        if self.hibernate_not_before.is_some_and(|not_before| not_before > now) {
            // It cannot hibernate now; perhaps it may sleep.
            if self.service.config().limits.sleep_after.is_some() {
                self.make_room(now);
            }
            return;
        }
        match self.begin_hibernation() {
            // Where there are many, some wait for their turn.
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => self.not_hibernated(&error.to_string()),
            Ok(()) => {}
        }
    }

    pub(super) fn begin_hibernation(&mut self) -> std::io::Result<()> {
        if self.twin.is_some() || self.rest.is_some() {
            // It has memory in the swap file that would be replaced, or is to stay at rest.
            return Err(std::io::ErrorKind::WouldBlock.into());
        }
        if self.service.shared().is_leaving() {
            // The next daemon would not know that it is on the way.
            return Err(std::io::ErrorKind::WouldBlock.into());
        }
        if self.health.cancel() {
            // The end of the probe would wake it.
            return Err(std::io::ErrorKind::WouldBlock.into());
        }
        let space = self.service.shared().swap_space().ok_or_else(|| {
            std::io::Error::other("this daemon has no directory for swap files; see its log")
        })?;
        let terms = HibernationTerms {
            space,
            room: self.service.tenant().swap().clone(),
            tenant: self.service.tenant().clone(),
            max_stored: self.place.lease.memory(),
            timers: match self.service.config().hibernate.timers {
                true => Timers::Wake,
                false => Timers::Wait,
            },
            storage: self.storage(),
        };
        self.instance.hibernate(terms)?;
        if self.sleep == Sleep::Kept {
            // It rests already.
            self.sleep = Sleep::Paused;
        } else {
            self.sleep = Sleep::Begun;
            self.is_disturbed = false;
            self.rests_until = Some(Instant::now() + REST_MAX);
        }
        Ok(())
    }

    /// How its memory lies on disk.
    pub(super) fn storage(&self) -> SwapStorage {
        let wanted = self.service.config().hibernate;
        match wanted.encrypt || self.instance.owner_key().is_some() {
            true => SwapStorage::Encrypted,
            false if wanted.verify => SwapStorage::Verified,
            false => SwapStorage::Plain,
        }
    }

    pub(super) fn hibernate_for(&mut self, reply: HibernateReply) {
        self.hibernate.push(reply);
        self.hibernate_if_wanted();
    }

    /// Has the instance come to rest for somebody who waits for that only, and give up its memory
    /// then.
    pub(super) fn pause_for(&mut self, reply: PauseReply) {
        self.pauses.push(reply);
        if !self.is_known_to_rest() {
            return self.rest_anew();
        }
        match self.sleep {
            Sleep::Resting => self.paused(),
            _ => self.answer_pauses(&Ok(())),
        }
    }

    /// Whether the instance has come to rest, and nothing can have woken it since. It says that it
    /// is awake only when it answers or waits for the first time.
    fn is_known_to_rest(&self) -> bool {
        let is_left_alone = !self.is_disturbed
            && self.ring_at.is_none()
            && self.wake.is_empty()
            && self.rest.is_none()
            && self.twin.is_none()
            && !self.sleepiness.is_asked();
        let has_clients =
            self.connections.execs().in_use() || self.service.idle_since(self.id).is_none();
        self.sleep.has_rested() && is_left_alone && !has_clients && self.has_not_run()
    }

    /// Whether it has used no CPU time since it has rested: its own timers and connections wake it,
    /// too. Where nobody counts that, nobody knows.
    fn has_not_run(&self) -> bool {
        let used = self.used_at_rest.zip(self.instance.cpu_time());
        used.is_some_and(|(then, now)| now.saturating_sub(then) <= USED_AT_REST_MAX)
    }

    /// Asks the instance to come to rest, whether it was asked before or not: only an answer to the
    /// new question says that nothing has woken it. One that has given up its memory, or is about
    /// to, says first that it has it back.
    fn rest_anew(&mut self) {
        self.is_disturbed = true;
        if let Err(error) = self.instance.wake() {
            return self.answer_pauses(&Err(format!("it has ended ({error})")));
        }
        if self.sleep != Sleep::Hibernated {
            self.goes_on();
        }
        self.hibernate_if_wanted();
    }

    /// The instance, which has its memory, was told to go on.
    fn goes_on(&mut self) {
        if std::mem::replace(&mut self.sleep, Sleep::Awake).is_paused() {
            self.unpaused();
        }
    }

    fn unpaused(&mut self) {
        self.times_kept = 0;
        let soon = Instant::now() + HIBERNATE_AFTER_FAILURE;
        self.hibernate_not_before = self.hibernate_not_before.map(|at| at.min(soon));
        self.service.unpaused(self.id);
        self.idle_look = Some(Instant::now() + idle_check(&self.service));
    }

    /// Somebody does not wait any more. If nobody does, one that has not come to rest for anybody
    /// runs on; one that was paused stays so.
    pub(super) fn withdraw(&mut self) {
        self.hibernate.retain(|reply| !reply.is_closed());
        self.pauses.retain(|reply| !reply.is_closed());
        if !self.is_awaited() && matches!(self.sleep, Sleep::Begun | Sleep::Resting) {
            // One that has ended needs no telling.
            let _ = self.instance.wake();
            self.goes_on();
        }
    }

    /// It was asked to rest and has not come to it: a program that computes may never do so, and would
    /// rest unasked much later.
    pub(super) fn does_not_come_to_rest(&mut self, now: Instant) {
        self.rests_until = None;
        if self.sleep == Sleep::Begun {
            self.go_on_with_memory("it did not come to rest; what computes all the time does not");
            self.hibernate_not_before = Some(now + HIBERNATE_AFTER_FAILURE);
        }
    }

    /// Has an instance go on that was asked to rest, or rests and is being written.
    pub(super) fn go_on_with_memory(&mut self, why: &str) {
        if self.sleep.is_under_way() {
            self.is_disturbed = true;
            // One that has ended needs no telling.
            let _ = self.instance.wake();
            self.goes_on();
            self.answer_all(why);
        }
    }

    /// Whether somebody waits for it to be hibernated or paused.
    pub(super) fn is_awaited(&self) -> bool {
        !self.hibernate.is_empty() || !self.pauses.is_empty()
    }

    /// Has the instance give up its memory if somebody waits for that.
    pub(super) fn hibernate_if_wanted(&mut self) {
        self.hibernate_again = None;
        if self.sleep.is_under_way() || !self.is_awaited() && self.sleep != Sleep::Kept {
            return;
        }
        if self.sleep == Sleep::Hibernated {
            // Whoever wants it to be paused waits until it is awake.
            return self.answer_hibernations(&Err("it is hibernated already".to_owned()));
        }
        match self.begin_hibernation() {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                self.hibernate_again = Some(Instant::now() + HIBERNATE_AGAIN);
            }
            Err(error) if self.sleep == Sleep::Kept => self.stays_paused(&error.to_string()),
            Err(error) => self.answer_all(&error.to_string()),
        }
    }

    /// Nothing in the instance runs any more, and its memory is being written.
    pub(super) fn resting(&mut self) {
        if self.sleep != Sleep::Begun {
            return;
        }
        self.sleep = Sleep::Resting;
        self.used_at_rest = self.instance.cpu_time();
        self.pauses.retain(|reply| !reply.is_closed());
        if !self.pauses.is_empty() {
            self.paused();
        }
    }

    /// Nothing in the instance runs until somebody wants something of it, as was asked.
    fn paused(&mut self) {
        self.sleep = Sleep::Paused;
        self.service.paused(self.id);
        self.answer_pauses(&Ok(()));
    }

    fn answer_pauses(&mut self, outcome: &Result<(), String>) {
        for reply in self.pauses.drain(..) {
            // Who has asked may have lost patience.
            let _ = reply.send(outcome.clone());
        }
    }

    /// Tells those who wait for a hibernation how it went; they may have lost patience.
    fn answer_hibernations(&mut self, outcome: &Result<HibernatedInstance, String>) {
        for reply in self.hibernate.drain(..) {
            drop(reply.send(outcome.clone()));
        }
    }

    /// Tells all who want it to be hibernated or paused why it is not.
    fn answer_all(&mut self, why: &str) {
        self.answer_pauses(&Err(why.to_owned()));
        self.answer_hibernations(&Err(why.to_owned()));
    }

    /// Has the instance run. One that has its memory does so at once; others say when they do.
    pub(super) fn wake_for(&mut self, reply: WakeReply) {
        self.is_disturbed = true;
        if let Err(error) = self.instance.wake() {
            return drop(reply.send(Err(error.to_string())));
        }
        if self.sleep == Sleep::Hibernated {
            return self.wake.push(reply);
        }
        if self.sleep != Sleep::Awake {
            self.goes_on();
            self.answer_all("it was told to go on; try again");
        }
        let _ = reply.send(Ok(None));
    }

    /// Wakes an instance whose memory nobody but this daemon can decrypt. Whether it is awake.
    pub(super) fn wake_from_own_key(&mut self) -> bool {
        let is_locked = self.sleep == Sleep::Hibernated && self.storage() == SwapStorage::Encrypted;
        if is_locked && self.wake.is_empty() {
            // Nobody waits for the answer.
            self.wake_for(oneshot::channel().0);
        }
        !is_locked
    }

    pub(super) fn hibernated(&mut self, hibernated: &HibernatedInstance) {
        self.sleep = Sleep::Hibernated;
        self.times_kept = 0;
        self.used_at_rest = self.instance.cpu_time();
        self.service.hibernated(self.id);
        self.answer_hibernations(&Ok(hibernated.clone()));
    }

    /// Its memory could not be written. One that is paused stays so, unless somebody has used it
    /// meanwhile, of which a torn memory is a sign; others go on.
    pub(super) fn not_written(&mut self, why: &str, is_torn: bool) {
        if is_torn && !self.is_known_to_rest() {
            // One that has ended needs no telling.
            let _ = self.instance.wake();
            self.goes_on();
            self.answer_hibernations(&Err(USED_MEANWHILE.to_owned()));
            return self.hibernate_if_wanted();
        }
        let is_ending = self.service.is_ending(self.id);
        if self.sleep == Sleep::Paused && !is_ending {
            return self.stays_paused(why);
        }
        // One that has ended needs no telling.
        let _ = self.instance.wake();
        if !is_ending {
            self.not_hibernated(why);
        }
    }

    /// It rests with its memory, which is to be written later.
    fn stays_paused(&mut self, why: &str) {
        let wait = kept_wait(self.times_kept);
        self.log_kept(why, wait);
        self.times_kept = self.times_kept.saturating_add(1);
        self.sleep = Sleep::Kept;
        let again = Instant::now() + wait;
        (self.hibernate_again, self.hibernate_not_before) = (Some(again), Some(again));
        self.service.keeps_memory(self.id, why);
        self.answer_hibernations(&Err(why.to_owned()));
    }

    /// The first time is worth a warning.
    fn log_kept(&self, why: &str, wait: Duration) {
        let (function, instance, wait) = (self.service.name(), self.id, wait.as_secs());
        if self.times_kept > 0 {
            tracing::debug!(%function, instance, "a paused instance keeps its memory still: {why}; it is tried again in {wait} s");
            return;
        }
        tracing::warn!(
            %function, instance,
            "a paused instance stays paused and keeps its memory, which could not be written: {why}; \
             it is tried again in {wait} s"
        );
    }

    /// It keeps its memory; it is tried again later.
    pub(super) fn not_hibernated(&mut self, why: &str) {
        tracing::warn!(function = %self.service.name(), instance = self.id, "cannot hibernate an instance, which keeps its memory: {why}");
        self.sleep = Sleep::Awake;
        self.hibernate_not_before = Some(Instant::now() + HIBERNATE_AFTER_FAILURE);
        self.answer_all(why);
    }

    pub(super) fn awake(&mut self, awake: Awake) {
        let was = std::mem::replace(&mut self.sleep, Sleep::Awake);
        if was == Sleep::Awake && !awake.was_hibernated {
            // It was told to go on, or was not asked to rest: a sandbox may say what it likes.
            return;
        }
        self.note_awake(was, awake);
        let is_unanswered = !awake.was_hibernated && awake.cause == AwakeCause::Unanswered;
        if is_unanswered {
            self.not_hibernated("one of its processes does not answer");
        } else {
            self.answer_hibernations(&Err(cause_of(awake.cause).to_owned()));
        }
        for reply in self.wake.drain(..) {
            drop(reply.send(Ok(Some(awake))));
        }
        // Somebody wants it to be paused, and did not know whether it was awake.
        self.hibernate_if_wanted();
    }

    fn note_awake(&mut self, was: Sleep, awake: Awake) {
        if awake.was_hibernated {
            self.service.woken(self.id);
            self.idle_look = Some(Instant::now() + idle_check(&self.service));
        } else if was.is_paused() {
            self.unpaused();
            let is_in_use = self.connections.execs().in_use();
            if awake.cause == AwakeCause::Message && !self.is_disturbed && !is_in_use {
                // It knows another image than its memory refers to.
                tracing::warn!(
                    function = %self.service.name(), instance = self.id,
                    "a paused instance goes on, since it did not take the file with its memory"
                );
            }
        }
    }
}

/// How long until it is tried again to write the memory of a paused instance, after so many
/// failures before this one.
fn kept_wait(failures: u32) -> Duration {
    let doubled = HIBERNATE_AFTER_FAILURE.saturating_mul(1 << failures.min(10));
    doubled.min(HIBERNATE_KEPT_MAX)
}

/// What has kept an instance from giving up its memory.
fn cause_of(cause: AwakeCause) -> &'static str {
    match cause {
        AwakeCause::Connection => {
            "bytes came on one of its connections before its memory was written; try again"
        }
        AwakeCause::Timer => {
            "a timer of the program was due before its memory was written; try again"
        }
        AwakeCause::Message | AwakeCause::Unanswered => USED_MEANWHILE,
    }
}

const USED_MEANWHILE: &str = "it was asked something else before its memory was written; try again";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_paused_instance_is_tried_more_and_more_seldom() {
        let waits = [0, 1, 2, 4, 5, u32::MAX].map(|failures| kept_wait(failures).as_secs());
        assert_eq!(waits, [60, 120, 240, 960, 1800, 1800]);
    }
}
