//! Giving back pages that a program has written and that are equal again to what they were: of an idle
//! Python more than half of those that it has for itself, since it counts references up and down.
//!
//! ```text
//! Sandbox::request_rest_to_trim ──▶ Event::Resting ──▶ Trimmer::find ──▶ Sandbox::trim ──▶ Sandbox::wake
//! ```
//!
//! A page that a process has written to is a copy of its own of a page of a file. Nothing of a
//! sandbox at rest changes, so where both are equal the copy can go: the next touch finds the page of
//! the file. What is mapped where is the host kernel's word (`/proc/PID/maps`), not the sandbox'.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytemuck::{Pod, Zeroable, bytes_of, cast_slice, pod_read_unaligned};
use thaw_abi::PAGE_SIZE;
use thaw_abi::control::{
    MSG_REST, MSG_TRIM, REST_TIMERS, REST_TO_TRIM, Rest, Resting, TRIM_RANGES_MAX, Trim, TrimRange,
};
use thaw_abi::layout::GUEST_MAX;

use crate::message;
use crate::pagemap::PageMap;
use crate::sandbox::Sandbox;
use crate::state::protocol::{ANSWER_DONE, REQUEST_UNCHANGED, UnchangedRequest};
use crate::state::{Space, StateError, Subject};

/// Most files that pages are compared with, an image and its nearest ancestors: a packet brings 16
/// descriptors, two of which are the worker's socket and the pidfd of the sandbox.
pub const FILES_MAX: usize = 14;
/// How long may be compared: a guest can have more pages than anybody has time for, and others of
/// the same zygote parent wait for the state helper. What was found until then counts.
const COMPARING_MAX: Duration = Duration::from_millis(100);
/// How long the state helper may take for it.
const HELPER_MAX: Duration = Duration::from_secs(3);
/// Most bytes of `/proc/PID/maps` that are looked at.
const MAPS_MAX: usize = 8 << 20;
/// Most bytes that are compared: each page may have to be read from a disk.
const COMPARED_MAX: u64 = 64 << 20;
/// Bytes that are compared at a time.
const AT_ONCE: u64 = 64 * PAGE_SIZE;

/// A file, as `/proc/PID/maps` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct FileId {
    major: u32,
    minor: u32,
    inode: u64,
}

impl FileId {
    fn of(file: &File) -> io::Result<Self> {
        let status = file.metadata()?;
        let device = status.dev();
        Ok(Self { major: libc::major(device), minor: libc::minor(device), inode: status.ino() })
    }
}

/// What is needed of a sandbox at rest to find the pages that it can give back, on another thread
/// than the one that serves it.
#[derive(Debug)]
pub struct Trimmer {
    subject: Subject,
    rest: u64,
    files: Vec<Arc<File>>,
}

/// Pages that a sandbox can give back as long as it rests.
#[derive(Clone, Debug)]
pub struct Unchanged {
    rest: u64,
    ranges: Vec<TrimRange>,
}

impl Unchanged {
    /// Bytes that can be given back.
    pub fn bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.len).fold(0, u64::saturating_add)
    }
}

impl Sandbox {
    /// Asks the sandbox to come to rest to be trimmed, as [`Sandbox::request_rest`] does. Due timers of
    /// the program end the rest.
    ///
    /// # Errors
    /// It has ended.
    pub fn request_rest_to_trim(&mut self, number: u64) -> io::Result<()> {
        self.forget_held();
        let rest = Rest { number, flags: REST_TIMERS | REST_TO_TRIM, reserved: 0 };
        self.send(message::message(MSG_REST, &rest), Vec::new())?;
        self.process().ring()
    }

    /// Begins to compare the memory of the sandbox, which is at rest, with the first
    /// [`FILES_MAX`] of these files: its image and the ancestors of that.
    ///
    /// # Errors
    /// It has ended.
    pub fn trimmer(&self, resting: Resting, mut files: Vec<Arc<File>>) -> io::Result<Trimmer> {
        files.truncate(FILES_MAX);
        Ok(Trimmer { subject: self.subject()?, rest: resting.number, files })
    }

    /// Lets the sandbox, which is still at rest, give back what was found. One that has gone on
    /// meanwhile does nothing.
    ///
    /// # Errors
    /// It has ended.
    pub fn trim(&mut self, unchanged: &Unchanged) -> io::Result<()> {
        let count = unchanged.ranges.len() as u32;
        let head = Trim { number: unchanged.rest, count, reserved: 0 };
        let ranges: &[u8] = cast_slice(&unchanged.ranges);
        let header = message::header(MSG_TRIM, size_of_val(&head) + ranges.len(), 0);
        let message = [bytes_of(&header), bytes_of(&head), ranges].concat();
        self.send_at_rest(message, Vec::new())
    }
}

impl Trimmer {
    /// Finds the pages. Another process does so; it takes milliseconds, and not much longer than a
    /// tenth of a second once other sandboxes have been read.
    ///
    /// # Errors
    /// The sandbox has ended ([`io::ErrorKind::NotFound`]), or the host's error.
    pub fn find(self) -> io::Result<Unchanged> {
        let mut ids = [FileId::zeroed(); FILES_MAX];
        for (id, file) in ids.iter_mut().zip(&self.files) {
            *id = FileId::of(file)?;
        }
        let request =
            UnchangedRequest { kind: REQUEST_UNCHANGED, count: self.files.len() as u32, ids };
        let files: Vec<BorrowedFd<'_>> = self.files.iter().map(|file| file.as_fd()).collect();
        let found = self.subject.ask(bytes_of(&request), &files, HELPER_MAX, |helper| {
            let (answer, text) = helper.finish()?;
            if answer.kind != ANSWER_DONE {
                return Ok(Err(answer.host_error(&text)));
            }
            let most = TRIM_RANGES_MAX * size_of::<TrimRange>();
            let bytes = helper.bytes(answer.numbers[0], most)?;
            let ranges = bytes.chunks_exact(size_of::<TrimRange>());
            if !ranges.remainder().is_empty() {
                return Err(StateError::Nonsense("its ranges are cut off"));
            }
            Ok(Ok(ranges.map(pod_read_unaligned).collect()))
        });
        let ranges = found?.map_err(|error| match error.raw_os_error() {
            Some(libc::ESRCH) => io::ErrorKind::NotFound.into(),
            _ => error,
        })?;
        Ok(Unchanged { rest: self.rest, ranges })
    }
}

/// A private mapping of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mapped {
    start: u64,
    end: u64,
    offset: u64,
    file: FileId,
}

impl Mapped {
    /// A line of `/proc/PID/maps` (proc_pid_maps(5)); `None`: the mapping is shared, of no file, or
    /// not the guest's.
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let (permissions, offset) = (fields.next()?, fields.next()?);
        let (major, minor) = fields.next()?.split_once(':')?;
        let inode = fields.next()?.parse().ok()?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        let device = |text| u32::from_str_radix(text, 16).ok();
        let file = FileId { major: device(major)?, minor: device(minor)?, inode };
        let mapped =
            Self { start: number(start)?, end: number(end)?, offset: number(offset)?, file };
        let is_wanted = permissions.ends_with('p') && inode != 0 && mapped.end <= GUEST_MAX;
        is_wanted.then_some(mapped)
    }
}

/// Finds the pages of a process at rest that are equal to those of the files that they are private
/// copies of, as many as can be found in time: what the state helper does.
///
/// # Errors
/// The host's: the process has ended.
pub(crate) fn find(
    space: Space,
    maps: &File,
    files: &[(FileId, File)],
) -> io::Result<Vec<TrimRange>> {
    let Space { memory, pages } = space;
    let deadline = Instant::now() + COMPARING_MAX;
    let mut search = Search {
        memory,
        pages: pages.until(deadline),
        deadline,
        left: COMPARED_MAX,
        found: Ranges::default(),
    };
    for mapped in read_to_end(maps)?.lines().filter_map(Mapped::parse) {
        let Some((_, file)) = files.iter().find(|(id, _)| *id == mapped.file) else { continue };
        match search.look_at(&mapped, file) {
            Ok(()) if search.is_over() => break,
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::TimedOut => break,
            Err(error) => return Err(error),
        }
    }
    Ok(search.found.0)
}

/// A process at rest, and what is known of it.
struct Search {
    memory: File,
    pages: PageMap,
    deadline: Instant,
    /// Bytes that may still be compared.
    left: u64,
    found: Ranges,
}

impl Search {
    /// Whether there is no time or room for more.
    fn is_over(&self) -> bool {
        self.left == 0 || self.found.is_full() || Instant::now() >= self.deadline
    }

    /// Compares the private pages of a mapping with its file, until the search is over.
    fn look_at(&mut self, mapped: &Mapped, file: &File) -> io::Result<()> {
        let mut runs = Vec::new();
        self.pages.private_runs(mapped.start, mapped.end, |run| runs.push(run))?;
        for run in runs {
            let (mut at, end) = (run.start.max(mapped.start), run.end.min(mapped.end));
            while at < end && !self.is_over() {
                let len = (end - at).min(AT_ONCE).min(self.left);
                self.left -= len;
                let offset = mapped.offset + (at - mapped.start);
                compare(&self.memory, file, at, len, offset, &mut self.found)?;
                at += len;
            }
        }
        Ok(())
    }
}

/// Notes the pages of `len` bytes at `address` that are equal to those in the file at `offset`.
fn compare(
    memory: &File,
    file: &File,
    address: u64,
    len: u64,
    offset: u64,
    ranges: &mut Ranges,
) -> io::Result<()> {
    let (mut own, mut there) = (vec![0; len as usize], vec![0; len as usize]);
    memory.read_exact_at(&mut own, address)?;
    // Behind its end a file has nothing to be equal to.
    let known = read_at_most(file, &mut there, offset)? / PAGE_SIZE as usize;
    let page = PAGE_SIZE as usize;
    for (number, (own, there)) in own.chunks(page).zip(there.chunks(page)).take(known).enumerate() {
        if own == there {
            ranges.push(address + number as u64 * PAGE_SIZE);
        }
    }
    Ok(())
}

/// Pages, neighbours together, in order.
#[derive(Default)]
struct Ranges(Vec<TrimRange>);

impl Ranges {
    fn push(&mut self, start: u64) {
        let is_full = self.is_full();
        match self.0.last_mut() {
            Some(last) if last.start + last.len == start => last.len += PAGE_SIZE,
            _ if is_full => {}
            _ => self.0.push(TrimRange { start, len: PAGE_SIZE }),
        }
    }

    fn is_full(&self) -> bool {
        self.0.len() >= TRIM_RANGES_MAX
    }
}

/// Fills a buffer from a file as far as that goes; the bytes read.
fn read_at_most(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut len = 0;
    while len < buffer.len() {
        match file.read_at(&mut buffer[len..], offset + len as u64) {
            Ok(0) => break,
            Ok(read) => len += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(len)
}

/// The whole lines of a file of `/proc`, up to a bound.
fn read_to_end(file: &File) -> io::Result<String> {
    let mut text = vec![0; 64 << 10];
    let mut len = 0;
    loop {
        if len == text.len() {
            if len >= MAPS_MAX {
                break;
            }
            text.resize(len * 2, 0);
        }
        match file.read_at(&mut text[len..], len as u64)? {
            0 => break,
            read => len += read,
        }
    }
    text.truncate(len);
    let whole = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |last| last + 1);
    Ok(String::from_utf8_lossy(&text[..whole]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::c_void;

    const P: usize = PAGE_SIZE as usize;

    #[test]
    fn private_mappings_of_files_are_read() {
        let line = "7f5e98687000-7f5e9868b000 rw-p 00201000 fe:10 10297669   /home/x (deleted)";
        let file = FileId { major: 0xfe, minor: 0x10, inode: 10_297_669 };
        let mapped =
            Mapped { start: 0x7f5e_9868_7000, end: 0x7f5e_9868_b000, offset: 0x20_1000, file };
        assert_eq!(Mapped::parse(line), None, "it is not the guest's");
        let guest = line.replace("7f5e9", "00001");
        let here = |address: u64| address - 0x7f5e_9000_0000 + 0x1000_0000;
        let mapped = Mapped { start: here(mapped.start), end: here(mapped.end), ..mapped };
        assert_eq!(Mapped::parse(&guest), Some(mapped));
        assert_eq!(Mapped::parse(&guest.replace("rw-p", "rw-s")), None);
        assert_eq!(Mapped::parse(&guest.replace("10297669", "0")), None);
        for cut in 0..40 {
            assert_eq!(Mapped::parse(&guest[..cut]), None, "{cut}");
        }
    }

    /// Private copies of pages of this process, four of a file and one that is mapped elsewhere.
    #[test]
    fn only_copies_that_are_equal_are_found() {
        let file = tempfile::tempfile().unwrap();
        let content: Vec<u8> = (1..=5u8).flat_map(|page| [page; P]).collect();
        file.write_all_at(&content[..4 * P + 100], 0).unwrap();
        let memory = Map::at(0x3_0000_0000, Some(&file), 5);
        // Written and equal, written and changed, only read, written and equal.
        memory.write(0, &[1; P]);
        memory.write(P, &[9]);
        assert_eq!(memory.read(2 * P), 3);
        memory.write(3 * P, &[4]);
        // The file ends in this one.
        memory.write(4 * P, &[5]);
        // The same content, without the file.
        let elsewhere = Map::at(0x3_1000_0000, None, 1);
        elsewhere.write(0, &[1; P]);
        let found = find_here(&file);
        let at =
            |page: usize| TrimRange { start: memory.0 as u64 + (page * P) as u64, len: PAGE_SIZE };
        assert_eq!(found, [at(0), at(3)]);
        // They can go, and the others stay.
        memory.discard(0);
        memory.discard(3);
        let first_bytes: Vec<u8> = (0..5).map(|page| memory.read(page * P)).collect();
        assert_eq!(first_bytes, [1, 9, 3, 4, 5]);
        assert_eq!(find_here(&file), []);
    }

    /// A search ends where its time or its bytes do, with what it has found.
    #[test]
    fn a_search_has_an_end() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; 4 * P], 0).unwrap();
        let memory = Map::at(0x3_2000_0000, Some(&file), 4);
        memory.write(0, &[7; 4 * P]);
        let start = memory.0 as u64;
        let mapped = Mapped {
            start,
            end: start + 4 * PAGE_SIZE,
            offset: 0,
            file: FileId::of(&file).unwrap(),
        };
        let found = |left, time| {
            let (memory, pages) = (File::open("/proc/self/mem").unwrap(), PageMap::own().unwrap());
            let deadline = Instant::now() + time;
            let mut search = Search { memory, pages, deadline, left, found: Ranges::default() };
            search.look_at(&mapped, &file).unwrap();
            search.found.0.iter().map(|range| range.len).sum::<u64>()
        };
        let long = Duration::from_secs(60);
        assert_eq!(found(COMPARED_MAX, long), 4 * PAGE_SIZE);
        assert_eq!(found(2 * PAGE_SIZE, long), 2 * PAGE_SIZE);
        assert_eq!(found(COMPARED_MAX, Duration::ZERO), 0);
    }

    #[test]
    fn so_many_ranges_are_found_at_most() {
        let mut ranges = Ranges::default();
        for page in 0..3 * TRIM_RANGES_MAX as u64 {
            ranges.push(2 * page * PAGE_SIZE);
        }
        assert_eq!(ranges.0.len(), TRIM_RANGES_MAX);
    }

    fn find_here(file: &File) -> Vec<TrimRange> {
        let space =
            Space { memory: File::open("/proc/self/mem").unwrap(), pages: PageMap::own().unwrap() };
        let maps = File::open("/proc/self/maps").unwrap();
        let files = [(FileId::of(file).unwrap(), file.try_clone().unwrap())];
        find(space, &maps, &files).unwrap()
    }

    /// Memory of this process where a guest may have some.
    struct Map(*mut u8, usize);

    #[allow(unsafe_code)]
    impl Map {
        fn at(wanted: u64, file: Option<&File>, pages: usize) -> Self {
            use std::os::fd::AsRawFd;
            let (kind, descriptor) = match file {
                Some(file) => (libc::MAP_PRIVATE, file.as_raw_fd()),
                None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
            };
            let wanted = wanted as *mut c_void;
            let prot = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: a new mapping, whose address is a wish.
            let start = unsafe { libc::mmap(wanted, pages * P, prot, kind, descriptor, 0) };
            assert!(start != libc::MAP_FAILED && (start as u64) < GUEST_MAX);
            Self(start.cast(), pages * P)
        }

        fn write(&self, at: usize, bytes: &[u8]) {
            assert!(at + bytes.len() <= self.1);
            // SAFETY: within the mapping, which nobody else refers to.
            unsafe { self.0.add(at).copy_from(bytes.as_ptr(), bytes.len()) }
        }

        fn read(&self, at: usize) -> u8 {
            assert!(at < self.1);
            // SAFETY: as above.
            unsafe { self.0.add(at).read_volatile() }
        }

        fn discard(&self, page: usize) {
            // SAFETY: as above.
            let result =
                unsafe { libc::madvise(self.0.add(page * P).cast(), P, libc::MADV_DONTNEED) };
            assert_eq!(result, 0);
        }
    }

    #[allow(unsafe_code)]
    impl Drop for Map {
        fn drop(&mut self) {
            // SAFETY: nobody refers to it any more.
            unsafe { libc::munmap(self.0.cast(), self.1) };
        }
    }
}
