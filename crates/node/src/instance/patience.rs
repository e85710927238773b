//! How long a connection may be silent: judged by what its socket has carried.

use super::launch::Client;
use crate::socket::{Traffic, traffic, unread};
use std::time::Duration;
use thaw_home::config::{EntryKind, FunctionConfig};

/// How long after its last answer a connection to a version that is served no longer ends: as
/// long as a client may take to read it and to ask once more at once.
const RETIRED_ANSWERED: Duration = Duration::from_millis(200);
/// The same where nobody knows whose turn it is: no byte has moved for so long.
const RETIRED_SILENT: Duration = Duration::from_secs(2);
/// How long until such a connection is looked at again.
const RETIRED_LOOK: Duration = Duration::from_millis(100);

/// What a connection's silence means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Look again after this time.
    Fine(Duration),
    /// The client has asked nothing for longer than the function keeps idle connections.
    Idle,
    /// A request waits for its answer longer than the function's timeout.
    Late,
}

/// The times of a function's connections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// How long a request may wait for its answer; `None` where the protocol is not
    /// known.
    pub answer: Option<Duration>,
    /// When to look at a connection for the first time.
    pub first_look: Duration,
    /// How long the function keeps idle connections.
    pub keep_alive: Duration,
}

impl Patience {
    /// The times of a function's connections, if they are kept here: requests that
    /// are read from standard input, and flows of datagrams, have a task each that does.
    pub(crate) fn of(config: &FunctionConfig) -> Option<Self> {
        let limits = &config.limits;
        let (first_look, keep_alive) = (limits.timeout.0, limits.keep_alive.0);
        match config.entry.kind {
            EntryKind::Http => Some(Self { answer: Some(first_look), first_look, keep_alive }),
            EntryKind::Tcp => Some(Self { answer: None, first_look, keep_alive }),
            EntryKind::Stdin | EntryKind::Udp | EntryKind::Sandbox => None,
        }
    }

    /// From now on connections are idle soon; says whether they were not before.
    pub(crate) fn retire(&mut self) -> bool {
        let idle = if self.answer.is_some() { RETIRED_ANSWERED } else { RETIRED_SILENT };
        let is_news = self.keep_alive > idle;
        self.keep_alive = self.keep_alive.min(idle);
        self.first_look = self.first_look.min(RETIRED_LOOK);
        is_news
    }

    /// For how long neither side of a connection waits for the other; `None`: one does, or there
    /// is something that the instance has not read.
    pub(crate) fn silent_for(&self, client: &Client) -> Option<Duration> {
        let traffic = traffic(&client.socket).ok()?;
        let is_read = unread(&client.socket).is_ok_and(|bytes| bytes == 0);
        self.silence(traffic).filter(|_| is_read)
    }

    /// The same by what it has carried, if all was read.
    fn silence(&self, traffic: Traffic) -> Option<Duration> {
        let Traffic { sent, last_sent_ms, last_received_ms, .. } = traffic;
        let is_answered = sent > 0 && last_sent_ms <= last_received_ms;
        let last_ms = match (self.answer, sent) {
            (Some(_), _) => is_answered.then_some(last_sent_ms)?,
            (None, 0) => last_received_ms,
            (None, _) => last_received_ms.min(last_sent_ms),
        };
        Some(Duration::from_millis(last_ms.into()))
    }

    /// Judges a connection by what it has carried.
    pub(crate) fn judge(&self, traffic: Traffic) -> Verdict {
        match self.answer {
            Some(limit) => judge(traffic, limit, self.keep_alive),
            None => judge_silence(traffic, self.keep_alive),
        }
    }
}

/// Judges a connection by what it carried. A request counts as answered when
/// the last byte sent is younger than the last byte received; so a response
/// that makes progress is never late, and neither is a slow upload.
fn judge(traffic: Traffic, limit: Duration, keep_alive: Duration) -> Verdict {
    let since_sent = Duration::from_millis(traffic.last_sent_ms.into());
    let since_received = Duration::from_millis(traffic.last_received_ms.into());
    let waits = traffic.sent == 0 || since_received < since_sent;
    let (elapsed, allowed, verdict) = match waits {
        true => (since_received, limit, Verdict::Late),
        false => (since_sent, keep_alive, Verdict::Idle),
    };
    match allowed.checked_sub(elapsed) {
        // The counters have a resolution of some milliseconds.
        Some(left) if left > Duration::from_millis(10) => {
            let least = Duration::from_millis(50).min(limit);
            Verdict::Fine(left.min(limit).max(least))
        }
        _ => verdict,
    }
}

/// Judges a connection whose protocol is not known: nobody can say whose turn it
/// is, so it is only ever idle.
fn judge_silence(traffic: Traffic, keep_alive: Duration) -> Verdict {
    let last_ms = match traffic.sent {
        0 => traffic.last_received_ms,
        _ => traffic.last_received_ms.min(traffic.last_sent_ms),
    };
    match keep_alive.checked_sub(Duration::from_millis(last_ms.into())) {
        Some(left) if left > Duration::from_millis(10) => Verdict::Fine(left),
        _ => Verdict::Idle,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(2);
    const KEEP: Duration = Duration::from_secs(60);

    fn verdict(sent: u64, last_sent_ms: u32, last_received_ms: u32) -> Verdict {
        let traffic = Traffic { received: 10, sent, last_sent_ms, last_received_ms };
        judge(traffic, LIMIT, KEEP)
    }

    #[test]
    fn a_request_without_an_answer_is_late() {
        assert_eq!(verdict(0, 0, 2000), Verdict::Late);
        assert_eq!(verdict(5, 9000, 2000), Verdict::Late, "the second request");
    }

    #[test]
    fn connections_of_a_retired_version_are_idle_soon() {
        let mut patience = Patience { answer: Some(LIMIT), first_look: LIMIT, keep_alive: KEEP };
        let answered = Traffic { received: 9, sent: 9, last_sent_ms: 250, last_received_ms: 300 };
        let waiting = Traffic { received: 9, sent: 0, last_sent_ms: 0, last_received_ms: 250 };
        assert!(matches!(patience.judge(answered), Verdict::Fine(_)));
        assert!(patience.retire());
        assert!(!patience.retire(), "it is known already");
        assert_eq!(patience.judge(answered), Verdict::Idle);
        assert!(matches!(patience.judge(waiting), Verdict::Fine(_)), "it gets its answer");
    }

    #[test]
    fn progress_is_not_late() {
        assert_eq!(verdict(0, 0, 500), Verdict::Fine(Duration::from_millis(1500)), "a slow upload");
        assert_eq!(verdict(5, 100, 9000), Verdict::Fine(LIMIT), "a slow download");
    }

    #[test]
    fn a_connection_of_an_unknown_protocol_is_never_late() {
        let verdict = |sent, last_sent_ms, last_received_ms| {
            let traffic = Traffic { received: 10, sent, last_sent_ms, last_received_ms };
            judge_silence(traffic, KEEP)
        };
        assert_eq!(verdict(0, 0, 59_000), Verdict::Fine(Duration::from_secs(1)));
        assert_eq!(verdict(5, 1_000, 90_000), Verdict::Fine(Duration::from_secs(59)));
        assert_eq!(verdict(5, 61_000, 90_000), Verdict::Idle);
    }

    #[test]
    fn a_request_without_an_answer_is_no_silence() {
        let silence = |answer, sent, last_sent_ms, last_received_ms| {
            let patience = Patience { answer, first_look: LIMIT, keep_alive: KEEP };
            let traffic = Traffic { received: 10, sent, last_sent_ms, last_received_ms };
            patience.silence(traffic).map(|silence| silence.as_millis())
        };
        assert_eq!(silence(Some(LIMIT), 0, 0, 500), None);
        assert_eq!(silence(Some(LIMIT), 5, 900, 500), None, "the second request");
        assert_eq!(silence(Some(LIMIT), 5, 400, 500), Some(400));
        // Nobody knows whose turn it is.
        assert_eq!(silence(None, 0, 0, 500), Some(500));
        assert_eq!(silence(None, 5, 900, 500), Some(500));
    }

    #[test]
    fn an_answered_connection_is_idle_after_keep_alive() {
        assert_eq!(verdict(5, 60_000, 60_001), Verdict::Idle);
    }
}
