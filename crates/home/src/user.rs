//! Whose the daemon and `$THAW_HOME` are.

use crate::home::{Home, HomeError};
use crate::volumes::host_directories;
use rustix::fs::{AtFlags, CWD, chownat};
use rustix::process::{Gid, Uid, getegid, geteuid, getgid, getuid};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use thaw_sandbox::monitor::DaemonIds;

/// The user that a daemon of root's becomes if there is one of this name.
const USER: &str = "thaw";
/// The user and group id that it has otherwise: the one before those of sandboxes.
const USUAL_ID: u32 = 1_999_999;

/// The user that a daemon becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonUser {
    /// Its ids.
    pub ids: DaemonIds,
    /// How it is kept from the monitor.
    pub kind: UserKind,
}

/// How a daemon is kept from the monitor and the other processes of who started it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum UserKind {
    /// It is another user than its monitor, which is root.
    Other,
    /// It is the same user, in namespaces of its own.
    Caller,
}

impl DaemonUser {
    /// The user of root's daemon that serves `home`: the owner of the directory, if that
    /// is not root; else the user `thaw`; else one without a name. `None` if the caller is
    /// not root, or this user namespace has no such id.
    pub fn for_home(home: &Home) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            return None;
        }
        let owner =
            fs::metadata(home.root()).ok().map(|m| DaemonIds { uid: m.uid(), gid: m.gid() });
        let ids = owner.filter(|owner| owner.uid != 0).or_else(Self::usual)?;
        is_mapped(ids).then_some(Self { ids, kind: UserKind::Other })
    }

    /// The user of a daemon that another user than root starts. `None` if the caller is root.
    pub fn caller() -> Option<Self> {
        let (uid, gid) = (getuid().as_raw(), getgid().as_raw());
        let is_plain = uid == geteuid().as_raw() && gid == getegid().as_raw();
        (uid != 0 && is_plain)
            .then_some(Self { ids: DaemonIds { uid, gid }, kind: UserKind::Caller })
    }

    fn usual() -> Option<DaemonIds> {
        let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
        Some(named(&passwd, USER).unwrap_or(DaemonIds { uid: USUAL_ID, gid: USUAL_ID }))
    }
}

/// The ids of a user in the text of passwd(5); never root's.
fn named(passwd: &str, user: &str) -> Option<DaemonIds> {
    let ids = passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        if fields.next()? != user {
            return None;
        }
        let uid = fields.nth(1)?.parse().ok()?;
        Some(DaemonIds { uid, gid: fields.next()?.parse().ok()? })
    });
    ids.filter(|ids| ids.uid != 0 && ids.gid != 0)
}

/// Whether this process's user namespace has the ids.
fn is_mapped(ids: DaemonIds) -> bool {
    let has = |file: &str, id: u32| {
        let map = fs::read_to_string(file).unwrap_or_default();
        map.lines().any(|line| {
            let mut numbers = line.split_whitespace().map(str::parse::<u64>);
            match (numbers.next(), numbers.nth(1)) {
                (Some(Ok(first)), Some(Ok(count))) => (first..first + count).contains(&id.into()),
                _ => false,
            }
        })
    };
    has("/proc/self/uid_map", ids.uid) && has("/proc/self/gid_map", ids.gid)
}

/// Makes the directory the daemon's, and everything in it that is root's: an older Thaw
/// had all of it so.
///
/// # Errors
/// An owner cannot be changed.
pub fn give_home(home: &Home, user: DaemonIds) -> Result<(), HomeError> {
    let owner = fs::metadata(home.root()).map(|attributes| attributes.uid());
    if owner.is_ok_and(|owner| owner == user.uid) {
        return Ok(());
    }
    let given = parts_to_give(home)?.into_iter().try_for_each(|part| {
        match fs::symlink_metadata(&part)?.file_type() {
            // Links stay root's: those are trusted.
            kind if kind.is_symlink() => Ok(()),
            kind if kind.is_dir() => give_content(&part, user).and_then(|()| give(&part, user)),
            _ => give(&part, user),
        }
    });
    // The directory itself last: if this is interrupted, the next start does the rest.
    given.and_then(|()| give(home.root(), user)).map_err(|error| home.unusable(error))
}

/// Directories that verbs make in a home, perhaps before it has had a daemon.
const OURS: [&str; 13] = [
    "store", "logs", "work", "swap", "asleep", "pulls", "pieces", "tls", "secrets", "partial",
    "triggers", "volumes", "inject",
];

/// What Thaw has put into the home. An error if the home has no store and holds other
/// things: it may be a directory of the system's, of which nothing must be given away.
fn parts_to_give(home: &Home) -> Result<Vec<PathBuf>, HomeError> {
    let is_ours = |name: &str| {
        OURS.contains(&name)
            || ["daemon.", "admin.", "e2b-keys."].iter().any(|prefix| name.starts_with(prefix))
    };
    // Those that people put there, and keys and certificates that these name.
    let is_usual = |name: &str| {
        ["tenants.toml", "registries.toml", "gateway.toml", "e2b.toml", "lost+found"]
            .contains(&name)
            || [".pub", ".pem", ".crt", ".key"].iter().any(|end| name.ends_with(end))
    };
    let mut ours = Vec::new();
    for entry in fs::read_dir(home.root()).map_err(|error| home.unusable(error))? {
        let entry = entry.map_err(|error| home.unusable(error))?;
        let name = entry.file_name();
        match &*name.to_string_lossy() {
            text if is_ours(text) => ours.push(entry.path()),
            text if is_usual(text) || home.store().is_dir() => {}
            _ => return Err(HomeError::Foreign { path: home.root().to_owned(), name }),
        }
    }
    Ok(ours)
}

/// Directories elsewhere to which root has linked parts of the home.
///
/// # Errors
/// One is not the daemon's, or such a link is not root's, but the user's who starts the
/// daemon and would want it to be followed.
pub fn linked_directories(home: &Home, user: DaemonUser) -> Result<Vec<PathBuf>, HomeError> {
    let DaemonUser { ids: user, kind } = user;
    let mut found = Vec::new();
    for link in home.parts() {
        // A link of the daemon's own leads nowhere: it could name any directory.
        let is_roots = fs::symlink_metadata(&link)
            .is_ok_and(|attributes| attributes.is_symlink() && attributes.uid() == 0);
        if kind == UserKind::Caller && !is_roots && link.is_symlink() {
            return Err(HomeError::LinkedByDaemon { link });
        }
        let Some(target) = fs::canonicalize(&link).ok().filter(|_| is_roots) else { continue };
        let owner = fs::metadata(&target).map(|attributes| attributes.uid());
        if owner.is_ok_and(|owner| owner != user.uid) {
            let DaemonIds { uid, gid } = user;
            return Err(HomeError::LinkedToOthers { link, target, uid, gid });
        }
        found.push(target);
    }
    found.extend(host_directories(home, user.uid));
    Ok(found)
}

fn give_content(directory: &Path, user: DaemonIds) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            give_content(&entry.path(), user)?;
        }
        if !entry.file_type()?.is_symlink() {
            give(&entry.path(), user)?;
        }
    }
    Ok(())
}

/// Changes the owner of what is at `path`, if it is root's, without following a link.
fn give(path: &Path, user: DaemonIds) -> io::Result<()> {
    if fs::symlink_metadata(path)?.uid() != 0 {
        return Ok(());
    }
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    Ok(chownat(CWD, path, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_daemons_user_is_never_root() {
        let passwd = "root:x:0:0::/:/bin/sh\nthaw:x:990:991::/:/bin/false\nwheel:x:5:0::/:/x\n";
        assert_eq!(named(passwd, "thaw"), Some(DaemonIds { uid: 990, gid: 991 }));
        for user in ["root", "wheel", "nobody"] {
            assert_eq!(named(passwd, user), None, "{user}");
        }
    }

    #[test]
    fn only_roots_links_lead_out_of_a_home() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let all = tempfile::tempdir().unwrap();
        let home = Home::at(all.path().join("home")).unwrap();
        let elsewhere = all.path().join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        let ids = DaemonIds { uid: 12_345, gid: 12_346 };
        let (user, link) = (DaemonUser { ids, kind: UserKind::Other }, home.root().join("logs"));
        std::os::unix::fs::symlink(&elsewhere, &link).unwrap();
        let error = linked_directories(&home, user).unwrap_err().to_string();
        assert!(error.contains("chown -R 12345:12346"), "{error}");
        std::os::unix::fs::chown(&elsewhere, Some(12_345), Some(12_346)).unwrap();
        assert_eq!(linked_directories(&home, user).unwrap(), [elsewhere.canonicalize().unwrap()]);
        std::os::unix::fs::lchown(&link, Some(12_345), Some(12_346)).unwrap();
        assert!(linked_directories(&home, user).unwrap().is_empty());
        // Somebody else's daemon could have made it, too, and is told so.
        let caller = DaemonUser { kind: UserKind::Caller, ..user };
        let error = linked_directories(&home, caller).unwrap_err().to_string();
        assert!(error.contains("set THAW_HOME"), "{error}");
    }

    #[test]
    fn directories_that_hold_other_things_are_not_given_away() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let all = tempfile::tempdir().unwrap();
        fs::write(all.path().join("passwd"), "").unwrap();
        let home = Home::at(all.path()).unwrap();
        let error = give_home(&home, DaemonIds { uid: 12_345, gid: 12_346 }).unwrap_err();
        assert!(error.to_string().contains("`passwd`"), "{error}");
        for path in [all.path(), &all.path().join("passwd")] {
            assert_eq!(fs::metadata(path).unwrap().uid(), 0);
        }
    }

    #[test]
    fn everything_of_roots_in_a_home_is_given_away() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let all = tempfile::tempdir().unwrap();
        // One that is there already, as an older Thaw left it.
        fs::create_dir(all.path().join("home")).unwrap();
        let home = Home::at(all.path().join("home")).unwrap();
        let secret = all.path().join("secret");
        fs::write(&secret, "").unwrap();
        fs::create_dir(home.root().join("store")).unwrap();
        fs::write(home.root().join("store/blob"), "").unwrap();
        // What `thaw secret set` and `thaw pull --lazy` make before the first daemon.
        for directory in ["secrets/shop", "partial/shop"] {
            fs::create_dir_all(home.root().join(directory)).unwrap();
        }
        fs::write(home.root().join("secrets/shop/database"), "").unwrap();
        // What `thaw key create` makes.
        fs::write(home.root().join("e2b-keys.toml"), "").unwrap();
        std::os::unix::fs::symlink(&secret, home.root().join("logs")).unwrap();
        let user = DaemonIds { uid: 12_345, gid: 12_346 };
        give_home(&home, user).unwrap();
        let owner = |path: &Path| {
            let attributes = fs::symlink_metadata(path).unwrap();
            (attributes.uid(), attributes.gid())
        };
        let secret_of_ours = "secrets/shop/database";
        let keys = "e2b-keys.toml";
        for name in ["", "store", "store/blob", "secrets", secret_of_ours, "partial/shop", keys] {
            assert_eq!(owner(&home.root().join(name)), (12_345, 12_346), "{name}");
        }
        assert_eq!((owner(&secret), owner(&home.root().join("logs"))), ((0, 0), (0, 0)));
        let expected = DaemonUser { ids: user, kind: UserKind::Other };
        assert_eq!(DaemonUser::for_home(&home), Some(expected));
    }

    #[test]
    fn a_home_may_have_settings_and_keys_before_it_has_a_store_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let home = Home::at(directory.path()).unwrap();
        for name in ["registries.toml", "cosign.pub", "site.pem"] {
            fs::write(home.root().join(name), "").unwrap();
        }
        assert_eq!(parts_to_give(&home).unwrap(), Vec::<PathBuf>::new());
        fs::write(home.root().join("letters.txt"), "").unwrap();
        parts_to_give(&home).unwrap_err();
    }
}
