//! Files that travel in messages of Unix sockets.

use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::{Deref, DerefMut};

use crate::fs::file::OpenFile;
use crate::state::kernel;
use crate::sync::KernelCell;

/// Files that travel in a message (`SCM_RIGHTS`). Those that nobody takes out are closed with it.
///
/// Such a file may be a socket in whose queue there are messages with files, and so on: they are
/// closed one after the other and not each within the end of the one before, for which no stack would be
/// long enough.
#[derive(Clone, Default)]
pub struct InFlight(Vec<Arc<OpenFile>>);

impl InFlight {
    /// Takes the files out.
    pub fn take(&mut self) -> Vec<Arc<OpenFile>> {
        core::mem::take(&mut self.0)
    }
}

impl From<Vec<Arc<OpenFile>>> for InFlight {
    fn from(files: Vec<Arc<OpenFile>>) -> Self {
        Self(files)
    }
}

impl Deref for InFlight {
    type Target = Vec<Arc<OpenFile>>;

    fn deref(&self) -> &Vec<Arc<OpenFile>> {
        &self.0
    }
}

impl DerefMut for InFlight {
    fn deref_mut(&mut self) -> &mut Vec<Arc<OpenFile>> {
        &mut self.0
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if !self.0.is_empty() {
            kernel().net.closing.close(self.take());
        }
    }
}

/// Files that have travelled and are to be closed.
#[derive(Default)]
pub struct Closing(KernelCell<Queue>);

#[derive(Default)]
struct Queue {
    files: VecDeque<Arc<OpenFile>>,
    /// Somebody closes them, one after the other.
    is_served: bool,
}

impl Closing {
    /// Closes files, now, or by whoever is closing others.
    #[inline(never)]
    fn close(&self, files: Vec<Arc<OpenFile>>) {
        let mut queue = self.0.borrow_mut();
        queue.files.extend(files);
        if core::mem::replace(&mut queue.is_served, true) {
            return;
        }
        drop(queue);
        while let Some(file) = self.next() {
            drop(file);
        }
    }

    fn next(&self) -> Option<Arc<OpenFile>> {
        let mut queue = self.0.borrow_mut();
        let next = queue.files.pop_front();
        queue.is_served = next.is_some();
        next
    }
}
