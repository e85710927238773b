//! Functions that crash again and again.
//!
//! All copies of an image have the same addresses and the same stack canary, and a
//! crash yields a fresh copy of it: somebody who can make a program crash could guess
//! both in peace. After a number of crashes in a minute, therefore, the function backs
//! off (its clients get 503), and its image is frozen anew, which gives it other
//! addresses (Catalyzer, 6.8: layout refresh).

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;
use thaw_home::config::FunctionName;
use tokio::sync::Notify;

/// In which time crashes are counted.
const WINDOW: Duration = Duration::from_secs(60);
/// How long a function backs off for the first time; each further time takes twice as
/// long as the last.
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
/// How long it backs off at most.
const LONGEST_BACKOFF: Duration = Duration::from_secs(300);
/// After this long without backing off, the next time is the first again.
const FORGIVEN_AFTER: Duration = Duration::from_secs(1800);

/// The crashes of one function. Times are nanoseconds of `CLOCK_MONOTONIC`.
#[derive(Debug)]
pub struct Crashes {
    /// Crashes within [`WINDOW`] after which the function backs off; 0: never.
    limit: usize,
    /// Until when it backs off; 0: it does not.
    until_ns: AtomicU64,
    history: Mutex<History>,
}

#[derive(Debug, Default)]
struct History {
    /// When the last ones were, `limit` at most.
    recent: VecDeque<u64>,
    /// How long it backed off the last time.
    backoff: Duration,
    /// When that ended.
    ended_ns: u64,
}

impl Crashes {
    /// No crash yet.
    pub fn new(limit: u32) -> Self {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        Self { limit, until_ns: AtomicU64::new(0), history: Mutex::default() }
    }

    /// How long the function still backs off at `now_ns`, if it does.
    pub fn backs_off(&self, now_ns: u64) -> Option<Duration> {
        let left = self.until_ns.load(Ordering::Relaxed).saturating_sub(now_ns);
        (left > 0).then(|| Duration::from_nanos(left))
    }

    /// Notes a crash. Returns for how long the function backs off, if this one begins it.
    pub fn note(&self, now_ns: u64) -> Option<Duration> {
        if self.limit == 0 || self.backs_off(now_ns).is_some() {
            return None;
        }
        let mut history = self.history();
        let oldest = now_ns.saturating_sub(WINDOW.as_nanos() as u64);
        history.recent.retain(|&at| at >= oldest);
        history.recent.push_back(now_ns);
        if history.recent.len() < self.limit {
            return None;
        }
        history.recent.clear();
        let quiet_ns = now_ns.saturating_sub(history.ended_ns);
        let is_first = history.backoff.is_zero() || quiet_ns > FORGIVEN_AFTER.as_nanos() as u64;
        history.backoff = match is_first {
            true => FIRST_BACKOFF,
            false => (history.backoff * 2).min(LONGEST_BACKOFF),
        };
        history.ended_ns = now_ns + history.backoff.as_nanos() as u64;
        self.until_ns.store(history.ended_ns, Ordering::Relaxed);
        Some(history.backoff)
    }

    /// Ends a time of backing off: the image has other addresses by now.
    pub fn end_backoff(&self) {
        self.until_ns.store(0, Ordering::Relaxed);
    }

    /// After how many crashes in a minute the function backs off; 0: never.
    pub fn limit(&self) -> u32 {
        self.limit as u32
    }

    fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().expect("no holder panics")
    }
}

/// Versions of functions whose image is to be frozen anew, each once.
#[derive(Debug, Default)]
pub struct Refreshes {
    wanted: Mutex<BTreeSet<(FunctionName, u32)>>,
    news: Notify,
}

impl Refreshes {
    /// Has the image of a version of a function frozen anew, soon.
    pub fn want(&self, function: FunctionName, version: u32) {
        self.wanted.lock().expect("no holder panics").insert((function, version));
        self.news.notify_one();
    }

    /// The next version of a function, when there is one.
    pub async fn next(&self) -> (FunctionName, u32) {
        loop {
            let news = self.news.notified();
            if let Some(version) = self.wanted.lock().expect("no holder panics").pop_first() {
                return version;
            }
            news.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn many_crashes_in_a_minute_make_it_back_off_longer_each_time() {
        let crashes = Crashes::new(3);
        let mut now = 1000 * SECOND;
        for expected in [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300] {
            assert_eq!(crashes.note(now), None);
            assert_eq!(crashes.note(now), None);
            assert_eq!(crashes.note(now), Some(Duration::from_secs(expected)));
            assert_eq!(crashes.note(now), None, "those that were under way do not count");
            assert_eq!(crashes.backs_off(now), Some(Duration::from_secs(expected)));
            now += expected * SECOND;
            assert_eq!(crashes.backs_off(now), None);
        }
        now += FORGIVEN_AFTER.as_nanos() as u64 + 1;
        let backoffs: Vec<_> = (0..3).filter_map(|_| crashes.note(now)).collect();
        assert_eq!(backoffs, [FIRST_BACKOFF]);
    }

    #[test]
    fn rare_crashes_change_nothing() {
        let crashes = Crashes::new(2);
        for minute in 1..100 {
            assert_eq!(crashes.note(minute * 61 * SECOND), None);
        }
        let never = Crashes::new(0);
        assert!((0..1000).all(|_| never.note(SECOND).is_none()));
    }

    #[tokio::test]
    async fn each_function_is_refreshed_once() {
        let refreshes = Refreshes::default();
        let name = |text: &str| text.parse::<FunctionName>().unwrap();
        for text in ["b", "a", "b"] {
            refreshes.want(name(text), 1);
        }
        let wanted = [refreshes.next().await, refreshes.next().await];
        assert_eq!(wanted, [(name("a"), 1), (name("b"), 1)]);
        let none = tokio::time::timeout(Duration::from_millis(20), refreshes.next());
        none.await.unwrap_err();
    }
}
