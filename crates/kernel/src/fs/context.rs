//! From where, and as whom, a process looks at the tree.

use alloc::borrow::Cow;
use alloc::sync::Arc;
use core::ops::{Deref, DerefMut};

use super::mount::MountNamespace;
use super::path::Path;
use super::permission::Identity;
use crate::args::Fd;
use crate::errno::{Errno, Result};
use crate::task::Process;
use crate::task::thread::running;
use crate::task::user_namespace::UserNamespace;

/// Where a process is in which tree.
#[derive(Clone)]
pub struct Places {
    /// The tree of mounts (mount_namespaces(7)).
    pub namespace: Arc<MountNamespace>,
    /// Working directory.
    pub cwd: Path,
    /// Root directory (chroot(2)).
    pub root: Path,
}

/// Places and umask of a process.
#[derive(Clone)]
pub struct FsContext {
    /// System calls that are under way hold them, too, so that a call makes no copy.
    places: Arc<Places>,
    /// Permission bits that new files do not get.
    pub umask: u32,
}

impl FsContext {
    /// A context at the root of a tree.
    pub fn new(namespace: Arc<MountNamespace>) -> Self {
        let root = namespace.root();
        let places = Arc::new(Places { namespace, cwd: root.clone(), root });
        Self { places, umask: 0o022 }
    }

    /// The context of a process that has ended: below all of the tree, where it keeps no mount busy.
    pub fn nowhere(namespace: Arc<MountNamespace>) -> Self {
        let top = namespace.top();
        let places = Arc::new(Places { namespace, cwd: top.clone(), root: top });
        Self { places, umask: 0o022 }
    }

    /// Goes over to a copy of the tree that has an owner (unshare(2), `CLONE_NEWNS`); `ENOSPC`.
    pub fn copy_mounts(&mut self, owner: &UserNamespace) -> Result<()> {
        let (namespace, [root, cwd]) = self.namespace.copy(owner, [&self.root, &self.cwd])?;
        self.places = Arc::new(Places { namespace, cwd, root });
        Ok(())
    }
}

impl Deref for FsContext {
    type Target = Places;

    fn deref(&self) -> &Places {
        &self.places
    }
}

impl DerefMut for FsContext {
    fn deref_mut(&mut self) -> &mut Places {
        Arc::make_mut(&mut self.places)
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
    places: Arc<Places>,
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
        process.with_fs(|fs| Self { places: fs.places.clone(), umask: fs.umask, identity })
    }

    /// Where a relative path of an `*at` call starts.
    pub fn start(&self, dirfd: Fd) -> Result<Cow<'_, Path>> {
        if dirfd == AT_FDCWD {
            return Ok(Cow::Borrowed(&self.cwd));
        }
        dirfd.file()?.path.clone().map(Cow::Owned).ok_or(Errno::ENOTDIR)
    }
}

impl Deref for Context {
    type Target = Places;

    fn deref(&self) -> &Places {
        &self.places
    }
}

impl DerefMut for Context {
    fn deref_mut(&mut self) -> &mut Places {
        Arc::make_mut(&mut self.places)
    }
}
