//! Having a program end by itself.

use super::Supervisor;
use super::sleep::Sleep;
use crate::config::StopSignal;
use std::sync::atomic::Ordering;
use tokio::time::Instant;

/// How an instance is to end that has to live as long as its twin is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EndLater {
    /// With a signal first.
    Stop,
    Kill,
}

impl Supervisor {
    /// Ends the instance, which takes no connection any more: with a signal first, if its function
    /// gives it time after that. One that has no memory at hand does not get it
    /// back for this.
    pub(super) fn stop(&mut self, now: Instant) {
        if self.kill_at.is_some() {
            return;
        }
        if self.must_live() {
            self.ends_later.get_or_insert(EndLater::Stop);
            return;
        }
        let grace = self.service.config().limits.grace.0;
        let is_awake = matches!(self.sleep, Sleep::Awake);
        let signal = self.stop_signal();
        if grace.is_zero() || !is_awake || self.instance.terminate(signal).is_err() {
            return self.kill();
        }
        self.kill_at = Some(now + grace);
    }

    /// Kills it; once the memory of its twin was read, if copies run that wait for that.
    pub(super) fn kill(&mut self) {
        match self.must_live() {
            true => self.ends_later = Some(EndLater::Kill),
            false => self.instance.kill(),
        }
    }

    /// Ends it, as [`Supervisor::kill`], without taking that for the reason if it has ended by itself.
    pub(super) fn end_unreachable(&mut self) {
        match self.must_live() {
            true => self.ends_later = Some(EndLater::Kill),
            false => self.instance.end_unreachable(),
        }
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
            None => return false,
        }
        true
    }

    /// It has not ended in time.
    pub(super) fn out_of_grace(&mut self) {
        self.kill_at = None;
        let grace = self.service.config().limits.grace.0.as_secs_f64();
        let signal = self.stop_signal();
        tracing::info!(function = %self.service.name(), instance = self.id, "did not end within {grace} s after {signal}, ending the instance");
        self.kill();
    }

    /// What asks the program to end.
    fn stop_signal(&self) -> StopSignal {
        self.service.config().limits.stop_signal.unwrap_or_default()
    }
}
