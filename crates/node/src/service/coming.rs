//! Room that is about to come: somebody who waits relies on it for a while, before something else is to
//! make some.

use std::future::pending;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// What makes room for somebody who waits. To end takes time, in which nothing else is to end for the
/// same one.
#[derive(Debug, Default)]
pub(super) struct Coming {
    /// Until when it is waited for.
    until: Option<Instant>,
}

impl Coming {
    /// Something is about to make room, on which whoever waits relies for so long.
    pub fn begin(&mut self, patience: Duration) {
        self.until = Some(Instant::now() + patience);
    }

    /// Whether whoever waits still relies on it.
    pub fn is_awaited(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() < until)
    }

    /// Resolves when it has been waited for in vain; never if there is nothing.
    pub async fn in_vain(&mut self) {
        match self.until {
            Some(until) => sleep_until(until).await,
            None => pending().await,
        }
        self.until = None;
    }
}
