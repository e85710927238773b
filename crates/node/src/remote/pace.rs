//! How long a sandbox may take for a tree of files in all: as long as it comes on. Each of its answers
//! has a patience of its own; without a bound on their sum a sandbox that answers a byte at a time
//! would hold a place of the node for as long as it likes.

use super::files::FileProblem;
use std::future::Future;
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// What a sandbox may take.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// For whatever it is.
    pub grace: Duration,
    /// For each entry of the tree.
    pub entry: Duration,
    /// Bytes of files that it has to take or give in a second.
    pub bytes_per_second: u64,
}

impl Default for Pace {
    /// A sandbox that computes on all of its processors may be held up for 100 ms before each answer.
    fn default() -> Self {
        Self {
            grace: Duration::from_secs(60),
            entry: Duration::from_millis(500),
            bytes_per_second: 1 << 20,
        }
    }
}

/// How long a sandbox was waited for, and may be.
#[derive(Debug)]
pub(super) struct Waits {
    pace: Pace,
    waited: Duration,
    allowed: Duration,
}

impl Waits {
    pub fn new(pace: Pace) -> Self {
        Self { pace, waited: Duration::ZERO, allowed: pace.grace }
    }

    /// Another entry begins.
    pub fn entry(&mut self) {
        self.allowed += self.pace.entry;
    }

    /// So many bytes of a file more have come, or were taken.
    pub fn moved(&mut self, bytes: usize) {
        let nanoseconds = (bytes as u64).saturating_mul(1_000_000_000) / self.pace.bytes_per_second;
        self.allowed += Duration::from_nanos(nanoseconds);
    }

    /// Waits for something that only the sandbox holds up.
    ///
    /// # Errors
    /// Its own, or the sandbox does not come on.
    pub async fn wait<T>(
        &mut self,
        work: impl Future<Output = Result<T, FileProblem>>,
    ) -> Result<T, FileProblem> {
        let began = Instant::now();
        let outcome = timeout(self.allowed.saturating_sub(self.waited), work).await;
        self.waited += began.elapsed();
        outcome.unwrap_or_else(|_| {
            Err(FileProblem::Lost(format!(
                "it has taken {} s for its part of the tree, and comes on too slowly",
                self.waited.as_secs()
            )))
        })
    }
}
