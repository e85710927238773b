//! Giving back what an idle instance has written and has put back since: pages that are equal to those of
//! its image again.

use super::Supervisor;
use std::time::Duration;
use tokio::time::Instant;

/// How long it may take: a program that computes does not come to rest.
const TRIM_MAX: Duration = Duration::from_secs(2);
/// When it is tried again if it could not begin, or had no effect. Timers of programs are often due after
/// a round time, and one that is due ends the rest.
const TRIM_AGAIN: Duration = Duration::from_millis(1130);
/// How often it is tried while the instance is idle.
const TRIES: u32 = 5;
/// An instance that gives back less than this is not asked again.
const WORTH_IT: u64 = 128 << 10;

/// What is known of that.
#[derive(Debug, Default)]
pub(super) struct Trims {
    /// Since when it was idle the last time that it was asked.
    asked_for: Option<std::time::Instant>,
    /// How often it has had something to do before it could give something back, since then.
    interrupted: u32,
    /// When it is asked again for that.
    again: Option<Instant>,
    /// Until when it may come to rest for that.
    pub until: Option<Instant>,
    /// It is not asked any more.
    is_over: bool,
}

impl Supervisor {
    /// Has an instance that is idle `since` then give back what it can if it is time, once until it is
    /// used again. When to look again.
    pub(super) fn trim_if_idle(
        &mut self,
        since: std::time::Instant,
        now: Instant,
    ) -> Option<Instant> {
        let after = self.service.config().limits.trim_after.0;
        if self.trims.is_over || after >= self.service.keep_alive() {
            return None;
        }
        // Only a request changes that, and nobody tells of it.
        let later = Some(now + after);
        let due = match self.trims.again {
            _ if self.trims.asked_for != Some(since) => Instant::from_std(since + after),
            Some(again) => again,
            None => return later,
        };
        if due > now {
            return Some(due);
        }
        let is_looked_at = self.rest.is_some() || self.twin.is_some() || self.sleepiness.is_asked();
        if !self.is_awake() || is_looked_at || self.service.shared().is_leaving() {
            return later;
        }
        if self.health.is_probing() {
            // The end of the probe would wake it.
            return Some(now + TRIM_AGAIN);
        }
        match self.instance.trim() {
            Ok(()) => {
                if self.trims.asked_for.replace(since) != Some(since) {
                    self.trims.interrupted = 0;
                }
                self.trims.again = None;
                self.trims.until = Some(now + TRIM_MAX);
                later
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Some(now + TRIM_AGAIN),
            Err(error) => {
                tracing::debug!(function = %self.service.name(), instance = self.id, "an idle instance is not trimmed: {error}");
                self.trims.is_over = true;
                None
            }
        }
    }

    /// It has given back what it could, or had something to do before that, and goes on.
    pub(super) fn trimmed(&mut self, trimmed: Result<Option<u64>, String>) {
        self.trims.until = None;
        match trimmed {
            Ok(None) => self.trim_again(),
            Ok(Some(bytes)) => {
                self.service.shared().metrics().trimmed(self.service.name(), bytes);
                self.trims.is_over = bytes < WORTH_IT;
            }
            Err(why) => {
                self.trims.is_over = true;
                tracing::debug!(function = %self.service.name(), instance = self.id, "an idle instance was not trimmed: {why}");
            }
        }
    }

    /// It did not come to rest in time, or there were too many others.
    pub(super) fn trims_too_long(&mut self) {
        self.end_trim();
        self.trim_again();
    }

    /// It had no effect: it is tried again, unless that was so often.
    fn trim_again(&mut self) {
        self.trims.interrupted += 1;
        if self.trims.interrupted < TRIES {
            let again = Instant::now() + TRIM_AGAIN;
            self.trims.again = Some(again);
            self.idle_look = self.idle_look.map(|look| look.min(again));
        }
    }

    /// Lets it go on if it is asked to rest for that.
    pub(super) fn end_trim(&mut self) {
        self.trims.until = None;
        self.instance.end_trim();
    }
}
