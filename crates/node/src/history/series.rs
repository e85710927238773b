//! Samples of one function, or of the node, over the last hour.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Samples that are kept: an hour.
pub(super) const SAMPLES: usize = 720;

macro_rules! columns {
    ($($(#[$doc:meta])* $variant:ident = $name:literal),* $(,)?) => {
        /// What a sample has. Rates are per second, times in milliseconds, memory in bytes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Column { $($(#[$doc])* $variant),* }

        /// Names of the columns, in their order.
        pub const COLUMNS: &[&str] = &[$($name),*];
    };
}

columns! {
    /// Requests, and connections that are handed over, that an instance got.
    Requests = "requests",
    /// Responses of class 2 and 3.
    Ok = "ok",
    /// Responses of class 4.
    ClientErrors = "client_errors",
    /// Responses of class 5.
    ServerErrors = "server_errors",
    /// Answers that the gateway gave in the function's place.
    Refusals = "refusals",
    /// Half of the routed requests took no longer.
    RequestP50 = "request_p50",
    /// 95 of 100 took no longer.
    RequestP95 = "request_p95",
    /// Mean time until an instance had a request.
    Queue = "queue",
    /// 95 of 100 had waited no longer.
    QueueP95 = "queue_p95",
    /// Mean time from the acceptance to the first instruction of a boot.
    Boot = "boot",
    /// 95 of 100 boots took no longer.
    BootP95 = "boot_p95",
    /// Mean time from the first instruction of a boot to the first byte of the response.
    Run = "run",
    /// Boots from an image on disk.
    Cold = "cold",
    /// Boots from an image in memory.
    Warm = "warm",
    /// Boots from a live template.
    Fork = "fork",
    /// Boots of instances that were booted ahead.
    Ready = "ready",
    /// Boots of instances that were asleep.
    Woken = "woken",
    /// Instances that serve or boot.
    Busy = "busy",
    /// Instances that wait.
    Idle = "idle",
    /// Instances that have given up their memory.
    Hibernated = "hibernated",
    /// Instances without a process.
    Asleep = "asleep",
    /// Instances that were booted ahead.
    Ahead = "ahead",
    /// Memory of all sandboxes; of the node only.
    Memory = "memory",
    /// Processors' worth of CPU time; of the node only.
    Cpu = "cpu",
    /// Zygotes that are ready; of the node only.
    Zygotes = "zygotes",
}

/// One sample; a value that is not known is NaN.
pub(super) type Sample = [f32; COLUMNS.len()];

/// Samples, one every interval, the oldest first.
#[derive(Clone, Debug, Default)]
pub struct Series {
    samples: VecDeque<Sample>,
}

impl Series {
    pub(super) fn push(&mut self, sample: Sample) {
        if self.samples.len() == SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back(sample);
    }

    /// Values of a column, the oldest first.
    pub fn column(&self, column: Column) -> impl DoubleEndedIterator<Item = f32> + '_ {
        self.samples.iter().map(move |sample| sample[column as usize])
    }

    /// The newest value of a column, if it is known.
    pub fn last(&self, column: Column) -> Option<f32> {
        self.samples.back().map(|sample| sample[column as usize]).filter(|value| !value.is_nan())
    }

    /// Whether nothing happened in the hour.
    pub(super) fn is_silent(&self) -> bool {
        self.samples.iter().all(|sample| sample.iter().all(|value| value.is_nan() || *value == 0.0))
    }

    /// The samples as columns, the newest at `end_ms`.
    pub(super) fn view(&self, end_ms: u64, interval_ms: u64) -> SeriesView {
        let count = self.samples.len() as u64;
        let time = |index: u64| end_ms.saturating_sub((count - 1 - index) * interval_ms);
        let values = |column: usize| {
            let values = self.samples.iter().map(|sample| sample[column]);
            values.map(|value| (!value.is_nan()).then(|| rounded(value))).collect()
        };
        SeriesView {
            interval_ms,
            times_ms: (0..count).map(time).collect(),
            columns: COLUMNS.iter().map(ToString::to_string).collect(),
            values: (0..COLUMNS.len()).map(values).collect(),
        }
    }
}

/// Four digits are enough for a chart, and short.
fn rounded(value: f32) -> f64 {
    let value = f64::from(value);
    if value == 0.0 {
        return 0.0;
    }
    let scale = 10f64.powi(3 - value.abs().log10().floor() as i32);
    (value * scale).round() / scale
}

/// Samples as the API shows them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SeriesView {
    /// Milliseconds between two samples.
    pub interval_ms: u64,
    /// When they were taken, milliseconds since 1970, the oldest first.
    pub times_ms: Vec<u64>,
    /// Names of the columns.
    pub columns: Vec<String>,
    /// Values of each column; null: not known.
    pub values: Vec<Vec<Option<f64>>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_hour_is_kept_and_no_more() {
        let mut series = Series::default();
        for number in 0..SAMPLES + 10 {
            let mut sample = [f32::NAN; COLUMNS.len()];
            sample[Column::Requests as usize] = number as f32;
            series.push(sample);
        }
        let view = series.view(10_000_000, 5000);
        assert_eq!(view.times_ms.len(), SAMPLES);
        assert_eq!(view.times_ms.last(), Some(&10_000_000));
        assert_eq!(view.times_ms[SAMPLES - 2], 10_000_000 - 5000);
        assert_eq!(view.values[0][0], Some(10.0));
        assert_eq!(view.values[1][0], None);
        assert_eq!(series.last(Column::Requests), Some((SAMPLES + 9) as f32));
        assert_eq!(series.last(Column::Ok), None);
    }

    #[test]
    fn columns_have_their_names() {
        assert_eq!(COLUMNS[Column::Requests as usize], "requests");
        assert_eq!(COLUMNS[Column::Zygotes as usize], "zygotes");
        assert_eq!(COLUMNS.len(), Column::Zygotes as usize + 1);
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(rounded(0.123_456_78), 0.1235);
        assert_eq!(rounded(123_456.0), 123_500.0);
        assert_eq!(rounded(0.0), 0.0);
    }
}
