//! What a process has of files: descriptors, directories, its program.

use alloc::sync::Arc;

use super::FsContext;
use super::fd_table::FdTable;
use super::mount::MountNamespace;
use super::path::Path;
use crate::errno::Result;
use crate::sync::KernelCell;
use crate::task::process::{Resources, Sharing};

/// Descriptors, directories and program of a process.
pub struct ProcessFiles {
    /// Open descriptors; processes may have the same table (clone(2), `CLONE_FILES`).
    pub files: KernelCell<Arc<KernelCell<FdTable>>>,
    /// Working directory, root directory, umask; see [`ProcessFiles::fs`].
    fs: KernelCell<Arc<KernelCell<FsContext>>>,
    /// The program being run, for `/proc/self/exe`.
    pub executable: KernelCell<Option<Path>>,
}

impl ProcessFiles {
    /// No descriptors and no program, in the root directory of a tree of mounts.
    pub fn new(namespace: Arc<MountNamespace>) -> Self {
        let (files, fs) = (FdTable::new(), FsContext::new(namespace));
        Self::with(Arc::new(KernelCell::new(files)), Arc::new(KernelCell::new(fs)), None)
    }

    fn with(
        files: Arc<KernelCell<FdTable>>,
        fs: Arc<KernelCell<FsContext>>,
        executable: Option<Path>,
    ) -> Self {
        files.borrow_mut().attach();
        let (files, fs) = (KernelCell::new(files), KernelCell::new(fs));
        Self { files, fs, executable: KernelCell::new(executable) }
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

    /// Gives the process a copy of its tree of mounts, and directories of its own in it (unshare(2),
    /// `CLONE_NEWNS`); `ENOSPC`.
    pub fn unshare_mounts(&self) -> Result<()> {
        let mut own = self.fs().borrow_mut().clone();
        own.copy_mounts()?;
        let old = core::mem::replace(&mut *self.fs.borrow_mut(), Arc::new(KernelCell::new(own)));
        drop(old);
        Ok(())
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
        Self::with(files, fs, self.executable.borrow_mut().clone())
    }

    /// Processes that have ended and are not gone do not count among those that have the
    /// same table (clone(2), `CLONE_FILES`).
    fn release(&self) {
        let table = self.files.borrow_mut().borrow_mut().detach();
        drop(table);
        // One that nobody has waited for keeps no mount busy (`exit_fs`, fs/fs_struct.c).
        let nowhere = FsContext::nowhere(crate::state::kernel().fs.namespace.clone());
        let old =
            core::mem::replace(&mut *self.fs.borrow_mut(), Arc::new(KernelCell::new(nowhere)));
        drop(old);
        let program = self.executable.borrow_mut().take();
        drop(program);
    }
}
