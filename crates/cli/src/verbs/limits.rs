//! `--weak-limits`, which several verbs have.

use clap::Args;
use thaw_sandbox::WeakLimits;

/// Whether limits may be weak.
#[derive(Clone, Copy, Debug, Args)]
pub struct WeakLimitsArgument {
    /// Go on although this host does not enforce all limits: without writable control
    /// groups they bind each process, or only the program's own kernel. `thaw doctor` says
    /// which, and why.
    #[arg(long)]
    weak_limits: bool,
}

impl WeakLimitsArgument {
    /// What was asked for.
    pub fn chosen(self) -> WeakLimits {
        if self.weak_limits { WeakLimits::Accept } else { WeakLimits::Refuse }
    }
}
