//! What to do about an error of the zygote parent, by what the host's settings say.

use std::fs;
use std::io;

use rustix::process::geteuid;
use rustix::thread::{CapabilitySet, capabilities};

use crate::zygote::Step;

/// Settings of the host that errors come from.
#[derive(Clone, Debug, Default)]
pub(super) struct Settings {
    /// `vm.memfd_noexec`; 2 forbids executable memory files.
    pub memfd_noexec: Option<u64>,
    /// Whether the caller is root.
    pub is_root: bool,
    /// Whether the caller may give itself, and so its sandboxes, other user ids.
    pub may_change_ids: bool,
}

impl Settings {
    /// Those of this host and process.
    pub fn read() -> Self {
        let number = |path| fs::read_to_string(path).ok()?.trim().parse().ok();
        let needed = CapabilitySet::SETUID | CapabilitySet::SETGID;
        Self {
            memfd_noexec: number("/proc/sys/vm/memfd_noexec"),
            is_root: geteuid().is_root(),
            may_change_ids: capabilities(None).is_ok_and(|sets| sets.effective.contains(needed)),
        }
    }

    /// Whether memory files can be executed.
    pub fn forbids_memory_files(&self) -> bool {
        self.memfd_noexec == Some(2)
    }
}

/// The cause of an error in a step of the zygote parent's start, and what to do about it.
/// A phrase; none if the settings do not explain it.
pub(super) fn explain(step: &str, error: &io::Error, settings: &Settings) -> Option<&'static str> {
    let errno = error.raw_os_error()?;
    let denied = matches!(errno, libc::EPERM | libc::EACCES);
    if step == STORE_KERNEL && denied && settings.forbids_memory_files() {
        return Some(MEMORY_FILES);
    }
    let is = |wanted: Step| step == wanted.text();
    if is(Step::Fork) {
        return match errno {
            libc::ENOSPC => Some(NAMESPACES_USED_UP),
            libc::EPERM | libc::EACCES => Some(NAMESPACES_FORBIDDEN),
            libc::ENOSYS => {
                Some("a filter blocks clone3(2); allow it in the unit or the container")
            }
            _ => None,
        };
    }
    if is(Step::MapIds) || is(Step::TakeIds) || step == RESERVE_IDS {
        return match errno {
            TOO_FEW_IDS => Some(FEW_IDS),
            libc::EPERM if settings.is_root && !settings.may_change_ids => Some(NO_CAPABILITIES),
            libc::EPERM => Some(FEW_IDS),
            _ => None,
        };
    }
    if is(Step::EnterRoot) && denied {
        return Some(
            "mounting is forbidden in new namespaces; allow it in the container's profile",
        );
    }
    None
}

/// The step before there is a process.
pub(crate) const STORE_KERNEL: &str = "store the kernel";
/// Another one.
pub(crate) const RESERVE_IDS: &str = "reserve user ids";
/// What is reported where the user namespace of the caller has too few user ids.
pub(crate) const TOO_FEW_IDS: i32 = libc::ERANGE;

pub(super) const MEMORY_FILES: &str =
    "vm.memfd_noexec is 2, which forbids executable memory files; run `sysctl vm.memfd_noexec=1`";
const NAMESPACES_USED_UP: &str = "user.max_user_namespaces, or another limit on namespaces, is used up; run \
                                  `sysctl user.max_user_namespaces=15000`";
const NAMESPACES_FORBIDDEN: &str = "namespaces are forbidden here: drop RestrictNamespaces= from the systemd \
                                    unit, use a container's profile that allows them, or see \
                                    `user namespaces` in `thaw doctor`";
const NO_CAPABILITIES: &str = "root lacks CAP_SETUID or CAP_SETGID here; leave them in the unit's \
                               CapabilityBoundingSet=, or run Thaw as another user";
const FEW_IDS: &str = "this user namespace has too few user ids for sandboxes; drop PrivateUsers= from the \
                       systemd unit, or give the container a range of ids";

#[cfg(test)]
mod tests {
    use super::*;

    fn advice(step: &str, errno: i32, settings: &Settings) -> &'static str {
        explain(step, &io::Error::from_raw_os_error(errno), settings).unwrap_or_default()
    }

    #[test]
    fn each_known_cause_is_named_with_its_way_out() {
        let usual = Settings { is_root: true, may_change_ids: true, ..Settings::default() };
        let sealed = Settings { memfd_noexec: Some(2), ..usual.clone() };
        assert!(advice(STORE_KERNEL, libc::EACCES, &sealed).contains("memfd_noexec=1"));
        assert_eq!(advice(STORE_KERNEL, libc::EACCES, &usual), "");
        let fork = Step::Fork.text();
        assert!(advice(fork, libc::ENOSPC, &usual).contains("max_user_namespaces=15000"));
        assert!(advice(fork, libc::EPERM, &usual).contains("RestrictNamespaces="));
        let map = Step::MapIds.text();
        let bare = Settings { is_root: true, ..Settings::default() };
        assert!(advice(map, libc::EPERM, &bare).contains("CapabilityBoundingSet="));
        assert!(advice(map, TOO_FEW_IDS, &usual).contains("PrivateUsers="));
        assert!(advice(RESERVE_IDS, TOO_FEW_IDS, &usual).contains("PrivateUsers="));
        assert_eq!(advice(map, libc::EIO, &usual), "");
    }
}
