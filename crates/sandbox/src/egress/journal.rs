//! What one sandbox has reached, and what it was denied: counts, and the latest of it.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// Most entries that are kept.
pub const ENTRIES_MAX: usize = 128;
/// Most bytes of their texts.
const BYTES_MAX: usize = 16 << 10;
/// Most bytes of one text.
const TEXT_MAX: usize = 256;

/// What became of a request to reach something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EgressOutcome {
    /// A connection was begun, or a socket for datagrams made.
    Reached,
    /// No rule allows it.
    Denied,
}

/// Something that a sandbox wanted to reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressEntry {
    /// When it last did.
    pub last: SystemTime,
    /// What became of it.
    pub outcome: EgressOutcome,
    /// The destination as `ADDRESS:PORT`, with `/udp` behind it for UDP, or a name that it
    /// wanted to look up. It comes from the sandbox; control characters are escaped.
    pub to: String,
    /// The name that it was looked up by, if it was.
    pub name: Option<String>,
    /// How often.
    pub count: u64,
}

/// What is known of one sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EgressReport {
    /// Connections and sockets for datagrams that were made, since the daemon knows the sandbox.
    pub reached: u64,
    /// Destinations and names that were denied.
    pub denied: u64,
    /// The latest of both, the oldest first.
    pub entries: Vec<EgressEntry>,
}

/// Keeps that.
#[derive(Debug, Default)]
pub(super) struct Journal(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    reached: u64,
    denied: u64,
    entries: VecDeque<EgressEntry>,
    bytes: usize,
}

impl Journal {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes one more.
    pub fn note(&self, outcome: EgressOutcome, to: &str, name: Option<&str>) {
        let (to, name) = (shortened(to), name.map(shortened));
        let mut state = self.lock();
        match outcome {
            EgressOutcome::Reached => state.reached += 1,
            EgressOutcome::Denied => state.denied += 1,
        }
        let is_same =
            |entry: &EgressEntry| entry.outcome == outcome && entry.to == to && entry.name == name;
        let known = state.entries.iter().position(is_same);
        let count = match known.and_then(|index| state.entries.remove(index)) {
            Some(entry) => {
                state.bytes -= entry.bytes();
                entry.count + 1
            }
            None => 1,
        };
        let entry = EgressEntry { last: SystemTime::now(), outcome, to, name, count };
        state.bytes += entry.bytes();
        state.entries.push_back(entry);
        while state.entries.len() > ENTRIES_MAX || state.bytes > BYTES_MAX {
            let oldest = state.entries.pop_front();
            state.bytes -= oldest.map_or(0, |entry| entry.bytes());
        }
    }

    pub fn report(&self) -> EgressReport {
        let state = self.lock();
        let entries = state.entries.iter().cloned().collect();
        EgressReport { reached: state.reached, denied: state.denied, entries }
    }
}

impl EgressEntry {
    fn bytes(&self) -> usize {
        self.to.len() + self.name.as_ref().map_or(0, String::len)
    }
}

fn shortened(text: &str) -> String {
    // Escaped, it is ASCII.
    let mut text: String = text.escape_default().collect();
    text.truncate(TEXT_MAX);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_is_counted_and_the_latest_are_kept() {
        let journal = Journal::default();
        for number in 0..1000 {
            journal.note(EgressOutcome::Reached, &format!("192.0.2.1:{number}"), None);
            journal.note(EgressOutcome::Denied, "again.example.com", None);
        }
        let report = journal.report();
        assert_eq!((report.reached, report.denied), (1000, 1000));
        assert_eq!(report.entries.len(), ENTRIES_MAX);
        let last = report.entries.last().unwrap();
        assert_eq!((last.to.as_str(), last.count), ("again.example.com", 1000));
        assert_eq!(report.entries[0].to, "192.0.2.1:873");
    }

    #[test]
    fn texts_of_a_sandbox_have_a_bound_and_cannot_end_a_line() {
        let journal = Journal::default();
        journal.note(EgressOutcome::Denied, "a\nb", Some("ü"));
        assert_eq!(journal.report().entries[0].to, "a\\nb");
        for number in 0..ENTRIES_MAX {
            let long = format!("{number}{}", "\u{1f600}".repeat(1000));
            journal.note(EgressOutcome::Denied, &long, None);
        }
        let entries = journal.report().entries;
        assert!(entries.iter().map(EgressEntry::bytes).sum::<usize>() <= BYTES_MAX);
        assert_eq!(entries.len(), BYTES_MAX / TEXT_MAX);
    }
}
