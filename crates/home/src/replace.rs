//! Files of the state directory that are replaced as a whole.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Replaces a file, or makes it, for its owner only. Whoever reads it finds what it had before or
/// `content`, also if this process is killed; after a loss of power that holds once it was settled
/// ([`settle`]). To be called by one at a time for each file.
///
/// # Errors
/// The host's; the file is as before.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let unfinished = path.with_extension("new");
    let mut options = OpenOptions::new();
    let mut new = options.write(true).create(true).truncate(true).mode(0o600).open(&unfinished)?;
    new.write_all(content)?;
    fs::rename(&unfinished, path)
}

/// Has a file that was replaced survive a loss of power. Waits for the disk.
///
/// # Errors
/// The host's.
pub fn settle(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()?;
    let directory = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_file_is_replaced_whole_and_stays_its_owners() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state.json");
        for content in ["first", "2nd"] {
            replace(&path, content.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
        }
        settle(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
        fs::create_dir(path.with_extension("new")).unwrap();
        replace(&path, b"third").unwrap_err();
        assert_eq!(fs::read_to_string(&path).unwrap(), "2nd");
        assert!(settle(&directory.path().join("none")).is_err());
    }
}
