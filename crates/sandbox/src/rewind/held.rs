//! One sandbox and the state in which it waited to be wanted: taking that down, and putting
//! the sandbox back into it.
//!
//! The guest shares its address space with its kernel, so nothing in the process is to be
//! trusted after it has run: not its memory, not what its kernel would say. All that makes a
//! process is taken down and put back from outside: registers, signals, mappings,
//! descriptors, timers and memory. Where a host call is needed, the process is made to execute
//! one `syscall` instruction of the kernel's text, after it was checked that this page is still
//! the sealed file's, and what it has done is looked at again from outside.

use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::time::Duration;

use thaw_abi::PAGE_SIZE;
use thaw_abi::layout::{CONTROL_FD, KERNEL_BASE, KERNEL_END};

use super::layout::{Access, Backing, Layout, Region, Repair};
use super::process::{FileId, OpenFile, Process};
use super::trace::{SYSCALL_LEN, Stopped, ThreadState};
use crate::pagemap::PageKind;

/// Most pages that are kept of one sandbox, 32 MiB: one that writes more is not worth it.
pub const PAGES_MAX: usize = 8192;
/// Most host calls that a rewind may take to put mappings right.
const REPAIRS_MAX: usize = 64;
/// Most runs of pages that a rewind sees for the first time.
const NEW_RUNS_MAX: usize = 512;
/// Most descriptors that a rewind closes.
const CLOSES_MAX: usize = 64;
/// Most parts of one write (`UIO_MAXIOV` of readv(2) is 1024).
const PARTS_MAX: usize = 256;
const EXECUTE: u32 = libc::PROT_EXEC as u32;
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
    #[error("it has written more than {} MiB", PAGES_MAX as u64 * PAGE_SIZE >> 20)]
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

/// What a rewind took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Effort {
    /// Pages whose content was written back.
    pub pages: u64,
    /// Host calls made in the name of the process.
    pub calls: u64,
}

type Page = Box<[u8; PAGE_SIZE as usize]>;

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
    files: Vec<OpenFile>,
    pages: BTreeMap<u64, Kept>,
    /// Its signal stack, as sigaltstack(2) gave it; `None`: the filter does not let it change.
    signal_stack: Option<[u8; SCRATCH_LEN]>,
}

impl Held {
    /// Takes down the state of a sandbox that waits for its second boot command.
    pub fn new(mut process: Process) -> Result<Self, Refusal> {
        let (stopped, thread) = stop_where_it_waits(&process)?;
        if !process.is_alone()? {
            return Err(Refusal::NotAlone);
        }
        let layout = process.layout()?;
        if layout.regions().iter().any(is_shared) {
            return Err(Refusal::Shared);
        }
        let files = process.open_files()?;
        let pages = BTreeMap::new();
        let mut held = Self { process, thread, layout, files, pages, signal_stack: None };
        held.check_site(&held.layout.clone())?;
        held.signal_stack = held.ask_signal_stack(&stopped)?;
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
        stopped.set_state(&self.thread)?;
        let mut effort = Effort::default();
        let found = self.process.layout()?;
        self.check_site(&found)?;
        self.silence(&stopped, &mut effort)?;
        self.repair(&stopped, &found, &mut effort)?;
        self.close_files(&stopped, &mut effort)?;
        self.learn(&stopped, &mut effort)?;
        effort.pages = self.write_back()?;
        stopped.set_state(&self.thread)?;
        stopped.go_on()?;
        Ok(effort)
    }

    /// The `syscall` instruction at which it waits.
    fn site(&self) -> u64 {
        self.thread.registers.rip
    }

    fn scratch(&self) -> u64 {
        (self.thread.registers.rsp - SCRATCH_BELOW) & !0xf
    }

    /// Whether the `syscall` instruction is still that of the kernel's file.
    fn check_site(&mut self, found: &Layout) -> Result<(), Refusal> {
        let page = self.site() & !(PAGE_SIZE - 1);
        let wanted = self.layout.at(page).filter(|region| {
            let protection = libc::PROT_READ as u32 | EXECUTE;
            let access = Access { protection, shared: false };
            region.access == access && matches!(region.backing, Backing::File { .. })
        });
        // An instruction never lies in two pages here: one that waits has executed it.
        let at = |layout: &Layout| layout.at(page).map(|region| region.page(page));
        if wanted.is_none() || at(found) != at(&self.layout) {
            return Err(Refusal::Text);
        }
        let mut is_of_file = false;
        self.process.pages.runs(page, page + PAGE_SIZE, |run| {
            is_of_file = run.kind == PageKind::File;
        })?;
        if is_of_file { Ok(()) } else { Err(Refusal::Text) }
    }

    /// Stops its timer, and drops signals that are pending.
    fn silence(&self, stopped: &Stopped, effort: &mut Effort) -> Result<(), Refusal> {
        effort.calls += 1;
        let (site, scratch) = (self.site(), self.scratch());
        self.process.write(scratch, &[IoSlice::new(&[0; SCRATCH_LEN])])?;
        let arguments = [libc::ITIMER_REAL as u64, scratch, 0, 0, 0, 0];
        let mut result = 0;
        stopped.drop_signals(|stopped| {
            result = stopped.call(site, libc::SYS_setitimer, arguments)?;
            Ok(result)
        })?;
        if result != 0 {
            return Err(Refusal::NotRight("its timer"));
        }
        let Some(stack) = self.signal_stack else { return Ok(()) };
        effort.calls += 1;
        self.process.write(scratch, &[IoSlice::new(&stack)])?;
        match stopped.call(site, libc::SYS_sigaltstack, [scratch, 0, 0, 0, 0, 0])? {
            0 => Ok(()),
            _ => Err(Refusal::NotRight("its signal stack")),
        }
    }

    fn ask_signal_stack(&self, stopped: &Stopped) -> Result<Option<[u8; SCRATCH_LEN]>, Refusal> {
        let scratch = self.scratch();
        let mut before = [0; SCRATCH_LEN];
        self.process.read(scratch, &mut before)?;
        let arguments = [0, scratch, 0, 0, 0, 0];
        let result = stopped.call(self.site(), libc::SYS_sigaltstack, arguments)?;
        let mut stack = [0; SCRATCH_LEN];
        self.process.read(scratch, &mut stack)?;
        self.process.write(scratch, &[IoSlice::new(&before)])?;
        Ok((result == 0).then_some(stack))
    }

    /// Makes its mappings what they were.
    fn repair(
        &mut self,
        stopped: &Stopped,
        found: &Layout,
        effort: &mut Effort,
    ) -> Result<(), Refusal> {
        let repairs = self.layout.repairs_of(found);
        if repairs.is_empty() {
            return Ok(());
        }
        if repairs.len() > REPAIRS_MAX {
            return Err(Refusal::TooManyRepairs);
        }
        effort.calls += repairs.len() as u64;
        for repair in &repairs {
            self.repair_one(stopped, repair)?;
        }
        match self.process.layout()? == self.layout {
            true => Ok(()),
            false => Err(Refusal::NotRight("its mappings")),
        }
    }

    fn repair_one(&self, stopped: &Stopped, repair: &Repair) -> Result<(), Refusal> {
        let site = self.site();
        let (start, result) = match repair {
            Repair::Unmap { start, end } => {
                let arguments = [*start, end - start, 0, 0, 0, 0];
                (*start, stopped.call(site, libc::SYS_munmap, arguments)?)
            }
            Repair::Protect { start, end, protection } => {
                let arguments = [*start, end - start, u64::from(*protection), 0, 0, 0];
                (*start, stopped.call(site, libc::SYS_mprotect, arguments)?)
            }
            Repair::Map(region) => {
                let arguments = self.to_map(region)?;
                let result = stopped.call(site, libc::SYS_mmap, arguments)?;
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
        let found = self.process.open_files()?;
        if found == self.files {
            return Ok(());
        }
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
                    stopped.call(self.site(), libc::SYS_close, arguments)?;
                }
            }
        }
        effort.calls += closes as u64;
        match next {
            Some(missing) => Err(Refusal::Descriptor(missing.number)),
            None if self.process.open_files()? == self.files => Ok(()),
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

    /// Finds pages that it has written for the first time, drops them, and keeps what is
    /// behind them: the next time they are written back.
    fn learn(&mut self, stopped: &Stopped, effort: &mut Effort) -> Result<(), Refusal> {
        let runs = self.private_pages()?;
        let new: Vec<Range<u64>> = runs.into_iter().flat_map(|run| self.unknown(run)).collect();
        if new.is_empty() {
            return Ok(());
        }
        if new.len() > NEW_RUNS_MAX {
            return Err(Refusal::TooManyPages);
        }
        for run in &new {
            let advice = libc::MADV_DONTNEED as u64;
            let arguments = [run.start, run.end - run.start, advice, 0, 0, 0];
            if stopped.call(self.site(), libc::SYS_madvise, arguments)? != 0 {
                return Err(Refusal::NotRight("pages that are new"));
            }
        }
        effort.calls += new.len() as u64;
        // Only what the process has not of its own any more is the mapping's.
        let left = self.private_pages()?;
        if left.into_iter().any(|run| self.unknown(run).next().is_some()) {
            return Err(Refusal::NotRight("pages that are new"));
        }
        new.into_iter().try_for_each(|run| self.keep(run, false))
    }

    /// The parts of a run of pages that are not kept.
    fn unknown(&self, run: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let mut parts: Vec<Range<u64>> = Vec::new();
        for page in run.step_by(PAGE_SIZE as usize) {
            if self.pages.contains_key(&page) {
                continue;
            }
            match parts.last_mut() {
                Some(last) if last.end == page => last.end += PAGE_SIZE,
                _ => parts.push(page..page + PAGE_SIZE),
            }
        }
        parts.into_iter()
    }

    fn keep(&mut self, run: Range<u64>, is_own: bool) -> Result<(), Refusal> {
        for page in run.step_by(PAGE_SIZE as usize) {
            if self.pages.len() == PAGES_MAX {
                return Err(Refusal::TooManyPages);
            }
            let mut content: Page = Box::new([0; PAGE_SIZE as usize]);
            self.process.read(page, &mut content[..])?;
            self.pages.insert(page, Kept { content, is_own });
        }
        Ok(())
    }

    /// Writes the content of all pages back that the process has of its own, or should have.
    fn write_back(&mut self) -> Result<u64, Refusal> {
        let mut private = self.private_pages()?.into_iter().peekable();
        let mut written = 0;
        let mut batch: Vec<IoSlice<'_>> = Vec::with_capacity(PARTS_MAX);
        let mut begin = 0;
        for (&page, kept) in &self.pages {
            while private.next_if(|run| run.end <= page).is_some() {}
            let is_private = private.peek().is_some_and(|run| run.start <= page);
            if !is_private && !kept.is_own {
                continue;
            }
            let goes_on = page == begin + batch.len() as u64 * PAGE_SIZE;
            if !goes_on || batch.len() == PARTS_MAX {
                self.process.write(begin, &batch)?;
                batch.clear();
            }
            if batch.is_empty() {
                begin = page;
            }
            batch.push(IoSlice::new(&kept.content[..]));
            written += 1;
        }
        self.process.write(begin, &batch)?;
        Ok(written)
    }
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
