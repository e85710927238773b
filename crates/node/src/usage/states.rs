//! How much memory the instances of each function have, by their state: for the metrics.
//!
//! The host walks through all pages of an instance to count them, so nothing is counted unless
//! somebody asks, and not for everybody who does.

use super::memory::{COUNTED_MAX, COUNTING_MAX, in_turns, memory_of, memory_of_reader};
use crate::metrics::StateMemory;
use crate::service::{Service, Services};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thaw_sandbox::MemoryReader;
use tokio::time::timeout;

/// What was counted is good for so long.
const FRESH: Duration = Duration::from_secs(10);
/// How long somebody waits who asks; then an older count has to do.
const PATIENCE: Duration = Duration::from_secs(1);
/// An older count is not shown.
const STALE: Duration = Duration::from_secs(300);

/// Somebody whose memory is counted.
enum Subject {
    Instance(Arc<Service>, u64),
    Standby(MemoryReader),
}

/// Those of one function in one state.
#[derive(Debug, Default)]
struct Group {
    live: u64,
    counted: u64,
    bytes: u64,
}

impl Group {
    /// The memory of all of them, if any was counted.
    fn total(&self) -> Option<u64> {
        let total = u128::from(self.bytes) * u128::from(self.live);
        let total = total.checked_div(u128::from(self.counted))?;
        Some(u64::try_from(total).unwrap_or(u64::MAX))
    }
}

/// Memory by function and state, counted now or lately. Empty until it was counted once.
pub async fn memory_by_state(services: &Arc<Services>) -> Vec<StateMemory> {
    let known = services.shared().memory_by_state();
    if known.latest(FRESH).is_none()
        && let Some(counting) = known.begin()
    {
        let services = services.clone();
        let count = async move {
            let memory = measure_by_state(&services).await;
            services.shared().memory_by_state().set(memory);
            drop(counting);
        };
        // It goes on if it takes longer.
        let _ = timeout(PATIENCE, tokio::spawn(count)).await;
    }
    known.latest(STALE).unwrap_or_default()
}

/// Counts one of each function and state, then another of each, as long as there is time.
async fn measure_by_state(services: &Arc<Services>) -> Vec<StateMemory> {
    let mut groups: BTreeMap<(String, &'static str), Group> = BTreeMap::new();
    let deadline = Instant::now() + COUNTING_MAX;
    let subjects: Vec<_> = subjects(services).into_iter().collect();
    for (group, subjects) in &subjects {
        let live = subjects.len() as u64;
        groups.insert(group.clone(), Group { live, ..Group::default() });
    }
    for (group, subject) in in_turns(subjects).into_iter().take(COUNTED_MAX) {
        if Instant::now() >= deadline {
            break;
        }
        let memory = match subject {
            Subject::Instance(service, id) => memory_of(&service, id).await,
            Subject::Standby(reader) => memory_of_reader(reader, &group.0).await,
        };
        if let (Some(memory), Some(group)) = (memory, groups.get_mut(&group)) {
            group.counted += 1;
            group.bytes += memory.pss;
        }
    }
    let total = |((function, state), group): ((String, &'static str), Group)| {
        Some(StateMemory { function, state, bytes: group.total()? })
    };
    groups.into_iter().filter_map(total).collect()
}

/// All whose memory there is to count, by function and state.
fn subjects(services: &Services) -> BTreeMap<(String, &'static str), Vec<Subject>> {
    let mut all: BTreeMap<_, Vec<Subject>> = BTreeMap::new();
    for service in services.everything() {
        let function = service.name().to_string();
        for one in service.instances().into_iter().filter(|one| one.pid != 0) {
            let subject = Subject::Instance(service.clone(), one.id);
            all.entry((function.clone(), one.state.name())).or_default().push(subject);
        }
        for (state, reader) in service.launcher().standby_memory() {
            let subject = Subject::Standby(reader);
            all.entry((function.clone(), state.name())).or_default().push(subject);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::NodeState;

    #[test]
    fn those_that_were_counted_stand_for_all() {
        let group = Group { live: 10, counted: 4, bytes: 8000 };
        assert_eq!(group.total(), Some(20_000));
        assert_eq!(Group { live: 3, ..Group::default() }.total(), None);
    }

    #[tokio::test]
    async fn a_node_without_instances_has_no_memory_and_one_counts_at_a_time() {
        let services = Services::new(NodeState::new(1));
        let counting = services.shared().memory_by_state().begin();
        assert_eq!(memory_by_state(&services).await, []);
        assert_eq!(
            services.shared().memory_by_state().latest(STALE),
            None,
            "somebody counts already"
        );
        drop(counting);
        assert_eq!(memory_by_state(&services).await, []);
        assert!(services.shared().memory_by_state().latest(FRESH).is_some());
    }
}
