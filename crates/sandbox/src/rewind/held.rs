//! One sandbox and the state in which it waited to be wanted: taking that down, and putting
//! the sandbox back into it.
//!
//! The guest shares its address space with its kernel, so nothing in the process is to be
//! trusted after it has run: not its memory, not what its kernel would say. All that makes a
//! process is taken down and put back from outside: registers, signals, mappings,
//! descriptors, timers and memory. Where a host call is needed, the process is made to execute
//! one `syscall` instruction of the kernel's text, after it was checked that this page is still
//! the sealed file's, and what it has done is looked at again from outside.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use thaw_abi::PAGE_SIZE;
use thaw_abi::layout::{CONTROL_FD, KERNEL_BASE, KERNEL_END};

use super::layout::{Access, Backing, Layout, Region, Repair};
use super::process::{FileId, OpenFile, Process};
use super::protocol::Reason;
use super::trace::{SYSCALL_LEN, Stopped, ThreadState};

/// Most pages that are kept of one sandbox, 32 MiB: one that writes more is not worth it.
pub const PAGES_MAX: usize = 8192;
/// Most host calls that a rewind may take to put mappings right.
const REPAIRS_MAX: usize = 64;
/// Most runs of pages that a rewind sees for the first time.
const NEW_RUNS_MAX: usize = 512;
/// Most descriptors that a rewind closes.
const CLOSES_MAX: usize = 64;
/// Most parts of one write (`UIO_MAXIOV` of readv(2) is 1024).
const PARTS_MAX: usize = 512;
const EXECUTE: u32 = libc::PROT_EXEC as u32;
const WRITE: u32 = libc::PROT_WRITE as u32;
/// Bytes of `struct itimerval` and of `stack_t`, whichever is longer.
const SCRATCH_LEN: usize = 32;
/// How often it is looked whether a sandbox waits yet, and how long between two looks.
const STOPS_MAX: u32 = 100;
const STOP_INTERVAL: Duration = Duration::from_millis(1);
/// Bytes below the stack pointer where scratch memory lies; the red zone is 128.
const SCRATCH_BELOW: u64 = 1024;

/// Why a sandbox cannot be put back: it is to be ended.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The host does not do what is needed.
    #[error("{0}")]
    Host(#[from] io::Error),
    /// It has more than one thread or process.
    #[error("it has several threads or processes")]
    NotAlone,
    /// It is not where a sandbox waits that was booted ahead.
    #[error("it does not wait for its second boot command")]
    NotWaiting,
    /// It has written too much.
    #[error("it has written more than {} MiB", (PAGES_MAX as u64 * PAGE_SIZE) >> 20)]
    TooManyPages,
    /// Too much has changed in what it has mapped.
    #[error("its mappings have changed too much")]
    TooManyRepairs,
    /// It has memory that others may see.
    #[error("it shares memory")]
    Shared,
    /// The kernel's text is not what it was.
    #[error("the text of its kernel was changed")]
    Text,
    /// A descriptor that it began with is not there any more.
    #[error("descriptor {0} is not what it was")]
    Descriptor(u32),
    /// Too many descriptors are open.
    #[error("it has opened too many files")]
    TooManyFiles,
    /// A mapping cannot be made again.
    #[error("its mapping at {0:#x} cannot be made again")]
    Mapping(u64),
    /// What was put right is not right.
    #[error("what was put right is not right: {0}")]
    NotRight(&'static str),
}

impl Refusal {
    /// What it counts as.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Host(error) if error.raw_os_error() == Some(libc::ESRCH) => Reason::Ended,
            Self::Host(_) | Self::NotWaiting | Self::NotRight(_) => Reason::Other,
            Self::NotAlone => Reason::Processes,
            Self::TooManyPages => Reason::Pages,
            Self::TooManyRepairs | Self::Shared | Self::Mapping(_) => Reason::Mappings,
            Self::Text => Reason::Text,
            Self::Descriptor(_) | Self::TooManyFiles => Reason::Files,
        }
    }
}

/// What a rewind took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Effort {
    /// Pages whose content was written back.
    pub pages: u64,
    /// Host calls made in the name of the process.
    pub calls: u64,
    /// Processor time of the rewinder.
    pub processor_time: Duration,
}

type Page = Rc<[u8; PAGE_SIZE as usize]>;

/// What sandboxes with the same mappings, copies of one image, have in common: most of their
/// pages. Written from one place, they stay in the processor's caches.
#[derive(Default)]
pub struct Kin(RefCell<BTreeMap<u64, Page>>);

impl Kin {
    /// A page with this content, which may be that of another sandbox.
    fn page(&self, address: u64, content: [u8; PAGE_SIZE as usize]) -> Page {
        let mut pages = self.0.borrow_mut();
        match pages.get(&address) {
            Some(known) if **known == content => known.clone(),
            Some(_) => Rc::new(content),
            None => pages.entry(address).or_insert(Rc::new(content)).clone(),
        }
    }
}

/// A page that the sandbox has written at some time.
struct Kept {
    content: Page,
    /// It was written already when the state was taken down. Otherwise the content is that of
    /// the mapping behind it.
    is_own: bool,
}

/// A sandbox, and the state that it is put back into.
pub struct Held {
    process: Process,
    thread: ThreadState,
    layout: Layout,
    /// The text in which the host last gave this layout: it may give others.
    maps: Vec<u8>,
    files: Vec<OpenFile>,
    pages: BTreeMap<u64, Kept>,
    kin: Rc<Kin>,
    /// Its signal stack, as sigaltstack(2) gave it; `None`: the filter does not let it change.
    signal_stack: Option<[u8; SCRATCH_LEN]>,
}

impl Held {
    /// Takes down the state of a sandbox that waits for its second boot command, beside that of
    /// others.
    pub fn new<'a>(
        mut process: Process,
        mut others: impl Iterator<Item = &'a Self>,
    ) -> Result<Self, Refusal> {
        let (stopped, thread) = stop_where_it_waits(&process)?;
        if !process.is_alone()? {
            return Err(Refusal::NotAlone);
        }
        let mut maps = Vec::new();
        process.read_maps(&mut maps)?;
        let layout = Layout::parse_bytes(&maps)?;
        if layout.regions().iter().any(is_shared) {
            return Err(Refusal::Shared);
        }
        let files = process.open_files()?;
        let kin = others.find(|other| other.layout == layout).map(|other| other.kin.clone());
        let (pages, kin) = (BTreeMap::new(), kin.unwrap_or_default());
        let mut held =
            Self { process, thread, layout, maps, files, pages, kin, signal_stack: None };
        let private = held.private_pages()?;
        held.check_site(&held.layout, &private)?;
        held.signal_stack = held.ask_signal_stack(&stopped)?;
        // With the scratch memory.
        for run in held.private_pages()? {
            held.keep(run, true)?;
        }
        stopped.set_state(&held.thread)?;
        stopped.go_on()?;
        Ok(held)
    }

    /// Whether its process runs.
    pub fn runs(&self) -> bool {
        self.process.runs().unwrap_or(false)
    }

    /// Pages that are kept of it.
    pub fn pages(&self) -> usize {
        self.pages.len()
    }

    /// Puts the sandbox back into the state that was taken down, in which it goes on. After
    /// an error it has ended.
    pub fn rewind(&mut self) -> Result<Effort, Refusal> {
        let stopped = Stopped::new(self.process.number)?;
        if !self.process.is_alone()? {
            return Err(Refusal::NotAlone);
        }
        // The guest's segments and flags must not decide how host calls are made in its name.
        stopped.set_registers(&self.thread.registers)?;
        let mut effort = Effort::default();
        let found = self.changed_layout()?;
        let mut private = self.private_pages()?;
        self.check_site(found.as_ref().unwrap_or(&self.layout), &private)?;
        self.silence(&stopped, &mut effort)?;
        if let Some(found) = found
            && self.repair(&stopped, &found, &mut effort)?
        {
            private = self.private_pages()?;
        }
        self.close_files(&stopped, &mut effort)?;
        if self.learn(&stopped, &private, &mut effort)? {
            private = self.private_pages()?;
        }
        effort.pages = self.write_back(&stopped, &private)?;
        stopped.set_state(&self.thread)?;
        stopped.go_on()?;
        Ok(effort)
    }

    /// Its mappings, if the host does not describe them as it did when they were right last.
    fn changed_layout(&mut self) -> Result<Option<Layout>, Refusal> {
        let mut text = Vec::with_capacity(self.maps.len() + 1);
        self.process.read_maps(&mut text)?;
        if text == self.maps {
            return Ok(None);
        }
        let found = Layout::parse_bytes(&text)?;
        if found == self.layout {
            self.maps = text;
            return Ok(None);
        }
        Ok(Some(found))
    }

    fn scratch(&self) -> u64 {
        (self.thread.registers.rsp - SCRATCH_BELOW) & !0xf
    }

    /// Whether the `syscall` instruction at which it waits is still that of the kernel's file.
    fn check_site(&self, found: &Layout, private: &[Range<u64>]) -> Result<(), Refusal> {
        let page = self.thread.registers.rip & !(PAGE_SIZE - 1);
        let wanted = self.layout.at(page).filter(|region| {
            let protection = libc::PROT_READ as u32 | EXECUTE;
            let access = Access { protection, shared: false };
            region.access == access && matches!(region.backing, Backing::File { .. })
        });
        // An instruction never lies in two pages here: one that waits has executed it.
        let at = |layout: &Layout| layout.at(page).map(|region| region.page(page));
        let is_private = private.iter().any(|run| run.contains(&page));
        if wanted.is_none() || is_private || at(found) != at(&self.layout) {
            return Err(Refusal::Text);
        }
        Ok(())
    }

    /// Stops its timer, and drops signals that are pending.
    fn silence(&self, stopped: &Stopped, effort: &mut Effort) -> Result<(), Refusal> {
        effort.calls += 1;
        let scratch = self.scratch();
        self.process.write(scratch, &[IoSlice::new(&[0; SCRATCH_LEN])])?;
        let arguments = [libc::ITIMER_REAL as u64, scratch, 0, 0, 0, 0];
        let mut result = 0;
        stopped.drop_signals(|stopped| {
            result = stopped.call(&self.thread, libc::SYS_setitimer, arguments)?;
            Ok(result)
        })?;
        if result != 0 {
            return Err(Refusal::NotRight("its timer"));
        }
        let Some(stack) = self.signal_stack else { return Ok(()) };
        effort.calls += 1;
        self.process.write(scratch, &[IoSlice::new(&stack)])?;
        match stopped.call(&self.thread, libc::SYS_sigaltstack, [scratch, 0, 0, 0, 0, 0])? {
            0 => Ok(()),
            _ => Err(Refusal::NotRight("its signal stack")),
        }
    }

    fn ask_signal_stack(&self, stopped: &Stopped) -> Result<Option<[u8; SCRATCH_LEN]>, Refusal> {
        let scratch = self.scratch();
        let mut before = [0; SCRATCH_LEN];
        self.process.read(scratch, &mut before)?;
        let arguments = [0, scratch, 0, 0, 0, 0];
        let result = stopped.call(&self.thread, libc::SYS_sigaltstack, arguments)?;
        let mut stack = [0; SCRATCH_LEN];
        self.process.read(scratch, &mut stack)?;
        self.process.write(scratch, &[IoSlice::new(&before)])?;
        Ok((result == 0).then_some(stack))
    }

    /// Makes its mappings what they were; whether that took anything.
    fn repair(
        &self,
        stopped: &Stopped,
        found: &Layout,
        effort: &mut Effort,
    ) -> Result<bool, Refusal> {
        let repairs = self.layout.repairs_of(found);
        if repairs.is_empty() {
            return Ok(false);
        }
        if repairs.len() > REPAIRS_MAX {
            return Err(Refusal::TooManyRepairs);
        }
        effort.calls += repairs.len() as u64;
        for repair in &repairs {
            self.repair_one(stopped, repair)?;
        }
        match self.process.layout()? == self.layout {
            true => Ok(true),
            false => Err(Refusal::NotRight("its mappings")),
        }
    }

    fn repair_one(&self, stopped: &Stopped, repair: &Repair) -> Result<(), Refusal> {
        let (start, result) = match repair {
            Repair::Unmap { start, end } => {
                let arguments = [*start, end - start, 0, 0, 0, 0];
                (*start, stopped.call(&self.thread, libc::SYS_munmap, arguments)?)
            }
            Repair::Protect { start, end, protection } => {
                let arguments = [*start, end - start, u64::from(*protection), 0, 0, 0];
                (*start, stopped.call(&self.thread, libc::SYS_mprotect, arguments)?)
            }
            Repair::Map(region) => {
                let arguments = self.to_map(region)?;
                let result = stopped.call(&self.thread, libc::SYS_mmap, arguments)?;
                (region.start, result - region.start as i64)
            }
        };
        if result == 0 { Ok(()) } else { Err(Refusal::Mapping(start)) }
    }

    /// The arguments of mmap(2) for a region that was there.
    fn to_map(&self, region: &Region) -> Result<[u64; 6], Refusal> {
        let common = libc::MAP_PRIVATE | libc::MAP_FIXED_NOREPLACE | libc::MAP_NORESERVE;
        let (flags, file) = match &region.backing {
            Backing::Anonymous => (common | libc::MAP_ANONYMOUS, u64::MAX),
            Backing::File { device, inode } => {
                let device = libc::makedev(device.0, device.1);
                let wanted = FileId { device, inode: *inode };
                let open = self.files.iter().find(|open| open.file == wanted);
                let open = open.ok_or(Refusal::Mapping(region.start))?;
                (common, u64::from(open.number))
            }
            Backing::Host(_) => return Err(Refusal::Mapping(region.start)),
        };
        let len = region.end - region.start;
        let protection = u64::from(region.access.protection);
        Ok([region.start, len, protection, flags as u64, file, region.offset])
    }

    /// Closes what it has got since, and makes sure that the rest is what it was.
    fn close_files(&mut self, stopped: &Stopped, effort: &mut Effort) -> Result<(), Refusal> {
        if self.process.has_open_files(&self.files)? {
            return Ok(());
        }
        let found = self.process.open_files()?;
        let mut known = self.files.iter();
        let mut next = known.next();
        let mut closes = 0;
        for open in &found {
            match next {
                Some(wanted) if wanted == open => next = known.next(),
                Some(wanted) if wanted.number <= open.number => {
                    return Err(Refusal::Descriptor(wanted.number));
                }
                _ => {
                    closes += 1;
                    if closes > CLOSES_MAX {
                        return Err(Refusal::TooManyFiles);
                    }
                    let arguments = [u64::from(open.number), 0, 0, 0, 0, 0];
                    stopped.call(&self.thread, libc::SYS_close, arguments)?;
                }
            }
        }
        effort.calls += closes as u64;
        match next {
            Some(missing) => Err(Refusal::Descriptor(missing.number)),
            None if self.process.has_open_files(&self.files)? => Ok(()),
            None => Err(Refusal::NotRight("its open files")),
        }
    }

    /// Runs of private pages of the process.
    fn private_pages(&mut self) -> Result<Vec<Range<u64>>, Refusal> {
        let mut runs = Vec::new();
        let (mut pages, mut in_text) = (0, false);
        let text = KERNEL_BASE..KERNEL_END;
        let layout = &self.layout;
        let is_executed = |address| {
            layout.at(address).is_some_and(|region| region.access.protection & EXECUTE != 0)
        };
        for span in layout.spans() {
            self.process.pages.private_runs(span.start, span.end, |run| {
                pages += (run.end - run.start) / PAGE_SIZE;
                in_text |= text.contains(&run.start) && is_executed(run.start);
                runs.push(run);
            })?;
        }
        if in_text {
            return Err(Refusal::Text);
        }
        match pages <= PAGES_MAX as u64 {
            true => Ok(runs),
            false => Err(Refusal::TooManyPages),
        }
    }

    /// Drops the pages that it has written for the first time, and keeps what is behind them:
    /// the next time they are written back. Whether there were any.
    fn learn(
        &mut self,
        stopped: &Stopped,
        private: &[Range<u64>],
        effort: &mut Effort,
    ) -> Result<bool, Refusal> {
        let new = self.unknown(private);
        if new.is_empty() {
            return Ok(false);
        }
        if new.len() > NEW_RUNS_MAX {
            return Err(Refusal::TooManyPages);
        }
        for run in &new {
            let advice = libc::MADV_DONTNEED as u64;
            let arguments = [run.start, run.end - run.start, advice, 0, 0, 0];
            if stopped.call(&self.thread, libc::SYS_madvise, arguments)? != 0 {
                return Err(Refusal::NotRight("pages that are new"));
            }
        }
        effort.calls += new.len() as u64;
        // Only what the process has not of its own any more is the mapping's.
        let left = self.private_pages()?;
        if !self.unknown(&left).is_empty() {
            return Err(Refusal::NotRight("pages that are new"));
        }
        new.into_iter().try_for_each(|run| self.keep(run, false))?;
        Ok(true)
    }

    /// The parts of sorted runs of pages that are not kept.
    fn unknown(&self, runs: &[Range<u64>]) -> Vec<Range<u64>> {
        unknown(runs, self.pages.keys().copied())
    }

    fn keep(&mut self, run: Range<u64>, is_own: bool) -> Result<(), Refusal> {
        for page in run.step_by(PAGE_SIZE as usize) {
            if self.pages.len() == PAGES_MAX {
                return Err(Refusal::TooManyPages);
            }
            let mut content = [0; PAGE_SIZE as usize];
            self.process.read(page, &mut content)?;
            self.pages.insert(page, Kept { content: self.kin.page(page, content), is_own });
        }
        Ok(())
    }

    /// Writes the content of all pages back that the process has of its own, or should have;
    /// how many those are.
    fn write_back(&self, stopped: &Stopped, private: &[Range<u64>]) -> Result<u64, Refusal> {
        let mut written = 0;
        let mut batch = Batch::default();
        let mut private = private.iter().peekable();
        let mut regions = self.layout.regions().iter().peekable();
        for (&page, kept) in &self.pages {
            while private.next_if(|run| run.end <= page).is_some() {}
            let is_private = private.peek().is_some_and(|run| run.start <= page);
            if !is_private && !kept.is_own {
                continue;
            }
            while regions.next_if(|region| region.end <= page).is_some() {}
            let region = regions.peek().filter(|region| region.start <= page);
            if region.is_some_and(|region| region.access.protection & WRITE != 0) {
                if batch.is_full() {
                    stopped.write(&batch.parts, &batch.ranges)?;
                    batch = Batch::default();
                }
                batch.add(page, &kept.content[..]);
            } else {
                self.process.write(page, &[IoSlice::new(&kept.content[..])])?;
            }
            written += 1;
        }
        stopped.write(&batch.parts, &batch.ranges)?;
        Ok(written)
    }
}

/// Pages that are written at a time.
#[derive(Default)]
struct Batch<'a> {
    parts: Vec<IoSlice<'a>>,
    /// Where they go, in the same order.
    ranges: Vec<Range<u64>>,
}

impl<'a> Batch<'a> {
    fn is_full(&self) -> bool {
        self.parts.len() == PARTS_MAX
    }

    fn add(&mut self, page: u64, content: &'a [u8]) {
        self.parts.push(IoSlice::new(content));
        match self.ranges.last_mut() {
            Some(last) if last.end == page => last.end += PAGE_SIZE,
            _ => self.ranges.push(page..page + PAGE_SIZE),
        }
    }
}

/// The parts of sorted runs of pages that are not among these sorted pages.
fn unknown(runs: &[Range<u64>], known: impl Iterator<Item = u64>) -> Vec<Range<u64>> {
    let mut parts: Vec<Range<u64>> = Vec::new();
    let mut known = known.peekable();
    for page in runs.iter().flat_map(|run| run.clone().step_by(PAGE_SIZE as usize)) {
        while known.next_if(|&known| known < page).is_some() {}
        if known.next_if_eq(&page).is_some() {
            continue;
        }
        match parts.last_mut() {
            Some(last) if last.end == page => last.end += PAGE_SIZE,
            _ => parts.push(page..page + PAGE_SIZE),
        }
    }
    parts
}

/// Stops a sandbox that has said that it is ready, and is about to wait for its second boot
/// command. Its state is that of the `syscall` instruction by which it waits.
fn stop_where_it_waits(process: &Process) -> Result<(Stopped, ThreadState), Refusal> {
    for _ in 0..STOPS_MAX {
        let stopped = Stopped::new(process.number)?;
        let mut state = stopped.state()?;
        if wait_again(&mut state) {
            return Ok((stopped, state));
        }
        stopped.go_on()?;
        process.runs_after(STOP_INTERVAL)?;
    }
    Err(Refusal::NotWaiting)
}

/// Makes a thread that was interrupted while it waited for a message wait again; false: it did
/// something else.
fn wait_again(thread: &mut ThreadState) -> bool {
    let registers = &mut thread.registers;
    let waits = registers.orig_rax == libc::SYS_recvmsg as u64
        && registers.rdi == CONTROL_FD as u64
        && (KERNEL_BASE..KERNEL_END).contains(&registers.rip);
    if waits {
        registers.rip -= SYSCALL_LEN;
        registers.rax = registers.orig_rax;
        registers.orig_rax = u64::MAX;
    }
    waits
}

/// Whether others may see what is written there.
fn is_shared(region: &Region) -> bool {
    region.access.shared && !matches!(region.backing, Backing::Host(_))
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: u64 = PAGE_SIZE;

    #[test]
    fn pages_that_are_not_kept_are_found() {
        let runs = [P..4 * P, 6 * P..7 * P, 9 * P..12 * P];
        let unknown_with = |known: &[u64]| unknown(&runs, known.iter().map(|page| page * P));
        assert_eq!(unknown_with(&[]), runs);
        assert_eq!(unknown_with(&[0, 1, 2, 3, 5, 6, 8, 9, 10, 11, 20]), []);
        assert_eq!(
            unknown_with(&[2, 4, 11]),
            [P..2 * P, 3 * P..4 * P, 6 * P..7 * P, 9 * P..11 * P]
        );
    }

    #[test]
    fn what_is_the_same_is_kept_once() {
        let kin = Kin::default();
        let first = kin.page(P, [1; PAGE_SIZE as usize]);
        assert!(Rc::ptr_eq(&first, &kin.page(P, [1; PAGE_SIZE as usize])));
        let other = kin.page(P, [2; PAGE_SIZE as usize]);
        assert_eq!((first[0], other[0]), (1, 2));
        assert!(!Rc::ptr_eq(&first, &kin.page(2 * P, [1; PAGE_SIZE as usize])));
    }

    #[test]
    fn neighbours_are_one_range_of_a_batch() {
        let page = [0; PAGE_SIZE as usize];
        let mut batch = Batch::default();
        for number in [1, 2, 4, 5, 9] {
            batch.add(number * P, &page);
        }
        assert_eq!(batch.ranges, [P..3 * P, 4 * P..6 * P, 9 * P..10 * P]);
        assert_eq!(batch.parts.len(), 5);
    }
}
