//! Which pages of another process are there, and of what kind
//! (`/proc/PID/pagemap`, Documentation/admin-guide/mm/pagemap.rst).
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::mem;
use std::ops::{ControlFlow, Range};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use thaw_abi::PAGE_SIZE;

/// What is known about a page that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageKind {
    /// Private memory of the process, written at least once, in memory or swapped out.
    Private,
    /// A page of a file or of shared memory.
    File,
    /// The page of zeros that anonymous memory shows before it is written.
    Zero,
}

/// A run of neighbouring pages of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageRun {
    /// First byte.
    pub start: u64,
    /// End, exclusive.
    pub end: u64,
    pub kind: PageKind,
}

/// The page map of a process.
pub(crate) struct PageMap {
    file: File,
    /// The host kernel finds runs itself (Linux 6.7); without that, every page
    /// of a range has an entry to be read.
    scan: bool,
    /// When looking ends, however much there is to look at.
    deadline: Option<Instant>,
    /// What was looked at ahead.
    ahead: Ahead,
}

/// Where a process that does not run was looked at, and its private pages there.
#[derive(Default)]
struct Ahead {
    known: Range<u64>,
    /// In order; they do not touch.
    runs: Vec<Range<u64>>,
}

/// Which pages that are there are reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    All,
    /// Not the page of zeros, where the host kernel can tell.
    NotZero,
    /// Only private memory, where the host kernel can tell.
    Private,
}

/// Most bytes of address space that the host kernel looks at in one call, which
/// nothing but the end of this process interrupts.
const SCAN_MAX: u64 = 1 << 36;
/// Bytes of address space that are looked at at a time where a process does not run: a call for each
/// of hundreds of mappings takes longer than to look at their pages.
const AHEAD: u64 = 1 << 30;
/// The end of what a process can have (Documentation/arch/x86/x86_64/mm.rst, with four levels).
const SPACE_END: u64 = (1 << 47) - PAGE_SIZE;
/// Most bytes of address space whose entries are read one by one.
const ENTRIES_MAX: u64 = 1 << 40;

impl PageMap {
    /// Reads the given `/proc/PID/pagemap`.
    pub fn new(file: File) -> Self {
        Self { file, scan: true, deadline: None, ahead: Ahead::default() }
    }

    /// The same, with an end: a process can have more pages than anybody has time
    /// for. From then on looking fails with [`io::ErrorKind::TimedOut`].
    pub fn until(self, deadline: Instant) -> Self {
        Self { deadline: Some(deadline), ..self }
    }

    /// The page map of this process.
    pub fn own() -> io::Result<Self> {
        Ok(Self::new(File::open("/proc/self/pagemap")?))
    }

    /// Calls `found` for each run of pages that are there between two page
    /// boundaries, in order. Neighbouring runs may be of one kind.
    pub fn runs(&mut self, start: u64, end: u64, mut found: impl FnMut(PageRun)) -> io::Result<()> {
        self.walk(start, end, Wanted::All, &mut |run| {
            found(run);
            ControlFlow::Continue(())
        })
    }

    /// The same without the page of zeros, where the host kernel can tell (Linux
    /// 6.7): a guest can read any number of those at no cost.
    pub fn runs_with_content(
        &mut self,
        start: u64,
        end: u64,
        mut found: impl FnMut(PageRun),
    ) -> io::Result<()> {
        self.walk(start, end, Wanted::NotZero, &mut |run| {
            found(run);
            ControlFlow::Continue(())
        })
    }

    /// Calls `found` for each run of private pages between two page boundaries, in order.
    pub fn private_runs(
        &mut self,
        start: u64,
        end: u64,
        mut found: impl FnMut(Range<u64>),
    ) -> io::Result<()> {
        self.walk(start, end, Wanted::Private, &mut |run| {
            if run.kind == PageKind::Private {
                found(run.start..run.end);
            }
            ControlFlow::Continue(())
        })
    }

    /// The runs of private pages between two page boundaries, in order, of a process that does not run
    /// as long as this is asked. Whoever asks for neighbouring parts in order asks the host kernel
    /// once for many of them.
    pub fn private_runs_at_rest(&mut self, part: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        if part.start < self.ahead.known.start || part.end > self.ahead.known.end {
            self.look_ahead(&part)?;
        }
        let runs = &self.ahead.runs;
        let first = runs.partition_point(|run| run.end <= part.start);
        let within = runs[first..].iter().take_while(|run| run.start < part.end);
        Ok(within.map(|run| run.start.max(part.start)..run.end.min(part.end)).collect())
    }

    fn look_ahead(&mut self, part: &Range<u64>) -> io::Result<()> {
        let mut runs = mem::take(&mut self.ahead).runs;
        runs.clear();
        // Entry by entry, more would take longer.
        let further = if self.scan { part.start.saturating_add(AHEAD).min(SPACE_END) } else { 0 };
        let known = part.start..part.end.max(further);
        self.private_runs(known.start, known.end, |run| match runs.last_mut() {
            Some(last) if last.end >= run.start => last.end = last.end.max(run.end),
            _ => runs.push(run),
        })?;
        self.ahead = Ahead { known, runs };
        Ok(())
    }

    /// The first run of pages that are there, if there are any.
    pub fn first(&mut self, start: u64, end: u64) -> io::Result<Option<PageRun>> {
        let mut first = None;
        self.walk(start, end, Wanted::All, &mut |run| {
            first = Some(run);
            ControlFlow::Break(())
        })?;
        Ok(first)
    }

    fn walk(
        &mut self,
        start: u64,
        end: u64,
        wanted: Wanted,
        found: &mut dyn FnMut(PageRun) -> ControlFlow<()>,
    ) -> io::Result<()> {
        if self.scan {
            match self.scan(start, end, wanted, found) {
                // ENOTTY: a kernel without the call. Nothing was reported yet.
                Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => self.scan = false,
                result => return result,
            }
        }
        self.read(start, end, found)
    }

    fn check_time(&self) -> io::Result<()> {
        match self.deadline {
            Some(deadline) if Instant::now() >= deadline => Err(io::ErrorKind::TimedOut.into()),
            _ => Ok(()),
        }
    }

    fn scan(
        &self,
        start: u64,
        end: u64,
        wanted: Wanted,
        found: &mut dyn FnMut(PageRun) -> ControlFlow<()>,
    ) -> io::Result<()> {
        const REGIONS: usize = 512;
        let mut regions = [Region::default(); REGIONS];
        // With its bit inverted, a category is required to be absent.
        let absent = match wanted {
            Wanted::All => 0,
            Wanted::NotZero => PAGE_IS_PFNZERO,
            Wanted::Private => PAGE_IS_PFNZERO | PAGE_IS_FILE,
        };
        let mut from = start;
        while from < end {
            self.check_time()?;
            let mut request = ScanRequest {
                size: size_of::<ScanRequest>() as u64,
                start: from,
                end: end.min(from.saturating_add(SCAN_MAX)),
                vec: regions.as_mut_ptr() as u64,
                vec_len: REGIONS as u64,
                category_inverted: absent,
                category_mask: absent,
                category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
                return_mask: PAGE_IS_FILE | PAGE_IS_PFNZERO | PAGE_IS_PRESENT,
                ..ScanRequest::default()
            };
            // SAFETY: the request names its own size, and `vec_len` regions at
            // `vec`, which the kernel may fill; both live through the call.
            let count =
                unsafe { libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN as _, &raw mut request) };
            if count < 0 {
                return Err(io::Error::last_os_error());
            }
            for region in &regions[..count as usize] {
                let kind = match region.categories & !absent {
                    bits if bits & PAGE_IS_PFNZERO != 0 => PageKind::Zero,
                    bits if bits & PAGE_IS_FILE != 0 => PageKind::File,
                    _ => PageKind::Private,
                };
                if found(PageRun { start: region.start, end: region.end, kind }).is_break() {
                    return Ok(());
                }
            }
            if request.walk_end <= from {
                break;
            }
            from = request.walk_end;
        }
        Ok(())
    }

    fn read(
        &self,
        start: u64,
        end: u64,
        found: &mut dyn FnMut(PageRun) -> ControlFlow<()>,
    ) -> io::Result<()> {
        const PRESENT: u64 = 1 << 63;
        const SWAPPED: u64 = 1 << 62;
        const FILE: u64 = 1 << 61;
        if end.saturating_sub(start) > ENTRIES_MAX {
            return Err(io::Error::from(io::ErrorKind::OutOfMemory));
        }
        let mut entries = vec![0_u64; 32 * 1024];
        let mut from = start;
        while from < end {
            self.check_time()?;
            let count = (((end - from) / PAGE_SIZE) as usize).min(entries.len());
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut entries[..count]);
            self.file.read_exact_at(bytes, from / PAGE_SIZE * 8)?;
            let mut run: Option<PageRun> = None;
            for (number, entry) in entries[..count].iter().enumerate() {
                let start = from + number as u64 * PAGE_SIZE;
                let kind = match entry {
                    entry if entry & (PRESENT | SWAPPED) == 0 => None,
                    entry if entry & FILE != 0 => Some(PageKind::File),
                    _ => Some(PageKind::Private),
                };
                match (&mut run, kind) {
                    (Some(run), Some(kind)) if run.kind == kind => run.end = start + PAGE_SIZE,
                    (_, kind) => {
                        if let Some(run) = run.take()
                            && found(run).is_break()
                        {
                            return Ok(());
                        }
                        run = kind.map(|kind| PageRun { start, end: start + PAGE_SIZE, kind });
                    }
                }
            }
            if let Some(run) = run
                && found(run).is_break()
            {
                return Ok(());
            }
            from += count as u64 * PAGE_SIZE;
        }
        Ok(())
    }
}

/// `PAGEMAP_SCAN`: `_IOWR('f', 16, struct pm_scan_arg)` (linux/fs.h).
pub(crate) const PAGEMAP_SCAN: u64 = 0xc060_6610;
const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;

/// `struct pm_scan_arg`.
#[derive(Default)]
#[repr(C)]
struct ScanRequest {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
    use std::ptr;

    const PAGES: u64 = 64;

    /// A range with pages written, pages read and pages untouched, over
    /// anonymous memory and over a file.
    fn memory(file: Option<&File>) -> u64 {
        let len = (PAGES * PAGE_SIZE) as usize;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe {
            match file {
                Some(file) => mmap(ptr::null_mut(), len, protection, MapFlags::PRIVATE, file, 0),
                None => mmap_anonymous(ptr::null_mut(), len, protection, MapFlags::PRIVATE),
            }
        }
        .unwrap();
        for page in [3, 4, 40] {
            // SAFETY: inside the mapping above, which stays for the whole test.
            unsafe { start.cast::<u8>().add((page * PAGE_SIZE) as usize).write_volatile(7) };
        }
        // SAFETY: as above.
        let _ = unsafe { start.cast::<u8>().add((20 * PAGE_SIZE) as usize).read_volatile() };
        start as u64
    }

    fn pages(map: &mut PageMap, start: u64) -> Vec<Option<PageKind>> {
        let mut kinds = vec![None; PAGES as usize];
        map.runs(start, start + PAGES * PAGE_SIZE, |run| {
            for page in (run.start - start) / PAGE_SIZE..(run.end - start) / PAGE_SIZE {
                kinds[page as usize] = Some(run.kind);
            }
        })
        .unwrap();
        kinds
    }

    #[test]
    fn zeros_are_left_out_where_they_are_not_wanted() {
        let start = memory(None);
        let mut map = PageMap::own().unwrap();
        let mut starts = Vec::new();
        let end = start + PAGES * PAGE_SIZE;
        map.runs_with_content(start, end, |run| starts.push(run.start)).unwrap();
        let zero = start + 20 * PAGE_SIZE;
        assert!(starts.contains(&(start + 3 * PAGE_SIZE)) && starts.len() >= 2);
        // A kernel that cannot scan cannot tell either.
        assert!(!map.scan || !starts.contains(&zero));
        for scan in [map.scan, false] {
            map.scan = scan;
            let first = map.first(start + 5 * PAGE_SIZE, end).unwrap();
            assert_eq!(first.map(|run| run.start), Some(zero));
            assert_eq!(map.first(start + 50 * PAGE_SIZE, end).unwrap(), None);
        }
    }

    #[test]
    fn who_looks_ahead_finds_the_same() {
        for scan in [true, false] {
            let start = memory(None);
            let end = start + PAGES * PAGE_SIZE;
            let mut map = PageMap::own().unwrap();
            map.scan = scan;
            let mut expected: Vec<Range<u64>> = Vec::new();
            map.private_runs(start, end, |run| match expected.last_mut() {
                Some(last) if last.end == run.start => last.end = run.end,
                _ => expected.push(run),
            })
            .unwrap();
            assert!(expected.len() > 1);
            assert_eq!(map.private_runs_at_rest(start..end).unwrap(), expected);
            // Page by page, from what is known, and before that.
            for map in [&mut map, &mut PageMap { scan, ..PageMap::own().unwrap() }] {
                for number in (0..PAGES).chain([3, 0]) {
                    let page = start + number * PAGE_SIZE..start + (number + 1) * PAGE_SIZE;
                    let has_it = expected.iter().any(|run| run.contains(&page.start));
                    let found = map.private_runs_at_rest(page.clone()).unwrap();
                    assert_eq!(found, if has_it { vec![page] } else { vec![] });
                }
            }
        }
    }

    #[test]
    fn looking_ends_when_it_must() {
        let file = File::open("/proc/self/pagemap").unwrap();
        let mut map = PageMap::new(file).until(Instant::now());
        for scan in [true, false] {
            map.scan = scan;
            let outcome = map.runs(0, 1 << 30, |_| panic!("there is no time"));
            assert_eq!(outcome.unwrap_err().kind(), io::ErrorKind::TimedOut);
        }
    }

    #[test]
    fn written_pages_are_private_and_the_rest_is_not() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(PAGES * PAGE_SIZE).unwrap();
        for file in [None, Some(&file)] {
            let start = memory(file);
            for scan in [true, false] {
                let mut map = PageMap::own().unwrap();
                map.scan = scan;
                let kinds = pages(&mut map, start);
                let private: Vec<usize> = (0..kinds.len())
                    .filter(|&page| kinds[page] == Some(PageKind::Private))
                    .filter(|&page| file.is_some() || page != 20)
                    .collect();
                assert_eq!(private, [3, 4, 40], "scan {scan}");
                assert_eq!(kinds[60], None);
                match file {
                    Some(_) => assert_eq!(kinds[20], Some(PageKind::File)),
                    // Page by page, the zero page looks like any other.
                    None => assert!(kinds[20].is_some()),
                }
            }
        }
    }
}
