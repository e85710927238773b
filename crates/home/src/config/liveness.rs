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
/// Longest name of a service, for the same reason.
const SERVICE_MAX: usize = 255;

/// What a program is asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProbeKind {
    /// To answer a request.
    #[default]
    Http,
    /// To have a connection.
    Tcp,
    /// To answer a health check of gRPC (`grpc.health.v1.Health/Check`).
    Grpc,
}

impl ProbeKind {
    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Tcp => "tcp",
            Self::Grpc => "grpc",
        }
    }
}

/// `[liveness]`: what the node itself asks each instance again and again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Liveness {
    /// What it is.
    #[serde(default)]
    pub kind: ProbeKind,
    /// Path and query of the request, which a probe of HTTP has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<RequestPath>,
    /// The service that a probe of gRPC asks about; none: the server as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<String>,
    /// How often an instance is asked.
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
        match (self.kind, &self.path) {
            (ProbeKind::Http, None) => {
                let why = "a probe needs a `path`, unless it is of `kind = \"tcp\"` or `\"grpc\"`; give one";
                return Some(("kind", why.to_owned()));
            }
            (ProbeKind::Tcp | ProbeKind::Grpc, Some(_)) => {
                let kind = self.kind.name();
                let why = format!(
                    "a probe of `kind = \"{kind}\"` asks for no `path`; remove one of them"
                );
                return Some(("path", why));
            }
            (ProbeKind::Http, Some(path)) if path.0.len() > PATH_MAX => {
                return Some(("path", format!("it is longer than {PATH_MAX} bytes; shorten it")));
            }
            _ => {}
        }
        if let Some(why) = self.wrong_service() {
            return Some(("service", why));
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

    fn wrong_service(&self) -> Option<String> {
        let service = self.service.as_ref()?;
        if self.kind != ProbeKind::Grpc {
            return Some(
                "only a probe of `kind = \"grpc\"` asks about a `service`; remove it".to_owned(),
            );
        }
        let is_too_long = service.len() > SERVICE_MAX;
        is_too_long.then(|| format!("it is longer than {SERVICE_MAX} bytes; shorten it"))
    }
}
