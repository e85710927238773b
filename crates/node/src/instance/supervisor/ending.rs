//! Having a program end by itself.

use super::Supervisor;
use super::sleep::Sleep;
use tokio::time::Instant;

impl Supervisor {
    /// Ends the instance, which is idle and takes no connection any more: with SIGTERM first, if
    /// its function gives it time after that. One that has no memory at hand does not get it
    /// back for this.
    pub(super) fn stop(&mut self, now: Instant) {
        if self.kill_at.is_some() {
            return;
        }
        let grace = self.service.config().limits.grace.0;
        let is_awake = matches!(self.sleep, Sleep::Awake);
        if grace.is_zero() || !is_awake || self.instance.terminate().is_err() {
            return self.instance.kill();
        }
        self.kill_at = Some(now + grace);
    }

    /// It has not ended in time.
    pub(super) fn out_of_grace(&mut self) {
        self.kill_at = None;
        let grace = self.service.config().limits.grace.0.as_secs_f64();
        tracing::info!(function = %self.service.name(), instance = self.id, "did not end within {grace} s after SIGTERM, ending the instance");
        self.instance.kill();
    }
}
