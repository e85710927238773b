//! One file of the host as a node of a tree.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::SystemTime;

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, Stat, fstat, major, minor, openat, readlinkat, statat,
};

use super::directory::{ImportOptions, Ownership};
use crate::blob::Domain;
use crate::error::{Context, Result, StoreError};
use crate::index::{Attributes, Content, DeviceNumber, Node, Timestamp};
use crate::session::Session;

/// Attributes of the entry `name` of an open directory, not following links.
/// `path` names it in errors.
pub(super) fn stat_entry(directory: &OwnedFd, name: &[u8], path: &Path) -> Result<Stat> {
    statat(directory, name, AtFlags::SYMLINK_NOFOLLOW).context("inspect", path)
}

/// Opens a subdirectory, never through a symbolic link.
pub(super) fn open_directory(directory: &OwnedFd, name: &[u8], path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(directory, name, flags, Mode::empty()).context("open", path)
}

/// The kind of a file.
pub(super) fn file_type(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

/// What the index says of a file beside its content.
pub(super) fn attributes(stat: &Stat, ownership: Ownership) -> Attributes {
    let (uid, gid) = match ownership {
        Ownership::Keep => (stat.st_uid, stat.st_gid),
        Ownership::All { uid, gid } => (uid, gid),
    };
    Attributes {
        permissions: stat.st_mode & 0o7777,
        uid,
        gid,
        modified: Timestamp { seconds: stat.st_mtime, nanoseconds: stat.st_mtime_nsec as u32 },
    }
}

/// A file to be read.
pub(super) struct Source<'a> {
    /// The directory that it lies in.
    pub directory: &'a OwnedFd,
    /// Its name there.
    pub name: &'a [u8],
    /// Its attributes.
    pub stat: &'a Stat,
    /// Its path, for messages.
    pub path: &'a Path,
}

/// Reads a file that is not a directory. The attributes are those of the very
/// file whose content was stored, even if the name changed hands meanwhile.
pub(super) fn read_node(
    session: &mut Session,
    from: &Source<'_>,
    options: &ImportOptions,
    domain: &Domain,
) -> Result<Node> {
    let Source { directory, name, stat, path } = *from;
    let ownership = options.ownership;
    let device = || DeviceNumber { major: major(stat.st_rdev), minor: minor(stat.st_rdev) };
    let content = match file_type(stat) {
        FileType::RegularFile => {
            // Nothing of one that everybody may read depends on who opens it.
            if let Some(identity) = &session.identity(stat, directory, domain)
                && let Some(blob) = session.known_blob(identity)?
            {
                return Ok(Node {
                    content: Content::Regular(Some(blob)),
                    attributes: attributes(stat, ownership),
                });
            }
            // Not blocking, in case the name now stands for a pipe.
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
            let file =
                File::from(openat(directory, name, flags, Mode::empty()).context("open", path)?);
            let opened = fstat(&file).context("inspect", path)?;
            if file_type(&opened) != FileType::RegularFile {
                return Err(StoreError::Changing { path: path.to_owned() });
            }
            options.readers.check(&opened).context("import", path)?;
            let began = SystemTime::now();
            let blob = session.put_file(&file, path, domain)?;
            if let (Some(identity), Some(blob)) = (session.identity(&opened, &file, domain), blob) {
                session.know(identity, blob, began);
            }
            let attributes = attributes(&opened, ownership);
            return Ok(Node { content: Content::Regular(blob), attributes });
        }
        FileType::Symlink => {
            let target = readlinkat(directory, name, Vec::new()).context("read", path)?;
            Content::Symlink(target.into_bytes())
        }
        FileType::Fifo => Content::Fifo,
        FileType::Socket => Content::Socket,
        FileType::CharacterDevice => Content::CharacterDevice(device()),
        FileType::BlockDevice => Content::BlockDevice(device()),
        FileType::Directory | FileType::Unknown => {
            return Err(StoreError::Changing { path: path.to_owned() });
        }
    };
    Ok(Node { content, attributes: attributes(stat, ownership) })
}
