//! Inodes: files as the file systems know them, without names.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::any::Any;

use super::file::{File, OpenFlags, Stat};
use super::path::Path;
use crate::errno::{Errno, Result};
use crate::platform::saved::Saved;
use crate::task::ids::Pid;

/// Mask of the file type in a mode (inode(7)).
pub const S_IFMT: u32 = 0o170000;
/// Set-user-id bit.
pub const S_ISUID: u32 = 0o4000;
/// Set-group-id bit.
pub const S_ISGID: u32 = 0o2000;
/// Sticky bit.
pub const S_ISVTX: u32 = 0o1000;
/// Bytes in the unit of `st_blocks`.
pub const BLOCK_UNIT: u64 = 512;

/// Type of a file, with the values of `d_type` (readdir(3)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
#[repr(u8)]
pub enum FileType {
    Fifo = 1,
    CharacterDevice = 2,
    Directory = 4,
    BlockDevice = 6,
    Regular = 8,
    Symlink = 10,
    Socket = 12,
}

impl FileType {
    /// The type in a mode; `None` for a number that is no type.
    pub fn from_mode(mode: u32) -> Option<Self> {
        Some(match (mode & S_IFMT) >> 12 {
            1 => Self::Fifo,
            2 => Self::CharacterDevice,
            4 => Self::Directory,
            6 => Self::BlockDevice,
            8 => Self::Regular,
            10 => Self::Symlink,
            12 => Self::Socket,
            _ => return None,
        })
    }

    /// The type as bits of a mode.
    pub fn mode_bits(self) -> u32 {
        (self as u32) << 12
    }
}

/// A point in time as files record it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp {
    /// Seconds since the epoch.
    pub sec: i64,
    /// Nanoseconds.
    pub nsec: u32,
}

impl Timestamp {
    /// Now, by the guest's real-time clock.
    pub fn now() -> Self {
        let ns = crate::time::clock::realtime_ns();
        Self { sec: (ns / 1_000_000_000) as i64, nsec: (ns % 1_000_000_000) as u32 }
    }
}

/// Attributes of a file (inode(7)).
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct Attributes {
    pub dev: u64,
    pub ino: u64,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub nlink: u32,
    pub rdev: u64,
    pub size: u64,
    /// Units of [`BLOCK_UNIT`].
    pub blocks: u64,
    pub atime: Timestamp,
    pub mtime: Timestamp,
    pub ctime: Timestamp,
    pub btime: Timestamp,
}

impl Attributes {
    /// As `struct stat`.
    pub fn to_stat(&self) -> Stat {
        Stat {
            dev: self.dev,
            ino: self.ino,
            nlink: self.nlink.into(),
            mode: self.mode,
            uid: self.uid,
            gid: self.gid,
            rdev: self.rdev,
            size: self.size as i64,
            blksize: 4096,
            blocks: self.blocks as i64,
            atime_sec: self.atime.sec,
            atime_nsec: self.atime.nsec.into(),
            mtime_sec: self.mtime.sec,
            mtime_nsec: self.mtime.nsec.into(),
            ctime_sec: self.ctime.sec,
            ctime_nsec: self.ctime.nsec.into(),
            ..Stat::default()
        }
    }

    /// From `struct stat`.
    pub fn from_stat(stat: &Stat) -> Self {
        let time = |sec: i64, nsec: i64| Timestamp { sec, nsec: nsec as u32 };
        let ctime = time(stat.ctime_sec, stat.ctime_nsec);
        Self {
            dev: stat.dev,
            ino: stat.ino,
            mode: stat.mode,
            uid: stat.uid,
            gid: stat.gid,
            nlink: stat.nlink as u32,
            rdev: stat.rdev,
            size: stat.size as u64,
            blocks: stat.blocks as u64,
            atime: time(stat.atime_sec, stat.atime_nsec),
            mtime: time(stat.mtime_sec, stat.mtime_nsec),
            ctime,
            btime: ctime,
        }
    }

    /// Type of the file. A mode without a valid type counts as regular.
    pub fn file_type(&self) -> FileType {
        FileType::from_mode(self.mode).unwrap_or(FileType::Regular)
    }
}

/// What to change of the attributes; `None` leaves a value alone.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttributeChanges {
    /// Permission bits, without the file type.
    pub permissions: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Last access.
    pub atime: Option<Timestamp>,
    /// Last modification.
    pub mtime: Option<Timestamp>,
    /// Whether the file loses its capabilities, as by chown(2).
    pub drops_capabilities: bool,
}

/// A new file.
#[derive(Clone, Debug)]
pub struct NewInode {
    /// What it is.
    pub kind: NewKind,
    /// Permission bits.
    pub permissions: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// What a new file is.
#[derive(Clone, Debug)]
pub enum NewKind {
    /// A regular file.
    Regular,
    /// A directory.
    Directory,
    /// A symbolic link with its target.
    Symlink(Vec<u8>),
    /// A FIFO.
    Fifo,
    /// The name of a Unix socket.
    Socket,
    /// A character device with its number as in `st_rdev`.
    CharacterDevice(u64),
}

/// What a symbolic link leads to.
pub enum Link {
    /// A path, to be walked from the link's directory.
    Text(Vec<u8>),
    /// A file itself, whatever its name is by now (`/proc/self/fd/3`).
    Magic(Path),
}

/// Names an instance of a file system: files can be linked and renamed within one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FilesystemId(pub u32);

/// `struct statfs` of the x86-64 ABI (statfs(2)).
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Statfs {
    pub kind: i64,
    pub bsize: i64,
    pub blocks: u64,
    pub bfree: u64,
    pub bavail: u64,
    pub files: u64,
    pub ffree: u64,
    pub fsid: [i32; 2],
    pub namelen: i64,
    pub frsize: i64,
    pub flags: i64,
    pub spare: [i64; 4],
}

/// How a rename treats an existing target (rename(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenameMode {
    /// It is replaced.
    Replace,
    /// The two names are exchanged.
    Exchange,
}

/// A file, directory, link or special file.
///
/// The virtual file system has checked permissions, existence and types before
/// it calls a method that changes something.
pub trait Inode: Any + Saved + Send + Sync {
    /// Attributes.
    fn attributes(&self) -> Attributes;

    /// Type of the file, which never changes.
    fn file_type(&self) -> FileType;

    /// The instance that the file belongs to.
    fn filesystem(&self) -> FilesystemId;

    /// Whether answers of [`Inode::lookup`] stay true until the virtual file
    /// system itself changes the directory. `/proc` says no.
    fn caches_lookups(&self) -> bool {
        true
    }

    /// The process whose directory in `/proc` this is (pidfd_send_signal(2)).
    fn process(&self) -> Option<Pid> {
        None
    }

    /// Hears which path is about to be looked up from a directory on, name by name.
    fn expect_walk(&self, _path: &[u8]) {}

    /// Finds a name in a directory.
    fn lookup(&self, _name: &[u8]) -> Result<Option<Arc<dyn Inode>>> {
        Err(Errno::ENOTDIR)
    }

    /// Opens the file. Permissions have been checked.
    fn open(self: Arc<Self>, flags: OpenFlags) -> Result<Arc<dyn File>>;

    /// Target of a symbolic link.
    fn read_link(&self) -> Result<Link> {
        Err(Errno::EINVAL)
    }

    /// Names in a directory, without `.` and `..`, in a fixed order.
    fn list(&self, _emit: &mut dyn FnMut(&[u8], u64, FileType)) -> Result<()> {
        Err(Errno::ENOTDIR)
    }

    /// Creates a file in a directory.
    fn create(&self, _name: &[u8], _new: &NewInode) -> Result<Arc<dyn Inode>> {
        Err(Errno::EPERM)
    }

    /// Creates a regular file without a name in the file system of a directory (`O_TMPFILE`).
    fn create_unnamed(&self, _new: &NewInode) -> Result<Arc<dyn Inode>> {
        Err(Errno::EOPNOTSUPP)
    }

    /// Gives a file another name, in this directory.
    fn link(&self, _name: &[u8], _target: &Arc<dyn Inode>) -> Result<()> {
        Err(Errno::EPERM)
    }

    /// Removes a name from a directory. A directory of that name is empty.
    fn remove(&self, _name: &[u8]) -> Result<()> {
        Err(Errno::EPERM)
    }

    /// Moves `name` of this directory to `new_name` in `new_directory`.
    fn rename(
        &self,
        _name: &[u8],
        _new_directory: &Arc<dyn Inode>,
        _new_name: &[u8],
        _mode: RenameMode,
    ) -> Result<()> {
        Err(Errno::EPERM)
    }

    /// Changes attributes.
    fn change(&self, _changes: &AttributeChanges) -> Result<()> {
        Err(Errno::EPERM)
    }

    /// Changes the size of a regular file.
    fn truncate(&self, _size: u64) -> Result<()> {
        Err(Errno::EINVAL)
    }

    /// Where extended attributes are kept; `None` for files that cannot have any.
    fn extended_attributes(&self) -> Option<&super::xattr::ExtendedAttributes> {
        None
    }

    /// Notes that extended attributes have changed.
    fn note_extended_change(&self) {}

    /// Whether an open file description refers to the file.
    fn is_open(&self) -> bool {
        false
    }

    /// Attributes of the file system.
    fn statfs(&self) -> Statfs;
}
