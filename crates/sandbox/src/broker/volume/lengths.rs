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
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytemuck::{Pod, Zeroable, bytes_of};
use rustix::io::Errno;
use thaw_abi::bind::{EndsPage, FileLength, LENGTH_UNKNOWN, LENGTHS};

use super::tree;
use crate::sys::SharedLengths;

/// How long a sandbox may be busy. It copies bytes meanwhile, and asks nobody for anything.
const BUSY_MAX: Duration = Duration::from_secs(2);
/// Names of records end with it.
const RECORD: &str = ".granted";

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

fn new_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)
}

impl Pages {
    /// Pages with files in a directory, which is made if it is missing.
    pub fn new(directory: &Path) -> io::Result<Arc<Self>> {
        DirBuilder::new().mode(0o700).recursive(true).create(directory)?;
        let name = format!("{}-{}", std::process::id(), LAST.fetch_add(1, Relaxed));
        let paths = [directory.join(&name), directory.join(name + RECORD)];
        let made = Self::make(&paths);
        if made.is_err() {
            // What was not made cannot be removed.
            paths.iter().for_each(|path| drop(fs::remove_file(path)));
        }
        let [ends, record] = made?;
        let (lengths, lengths_fd) = SharedLengths::new()?;
        for file in &lengths.get().files {
            file.length.store(LENGTH_UNKNOWN, SeqCst);
        }
        let (places, is_gone) = (Mutex::new([false; LENGTHS]), AtomicBool::new(false));
        Ok(Arc::new(Self { lengths, lengths_fd, ends, record, paths, places, is_gone }))
    }

    fn make(paths: &[PathBuf; 2]) -> io::Result<[File; 2]> {
        let record = new_file(&paths[1])?;
        // Written whole, so that there is room on the disk for what is stored later.
        let fresh = Record { boot: boot()?, granted: [Granted::default(); LENGTHS] };
        record.write_all_at(bytes_of(&fresh), 0)?;
        let ends = new_file(&paths[0])?;
        ends.write_all_at(&[0; size_of::<EndsPage>()], 0)?;
        Ok([ends, record])
    }

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

    /// Notes that nothing runs in the sandbox any more.
    pub fn end(&self) {
        self.is_gone.store(true, Relaxed);
    }

    fn number(&self, offset: usize) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.ends.read_exact_at(&mut bytes, offset as u64)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// Waits until the sandbox writes by no delegation; `ETIMEDOUT`: it does not come to that.
    fn wait_until_idle(&self) -> Result<(), Errno> {
        let until = Instant::now() + BUSY_MAX;
        while !self.is_gone.load(Relaxed) {
            let busy = self.number(offset_of!(EndsPage, busy)).map_err(|_| Errno::IO)?;
            if busy == 0 {
                break;
            }
            if Instant::now() > until {
                return Err(Errno::TIMEDOUT);
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // The next one who has the volume alone removes what is left.
        self.paths.iter().for_each(|path| drop(fs::remove_file(path)));
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
    }

    /// Lets the sandbox say from now on how long the file is, which has `length` bytes now.
    ///
    /// # Errors
    /// Its disk is full.
    pub fn delegate(&self, length: u64) -> io::Result<()> {
        let at = offset_of!(EndsPage, ends) + 8 * self.index;
        self.pages.ends.write_all_at(&length.to_ne_bytes(), at as u64)?;
        self.file().granted.store(length, SeqCst);
        self.file().delegated.store(1, SeqCst);
        Ok(())
    }

    /// Takes that back. Returns what the sandbox has said last, which may be anything.
    ///
    /// # Errors
    /// `ETIMEDOUT`: the sandbox is busy for too long; `EIO`.
    pub fn take_back(&self) -> Result<u64, Errno> {
        self.file().delegated.store(0, SeqCst);
        fence(SeqCst);
        let idle = self.pages.wait_until_idle();
        let end = idle.and_then(|()| self.end());
        end.inspect_err(|_| self.file().delegated.store(1, SeqCst))
    }

    /// Where the sandbox says that the file ends.
    pub fn end(&self) -> Result<u64, Errno> {
        let at = offset_of!(EndsPage, ends) + 8 * self.index;
        self.pages.number(at).map_err(|_| Errno::IO)
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
/// The host refuses; the next one tries again.
pub fn settle_lengths(files: &Path, directory: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    let (boot, mut left, mut cuts) = (boot()?, Vec::new(), HashMap::new());
    for entry in entries {
        let path = entry?.path();
        if let Some(ends) = path.to_str().and_then(|path| path.strip_suffix(RECORD)) {
            // One that was not written to the end grants nothing.
            let _ = read_cuts(&path, ends.as_ref(), &boot, &mut cuts);
        }
        left.push(path);
    }
    if !cuts.is_empty() {
        tree::cut(File::open(files)?.as_fd(), &mut cuts)?;
    }
    left.iter().try_for_each(fs::remove_file)
}

/// Where a file is to be cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    /// Bytes that it has then.
    pub length: u64,
    /// Bytes that it has at most if nobody has cut it.
    pub granted: u64,
}

fn read_cuts(
    record: &Path,
    ends: &Path,
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
    open(ends)?.read_exact_at(&mut said, 0)?;
    let said = said[offset_of!(EndsPage, ends)..].chunks_exact(8);
    for (granted, end) in record.granted.iter().zip(said).filter(|(granted, _)| granted.inode > 0) {
        let end = u64::from_ne_bytes(end.try_into().unwrap_or_default());
        cuts.insert(granted.inode, Cut { length: granted.cut(end), granted: granted.granted });
    }
    Ok(())
}

impl Granted {
    /// Bytes of the file, if the sandbox has said `end`.
    pub fn cut(&self, end: u64) -> u64 {
        end.clamp(self.base, self.granted.max(self.base))
    }
}
