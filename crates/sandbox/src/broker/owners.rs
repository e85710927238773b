//! Whose files in a bound directory a sandbox takes for its own user's.
//!
//! What a program may do there, it does with the rights of a user of the host, so what belongs to
//! that user is its own. Programs look for that: git(1) uses no repository that belongs to somebody
//! else, pip(1) no such cache.

use std::io;

use rustix::fs::{Stat, fstat};
use rustix::process::{getegid, geteuid};
use serde::{Deserialize, Serialize};
use thaw_abi::control::FileAttributes;

use super::host_directory::{HostDirectory, HostPolicy, encode};
use super::rights::{FileRights, NOBODY};

/// A user and a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ids {
    pub uid: u32,
    pub gid: u32,
}

impl Ids {
    /// Whose files in a directory are those of whoever uses it as `policy` says. `None`: nobody's,
    /// since it is root with all rights, for whom owners are as they are.
    pub(super) fn served_as(
        directory: &HostDirectory,
        policy: &HostPolicy,
    ) -> io::Result<Option<Self>> {
        if !geteuid().is_root() {
            return Ok(Some(Self { uid: geteuid().as_raw(), gid: getegid().as_raw() }));
        }
        Ok(match policy.rights {
            FileRights::Unprivileged => Some(Self { uid: NOBODY, gid: NOBODY }),
            FileRights::Caller if policy.in_place_of_owner => {
                let owner = fstat(directory.as_fd())?;
                Some(Self { uid: owner.st_uid, gid: owner.st_gid })
            }
            FileRights::Caller => None,
        })
    }
}

/// Who owns what in a bound directory, as a sandbox sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Owners(Option<Same>);

/// A user of the host whom the sandbox takes for a user of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Same {
    host: Ids,
    sandbox: Ids,
}

impl Owners {
    /// What belongs to `host` appears as `sandbox`'s, all else as it is.
    pub fn new(host: Option<Ids>, sandbox: Ids) -> Self {
        Self(host.map(|host| Same { host, sandbox }))
    }

    /// The attributes of a file as the sandbox sees them.
    pub fn show(self, stat: &Stat) -> FileAttributes {
        let mut shown = encode(stat);
        let Some(Same { host, sandbox }) = self.0 else { return shown };
        if shown.uid == host.uid {
            shown.uid = sandbox.uid;
        }
        if shown.gid == host.gid {
            shown.gid = sandbox.gid;
        }
        shown
    }

    /// Whether a file belongs to this user and this group, by the ids that the sandbox sees or by
    /// those of the host. `None`: to whomever.
    pub fn are(self, stat: &Stat, uid: Option<u32>, gid: Option<u32>) -> bool {
        let shown = self.show(stat);
        uid.is_none_or(|uid| uid == shown.uid || uid == stat.st_uid)
            && gid.is_none_or(|gid| gid == shown.gid || gid == stat.st_gid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, chown};
    use std::path::Path;

    const PROGRAM: Ids = Ids { uid: 7, gid: 8 };

    fn stat(path: &Path) -> Stat {
        rustix::fs::stat(path).unwrap()
    }

    #[test]
    fn what_is_the_users_is_the_programs() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let found = stat(file.path());
        let user = Ids { uid: found.st_uid, gid: found.st_gid };
        let other = Ids { uid: found.st_uid + 1, gid: found.st_gid + 1 };
        for (uid, gid) in [
            (user.uid, user.gid),
            (user.uid, other.gid),
            (other.uid, user.gid),
            (other.uid, other.gid),
        ] {
            let owners = Owners::new(Some(Ids { uid, gid }), PROGRAM);
            let shown = owners.show(&found);
            assert_eq!(shown.uid, if uid == user.uid { PROGRAM.uid } else { user.uid });
            assert_eq!(shown.gid, if gid == user.gid { PROGRAM.gid } else { user.gid });
            assert_eq!(
                FileAttributes { uid: found.st_uid, gid: found.st_gid, ..shown },
                encode(&found)
            );
        }
        let shown = Owners::default().show(&found);
        assert_eq!(shown, encode(&found));
    }

    #[test]
    fn who_owns_a_file_is_known_by_both_ids() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let found = stat(file.path());
        let user = Ids { uid: found.st_uid, gid: found.st_gid };
        let owners = Owners::new(Some(user), PROGRAM);
        assert!(owners.are(&found, None, None));
        assert!(owners.are(&found, Some(PROGRAM.uid), Some(PROGRAM.gid)));
        assert!(owners.are(&found, Some(user.uid), Some(user.gid)));
        assert!(!owners.are(&found, Some(4711), None));
        assert!(!owners.are(&found, Some(PROGRAM.uid), Some(4711)));
    }

    #[test]
    fn whom_a_directory_is_served_as() {
        if !geteuid().is_root() {
            eprintln!("not checked: it takes root to serve what is another user's");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        chown(directory.path(), Some(12_345), Some(12_346)).unwrap();
        fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let served_as = |rights, in_place_of_owner| {
            let policy = HostPolicy { rights, in_place_of_owner, ..HostPolicy::default() };
            let directory = HostDirectory::open_with(directory.path(), &policy).unwrap();
            Ids::served_as(&directory, &policy).unwrap()
        };
        let nobody = Some(Ids { uid: NOBODY, gid: NOBODY });
        assert_eq!(served_as(FileRights::Unprivileged, false), nobody);
        assert_eq!(served_as(FileRights::Unprivileged, true), nobody);
        assert_eq!(served_as(FileRights::Caller, false), None);
        let owner = Some(Ids { uid: 12_345, gid: 12_346 });
        assert_eq!(served_as(FileRights::Caller, true), owner);
    }
}
