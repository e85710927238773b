//! Namespaces as files: `/proc/PID/ns/mnt` (namespaces(7), ioctl_ns(2)).

use alloc::string::String;
use alloc::sync::Arc;

use super::MountNamespace;
use crate::errno::{Errno, Result};
use crate::fs::file::{File, OpenFlags, Stat};
use crate::fs::inode::{Attributes, FileType, FilesystemId, Inode, Statfs};
use crate::fs::pseudo::Place;
use crate::platform::user::UserAddress;

/// What `/proc/PID/ns/mnt` leads to. It lies outside of every tree, so that it cannot be bound, and
/// no namespace holds itself.
pub struct NamespaceInode {
    /// Where the file lies.
    pub place: Place,
    /// The namespace.
    pub namespace: Arc<MountNamespace>,
}

impl Inode for NamespaceInode {
    fn attributes(&self) -> Attributes {
        self.place.attributes(FileType::Regular, 0o444)
    }
    fn file_type(&self) -> FileType {
        FileType::Regular
    }
    fn filesystem(&self) -> FilesystemId {
        self.place.filesystem
    }
    fn open(self: Arc<Self>, _: OpenFlags) -> Result<Arc<dyn File>> {
        Ok(Arc::new(NamespaceFile(self)))
    }
    fn statfs(&self) -> Statfs {
        self.place.statfs()
    }
}

/// An open namespace, which lives as long as this does.
pub struct NamespaceFile(Arc<NamespaceInode>);

impl NamespaceFile {
    /// The namespace.
    pub fn namespace(&self) -> &Arc<MountNamespace> {
        &self.0.namespace
    }
}

impl File for NamespaceFile {
    fn stat(&self) -> Result<Stat> {
        Ok(self.0.attributes().to_stat())
    }

    fn ioctl(&self, request: u32, _: UserAddress) -> Result<u64> {
        const NS_GET_NSTYPE: u32 = 0xb703;
        const CLONE_NEWNS: u64 = 0x2_0000;
        if request == NS_GET_NSTYPE { Ok(CLONE_NEWNS) } else { Err(Errno::ENOTTY) }
    }

    fn description(&self) -> String {
        String::from("mnt")
    }
}
