//! Memory of instances, as it was counted last.

use crate::metrics::StateMemory;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

/// What was counted last.
#[derive(Debug, Default)]
pub(crate) struct MemoryByState {
    latest: Mutex<Option<Counted>>,
    /// Held by who counts.
    counting: Arc<AsyncMutex<()>>,
}

#[derive(Clone, Debug)]
struct Counted {
    at: Instant,
    memory: Vec<StateMemory>,
}

impl MemoryByState {
    /// For who is going to count, until this is dropped; `None`: somebody counts already.
    pub fn begin(&self) -> Option<OwnedMutexGuard<()>> {
        self.counting.clone().try_lock_owned().ok()
    }

    /// What was counted within this time.
    pub fn latest(&self, age: Duration) -> Option<Vec<StateMemory>> {
        let latest = self.latest.lock().expect("no holder panics");
        latest.as_ref().filter(|counted| counted.at.elapsed() < age).map(|it| it.memory.clone())
    }

    /// This was counted now.
    pub fn set(&self, memory: Vec<StateMemory>) {
        let counted = Counted { at: Instant::now(), memory };
        *self.latest.lock().expect("no holder panics") = Some(counted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_counted_long_ago_is_not_shown() {
        let (counted, age) = (MemoryByState::default(), Duration::from_secs(300));
        assert_eq!(counted.latest(age), None);
        let memory = vec![StateMemory { function: "f".to_owned(), state: "idle", bytes: 7 }];
        counted.set(memory.clone());
        assert_eq!(counted.latest(age), Some(memory));
        assert_eq!(counted.latest(Duration::ZERO), None);
    }
}
