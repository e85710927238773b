//! Content of regular files: pages of memory above a file of the lower layer.
//!
//! Copy-up is page by page: a page is copied when it is first written to, and
//! what was never written is read from the lower layer. What is neither there
//! nor below is a hole and reads as zeros.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::ops::Range as Span;

use super::quota::Share;
use crate::errno::{Errno, Result};
use crate::fs::lower::{LowerId, LowerLayer};
use crate::io::{Sink, Source};
use crate::mm::pages::{self, PageBox};
use crate::mm::shared::{Placed, place_page, take_page};
use crate::state::kernel;
use crate::sync::KernelCell;

/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// Bytes of a write from which on its pages are made at once, and bytes of them at a time.
const MADE: Span<usize> = 16 << 10..256 << 10;

/// The part of a lower file that still shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Below {
    /// The file.
    pub id: LowerId,
    /// Its bytes from here on are hidden.
    pub len: u64,
}

/// What a regular file is made of.
#[derive(Default)]
pub struct Content {
    size: u64,
    below: Option<Below>,
    pages: BTreeMap<u64, PageBox>,
    /// Pages that a shared memory mapping has at the moment, with the address:
    /// what is in `pages` for them is out of date.
    lent: BTreeMap<u64, u64>,
    /// The pages, among those that files of the file system may have.
    share: Share,
}

impl Content {
    /// The content of a lower file.
    pub fn of_lower(id: LowerId, size: u64) -> Self {
        Self { size, below: Some(Below { id, len: size }), ..Self::default() }
    }

    /// No content, and what it has of a quota.
    pub fn limited(share: Share) -> Self {
        Self { share, ..Self::default() }
    }

    /// Bytes of the file.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The lower file, if the content is exactly its content.
    pub fn untouched(&self) -> Option<LowerId> {
        self.below
            .filter(|below| below.len == self.size && self.pages.is_empty())
            .map(|below| below.id)
    }

    /// Units of 512 bytes that the file takes: a lower file counts in full.
    pub fn blocks(&self) -> u64 {
        let below = self.below.map_or(0, |below| below.len.div_ceil(PAGE));
        let above = self.pages.keys().filter(|&&page| page >= below).count() as u64;
        (below + above) * (PAGE / 512)
    }

    /// The first data at or after `offset`; `None` if there is none before the end.
    pub fn next_data(&self, offset: u64) -> Option<u64> {
        if offset >= self.size {
            return None;
        }
        if self.is_data(offset) {
            return Some(offset);
        }
        // Data that lies below is all before the first hole.
        let (page, _) = self.pages.range(offset / PAGE..).next()?;
        Some(page * PAGE).filter(|&start| start < self.size)
    }

    /// The first hole at or after `offset`; the end of a file counts as one.
    /// `None` beyond the end.
    pub fn next_hole(&self, offset: u64) -> Option<u64> {
        if offset >= self.size {
            return None;
        }
        let mut at = offset;
        while at < self.size && self.is_data(at) {
            at = (at / PAGE + 1) * PAGE;
        }
        Some(at.min(self.size))
    }

    fn is_data(&self, at: u64) -> bool {
        self.below.is_some_and(|below| at < below.len) || self.pages.contains_key(&(at / PAGE))
    }

    /// Changes the size. What is cut off reads as zeros if the file grows again.
    pub fn truncate(&mut self, size: u64) {
        self.recall_addresses(0, u64::MAX);
        if size < self.size {
            self.pages.split_off(&size.div_ceil(PAGE));
            self.share.shrink_to(self.pages.len() as u64);
            if let Some(below) = &mut self.below {
                below.len = below.len.min(size);
            }
            let tail = (size % PAGE) as usize;
            if tail > 0
                && let Some(page) = self.pages.get_mut(&(size / PAGE))
            {
                page[tail..].fill(0);
            }
        }
        self.size = size;
    }

    /// Makes `len` bytes from `offset` a hole. The size stays. Pages that mappings show stay, too, as
    /// zeros: what is written to them is part of the file.
    pub fn punch(&mut self, lower: Option<&LowerLayer>, offset: u64, len: u64) -> Result<()> {
        self.recall_addresses(0, u64::MAX);
        let end = offset.saturating_add(len).min(self.size);
        // Pages below which nothing lies: a file may be sparse, and much larger than all memory.
        let pages_below = self.below.map_or(0, |below| below.len.div_ceil(PAGE));
        let whole = offset.div_ceil(PAGE).max(pages_below)..end / PAGE;
        if !whole.is_empty() {
            let mut gone = Vec::new();
            for (&page, bytes) in self.pages.range_mut(whole.clone()) {
                if bytes.is_shown() { bytes.fill(0) } else { gone.push(page) }
            }
            gone.iter().for_each(|page| drop(self.pages.remove(page)));
            self.share.shrink_to(self.pages.len() as u64);
        }
        let mut at = offset;
        while at < end {
            let page = at / PAGE;
            if whole.contains(&page) {
                at = whole.end * PAGE;
                continue;
            }
            let step = (PAGE - at % PAGE).min(end - at);
            if page < pages_below || self.pages.contains_key(&page) {
                let bytes = self.page_for_write(lower, page)?;
                let from = (at % PAGE) as usize;
                bytes[from..from + step as usize].fill(0);
            }
            at += step;
        }
        Ok(())
    }

    /// Makes room: after this, writing to the range cannot fail for lack of memory.
    pub fn allocate(&mut self, lower: Option<&LowerLayer>, offset: u64, len: u64) -> Result<()> {
        let end = offset.checked_add(len).ok_or(Errno::EFBIG)?;
        let pages = offset / PAGE..end.div_ceil(PAGE);
        let there = self.pages.range(pages.clone()).count() as u64;
        check_room(pages.end - pages.start - there)?;
        self.share.check_room(pages.end - pages.start - there)?;
        for page in pages {
            self.page_for_write(lower, page)?;
        }
        Ok(())
    }

    /// Lets a shared memory mapping have a page at `address`, with protection
    /// `prot`: the page is in one place at a time. `None` behind the end of
    /// the file.
    pub fn lend(
        &mut self,
        lower: Option<&LowerLayer>,
        page: u64,
        address: u64,
        prot: u32,
    ) -> Result<Option<Placed>> {
        if page >= self.size.div_ceil(PAGE) {
            return Ok(None);
        }
        let bytes = self.page_for_write(lower, page)?;
        let placed = place_page(address, bytes, prot)?;
        if placed == Placed::Moved {
            self.lent.insert(page, address);
        }
        Ok(Some(placed))
    }

    /// Takes back what is mapped in a range of addresses.
    pub fn recall_addresses(&mut self, start: u64, end: u64) {
        if self.lent.is_empty() {
            return;
        }
        let pages: Vec<u64> = self
            .lent
            .iter()
            .filter(|(_, at)| (start..end).contains(*at))
            .map(|(&page, _)| page)
            .collect();
        for page in pages {
            self.recall_page(page);
        }
    }

    fn recall_page(&mut self, page: u64) {
        if self.lent.is_empty() {
            return;
        }
        if let (Some(address), Some(bytes)) = (self.lent.remove(&page), self.pages.get_mut(&page)) {
            take_page(address, bytes);
            // What a mapping writes behind the end of the file is not kept (mmap(2)).
            let rest = self.size.saturating_sub(page * PAGE);
            if rest < PAGE {
                bytes[rest as usize..].fill(0);
            }
        }
    }

    /// Copies up to `len` bytes from `at` on, as far as they lie in pages here and the
    /// guest's memory is present.
    fn put_pages(&self, sink: &mut Sink<'_>, at: u64, len: usize) -> usize {
        let mut done = 0;
        for (&page, bytes) in self.pages.range(at / PAGE..) {
            let at = at + done as u64;
            let in_page = (at % PAGE) as usize;
            let step = (PAGE as usize - in_page).min(len - done);
            // Only the first page is known not to be lent.
            let is_here = page == at / PAGE && (done == 0 || self.lent.is_empty());
            if step == 0 || !is_here {
                break;
            }
            let count = sink.put_where_present(&bytes[in_page..in_page + step]);
            done += count;
            if count < step {
                break;
            }
        }
        done
    }

    /// Makes the pages at once that a write at `offset` is about to fill, if it is long, has none of
    /// them, and there is room.
    fn make_pages(&self, offset: u64, len: usize) {
        let Some(end) = offset.checked_add(len as u64) else { return };
        let pages = offset.div_ceil(PAGE)..end / PAGE;
        if len < MADE.start || pages.is_empty() || self.pages.range(pages.clone()).next().is_some()
        {
            return;
        }
        let count = (pages.end - pages.start) as usize;
        let is_bounded = kernel().known_memory().is_some();
        if !is_bounded || (count + pages::PAGES_AT_ONCE) as u64 <= page_counts().1 {
            pages::make_ahead(count);
        }
    }

    /// Has `fill` write to the page of offset `at`, from there on, and returns how
    /// many bytes it says it has written; the file grows with them.
    fn write_page(
        &mut self,
        lower: Option<&LowerLayer>,
        at: u64,
        fill: impl FnOnce(&mut [u8; 4096]) -> usize,
    ) -> Result<usize> {
        let count = fill(self.page_for_write(lower, at / PAGE)?);
        if count > 0 {
            self.size = self.size.max(at + count as u64);
        }
        Ok(count)
    }

    /// The page for writing, copied from below if need be.
    fn page_for_write(&mut self, lower: Option<&LowerLayer>, page: u64) -> Result<&mut [u8; 4096]> {
        use alloc::collections::btree_map::Entry;
        self.recall_page(page);
        match self.pages.entry(page) {
            Entry::Occupied(entry) => Ok(entry.into_mut()),
            Entry::Vacant(entry) => {
                self.share.check_room(1)?;
                let mut fresh = alloc_page()?;
                let start = page * PAGE;
                if let Some(below) = self.below.filter(|below| start < below.len) {
                    let len = (below.len - start).min(PAGE) as usize;
                    read_below(lower, below.id, &mut fresh[..len], start)?;
                }
                self.share.take_one()?;
                Ok(entry.insert(fresh))
            }
        }
    }
}

/// Pages that the sandbox may use for files: in all, and left. Files get
/// three quarters of its memory at most, so that one that is filled up is
/// an error and not the end of the sandbox (tmpfs(5) has half).
pub fn page_counts() -> (u64, u64) {
    let limit = kernel().memory_total() / 4 * 3;
    let used = kernel().pages.borrow_mut().bytes_in_use();
    (limit / PAGE, limit.saturating_sub(used) / PAGE)
}

/// Whether the sandbox may use so many pages more for files; `ENOSPC`.
fn check_room(pages: u64) -> Result<()> {
    if kernel().known_memory().is_none() || pages <= page_counts().1 {
        return Ok(());
    }
    let used = kernel().pages.borrow_mut().bytes_in_use();
    kernel().files_are_full(used);
    Err(Errno::ENOSPC)
}

/// A page of zeros for a file; `ENOSPC`.
fn alloc_page() -> Result<PageBox> {
    check_room(1)?;
    pages::alloc_page().map_err(|_| Errno::ENOSPC)
}

/// Reads exactly `to.len()` bytes of a lower file.
fn read_below(lower: Option<&LowerLayer>, id: LowerId, to: &mut [u8], offset: u64) -> Result<()> {
    let lower = lower.ok_or(Errno::EIO)?;
    let len = to.len();
    let mut sink = Sink::kernel(to);
    while sink.remaining() > 0 {
        let at = offset + (len - sink.remaining()) as u64;
        let left = sink.remaining();
        if lower.0.read(id, &mut sink, at, left)? == 0 {
            return Err(Errno::EIO);
        }
    }
    Ok(())
}

/// Where the next bytes of a read come from.
enum Piece {
    Moved(usize),
    Buffered(usize),
    Zeros(usize),
    Below(LowerId, usize),
}

/// Reads at `offset`; short at the end of the file.
///
/// A guest page that the copy touches may be one that the kernel maps on first
/// touch, from this very file, so the content must not be borrowed meanwhile:
/// bytes for such a page go through a buffer on the stack.
pub fn read(
    content: &KernelCell<Content>,
    lower: Option<&LowerLayer>,
    sink: &mut Sink<'_>,
    offset: u64,
) -> Result<usize> {
    let wanted = sink.remaining();
    if wanted <= 256 {
        read_through(&mut [0; 256], content, lower, sink, offset)
    } else {
        read_through(&mut [0; PAGE as usize], content, lower, sink, offset)
    }
}

fn read_through(
    buffer: &mut [u8],
    content: &KernelCell<Content>,
    lower: Option<&LowerLayer>,
    sink: &mut Sink<'_>,
    offset: u64,
) -> Result<usize> {
    let mut done = 0;
    while sink.remaining() > 0 {
        let at = match offset.checked_add(done as u64) {
            Some(at) => at,
            None => break,
        };
        let piece = {
            let mut content = content.borrow_mut();
            if at >= content.size {
                break;
            }
            content.recall_page(at / PAGE);
            let left = (content.size - at).min(sink.remaining() as u64);
            let page = at / PAGE;
            let in_page = (at % PAGE) as usize;
            if let Some(bytes) = content.pages.get(&page) {
                match content.put_pages(sink, at, left as usize) {
                    0 => {
                        let len = (PAGE as usize - in_page).min(left as usize).min(buffer.len());
                        buffer[..len].copy_from_slice(&bytes[in_page..in_page + len]);
                        Piece::Buffered(len)
                    }
                    count => Piece::Moved(count),
                }
            } else {
                let next = content
                    .pages
                    .range(page + 1..)
                    .next()
                    .map_or(u64::MAX, |(next, _)| next * PAGE);
                let run = left.min(next - at);
                match content.below {
                    Some(below) if at < below.len => {
                        Piece::Below(below.id, run.min(below.len - at) as usize)
                    }
                    _ => Piece::Zeros(run as usize),
                }
            }
        };
        let (asked, moved) = match piece {
            Piece::Moved(len) => (len, Ok(len)),
            Piece::Buffered(len) => (len, sink.put(&buffer[..len])),
            Piece::Zeros(len) => (len, sink.put_zeros(len)),
            Piece::Below(id, len) => {
                let lower = lower.ok_or(Errno::EIO)?;
                (len, lower.0.read(id, sink, at, len))
            }
        };
        match moved {
            Ok(count) => {
                done += count;
                if count < asked {
                    break;
                }
            }
            Err(error) if done == 0 => return Err(error),
            Err(_) => break,
        }
    }
    Ok(done)
}

/// Writes at `offset`, growing the file.
pub fn write(
    content: &KernelCell<Content>,
    lower: Option<&LowerLayer>,
    source: &mut Source<'_>,
    offset: u64,
    max: usize,
) -> Result<usize> {
    if source.remaining().min(max) <= 256 {
        write_through(&mut [0; 256], content, lower, source, offset, max)
    } else {
        write_through(&mut [0; PAGE as usize], content, lower, source, offset, max)
    }
}

fn write_through(
    buffer: &mut [u8],
    content: &KernelCell<Content>,
    lower: Option<&LowerLayer>,
    source: &mut Source<'_>,
    offset: u64,
    max: usize,
) -> Result<usize> {
    let (mut done, mut made) = (0, 0);
    while source.remaining() > 0 && done < max {
        let at = offset + done as u64;
        if done >= made {
            made = done + MADE.end;
            let len = source.remaining().min(max - done).min(MADE.end);
            content.borrow_mut().make_pages(at, len);
        }
        let in_page = (at % PAGE) as usize;
        let len = (PAGE as usize - in_page).min(max - done);
        let direct = content.borrow_mut().write_page(lower, at, |page| {
            source.take_where_present(&mut page[in_page..in_page + len])
        });
        let moved = match direct {
            Ok(0) => {
                let len = len.min(buffer.len());
                source.take(&mut buffer[..len]).and_then(|count| {
                    content.borrow_mut().write_page(lower, at, |page| {
                        page[in_page..in_page + count].copy_from_slice(&buffer[..count]);
                        count
                    })
                })
            }
            direct => direct,
        };
        match moved {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if done == 0 => return Err(error),
            Err(_) => break,
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Sandbox;
    use core::num::NonZeroU64;

    /// Larger than anybody could look at page by page.
    const HUGE: u64 = 1 << 62;

    #[test]
    fn a_hole_in_a_sparse_file_takes_no_look_at_what_is_not_there() {
        let _sandbox = Sandbox::new();
        let mut content = Content { size: HUGE, ..Content::default() };
        for page in [0, 1, 7, HUGE / PAGE - 1] {
            content.page_for_write(None, page).unwrap().fill(b'x');
        }
        content.punch(None, 10, HUGE).unwrap();
        assert_eq!(content.pages.keys().copied().collect::<Vec<_>>(), [0]);
        let first = content.page_for_write(None, 0).unwrap();
        assert!(first[..10] == [b'x'; 10] && first[10..].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn a_hole_keeps_pages_that_mappings_show() {
        let _sandbox = Sandbox::new();
        let mut content = Content { size: 3 * PAGE, ..Content::default() };
        for page in 0..3 {
            content.page_for_write(None, page).unwrap().fill(b'x');
        }
        let shown = content.pages[&1].address();
        kernel().pages.borrow_mut().share(shown);
        content.punch(None, 0, 3 * PAGE).unwrap();
        assert_eq!(content.pages.keys().copied().collect::<Vec<_>>(), [1]);
        assert!(content.pages[&1].iter().all(|&byte| byte == 0));
        kernel().pages.borrow_mut().release(shown);
        content.punch(None, 0, 3 * PAGE).unwrap();
        assert!(content.pages.is_empty());
    }

    #[test]
    fn an_allocation_of_more_than_there_is_takes_nothing() {
        let _sandbox = Sandbox::new();
        kernel().config.borrow_mut().memory_limit = 16 << 20;
        let mut content = Content::default();
        assert_eq!(content.allocate(None, 0, HUGE), Err(Errno::ENOSPC));
        assert!(content.pages.is_empty());
        content.allocate(None, 0, 3 * PAGE).unwrap();
        assert_eq!(content.pages.len(), 3);
        // What is there already is not asked for again.
        content.allocate(None, 0, 3 * PAGE).unwrap();
    }

    /// Another boot may be on another host, whose number counts.
    #[test]
    fn without_a_limit_the_memory_of_the_host_bounds_files() {
        let _sandbox = Sandbox::new();
        assert_eq!(kernel().config.get().memory_limit, 0);
        for mib in [16, 32] {
            crate::state::set_host_memory(NonZeroU64::new(mib << 20));
            assert_eq!(kernel().memory_total(), mib << 20);
            assert_eq!(page_counts().0, (mib << 20) / PAGE / 4 * 3);
            assert_eq!(Content::default().allocate(None, 0, HUGE), Err(Errno::ENOSPC));
            Content::default().allocate(None, 0, 3 * PAGE).unwrap();
        }
        kernel().config.borrow_mut().memory_limit = 8 << 20;
        assert_eq!(kernel().memory_total(), 8 << 20);
    }
}
