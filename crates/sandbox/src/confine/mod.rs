//! What processes give up, whatever their task is.

mod capabilities;
mod root;

pub use capabilities::{
    drop_capabilities, drop_groups_if_allowed, hold_capabilities, shrink_bounding_set,
};
pub use root::{copy_tree, enter_root, put_tree, unshare_mounts};
pub(crate) use root::{enter_empty_root, enter_launcher_root, separate_mounts};

use std::fs::File;
use std::io::{self, Write};

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitiesSecureBits, set_capabilities_secure_bits};

use crate::zygote::set_ids;

/// A step of a confinement that failed.
pub struct Failure {
    /// In words, after "cannot".
    pub step: &'static str,
    /// Why.
    pub source: io::Error,
}

/// Of [`enter_root`].
impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        Self { step: "enter its root directory", source: errno.into() }
    }
}

/// Names the step that an error belongs to.
pub trait During<T> {
    fn during(self, step: &'static str) -> Result<T, Failure>;
}

impl<T, E: Into<io::Error>> During<T> for Result<T, E> {
    fn during(self, step: &'static str) -> Result<T, Failure> {
        self.map_err(|source| Failure { step, source: source.into() })
    }
}

/// Lets the host kill this process after the sandboxes and before the daemon when memory
/// is short.
pub fn set_oom_score() -> io::Result<()> {
    File::options().write(true).open("/proc/self/oom_score_adj")?.write_all(b"900")
}

/// Sets resource limits, or those that are lower already.
pub fn set_limits(limits: &[(Resource, u64)]) -> io::Result<()> {
    for &(resource, wanted) in limits {
        let allowed = getrlimit(resource).maximum.map_or(wanted, |maximum| maximum.min(wanted));
        setrlimit(resource, Rlimit { current: Some(allowed), maximum: Some(allowed) })?;
    }
    Ok(())
}

/// Takes the id, keeping capabilities until [`drop_capabilities`].
pub fn take_id(id: u32) -> io::Result<()> {
    set_capabilities_secure_bits(
        CapabilitiesSecureBits::NO_ROOT
            | CapabilitiesSecureBits::NO_ROOT_LOCKED
            | CapabilitiesSecureBits::NO_SETUID_FIXUP
            | CapabilitiesSecureBits::NO_SETUID_FIXUP_LOCKED
            | CapabilitiesSecureBits::KEEP_CAPS_LOCKED
            | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE
            | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE_LOCKED,
    )?;
    drop_groups_if_allowed()?;
    set_ids(id)
}
