//! How fast a sandbox may ask for sockets: each costs the host a descriptor for
//! a moment, and a local port for longer.

use std::time::{Duration, Instant};

/// Sockets that may be asked for at once.
const BURST: u32 = 1024;
/// After that, one in this time.
const EVERY: Duration = Duration::from_millis(2);

/// A token bucket.
#[derive(Debug)]
pub struct Rate {
    left: u32,
    since: Instant,
}

impl Rate {
    /// A full bucket.
    pub fn new() -> Self {
        Self { left: BURST, since: Instant::now() }
    }

    /// Takes a token; `false` if there is none at `now`.
    pub fn take(&mut self, now: Instant) -> bool {
        let earned = now.saturating_duration_since(self.since).as_nanos() / EVERY.as_nanos();
        let earned = u32::try_from(earned).unwrap_or(BURST).min(BURST);
        self.since = if earned == BURST { now } else { self.since + EVERY * earned };
        self.left = (self.left + earned).min(BURST);
        if self.left == 0 {
            return false;
        }
        self.left -= 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_and_then_a_steady_rate() {
        let mut rate = Rate::new();
        let start = rate.since;
        assert!((0..BURST).all(|_| rate.take(start)));
        assert!(!rate.take(start));
        assert!(!rate.take(start + EVERY / 2));
        assert!(rate.take(start + EVERY));
        assert!(!rate.take(start + EVERY));
        assert!((0..BURST).all(|_| rate.take(start + EVERY * 10 * BURST)));
        assert!(!rate.take(start + EVERY * 10 * BURST));
    }
}
