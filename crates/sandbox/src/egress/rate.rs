//! How fast sockets may be asked for: each costs the host a descriptor for a
//! moment, and a local port for longer.

use std::time::{Duration, Instant};

/// A token bucket.
#[derive(Debug)]
pub struct Rate {
    burst: u32,
    every: Duration,
    left: u32,
    since: Instant,
}

impl Rate {
    /// A full bucket of so many tokens, to which one is added in this time.
    pub fn new((burst, every): (u32, Duration)) -> Self {
        Self { burst, every, left: burst, since: Instant::now() }
    }

    /// Goes on with another bucket, which is as full as this one was.
    pub fn change(&mut self, (burst, every): (u32, Duration)) {
        let used = self.burst - self.left;
        (self.burst, self.every, self.left) = (burst, every, burst.saturating_sub(used));
    }

    /// Takes a token; `false` if there is none at `now`.
    pub fn take(&mut self, now: Instant) -> bool {
        let earned = now.saturating_duration_since(self.since).as_nanos() / self.every.as_nanos();
        let earned = u32::try_from(earned).unwrap_or(self.burst).min(self.burst);
        self.since = if earned == self.burst { now } else { self.since + self.every * earned };
        self.left = self.left.saturating_add(earned).min(self.burst);
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
        let (burst, every) = (1024, Duration::from_millis(2));
        let mut rate = Rate::new((burst, every));
        let start = rate.since;
        assert!((0..burst).all(|_| rate.take(start)));
        assert!(!rate.take(start));
        assert!(!rate.take(start + every / 2));
        assert!(rate.take(start + every));
        assert!(!rate.take(start + every));
        assert!((0..burst).all(|_| rate.take(start + every * 10 * burst)));
        assert!(!rate.take(start + every * 10 * burst));
    }
}
