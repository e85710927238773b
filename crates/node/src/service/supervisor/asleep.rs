//! Falling asleep: when the process of an instance ends, and a file is left of it.
//!
//! The instance rests while its memory is written. Clients may still be given to it, and wait. Only
//! if none has come when the file is whole does the process end; otherwise the instance goes on,
//! and the file is thrown away.

use super::{IDLE_CHECK_MIN, KEEP_AFTER, Sleep, Supervisor};
use crate::asleep::{Asleep, Going};
use crate::instance::{Outcome, Report, SleepReply, SleepingInstance, SwapStorage};
use std::future::poll_fn;
use std::io;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use thaw_abi::control::EntryPoint;
use thaw_sandbox::Twin;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

/// How long until it is tried again to put an instance to sleep.
const SLEEP_AGAIN: Duration = Duration::from_millis(100);
/// The same after it has failed.
const SLEEP_AFTER_FAILURE: Duration = Duration::from_secs(60);
/// How long the process of an instance may take to be gone.
const GONE_PATIENCE: Duration = Duration::from_secs(10);

/// How long the monitor may take to have an instance that runs again.
const KEPT_PATIENCE: Duration = Duration::from_secs(10);
/// How often it is looked whether it has.
const KEPT_LOOK: Duration = Duration::from_millis(5);

/// How long an instance may take to come to rest.
const REST_PATIENCE: Duration = Duration::from_secs(10);

/// Most instances that are written at a time: each takes a processor, and the disk. No sandbox can
/// keep a place: it has one only while it is written.
const WRITERS_MAX: usize = 2;
static WRITERS: Semaphore = Semaphore::const_new(WRITERS_MAX);

/// How far an instance is on its way to sleep.
#[derive(Debug, Default)]
pub(super) struct Sleepiness {
    /// It was asked to come to rest, until then.
    pub asked: Option<Instant>,
    /// It was asked, and has not come to rest in time.
    pub is_late: bool,
    /// Who wants it to sleep.
    replies: Vec<SleepReply>,
    /// When to try again what somebody waits for.
    pub again: Option<Instant>,
    /// Not before this is it tried again for nobody in particular.
    not_before: Option<Instant>,
    /// Others want its room: it ends if it cannot sleep.
    ends_otherwise: bool,
    /// What it was booted from, until it is known to run.
    pub woken_from: Option<Arc<Asleep>>,
    /// The same, until the monitor has the instance.
    pub until_kept: Option<UntilKept>,
}

/// The files of an instance that runs again: if its daemon is killed before the monitor has it, they
/// are all that is left.
#[derive(Debug)]
pub(super) struct UntilKept {
    asleep: Arc<Asleep>,
    /// It is not waited for after this.
    until: Instant,
    /// When to look again.
    pub look: Instant,
}

impl Drop for UntilKept {
    fn drop(&mut self) {
        self.asleep.runs_again();
    }
}

impl Sleepiness {
    /// Whether its next rest is for its sleep.
    pub fn is_asked(&self) -> bool {
        self.asked.is_some()
    }

    fn answer(&mut self, outcome: &Result<SleepingInstance, String>) {
        for reply in self.replies.drain(..) {
            // Who has asked may have lost patience.
            let _ = reply.send(outcome.clone());
        }
    }
}

/// Why an instance does not sleep.
enum Refusal {
    /// Somebody wants it.
    Wanted,
    /// Something is wrong: one sentence for the operator.
    Failed(String),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::Failed(format!("its memory cannot be written ({error}); make room on the disk"))
    }
}

impl Supervisor {
    /// The same for an instance that was asleep.
    pub(crate) fn woken_from(mut self, asleep: Arc<Asleep>) -> Self {
        self.sleepiness.woken_from = Some(asleep);
        self
    }

    /// Since when it has had nothing to do for anybody, with or without clients that are connected
    /// to it.
    fn silent_since(&self, now: Instant) -> Option<std::time::Instant> {
        if let Some(since) = self.service.idle_since(self.id) {
            return Some(since);
        }
        let silent_for = self.connections.silent_for(self.patience)?;
        now.into_std().checked_sub(silent_for)
    }

    /// Puts an instance that has had nothing to do for long to sleep. When to look again.
    pub(super) fn sleep_if_silent(&mut self, now: Instant) -> Option<Instant> {
        let after = self.service.config().limits.sleep_after?.0;
        let Some(since) = self.silent_since(now) else {
            return Some(now + after.max(IDLE_CHECK_MIN));
        };
        let due = Instant::from_std(since + after);
        let due = self.sleepiness.not_before.map_or(due, |not_before| due.max(not_before));
        if due > now {
            return Some(due);
        }
        if self.sleep.is_paused() {
            // It would go on if it could not sleep. It is written first.
            return Some(now + after.max(IDLE_CHECK_MIN));
        }
        if self.service.shared().is_leaving() {
            return Some(now + SLEEP_AGAIN);
        }
        if self.connections.execs().in_use() && self.sleep != Sleep::Hibernated {
            // Its processes may be at work, and nobody has asked them to stop.
            return Some(now + after.max(IDLE_CHECK_MIN));
        }
        let again = match self.fall_asleep() {
            Ok(()) => after.max(IDLE_CHECK_MIN),
            Err(_) => SLEEP_AGAIN,
        };
        Some(now + again)
    }

    /// Puts the instance to sleep now, unless that has failed a short while ago. Nobody waits.
    pub(super) fn sleep_now(&mut self, now: Instant) {
        if self.sleepiness.not_before.is_none_or(|not_before| not_before <= now) {
            // Where there are many, some wait for their turn.
            let _ = self.fall_asleep();
        }
    }

    /// Puts the instance to sleep for others who want its room. If it cannot sleep, it ends.
    pub(super) fn make_room(&mut self, now: Instant) {
        self.sleepiness.ends_otherwise = true;
        let failed_lately = self.sleepiness.not_before.is_some_and(|not_before| not_before > now);
        if failed_lately || self.service.shared().asleep_space().is_none() {
            return self.leave();
        }
        if self.fall_asleep().is_err() {
            self.sleepiness.again = Some(now + SLEEP_AGAIN);
        }
    }

    /// Ends it, unless somebody has come meanwhile.
    fn leave(&mut self) {
        let is_for_others = std::mem::take(&mut self.sleepiness.ends_otherwise);
        match self.service.retire_if_idle(self.id) {
            true if is_for_others => self.stop_for_others(Instant::now()),
            true => self.stop(Instant::now()),
            false => self.service.stays(self.id),
        }
    }

    /// Puts the instance to sleep for somebody who waits.
    pub(super) fn sleep_for(&mut self, reply: SleepReply) {
        self.sleepiness.replies.push(reply);
        self.sleep_if_wanted();
    }

    /// The same, if it is still wanted.
    pub(super) fn sleep_if_wanted(&mut self) {
        self.sleepiness.again = None;
        self.sleepiness.replies.retain(|reply| !reply.is_closed());
        let is_wanted = !self.sleepiness.replies.is_empty() || self.sleepiness.ends_otherwise;
        if is_wanted && self.fall_asleep().is_err() {
            self.sleepiness.again = Some(Instant::now() + SLEEP_AGAIN);
        }
    }

    /// Asks the instance to come to rest for its sleep.
    ///
    /// # Errors
    /// Something else is done with it now, or too many are written.
    fn fall_asleep(&mut self) -> Result<(), ()> {
        if self.sleepiness.is_asked() {
            return Ok(());
        }
        if self.sleep == Sleep::Begun && !self.is_awaited() {
            // It may compute for long, and is stopped for its sleep all the same.
            self.go_on_with_memory("");
        }
        let is_looked_at = self.rest.is_some() || self.twin.is_some() || self.sleep.is_under_way();
        let is_owed = self.sleepiness.is_late || self.sleepiness.woken_from.is_some();
        // A daemon that leaves waits for those that persist only.
        let is_owed = is_owed || self.service.shared().is_leaving() && !self.service.persists();
        if is_looked_at || is_owed || WRITERS.available_permits() == 0 {
            return Err(());
        }
        if self.health.cancel() {
            // Its program sees the end of the probe first.
            return Err(());
        }
        if let Some(why) = self.held_awake_by() {
            self.stays_awake(Refusal::Failed(why.to_owned()));
            return Ok(());
        }
        if self.going_to_sleep().is_none() {
            self.stays_awake(Refusal::Wanted);
            return Ok(());
        }
        self.is_disturbed = true;
        // The next daemon would not know that it rests.
        self.connections.note_kept(None);
        match self.instance.request_checkpoint(Twin::Refused) {
            Ok(()) => self.sleepiness.asked = Some(Instant::now() + REST_PATIENCE),
            Err(error) => self.stays_awake(Refusal::Failed(format!("it has ended ({error})"))),
        }
        Ok(())
    }

    /// Who outside has something of it that would not be there when it wakes.
    fn held_awake_by(&self) -> Option<&'static str> {
        let execs = self.connections.execs();
        if !execs.may_sleep() {
            return Some(
                "somebody is connected to a process in it that was started from outside, to its files \
                 or its ports, or such a process has not read its input; end that first",
            );
        }
        let can_go_on = self.connections.connector().can_have_execs_go_on();
        (execs.in_use() && !can_go_on).then_some(
            "processes that were started from outside run in it, under a kernel of another build, \
             which cannot have them go on; end them first",
        )
    }

    /// It has not come to rest in time, and may never do so: others do not wait for it.
    pub(super) fn does_not_rest(&mut self) {
        self.sleepiness.asked = None;
        self.sleepiness.is_late = true;
        let patience = REST_PATIENCE.as_secs();
        self.stays_awake(Refusal::Failed(format!("it did not come to rest within {patience} s")));
    }

    /// The instance rests. Whether it sleeps now: its process is to end.
    pub(super) fn at_rest_to_sleep(&mut self, rest: EntryPoint) -> bool {
        self.sleepiness.asked = None;
        let Ok(place) = WRITERS.try_acquire() else {
            self.go_on();
            self.sleepiness.again = Some(Instant::now() + SLEEP_AGAIN);
            return false;
        };
        // Others of the runtime's tasks go on elsewhere meanwhile.
        let written = tokio::task::block_in_place(|| self.write_asleep(rest));
        drop(place);
        let refusal = match written {
            // Somebody wants a process, or its files, and it does not know of that yet.
            Ok(_) if !self.connections.execs().shut() => Refusal::Wanted,
            Ok((asleep, done)) => {
                let clients = self.connections.take_clients();
                match self.service.falls_asleep(asleep, clients, self.connections.execs()) {
                    Ok(()) => {
                        self.sleepiness.answer(&Ok(done));
                        return true;
                    }
                    Err(clients) => {
                        self.connections.put_back(clients);
                        self.connections.execs().reopen();
                        Refusal::Wanted
                    }
                }
            }
            Err(refusal) => refusal,
        };
        self.go_on();
        self.stays_awake(refusal);
        false
    }

    /// What there is to say of it; `None`: some client waits for it.
    fn going_to_sleep(&self) -> Option<Going> {
        let silent_for = self.connections.silent_for(self.patience)?;
        self.service.going_to_sleep(self.id, silent_for)
    }

    fn write_asleep(&mut self, rest: EntryPoint) -> Result<(Asleep, SleepingInstance), Refusal> {
        let began = Instant::now();
        let going = self.going_to_sleep().ok_or(Refusal::Wanted)?;
        let space = self.service.shared().asleep_space().ok_or_else(|| {
            Refusal::Failed("this daemon has no directory for sleeping instances".to_owned())
        })?;
        // The names are those of its next sleep.
        self.sleepiness.until_kept = None;
        let new = space.new_file(self.id, self.place.lease.memory())?;
        let new = match self.storage() {
            // Its image has a checksum.
            SwapStorage::Plain | SwapStorage::Verified => new,
            SwapStorage::Encrypted => new.encrypted(self.instance.owner_key())?,
        };
        let image = self.instance.write_asleep(rest, &new).map_err(Refusal::Failed)?;
        if let Some(why) = self.service.never_wakes(self.id, new.plain_len()?) {
            return Err(Refusal::Failed(why));
        }
        // What it may reach has to be known for as long as it may wake.
        self.service.shared().egress().settle(self.id)?;
        let launcher = self.service.launcher();
        if launcher.index() != Some(image.index) || launcher.kernel_build() != Some(image.kernel) {
            // Its function's zygotes could not boot it.
            let why = "it was restored from a checkpoint of other files or of another kernel build";
            return Err(Refusal::Failed(why.to_owned()));
        }
        let new = new.seal()?;
        // Whoever has come meanwhile does not wait for the disk.
        if self.going_to_sleep().is_none() {
            return Err(Refusal::Wanted);
        }
        let stored = image.stored;
        let asleep = new.commit(&going, image, self.connections.execs().notes())?;
        let write_ms = began.elapsed().as_secs_f64() * 1e3;
        let on_disk = asleep.bytes();
        Ok((asleep, SleepingInstance { stored, on_disk, write_ms }))
    }

    /// It keeps its process; it is tried again later.
    fn stays_awake(&mut self, refusal: Refusal) {
        let why = match refusal {
            Refusal::Wanted => {
                self.sleepiness.ends_otherwise = false;
                self.service.stays(self.id);
                "a client waits for it; try again when it is idle".to_owned()
            }
            Refusal::Failed(why) => {
                tracing::warn!(function = %self.service.name(), instance = self.id, "cannot put an instance to sleep, which stays as it is: {why}");
                self.sleepiness.not_before = Some(Instant::now() + SLEEP_AFTER_FAILURE);
                // There is no later for it.
                self.connections.note_cannot_sleep();
                if self.sleepiness.ends_otherwise || self.service.shared().is_ending() {
                    self.leave();
                }
                why
            }
        };
        self.sleepiness.answer(&Err(why));
    }

    /// Ends the process of an instance that is asleep, which nobody knows by its number any more.
    pub(super) async fn lie_down(mut self) {
        for (_, held) in self.connections.close() {
            drop(held.end(Outcome::Closed));
        }
        self.instance.kill();
        let gone = poll_fn(|context| match self.instance.poll_report(context) {
            Poll::Ready(Report::Gone(_)) => Poll::Ready(()),
            Poll::Ready(_) => {
                context.waker().wake_by_ref();
                Poll::Pending
            }
            Poll::Pending => Poll::Pending,
        });
        if timeout(GONE_PATIENCE, gone).await.is_err() {
            tracing::warn!(function = %self.service.name(), instance = self.id, "the process of an instance that is asleep does not end");
        }
        // Its room is free only now.
    }

    /// It runs again after it was asleep: its files go, as soon as it outlives this daemon itself.
    pub(super) fn runs_again(&mut self) {
        let Some(asleep) = self.sleepiness.woken_from.take() else { return };
        if !self.keep(KEEP_AFTER) {
            // Nobody keeps it: it ends with this daemon.
            return asleep.runs_again();
        }
        let (until, look) = (Instant::now() + KEPT_PATIENCE, Instant::now() + KEPT_LOOK);
        self.sleepiness.until_kept = Some(UntilKept { asleep, until, look });
    }

    /// Removes the files of one that runs again, if the monitor has it.
    pub(super) fn remove_files_if_kept(&mut self, now: Instant) {
        let Some(kept) = &mut self.sleepiness.until_kept else { return };
        let is_looked_at = self.rest.is_some() || self.twin.is_some();
        if self.connections.monitor_has_it() || now >= kept.until && !is_looked_at {
            self.sleepiness.until_kept = None;
        } else {
            kept.look = now + KEPT_LOOK;
        }
    }
}
