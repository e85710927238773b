//! What lies behind a mapping: files, as memory mappings see them.

use alloc::sync::Arc;
use core::ops::Range;

use super::shared::Placed;
use crate::errno::Result;
use crate::io::{Sink, Source};
use crate::platform::machine::HostFd;
use crate::platform::saved::Saved;

/// A mapped file.
#[derive(Clone)]
pub struct FileBacking {
    /// What is mapped.
    pub source: MmapSource,
    /// Where the file was opened, for `/proc/self/maps`.
    pub path: Arc<[u8]>,
    /// Device and inode number, for `/proc/self/maps`.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Whether the file was opened for writing: a shared mapping may become writable.
    pub writable: bool,
    /// The mount that it was opened on, which is in use as long as the mapping is.
    pub holder: Option<Arc<dyn Holder>>,
}

/// What a mapped file lies on.
pub trait Holder: Saved + Send + Sync {
    /// Whether nothing there may be executed (mount(2), `MS_NOEXEC`).
    fn forbids_execution(&self) -> bool;
}

/// What a memory mapping of a file is made of.
#[derive(Clone)]
pub enum MmapSource {
    /// A file of the lower layer, by blob number; read-only.
    Blob(u32),
    /// A file of a directory of the host; read-only.
    HostFile(Arc<dyn HostPages>),
    /// A file of the upper layer: the mapping copies or shares its pages.
    Upper(Arc<dyn UpperPages>),
    /// Zeros (`/dev/zero`, zero(4)).
    Zero,
}

/// A file of the host that is mapped as it is.
pub trait HostPages: Saved + Send + Sync {
    /// A descriptor of it, to be read. It is valid until another one is asked for.
    fn descriptor(&self) -> Result<HostFd>;
}

/// Pages of an upper-layer file, as a memory mapping sees them.
pub trait UpperPages: Saved + Send + Sync {
    /// Bytes of the file.
    fn len(&self) -> u64;
    /// Whether the file is empty.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Reads at `offset`; short at the end of the file.
    fn read_at(&self, sink: &mut Sink<'_>, offset: u64) -> Result<usize>;
    /// Writes at `offset`, without making the file longer.
    fn write_at(&self, source: &mut Source<'_>, offset: u64) -> Result<usize>;
    /// Maps a page of the file at `address`, with protection `prot`. The page
    /// then is there and nowhere else: any other use of it, by another mapping
    /// or by a system call, takes it back, and the next touch faults. `None` if
    /// the page lies behind the end of the file.
    fn lend(&self, page: u64, address: u64, prot: u32) -> Result<Option<Placed>>;
    /// As [`UpperPages::lend`], for the page at `address`; may map others of the file around it
    /// as well, if any use of them leaves them where they are. `room` are the addresses that the
    /// same mapping shows, a page each, from page `first` of the file on.
    fn lend_around(
        &self,
        address: u64,
        room: Range<u64>,
        first: u64,
        prot: u32,
    ) -> Result<Option<Placed>> {
        self.lend(first + (address - room.start) / 4096, address, prot)
    }
    /// Takes back all pages that are mapped in a range of addresses.
    fn recall(&self, start: u64, end: u64);
    /// A shared mapping of it has gone.
    fn unmapped(&self) {}
    /// Whether it is a segment of shared memory (shmat(2)).
    fn is_segment(&self) -> bool {
        false
    }
}
