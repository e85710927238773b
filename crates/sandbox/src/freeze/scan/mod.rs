//! Finding out which pages of a frozen sandbox must be stored.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use rustix::io::Errno;
use thaw_abi::PAGE_SIZE;
use thaw_abi::freeze::{
    REGION_FROM_IMAGE, REGION_IN_PLACE, REGION_KERNEL, REGION_SHARED, REGION_WIPE,
};

use super::FreezeError;
use super::chart::{Chart, Origin};
use super::relatives::{Earlier, StoredBySpace, relatives};
use super::report::Region;
use crate::state::{FIRST_PROCESS, Space};

/// Where the content of a page can be had from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// From the image only.
    Own,
    /// From the blob that the region maps.
    Blob,
    /// It is zero.
    Zero,
    /// From a blob or an ancestor, as the parent of the image has it.
    File {
        /// Its number.
        number: u32,
        /// Offset of the first byte.
        offset: u64,
    },
    /// The image has it, since an earlier address space has the same at the same address: processes
    /// share what they had before a fork.
    Same {
        /// Number of that address space.
        space: u32,
    },
}

impl Content {
    /// The content of what lies `bytes` further on, if it goes on the same way.
    pub fn further(self, bytes: u64) -> Self {
        match self {
            Self::File { number, offset } => Self::File { number, offset: offset + bytes },
            content => content,
        }
    }
}

impl From<Origin> for Content {
    fn from(origin: Origin) -> Self {
        match origin {
            Origin::Zero => Self::Zero,
            Origin::File { number, offset } => Self::File { number, offset },
        }
    }
}

/// Neighbouring pages of one region with the same content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub start: u64,
    pub end: u64,
    pub content: Content,
}

impl Run {
    pub fn len(&self) -> u64 {
        self.end - self.start
    }
}

/// Bytes read at a time: what is compared with it, too, stays in a processor's cache.
const CHUNK: u64 = 128 << 10;
/// Most bytes of memory that are read although no page is known to be there.
const UNKNOWN_MAX: u64 = 64 << 30;

pub(super) const ZEROS: [u8; PAGE_SIZE as usize] = [0; PAGE_SIZE as usize];

/// Where the memory of a frozen sandbox and its blobs come from.
pub(crate) trait Source {
    /// The memory of the process with this number in the sandbox' pid namespace, once.
    fn take_space(&mut self, process: u32) -> io::Result<Space>;

    /// Opens blobs of its rootfs to be read.
    ///
    /// # Errors
    /// The first that cannot be opened, and why.
    fn blobs(&mut self, numbers: &[u32]) -> Result<Vec<File>, (u32, io::Error)>;

    /// The socket of another worker that copies, once; `None`: there is none.
    fn take_mate(&mut self) -> Option<OwnedFd> {
        None
    }

    /// The image has its tables and the memory of the first address space, and that of the others is
    /// still to come.
    ///
    /// # Errors
    /// It was not the sandbox' own, since that has ended.
    fn first_is_written(&mut self) -> Result<(), FreezeError> {
        Ok(())
    }

    /// All memory has been read that the image takes.
    ///
    /// # Errors
    /// It was not the sandbox' own, since that has ended.
    fn memory_is_read(&mut self) -> Result<(), FreezeError> {
        Ok(())
    }
}

/// The images that a sandbox is compared with.
#[derive(Debug, Default)]
pub(crate) struct Base {
    /// Of the image's parent.
    pub parent: Option<Chart>,
    /// Of the image that the sandbox is a copy of: the parent, or an ancestor of that.
    pub thawed: Option<Chart>,
}

/// The memory of a frozen sandbox and the blobs that it maps.
pub(crate) struct Scanner<'a> {
    source: &'a mut dyn Source,
    /// Of the processes that have the address spaces; so far, of the first.
    spaces: Vec<Space>,
    /// Their numbers, in the same order.
    processes: Vec<u32>,
    blobs: HashMap<u32, File>,
    base: Base,
    /// Number of each address space in the image that the sandbox is a copy of.
    origins: Vec<Option<u32>>,
    /// Bytes of [`Content::Own`] so far.
    stored: u64,
    /// Most of them.
    max_stored: u64,
    /// Bytes read so far without knowing that a page is there.
    unknown: u64,
    /// Pages that were written are stored, whatever they hold.
    trusts_page_map: bool,
    /// Private memory of the guest that is stored, by address space.
    stored_by_space: StoredBySpace,
    /// Buffers that are not in use: the host makes the pages of each new one.
    buffers: Vec<Vec<u8>>,
}

impl<'a> Scanner<'a> {
    /// Begins with the memory of the process that has the report: the first one, or a twin that
    /// stands for it.
    pub fn open(
        source: &'a mut dyn Source,
        process: u32,
        max_stored: u64,
    ) -> Result<Self, FreezeError> {
        let spaces = vec![source.take_space(process).map_err(FreezeError::Memory)?];
        let (base, origins) = (Base::default(), Vec::new());
        let (blobs, stored, unknown) = (HashMap::new(), 0, 0);
        let trusts_page_map = false;
        Ok(Self {
            source,
            spaces,
            processes: vec![process],
            blobs,
            base,
            origins,
            stored,
            max_stored,
            unknown,
            trusts_page_map,
            stored_by_space: StoredBySpace::default(),
            buffers: Vec::new(),
        })
    }

    /// Stores all pages that were written from now on, without looking whether they hold something
    /// that is to be had elsewhere: looking takes as long as storing.
    pub fn trust_page_map(&mut self) {
        self.trusts_page_map = true;
    }

    /// Takes the memory of all address spaces: `processes` as the sandbox' pid
    /// namespace numbers them. That of the first process was there before: it
    /// is the sandbox itself or its twin, or one of several that share the report.
    pub fn take_spaces(&mut self, processes: &[u32]) -> Result<(), FreezeError> {
        let mut first = self.spaces.pop().zip(self.processes.pop());
        for &process in processes {
            let (space, process) = match process {
                FIRST_PROCESS => first.take().ok_or_else(|| Errno::SRCH.into()),
                process => self.source.take_space(process).map(|space| (space, process)),
            }
            .map_err(FreezeError::Memory)?;
            self.spaces.push(space);
            self.processes.push(process);
        }
        Ok(())
    }

    /// The process that has an address space.
    pub fn process(&self, space: u32) -> u32 {
        self.processes[space as usize]
    }

    /// The socket of another worker that copies, if there is one.
    pub fn take_mate(&mut self) -> Option<OwnedFd> {
        self.source.take_mate()
    }

    /// Says that the image can be thawed before the memory of the other address spaces is there.
    pub fn end_first(&mut self) -> Result<(), FreezeError> {
        self.source.first_is_written()
    }

    /// Says that no more memory is read.
    pub fn end_reading(&mut self) -> Result<(), FreezeError> {
        self.source.memory_is_read()
    }

    /// Reads memory of an address space.
    pub fn read(&self, space: u32, address: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.spaces[space as usize].memory.read_exact_at(buffer, address)
    }

    /// Opens blobs of the report.
    pub fn open_blobs(&mut self, numbers: &[u32]) -> Result<(), FreezeError> {
        let opened = self.source.blobs(numbers);
        let files = opened.map_err(|(blob, source)| FreezeError::Blob { blob, source })?;
        self.blobs.extend(numbers.iter().copied().zip(files));
        Ok(())
    }

    /// Compares with images from now on.
    pub fn compare_with(&mut self, base: Base, origins: Vec<Option<u32>>) {
        (self.base, self.origins) = (base, origins);
    }

    /// A blob or an ancestor.
    pub fn blob(&mut self, number: u32) -> Result<&File, FreezeError> {
        if !self.blobs.contains_key(&number) {
            self.open_blobs(&[number])?;
        }
        Ok(&self.blobs[&number])
    }

    /// The runs that cover a region, in order; neighbours differ. Regions come in the order of
    /// their address spaces.
    pub fn runs(&mut self, region: &Region) -> Result<Vec<Run>, FreezeError> {
        let runs = self.find_runs(region)?;
        if is_private(region) {
            self.stored_by_space.add(region.space, &runs);
        }
        Ok(runs)
    }

    fn find_runs(&mut self, region: &Region) -> Result<Vec<Run>, FreezeError> {
        let untouched = if region.blob.is_some() { Content::Blob } else { Content::Zero };
        let mut runs = Runs::new(region.start);
        if region.has(REGION_WIPE) {
            runs.push(region.end(), Content::Zero);
            return Ok(runs.list);
        }
        let in_place = region.has(REGION_IN_PLACE) && !region.has(REGION_SHARED);
        if in_place && let Some(thawed) = self.base.thawed.take() {
            let scanned = self.scan_in_place(region, &thawed, &mut runs);
            self.base.thawed = Some(thawed);
            scanned?;
            return Ok(runs.list);
        }
        // Shared pages may have been written through another mapping, and pages
        // of an image are not known to be there before they are touched.
        if region.has(REGION_FROM_IMAGE) || region.has(REGION_SHARED) {
            self.examine_unknown(region, region.start, region.end(), &mut runs)?;
            return Ok(runs.list);
        }
        for changed in self.private_runs(region)? {
            runs.push(changed.start, untouched);
            self.take_written(region, changed, &mut runs)?;
        }
        runs.push(region.end(), untouched);
        Ok(runs.list)
    }

    /// The runs of pages of a region that were written, in order.
    fn private_runs(&mut self, region: &Region) -> Result<Vec<Range<u64>>, FreezeError> {
        let pages = &mut self.spaces[region.space as usize].pages;
        pages.private_runs_at_rest(region.start..region.end()).map_err(FreezeError::Memory)
    }

    /// A region that lies where the thaw has mapped it: what was not written is what the image
    /// says.
    fn scan_in_place(
        &mut self,
        region: &Region,
        thawed: &Chart,
        runs: &mut Runs,
    ) -> Result<(), FreezeError> {
        for written in self.private_runs(region)? {
            self.take_from(thawed, region, written.start, runs)?;
            self.take_written(region, written, runs)?;
        }
        self.take_from(thawed, region, region.end(), runs)
    }

    /// Adds pages that were written.
    fn take_written(
        &mut self,
        region: &Region,
        written: Range<u64>,
        runs: &mut Runs,
    ) -> Result<(), FreezeError> {
        if !self.trusts_page_map {
            return self.examine(region, written.start, written.end, runs);
        }
        if is_private(region) && self.stored_by_space.may_have(region.space, &written) {
            return self.take_unless_same(region, written, runs);
        }
        self.store(&written, runs)
    }

    /// Adds pages that are to be stored, whatever they hold.
    fn store(&mut self, part: &Range<u64>, runs: &mut Runs) -> Result<(), FreezeError> {
        self.stored += part.end - part.start;
        runs.push(part.end, Content::Own);
        self.check_stored()
    }

    /// Adds pages that were written, of which an earlier address space may have some.
    fn take_unless_same(
        &mut self,
        region: &Region,
        written: Range<u64>,
        runs: &mut Runs,
    ) -> Result<(), FreezeError> {
        let mut buffer = self.buffer((written.end - written.start).min(CHUNK) as usize);
        let mut at = written.start;
        while at < written.end {
            let memory = &mut buffer[..(written.end - at).min(CHUNK) as usize];
            let part = at..at + memory.len() as u64;
            if !self.stored_by_space.may_have(region.space, &part) {
                self.store(&part, runs)?;
                at = part.end;
                continue;
            }
            self.read(region.space, at, memory).map_err(FreezeError::Memory)?;
            let earlier = self.earlier(region, at, memory.len());
            for (number, page) in memory.chunks_exact(PAGE_SIZE as usize).enumerate() {
                let content = self.own_or_same(&earlier, number, page);
                runs.push(at + (number as u64 + 1) * PAGE_SIZE, content);
            }
            self.check_stored()?;
            at += memory.len() as u64;
            self.buffers.extend(earlier.into_iter().map(|earlier| earlier.memory));
        }
        self.buffers.push(buffer);
        Ok(())
    }

    /// A buffer of so many bytes with anything in it.
    fn buffer(&mut self, len: usize) -> Vec<u8> {
        let mut buffer = self.buffers.pop().unwrap_or_default();
        buffer.resize(len, 0);
        buffer
    }

    /// What is to be said of a page that is to be had from no file: it is stored, unless an
    /// earlier address space has stored the same.
    fn own_or_same(&mut self, earlier: &[Earlier], number: usize, page: &[u8]) -> Content {
        if let Some(same) = earlier.iter().find(|earlier| earlier.has(number, page)) {
            return Content::Same { space: same.space };
        }
        self.stored += PAGE_SIZE;
        Content::Own
    }

    /// What earlier address spaces have stored of this part of a region.
    fn earlier(&mut self, region: &Region, at: u64, len: usize) -> Vec<Earlier> {
        let mut found = Vec::new();
        for space in relatives(region.space).filter(|_| is_private(region)) {
            let stored: Vec<Range<u64>> =
                self.stored_by_space.within(space, &(at..at + len as u64)).cloned().collect();
            if stored.is_empty() {
                continue;
            }
            let mut memory = self.buffer(len);
            // Where it has gaps, nothing is to be had from it.
            match self.read(space, at, &mut memory) {
                Ok(()) => found.push(Earlier { space, at, stored, memory }),
                Err(_) => self.buffers.push(memory),
            }
        }
        found
    }

    fn check_stored(&self) -> Result<(), FreezeError> {
        if self.stored > self.max_stored {
            return Err(FreezeError::TooLarge { needed: self.stored, limit: self.max_stored });
        }
        Ok(())
    }

    /// Adds what an image says of a region, from where the runs end up to `end`.
    fn take_from(
        &mut self,
        thawed: &Chart,
        region: &Region,
        end: u64,
        runs: &mut Runs,
    ) -> Result<(), FreezeError> {
        let origin = self.origins.get(region.space as usize).copied().flatten();
        if let Some(space) = origin {
            for piece in thawed.within(space, runs.end, end) {
                self.fill_gap(region, piece.start, runs)?;
                runs.push(piece.end, piece.origin.into());
            }
        }
        self.fill_gap(region, end, runs)
    }

    /// Adds a part of a region of which the image says nothing: the kernel's memory was zero
    /// there, and there is no such part of the guest's unless its kernel lies.
    fn fill_gap(&mut self, region: &Region, end: u64, runs: &mut Runs) -> Result<(), FreezeError> {
        if region.has(REGION_KERNEL) {
            runs.push(end, Content::Zero);
            return Ok(());
        }
        self.examine_unknown(region, runs.end, end, runs)
    }

    /// Reads pages of which it is not known whether they are there.
    fn examine_unknown(
        &mut self,
        region: &Region,
        start: u64,
        end: u64,
        runs: &mut Runs,
    ) -> Result<(), FreezeError> {
        self.unknown = self.unknown.saturating_add(end.saturating_sub(start));
        if self.unknown > UNKNOWN_MAX {
            return Err(FreezeError::TooLarge { needed: self.unknown, limit: UNKNOWN_MAX });
        }
        self.examine(region, start, end, runs)
    }

    /// Reads pages and compares them with what they would be without the image.
    fn examine(
        &mut self,
        region: &Region,
        start: u64,
        end: u64,
        runs: &mut Runs,
    ) -> Result<(), FreezeError> {
        let most = (end - start).min(CHUNK) as usize;
        let mut buffer = self.buffer(most);
        let mut original_buffer = region.blob.map(|_| self.buffer(most)).unwrap_or_default();
        let mut at = start;
        while at < end {
            let len = (end - at).min(CHUNK) as usize;
            let memory = &mut buffer[..len];
            if let Err(error) = self.read(region.space, at, memory) {
                // Pages behind the end of a mapped file cannot be read, and have
                // no content but the file's.
                let has_ended = error.kind() == io::ErrorKind::UnexpectedEof;
                if region.blob.is_none() || has_ended {
                    return Err(FreezeError::Memory(error));
                }
                if len as u64 == PAGE_SIZE {
                    runs.push(at + PAGE_SIZE, Content::Blob);
                } else {
                    for page in (at..at + len as u64).step_by(PAGE_SIZE as usize) {
                        self.examine(region, page, page + PAGE_SIZE, runs)?;
                    }
                }
                at += len as u64;
                continue;
            }
            let original = &mut original_buffer[..if region.blob.is_some() { len } else { 0 }];
            if let Some((number, offset)) = region.blob {
                let file = self.blob(number)?;
                read_padded(file, offset + (at - region.start), original)
                    .map_err(|source| FreezeError::Blob { blob: number, source })?;
            }
            let expected = self.expected(region.space, at, len)?;
            let earlier = self.earlier(region, at, len);
            for (number, page) in memory.chunks_exact(PAGE_SIZE as usize).enumerate() {
                let first = number * PAGE_SIZE as usize;
                let same = original.get(first..first + page.len()).is_some_and(|same| same == page);
                let content = match expected.content_of(number, page) {
                    Some(content) => content,
                    None if same => Content::Blob,
                    None if page == ZEROS => Content::Zero,
                    None => self.own_or_same(&earlier, number, page),
                };
                runs.push(at + first as u64 + PAGE_SIZE, content);
            }
            self.check_stored()?;
            at += len as u64;
            self.buffers.extend(earlier.into_iter().map(|earlier| earlier.memory));
        }
        self.buffers.push(buffer);
        self.buffers.extend(region.blob.map(|_| original_buffer));
        Ok(())
    }

    /// What the image's parent has at an address.
    fn expected(&mut self, space: u32, at: u64, len: usize) -> Result<Expected, FreezeError> {
        let Some(parent) = self.base.parent.take() else { return Ok(Expected::default()) };
        let mut expected =
            Expected { memory: vec![0; len], contents: vec![None; len / PAGE_SIZE as usize] };
        let read = parent.within(space, at, at + len as u64).try_for_each(|piece| {
            let (first, end) = ((piece.start - at) as usize, (piece.end - at) as usize);
            for page in (first..end).step_by(PAGE_SIZE as usize) {
                let content = Content::from(piece.origin).further((page - first) as u64);
                expected.contents[page / PAGE_SIZE as usize] = Some(content);
            }
            match piece.origin {
                Origin::Zero => Ok(()),
                Origin::File { number, offset } => {
                    read_padded(self.blob(number)?, offset, &mut expected.memory[first..end])
                        .map_err(|source| FreezeError::Blob { blob: number, source })
                }
            }
        });
        self.base.parent = Some(parent);
        read.map(|()| expected)
    }
}

/// Whether a region is memory that a process has for itself, and shares after a fork only as long
/// as nobody writes.
fn is_private(region: &Region) -> bool {
    !region.has(REGION_KERNEL) && !region.has(REGION_SHARED)
}

/// What the image's parent has, page by page, and where that is to be had from.
#[derive(Default)]
struct Expected {
    memory: Vec<u8>,
    contents: Vec<Option<Content>>,
}

impl Expected {
    /// Where the page of this number comes from, if the parent has the same.
    fn content_of(&self, number: usize, page: &[u8]) -> Option<Content> {
        let content = (*self.contents.get(number)?)?;
        let first = number * PAGE_SIZE as usize;
        (self.memory[first..first + page.len()] == *page).then_some(content)
    }
}

/// Runs in the making.
struct Runs {
    list: Vec<Run>,
    end: u64,
}

impl Runs {
    fn new(start: u64) -> Self {
        Self { list: Vec::new(), end: start }
    }

    /// Adds everything up to `end`.
    fn push(&mut self, end: u64, content: Content) {
        if end <= self.end {
            return;
        }
        match self.list.last_mut() {
            Some(last) if last.content.further(last.len()) == content => last.end = end,
            _ => self.list.push(Run { start: self.end, end, content }),
        }
        self.end = end;
    }
}

/// Reads from a file; what lies beyond its end is zero, as in a mapping's last page.
fn read_padded(file: &File, mut offset: u64, mut buffer: &mut [u8]) -> io::Result<()> {
    while !buffer.is_empty() {
        match file.read_at(buffer, offset) {
            Ok(0) => {
                buffer.fill(0);
                return Ok(());
            }
            Ok(read) => {
                buffer = &mut buffer[read..];
                offset += read as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(unsafe_code)]
mod tests;
