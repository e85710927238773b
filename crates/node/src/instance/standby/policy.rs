//! How a function's boots are chosen.

use super::super::rewinding::RewindPolicy;
use crate::boots::BootKind;

/// How often more instances than configured are kept ready at most, in times of
/// demand.
pub(super) const GROWTH_MAX: usize = 8;

/// How a function's boots are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BootPolicy {
    /// Instances that are kept booted ahead, at least.
    pub ready: usize,
    /// Which instances that have served their request are put back into the state before it.
    pub rewind: Option<RewindPolicy>,
    /// Whether boots fork from a live template.
    pub template: bool,
    /// Whether what was used is made again by itself.
    pub automatic: bool,
}

impl BootPolicy {
    /// Nothing is kept: every boot is from the image.
    pub const NONE: Self = Self { ready: 0, rewind: None, template: false, automatic: false };

    /// Only boots of one kind, each prepared by hand: for measuring.
    pub fn only(kind: BootKind) -> Self {
        Self {
            ready: (kind == BootKind::Ready).into(),
            rewind: None,
            template: kind == BootKind::Fork,
            automatic: false,
        }
    }

    /// Instances that are kept ready at least: what is to be put back has to wait first.
    pub(super) fn least(self) -> usize {
        self.ready.max(self.rewind.is_some().into())
    }

    /// Most instances that are kept ready.
    pub(super) fn most(self) -> usize {
        self.ready.saturating_mul(GROWTH_MAX).max(self.rewind.map_or(0, |rewind| rewind.most))
    }
}
