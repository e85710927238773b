//! FIFOs (fifo(7)): pipes that are found by the name of a file.

use alloc::collections::BTreeMap;
use alloc::sync::{Arc, Weak};

use super::{Access, Pipe, PipeEnd};
use crate::errno::{Errno, Result};
use crate::fs::anonymous::InodeNumbers;
use crate::fs::file::OpenFlags;
use crate::fs::inode::Inode;
use crate::sync::KernelCell;
use crate::task::wait::wait_until;

/// Device and inode number of a file.
type FileId = (u64, u64);

/// The FIFOs that are open. A pipe lives as long as somebody has it open.
#[derive(Default)]
pub struct Fifos {
    pipes: KernelCell<BTreeMap<FileId, Weak<Pipe>>>,
}

impl Fifos {
    /// None.
    pub const fn new() -> Self {
        Self { pipes: KernelCell::new(BTreeMap::new()) }
    }

    /// The pipe behind a file.
    fn pipe(&self, file: FileId, inodes: &InodeNumbers) -> Arc<Pipe> {
        let mut pipes = self.pipes.borrow_mut();
        pipes.retain(|_, pipe| pipe.strong_count() > 0);
        if let Some(pipe) = pipes.get(&file).and_then(Weak::upgrade) {
            return pipe;
        }
        let pipe = Pipe::new(inodes.next());
        pipes.insert(file, Arc::downgrade(&pipe));
        pipe
    }
}

/// Opens a FIFO for the running thread: waits until the other side is open
/// too, unless `flags` say otherwise. `ENXIO` for a writer that may not wait
/// and has no reader.
pub fn open(inode: &Arc<dyn Inode>, flags: OpenFlags) -> Result<Arc<PipeEnd>> {
    let net = &crate::state::kernel().net;
    let attributes = inode.attributes();
    let pipe = net.fifos.pipe((attributes.dev, attributes.ino), &net.inodes);
    let access = match (flags.can_read(), flags.can_write()) {
        (true, true) => Access::Both,
        (true, false) => Access::Read,
        _ => Access::Write,
    };
    let nonblocking = flags.contains(OpenFlags::NONBLOCK);
    let other_is_open = || match access {
        Access::Both => true,
        Access::Read => pipe.ends().1 > 0,
        Access::Write => pipe.ends().0 > 0,
    };
    if access == Access::Write && nonblocking && !other_is_open() {
        return Err(Errno::ENXIO);
    }
    // Who opens the other side meanwhile may be gone again: it counts all the same.
    let before = pipe.openings();
    let end = pipe.open_named(access, inode.clone());
    if nonblocking || other_is_open() {
        return Ok(end);
    }
    wait_until(&[pipe.open_queue(access)], None, || {
        let now = pipe.openings();
        let came = if access == Access::Read { now.1 != before.1 } else { now.0 != before.0 };
        came.then_some(Ok(()))
    })?;
    Ok(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_file_is_one_pipe_while_it_is_open() {
        let (fifos, inodes) = (Fifos::new(), InodeNumbers::new());
        let first = fifos.pipe((1, 2), &inodes);
        let end = first.open(Access::Read);
        assert!(Arc::ptr_eq(&first, &fifos.pipe((1, 2), &inodes)));
        assert!(!Arc::ptr_eq(&first, &fifos.pipe((1, 3), &inodes)));
        assert_eq!(first.openings(), (1, 0));
        drop((first, end));
        assert_eq!(fifos.pipe((1, 2), &inodes).openings(), (0, 0));
    }
}
