//! What happened lately that an operator wants to know of.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

/// Events that are kept.
const EVENTS_MAX: usize = 512;
/// Bytes of a detail.
const DETAIL_MAX: usize = 240;
/// An event is counted with an earlier one of the same kind and subject that is not older.
const TOGETHER_MS: u64 = 60_000;
/// How many events back such a one is looked for.
const LOOKED_AT: usize = 64;

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EventKind {
    /// An instance ended by itself, or because its liveness probes have failed.
    Ended,
    /// A function gets no requests for a while, since its instances crash.
    BackedOff,
    /// A version was taken out of service for its failures.
    RolledBack,
    /// A policy has denied outgoing connections.
    EgressDenied,
    /// The gateway answered in a function's place.
    Refused,
    /// An instance has given up its memory.
    Hibernated,
    /// A hibernated instance has woken.
    Woken,
    /// An instance was put to sleep.
    FellAsleep,
    /// One that was asleep is booted again.
    WokeUp,
    /// One that was asleep could not be booted again.
    Lost,
    /// Somebody did something by the dashboard.
    Operator,
}

impl EventKind {
    /// As in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ended => "ended",
            Self::BackedOff => "backed-off",
            Self::RolledBack => "rolled-back",
            Self::EgressDenied => "egress-denied",
            Self::Refused => "refused",
            Self::Hibernated => "hibernated",
            Self::Woken => "woken",
            Self::FellAsleep => "fell-asleep",
            Self::WokeUp => "woke-up",
            Self::Lost => "lost",
            Self::Operator => "operator",
        }
    }

    /// Whether an operator should look at it.
    pub fn is_bad(self) -> bool {
        use EventKind::{BackedOff, EgressDenied, Ended, Lost, Refused, RolledBack};
        matches!(self, Ended | BackedOff | RolledBack | EgressDenied | Refused | Lost)
    }
}

/// Something that happened, perhaps several times.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Event {
    /// When, the last time; milliseconds since 1970.
    pub time_ms: u64,
    /// What.
    pub kind: EventKind,
    /// The function or sandbox; empty: none.
    pub subject: String,
    /// More of it, in a few words.
    pub detail: String,
    /// How often.
    pub count: u64,
}

/// The latest events.
#[derive(Debug, Default)]
pub struct Events {
    latest: Mutex<VecDeque<Event>>,
}

impl Events {
    /// Notes one.
    pub fn note(&self, kind: EventKind, subject: &str, detail: &str, count: u64) {
        self.note_at(now_ms(), kind, subject, detail, count);
    }

    fn note_at(&self, time_ms: u64, kind: EventKind, subject: &str, detail: &str, count: u64) {
        let detail: String = detail.chars().take(DETAIL_MAX).collect();
        let mut latest = self.latest.lock().expect("no holder panics");
        let is_same = |event: &&mut Event| {
            event.kind == kind
                && event.subject == subject
                && event.detail == detail
                && time_ms.saturating_sub(event.time_ms) <= TOGETHER_MS
        };
        if kind != EventKind::Operator
            && let Some(same) = latest.iter_mut().rev().take(LOOKED_AT).find(is_same)
        {
            same.count += count;
            same.time_ms = time_ms;
            return;
        }
        if latest.len() == EVENTS_MAX {
            latest.pop_front();
        }
        latest.push_back(Event { time_ms, kind, subject: subject.to_owned(), detail, count });
    }

    /// The latest, newest first.
    pub fn latest(&self, most: usize) -> Vec<Event> {
        let mut all: Vec<_> = {
            let latest = self.latest.lock().expect("no holder panics");
            latest.iter().rev().cloned().collect()
        };
        all.sort_by_key(|event| std::cmp::Reverse(event.time_ms));
        all.truncate(most);
        all
    }
}

pub(crate) fn now_ms() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_that_come_again_are_one() {
        let events = Events::default();
        for second in 0..100 {
            events.note_at(second * 1000, EventKind::Refused, "f", "no_instance", 1);
        }
        events.note_at(100_000, EventKind::Refused, "f", "timeout", 1);
        events.note_at(300_000, EventKind::Refused, "f", "no_instance", 1);
        let counts: Vec<_> = events.latest(9).iter().map(|event| event.count).collect();
        assert_eq!(counts, [1, 1, 100]);
    }

    #[test]
    fn events_and_their_details_are_bounded() {
        let events = Events::default();
        for number in 0..2 * EVENTS_MAX {
            events.note(EventKind::Ended, &format!("f{number}"), &"x".repeat(9999), 1);
        }
        let latest = events.latest(usize::MAX);
        assert_eq!(latest.len(), EVENTS_MAX);
        assert_eq!(latest[0].detail.len(), DETAIL_MAX);
    }
}
