//! A token bucket (Turner, "New directions in communications", 1986).

use std::time::Instant;

/// Something that may be spent (bytes, turns), earned at a steady rate and saved up to a limit. A
/// spender may go into debt once and then has to wait until it is paid.
#[derive(Debug)]
pub(crate) struct Allowance {
    /// So much a second.
    rate: f64,
    /// What is saved at most.
    most: f64,
    left: f64,
    earned: Instant,
}

impl Allowance {
    /// A full one.
    pub fn new(rate: f64, most: f64, now: Instant) -> Self {
        Self { rate, most, left: most, earned: now }
    }

    /// What is left at `now`; less than zero is a debt.
    pub fn left(&mut self, now: Instant) -> f64 {
        let earned = now.saturating_duration_since(self.earned).as_secs_f64() * self.rate;
        self.left = (self.left + earned).min(self.most);
        self.earned = self.earned.max(now);
        self.left
    }

    /// Takes some off.
    pub fn spend(&mut self, amount: usize) {
        self.left -= amount as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn debts_are_paid_at_the_rate() {
        let begin = Instant::now();
        let mut allowance = Allowance::new(100.0, 1000.0, begin);
        allowance.spend(1500);
        assert_eq!(allowance.left(begin), -500.0);
        assert_eq!(allowance.left(begin + Duration::from_secs(5)), 0.0);
        assert_eq!(allowance.left(begin + Duration::from_secs(3600)), 1000.0);
    }
}
