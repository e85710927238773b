//! Opening files of a directory that somebody else may have filled: no link leads out
//! of it, nothing is waited for.

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, fstat, openat2};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};

/// Times that a path is resolved again because directories on it were moved.
const ATTEMPTS: usize = 8;

/// Opens the directory itself, for [`open`].
///
/// # Errors
/// It is no directory, or may not be entered.
pub fn open_directory(path: &Path) -> io::Result<File> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
}

/// Opens the directory `inside` of `root`, a path without links (canonical), such that no link is followed
/// anywhere on the way, not even one that has taken the place of a part of `root` since: for whoever
/// changes something there with more rights than its owner has.
///
/// # Errors
/// There is a link on the way, or no such directory.
pub fn open_without_links(root: &Path, inside: &Path) -> io::Result<File> {
    reach_without_links(root, inside, OFlags::RDONLY)
}

/// The same for a directory that is not read here: one that stands for it is enough (`O_PATH`).
///
/// # Errors
/// See [`open_without_links`].
pub fn find_without_links(root: &Path, inside: &Path) -> io::Result<File> {
    reach_without_links(root, inside, OFlags::PATH)
}

fn reach_without_links(root: &Path, inside: &Path, access: OFlags) -> io::Result<File> {
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    let without = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let root = openat2(CWD, root, flags | OFlags::PATH, Mode::empty(), without)?;
    // The directory itself has no name in itself but this one.
    let inside = if inside == Path::new("") { Path::new(".") } else { inside };
    Ok(openat2(root, inside, flags | access, Mode::empty(), without | ResolveFlags::BENEATH)?
        .into())
}

/// Whether an error of [`open_without_links`] says that there is a link on the way.
pub fn is_by_link(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::LOOP))
}

/// Where an open directory is found as long as it is open, whatever becomes of its path.
pub fn place_of(directory: impl AsFd) -> PathBuf {
    Path::new("/proc/self/fd").join(directory.as_fd().as_raw_fd().to_string())
}

/// Opens a file or directory below `directory` for reading. Symbolic links are
/// followed as long as they stay below it: openat2(2), `RESOLVE_BENEATH`. A FIFO or a
/// device does not hold the caller up.
///
/// # Errors
/// [`leads_out`] tells a path that leaves the directory from other errors.
pub fn open(directory: impl AsFd, path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let within = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    for _ in 0..ATTEMPTS {
        match openat2(directory.as_fd(), path, flags, Mode::empty(), within) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(Errno::NOSYS) => {
                return Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    "the system call openat2 is forbidden here, without which links cannot be \
                     kept inside of a directory: allow it, in systemd units by \
                     SystemCallFilter= or without RestrictSUIDSGID=",
                ));
            }
            opened => return Ok(opened?.into()),
        }
    }
    Err(Errno::AGAIN.into())
}

/// Whether an error of [`open`] says that the path leaves the directory.
pub fn leads_out(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::XDEV))
}

/// Reads a regular file below `directory`, of at most `max` bytes.
///
/// # Errors
/// There is none, it lies elsewhere, or is larger.
pub fn read(directory: impl AsFd, path: &Path, max: u64) -> io::Result<Vec<u8>> {
    let file = open(directory, path)?;
    if FileType::from_raw_mode(fstat(&file)?.st_mode) != FileType::RegularFile {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
    }
    let mut bytes = Vec::new();
    file.take(max + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > max {
        true => Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("it is larger than {max} bytes"),
        )),
        false => Ok(bytes),
    }
}

/// Where an open file lies at this moment.
///
/// # Errors
/// There is no `/proc`.
pub fn path_of(file: &File) -> io::Result<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_are_followed_as_long_as_they_stay_inside() {
        let all = tempfile::tempdir().unwrap();
        let inside = all.path().join("inside");
        fs::create_dir_all(inside.join("sub")).unwrap();
        fs::write(inside.join("sub/file"), "content").unwrap();
        fs::write(all.path().join("secret"), "secret").unwrap();
        symlink("sub", inside.join("also")).unwrap();
        symlink("../secret", inside.join("up")).unwrap();
        symlink("/etc", inside.join("away")).unwrap();
        symlink(&inside, inside.join("absolute")).unwrap();
        let directory = open_directory(&inside).unwrap();
        let read = |path: &str| read(&directory, Path::new(path), 100);
        assert_eq!(read("also/file").unwrap(), b"content");
        assert_eq!(read("sub/../sub/file").unwrap(), b"content");
        for path in ["up", "away/passwd", "absolute/sub/file", "../secret", "/etc/passwd"] {
            let error = read(path).unwrap_err();
            assert!(leads_out(&error), "{path}: {error}");
        }
        assert!(!leads_out(&read("none").unwrap_err()));
    }

    #[test]
    fn no_link_is_followed_to_what_is_changed_with_more_rights() {
        let all = tempfile::tempdir().unwrap();
        let all = all.path().canonicalize().unwrap();
        let home = all.join("parent/home");
        fs::create_dir_all(home.join("work/f/packages")).unwrap();
        fs::create_dir_all(all.join("victim/home/work")).unwrap();
        let open = |inside: &str| open_without_links(&home, Path::new(inside));
        let opened = open("work/f/packages").unwrap();
        fs::write(place_of(&opened).join("file"), "").unwrap();
        assert!(home.join("work/f/packages/file").exists());
        symlink("packages", home.join("work/f/link")).unwrap();
        assert!(is_by_link(&open("work/f/link").unwrap_err()) && open("../home/work").is_err());
        assert!(!is_by_link(&open("work/none").unwrap_err()));
        let found = |inside: &str| find_without_links(&home, Path::new(inside));
        assert_eq!(path_of(&found("").unwrap()).unwrap(), home);
        assert!(is_by_link(&found("work/f/link").unwrap_err()));
        fs::rename(all.join("parent"), all.join("moved")).unwrap();
        symlink(all.join("victim"), all.join("parent")).unwrap();
        assert!(open("work").is_err(), "a part of the root has become a link");
    }

    #[test]
    fn what_is_large_or_no_file_is_refused_at_once() {
        let all = tempfile::tempdir().unwrap();
        let kind = FileType::Fifo;
        let mode = Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, all.path().join("fifo"), kind, mode, 0).unwrap();
        fs::write(all.path().join("large"), [0; 101]).unwrap();
        let directory = open_directory(all.path()).unwrap();
        let read = |path: &str| read(&directory, Path::new(path), 100).unwrap_err().kind();
        assert_eq!(read("fifo"), io::ErrorKind::InvalidInput);
        assert_eq!(read("."), io::ErrorKind::InvalidInput);
        assert_eq!(read("large"), io::ErrorKind::FileTooLarge);
    }
}
