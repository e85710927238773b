//! Whether a daemon that the caller starts is split from its monitor.

use std::io;

use rustix::process::geteuid;

use super::{Probe, Status};
use crate::monitor;

/// Makes the namespaces of a daemon, and ends them again.
pub(super) fn probe() -> Probe {
    separation(geteuid().is_root(), monitor::try_separation())
}

fn separation(is_root: bool, tried: io::Result<()>) -> Probe {
    const NAME: &str = "daemon";
    let (split, whole) = match is_root {
        true => ("split from its monitor: it has a user of its own", "keeps all of root's rights"),
        false => {
            ("split from its monitor: it has namespaces of its own", "keeps all of your rights")
        }
    };
    match tried {
        Ok(()) => Probe::good(NAME, split),
        Err(error) => {
            let found = format!("one process, which {whole}: cannot make its namespaces ({error})");
            Probe::with(NAME, Status::Limited, found, way_out(is_root, &error))
        }
    }
}

/// What to do about an error of user_namespaces(7).
fn way_out(is_root: bool, error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EUSERS) if !is_root => {
            "a user's daemon takes two user namespaces, one in the other, and a pid namespace: run \
             `sysctl user.max_user_namespaces=15000 user.max_pid_namespaces=15000`, or nest containers \
             less deeply"
        }
        Some(libc::ENOSPC | libc::EUSERS) => {
            "run `sysctl user.max_user_namespaces=15000`, or nest containers less deeply"
        }
        Some(libc::EPERM | libc::EACCES) => {
            "allow this user to make user and pid namespaces: see `user namespaces` above, drop \
             RestrictNamespaces= from the systemd unit, or use a container's profile that allows them"
        }
        Some(libc::EINVAL | libc::ENOSYS) => {
            "use a host kernel with CONFIG_USER_NS and CONFIG_PID_NS, and, in a container, a profile \
             that allows clone3(2) and setns(2), and user ids from 1999999 on for a daemon of root's"
        }
        _ => "see the other findings; if all are good, report this as a bug",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(is_root: bool, errno: i32) -> Probe {
        separation(is_root, Err(io::Error::from_raw_os_error(errno)))
    }

    #[test]
    fn a_daemon_that_is_not_split_is_told_with_the_way_out() {
        assert_eq!(separation(false, Ok(())).status, Status::Good);
        for (is_root, errno, way_out) in [
            (false, libc::ENOSPC, "max_pid_namespaces=15000"),
            (true, libc::ENOSPC, "max_user_namespaces=15000"),
            (false, libc::EUSERS, "nest containers less deeply"),
            (false, libc::EPERM, "RestrictNamespaces="),
            (true, libc::EINVAL, "CONFIG_USER_NS"),
            (true, libc::EIO, "report this as a bug"),
        ] {
            let Probe { status, found, way_out: advice, .. } = after(is_root, errno);
            assert_eq!(status, Status::Limited);
            assert!(
                found.contains(if is_root { "root's rights" } else { "your rights" }),
                "{found}"
            );
            assert!(advice.is_some_and(|advice| advice.contains(way_out)), "{errno}");
        }
    }

    /// The namespaces are made, and nothing is left of them.
    #[test]
    fn the_trial_leaves_no_process() {
        if !geteuid().is_root() {
            // It reaps all children, those of other tests, too: see the end-to-end tests.
            return;
        }
        let children = || std::fs::read_to_string("/proc/thread-self/children").unwrap();
        let before = children();
        let tried = probe();
        assert_eq!(children(), before, "{tried:?}");
    }
}
