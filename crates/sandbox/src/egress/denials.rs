//! What a sandbox wanted to reach and was not allowed to.

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

/// What was denied since the last look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Denials {
    /// How many there were.
    pub total: u64,
    /// The first of them, each once, 16 at most.
    pub recent: Vec<Denied>,
    /// Names that were allowed and could not be looked up because of this host, with the
    /// reason: the first of them, 16 at most.
    pub failures: Vec<String>,
}

impl Denials {
    /// Whether there is nothing to be told.
    pub fn is_empty(&self) -> bool {
        self.total == 0 && self.failures.is_empty()
    }
}

/// Denials that nobody has looked at yet.
#[derive(Debug, Default)]
pub(super) struct Unseen(Mutex<Denials>);

impl Unseen {
    fn lock(&self) -> MutexGuard<'_, Denials> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn note(&self, denied: Denied) {
        let mut denials = self.lock();
        denials.total += 1;
        if denials.recent.len() < RECENT_MAX && !denials.recent.contains(&denied) {
            denials.recent.push(denied);
        }
    }

    /// Notes that a name that is allowed could not be looked up.
    pub fn note_failure(&self, name: &str, error: &LookUpError) {
        let mut denials = self.lock();
        if denials.failures.len() < RECENT_MAX {
            denials.failures.push(format!("{}: {error}", name.escape_default()));
        }
    }

    pub fn take(&self) -> Denials {
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
        let denials = unseen.take();
        assert_eq!((denials.total, denials.recent.len()), (101, RECENT_MAX));
        assert_eq!(denials.recent[1].to_string(), "1.example.com");
        assert_eq!(unseen.take(), Denials::default());
    }

    #[test]
    fn failures_are_told_with_their_reason_up_to_a_bound() {
        let unseen = Unseen::default();
        assert!(unseen.take().is_empty());
        for number in 0..100 {
            unseen.note_failure(&format!("{number}.example.com"), &LookUpError::Late);
        }
        let denials = unseen.take();
        assert!(!denials.is_empty());
        assert_eq!((denials.total, denials.failures.len()), (0, RECENT_MAX));
        let expected = "0.example.com: looking up the name took longer than 60 seconds";
        assert_eq!(denials.failures[0], expected);
    }

    #[test]
    fn what_a_sandbox_writes_cannot_end_a_line_of_a_log() {
        assert_eq!(Denied::Name("a\nb".to_owned()).to_string(), "a\\nb");
    }
}
