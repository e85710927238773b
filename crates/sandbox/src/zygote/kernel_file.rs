//! The file that zygotes execute.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{
    MemfdFlags, Mode, OFlags, SealFlags, StatVfsMountFlags, fchmod, fcntl_add_seals, memfd_create,
    open, statvfs,
};
use rustix::io::Errno;

use crate::kernel::Kernel;

/// Bytes of a huge page, and written at once: so the page cache keeps them as one.
const HUGE_PAGE: usize = 2 << 20;

/// An executable file with what is loaded of the kernel, without a name: in `directory`,
/// if that can be, else in memory. A file system that keeps huge pages in the page cache
/// (ext4, XFS, Btrfs) lets processes map the kernel's text with one entry; for memory
/// files that takes an administrator (`shmem_enabled`).
pub(super) fn create(kernel: &Kernel, directory: Option<&Path>) -> io::Result<OwnedFd> {
    let unnamed = directory.and_then(|directory| unnamed_file(directory, kernel.loaded()).ok());
    unnamed.map_or_else(|| sealed_file(kernel.loaded()), Ok)
}

/// A file that its owner alone could open for writing, and nobody while it runs.
fn unnamed_file(directory: &Path, bytes: &[u8]) -> io::Result<OwnedFd> {
    if statvfs(directory)?.f_flag.contains(StatVfsMountFlags::NOEXEC) {
        return Err(Errno::ACCESS.into());
    }
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let mut file = File::from(open(directory, flags, Mode::RUSR | Mode::WUSR)?);
    for piece in bytes.chunks(HUGE_PAGE) {
        file.write_all(piece)?;
    }
    fchmod(&file, Mode::from_raw_mode(0o555))?;
    // What somebody has open for writing cannot be executed.
    Ok(File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?.into())
}

/// A memory file that nobody can change.
fn sealed_file(bytes: &[u8]) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = match memfd_create("thaw-kernel", flags | MemfdFlags::EXEC) {
        // Before Linux 6.3, every memory file is executable and the flag is unknown.
        Err(Errno::INVAL) => memfd_create("thaw-kernel", flags)?,
        result => result?,
    };
    let mut file = File::from(file);
    file.write_all(bytes)?;
    let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    fcntl_add_seals(&file, seals)?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn content(file: OwnedFd) -> Vec<u8> {
        let mut bytes = Vec::new();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        File::open(path).unwrap().read_to_end(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn the_file_lies_in_the_directory_or_in_memory() {
        let kernel = Kernel::embedded().unwrap();
        let directory = tempfile::tempdir().unwrap();
        for place in [Some(directory.path()), Some(Path::new("/absent")), None] {
            let file = create(&kernel, place).unwrap();
            assert_eq!(content(file), kernel.loaded());
        }
        assert_eq!(directory.path().read_dir().unwrap().count(), 0);
    }
}
