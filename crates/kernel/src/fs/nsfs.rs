//! Namespaces as files: `/proc/PID/ns` (namespaces(7), ioctl_ns(2)).

use alloc::string::String;
use alloc::sync::Arc;

use super::dentry::Dentry;
use super::fd_table::install;
use super::file::{File, OpenFile, OpenFlags, Stat};
use super::inode::{Attributes, FileType, FilesystemId, Inode, Statfs};
use super::path::Path;
use super::pseudo::Place;
use crate::args::UserPtr;
use crate::errno::{Errno, Result};
use crate::platform::user::UserAddress;
use crate::state::Namespace;
use crate::task::current_process;

/// Device number of the file system of namespaces.
const NSFS: FilesystemId = FilesystemId(11);
/// `NSFS_MAGIC` (statfs(2)).
const MAGIC: i64 = 0x6e73_6673;

/// What a link in `/proc/PID/ns` leads to. It lies outside of every tree, so that it cannot be
/// bound, and no namespace holds itself.
pub fn path(namespace: Namespace) -> Path {
    let inode = Arc::new(NamespaceInode(namespace));
    let shown = inode.shown();
    Path::anonymous(Dentry::anonymous(inode, shown.as_bytes()))
}

/// A namespace as an inode.
struct NamespaceInode(Namespace);

impl NamespaceInode {
    fn place(&self) -> Place {
        Place { filesystem: NSFS, magic: MAGIC, ino: self.0.ino(), owner: (0, 0) }
    }

    fn shown(&self) -> String {
        alloc::format!("{}:[{}]", self.0.kind().name(), self.0.ino())
    }
}

impl Inode for NamespaceInode {
    fn attributes(&self) -> Attributes {
        self.place().attributes(FileType::Regular, 0o444)
    }
    fn file_type(&self) -> FileType {
        FileType::Regular
    }
    fn filesystem(&self) -> FilesystemId {
        NSFS
    }
    fn open(self: Arc<Self>, _: OpenFlags) -> Result<Arc<dyn File>> {
        Ok(Arc::new(NamespaceFile(self)))
    }
    fn statfs(&self) -> Statfs {
        self.place().statfs()
    }
}

/// An open namespace, which lives as long as this does.
pub struct NamespaceFile(Arc<NamespaceInode>);

impl NamespaceFile {
    /// The namespace.
    pub fn namespace(&self) -> &Namespace {
        &self.0.0
    }
}

impl File for NamespaceFile {
    fn stat(&self) -> Result<Stat> {
        Ok(self.0.attributes().to_stat())
    }

    fn ioctl(&self, request: u32, argument: UserAddress) -> Result<u64> {
        const NS_GET_USERNS: u32 = 0xb701;
        const NS_GET_PARENT: u32 = 0xb702;
        const NS_GET_NSTYPE: u32 = 0xb703;
        const NS_GET_OWNER_UID: u32 = 0xb704;
        let namespace = self.namespace();
        match request {
            NS_GET_USERNS => open_visible(Namespace::User(namespace.owner().ok_or(Errno::EPERM)?)),
            NS_GET_PARENT => open_visible(namespace.parent()?),
            NS_GET_NSTYPE => Ok(namespace.kind().flag()),
            NS_GET_OWNER_UID => {
                let Namespace::User(users) = namespace else { return Err(Errno::EINVAL) };
                let viewer = current_process().credentials.borrow_mut().user_namespace.clone();
                UserPtr::<u32>::new(argument).write(&viewer.shown_user(users.owner())).map(|()| 0)
            }
            _ => Err(Errno::ENOTTY),
        }
    }

    fn description(&self) -> String {
        self.0.shown()
    }
}

/// Opens a namespace for the caller. `EPERM` unless its users are the caller's, or below
/// (`ns_get_owner`, kernel/user_namespace.c).
fn open_visible(namespace: Namespace) -> Result<u64> {
    let viewer = current_process().credentials.borrow_mut().user_namespace.clone();
    let users = match &namespace {
        Namespace::User(users) => users.clone(),
        other => other.owner().unwrap_or_default(),
    };
    if !users.is_within(&viewer) {
        return Err(Errno::EPERM);
    }
    let path = path(namespace);
    let file = path.inode().clone().open(OpenFlags::empty())?;
    let open = OpenFile::new(file, OpenFlags::CLOEXEC, Some(path));
    install(open, OpenFlags::CLOEXEC).map(|fd| fd as u64)
}
