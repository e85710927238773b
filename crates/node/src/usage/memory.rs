//! How much memory live instances have.

use crate::service::{Service, Services};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thaw_sandbox::{MemoryReader, SandboxMemory};

/// Most instances whose memory is counted: the host walks through all pages of each.
pub(super) const COUNTED_MAX: usize = 256;
/// How long counting may take in all.
pub(super) const COUNTING_MAX: Duration = Duration::from_secs(3);

/// Memory of the live instances of a function.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
pub struct MemoryUse {
    /// Live instances, hibernated ones included.
    pub instances: usize,
    /// How many of them the sums are of: where there are very many, some are left out.
    pub counted: usize,
    /// Pages that one instance alone has.
    pub private_bytes: u64,
    /// Pages that others have mapped, too, summed up over the instances.
    pub shared_bytes: u64,
    /// The instances' proportional shares: a page that three have mapped counts as a third for each.
    pub pss_bytes: u64,
}

impl MemoryUse {
    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            instances: self.instances + other.instances,
            counted: self.counted + other.counted,
            private_bytes: self.private_bytes + other.private_bytes,
            shared_bytes: self.shared_bytes + other.shared_bytes,
            pss_bytes: self.pss_bytes + other.pss_bytes,
        }
    }

    fn add(&mut self, memory: SandboxMemory) {
        self.counted += 1;
        self.private_bytes += memory.private;
        self.shared_bytes += memory.shared;
        self.pss_bytes += memory.pss;
    }
}

/// Counts the memory of live instances, by function: one of each function, then another of each,
/// as long as there is time.
pub async fn measure_memory(services: &Arc<Services>) -> BTreeMap<String, MemoryUse> {
    let (mut found, mut ahead) = (BTreeMap::new(), Vec::new());
    for service in services.everything() {
        let instances = service.instances();
        let live: Vec<u64> =
            instances.iter().filter(|one| one.pid != 0).map(|one| one.id).collect();
        let of_function: &mut MemoryUse = found.entry(service.name().to_string()).or_default();
        of_function.instances += live.len();
        ahead.push((service, live));
    }
    let deadline = Instant::now() + COUNTING_MAX;
    for (service, id) in in_turns(ahead).into_iter().take(COUNTED_MAX) {
        if Instant::now() >= deadline {
            break;
        }
        if let Some(memory) = memory_of(&service, id).await
            && let Some(of_function) = found.get_mut(service.name().as_str())
        {
            of_function.add(memory);
        }
    }
    found
}

/// Counts the memory of the live instances of one function, of so many at most.
pub async fn measure_memory_of(service: &Service, most: usize) -> MemoryUse {
    let instances = service.instances();
    let live: Vec<u64> = instances.iter().filter(|one| one.pid != 0).map(|one| one.id).collect();
    let mut memory = MemoryUse { instances: live.len(), ..MemoryUse::default() };
    let deadline = Instant::now() + COUNTING_MAX;
    for id in live.into_iter().take(most) {
        if Instant::now() >= deadline {
            break;
        }
        if let Some(one) = memory_of(service, id).await {
            memory.add(one);
        }
    }
    memory
}

/// Counts the memory of one instance; `None`: it has ended, or cannot be looked at.
pub async fn measure_instance(service: &Service, id: u64) -> Option<SandboxMemory> {
    memory_of(service, id).await
}

/// The first of each, then the second of each, and so on.
pub(super) fn in_turns<T: Clone, U>(mut lists: Vec<(T, Vec<U>)>) -> Vec<(T, U)> {
    let mut turns = Vec::new();
    while !lists.is_empty() {
        for (of, list) in &mut lists {
            turns.extend(list.pop().map(|id| (of.clone(), id)));
        }
        lists.retain(|(_, list)| !list.is_empty());
    }
    turns
}

/// Memory of one instance; `None`: it has ended, or cannot be looked at.
pub(super) async fn memory_of(service: &Service, id: u64) -> Option<SandboxMemory> {
    memory_of_reader(service.memory_reader(id).await?, service.name().as_str()).await
}

/// The same, by what counts it.
pub(super) async fn memory_of_reader(
    reader: MemoryReader,
    function: &str,
) -> Option<SandboxMemory> {
    let read = tokio::task::spawn_blocking(move || reader.read()).await.ok()?;
    if let Err(error) = &read {
        tracing::debug!(function, "cannot count the memory of an instance: {error}");
    }
    read.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_function_has_its_turn() {
        let lists = vec![("a", vec![1, 2, 3]), ("b", vec![]), ("c", vec![9])];
        assert_eq!(in_turns(lists), [("a", 3), ("c", 9), ("a", 2), ("a", 1)]);
    }

    #[test]
    fn instances_are_summed_up() {
        let mut one = MemoryUse { instances: 2, ..MemoryUse::default() };
        one.add(SandboxMemory { pss: 5, private: 3, shared: 7, processes: 1 });
        let both = one.plus(MemoryUse { instances: 1, ..one });
        assert_eq!((both.instances, both.counted), (3, 2));
        assert_eq!((both.private_bytes, both.shared_bytes, both.pss_bytes), (6, 14, 10));
    }
}
