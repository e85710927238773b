//! The files of `/proc` of one sandbox that is rewound again and again, opened once.

use std::fs::File;
use std::io::{self, IoSlice, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, Mode, OFlags, RawDir, openat, statat};
use rustix::io::Errno;
use rustix::io::pwritev;
use rustix::path::DecInt;

use super::layout::Layout;
use crate::pagemap::PageMap;
use crate::state::number_of;

/// Most bytes of `/proc/PID/maps`: some ten thousand mappings.
const MAPS_MAX: usize = 1 << 20;
/// Bytes that are read of it at a time, at most: the host gives a page of text at a time.
const MAPS_PART: usize = 16 * 1024;
/// Most open files of a sandbox that are looked at.
const FILES_MAX: usize = 256;

/// What a descriptor stands for, as stat(2) tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileId {
    pub device: u64,
    pub inode: u64,
}

/// An open file of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct OpenFile {
    pub number: u32,
    pub file: FileId,
}

/// The first process of a sandbox.
pub struct Process {
    /// In the pid namespace of this process.
    pub number: u32,
    pidfd: OwnedFd,
    memory: File,
    maps: File,
    /// `/proc/PID/task`.
    threads: File,
    files: File,
    children: File,
    pub pages: PageMap,
}

impl Process {
    /// The process behind a pidfd.
    ///
    /// # Errors
    /// `ESRCH`: it has ended.
    pub fn open(proc: &OwnedFd, pidfd: OwnedFd) -> io::Result<Self> {
        let number = number_of(proc, &pidfd)?;
        let path = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = openat(proc, number.to_string(), path, Mode::empty())?;
        let open = |name: &str, flags: OFlags| {
            openat(&directory, name, flags | OFlags::CLOEXEC, Mode::empty()).map(File::from)
        };
        let read = OFlags::RDONLY;
        let process = Self {
            number,
            memory: open("mem", OFlags::RDWR)?,
            maps: open("maps", read)?,
            threads: open("task", read | OFlags::DIRECTORY)?,
            files: open("fd", read | OFlags::DIRECTORY)?,
            children: open(&format!("task/{number}/children"), read)?,
            pages: PageMap::new(open("pagemap", read)?),
            pidfd,
        };
        // Its number is its own as long as it runs, so the files are.
        if process.runs()? { Ok(process) } else { Err(Errno::SRCH.into()) }
    }

    pub fn runs(&self) -> io::Result<bool> {
        self.runs_after(Duration::ZERO)
    }

    /// Whether it still runs so long from now. Waits.
    pub fn runs_after(&self, time: Duration) -> io::Result<bool> {
        let mut events = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        Ok(poll(&mut events, Some(&time))? == 0)
    }

    /// Whether it has one thread, and its sandbox no other process: it is process 1 of a pid
    /// namespace of its own, so all others descend from it, and who has lost its parent becomes
    /// its child (pid_namespaces(7)). To be asked while it is stopped.
    pub fn is_alone(&self) -> io::Result<bool> {
        // As every directory, that of the threads has two links, and one more for each of the
        // directories in it (proc_task_getattr() of Linux). To be read, /proc/PID/status would
        // take ten times as long.
        let threads = statat(&self.threads, "", AtFlags::EMPTY_PATH)?.st_nlink;
        Ok(threads == 3 && self.children.read_at(&mut [0; 64], 0)? == 0)
    }

    pub fn layout(&self) -> io::Result<Layout> {
        let mut text = Vec::new();
        self.read_maps(&mut text)?;
        Layout::parse_bytes(&text)
    }

    /// Reads the text of its mappings into `text`, whose former content is lost.
    pub fn read_maps(&self, text: &mut Vec<u8>) -> io::Result<()> {
        let mut len = 0;
        loop {
            text.resize(len + MAPS_PART, 0);
            match self.maps.read_at(&mut text[len..], len as u64)? {
                0 => break,
                more => len += more,
            }
            if len >= MAPS_MAX {
                return Err(io::Error::from(io::ErrorKind::OutOfMemory));
            }
        }
        text.truncate(len);
        Ok(())
    }

    /// Whether these, sorted, are its open files, and no others.
    pub fn has_open_files(&mut self, wanted: &[OpenFile]) -> io::Result<bool> {
        // The length of the directory is the number of open files (Linux 6.2); before, it is 0.
        let count = statat(&self.files, "", AtFlags::EMPTY_PATH)?.st_size;
        if usize::try_from(count) != Ok(wanted.len()) {
            return Ok(self.open_files()? == wanted);
        }
        for open in wanted {
            match self.file_at(open.number) {
                Ok(file) if file == open.file => {}
                Ok(_) | Err(Errno::NOENT) => return Ok(false),
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(true)
    }

    /// What a descriptor stands for.
    fn file_at(&self, number: u32) -> Result<FileId, Errno> {
        let about = statat(&self.files, DecInt::new(number), AtFlags::empty())?;
        Ok(FileId { device: about.st_dev, inode: about.st_ino })
    }

    /// Its open files, by number.
    pub fn open_files(&mut self) -> io::Result<Vec<OpenFile>> {
        self.files.seek(SeekFrom::Start(0))?;
        let mut buffer = Vec::with_capacity(8192);
        let mut entries = RawDir::new(&self.files, buffer.spare_capacity_mut());
        let mut found = Vec::new();
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let name = entry.file_name().to_str().unwrap_or_default();
            let Ok(number) = name.parse() else { continue };
            if found.len() == FILES_MAX {
                return Err(io::Error::from(io::ErrorKind::OutOfMemory));
            }
            found.push(OpenFile { number, file: self.file_at(number)? });
        }
        found.sort_unstable();
        Ok(found)
    }

    pub fn read(&self, address: u64, into: &mut [u8]) -> io::Result<()> {
        self.memory.read_exact_at(into, address)
    }

    /// Writes memory whatever its protection is, from several places to one.
    pub fn write(&self, address: u64, parts: &[IoSlice<'_>]) -> io::Result<()> {
        let wanted: usize = parts.iter().map(|part| part.len()).sum();
        match pwritev(&self.memory, parts, address)? {
            written if written == wanted => Ok(()),
            _ => Err(io::Error::from(io::ErrorKind::WriteZero)),
        }
    }
}

impl std::fmt::Debug for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Process")
            .field("number", &self.number)
            .field("pidfd", &self.pidfd.as_fd().as_raw_fd())
            .finish_non_exhaustive()
    }
}
