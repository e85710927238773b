//! Open regular files of the overlay.

use alloc::string::String;
use alloc::sync::Arc;

use bitflags::bitflags;

use super::Node;
use super::pages::{self, PAGE};
use crate::errno::{Errno, Result};
use crate::fs::file::{File, OpenFlags, Stat};
use crate::fs::inode::Inode;
use crate::fs::writing;
use crate::io::{Sink, Source};
use crate::mm::backing::{MmapSource, UpperPages};
use crate::mm::shared::Placed;

/// Largest size of a file, in bytes (`MAX_LFS_FILESIZE`).
pub const MAX_FILE_SIZE: u64 = i64::MAX as u64;

bitflags! {
    /// What a memory file no longer allows (`F_ADD_SEALS`, fcntl(2)).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Seals: u32 {
        /// Adding seals.
        const SEAL = 1;
        /// Shrinking.
        const SHRINK = 2;
        /// Growing.
        const GROW = 4;
        /// Writing.
        const WRITE = 8;
        /// Writing, except through mappings that exist.
        const FUTURE_WRITE = 16;
        /// Changing the execute bits.
        const EXEC = 32;
    }
}

/// An open regular file.
pub struct RegularFile {
    node: Arc<Node>,
    writable: bool,
    /// Whether it counts among those that have the file open: execve(2) of a
    /// memory file must not fail because of the descriptor it was made with.
    counted: bool,
}

impl RegularFile {
    /// Opens a regular file.
    pub fn new(node: Arc<Node>, flags: OpenFlags) -> Self {
        let writable = flags.can_write();
        node.opened(writable);
        Self { node, writable, counted: true }
    }

    /// Opens a memory file (memfd_create(2)).
    pub fn memory(node: Arc<Node>, seals: Seals) -> Self {
        node.set_seals(seals);
        Self { node, writable: true, counted: false }
    }

    /// The file behind it.
    pub fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// Seals in force; `EINVAL` for files that have none.
    pub fn seals(&self) -> Result<Seals> {
        self.node.seals().ok_or(Errno::EINVAL)
    }

    /// Adds seals. `EBUSY` if writing is to be sealed and a mapping may write.
    pub fn add_seals(&self, more: Seals) -> Result<()> {
        let old = self.seals()?;
        if old.contains(Seals::SEAL) {
            return Err(Errno::EPERM);
        }
        let mut all = old | more;
        if more.contains(Seals::EXEC) && self.node.attributes().mode & 0o111 != 0 {
            // What may be executed can no longer be written (`memfd_add_seals`).
            all |= Seals::SHRINK | Seals::GROW | Seals::WRITE | Seals::FUTURE_WRITE;
        }
        if all.contains(Seals::WRITE) && !old.contains(Seals::WRITE) && self.has_writable_mapping()
        {
            return Err(Errno::EBUSY);
        }
        self.node.set_seals(all);
        Ok(())
    }

    /// Whether a shared mapping of any process could be written through.
    fn has_writable_mapping(&self) -> bool {
        crate::state::kernel().tasks.all_processes().iter().any(|process| {
            process.mm().areas().iter().any(|area| {
                let writable = area.file.as_ref().is_some_and(|file| file.writable);
                writable
                    && area.shared_upper().is_some_and(|upper| {
                        core::ptr::addr_eq(Arc::as_ptr(upper), Arc::as_ptr(&self.node))
                    })
            })
        })
    }

    fn sealed(&self, seals: Seals) -> bool {
        self.node.is_sealed(seals)
    }

    /// The next data from `offset` on (`SEEK_DATA`, lseek(2)).
    pub fn next_data(&self, offset: u64) -> Result<u64> {
        self.node.content()?.borrow_mut().next_data(offset).ok_or(Errno::ENXIO)
    }

    /// The next hole from `offset` on (`SEEK_HOLE`).
    pub fn next_hole(&self, offset: u64) -> Result<u64> {
        self.node.content()?.borrow_mut().next_hole(offset).ok_or(Errno::ENXIO)
    }

    /// fallocate(2), without a mode or with `KEEP_SIZE`.
    pub fn allocate(&self, offset: u64, len: u64, grow: Grow) -> Result<()> {
        let end =
            offset.checked_add(len).filter(|&end| end <= MAX_FILE_SIZE).ok_or(Errno::EFBIG)?;
        let size = self.size();
        let grows = grow == Grow::Yes && end > size;
        if grows {
            writing::check_size(size, end)?;
        }
        if grows && self.sealed(Seals::GROW) {
            return Err(Errno::EPERM);
        }
        self.node.begin_change();
        let mut content = self.node.content()?.borrow_mut();
        content.allocate(self.node.lower(), offset, len)?;
        if grows {
            content.truncate(end);
        }
        drop(content);
        self.node.touch_content();
        Ok(())
    }

    /// fallocate(2) with `FALLOC_FL_PUNCH_HOLE` or `FALLOC_FL_ZERO_RANGE`.
    pub fn punch(&self, offset: u64, len: u64) -> Result<()> {
        if self.sealed(Seals::WRITE | Seals::FUTURE_WRITE) {
            return Err(Errno::EPERM);
        }
        self.node.begin_change();
        self.node.content()?.borrow_mut().punch(self.node.lower(), offset, len)?;
        self.node.touch_content();
        Ok(())
    }
}

/// Whether an allocation beyond the end makes a file longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grow {
    /// It does.
    Yes,
    /// The size stays.
    No,
}

impl File for RegularFile {
    fn read(&self, sink: &mut Sink<'_>, offset: u64) -> Result<usize> {
        pages::read(self.node.content()?, self.node.lower(), sink, offset)
    }

    fn write(&self, source: &mut Source<'_>, offset: u64) -> Result<usize> {
        if source.remaining() == 0 {
            return Ok(0);
        }
        let wanted = writing::room(offset, source.remaining() as u64)?;
        let room = MAX_FILE_SIZE.checked_sub(offset).filter(|&room| room > 0);
        let mut room = room.ok_or(Errno::EFBIG)?.min(wanted);
        self.node.begin_change();
        if self.sealed(Seals::WRITE | Seals::FUTURE_WRITE) {
            return Err(Errno::EPERM);
        }
        let (size, end) = (self.size(), offset.saturating_add(room));
        if self.sealed(Seals::GROW) && end > size {
            // Linux looks at one page of a write at a time.
            room = (size & !(PAGE - 1)).saturating_sub(offset).min(room);
            if room == 0 {
                return Err(Errno::EPERM);
            }
        }
        let max = usize::try_from(room).unwrap_or(usize::MAX);
        let count = pages::write(self.node.content()?, self.node.lower(), source, offset, max)?;
        self.node.touch_content();
        Ok(count)
    }

    fn seekable(&self) -> bool {
        true
    }

    fn size(&self) -> u64 {
        self.node.content().map_or(0, |content| content.borrow_mut().size())
    }

    fn stat(&self) -> Result<Stat> {
        Ok(self.node.attributes().to_stat())
    }

    fn allows_shared_writes(&self) -> bool {
        !self.sealed(Seals::WRITE | Seals::FUTURE_WRITE)
    }

    fn mmap_source(&self) -> Result<MmapSource> {
        let untouched = self.node.content()?.borrow_mut().untouched();
        match (untouched, self.node.lower()) {
            // A file that may be written to through this description must show
            // the writes in its mappings.
            (Some(id), Some(lower)) if !self.writable => lower.0.mmap_source(id),
            _ => {
                self.node.note_mapped();
                Ok(MmapSource::Upper(self.node.clone()))
            }
        }
    }

    fn truncate(&self, size: u64) -> Result<()> {
        self.node.truncate(size)
    }

    fn description(&self) -> String {
        self.node.describe()
    }
}

impl Drop for RegularFile {
    fn drop(&mut self) {
        if self.counted {
            self.node.closed(self.writable);
        }
    }
}

impl UpperPages for Node {
    fn len(&self) -> u64 {
        self.content().map_or(0, |content| content.borrow_mut().size())
    }

    fn read_at(&self, sink: &mut Sink<'_>, offset: u64) -> Result<usize> {
        pages::read(self.content()?, self.lower(), sink, offset)
    }

    fn write_at(&self, source: &mut Source<'_>, offset: u64) -> Result<usize> {
        // A mapping never makes a file longer (mmap(2)).
        let room = self.len().saturating_sub(offset);
        let count = pages::write(self.content()?, self.lower(), source, offset, room as usize)?;
        self.touch_content();
        Ok(count)
    }

    fn lend(&self, page: u64, address: u64, prot: u32) -> Result<Option<Placed>> {
        self.content()?.borrow_mut().lend(self.lower(), page, address, prot)
    }

    fn recall(&self, start: u64, end: u64) {
        if let Ok(content) = self.content() {
            content.borrow_mut().recall_addresses(start, end);
        }
    }
}
