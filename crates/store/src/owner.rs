//! Root in a store of another user's. That user is the daemon, which is not root, has to
//! read what root's commands store, and may have to remove it. It may also be in the hands of
//! somebody who has taken the daemon over, and who puts a link where root is about to
//! write. So root acts with the owner's rights there: nothing is reached through such a link
//! that the owner could not have reached.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;
use rustix::process::{Gid, Uid, getegid, geteuid, getgid, getgroups, getuid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_thread_groups,
    set_thread_res_gid, set_thread_res_uid,
};

/// With whose rights this process acts in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// With its own: it is not root, or the directory is root's.
    Caller,
    /// With those of another user.
    Other {
        /// User id.
        uid: u32,
        /// Group id.
        gid: u32,
        /// Capabilities that it keeps.
        kept: CapabilitySet,
    },
}

impl Owner {
    /// The owner of a directory whose own path nobody else can change.
    ///
    /// # Errors
    /// The directory cannot be looked at, or this process may not change its user.
    pub fn of(directory: &Path) -> io::Result<Self> {
        if !geteuid().is_root() {
            return Ok(Self::Caller);
        }
        let attributes = fs::metadata(directory)?;
        let (uid, gid) = (attributes.uid(), attributes.gid());
        if uid == 0 {
            return Ok(Self::Caller);
        }
        let owner = Self::Other { uid, gid, kept: CapabilitySet::empty() };
        let reached = {
            let _acting = owner.act()?;
            accessat(CWD, directory, Access::EXEC_OK, AtFlags::EACCESS)
        };
        match reached {
            // It lies where the owner cannot go, as in root's own home. There this process
            // reads with root's rights, too; it never writes with them.
            Err(Errno::ACCESS) => {
                Ok(Self::Other { uid, gid, kept: CapabilitySet::DAC_READ_SEARCH })
            }
            _ => Ok(owner),
        }
    }

    /// As [`Owner::act`], but reaches nothing that the owner cannot reach: for files that are
    /// opened relative to a descriptor of their directory.
    ///
    /// # Errors
    /// This process may not change its user.
    pub fn act_nearby(self) -> io::Result<Acting> {
        match self {
            Self::Caller => self.act(),
            Self::Other { uid, gid, .. } => {
                Self::Other { uid, gid, kept: CapabilitySet::empty() }.act()
            }
        }
    }

    /// Gives the calling thread the rights of the owner until the result is dropped.
    ///
    /// # Errors
    /// This process may not change its user.
    pub fn act(self) -> io::Result<Acting> {
        let Self::Other { uid, gid, kept } = self else { return Ok(Acting { own: None }) };
        if !geteuid().is_root() {
            // It does so already.
            return Ok(Acting { own: None });
        }
        let sets = capabilities(None)?;
        // From here on, dropping gives back what was changed.
        let acting = Acting { own: Some(Own { groups: getgroups()?, gid: getegid(), sets }) };
        set_thread_groups(&[])?;
        set_thread_res_gid(getgid(), Gid::from_raw(gid), getegid())?;
        // The saved id stays root's: the owner may not send this process signals.
        set_thread_res_uid(getuid(), Uid::from_raw(uid), Uid::ROOT)?;
        set_capabilities(None, CapabilitySets { effective: kept & sets.permitted, ..sets })?;
        Ok(acting)
    }
}

/// What another user keeps this process from using.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Closed {
    /// The directory, or a file.
    pub path: PathBuf,
    /// User id of its owner.
    pub owner: u32,
}

/// Whose right is lacking if the host has refused `path` with this error; `None`: no other user's.
pub fn closed(path: &Path, error: &io::Error) -> Option<Closed> {
    if error.kind() != io::ErrorKind::PermissionDenied {
        return None;
    }
    // Nothing below a closed directory can be looked at, but the directory can.
    let (path, attributes) =
        path.ancestors().find_map(|path| Some((path, fs::metadata(path).ok()?)))?;
    let owner = attributes.uid();
    (owner != geteuid().as_raw()).then(|| Closed { path: path.to_owned(), owner })
}

/// While this lives, its thread acts as somebody else.
#[derive(Debug)]
#[must_use = "rights are given back when this is dropped"]
pub struct Acting {
    own: Option<Own>,
}

/// What root had before.
#[derive(Debug)]
struct Own {
    groups: Vec<Gid>,
    gid: Gid,
    sets: CapabilitySets,
}

impl Own {
    fn take_back(&self) -> rustix::io::Result<()> {
        set_thread_res_uid(getuid(), Uid::ROOT, Uid::ROOT)?;
        // Some of them are needed for what follows.
        set_capabilities(None, self.sets)?;
        set_thread_res_gid(getgid(), self.gid, self.gid)?;
        set_thread_groups(&self.groups)
    }
}

impl Drop for Acting {
    fn drop(&mut self) {
        if let Some(own) = &self.own {
            // Half of root's rights are of no use to anybody.
            own.take_back().expect("the saved user id is root's");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::lchown;

    use super::*;
    use crate::{Name, NewFunction, Store};

    fn all_below(directory: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap();
            found.push(entry.path());
            if entry.file_type().unwrap().is_dir() {
                all_below(&entry.path(), found);
            }
        }
    }

    /// A directory of another user's. `None` if this process is not root.
    fn home_of(uid: u32, gid: u32) -> Option<tempfile::TempDir> {
        if !geteuid().is_root() {
            return None;
        }
        let home = tempfile::tempdir().unwrap();
        lchown(home.path(), Some(uid), Some(gid)).unwrap();
        Some(home)
    }

    fn store_function(root: &Path) -> crate::Result<()> {
        let source = tempfile::tempdir().unwrap();
        // One that only root can read.
        fs::write(source.path().join("file"), "content").unwrap();
        let store = Store::open(root)?;
        let mut session = store.session()?;
        let mut tree = crate::Tree::new();
        let domain = crate::Domain::own(&Name::new("tenant").unwrap());
        let import = crate::import::ImportOptions { domain, ..Default::default() };
        let to = Path::new("/");
        session.import_directory(&mut tree, source.path(), to, &import, &mut |_| {})?;
        let index = session.put_index(&tree)?;
        let name = Name::new("function").unwrap();
        let config = serde_json::Value::Null;
        session.put_function(NewFunction { name, config, index, image: None }).map(drop)
    }

    /// All rights of this thread, as the host says.
    fn rights() -> String {
        let status = fs::read_to_string("/proc/thread-self/status").unwrap();
        let fields = ["Uid", "Gid", "Groups", "CapEff", "CapPrm", "CapInh"];
        let is_wanted = |line: &&str| fields.iter().any(|field| line.starts_with(field));
        status.lines().filter(is_wanted).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn what_root_stores_is_the_owners_of_the_directory() {
        let Some(home) = home_of(12_345, 12_346) else { return };
        let before = rights();
        store_function(&home.path().join("store")).unwrap();
        assert_eq!(rights(), before);
        let mut found = Vec::new();
        all_below(home.path(), &mut found);
        assert!(found.iter().any(|path| path.is_file()), "{found:?}");
        for path in found {
            let attributes = fs::symlink_metadata(&path).unwrap();
            assert_eq!((attributes.uid(), attributes.gid()), (12_345, 12_346), "{path:?}");
        }
        let store = Store::open(&home.path().join("store")).unwrap();
        store.remove_function(&Name::new("function").unwrap()).unwrap();
        assert!(!store.gc(crate::Removal::Remove).unwrap().blobs.is_empty());
        assert_eq!(rights(), before);
    }

    /// As somebody who has taken over the daemon may do.
    #[test]
    fn root_writes_through_no_link_of_the_owners() {
        for name in ["blobs", "indexes", "functions", "domains", "tmp"] {
            let Some(home) = home_of(12_345, 12_346) else { return };
            let roots = tempfile::tempdir().unwrap();
            let store = home.path().join("store");
            Store::open(&store).unwrap();
            let part = store.join(name);
            fs::remove_dir(&part).unwrap();
            std::os::unix::fs::symlink(roots.path(), &part).unwrap();
            lchown(&part, Some(12_345), Some(12_346)).unwrap();
            assert!(store_function(&store).is_err(), "{name}");
            assert_eq!(fs::read_dir(roots.path()).unwrap().count(), 0, "{name}");
        }
    }

    #[test]
    fn root_removes_nothing_through_a_link_of_the_owners() {
        let Some(home) = home_of(12_345, 12_346) else { return };
        let roots = tempfile::tempdir().unwrap();
        let left_over = roots.path().join("directory");
        fs::create_dir(&left_over).unwrap();
        let store = home.path().join("store");
        Store::open(&store).unwrap();
        fs::remove_dir(store.join("tmp")).unwrap();
        std::os::unix::fs::symlink(roots.path(), store.join("tmp")).unwrap();
        // Removes what sessions that have ended have left in `tmp`.
        assert!(Store::open(&store).is_err());
        assert!(left_over.exists());
    }

    /// The store itself may be a link of the owner's to anywhere, too.
    #[test]
    fn the_owner_is_that_of_the_directory_above() {
        let Some(home) = home_of(12_345, 12_346) else { return };
        let roots = tempfile::tempdir().unwrap();
        let store = home.path().join("store");
        std::os::unix::fs::symlink(roots.path(), &store).unwrap();
        assert!(Store::open(&store).is_err());
        assert_eq!(fs::read_dir(roots.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_store_may_lie_where_its_owner_cannot_go() {
        if !geteuid().is_root() {
            return;
        }
        let roots = tempfile::tempdir().unwrap();
        let home = roots.path().join("home");
        fs::create_dir(&home).unwrap();
        lchown(&home, Some(12_345), Some(12_346)).unwrap();
        store_function(&home.join("store")).unwrap();
        let record = home.join("store/functions/function/record.json");
        assert_eq!(fs::metadata(record).unwrap().uid(), 12_345);
        // To go there is all that is granted.
        let other = roots.path().join("other");
        let acting = Owner::of(&home).unwrap().act().unwrap();
        assert_eq!(fs::write(other, "").unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        drop(acting);
    }
}
