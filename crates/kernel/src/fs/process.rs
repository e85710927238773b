//! What a process has of files: descriptors, directories, its program.

use alloc::sync::Arc;

use super::FsContext;
use super::fd_table::FdTable;
use super::path::Path;
use crate::sync::KernelCell;
use crate::task::process::{Resources, Sharing};

/// Descriptors, directories and program of a process.
pub struct ProcessFiles {
    /// Open descriptors.
    pub files: Arc<KernelCell<FdTable>>,
    /// Working directory, root directory, umask.
    pub fs: Arc<KernelCell<FsContext>>,
    /// The program being run, for `/proc/self/exe`.
    pub executable: KernelCell<Option<Path>>,
}

impl ProcessFiles {
    /// No descriptors and no program, in the directory `root`, which is the root, too.
    pub fn new(root: Path) -> Self {
        let (files, fs) = (FdTable::new(), FsContext::new(root));
        Self::with(Arc::new(KernelCell::new(files)), Arc::new(KernelCell::new(fs)), None)
    }

    fn with(
        files: Arc<KernelCell<FdTable>>,
        fs: Arc<KernelCell<FsContext>>,
        executable: Option<Path>,
    ) -> Self {
        files.borrow_mut().attach();
        Self { files, fs, executable: KernelCell::new(executable) }
    }
}

impl Resources for ProcessFiles {
    fn for_child(&self, sharing: Sharing) -> Self {
        let files = match sharing.descriptors {
            true => self.files.clone(),
            false => Arc::new(KernelCell::new(self.files.borrow_mut().copy())),
        };
        let fs = match sharing.directories {
            true => self.fs.clone(),
            false => Arc::new(KernelCell::new(self.fs.borrow_mut().clone())),
        };
        Self::with(files, fs, self.executable.borrow_mut().clone())
    }

    /// Processes that have ended and are not gone do not count among those that have the
    /// same table (clone(2), `CLONE_FILES`).
    fn release(&self) {
        let table = self.files.borrow_mut().detach();
        drop(table);
    }
}
