//! What a sandbox and the host tell each other about the lengths of open files
//! ([`thaw_abi::bind::LengthsPage`], [`EndsPage`]).
//!
//! The host's page is memory of this process. The sandbox' page is a file beside the volume, so that
//! files can be cut to their lengths when this process was killed, and is never mapped here: a sandbox
//! can make holes in it, which a full disk does not fill. Beside it lies a record of what was granted.

use std::collections::HashMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::mem::{offset_of, size_of};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytemuck::{Pod, Zeroable, bytes_of};
use rustix::io::Errno;
use thaw_abi::bind::{
    EndsPage, FileLength, LENGTH_DELEGATED, LENGTH_TOLD, LENGTH_UNKNOWN, LENGTH_WITHDRAWN, LENGTHS,
};

use super::limits::Taken;
use super::{VolumeHolder, tree};
use crate::sys::{self, SharedLengths};

/// How long a sandbox may be busy. It copies a mebibyte at most meanwhile, and asks nobody for
/// anything.
const BUSY_MAX: Duration = Duration::from_secs(2);
/// The same for one that has been busy for so long, and for how long that is remembered.
const BUSY_MAX_AGAIN: Duration = Duration::from_millis(100);
const SLOW_FOR: Duration = Duration::from_secs(10);
/// How long a sandbox that is busy is looked at without sleep, and between two looks from then on.
const EAGERNESS: Duration = Duration::from_micros(100);
/// How long a sandbox that was killed may still write.
const END_MAX: Duration = Duration::from_millis(20);
/// How long what a sandbox of a process that was killed holds is waited for.
const ORPHANS_MAX: Duration = Duration::from_secs(5);
/// Names of records end with it.
const RECORD: &str = ".granted";
/// What follows in the name of a page is the number of its sandbox. An older Thaw does not say it.
const OF_HOLDER: char = '@';

/// Numbers of pages in this process.
static LAST: AtomicU64 = AtomicU64::new(0);

/// The pages of one sandbox for one volume.
pub(super) struct Pages {
    lengths: SharedLengths,
    lengths_fd: OwnedFd,
    ends: File,
    record: File,
    paths: [PathBuf; 2],
    places: Mutex<[bool; LENGTHS]>,
    /// Nothing runs in the sandbox any more.
    is_gone: AtomicBool,
    /// When it was busy for too long.
    slow_since: Mutex<Option<Instant>>,
    /// The places of their descriptors among those of its tenant.
    _descriptors: Taken,
}

/// What is granted of one file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Granted {
    /// Its inode number; 0: nothing is granted.
    pub inode: u64,
    /// Bytes that it had.
    pub base: u64,
    /// Bytes that it has on the host.
    pub granted: u64,
    /// The same before; it still has so many if its process was killed just then.
    pub before: u64,
}

/// A record: what is granted, in which boot of this machine. After another boot, what the sandbox has
/// said last may be older than what is on disk.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Record {
    boot: [u8; 40],
    granted: [Granted; LENGTHS],
}

/// This boot of the machine, as random(4) names it.
fn boot() -> io::Result<[u8; 40]> {
    let text = fs::read("/proc/sys/kernel/random/boot_id")?;
    let mut boot = [0; 40];
    let len = text.len().min(boot.len());
    boot[..len].copy_from_slice(&text[..len]);
    Ok(boot)
}

fn new_file(path: &Path, contents: &[u8]) -> io::Result<File> {
    let mut new = OpenOptions::new();
    let file = new.read(true).write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all_at(contents, 0).inspect_err(|_| {
        let _ = fs::remove_file(path);
    })?;
    Ok(file)
}

impl Pages {
    /// Pages of a sandbox with files in a directory, which is made if it is missing. `descriptors` are
    /// places for [`Pages::DESCRIPTORS`].
    pub fn new(
        directory: &Path,
        holder: VolumeHolder,
        descriptors: Taken,
    ) -> io::Result<Arc<Self>> {
        DirBuilder::new().mode(0o700).recursive(true).create(directory)?;
        let (lengths, lengths_fd) = SharedLengths::new()?;
        for file in &lengths.get().files {
            file.length.store(LENGTH_UNKNOWN, SeqCst);
        }
        // Another process may have the same number, in another life of its pid namespace.
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let (process, number) = (std::process::id(), LAST.fetch_add(1, Relaxed));
        let name = format!("{since:x}-{process}-{number}{OF_HOLDER}{holder:x}");
        let paths = [directory.join(&name), directory.join(name + RECORD)];
        // Written whole, so that there is room on the disk for what is stored later.
        let ends = new_file(&paths[0], &[0; size_of::<EndsPage>()])?;
        let fresh = Record { boot: boot()?, granted: [Granted::default(); LENGTHS] };
        let record = new_file(&paths[1], bytes_of(&fresh));
        let record = record.inspect_err(|_| {
            // The next one who has the volume alone removes what is left.
            let _ = fs::remove_file(&paths[0]);
        })?;
        Ok(Arc::new(Self {
            lengths,
            lengths_fd,
            ends,
            record,
            paths,
            places: Mutex::new([false; LENGTHS]),
            is_gone: AtomicBool::new(false),
            slow_since: Mutex::new(None),
            _descriptors: descriptors,
        }))
    }

    /// Descriptors that they take.
    pub const DESCRIPTORS: usize = 3;

    /// The descriptor of the host's page, or of the sandbox' one.
    pub fn descriptor(&self, is_of_sandbox: bool) -> io::Result<OwnedFd> {
        match is_of_sandbox {
            true => Ok(self.ends.try_clone()?.into()),
            false => self.lengths_fd.try_clone(),
        }
    }

    /// A place for a file; `None`: all are taken.
    pub fn take_place(self: &Arc<Self>) -> Option<Place> {
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let index = places.iter().position(|is_taken| !is_taken)?;
        places[index] = true;
        Some(Place { pages: self.clone(), index })
    }

    /// Notes that nothing runs in the sandbox any more, which was killed.
    pub fn note_end(&self) {
        let since = Instant::now();
        // To be killed takes a moment.
        while self.is_busy().unwrap_or(false) && since.elapsed() < END_MAX {
            std::thread::sleep(EAGERNESS);
        }
        self.is_gone.store(true, Relaxed);
    }

    /// Removes the files, of which nothing is needed any more.
    pub fn remove_files(&self) {
        // The next one who has the volume alone removes what is left.
        self.paths.iter().for_each(|path| drop(fs::remove_file(path)));
    }

    fn number(&self, offset: usize) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.ends.read_exact_at(&mut bytes, offset as u64)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// Whether the sandbox writes by a delegation just now.
    fn is_busy(&self) -> Result<bool, Errno> {
        let busy = self.number(offset_of!(EndsPage, busy)).map_err(|_| Errno::IO)?;
        Ok(busy != 0 && !self.is_gone.load(Relaxed))
    }

    /// Waits until it does not; `ETIMEDOUT`: it does not come to that.
    fn wait_until_idle(&self) -> Result<(), Errno> {
        let since = Instant::now();
        let mut slow_since = self.slow_since.lock().unwrap_or_else(PoisonError::into_inner);
        let was_slow = slow_since.is_some_and(|since| since.elapsed() < SLOW_FOR);
        let patience = if was_slow { BUSY_MAX_AGAIN } else { BUSY_MAX };
        while self.is_busy()? {
            match since.elapsed() {
                waited if waited > patience => {
                    *slow_since = Some(Instant::now());
                    return Err(Errno::TIMEDOUT);
                }
                waited if waited > EAGERNESS => std::thread::sleep(EAGERNESS),
                _ => std::thread::yield_now(),
            }
        }
        Ok(())
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.remove_files();
    }
}

/// The place of one file.
pub(super) struct Place {
    pages: Arc<Pages>,
    index: usize,
}

impl Place {
    fn file(&self) -> &FileLength {
        &self.pages.lengths.get().files[self.index]
    }

    /// The number that the sandbox knows it by.
    pub fn number(&self) -> u64 {
        self.index as u64 + 1
    }

    /// Tells the sandbox how long the file is, or that it has to ask.
    pub fn tell(&self, length: Option<u64>) {
        self.file().length.store(length.unwrap_or(LENGTH_UNKNOWN), SeqCst);
        self.file().state.store(LENGTH_TOLD, SeqCst);
    }

    /// Whether the sandbox writes by a delegation just now.
    pub fn is_busy(&self) -> bool {
        self.pages.is_busy().unwrap_or(true)
    }

    /// Lets the sandbox say from now on how long the file is, which has `length` bytes now.
    ///
    /// # Errors
    /// Its disk is full.
    pub fn delegate(&self, length: u64) -> io::Result<()> {
        let at = offset_of!(EndsPage, ends) + 8 * self.index;
        self.pages.ends.write_all_at(&length.to_ne_bytes(), at as u64)?;
        self.file().granted.store(length, SeqCst);
        self.file().state.store(LENGTH_DELEGATED, SeqCst);
        Ok(())
    }

    /// Takes that back: the sandbox says nothing more, until it is told.
    ///
    /// # Errors
    /// `ETIMEDOUT`: the sandbox is busy for too long; `EIO`. It is delegated still.
    pub fn withdraw(&self) -> Result<(), Errno> {
        self.file().state.store(LENGTH_WITHDRAWN, SeqCst);
        fence(SeqCst);
        let idle = self.pages.wait_until_idle();
        idle.inspect_err(|_| self.file().state.store(LENGTH_DELEGATED, SeqCst))
    }

    /// Where the sandbox says that the file ends, which may be anything.
    pub fn said_end(&self) -> Result<u64, Errno> {
        let at = offset_of!(EndsPage, ends) + 8 * self.index;
        self.pages.number(at).map_err(|_| Errno::IO)
    }

    /// Whether the sandbox has written to the file since this was asked last.
    pub fn take_written(&self) -> bool {
        let at = offset_of!(EndsPage, written) + 8 * self.index;
        let is_written = self.pages.number(at).is_ok_and(|written| written != 0);
        // Otherwise it is taken for written to again.
        is_written && self.pages.ends.write_all_at(&[0; 8], at as u64).is_ok()
    }

    /// Records what is granted. It is said to the sandbox when it is so.
    pub fn record(&self, granted: Granted) -> Result<(), Errno> {
        let at = offset_of!(Record, granted) + size_of::<Granted>() * self.index;
        self.pages.record.write_all_at(bytes_of(&granted), at as u64).map_err(|_| Errno::NOSPC)
    }

    /// Says how far the sandbox may write.
    pub fn grant(&self, granted: u64) {
        self.file().granted.store(granted, SeqCst);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.tell(None);
        self.pages.places.lock().unwrap_or_else(PoisonError::into_inner)[self.index] = false;
    }
}

/// Cuts files below `files` to their lengths that a process was to cut which was killed, as its pages
/// in `directory` say, and removes these. Nobody else may have the volume.
///
/// # Errors
/// A sandbox of that process does not end, or the host refuses; the next one tries again.
pub fn cut_to_lengths(files: &Path, directory: &Path) -> io::Result<()> {
    cut(File::open(files)?.as_fd(), directory, &|_| Holds::UntilItEnds)
}

/// Whether a sandbox may still say how long files are, by its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holds {
    /// It has let go.
    Nothing,
    /// Until it has ended.
    UntilItEnds,
    /// Its process lives, whose pages are left alone.
    OfAnother,
}

/// The sandbox whose page has this path; 0: none is known.
fn holder_of(page: &str) -> VolumeHolder {
    let number = page.rsplit_once(OF_HOLDER).map(|(_, number)| number);
    number.and_then(|number| VolumeHolder::from_str_radix(number, 16).ok()).unwrap_or_default()
}

/// As [`cut_to_lengths`], where sandboxes may live on.
pub(super) fn cut(
    files: BorrowedFd<'_>,
    directory: &Path,
    holds: &dyn Fn(VolumeHolder) -> Holds,
) -> io::Result<()> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    let (boot, mut left, mut cuts) = (boot()?, Vec::new(), HashMap::new());
    for entry in entries {
        let entry = entry?;
        if !entry.file_type()?.is_file() {
            continue;
        }
        let path = entry.path();
        let Some(name) = path.to_str() else { continue };
        let page = name.strip_suffix(RECORD);
        let holds = holds(holder_of(page.unwrap_or(name)));
        if holds == Holds::OfAnother {
            continue;
        }
        if let Some(page) = page {
            // One that was not written to the end grants nothing.
            match read_cuts(&path, page.as_ref(), holds, &boot, &mut cuts) {
                Err(error) if error.kind() == ErrorKind::ResourceBusy => return Err(error),
                _ => {}
            }
        }
        left.push(path);
    }
    if !cuts.is_empty() {
        tree::cut(files, &mut cuts)?;
    }
    left.iter().try_for_each(fs::remove_file)
}

/// Where a file is to be cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    /// Bytes that it has then.
    pub length: u64,
    /// Bytes that it has if nobody has changed its length.
    pub granted: [u64; 2],
}

fn read_cuts(
    record: &Path,
    ends: &Path,
    holds: Holds,
    boot: &[u8; 40],
    cuts: &mut HashMap<u64, Cut>,
) -> io::Result<()> {
    let open = |path| OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path);
    let mut bytes = vec![0; size_of::<Record>()];
    open(record)?.read_exact_at(&mut bytes, 0)?;
    let record: Record = bytemuck::pod_read_unaligned(&bytes);
    if record.boot != *boot {
        return Ok(());
    }
    let mut said = [0; size_of::<EndsPage>()];
    let ends = open(ends)?;
    if holds == Holds::UntilItEnds {
        wait_for_orphan(&ends)?;
    }
    ends.read_exact_at(&mut said, 0)?;
    let said = said[offset_of!(EndsPage, ends)..].chunks_exact(8);
    for (granted, end) in record.granted.iter().zip(said).filter(|(granted, _)| granted.inode > 0) {
        let end = u64::from_ne_bytes(end.try_into().unwrap_or_default());
        let length = granted.cut(end);
        cuts.insert(granted.inode, Cut { length, granted: [granted.granted, granted.before] });
    }
    Ok(())
}

/// Waits until nobody has the page of a sandbox open to be written: that one has ended then.
fn wait_for_orphan(ends: &File) -> io::Result<()> {
    let until = Instant::now() + ORPHANS_MAX;
    // A file system that grants no leases does not tell.
    while sys::is_open_for_writing(ends).unwrap_or(false) {
        if Instant::now() > until {
            let reason = "a sandbox of a daemon that was killed has not ended yet; try again";
            return Err(io::Error::new(ErrorKind::ResourceBusy, reason));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

impl Granted {
    /// Bytes of the file, if the sandbox has said `end`.
    pub fn cut(&self, end: u64) -> u64 {
        end.clamp(self.base, self.granted.max(self.base))
    }
}
