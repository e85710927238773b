//! From where, and as whom, a process looks at the tree.

use alloc::sync::Arc;

use super::mount::MountNamespace;
use super::path::Path;
use super::permission::Identity;
use crate::args::Fd;
use crate::errno::{Errno, Result};
use crate::task::Process;
use crate::task::thread::running;

/// Working directory, root directory, umask and tree of mounts of a process.
#[derive(Clone)]
pub struct FsContext {
    /// The tree of mounts (mount_namespaces(7)).
    pub namespace: Arc<MountNamespace>,
    /// Working directory.
    pub cwd: Path,
    /// Root directory (chroot(2)).
    pub root: Path,
    /// Permission bits that new files do not get.
    pub umask: u32,
}

impl FsContext {
    /// A context at the root of a tree.
    pub fn new(namespace: Arc<MountNamespace>) -> Self {
        let root = namespace.root();
        Self { namespace, cwd: root.clone(), root, umask: 0o022 }
    }

    /// Goes over to a copy of the tree (unshare(2), `CLONE_NEWNS`); `ENOSPC`.
    pub fn copy_mounts(&mut self) -> Result<()> {
        let (namespace, [root, cwd]) = self.namespace.copy([&self.root, &self.cwd])?;
        let _: Self = core::mem::replace(self, Self { namespace, cwd, root, umask: self.umask });
        Ok(())
    }
}

/// The root directory of the running process, or that of the first tree if none runs.
pub fn own_root() -> Path {
    match running() {
        Some(thread) => thread.process.fs().borrow_mut().root.clone(),
        None => crate::state::kernel().fs.root(),
    }
}

/// All that file system operations need to know about their caller.
#[derive(Clone)]
pub struct Context {
    /// Root directory.
    pub root: Path,
    /// Working directory.
    pub cwd: Path,
    /// See [`FsContext::umask`].
    pub umask: u32,
    /// Ids.
    pub identity: Identity,
}

/// `AT_FDCWD`: relative paths start at the working directory.
pub const AT_FDCWD: Fd = Fd(-100);

impl Context {
    /// Of the running process.
    pub fn current() -> Self {
        crate::state::kernel().fs.prune_if_due();
        Self::of(&crate::task::current_process())
    }

    /// Of a process.
    pub fn of(process: &Process) -> Self {
        let identity = Identity::effective(&process.credentials.borrow_mut());
        let fs = process.fs();
        let fs = fs.borrow_mut();
        Self { root: fs.root.clone(), cwd: fs.cwd.clone(), umask: fs.umask, identity }
    }

    /// Where a relative path of an `*at` call starts.
    pub fn start(&self, dirfd: Fd) -> Result<Path> {
        if dirfd == AT_FDCWD {
            return Ok(self.cwd.clone());
        }
        dirfd.file()?.path.clone().ok_or(Errno::ENOTDIR)
    }
}
