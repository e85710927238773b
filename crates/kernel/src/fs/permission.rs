//! Who may do what with a file (path_resolution(7), credentials(7)).

use alloc::vec::Vec;

use bitflags::bitflags;

use super::inode::{Attributes, FileType, Inode, S_ISVTX};
use crate::errno::{Errno, Result};
use crate::task::credentials::{Capabilities, Credentials, SecureBits};
use crate::task::user_namespace::UserNamespace;

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
    /// Capabilities that count.
    pub capabilities: Capabilities,
    /// Where they count.
    pub users: UserNamespace,
}

impl Identity {
    /// The ids that file system calls use.
    pub fn effective(credentials: &Credentials) -> Self {
        Self {
            uid: credentials.fsuid,
            gid: credentials.fsgid,
            groups: credentials.groups.clone(),
            capabilities: credentials.effective,
            users: credentials.user_namespace.clone(),
        }
    }

    /// The ids that access(2) uses.
    pub fn real(credentials: &Credentials) -> Self {
        let counts = if credentials.secure_bits.contains(SecureBits::NO_SETUID_FIXUP) {
            credentials.effective
        } else if credentials.uid == credentials.user_namespace.root() {
            credentials.permitted
        } else {
            Capabilities::empty()
        };
        Self {
            uid: credentials.uid,
            gid: credentials.gid,
            groups: credentials.groups.clone(),
            capabilities: counts,
            users: credentials.user_namespace.clone(),
        }
    }

    /// Whether a capability counts for what is the sandbox's as a whole.
    pub fn can(&self, capability: Capabilities) -> bool {
        self.users.is_initial() && self.capabilities.contains(capability)
    }

    /// Whether it counts in one's own user namespace.
    pub fn can_in_own(&self, capability: Capabilities) -> bool {
        self.capabilities.contains(capability)
    }

    /// Whether it counts for a file: the namespace knows its owner and its group
    /// (`capable_wrt_inode_uidgid`, kernel/capability.c).
    pub fn can_with(&self, attributes: &Attributes, capability: Capabilities) -> bool {
        self.capabilities.contains(capability)
            && self.users.knows_user(attributes.uid)
            && self.users.knows_group(attributes.gid)
    }

    /// Whether a group is among one's own.
    pub fn in_group(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }

    /// Whether this is the owner, or may act as one.
    pub fn owns(&self, attributes: &Attributes) -> bool {
        self.uid == attributes.uid
            || self.can_in_own(Capabilities::FOWNER) && self.users.knows_user(attributes.uid)
    }

    /// `EACCES` unless all of `access` is allowed.
    pub fn check(&self, inode: &dyn Inode, access: Access) -> Result<()> {
        // The attributes may take a look at the host.
        if self.can(Capabilities::DAC_OVERRIDE)
            && (!access.contains(Access::EXECUTE) || inode.file_type() == FileType::Directory)
        {
            return Ok(());
        }
        self.check_attributes(&inode.attributes(), access)
    }

    /// As [`Identity::check`].
    pub fn check_attributes(&self, attributes: &Attributes, access: Access) -> Result<()> {
        let shift = if self.uid == attributes.uid {
            6
        } else if self.in_group(attributes.gid) {
            3
        } else {
            0
        };
        let is_allowed = (attributes.mode >> shift) & access.bits() == access.bits();
        if is_allowed || self.passes_over(attributes, access) { Ok(()) } else { Err(Errno::EACCES) }
    }

    /// Whether capabilities allow what permissions do not (`generic_permission`,
    /// fs/namei.c).
    fn passes_over(&self, attributes: &Attributes, access: Access) -> bool {
        let is_directory = attributes.file_type() == FileType::Directory;
        let reads = access == Access::READ || is_directory && !access.contains(Access::WRITE);
        let can_run = is_directory || attributes.mode & 0o111 != 0;
        reads && self.can_with(attributes, Capabilities::DAC_READ_SEARCH)
            || (can_run || !access.contains(Access::EXECUTE))
                && self.can_with(attributes, Capabilities::DAC_OVERRIDE)
    }

    /// `EPERM` if a sticky directory protects a file from removal.
    pub fn check_sticky(&self, directory: &dyn Inode, file: &dyn Inode) -> Result<()> {
        if self.can(Capabilities::FOWNER) {
            return Ok(());
        }
        let holder = directory.attributes();
        if holder.mode & S_ISVTX == 0 || holder.uid == self.uid {
            return Ok(());
        }
        let attributes = file.attributes();
        let may = attributes.uid == self.uid || self.can_with(&attributes, Capabilities::FOWNER);
        if may { Ok(()) } else { Err(Errno::EPERM) }
    }
}
