//! What is taken of a function that comes from elsewhere.
//!
//! An image is memory of a sandbox: it may do what a guest may that has taken its kernel over, and
//! against that the host is built. A kernel build is more: it runs before it has installed its
//! filter. So nobody but whoever may install Thaw, or has a key that the operator trusts, brings one.

use std::fmt;
use std::str::FromStr;
use thaw_oci::artifact::Section;

/// When a pulled function is frozen anew from its files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Refreeze {
    /// When its image cannot be used here.
    #[default]
    Auto,
    /// Never: a function whose image cannot be used is refused.
    Never,
    /// Always: its image is not even moved.
    Always,
}

impl FromStr for Refreeze {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "never" => Ok(Self::Never),
            "always" => Ok(Self::Always),
            _ => Err(format!("{text:?} is none of auto, never, always")),
        }
    }
}

impl fmt::Display for Refreeze {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Never => "never",
            Self::Always => "always",
        })
    }
}

/// What is known of the kernel build that an image needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum KnownKernel {
    /// It is this program's, or in the store, and can be run.
    Usable,
    /// It is in the store and cannot be run by this program; why not.
    Unusable(String),
    /// The store does not have it, and it does not come along.
    Absent,
    /// The store does not have it, and it comes along.
    Offered,
}

/// What a decision depends on.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    pub kernel: KnownKernel,
    /// Whether a key has signed the function that the operator has named for its registry.
    pub is_signed: bool,
    /// CPU features that the image needs and this machine lacks, in words.
    pub lacking: Option<String>,
}

/// What is taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// The image, and the kernel build as well or not.
    Image {
        /// Whether the kernel build comes along.
        with_kernel: bool,
    },
    /// The files only: the function is frozen anew, for this reason.
    Freeze(String),
}

impl Decision {
    /// The sections that are moved.
    pub fn sections(&self) -> Vec<Section> {
        match self {
            Self::Freeze(_) => vec![Section::Files],
            Self::Image { with_kernel: false } => {
                vec![Section::Files, Section::Image, Section::WorkingSet]
            }
            Self::Image { with_kernel: true } => {
                vec![Section::Files, Section::Image, Section::Kernel, Section::WorkingSet]
            }
        }
    }
}

/// Decides.
///
/// # Errors
/// One sentence: its image cannot be used, and it may not be frozen anew.
pub(super) fn decide(refreeze: Refreeze, facts: &Facts) -> Result<Decision, String> {
    let why_not = match refreeze {
        Refreeze::Always => Some("--refreeze always was given".to_owned()),
        Refreeze::Auto | Refreeze::Never => unusable(facts),
    };
    match why_not {
        None => Ok(Decision::Image { with_kernel: facts.kernel == KnownKernel::Offered }),
        Some(why) if refreeze == Refreeze::Never => Err(format!(
            "{why}; pull it with --refreeze auto, which freezes it anew on this machine"
        )),
        Some(why) => Ok(Decision::Freeze(why)),
    }
}

/// Why an image cannot be used here, if so.
fn unusable(facts: &Facts) -> Option<String> {
    if let Some(lacking) = &facts.lacking {
        return Some(format!("its image needs CPU features that this machine lacks ({lacking})"));
    }
    match &facts.kernel {
        KnownKernel::Usable => None,
        KnownKernel::Offered if facts.is_signed => None,
        KnownKernel::Unusable(why) => Some(why.clone()),
        KnownKernel::Absent => Some(
            "its image needs a build of the Thaw kernel that this store does not have".to_owned(),
        ),
        KnownKernel::Offered => Some(
            "its image needs a build of the Thaw kernel that this store does not have, and which is \
             taken from nobody but a signer whose `verify_key` registries.toml names"
                .to_owned(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(kernel: KnownKernel, is_signed: bool) -> Facts {
        Facts { kernel, is_signed, lacking: None }
    }

    #[test]
    fn an_unknown_kernel_is_taken_from_a_trusted_signer_only() {
        let decide = |kernel, is_signed| decide(Refreeze::Auto, &facts(kernel, is_signed)).unwrap();
        for is_signed in [false, true] {
            assert_eq!(
                decide(KnownKernel::Usable, is_signed),
                Decision::Image { with_kernel: false }
            );
            for kernel in [KnownKernel::Absent, KnownKernel::Unusable("old".to_owned())] {
                assert!(matches!(decide(kernel, is_signed), Decision::Freeze(_)));
            }
        }
        assert_eq!(decide(KnownKernel::Offered, true), Decision::Image { with_kernel: true });
        let unsigned = decide(KnownKernel::Offered, false);
        assert!(matches!(&unsigned, Decision::Freeze(why) if why.contains("verify_key")));
        assert_eq!(unsigned.sections(), [Section::Files], "not even moved");
    }

    #[test]
    fn what_the_machine_lacks_is_not_run() {
        let facts = Facts { lacking: Some("avx2".to_owned()), ..facts(KnownKernel::Usable, true) };
        let decision = decide(Refreeze::Auto, &facts).unwrap();
        assert!(matches!(decision, Decision::Freeze(why) if why.contains("avx2")));
        let refused = decide(Refreeze::Never, &facts).unwrap_err();
        assert!(refused.contains("avx2") && refused.contains("--refreeze auto"), "{refused}");
    }

    #[test]
    fn whoever_pulls_may_want_the_files_only() {
        let decision = decide(Refreeze::Always, &facts(KnownKernel::Usable, true)).unwrap();
        assert_eq!(decision.sections(), [Section::Files]);
        for text in ["auto", "never", "always"] {
            assert_eq!(text.parse::<Refreeze>().unwrap().to_string(), text);
        }
        "sometimes".parse::<Refreeze>().unwrap_err();
    }
}
