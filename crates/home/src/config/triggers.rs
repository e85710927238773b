//! `[async]`, `[[schedules]]` and `cloudevents`: what calls a function without a client that
//! waits (docs/triggers.md).

use super::quantity::positive;
use super::train::{HeaderName, HeaderText, Method, RequestPath};
use super::{ByteSize, Connections, EntryKind, FunctionConfig, FunctionName, TimeSpan};
use crate::cron::Cron;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::time::Duration;
use thaw_store::Name;

/// Most schedules of a function.
pub const SCHEDULES_MAX: usize = 64;
/// Most bytes of the body of a schedule.
const SCHEDULE_BODY_MAX: usize = 64 << 10;
/// Largest body that an asynchronous invocation may have.
const BODY_MAX: ByteSize = ByteSize::mebibytes(4);
/// Largest queue of a function.
const BYTES_MAX: ByteSize = ByteSize::mebibytes(1024);
const ENTRIES_MAX: u32 = 100_000;
const ATTEMPTS_MAX: u32 = 100;
/// Longest attempt.
const ATTEMPT_MAX: Duration = Duration::from_secs(3600);
/// Longest wait between two attempts.
const BACKOFF_MAX: Duration = Duration::from_secs(3600);
/// Oldest that an invocation, or an idempotency key, may become.
const AGE_MAX: Duration = Duration::from_secs(14 * 24 * 3600);

/// A key that makes no sense, and why.
type Wrong = (&'static [&'static str], String);

/// `[async]`: whether clients may ask for an answer at once and the work later, and how that is
/// done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AsyncConfig {
    /// Attempts, the first one included.
    #[serde(deserialize_with = "positive")]
    pub attempts: NonZeroU32,
    /// The wait after the first failed attempt; it doubles each time.
    pub backoff: TimeSpan,
    /// The longest wait.
    pub backoff_max: TimeSpan,
    /// The age at which an invocation is given up.
    pub max_age: TimeSpan,
    /// Attempts at a time.
    #[serde(deserialize_with = "positive")]
    pub concurrency: NonZeroU32,
    /// Invocations in the queue.
    #[serde(deserialize_with = "positive")]
    pub entries: NonZeroU32,
    /// Bytes in the queue.
    pub bytes: ByteSize,
    /// Bytes of a body.
    pub body_max: ByteSize,
    /// Invocations that were given up and are kept.
    pub dead_letters: u32,
    /// How long an idempotency key is known.
    pub idempotency: TimeSpan,
    /// How long an attempt may take, to the end of its answer.
    pub timeout: TimeSpan,
    /// How long it is known what became of one that is done. Left out where it is the default:
    /// versions before do not read a section that has it.
    #[serde(skip_serializing_if = "is_default_results")]
    pub results: TimeSpan,
    /// The function that hears of those that are done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_success: Option<FunctionName>,
    /// The function that hears of those that were given up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_failure: Option<FunctionName>,
}

const RESULTS: TimeSpan = TimeSpan::seconds(3600);

fn is_default_results(results: &TimeSpan) -> bool {
    *results == RESULTS
}

impl Default for AsyncConfig {
    fn default() -> Self {
        const fn count(n: u32) -> NonZeroU32 {
            NonZeroU32::new(n).expect("a positive constant")
        }
        Self {
            attempts: count(3),
            backoff: TimeSpan::seconds(1),
            backoff_max: TimeSpan::seconds(5 * 60),
            max_age: TimeSpan::seconds(6 * 3600),
            concurrency: count(4),
            entries: count(10_000),
            bytes: ByteSize::mebibytes(64),
            body_max: ByteSize::mebibytes(1),
            dead_letters: 1000,
            idempotency: TimeSpan::seconds(24 * 3600),
            timeout: TimeSpan::seconds(15 * 60),
            results: RESULTS,
            on_success: None,
            on_failure: None,
        }
    }
}

/// One of `[[schedules]]`: when the node itself calls the function.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// Its name, by which the node knows when it has last fired.
    pub name: Name,
    /// When.
    pub cron: Cron,
    /// Where that is the time.
    #[serde(default)]
    pub timezone: TimeZone,
    /// Method; default: `POST` with a body, `GET` without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<Method>,
    /// Path and query.
    #[serde(default)]
    pub path: RequestPath,
    /// Further headers.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<HeaderName, HeaderText>,
    /// The body.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<String>,
    /// What becomes of times that were missed.
    #[serde(default)]
    pub catch_up: CatchUp,
    /// Whether it fires while its last invocation is not done.
    #[serde(default)]
    pub overlap: Overlap,
}

impl Schedule {
    /// The method that is sent.
    pub fn method(&self) -> &str {
        match &self.method {
            Some(Method(method)) => method,
            None if self.body.is_some() => "POST",
            None => "GET",
        }
    }
}

/// What becomes of times at which the node did not run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CatchUp {
    /// They are left out.
    #[default]
    None,
    /// The last of them is made up for.
    Last,
}

/// What a schedule does while its last invocation is in the queue or runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Overlap {
    /// It fires.
    #[default]
    Allow,
    /// It leaves this time out.
    Skip,
}

/// The name of a time zone of the IANA database.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TimeZone(String);

impl TimeZone {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.0
    }

    /// The zone.
    pub fn zone(&self) -> jiff::tz::TimeZone {
        jiff::tz::TimeZone::get(&self.0).unwrap_or(jiff::tz::TimeZone::UTC)
    }
}

impl Default for TimeZone {
    fn default() -> Self {
        Self("UTC".to_owned())
    }
}

impl<'de> Deserialize<'de> for TimeZone {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        match jiff::tz::TimeZone::get(&text) {
            Ok(_) => Ok(Self(text)),
            Err(_) => Err(serde::de::Error::custom(format!(
                "`{text}` is no time zone; write one of the IANA database, such as \
                 \"Europe/Berlin\" or \"UTC\""
            ))),
        }
    }
}

impl FunctionConfig {
    /// Whether anything of the function is ever queued.
    pub fn has_queue(&self) -> bool {
        self.r#async.is_some() || !self.schedules.is_empty()
    }

    /// How invocations of the queue are made: those of a function with schedules alone have the
    /// defaults.
    pub fn queue_terms(&self) -> AsyncConfig {
        self.r#async.clone().unwrap_or_default()
    }

    /// Whether a request may be for the node itself: it is to be queued, or is an event to check.
    pub fn looks_at_triggers(&self) -> bool {
        self.r#async.is_some() || self.cloudevents
    }

    pub(super) fn wrong_triggers(&self) -> Option<Wrong> {
        if !self.has_queue() && !self.cloudevents {
            return None;
        }
        let key: &[&str] = if self.r#async.is_some() {
            &["async"]
        } else if self.cloudevents {
            &["cloudevents"]
        } else {
            &["schedules"]
        };
        let kind = self.entry.kind;
        if !matches!(kind, EntryKind::Http | EntryKind::Stdin) {
            let why = format!(
                "`{}` is for functions that get HTTP requests, not for kind = \"{}\"; remove it",
                key[0],
                kind.name()
            );
            return Some((key, why));
        }
        if self.entry.connections == Connections::Handover && self.looks_at_triggers() {
            let why = "the gateway does not see the requests of connections that are handed over; \
                       remove `connections`";
            return Some((&["entry", "connections"], why.to_owned()));
        }
        let terms = self.r#async.as_ref();
        let destinations = terms.map(|terms| [&terms.on_success, &terms.on_failure]);
        if destinations.into_iter().flatten().flatten().any(|name| *name == self.name) {
            let why = "a function is not its own destination; name another function";
            return Some((&["async"], why.to_owned()));
        }
        terms.and_then(AsyncConfig::wrong).or_else(|| self.wrong_schedules())
    }

    fn wrong_schedules(&self) -> Option<Wrong> {
        let why = if self.schedules.len() > SCHEDULES_MAX {
            format!("a function can have {SCHEDULES_MAX} schedules at most; remove some")
        } else {
            let mut names = BTreeSet::new();
            self.schedules.iter().find_map(|schedule| {
                let name = &schedule.name;
                let body = schedule.body.as_ref().map_or(0, String::len);
                if !names.insert(name) {
                    return Some(format!("two schedules are named `{name}`; rename one of them"));
                }
                (body > SCHEDULE_BODY_MAX).then(|| {
                    format!("the body of schedule `{name}` is over {SCHEDULE_BODY_MAX} bytes; shorten it")
                })
            })?
        };
        Some((&["schedules"], why))
    }
}

impl AsyncConfig {
    fn wrong(&self) -> Option<Wrong> {
        let second = Duration::from_secs(1);
        let wrong: [(bool, &'static [&'static str], &str); 10] = [
            (self.dead_letters > ENTRIES_MAX, &["async", "dead_letters"], "give 100000 at most"),
            (self.attempts.get() > ATTEMPTS_MAX, &["async", "attempts"], "give 100 at most"),
            (
                self.backoff.0 < Duration::from_millis(100) || self.backoff.0 > self.backoff_max.0,
                &["async", "backoff"],
                "give at least \"100ms\", and no more than `backoff_max`",
            ),
            (self.backoff_max.0 > BACKOFF_MAX, &["async", "backoff_max"], "give \"1h\" at most"),
            (
                self.max_age.0 < second || self.max_age.0 > AGE_MAX,
                &["async", "max_age"],
                "give \"1s\" to \"336h\"",
            ),
            (self.entries.get() > ENTRIES_MAX, &["async", "entries"], "give 100000 at most"),
            (
                self.bytes > BYTES_MAX || self.body_max > BODY_MAX || self.body_max > self.bytes,
                &["async", "body_max"],
                "give 4MiB at most for `body_max`, 1GiB at most for `bytes`, and the larger for the latter",
            ),
            (self.results.0 > AGE_MAX, &["async", "results"], "give \"336h\" at most"),
            (self.idempotency.0 > AGE_MAX, &["async", "idempotency"], "give \"336h\" at most"),
            (
                self.timeout.0 < second || self.timeout.0 > ATTEMPT_MAX,
                &["async", "timeout"],
                "give \"1s\" to \"1h\"",
            ),
        ];
        let (_, keys, advice) = wrong.into_iter().find(|(is_wrong, ..)| *is_wrong)?;
        Some((keys, format!("`{}` is out of bounds; {advice}", keys[1])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn parse(keys: &str) -> Result<FunctionConfig, String> {
        let text = format!("name = \"f\"\ncommand = [\"x\"]\nport = 80\nrootfs = \"r\"\n{keys}\n");
        FunctionConfig::parse(Path::new("thaw.toml"), &text).map_err(|error| error.to_string())
    }

    #[test]
    fn a_section_alone_is_enough() {
        let config = parse("[async]").unwrap();
        assert!(config.has_queue() && config.looks_at_triggers());
        assert_eq!(config.queue_terms(), AsyncConfig::default());
        let config = parse("[[schedules]]\nname = \"a\"\ncron = \"@daily\"").unwrap();
        assert!(config.has_queue() && !config.looks_at_triggers());
        assert_eq!(
            (config.schedules[0].method(), config.schedules[0].timezone.name()),
            ("GET", "UTC")
        );
        assert!(!parse("").unwrap().has_queue());
    }

    #[test]
    fn what_was_read_is_written_and_read_again() {
        let keys = "cloudevents = true\n[async]\nattempts = 7\n[[schedules]]\nname = \"a\"\n\
                    cron = \"30 6 * * mon-fri\"\ntimezone = \"Europe/Berlin\"\nbody = \"x\"\n\
                    catch_up = \"last\"\noverlap = \"skip\"";
        let config = parse(keys).unwrap();
        let json = serde_json::to_value(&config).unwrap();
        assert_eq!(serde_json::from_value::<FunctionConfig>(json).unwrap(), config);
    }

    #[test]
    fn what_versions_before_do_not_know_is_written_only_if_it_is_used() {
        let written = |keys: &str| serde_json::to_value(parse(keys).unwrap()).unwrap();
        let section = written("[async]\nattempts = 7");
        for new in ["results", "on_success", "on_failure"] {
            assert!(section["async"].get(new).is_none(), "{section}");
        }
        assert_eq!(written("[async]\nresults = \"2h\"")["async"]["results"], "2h");
    }

    #[test]
    fn every_bound_is_told() {
        for (keys, word) in [
            ("[async]\nattempts = 0", "from 1"),
            ("[async]\nattempts = 101", "attempts"),
            ("[async]\nbackoff = \"1ms\"", "backoff"),
            ("[async]\nbackoff = \"10m\"", "backoff"),
            ("[async]\nbackoff_max = \"2h\"", "backoff_max"),
            ("[async]\nmax_age = \"0s\"", "max_age"),
            ("[async]\nentries = 100001", "entries"),
            ("[async]\nbody_max = \"5MiB\"", "body_max"),
            ("[async]\nbytes = \"512KiB\"", "bytes"),
            ("[async]\ndead_letters = 100001", "dead_letters"),
            ("[async]\nresults = \"337h\"", "results"),
            ("[async]\non_failure = \"f\"", "its own destination"),
            ("[async]\nidempotency = \"400h\"", "idempotency"),
            ("[async]\ntimeout = \"2h\"", "timeout"),
            ("[async]\ntimeout = \"10ms\"", "timeout"),
            ("[[schedules]]\nname = \"a\"\ncron = \"* * *\"", "day of month"),
            ("[[schedules]]\nname = \"a\"\ncron = \"@daily\"\ntimezone = \"Moon\"", "time zone"),
            (
                "schedules = [{ name = \"a\", cron = \"@daily\" }, { name = \"a\", cron = \"@daily\" }]",
                "two schedules",
            ),
            (
                "cloudevents = true\nlisten = \"127.0.0.1:9\"\n[entry]\nconnections = \"handover\"",
                "handed over",
            ),
            ("listen = \"127.0.0.1:9\"\n[async]\n[entry]\nkind = \"tcp\"", "kind"),
        ] {
            let error = parse(keys).expect_err(keys);
            assert!(error.contains(word), "{keys}: {error}");
        }
        let many = (0..65).map(|n| format!("[[schedules]]\nname = \"n{n}\"\ncron = \"@daily\"\n"));
        assert!(parse(&many.collect::<String>()).unwrap_err().contains("64"));
        let body = format!(
            "[[schedules]]\nname = \"a\"\ncron = \"@daily\"\nbody = \"{}\"",
            "x".repeat(70_000)
        );
        assert!(parse(&body).unwrap_err().contains("body"));
    }
}
