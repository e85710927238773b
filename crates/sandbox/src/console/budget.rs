//! How much may pass in which time.

use std::time::Instant;

/// A rate of bytes and of lines (a token bucket for each).
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    /// Bytes in a second.
    pub bytes: u32,
    /// Lines in a second.
    pub lines: u32,
    /// Seconds that may be saved up, and that there are at first.
    pub burst: u32,
}

/// What may still pass.
#[derive(Debug)]
pub struct Budget {
    rate: Rate,
    bytes: f64,
    lines: f64,
    filled: Instant,
}

impl Budget {
    /// All that can be saved up.
    pub fn full(rate: Rate, now: Instant) -> Self {
        let burst = f64::from(rate.burst);
        let (bytes, lines) = (f64::from(rate.bytes) * burst, f64::from(rate.lines) * burst);
        Self { rate, bytes, lines, filled: now }
    }

    /// Whether something is left, with what has come in until `now`.
    pub fn has_any(&mut self, now: Instant) -> bool {
        let seconds = now.saturating_duration_since(self.filled).as_secs_f64();
        self.filled = now;
        let Rate { bytes, lines, burst } = self.rate;
        let add = |present: f64, rate: u32| {
            (present + seconds * f64::from(rate)).min(f64::from(rate) * f64::from(burst))
        };
        (self.bytes, self.lines) = (add(self.bytes, bytes), add(self.lines, lines));
        self.bytes > 0.0 && self.lines >= 1.0
    }

    /// A line has passed. It may be longer than what was left: the next one waits
    /// the longer.
    pub fn spend(&mut self, bytes: usize) {
        self.bytes -= bytes as f64;
        self.lines -= 1.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const RATE: Rate = Rate { bytes: 100, lines: 10, burst: 2 };

    #[test]
    fn lines_without_text_are_counted_too() {
        let start = Instant::now();
        let mut budget = Budget::full(RATE, start);
        let passed = (0..100).take_while(|_| {
            let passes = budget.has_any(start);
            budget.spend(0);
            passes
        });
        assert_eq!(passed.count(), 20);
    }

    #[test]
    fn bytes_come_back_with_time_up_to_the_burst() {
        let start = Instant::now();
        let mut budget = Budget::full(RATE, start);
        budget.spend(300);
        assert!(!budget.has_any(start + Duration::from_millis(900)));
        assert!(budget.has_any(start + Duration::from_millis(1100)));
        assert!(budget.has_any(start + Duration::from_secs(3600)));
        budget.spend(200);
        assert!(!budget.has_any(start + Duration::from_secs(3600)));
    }
}
