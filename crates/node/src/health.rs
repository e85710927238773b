//! How many requests of a version fail: whether it is worse than its `[rollback]` allows.
//!
//! Answers with a status of 500 to 599, answers that the gateway gives because an instance has
//! ended, was late or did not speak HTTP, and crashes of instances that serve nobody count as
//! failures. Refusals for want of room do not count: they say nothing of the program.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use thaw_home::config::{FunctionName, Rollback};
use tokio::sync::Notify;

/// How long it takes until a bound that is still passed is said again, if nothing came of the first
/// time.
const AGAIN_NS: u64 = 10_000_000_000;
/// Into so many parts the time is divided over which is counted.
const PARTS: u64 = 10;

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It was answered.
    Served,
    /// It was not, or with an error of the function's.
    Failed,
}

impl Verdict {
    /// By the status of the answer.
    pub fn of_status(status: u16) -> Self {
        if (500..600).contains(&status) { Self::Failed } else { Self::Served }
    }
}

/// Requests of a version.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
pub struct Requests {
    /// All that have ended.
    pub all: u64,
    /// Those that failed.
    pub failed: u64,
}

/// Counts the requests of one version. Times are nanoseconds of `CLOCK_MONOTONIC`.
#[derive(Debug, Default)]
pub(crate) struct Health {
    bound: Option<Rollback>,
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    /// Since the version is served.
    total: Requests,
    /// Parts of the window by their number since the begin of time, `PARTS` at most.
    parts: VecDeque<(u64, Requests)>,
    /// Until then it is not said that the bound is passed. It is said once; [`u64::MAX`]: it was.
    silent_until_ns: u64,
}

impl Health {
    /// No request yet. Without a bound, requests are counted only.
    pub fn new(bound: Option<Rollback>) -> Self {
        Self { bound, counts: Mutex::default() }
    }

    /// Since the version is served here.
    pub fn total(&self) -> Requests {
        self.counts.lock().expect("no holder panics").total
    }

    /// Counts again from nothing: the version was activated.
    pub fn begin_anew(&self) {
        let mut counts = self.counts.lock().expect("no holder panics");
        counts.parts.clear();
        counts.silent_until_ns = 0;
    }

    /// Nothing came of what was said: it is said again in a while, if the bound is passed then.
    pub fn say_again(&self, now_ns: u64) {
        let mut counts = self.counts.lock().expect("no holder panics");
        if counts.silent_until_ns == u64::MAX {
            counts.silent_until_ns = now_ns.saturating_add(AGAIN_NS);
        }
    }

    /// Notes the end of a request. Says in one sentence that the bound is passed, if it is, once.
    pub fn note(&self, verdict: Verdict, now_ns: u64) -> Option<String> {
        let mut counts = self.counts.lock().expect("no holder panics");
        counts.total.count(verdict);
        let bound = self.bound?;
        let part_ns = (bound.window.0.as_nanos() as u64 / PARTS).max(1);
        let part = now_ns / part_ns;
        match counts.parts.back_mut() {
            Some((last, requests)) if *last >= part => requests.count(verdict),
            _ => {
                let mut requests = Requests::default();
                requests.count(verdict);
                counts.parts.push_back((part, requests));
            }
        }
        counts.parts.retain(|(number, _)| number + PARTS > part);
        let recent = counts.recent();
        let is_worse = recent.failed * 100 > recent.all * u64::from(bound.percent);
        let is_silent = now_ns < counts.silent_until_ns;
        if is_silent || recent.all < u64::from(bound.requests.get()) || !is_worse {
            return None;
        }
        counts.silent_until_ns = u64::MAX;
        let Requests { all, failed } = recent;
        let (window, percent) = (bound.window, bound.percent);
        Some(format!(
            "{failed} of {all} requests failed within {window}, more than {percent} percent"
        ))
    }
}

/// Versions of which too many requests fail, each once, with the reason.
#[derive(Debug, Default)]
pub struct Failures {
    reported: Mutex<BTreeMap<(FunctionName, u32), String>>,
    news: Notify,
}

impl Failures {
    /// Has a version taken out of service, soon.
    pub fn report(&self, function: FunctionName, version: u32, reason: String) {
        self.reported.lock().expect("no holder panics").insert((function, version), reason);
        self.news.notify_one();
    }

    /// The next one, when there is one.
    pub async fn next(&self) -> (FunctionName, u32, String) {
        loop {
            let news = self.news.notified();
            let first = self.reported.lock().expect("no holder panics").pop_first();
            if let Some(((function, version), reason)) = first {
                return (function, version, reason);
            }
            news.await;
        }
    }
}

impl Counts {
    fn recent(&self) -> Requests {
        let mut sum = Requests::default();
        for (_, part) in &self.parts {
            sum.all += part.all;
            sum.failed += part.failed;
        }
        sum
    }
}

impl Requests {
    fn count(&mut self, verdict: Verdict) {
        self.all += 1;
        self.failed += u64::from(verdict == Verdict::Failed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_home::config::TimeSpan;

    const SECOND: u64 = 1_000_000_000;

    fn health(percent: u8, requests: u32) -> Health {
        let requests = requests.try_into().unwrap();
        let window = TimeSpan::seconds(10);
        Health::new(Some(Rollback { percent, requests, window, ..Rollback::default() }))
    }

    #[test]
    fn few_requests_say_nothing() {
        let health = health(5, 10);
        assert!((0..9).all(|_| health.note(Verdict::Failed, SECOND).is_none()));
        let why = health.note(Verdict::Failed, SECOND).unwrap();
        assert_eq!(why, "10 of 10 requests failed within 10s, more than 5 percent");
        assert_eq!(health.note(Verdict::Failed, SECOND), None, "it is said once");
        health.begin_anew();
        assert!((0..9).all(|_| health.note(Verdict::Failed, SECOND).is_none()));
        assert!(health.note(Verdict::Failed, SECOND).is_some());
        assert_eq!(health.total(), Requests { all: 21, failed: 21 });
    }

    #[test]
    fn what_came_to_nothing_is_said_again_if_it_still_holds() {
        let health = health(5, 10);
        health.say_again(SECOND);
        let fail = |second: u64| health.note(Verdict::Failed, second * SECOND);
        assert!((0..9).all(|_| fail(1).is_none()));
        assert!(fail(1).is_some(), "nobody was told yet");
        health.say_again(SECOND);
        assert_eq!((0..20).filter_map(|_| fail(5)).count(), 0);
        assert!((0..9).all(|_| fail(20).is_none()), "what was long ago does not count");
        assert!(fail(20).is_some());
        assert_eq!(fail(100), None);
    }

    #[test]
    fn the_bound_itself_is_allowed() {
        let health = health(50, 2);
        for _ in 0..100 {
            assert_eq!(health.note(Verdict::Served, SECOND), None);
            assert_eq!(health.note(Verdict::Failed, SECOND), None);
        }
        assert!(health.note(Verdict::Failed, SECOND).is_some());
    }

    #[test]
    fn what_is_long_ago_does_not_count() {
        let health = health(5, 10);
        for second in 0..1000 {
            assert_eq!(health.note(Verdict::Failed, 3 * second * SECOND), None);
        }
        assert!(health.counts.lock().unwrap().parts.len() <= PARTS as usize);
    }

    #[test]
    fn only_errors_of_the_function_are_failures() {
        assert_eq!(Verdict::of_status(499), Verdict::Served);
        assert_eq!(Verdict::of_status(500), Verdict::Failed);
        assert_eq!(Verdict::of_status(599), Verdict::Failed);
        let uncounted = Health::new(None);
        assert!((0..100).all(|_| uncounted.note(Verdict::Failed, 0).is_none()));
    }
}
