//! Hibernation: when an instance gives up its memory, and who hears of it.

use super::{IDLE_CHECK_MIN, Supervisor, idle_check};
use crate::instance::hibernation::{HibernationTerms, SwapStorage};
use crate::instance::launch::HibernatedInstance;
use std::time::Duration;
use thaw_sandbox::{Awake, AwakeCause, Timers};
use tokio::sync::oneshot;
use tokio::time::Instant;

/// Where to say how a hibernation went.
pub(crate) type HibernateReply = oneshot::Sender<Result<HibernatedInstance, String>>;
/// Where to say that nothing in it runs.
pub(crate) type PauseReply = oneshot::Sender<Result<(), String>>;
/// Where to say how it woke; `None`: it was awake.
pub(crate) type WakeReply = oneshot::Sender<Result<Option<Awake>, String>>;

/// How long until it is tried again to hibernate an instance.
const HIBERNATE_AGAIN: Duration = Duration::from_millis(100);
/// The same after it has failed.
const HIBERNATE_AFTER_FAILURE: Duration = Duration::from_secs(60);

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

    /// Whether it is to give up its memory and nobody has begun with that.
    fn is_before(self) -> bool {
        matches!(self, Self::Awake | Self::Kept)
    }
}

impl Supervisor {
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
        let is_too_early = self.hibernate_not_before.is_some_and(|not_before| not_before > now);
        if self.sleep.is_before() && is_too_early {
            // It cannot hibernate now; perhaps it may sleep.
            if self.service.config().limits.sleep_after.is_some() {
                self.make_room(now);
            }
            return;
        }
        if !self.sleep.is_before() {
            return;
        }
        match self.begin_hibernation() {
            // Where there are many, some wait for their turn.
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => self.not_begun(&error.to_string()),
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
        // One that is paused rests already.
        self.sleep = if self.sleep == Sleep::Kept { Sleep::Paused } else { Sleep::Begun };
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
        match self.sleep {
            Sleep::Resting => self.paused(),
            Sleep::Paused | Sleep::Kept | Sleep::Hibernated => self.answer_pauses(&Ok(())),
            Sleep::Awake | Sleep::Begun => self.hibernate_if_wanted(),
        }
    }

    /// Has the instance give up its memory if somebody waits for that.
    pub(super) fn hibernate_if_wanted(&mut self) {
        self.hibernate_again = None;
        let is_awaited = !self.hibernate.is_empty() || !self.pauses.is_empty();
        if self.sleep.is_under_way() || !is_awaited && self.sleep != Sleep::Kept {
            return;
        }
        if self.sleep == Sleep::Hibernated {
            return self.answer_hibernation(&Err("it is hibernated already".to_owned()));
        }
        match self.begin_hibernation() {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                self.hibernate_again = Some(Instant::now() + HIBERNATE_AGAIN);
            }
            Err(error) if self.sleep == Sleep::Kept => self.stays_paused(&error.to_string()),
            Err(error) => self.answer_hibernation(&Err(error.to_string())),
        }
    }

    /// Nothing in the instance runs any more, and its memory is being written.
    pub(super) fn resting(&mut self) {
        if self.sleep != Sleep::Begun {
            return;
        }
        self.sleep = Sleep::Resting;
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
    pub(super) fn answer_hibernation(&mut self, outcome: &Result<HibernatedInstance, String>) {
        self.answer_pauses(&outcome.as_ref().map(drop).map_err(Clone::clone));
        for reply in self.hibernate.drain(..) {
            drop(reply.send(outcome.clone()));
        }
    }

    pub(super) fn wake_for(&mut self, reply: WakeReply) {
        match (self.sleep, self.instance.wake()) {
            (Sleep::Paused | Sleep::Kept | Sleep::Hibernated, Ok(())) => self.wake.push(reply),
            (_, woken) => drop(reply.send(woken.map(|()| None).map_err(|error| error.to_string()))),
        }
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
        self.service.hibernated(self.id);
        self.answer_hibernation(&Ok(hibernated.clone()));
    }

    /// Its memory could not be written. One that is paused stays so; others go on.
    pub(super) fn not_written(&mut self, why: &str) {
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

    /// It cannot be asked for its memory now.
    fn not_begun(&mut self, why: &str) {
        match self.sleep {
            Sleep::Kept => self.stays_paused(why),
            _ => self.not_hibernated(why),
        }
    }

    /// It rests with its memory, which is to be written later.
    fn stays_paused(&mut self, why: &str) {
        tracing::warn!(
            function = %self.service.name(), instance = self.id,
            "a paused instance stays paused and keeps its memory, which could not be written: {why}; \
             it is tried again in {} s",
            HIBERNATE_AFTER_FAILURE.as_secs()
        );
        self.sleep = Sleep::Kept;
        let again = Instant::now() + HIBERNATE_AFTER_FAILURE;
        (self.hibernate_again, self.hibernate_not_before) = (Some(again), Some(again));
        self.service.keeps_memory(self.id, why);
        self.answer_hibernation(&Err(why.to_owned()));
    }

    /// It keeps its memory; it is tried again later.
    pub(super) fn not_hibernated(&mut self, why: &str) {
        tracing::warn!(function = %self.service.name(), instance = self.id, "cannot hibernate an instance, which keeps its memory: {why}");
        self.sleep = Sleep::Awake;
        self.hibernate_not_before = Some(Instant::now() + HIBERNATE_AFTER_FAILURE);
        self.answer_hibernation(&Err(why.to_owned()));
    }

    pub(super) fn awake(&mut self, awake: Awake) {
        let was = std::mem::replace(&mut self.sleep, Sleep::Awake);
        if was == Sleep::Awake && !awake.was_hibernated {
            // It was not asked to rest: a sandbox may say what it likes.
            return;
        }
        if awake.was_hibernated {
            self.service.woken(self.id);
            self.idle_look = Some(Instant::now() + idle_check(&self.service));
        } else if matches!(was, Sleep::Paused | Sleep::Kept) {
            self.service.unpaused(self.id);
            self.idle_look = Some(Instant::now() + idle_check(&self.service));
        }
        if !awake.was_hibernated && awake.cause == AwakeCause::Unanswered {
            self.not_hibernated("one of its processes does not answer");
        } else {
            self.answer_hibernation(&Err(format!(
                "{} before its memory was written; try again",
                cause_of(awake.cause)
            )));
        }
        for reply in self.wake.drain(..) {
            drop(reply.send(Ok(Some(awake))));
        }
    }
}

/// What has kept an instance from giving up its memory.
fn cause_of(cause: AwakeCause) -> &'static str {
    match cause {
        AwakeCause::Connection => "bytes came on one of its connections",
        AwakeCause::Timer => "a timer of the program was due",
        AwakeCause::Message | AwakeCause::Unanswered => "it was asked something else",
    }
}
