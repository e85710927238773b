//! Who may do what with a file (path_resolution(7), credentials(7)).

use alloc::vec::Vec;

use bitflags::bitflags;

use super::inode::{Attributes, FileType, Inode, S_ISVTX};
use crate::errno::{Errno, Result};
use crate::task::process::Credentials;

bitflags! {
    /// Ways to use a file, with the values of access(2).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Access: u32 {
        /// Execute, or search a directory.
        const EXECUTE = 1;
        /// Write.
        const WRITE = 2;
        /// Read.
        const READ = 4;
    }
}

/// Ids that decide about access to files.
#[derive(Clone, Debug, Default)]
pub struct Identity {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

impl Identity {
    /// The ids that file system calls use.
    pub fn effective(credentials: &Credentials) -> Self {
        Self { uid: credentials.fsuid, gid: credentials.fsgid, groups: credentials.groups.clone() }
    }

    /// The ids that access(2) uses.
    pub fn real(credentials: &Credentials) -> Self {
        Self { uid: credentials.uid, gid: credentials.gid, groups: credentials.groups.clone() }
    }

    /// Whether this is the superuser, whom permissions do not stop.
    pub fn is_root(&self) -> bool {
        self.uid == 0
    }

    /// Whether a group is among one's own.
    pub fn in_group(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }

    /// Whether this is the owner, or root.
    pub fn owns(&self, attributes: &Attributes) -> bool {
        self.is_root() || self.uid == attributes.uid
    }

    /// `EACCES` unless all of `access` is allowed.
    pub fn check(&self, inode: &dyn Inode, access: Access) -> Result<()> {
        if self.is_root()
            && (!access.contains(Access::EXECUTE) || inode.file_type() == FileType::Directory)
        {
            return Ok(());
        }
        self.check_attributes(&inode.attributes(), access)
    }

    /// As [`Identity::check`].
    pub fn check_attributes(&self, attributes: &Attributes, access: Access) -> Result<()> {
        if self.is_root() {
            let executable =
                attributes.file_type() == FileType::Directory || attributes.mode & 0o111 != 0;
            return if access.contains(Access::EXECUTE) && !executable {
                Err(Errno::EACCES)
            } else {
                Ok(())
            };
        }
        let shift = if self.uid == attributes.uid {
            6
        } else if self.in_group(attributes.gid) {
            3
        } else {
            0
        };
        if (attributes.mode >> shift) & access.bits() == access.bits() {
            Ok(())
        } else {
            Err(Errno::EACCES)
        }
    }

    /// `EPERM` if a sticky directory protects a file from removal.
    pub fn check_sticky(&self, directory: &dyn Inode, file: &dyn Inode) -> Result<()> {
        if self.is_root() {
            return Ok(());
        }
        let holder = directory.attributes();
        if holder.mode & S_ISVTX == 0 || holder.uid == self.uid || file.attributes().uid == self.uid
        {
            return Ok(());
        }
        Err(Errno::EPERM)
    }
}
