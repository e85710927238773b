//! Instances that were asked to give up memory, while the host is short of it.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// How long one may take to do what it was asked before others are asked in its place: one whose
/// program computes, or whose tenant has no room for its memory, never does.
const PATIENCE: Duration = Duration::from_secs(3);
/// After which time it is asked again.
const ASKED_AGAIN: Duration = Duration::from_secs(60);

/// Instances that were asked to give something up, and when.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    since: HashMap<u64, Instant>,
}

impl Asked {
    /// Of those that have not done it, in their order, the ones to be asked: `most` at most.
    pub fn choose(
        &mut self,
        all: impl IntoIterator<Item = u64>,
        most: usize,
        now: Instant,
    ) -> Vec<u64> {
        let age = |since: Instant| now.saturating_duration_since(since);
        self.since.retain(|_, since| age(*since) < ASKED_AGAIN);
        let is_late = |id: &u64| self.since.get(id).is_some_and(|since| age(*since) >= PATIENCE);
        let chosen: Vec<u64> = all.into_iter().filter(|id| !is_late(id)).take(most).collect();
        for id in &chosen {
            self.since.entry(*id).or_insert(now);
        }
        chosen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_do_not_do_it_make_way_for_others() {
        let (mut asked, begin) = (Asked::default(), Instant::now());
        let mut at = |seconds, all: &[u64]| {
            asked.choose(all.iter().copied(), 2, begin + Duration::from_secs(seconds))
        };
        assert_eq!(at(0, &[1, 2, 3, 4]), [1, 2]);
        assert_eq!(at(1, &[1, 2, 3, 4]), [1, 2], "they have a moment");
        assert_eq!(at(2, &[2, 3, 4]), [2, 3], "the first one has done it");
        assert_eq!(at(3, &[2, 3, 4]), [3, 4]);
        assert_eq!(at(9, &[2, 3, 4]), [] as [u64; 0]);
        assert_eq!(at(60, &[2, 3, 4]), [2], "it is asked again");
    }
}
