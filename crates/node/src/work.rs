//! What builds keep for functions that are gone: packages, caches of package managers.

use crate::usage::bytes_below;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};
use thaw_home::beneath;
use thaw_home::home::Home;
use thaw_store::{Name, Removal, Store, StoreError};

/// A directory that has changed within this time may belong to a function that is about to be built
/// for the first time.
const NEW: Duration = Duration::from_secs(60);
/// How long builds are waited for.
const PATIENCE: Duration = Duration::from_secs(10);
/// Directories of benchmarks begin like this.
const OF_BENCHMARKS: &str = "bench-";

/// Directories of builds that were removed, or would be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemovedWork {
    /// Their names.
    pub names: Vec<OsString>,
    /// Bytes on disk that they occupied.
    pub bytes: u64,
}

/// Removes the directories of builds of functions that are gone, while nothing is built. What cannot
/// be removed stays, and is no failure.
///
/// # Errors
/// The store is busy.
pub fn remove_work_of_nobody(
    home: &Home,
    store: &Store,
    removal: Removal,
) -> Result<RemovedWork, StoreError> {
    remove_within(PATIENCE, home, store, removal)
}

/// The same, with so much patience for builds.
fn remove_within(
    patience: Duration,
    home: &Home,
    store: &Store,
    removal: Removal,
) -> Result<RemovedWork, StoreError> {
    let _alone = store.keep_sessions_out(patience)?;
    let mut removed = RemovedWork::default();
    let Ok(acting) = home.act() else { return Ok(removed) };
    let all = home.root().join("work");
    let Ok(opened) = beneath::open_without_links(home.root(), Path::new("work")) else {
        return Ok(removed);
    };
    let place = beneath::place_of(&opened);
    let mut found = Vec::new();
    for entry in fs::read_dir(&place).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if !is_nobodys(home, store, &name) || !is_old(&entry.path()).unwrap_or(false) {
            continue;
        }
        let bytes = bytes_below(&entry.path());
        // What is left is looked at below.
        if removal == Removal::Remove {
            let _ = fs::remove_dir_all(entry.path());
        }
        found.push((name, bytes));
    }
    drop(acting);
    for (name, bytes) in found {
        if removal == Removal::Remove
            && let Err(error) = remove_rest(&place.join(&name))
        {
            let path = all.join(&name);
            tracing::warn!("{} cannot be removed: {error}; who owns it can", path.display());
            continue;
        }
        removed.bytes += bytes;
        removed.names.push(name);
    }
    Ok(removed)
}

/// Removes what is left of a directory with this process's own rights: commands that root has
/// had run in a build have made files of root's. Links in it, and in its place, are not followed.
fn remove_rest(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Whether no function has the name, not even one whose record is damaged.
fn is_nobodys(home: &Home, store: &Store, name: &OsString) -> bool {
    let Some(name) = name.to_str().and_then(|name| Name::new(name).ok()) else { return false };
    let is_gone = matches!(store.get_function(&name), Err(error) if error.is_not_found());
    let is_partial = home.partial().join(name.as_str()).exists();
    is_gone && !is_partial && !name.as_str().starts_with(OF_BENCHMARKS)
}

fn is_old(directory: &Path) -> io::Result<bool> {
    let found = fs::symlink_metadata(directory)?;
    let age = SystemTime::now().duration_since(found.modified()?).unwrap_or_default();
    Ok(found.is_dir() && age >= NEW)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    #[test]
    fn work_of_nobody_goes_once_it_is_old() {
        let directory = tempfile::tempdir().unwrap();
        let home = Home::at(directory.path().join("home")).unwrap();
        let store = Store::open(&home.store()).unwrap();
        for name in ["gone", "new", "bench-asleep", "damaged"] {
            fs::write(home.work(name).unwrap().join("file"), [1; 10_000]).unwrap();
        }
        let damaged = home.store().join("functions/damaged");
        fs::create_dir_all(&damaged).unwrap();
        fs::write(damaged.join("record.json"), "no record").unwrap();
        let long_ago = SystemTime::now() - 2 * NEW;
        for name in ["gone", "bench-asleep", "damaged"] {
            let work = File::open(home.work(name).unwrap()).unwrap();
            work.set_modified(long_ago).unwrap();
        }
        let planned = remove_work_of_nobody(&home, &store, Removal::DryRun).unwrap();
        assert_eq!(planned.names, ["gone"]);
        assert!(planned.bytes >= 10_000);
        assert!(home.root().join("work/gone/file").exists());
        assert_eq!(remove_work_of_nobody(&home, &store, Removal::Remove).unwrap(), planned);
        assert!(!home.root().join("work/gone").exists());
        for name in ["new", "bench-asleep", "damaged"] {
            assert!(home.root().join("work").join(name).exists(), "{name}");
        }
    }

    #[test]
    fn what_roots_builds_have_made_in_the_home_of_another_user_goes_and_no_link_leads_out() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let root = directory.path().join("home");
        fs::create_dir(&root).unwrap();
        chown(&root, Some(12345), Some(12345)).unwrap();
        let home = Home::at(root).unwrap();
        let store = Store::open(&home.store()).unwrap();
        let outside = directory.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("file"), "kept").unwrap();
        let work = home.work("gone").unwrap();
        fs::create_dir_all(work.join("cache/deep")).unwrap();
        fs::write(work.join("cache/deep/file"), "root's").unwrap();
        symlink(&outside, work.join("cache/out")).unwrap();
        symlink(&outside, home.root().join("work/linked")).unwrap();
        File::open(&work).unwrap().set_modified(SystemTime::now() - 2 * NEW).unwrap();
        let removed = remove_work_of_nobody(&home, &store, Removal::Remove).unwrap();
        assert_eq!(removed.names, ["gone"]);
        assert!(!work.exists());
        assert_eq!(fs::read_to_string(outside.join("file")).unwrap(), "kept");
    }

    #[test]
    fn nothing_goes_while_something_is_built() {
        let directory = tempfile::tempdir().unwrap();
        let home = Home::at(directory.path().join("home")).unwrap();
        let store = Store::open(&home.store()).unwrap();
        let work = home.work("gone").unwrap();
        File::open(&work).unwrap().set_modified(SystemTime::now() - 2 * NEW).unwrap();
        let remove = || remove_within(Duration::ZERO, &home, &store, Removal::Remove);
        let session = store.session().unwrap();
        assert!(remove().is_err());
        assert!(work.exists());
        drop(session);
        assert_eq!(remove().unwrap().names, ["gone"]);
        assert!(!work.exists());
    }
}
