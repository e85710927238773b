//! Where the memory of hibernated instances lies: files without a name, each of one instance.

use rustix::fs::statvfs;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use thaw_sandbox::SwapFile;

/// Bytes of the file system that hibernation leaves to others: where there are no more, it is
/// refused before it fills the disk.
const LEFT_TO_OTHERS: u64 = 64 << 20;

/// A directory for swap files.
#[derive(Debug)]
pub struct SwapSpace {
    directory: PathBuf,
    next: AtomicU64,
}

impl SwapSpace {
    /// The swap files of this daemon in a directory. What another daemon has left there, killed
    /// between two host calls, is removed.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn begin(directory: PathBuf) -> io::Result<Self> {
        for entry in fs::read_dir(&directory)? {
            fs::remove_file(entry?.path())?;
        }
        Ok(Self { directory, next: AtomicU64::new(1) })
    }

    /// A new file, which nobody else finds, and which is gone with its last descriptor.
    ///
    /// # Errors
    /// The disk is full, or is about to be: no more than `LEFT_TO_OTHERS` would be left with
    /// `bytes` in the file.
    pub fn new_file(&self, bytes: u64) -> io::Result<SwapFile> {
        self.require_room(bytes)?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let path = self.directory.join(format!("{}-{number}", std::process::id()));
        let write =
            OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
        // The sandbox gets a description that it can only read.
        let read = File::open(&path);
        let removed = fs::remove_file(&path);
        removed.and(read).map(|read| SwapFile { write, read, gate: None })
    }

    fn require_room(&self, bytes: u64) -> io::Result<()> {
        let file_system = statvfs(&self.directory)?;
        let left = file_system.f_bavail.saturating_mul(file_system.f_frsize);
        match left.checked_sub(bytes) {
            Some(left) if left >= LEFT_TO_OTHERS => Ok(()),
            _ => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
        }
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, MetadataExt};

    #[test]
    fn a_swap_file_is_its_owners_alone_and_has_no_name() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("1-7"), "left by another daemon").unwrap();
        let space = SwapSpace::begin(directory.path().to_owned()).unwrap();
        let SwapFile { write, read, .. } = space.new_file(1).unwrap();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        let attributes = write.metadata().unwrap();
        assert_eq!((attributes.mode() & 0o777, attributes.nlink()), (0o600, 0));
        write.write_all_at(b"memory", 0).unwrap();
        let mut seen = [0; 6];
        read.read_exact_at(&mut seen, 0).unwrap();
        assert_eq!(&seen, b"memory");
        read.write_all_at(b"x", 0).unwrap_err();
    }

    #[test]
    fn no_file_is_begun_for_which_there_is_no_room() {
        let directory = tempfile::tempdir().unwrap();
        let space = SwapSpace::begin(directory.path().to_owned()).unwrap();
        let error = space.new_file(u64::MAX).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
