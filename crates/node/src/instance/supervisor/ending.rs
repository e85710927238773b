//! Having a program end by itself.

use super::Supervisor;
use super::sleep::Sleep;
use crate::config::StopSignal;
use tokio::time::Instant;

impl Supervisor {
    /// Ends the instance, which takes no connection any more: with a signal first, if its function
    /// gives it time after that. One that has no memory at hand does not get it
    /// back for this.
    pub(super) fn stop(&mut self, now: Instant) {
        if self.kill_at.is_some() {
            return;
        }
        let grace = self.service.config().limits.grace.0;
        let is_awake = matches!(self.sleep, Sleep::Awake);
        let signal = self.stop_signal();
        if grace.is_zero() || !is_awake || self.instance.terminate(signal).is_err() {
            return self.instance.kill();
        }
        self.kill_at = Some(now + grace);
    }

    /// It has not ended in time.
    pub(super) fn out_of_grace(&mut self) {
        self.kill_at = None;
        let grace = self.service.config().limits.grace.0.as_secs_f64();
        let signal = self.stop_signal();
        tracing::info!(function = %self.service.name(), instance = self.id, "did not end within {grace} s after {signal}, ending the instance");
        self.instance.kill();
    }

    /// What asks the program to end.
    fn stop_signal(&self) -> StopSignal {
        self.service.config().limits.stop_signal.unwrap_or_default()
    }
}
