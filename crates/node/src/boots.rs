//! What is known of recent boots.

use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use thaw_home::clock::monotonic_ns;
use thaw_home::config::FunctionName;
use thaw_sandbox::BootTimes;

/// Boots that are remembered.
const REMEMBERED: usize = 4096;

/// What a boot begins from (design, "Boot").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum BootKind {
    /// An image of which nothing may be in memory.
    Cold,
    /// An image that is in memory.
    Warm,
    /// A live template, which forks.
    Fork,
    /// An instance that was booted ahead.
    Ready,
    /// The file of an instance that was asleep.
    Asleep,
}

impl BootKind {
    /// Those that begin from what a function has, from the slowest to the fastest.
    pub const OF_FUNCTIONS: [Self; 4] = [Self::Cold, Self::Warm, Self::Fork, Self::Ready];
    /// All, in the order of their numbers.
    pub const ALL: [Self; 5] = [Self::Cold, Self::Warm, Self::Fork, Self::Ready, Self::Asleep];

    /// The name, as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::Warm => "warm",
            Self::Fork => "fork",
            Self::Ready => "ready",
            Self::Asleep => "asleep",
        }
    }
}

/// The phases of one boot, in nanoseconds since the connection was accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Phases {
    /// What it begins from had been taken: a zygote, a template, an instance.
    pub zygote: u64,
    /// The sandbox had received its boot command.
    pub received: Option<u64>,
    /// All eager mappings were in place.
    pub mapped: Option<u64>,
    /// The guest's first instruction was about to run.
    pub first_instruction: Option<u64>,
    /// The guest had sent its first response byte.
    pub first_byte: Option<u64>,
}

/// One boot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct BootRecord {
    /// The function.
    pub function: FunctionName,
    /// Number of the instance.
    pub instance: u64,
    /// What it began from.
    pub kind: BootKind,
    /// Address of the client whose connection caused the boot.
    pub peer: SocketAddr,
    /// When the connection was accepted, in nanoseconds of `CLOCK_MONOTONIC`.
    pub accepted_ns: u64,
    /// When the phases ended.
    pub phases: Phases,
}

impl Phases {
    /// Phases from the host's and the sandbox's clock readings.
    pub fn new(accepted_ns: u64, zygote_ns: u64, times: &BootTimes) -> Self {
        let since = |at: u64| (at != 0).then(|| at.saturating_sub(accepted_ns));
        Self {
            zygote: zygote_ns.saturating_sub(accepted_ns),
            received: since(times.received_ns),
            mapped: since(times.mapped_ns),
            first_instruction: since(times.first_instruction_ns),
            first_byte: since(times.first_byte_ns),
        }
    }
}

/// The most recent boots of a node.
#[derive(Debug, Default)]
pub struct RecentBoots {
    boots: Mutex<VecDeque<BootRecord>>,
    /// Boots of each kind so far, in the order of [`BootKind::ALL`].
    counts: [AtomicU64; BootKind::ALL.len()],
}

impl RecentBoots {
    /// Remembers a boot.
    pub fn add(&self, boot: BootRecord) {
        self.counts[boot.kind as usize].fetch_add(1, Ordering::Relaxed);
        let mut boots = self.boots.lock().expect("no holder panics");
        if boots.len() == REMEMBERED {
            boots.pop_front();
        }
        boots.push_back(boot);
    }

    /// Completes a boot that was added before its first response byte.
    pub fn answered(&self, boot: &BootRecord) {
        let mut boots = self.boots.lock().expect("no holder panics");
        if let Some(known) = boots.iter_mut().rev().find(|b| b.instance == boot.instance) {
            known.phases.first_byte = boot.phases.first_byte;
        }
    }

    /// Boots of this kind so far, those that are forgotten included.
    pub fn count(&self, kind: BootKind) -> u64 {
        self.counts[kind as usize].load(Ordering::Relaxed)
    }

    /// The boot that the connection from `peer` caused, if it is not older than
    /// `since_ns` (ports are used again).
    pub fn by_peer(&self, peer: SocketAddr, since_ns: u64) -> Option<BootRecord> {
        let boots = self.boots.lock().expect("no holder panics");
        let found = boots.iter().rev().find(|boot| boot.peer == peer);
        found.filter(|boot| boot.accepted_ns >= since_ns).cloned()
    }

    /// Boots of these instances for connections that were accepted at these times, in nanoseconds of
    /// `CLOCK_MONOTONIC`.
    pub(crate) fn caused_by(
        &self,
        wanted: &HashSet<(u64, u64)>,
    ) -> HashMap<(u64, u64), BootRecord> {
        if wanted.is_empty() {
            return HashMap::new();
        }
        let boots = self.boots.lock().expect("no holder panics");
        let named = boots.iter().map(|boot| ((boot.instance, boot.accepted_ns), boot));
        let found = named.filter(|(name, _)| wanted.contains(name));
        found.map(|(name, boot)| (name, boot.clone())).collect()
    }

    /// The most recent boots of a function, newest first.
    pub fn of(&self, function: &str, most: usize) -> Vec<BootRecord> {
        let boots = self.boots.lock().expect("no holder panics");
        let of_function = boots.iter().rev().filter(|boot| boot.function.as_str() == function);
        of_function.take(most).cloned().collect()
    }
}

/// Time since `start_ns`.
pub fn elapsed(start_ns: u64) -> std::time::Duration {
    std::time::Duration::from_nanos(monotonic_ns().saturating_sub(start_ns))
}
