//! What became of a sandbox' wishes to reach something.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::rule::Transport;
use crate::resolver::LookUpError;

/// Most denials that are told apart between two looks at them.
const RECENT_MAX: usize = 16;

/// One thing that a sandbox wanted to reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Denied {
    /// A destination.
    Address(SocketAddr, Transport),
    /// The addresses of a name, which it made up or was given.
    Name(String),
}

impl fmt::Display for Denied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(to, Transport::Udp) => write!(f, "{to}/udp"),
            Self::Address(to, _) => write!(f, "{to}"),
            // It comes from the sandbox and goes to logs.
            Self::Name(name) => write!(f, "{}", name.escape_default()),
        }
    }
}

/// What happened since the last look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EgressEvents {
    /// Sockets that the sandbox was given, over TCP and UDP.
    pub made: u64,
    /// What was denied: how often.
    pub denied: u64,
    /// The first of that, each once, 16 at most.
    pub recent: Vec<Denied>,
    /// Names that were allowed and could not be looked up because of this host, with the
    /// reason: the first of them, 16 at most.
    pub failures: Vec<String>,
}

impl EgressEvents {
    /// Whether there is nothing to be told.
    pub fn is_empty(&self) -> bool {
        self.made == 0 && self.denied == 0 && self.failures.is_empty()
    }
}

/// EgressEvents that nobody has looked at yet.
#[derive(Debug, Default)]
pub(super) struct Unseen(Mutex<EgressEvents>);

impl Unseen {
    fn lock(&self) -> MutexGuard<'_, EgressEvents> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn note(&self, denied: Denied) {
        let mut events = self.lock();
        events.denied += 1;
        if events.recent.len() < RECENT_MAX && !events.recent.contains(&denied) {
            events.recent.push(denied);
        }
    }

    /// Notes that the sandbox was given a socket.
    pub fn note_made(&self) {
        self.lock().made += 1;
    }

    /// Notes that a name that is allowed could not be looked up.
    pub fn note_failure(&self, name: &str, error: &LookUpError) {
        let mut events = self.lock();
        if events.failures.len() < RECENT_MAX {
            events.failures.push(format!("{}: {error}", name.escape_default()));
        }
    }

    pub fn take(&self) -> EgressEvents {
        std::mem::take(&mut *self.lock())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn denials_are_counted_and_told_apart_up_to_a_bound() {
        let unseen = Unseen::default();
        for number in 0..100 {
            unseen.note(Denied::Name(format!("{}.example.com", number / 2)));
        }
        unseen.note(Denied::Address("192.0.2.1:53".parse().unwrap(), Transport::Udp));
        unseen.note_made();
        let events = unseen.take();
        assert_eq!((events.made, events.denied, events.recent.len()), (1, 101, RECENT_MAX));
        assert_eq!(events.recent[1].to_string(), "1.example.com");
        assert_eq!(unseen.take(), EgressEvents::default());
    }

    #[test]
    fn failures_are_told_with_their_reason_up_to_a_bound() {
        let unseen = Unseen::default();
        assert!(unseen.take().is_empty());
        for number in 0..100 {
            unseen.note_failure(&format!("{number}.example.com"), &LookUpError::Late);
        }
        let events = unseen.take();
        assert!(!events.is_empty());
        assert_eq!((events.denied, events.failures.len()), (0, RECENT_MAX));
        let expected = "0.example.com: looking up the name took longer than 60 seconds";
        assert_eq!(events.failures[0], expected);
    }

    #[test]
    fn what_a_sandbox_writes_cannot_end_a_line_of_a_log() {
        assert_eq!(Denied::Name("a\nb".to_owned()).to_string(), "a\\nb");
    }
}
