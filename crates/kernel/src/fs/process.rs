//! What a process has of files: descriptors, directories, its program; and its namespaces.

use alloc::sync::Arc;

use super::FsContext;
use super::fd_table::FdTable;
use super::mount::MountNamespace;
use super::path::Path;
use crate::errno::Result;
use crate::state::{Namespaces, kernel};
use crate::sync::KernelCell;
use crate::task::process::{Resources, Sharing};
use crate::task::user_namespace::UserNamespace;

/// Descriptors, directories and program of a process.
pub struct ProcessFiles {
    /// Open descriptors; processes may have the same table (clone(2), `CLONE_FILES`).
    pub files: KernelCell<Arc<KernelCell<FdTable>>>,
    /// Working directory, root directory, umask; see [`ProcessFiles::fs`].
    fs: KernelCell<Arc<KernelCell<FsContext>>>,
    /// The program being run, for `/proc/self/exe`.
    pub executable: KernelCell<Option<Path>>,
    /// Its namespaces; see [`ProcessFiles::namespaces`].
    namespaces: KernelCell<Arc<Namespaces>>,
}

impl ProcessFiles {
    /// No descriptors and no program, in the root directory of a tree of mounts.
    pub fn new(namespace: Arc<MountNamespace>) -> Self {
        let (files, fs) = (FdTable::new(), FsContext::new(namespace));
        let namespaces = kernel().namespaces.clone();
        Self::with(
            Arc::new(KernelCell::new(files)),
            Arc::new(KernelCell::new(fs)),
            None,
            namespaces,
        )
    }

    fn with(
        files: Arc<KernelCell<FdTable>>,
        fs: Arc<KernelCell<FsContext>>,
        executable: Option<Path>,
        namespaces: Arc<Namespaces>,
    ) -> Self {
        files.borrow_mut().attach();
        let (files, fs) = (KernelCell::new(files), KernelCell::new(fs));
        let (executable, namespaces) = (KernelCell::new(executable), KernelCell::new(namespaces));
        Self { files, fs, executable, namespaces }
    }

    /// Working directory, root directory, umask; processes may have the same (clone(2), `CLONE_FS`).
    pub fn fs(&self) -> Arc<KernelCell<FsContext>> {
        self.fs.borrow_mut().clone()
    }

    /// Looks at [`ProcessFiles::fs`] for a moment.
    pub fn with_fs<T>(&self, look: impl FnOnce(&FsContext) -> T) -> T {
        look(&self.fs.borrow_mut().borrow_mut())
    }

    /// Gives the process directories and a umask of its own, as they are (unshare(2), `CLONE_FS`).
    pub fn unshare_fs(&self) {
        let own = self.fs().borrow_mut().clone();
        *self.fs.borrow_mut() = Arc::new(KernelCell::new(own));
    }

    /// The directories of the process in a copy of its tree of mounts that has an owner (unshare(2),
    /// `CLONE_NEWNS`); `ENOSPC`.
    pub fn copied_mounts(&self, owner: &UserNamespace) -> Result<FsContext> {
        let mut own = self.fs().borrow_mut().clone();
        own.copy_mounts(owner)?;
        Ok(own)
    }

    /// Gives the process directories of its own.
    pub fn set_fs(&self, own: FsContext) {
        let old = core::mem::replace(&mut *self.fs.borrow_mut(), Arc::new(KernelCell::new(own)));
        drop(old);
    }

    /// The namespaces of the process but for those of mounts and users, at the moment.
    pub fn namespaces(&self) -> Arc<Namespaces> {
        self.namespaces.borrow_mut().clone()
    }

    /// Gives the process other namespaces.
    pub fn set_namespaces(&self, new: Arc<Namespaces>) {
        let old = core::mem::replace(&mut *self.namespaces.borrow_mut(), new);
        drop(old);
    }

    /// Gives the process another tree of mounts, and its root directory (setns(2)).
    pub fn set_mounts(&self, namespace: &Arc<MountNamespace>) {
        let fs = self.fs();
        let mut fs = fs.borrow_mut();
        let mut entered = FsContext::new(namespace.clone());
        entered.umask = fs.umask;
        let old = core::mem::replace(&mut *fs, entered);
        drop(fs);
        drop(old);
    }

    /// Whether other processes have the same directories (clone(2), `CLONE_FS`).
    pub fn shares_fs(&self) -> bool {
        Arc::strong_count(&self.fs.borrow_mut()) > 1
    }

    /// Gives the process the tree of mounts of another one, and its working directory (setns(2)).
    pub fn enter_mounts(&self, other: &ProcessFiles) {
        let (namespace, cwd) = other.with_fs(|fs| (fs.namespace.clone(), fs.cwd.clone()));
        let mut entered = FsContext::new(namespace);
        entered.cwd = cwd;
        let old = core::mem::replace(&mut *self.fs().borrow_mut(), entered);
        drop(old);
    }

    /// Gives the process a table of its own, with the same files, if it shares one with other
    /// processes.
    pub fn unshare_files(&self) {
        let shared = self.files.borrow_mut().clone();
        if shared.borrow_mut().users() > 1 {
            let mut own = shared.borrow_mut().copy();
            own.attach();
            *self.files.borrow_mut() = Arc::new(KernelCell::new(own));
            // Others have it still, so nothing is to be closed.
            shared.borrow_mut().detach();
        }
    }
}

impl Resources for ProcessFiles {
    fn for_child(&self, sharing: Sharing) -> Self {
        let files = match sharing.descriptors {
            true => self.files.borrow_mut().clone(),
            false => Arc::new(KernelCell::new(self.files.borrow_mut().borrow_mut().copy())),
        };
        let fs = match sharing.directories {
            true => self.fs(),
            false => Arc::new(KernelCell::new(self.fs().borrow_mut().clone())),
        };
        Self::with(files, fs, self.executable.borrow_mut().clone(), self.namespaces())
    }

    /// Processes that have ended and are not gone do not count among those that have the
    /// same table (clone(2), `CLONE_FILES`).
    fn release(&self) {
        let table = self.files.borrow_mut().borrow_mut().detach();
        drop(table);
        // One that nobody has waited for keeps no mount busy (`exit_fs`, fs/fs_struct.c).
        let nowhere = FsContext::nowhere(kernel().fs.namespace.clone());
        self.set_fs(nowhere);
        self.set_namespaces(kernel().namespaces.clone());
        let program = self.executable.borrow_mut().take();
        drop(program);
    }
}
