//! Which user namespace a launcher joins before it forks what is wanted.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::process::{DumpableBehavior, Gid, Uid, set_dumpable_behavior};
use rustix::thread::{
    LinkNameSpaceType, move_into_link_name_space, set_thread_res_gid, set_thread_res_uid,
};

use crate::confine::{drop_groups_if_allowed, enter_launcher_root};

/// What a launcher joins: an argument of it. The namespace is its standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Join {
    /// Nothing: it is where it should be.
    Nothing,
    /// The user namespace of sandboxes, with the user id that it has.
    User,
    /// The same for a monitor, which lends the launcher more rights than the daemon has:
    /// as root of that namespace.
    AsRoot,
}

impl Join {
    const ALL: [Self; 3] = [Self::Nothing, Self::User, Self::AsRoot];

    /// As an argument of the launcher.
    pub fn argument(self) -> &'static str {
        match self {
            Self::Nothing => "stay",
            Self::User => "join-user-namespace",
            Self::AsRoot => "join-user-namespace-as-root",
        }
    }

    pub fn from_argument(argument: &OsStr) -> Option<Self> {
        Self::ALL.into_iter().find(|join| argument == join.argument())
    }

    /// Joins `namespace`; an error names the step that failed, after "cannot".
    ///
    /// From then on the owner of the namespace, which is the daemon, may look into this
    /// process (`/proc/PID/root`, ptrace(2)), for as long as it lets it wait. So what the
    /// monitor sees of the files is given up before.
    pub fn enter(self, namespace: &OwnedFd) -> Result<(), (&'static str, Errno)> {
        if self == Self::AsRoot {
            enter_launcher_root().map_err(|errno| ("enter a root directory", errno))?;
        }
        if self != Self::Nothing {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::User))
                .map_err(|errno| ("join the sandboxes' user namespace", errno))?;
        }
        if self == Self::AsRoot {
            become_root().map_err(|errno| ("become root of the user namespace", errno))?;
        }
        Ok(())
    }
}

/// Becomes root of this user namespace, and nobody else's anywhere.
fn become_root() -> Result<(), Errno> {
    drop_groups_if_allowed()?;
    set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT)?;
    set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT)?;
    // After a change of users, which makes this process's files in /proc the host's root's.
    set_dumpable_behavior(DumpableBehavior::Dumpable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_read_as_they_are_written() {
        for join in Join::ALL {
            assert_eq!(Join::from_argument(OsStr::new(join.argument())), Some(join));
        }
        assert_eq!(Join::from_argument(OsStr::new("")), None);
    }
}
