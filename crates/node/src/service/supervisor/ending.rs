//! Having a program end by itself.

use super::Supervisor;
use super::sleep::Sleep;
use std::sync::atomic::Ordering;
use std::time::Duration;
use thaw_home::config::StopSignal;
use tokio::time::Instant;

/// Most of its grace that an instance has when others wait for its room. A program that ignores
/// its signal keeps a request waiting no longer than this.
const GRACE_FOR_OTHERS: Duration = Duration::from_millis(100);

/// How an instance is to end that has to live as long as its twin is read. The later ones are the
/// more urgent ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum EndLater {
    /// With a signal first.
    Stop,
    /// The same, and others wait for its room.
    StopForOthers,
    Kill,
}

/// The time that a program has to end by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stopping {
    /// When it got its signal.
    asked: Instant,
    grace: Duration,
}

impl Stopping {
    /// When its instance is ended if it has not ended by itself.
    pub fn kill_at(&self) -> Instant {
        self.asked + self.grace
    }

    /// Others wait for its room.
    fn hurry(&mut self) {
        self.grace = self.grace.min(GRACE_FOR_OTHERS);
    }
}

impl Supervisor {
    /// Ends the instance, which takes no connection any more: with a signal first, if its function
    /// gives it time after that. One that has no memory at hand does not get it
    /// back for this.
    pub(super) fn stop(&mut self, now: Instant) {
        if self.stopping.is_some() {
            return;
        }
        if self.must_live() {
            return self.end_later(EndLater::Stop);
        }
        if self.ask_to_stop(now) {
            self.service.has_grace(self.id);
        }
    }

    /// The same where others wait for its room: it has [`GRACE_FOR_OTHERS`] at most, counted from its
    /// signal on. Nobody takes it for one that can be hurried.
    pub(super) fn stop_for_others(&mut self, now: Instant) {
        if self.stopping.is_none() && self.must_live() {
            return self.end_later(EndLater::StopForOthers);
        }
        if self.stopping.is_none() {
            self.ask_to_stop(now);
        }
        if let Some(stopping) = &mut self.stopping {
            stopping.hurry();
            self.service.is_hurried(self.id);
        }
    }

    /// Sends the signal, or kills it where it gets no time after that; whether it has time.
    fn ask_to_stop(&mut self, now: Instant) -> bool {
        let grace = self.service.config().limits.grace.0;
        let is_awake = matches!(self.sleep, Sleep::Awake);
        let signal = self.stop_signal();
        if grace.is_zero() || !is_awake || self.instance.terminate(signal).is_err() {
            self.kill();
            return false;
        }
        self.stopping = Some(Stopping { asked: now, grace });
        true
    }

    /// Kills it; once the memory of its twin was read, if copies run that wait for that.
    pub(super) fn kill(&mut self) {
        match self.must_live() {
            true => self.end_later(EndLater::Kill),
            false => self.instance.kill(),
        }
    }

    /// Ends it, as [`Supervisor::kill`], without taking that for the reason if it has ended by itself.
    pub(super) fn end_unreachable(&mut self) {
        match self.must_live() {
            true => self.end_later(EndLater::Kill),
            false => self.instance.end_unreachable(),
        }
    }

    /// It ends when its twin was read, as whoever is most urgent wants.
    fn end_later(&mut self, how: EndLater) {
        self.ends_later = self.ends_later.max(Some(how));
    }

    /// Whether its twin, which would end with it, has memory that copies wait for.
    fn must_live(&self) -> bool {
        self.twin.is_some() && self.copies_wait.load(Ordering::Acquire)
    }

    /// Ends it if somebody has wanted that while it had to live; whether somebody has.
    pub(super) fn end_if_it_had_to_live(&mut self) -> bool {
        match self.ends_later.take() {
            Some(EndLater::Kill) => self.instance.kill(),
            Some(EndLater::Stop) => self.stop(Instant::now()),
            Some(EndLater::StopForOthers) => self.stop_for_others(Instant::now()),
            None => return false,
        }
        true
    }

    /// It has not ended in time.
    pub(super) fn out_of_grace(&mut self) {
        let Some(Stopping { grace, .. }) = self.stopping.take() else { return };
        self.service.is_hurried(self.id);
        let (grace, signal) = (grace.as_secs_f64(), self.stop_signal());
        tracing::info!(function = %self.service.name(), instance = self.id, "did not end within {grace} s after {signal}, ending the instance");
        self.kill();
    }

    /// What asks the program to end.
    fn stop_signal(&self) -> StopSignal {
        self.service.config().limits.stop_signal.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_wait_for_a_part_of_the_grace_only() {
        let asked = Instant::now();
        let stopping = |millis| {
            let mut stopping = Stopping { asked, grace: Duration::from_millis(millis) };
            stopping.hurry();
            stopping.kill_at().duration_since(asked).as_millis()
        };
        assert_eq!([stopping(30), stopping(100), stopping(60_000)], [30, 100, 100]);
    }

    #[test]
    fn the_most_urgent_end_counts() {
        let urgent = [EndLater::Stop, EndLater::StopForOthers, EndLater::Kill];
        assert!(urgent.is_sorted());
        assert!(urgent.into_iter().all(|how| None < Some(how)));
    }
}
