//! How a function's instances are booted.

use super::standby::BootPolicy;
use thaw_abi::control::FLAG_NO_LAZY;
use thaw_sandbox::{BootPlan, PopulatePolicy};

/// Whether and how a working set is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkingSetUse {
    /// Recorded on the first request if there is none, and populated so.
    Populate(PopulatePolicy),
    /// Neither recorded nor used.
    Off,
    /// Every boot is as the first one of the image on this machine, of which nothing is known. Only
    /// for measuring.
    Unknown,
}

/// Techniques that shorten boots. Each can be left out, to measure what it is
/// worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Techniques {
    /// Mappings that are not known to be needed are made when they are touched.
    pub lazy_mapping: bool,
    /// The descriptors of the files that a boot needs travel with its boot
    /// command (Catalyzer's I/O cache).
    pub io_cache: bool,
}

impl Default for Techniques {
    fn default() -> Self {
        Self { lazy_mapping: true, io_cache: true }
    }
}

impl Techniques {
    /// `FLAG_*` of the boot command.
    pub(super) fn flags(self) -> u32 {
        if self.lazy_mapping { 0 } else { FLAG_NO_LAZY }
    }

    /// A plan without what is left out.
    pub(super) fn reduce(self, plan: BootPlan) -> BootPlan {
        if self.io_cache { plan } else { plan.without_blobs() }
    }
}

/// How a function's instances are booted.
#[derive(Clone, Copy, Debug)]
pub struct LaunchOptions {
    /// Whether and how working sets are used.
    pub working_set: WorkingSetUse,
    /// What is kept ready.
    pub policy: BootPolicy,
    /// What shortens boots.
    pub techniques: Techniques,
}
