//! `[rollback]`: when a new version of a function is taken out of service by itself.

use super::TimeSpan;
use super::quantity::positive;
use serde::{Deserialize, Serialize};
use std::num::NonZeroU32;

/// `[rollback]`: how many requests of a new version may fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rollback {
    /// Of a hundred requests so many may fail.
    pub percent: u8,
    /// Over which time requests are counted.
    pub window: TimeSpan,
    /// Fewer requests say nothing.
    #[serde(deserialize_with = "positive")]
    pub requests: NonZeroU32,
    /// How long after its activation a version is watched; one that has only a share of the
    /// requests is watched as long as it has that.
    pub watch: TimeSpan,
}

impl Default for Rollback {
    fn default() -> Self {
        Self {
            percent: 5,
            window: TimeSpan::seconds(60),
            requests: NonZeroU32::new(20).expect("a positive constant"),
            watch: TimeSpan::seconds(10 * 60),
        }
    }
}

impl Rollback {
    /// The key that makes no sense, and why.
    pub(super) fn contradiction(&self) -> Option<(&'static str, String)> {
        if self.percent >= 100 {
            let why = "no more than all requests can fail; give a `percent` below 100".to_owned();
            return Some(("percent", why));
        }
        let window = self.window.0.as_secs_f64();
        if !(1.0..=3600.0).contains(&window) {
            let why = "requests are counted over 1s to 1h; give such a `window`".to_owned();
            return Some(("window", why));
        }
        None
    }
}
