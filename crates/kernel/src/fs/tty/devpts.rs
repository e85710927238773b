//! `/dev/pts`: the names of the slaves (pts(4)).

use alloc::sync::Arc;

use super::host;
use super::pty::{Access, Pty, Slave, slave_attributes};
use crate::errno::{Errno, Result};
use crate::fs::dentry::Dentry;
use crate::fs::dev::makedev;
use crate::fs::file::{File, OpenFlags};
use crate::fs::inode::{
    AttributeChanges, Attributes, FileType, FilesystemId, Inode, Statfs, Timestamp,
};
use crate::fs::mount::Mount;
use crate::fs::overlay::device_number;
use crate::fs::path::Path;
use crate::fs::pseudo::{Directory, Names, Place};
use crate::state::kernel;
use crate::task::user_namespace::UserNamespace;

/// `DEVPTS_SUPER_MAGIC` (statfs(2)).
const MAGIC: i64 = 0x1cd1;
/// The instance, fixed so that both ends of a terminal agree on its inode.
pub const FILESYSTEM: FilesystemId = FilesystemId(8);

/// A root directory, of which `ptmx` has these permissions. It shows the terminals that were made in a user
/// namespace and in those below.
pub fn root(ptmx_permissions: u32, users: UserNamespace) -> Arc<dyn Inode> {
    let place = Place { filesystem: FILESYSTEM, magic: MAGIC, ino: 1, owner: (0, 0) };
    Directory::new(place, Slaves { ptmx_permissions, users })
}

/// Attributes of a name here.
pub fn attributes(ino: u64, number: u32, access: Access) -> Attributes {
    let now = Timestamp::now();
    Attributes {
        dev: device_number(FILESYSTEM, 0),
        ino,
        mode: FileType::CharacterDevice.mode_bits() | access.permissions,
        uid: access.uid,
        gid: access.gid,
        nlink: 1,
        rdev: makedev(136, number.into()),
        atime: now,
        mtime: now,
        ctime: now,
        ..Attributes::default()
    }
}

/// The place of a slave in the tree of the running process; without a devpts in that, outside of all.
pub fn path_of(pty: &Arc<Pty>) -> Path {
    let namespace = crate::task::current_process().fs().borrow_mut().namespace.clone();
    let shows = |mount: &Arc<Mount>| mount.root.inode.filesystem() == FILESYSTEM;
    let name = alloc::format!("{}", pty.number);
    let inode = Arc::new(SlaveInode { pty: pty.clone() });
    match namespace.mounts().into_iter().find(shows) {
        Some(mount) => {
            let root = mount.root.clone();
            Path::new(mount, Dentry::detached(inode, name.as_bytes(), &root))
        }
        None => Path::anonymous(Dentry::anonymous(inode, name.as_bytes())),
    }
}

struct Slaves {
    ptmx_permissions: u32,
    users: UserNamespace,
}

impl Slaves {
    /// Whether it shows the host's terminal.
    fn shows_host(&self) -> bool {
        self.users.is_initial() && host::is_there()
    }

    /// A terminal that it shows.
    fn shown(&self, number: u32) -> Option<Arc<Pty>> {
        let pty = kernel().fs.terminals.pty(number)?;
        (!pty.is_hung_up() && pty.users.is_within(&self.users)).then_some(pty)
    }
}

impl Names for Slaves {
    fn lookup(&self, name: &[u8], _: &Place) -> Result<Option<Arc<dyn Inode>>> {
        if name == b"ptmx" {
            return Ok(Some(Arc::new(Multiplexer { permissions: self.ptmx_permissions })));
        }
        let number = core::str::from_utf8(name).ok().and_then(|name| name.parse::<u32>().ok());
        let canonical = |number: &u32| alloc::format!("{number}").as_bytes() == name;
        let number = number.filter(canonical);
        if number == Some(HOST_NUMBER) && self.shows_host() {
            return Ok(Some(Arc::new(HostInode)));
        }
        let shown = number.and_then(|number| self.shown(number));
        Ok(shown.map(|pty| Arc::new(SlaveInode { pty }) as Arc<dyn Inode>))
    }

    fn list(&self, emit: &mut dyn FnMut(&[u8], FileType)) -> Result<()> {
        emit(b"ptmx", FileType::CharacterDevice);
        if self.shows_host() {
            emit(b"0", FileType::CharacterDevice);
        }
        for number in kernel().fs.terminals.numbers() {
            if self.shown(number).is_some() {
                emit(alloc::format!("{number}").as_bytes(), FileType::CharacterDevice);
            }
        }
        Ok(())
    }

    fn permissions(&self) -> u32 {
        0o755
    }
}

fn statfs() -> Statfs {
    Statfs { kind: MAGIC, bsize: 4096, frsize: 4096, namelen: 255, ..Statfs::default() }
}

/// The name of a slave.
struct SlaveInode {
    pty: Arc<Pty>,
}

impl Inode for SlaveInode {
    fn attributes(&self) -> Attributes {
        slave_attributes(&self.pty)
    }
    fn file_type(&self) -> FileType {
        FileType::CharacterDevice
    }
    fn filesystem(&self) -> FilesystemId {
        FILESYSTEM
    }
    fn open(self: Arc<Self>, flags: OpenFlags) -> Result<Arc<dyn File>> {
        Slave::open(&self.pty, flags)
    }
    fn change(&self, changes: &AttributeChanges) -> Result<()> {
        let mut access = self.pty.access.borrow_mut();
        access.permissions = changes.permissions.unwrap_or(access.permissions) & 0o7777;
        access.uid = changes.uid.unwrap_or(access.uid);
        access.gid = changes.gid.unwrap_or(access.gid);
        Ok(())
    }
    fn statfs(&self) -> Statfs {
        statfs()
    }
}

/// Number of the host's terminal here, if there is one.
pub const HOST_NUMBER: u32 = 0;

/// Attributes of the host's terminal, by whatever name or descriptor.
pub fn host_attributes() -> Attributes {
    attributes(3, HOST_NUMBER, Access { permissions: 0o620, uid: 0, gid: 5 })
}

/// The name of the host's terminal, so that ttyname(3) finds one.
struct HostInode;

impl Inode for HostInode {
    fn attributes(&self) -> Attributes {
        host_attributes()
    }
    fn file_type(&self) -> FileType {
        FileType::CharacterDevice
    }
    fn filesystem(&self) -> FilesystemId {
        FILESYSTEM
    }
    fn open(self: Arc<Self>, _: OpenFlags) -> Result<Arc<dyn File>> {
        crate::fs::stdio::terminal().ok_or(Errno::EIO)
    }
    fn change(&self, _: &AttributeChanges) -> Result<()> {
        // It is the host's; nothing but the owner of this sandbox reaches it.
        Ok(())
    }
    fn statfs(&self) -> Statfs {
        statfs()
    }
}

/// `/dev/pts/ptmx`: the same as `/dev/ptmx`, for nobody by default.
struct Multiplexer {
    permissions: u32,
}

impl Inode for Multiplexer {
    fn attributes(&self) -> Attributes {
        let access = Access { permissions: self.permissions, uid: 0, gid: 0 };
        Attributes { rdev: makedev(5, 2), ..attributes(2, 0, access) }
    }
    fn file_type(&self) -> FileType {
        FileType::CharacterDevice
    }
    fn filesystem(&self) -> FilesystemId {
        FILESYSTEM
    }
    fn open(self: Arc<Self>, _: OpenFlags) -> Result<Arc<dyn File>> {
        // Devices are opened by number.
        Err(Errno::ENXIO)
    }
    fn statfs(&self) -> Statfs {
        statfs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::{Credentials, current_process};
    use crate::testing::Sandbox;
    use std::vec::Vec;

    #[test]
    fn terminals_show_where_they_were_made_and_above() {
        let _sandbox = Sandbox::new();
        let maker = Credentials::of_user(1000, 1000);
        let users = UserNamespace::create(&maker).unwrap();
        let outer = kernel().fs.terminals.new_pty((1000, 5)).unwrap();
        *current_process().credentials.borrow_mut() = maker.in_namespace(users.clone());
        let inner = kernel().fs.terminals.new_pty((1000, 5)).unwrap();
        let names = |users| {
            let mut names = Vec::new();
            root(0, users).list(&mut |name, _, _| names.push(name.to_vec())).unwrap();
            names
        };
        let name = |pty: &Pty| alloc::format!("{}", pty.number).into_bytes();
        let all = Vec::from([b"ptmx".to_vec(), name(&outer), name(&inner)]);
        assert_eq!(names(UserNamespace::INITIAL), all);
        assert_eq!(names(users.clone()), Vec::from([b"ptmx".to_vec(), name(&inner)]));
        let below = root(0, users);
        assert!(below.lookup(&name(&outer)).unwrap().is_none());
        assert!(below.lookup(&name(&inner)).unwrap().is_some());
    }
}
