//! What this host has and lacks: the facts behind `thaw doctor`.

/// How well the host serves one need of Thaw.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    /// All that Thaw can use is there.
    Good,
    /// Thaw works, with the limitation that the finding names.
    Limited,
    /// Thaw does not work on this host until it is mended.
    Missing,
}

/// One finding about the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Short name, such as `user namespaces`.
    pub name: &'static str,
    /// How well the host serves this need.
    pub status: Status,
    /// What was found, one phrase.
    pub found: String,
    /// What to do about it, if anything.
    pub way_out: Option<String>,
}

/// Examines the host.
pub fn probe() -> Vec<Probe> {
    todo!()
}
