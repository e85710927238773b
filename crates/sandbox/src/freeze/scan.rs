//! Finding out which pages of a frozen sandbox must be stored.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::io::Errno;
use thaw_abi::PAGE_SIZE;
use thaw_abi::freeze::{REGION_FROM_IMAGE, REGION_SHARED, REGION_WIPE};

use super::FreezeError;
use super::report::Region;
use crate::pagemap::PageKind;
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

/// Bytes read at a time.
const CHUNK: u64 = 1 << 20;
/// Most bytes of memory that are read although no page is known to be there.
const UNKNOWN_MAX: u64 = 64 << 30;

const ZEROS: [u8; PAGE_SIZE as usize] = [0; PAGE_SIZE as usize];

/// Where the memory of a frozen sandbox and its blobs come from.
pub(crate) trait Source {
    /// The memory of the process with this number in the sandbox' pid namespace, once.
    fn take_space(&mut self, process: u32) -> io::Result<Space>;

    /// Opens blobs of its rootfs to be read.
    ///
    /// # Errors
    /// The first that cannot be opened, and why.
    fn blobs(&mut self, numbers: &[u32]) -> Result<Vec<File>, (u32, io::Error)>;
}

/// The memory of a frozen sandbox and the blobs that it maps.
pub(crate) struct Scanner<'a> {
    source: &'a mut dyn Source,
    /// Of the processes that have the address spaces; so far, of the first.
    spaces: Vec<Space>,
    blobs: HashMap<u32, File>,
    /// Bytes of [`Content::Own`] so far.
    stored: u64,
    /// Most of them.
    max_stored: u64,
    /// Bytes read so far without knowing that a page is there.
    unknown: u64,
}

impl<'a> Scanner<'a> {
    pub fn open(source: &'a mut dyn Source, max_stored: u64) -> Result<Self, FreezeError> {
        let spaces = vec![source.take_space(FIRST_PROCESS).map_err(FreezeError::Memory)?];
        Ok(Self { source, spaces, blobs: HashMap::new(), stored: 0, max_stored, unknown: 0 })
    }

    /// Takes the memory of all address spaces: `processes` as the sandbox' pid
    /// namespace numbers them. That of the first process was there before: it
    /// is the sandbox itself, or one of several that share the report.
    pub fn take_spaces(&mut self, processes: &[u32]) -> Result<(), FreezeError> {
        let mut first = self.spaces.pop();
        for &process in processes {
            let space = match process {
                FIRST_PROCESS => first.take().ok_or_else(|| Errno::SRCH.into()),
                process => self.source.take_space(process),
            };
            self.spaces.push(space.map_err(FreezeError::Memory)?);
        }
        Ok(())
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

    fn blob(&mut self, number: u32) -> Result<&File, FreezeError> {
        if !self.blobs.contains_key(&number) {
            self.open_blobs(&[number])?;
        }
        Ok(&self.blobs[&number])
    }

    /// The runs that cover a region, in order; neighbours differ.
    pub fn runs(&mut self, region: &Region) -> Result<Vec<Run>, FreezeError> {
        let untouched = if region.blob.is_some() { Content::Blob } else { Content::Zero };
        let mut runs = Runs::new(region.start);
        if region.has(REGION_WIPE) {
            runs.push(region.end(), Content::Zero);
            return Ok(runs.list);
        }
        // Shared pages may have been written through another mapping, and pages
        // of an image are not known to be there before they are touched.
        if region.has(REGION_FROM_IMAGE) || region.has(REGION_SHARED) {
            self.unknown = self.unknown.saturating_add(region.len);
            if self.unknown > UNKNOWN_MAX {
                return Err(FreezeError::TooLarge { needed: self.unknown, limit: UNKNOWN_MAX });
            }
            self.examine(region, region.start, region.end(), &mut runs)?;
            return Ok(runs.list);
        }
        let mut changed = Vec::new();
        self.spaces[region.space as usize]
            .pages
            .runs(region.start, region.end(), |run| {
                if run.kind == PageKind::Private {
                    changed.push((run.start.max(region.start), run.end.min(region.end())));
                }
            })
            .map_err(FreezeError::Memory)?;
        for (start, end) in changed {
            if start < runs.end || end <= start {
                continue;
            }
            runs.push(start, untouched);
            self.examine(region, start, end, &mut runs)?;
        }
        runs.push(region.end(), untouched);
        Ok(runs.list)
    }

    /// Reads pages and compares them with what they would be without the image.
    fn examine(
        &mut self,
        region: &Region,
        start: u64,
        end: u64,
        runs: &mut Runs,
    ) -> Result<(), FreezeError> {
        let mut memory = vec![0; (end - start).min(CHUNK) as usize];
        let mut original = vec![0; if region.blob.is_some() { memory.len() } else { 0 }];
        let mut at = start;
        while at < end {
            let len = (end - at).min(CHUNK) as usize;
            let memory = &mut memory[..len];
            if let Err(error) = self.read(region.space, at, memory) {
                // Pages behind the end of a mapped file cannot be read, and have
                // no content but the file's.
                if region.blob.is_none() {
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
            let original = &mut original[..if region.blob.is_some() { len } else { 0 }];
            if let Some((number, offset)) = region.blob {
                let file = self.blob(number)?;
                read_padded(file, offset + (at - region.start), original)
                    .map_err(|source| FreezeError::Blob { blob: number, source })?;
            }
            for (number, page) in memory.chunks_exact(PAGE_SIZE as usize).enumerate() {
                let first = number * PAGE_SIZE as usize;
                let same = original.get(first..first + page.len()).is_some_and(|same| same == page);
                let content = match page {
                    _ if same => Content::Blob,
                    page if page == ZEROS => Content::Zero,
                    _ => {
                        self.stored += PAGE_SIZE;
                        Content::Own
                    }
                };
                runs.push(at + first as u64 + PAGE_SIZE, content);
            }
            if self.stored > self.max_stored {
                return Err(FreezeError::TooLarge { needed: self.stored, limit: self.max_stored });
            }
            at += len as u64;
        }
        Ok(())
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
            Some(last) if last.content == content => last.end = end,
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
