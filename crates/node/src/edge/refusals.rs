//! What clients were refused, in the daemon's log: the answer that a client got has the id
//! of its request, and here is the rest. Anybody can be refused as often as he likes, so
//! only so many lines a second are written, and the others counted.

use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Lines in each [`PERIOD`].
const LINES_MAX: u32 = 50;
const PERIOD: Duration = Duration::from_secs(1);

/// How much was logged lately.
#[derive(Debug, Default)]
pub(crate) struct RefusalLog(Mutex<Lately>);

#[derive(Debug, Default)]
struct Lately {
    since: Option<Instant>,
    lines: u32,
    /// Lines that were not written since the last one that was.
    missing: u64,
}

impl RefusalLog {
    /// Whether a line may be written now, and how many before it were not.
    pub fn admit(&self, now: Instant) -> Option<u64> {
        let mut lately = self.0.lock().expect("no holder panics");
        if lately.since.is_none_or(|since| now.duration_since(since) >= PERIOD) {
            (lately.since, lately.lines) = (Some(now), 0);
        }
        if lately.lines >= LINES_MAX {
            lately.missing += 1;
            return None;
        }
        lately.lines += 1;
        Some(std::mem::take(&mut lately.missing))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_so_many_lines_a_second_and_a_count() {
        let (log, begin) = (RefusalLog::default(), Instant::now());
        let admitted = (0..1000).filter(|_| log.admit(begin).is_some()).count();
        assert_eq!(admitted, LINES_MAX as usize);
        assert_eq!(log.admit(begin + PERIOD), Some(1000 - u64::from(LINES_MAX)));
        assert_eq!(log.admit(begin + PERIOD), Some(0));
    }
}
