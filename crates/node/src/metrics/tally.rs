//! Counters that only rise, by function; two readings of them give a sample.

use crate::boots::{BootKind, BootRecord};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock};
use std::time::Duration;

/// Most functions that have a history of their own. All others share one, under the name `*`.
pub const FUNCTIONS_MAX: usize = 256;
/// Stands for all functions beyond; no function has this name.
pub const OTHERS: &str = "*";

/// Buckets of times: four to each power of two, from a microsecond to some 70 minutes.
const BUCKETS: usize = 128;

/// Counters of all functions.
#[derive(Debug, Default)]
pub(crate) struct Tallies {
    functions: RwLock<HashMap<String, Arc<Tally>>>,
    /// Of requests that belong to no function.
    nobody: Tally,
}

/// Counters of one function.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// Responses to routed requests, by the first digit of their status code.
    responses: [AtomicU64; 6],
    refusals: AtomicU64,
    boots: [AtomicU64; BootKind::ALL.len()],
    request: Times,
    queue: Times,
    boot: Times,
    run: Times,
}

/// How long something took.
#[derive(Debug)]
struct Times {
    buckets: [AtomicU64; BUCKETS],
    /// Sum in nanoseconds.
    sum: AtomicU64,
}

impl Default for Times {
    fn default() -> Self {
        Self { buckets: [const { AtomicU64::new(0) }; BUCKETS], sum: AtomicU64::new(0) }
    }
}

/// The counters at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reading {
    /// Responses, by the first digit of their status code.
    pub responses: [u64; 6],
    pub refusals: u64,
    /// In the order of [`BootKind::ALL`].
    pub boots: [u64; BootKind::ALL.len()],
    /// From the arrival of a routed request to the end of its response.
    pub request: TimesReading,
    /// From the arrival until an instance had it.
    pub queue: TimesReading,
    /// Of a boot, from the acceptance to the first instruction.
    pub boot: TimesReading,
    /// Of a boot, from the first instruction to the first byte of the response.
    pub run: TimesReading,
}

/// Times at one moment, or between two.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TimesReading {
    buckets: Vec<u64>,
    sum: u64,
}

fn bucket_of(duration: Duration) -> usize {
    let micros = (duration.as_nanos() as f64 / 1000.0).max(1.0);
    ((micros.log2() * 4.0) as usize).min(BUCKETS - 1)
}

/// Lower end of a bucket in milliseconds.
fn start_ms(bucket: usize) -> f64 {
    (bucket as f64 / 4.0).exp2() / 1000.0
}

impl Times {
    fn add(&self, duration: Duration) {
        self.buckets[bucket_of(duration)].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(duration.as_nanos() as u64, Ordering::Relaxed);
    }

    fn read(&self) -> TimesReading {
        let buckets = self.buckets.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        TimesReading { buckets, sum: self.sum.load(Ordering::Relaxed) }
    }
}

impl TimesReading {
    /// What came since an earlier reading.
    pub fn since(&self, before: &Self) -> Self {
        let old = before.buckets.iter().chain(std::iter::repeat(&0));
        let buckets = self.buckets.iter().zip(old).map(|(now, old)| now.saturating_sub(*old));
        Self { buckets: buckets.collect(), sum: self.sum.saturating_sub(before.sum) }
    }

    /// Adds those of others.
    pub fn add(&mut self, other: &Self) {
        self.buckets.resize(self.buckets.len().max(other.buckets.len()), 0);
        for (sum, more) in self.buckets.iter_mut().zip(&other.buckets) {
            *sum += more;
        }
        self.sum += other.sum;
    }

    /// How many there were.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Mean in milliseconds; `None`: there were none.
    pub fn mean_ms(&self) -> Option<f64> {
        let count = self.count();
        (count > 0).then(|| self.sum as f64 / count as f64 / 1e6)
    }

    /// The time in milliseconds that this share of them did not exceed, as far as buckets say.
    pub fn quantile_ms(&self, share: f64) -> Option<f64> {
        let rank = (self.count() as f64 * share).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (bucket, &count) in self.buckets.iter().enumerate() {
            if seen + count >= rank && count > 0 {
                let (start, end) = (start_ms(bucket), start_ms(bucket + 1));
                return Some(start + (end - start) * (rank - seen) as f64 / count as f64);
            }
            seen += count;
        }
        None
    }
}

impl Tally {
    fn read(&self) -> Reading {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Reading {
            responses: self.responses.each_ref().map(load),
            refusals: load(&self.refusals),
            boots: self.boots.each_ref().map(load),
            request: self.request.read(),
            queue: self.queue.read(),
            boot: self.boot.read(),
            run: self.run.read(),
        }
    }
}

impl Reading {
    /// What came since an earlier reading.
    pub fn since(&self, before: &Self) -> Self {
        let less = |now: u64, old: u64| now.saturating_sub(old);
        Self {
            responses: std::array::from_fn(|i| less(self.responses[i], before.responses[i])),
            refusals: less(self.refusals, before.refusals),
            boots: std::array::from_fn(|i| less(self.boots[i], before.boots[i])),
            request: self.request.since(&before.request),
            queue: self.queue.since(&before.queue),
            boot: self.boot.since(&before.boot),
            run: self.run.since(&before.run),
        }
    }

    /// Adds another function's.
    pub fn add(&mut self, other: &Self) {
        for (sum, more) in self.responses.iter_mut().zip(other.responses) {
            *sum += more;
        }
        self.refusals += other.refusals;
        for (sum, more) in self.boots.iter_mut().zip(other.boots) {
            *sum += more;
        }
        self.request.add(&other.request);
        self.queue.add(&other.queue);
        self.boot.add(&other.boot);
        self.run.add(&other.run);
    }
}

impl Tallies {
    fn of(&self, function: &str) -> Arc<Tally> {
        if let Some(tally) = self.functions.read().expect("no holder panics").get(function) {
            return tally.clone();
        }
        let mut functions = self.functions.write().expect("no holder panics");
        let has_room = functions.len() < FUNCTIONS_MAX || functions.contains_key(function);
        let name = if has_room { function } else { OTHERS };
        functions.entry(name.to_owned()).or_default().clone()
    }

    /// A routed request was answered.
    pub fn responded(&self, function: Option<&str>, status: u16, duration: Duration) {
        let class = usize::from(status / 100).min(5);
        let note = |tally: &Tally| {
            tally.responses[class].fetch_add(1, Ordering::Relaxed);
            tally.request.add(duration);
        };
        self.on(function, note);
    }

    /// The gateway answered in the place of a function, or of none.
    pub fn refused(&self, function: Option<&str>) {
        self.on(function, |tally| {
            tally.refusals.fetch_add(1, Ordering::Relaxed);
        });
    }

    fn on(&self, function: Option<&str>, note: impl FnOnce(&Tally)) {
        match function {
            Some(function) => note(&self.of(function)),
            None => note(&self.nobody),
        }
    }

    /// An instance has a request, or a connection.
    pub fn placed(&self, function: &str, waited: Duration) {
        self.of(function).queue.add(waited);
    }

    /// A boot is complete; its response may be there already.
    pub fn booted(&self, boot: &BootRecord) {
        let tally = self.of(boot.function.as_str());
        tally.boots[boot.kind as usize].fetch_add(1, Ordering::Relaxed);
        let ran = boot.phases.first_instruction.unwrap_or(boot.phases.zygote);
        tally.boot.add(Duration::from_nanos(ran));
        self.answered(boot);
    }

    /// The response of a boot has begun.
    pub fn answered(&self, boot: &BootRecord) {
        let Some(first_byte) = boot.phases.first_byte else { return };
        let ran = boot.phases.first_instruction.unwrap_or(boot.phases.zygote);
        let took = Duration::from_nanos(first_byte.saturating_sub(ran));
        self.of(boot.function.as_str()).run.add(took);
    }

    /// All counters, by function; those of nobody under the empty name.
    pub fn read(&self) -> HashMap<String, Reading> {
        let functions = self.functions.read().expect("no holder panics");
        let own = functions.iter().map(|(name, tally)| (name.clone(), tally.read()));
        own.chain([(String::new(), self.nobody.read())]).collect()
    }

    /// Forgets functions that are there no more.
    pub fn keep_only(&self, is_kept: impl Fn(&str) -> bool) {
        let mut functions = self.functions.write().expect("no holder panics");
        functions.retain(|name, _| name == OTHERS || is_kept(name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_in_the_bucket_of_their_value() {
        let times = Times::default();
        for millis in 1..=100 {
            times.add(Duration::from_millis(millis));
        }
        let reading = times.read();
        assert_eq!(reading.count(), 100);
        for (share, exact) in [(0.5, 50.0), (0.95, 95.0), (0.01, 1.0)] {
            let found = reading.quantile_ms(share).unwrap();
            assert!((found / exact - 1.0).abs() < 0.2, "{share}: {found}");
        }
        assert!((reading.mean_ms().unwrap() - 50.5).abs() < 0.01);
        assert_eq!(TimesReading::default().quantile_ms(0.5), None);
    }

    #[test]
    fn a_window_has_only_what_came_in_it() {
        let tallies = Tallies::default();
        tallies.responded(Some("f"), 200, Duration::from_millis(1));
        let before = tallies.read();
        tallies.responded(Some("f"), 503, Duration::from_millis(9));
        tallies.refused(None);
        let window = tallies.read()["f"].since(&before["f"]);
        assert_eq!((window.responses[2], window.responses[5]), (0, 1));
        assert_eq!(window.request.count(), 1);
        assert_eq!(tallies.read()[""].refusals, 1);
    }

    #[test]
    fn functions_beyond_the_bound_share_one_history() {
        let tallies = Tallies::default();
        for number in 0..FUNCTIONS_MAX + 50 {
            tallies.placed(&format!("f{number}"), Duration::ZERO);
        }
        let all = tallies.read();
        // One is of requests without a function.
        assert_eq!(all.len(), FUNCTIONS_MAX + 2);
        assert_eq!(all[OTHERS].queue.count(), 50);
        tallies.keep_only(|name| name == "f1");
        assert_eq!(tallies.read().len(), 3);
    }

    #[test]
    fn every_duration_has_a_bucket() {
        for duration in [Duration::ZERO, Duration::from_nanos(1), Duration::MAX] {
            assert!(bucket_of(duration) < BUCKETS);
        }
    }
}
