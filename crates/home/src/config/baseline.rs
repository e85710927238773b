//! What programs see of the processor: `thaw build --cpu-baseline`.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use thaw_abi::cpu::Baseline;
use thaw_sandbox::{can_mask_cpuid, lacking};

/// The level of the instruction set that a program is held to until it is frozen, so that its
/// image runs on every machine of that level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum CpuBaseline {
    /// It sees all that this machine has.
    #[default]
    Host,
    /// It sees what this level has.
    Level(Baseline),
}

/// Not the name of a level.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no level of the instruction set: use host, x86-64-v2, x86-64-v3 or x86-64-v4")]
pub struct UnknownBaseline(String);

/// Why a program cannot be held to a level here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BaselineError {
    /// The machine is not of that level.
    #[error("this machine is not of level {level}, it lacks {lacking}; build for a lower level, or on another machine", level = level.name())]
    Lacking {
        /// The level.
        level: Baseline,
        /// Features, in words.
        lacking: String,
    },
    /// The program would see the machine's own features.
    #[error(
        "this machine cannot hide features from programs (no `cpuid_fault` in /proc/cpuinfo), so none \
         can be held to {}; build on a machine of that level, or on one with CPUID faulting",
        .0.name()
    )]
    NoFaulting(Baseline),
}

impl CpuBaseline {
    /// The level, if there is one.
    pub fn level(self) -> Option<Baseline> {
        match self {
            Self::Host => None,
            Self::Level(level) => Some(level),
        }
    }

    /// Its bits in a start command.
    pub fn flags(self) -> u32 {
        self.level().map_or(0, Baseline::to_flags)
    }

    /// Checks that programs can be held to it on this machine.
    ///
    /// # Errors
    /// Why not.
    pub fn check(self) -> Result<(), BaselineError> {
        let Some(level) = self.level() else { return Ok(()) };
        if let Some(lacking) = lacking(level) {
            return Err(BaselineError::Lacking { level, lacking });
        }
        if can_mask_cpuid() { Ok(()) } else { Err(BaselineError::NoFaulting(level)) }
    }
}

impl fmt::Display for CpuBaseline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.level().map_or("host", Baseline::name))
    }
}

impl FromStr for CpuBaseline {
    type Err = UnknownBaseline;

    fn from_str(text: &str) -> Result<Self, UnknownBaseline> {
        match text {
            "host" => Ok(Self::Host),
            _ => Baseline::from_name(text)
                .map(Self::Level)
                .ok_or_else(|| UnknownBaseline(text.to_owned())),
        }
    }
}

impl TryFrom<String> for CpuBaseline {
    type Error = UnknownBaseline;

    fn try_from(text: String) -> Result<Self, UnknownBaseline> {
        text.parse()
    }
}

impl From<CpuBaseline> for String {
    fn from(baseline: CpuBaseline) -> Self {
        baseline.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_known_by_their_names() {
        let all = Baseline::ALL.map(CpuBaseline::Level).into_iter().chain([CpuBaseline::Host]);
        for baseline in all {
            assert_eq!(baseline.to_string().parse(), Ok(baseline));
            let stored = serde_json::to_string(&baseline).unwrap();
            assert_eq!(serde_json::from_str::<CpuBaseline>(&stored).unwrap(), baseline);
        }
        let unknown = "x86-64-v9".parse::<CpuBaseline>().unwrap_err();
        assert!(unknown.to_string().contains("x86-64-v3"), "{unknown}");
        serde_json::from_str::<CpuBaseline>("\"v2\"").unwrap_err();
    }
}
