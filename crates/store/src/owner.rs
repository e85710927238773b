//! What root makes in a store of another user's belongs to that user: the daemon, which
//! is not root, has to read it and may have to remove it.

use std::fs;
use std::os::unix::fs::{MetadataExt, lchown};
use std::path::Path;

use crate::error::{Context, Result};

/// Gives what this process has just made at `path` to the owner of the directory that
/// it lies in, if this process is root and the other one is not.
pub(crate) fn like_parent(path: &Path) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let Some(parent) = path.parent() else { return Ok(()) };
    let owner = fs::metadata(parent).context("inspect", parent)?;
    if owner.uid() == 0 {
        return Ok(());
    }
    lchown(path, Some(owner.uid()), Some(owner.gid())).context("change the owner of", path)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

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

    #[test]
    fn what_root_stores_is_the_owners_of_the_directory() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let home = tempfile::tempdir().unwrap();
        lchown(home.path(), Some(12_345), Some(12_346)).unwrap();
        let source = tempfile::tempdir().unwrap();
        fs::write(source.path().join("file"), "content").unwrap();
        let store = Store::open(&home.path().join("store")).unwrap();
        let mut session = store.session().unwrap();
        let mut tree = crate::Tree::new();
        let import = crate::import::ImportOptions::default();
        session
            .import_directory(&mut tree, source.path(), Path::new("/"), &import, &mut |_| {})
            .unwrap();
        let index = session.put_index(&tree).unwrap();
        let name = Name::new("function").unwrap();
        let config = serde_json::Value::Null;
        session.put_function(NewFunction { name, config, index, image: None }).unwrap();
        let mut found = Vec::new();
        all_below(home.path(), &mut found);
        assert!(found.iter().any(|path| path.is_file()), "{found:?}");
        for path in found {
            let attributes = fs::symlink_metadata(&path).unwrap();
            assert_eq!((attributes.uid(), attributes.gid()), (12_345, 12_346), "{path:?}");
        }
    }
}
