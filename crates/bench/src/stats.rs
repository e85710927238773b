//! Percentiles.

use serde::Serialize;

/// The least and three percentiles, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Percentiles {
    /// The least: what other work on the machine disturbs least, too.
    pub min: f64,
    /// Half of the samples are at most this.
    pub p50: f64,
    /// Nine of ten.
    pub p90: f64,
    /// 99 of 100.
    pub p99: f64,
}

impl Percentiles {
    /// Percentiles of samples in nanoseconds, by the nearest-rank method. All
    /// zero without samples.
    pub fn of_ns(samples: &mut [u64]) -> Self {
        samples.sort_unstable();
        let rank = |percent: usize| {
            let rank = (samples.len() * percent).div_ceil(100).max(1);
            samples.get(rank - 1).map_or(0.0, |ns| (*ns as f64 / 100.0).round() / 10.0)
        };
        Self { min: rank(0), p50: rank(50), p90: rank(90), p99: rank(99) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples_by_nearest_rank() {
        let mut samples: Vec<u64> = (1..=200).rev().map(|n| n * 1000).collect();
        assert_eq!(
            Percentiles::of_ns(&mut samples),
            Percentiles { min: 1.0, p50: 100.0, p90: 180.0, p99: 198.0 }
        );
        let all = |us| Percentiles { min: us, p50: us, p90: us, p99: us };
        assert_eq!(Percentiles::of_ns(&mut [1550]), all(1.6));
        assert_eq!(Percentiles::of_ns(&mut []), all(0.0));
    }
}
