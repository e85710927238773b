//! `[liveness]`: when an instance is ended because its program is not well.

use super::TimeSpan;
use super::train::RequestPath;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Shortest and longest time between two probes.
const PERIODS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(3600)];
/// Shortest and longest time that an answer may take: meanwhile its probe has one of the node's few places.
const TIMEOUTS: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(60)];
/// Most failures in a row that an instance may be allowed.
const FAILURES_MAX: u32 = 100;
/// Longest path: the whole request has to fit into the buffer of a socket.
const PATH_MAX: usize = 1024;

/// `[liveness]`: a request that the node itself sends to each instance again and again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Liveness {
    /// Path and query of the request.
    pub path: RequestPath,
    /// How often it is sent.
    #[serde(default = "default_period")]
    pub period: TimeSpan,
    /// How long the answer may take.
    #[serde(default = "default_timeout")]
    pub timeout: TimeSpan,
    /// After so many failures in a row the instance is ended.
    #[serde(default = "default_failures")]
    pub failures: u32,
}

const fn default_period() -> TimeSpan {
    TimeSpan::seconds(10)
}

const fn default_timeout() -> TimeSpan {
    TimeSpan::seconds(1)
}

const fn default_failures() -> u32 {
    3
}

impl Liveness {
    /// The key that makes no sense, and why.
    pub(super) fn contradiction(&self) -> Option<(&'static str, String)> {
        let [shortest, longest] = PERIODS;
        if self.path.0.len() > PATH_MAX {
            return Some(("path", format!("it is longer than {PATH_MAX} bytes; shorten it")));
        }
        if !(shortest..=longest).contains(&self.period.0) {
            let why = "probes are sent every 1s to 1h; give such a `period`".to_owned();
            return Some(("period", why));
        }
        let [shortest, longest] = TIMEOUTS;
        if !(shortest..=longest.min(self.period.0)).contains(&self.timeout.0) {
            let why = format!(
                "an answer may take from 100ms to `period`, {}, and 1m at most; give such a `timeout`",
                self.period
            );
            return Some(("timeout", why));
        }
        if !(1..=FAILURES_MAX).contains(&self.failures) {
            let why = format!("give a number of `failures` from 1 to {FAILURES_MAX}");
            return Some(("failures", why));
        }
        None
    }
}
