//! The processes of sandboxes as the state helper sees them in `/proc`.
//!
//! A number in `/proc` can be another process's a moment later. A directory that was opened
//! cannot: it belongs to one process for good (proc(5)), and its files fail with `ESRCH` when
//! that has been reaped. So a directory is opened first and then checked.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;

use crate::pagemap::PageMap;

/// Most bytes of a small file of `/proc`.
const SMALL_MAX: u64 = 64 * 1024;
/// Number of the sandbox' own process in its pid namespace.
const FIRST_PROCESS: u32 = 1;

/// The memory of one process.
pub(crate) struct Space {
    /// `/proc/PID/mem`.
    pub memory: File,
    /// `/proc/PID/pagemap`.
    pub pages: PageMap,
}

/// A process of a sandbox.
struct Directory {
    path: OwnedFd,
}

impl Directory {
    fn open(proc: &OwnedFd, number: u32) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match openat(proc, number.to_string(), flags, Mode::empty()) {
            Ok(path) => Ok(Self { path }),
            Err(Errno::NOENT) => Err(Errno::SRCH.into()),
            Err(errno) => Err(errno.into()),
        }
    }

    fn file(&self, name: &str) -> io::Result<File> {
        open(&self.path, name)
    }

    fn space(&self) -> io::Result<Space> {
        Ok(Space { memory: self.file("mem")?, pages: PageMap::new(self.file("pagemap")?) })
    }

    fn status(&self) -> io::Result<Status> {
        let text = read_small(self.file("status")?)?;
        Status::parse(&text).ok_or_else(|| Errno::SRCH.into())
    }
}

/// What `/proc/PID/status` says.
#[derive(Debug, PartialEq, Eq)]
struct Status {
    parent: u32,
    /// Its number in the last of its pid namespaces.
    inner: u32,
    /// It has ended, but was not reaped.
    has_ended: bool,
}

impl Status {
    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| {
            text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
        };
        Some(Self {
            parent: field("PPid")?.parse().ok()?,
            inner: field("NSpid")?.split_whitespace().next_back()?.parse().ok()?,
            has_ended: field("State")?.starts_with(['Z', 'X']),
        })
    }
}

fn open(directory: &OwnedFd, name: &str) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    Ok(openat(directory, name, flags, Mode::empty())?.into())
}

fn read_small(file: File) -> io::Result<String> {
    let mut bytes = Vec::new();
    file.take(SMALL_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// A sandbox, and those of its processes that were asked for.
pub(crate) struct Sandbox<'a> {
    proc: &'a OwnedFd,
    pidfd: &'a OwnedFd,
    number: u32,
    first: Directory,
    members: Vec<Directory>,
}

impl<'a> Sandbox<'a> {
    /// The sandbox whose first process is behind `pidfd`.
    ///
    /// # Errors
    /// `ESRCH`: it has ended.
    pub fn open(proc: &'a OwnedFd, pidfd: &'a OwnedFd) -> io::Result<Self> {
        let number = number_of(proc, pidfd)?;
        let first = Directory::open(proc, number)?;
        let sandbox = Self { proc, pidfd, number, first, members: Vec::new() };
        // Its number is its own as long as it runs, so the directory is.
        if sandbox.runs()? { Ok(sandbox) } else { Err(Errno::SRCH.into()) }
    }

    /// The memory of its first process.
    pub fn first_space(&self) -> io::Result<Space> {
        self.first.space()
    }

    /// The memory of the process that is `number` in the pid namespace of the sandbox.
    ///
    /// # Errors
    /// `ESRCH`: there is none.
    pub fn space(&mut self, number: u32) -> io::Result<Space> {
        if number == FIRST_PROCESS {
            return self.first_space();
        }
        let children = read_small(self.first.file(&format!("task/{}/children", self.number))?)?;
        for child in children.split_whitespace().filter_map(|child| child.parse().ok()) {
            let Ok(directory) = Directory::open(self.proc, child) else { continue };
            let Ok(status) = directory.status() else { continue };
            // A child of somebody else may have got the number meanwhile.
            if status.inner == number && status.parent == self.number && self.runs()? {
                let space = directory.space()?;
                self.members.push(directory);
                return Ok(space);
            }
        }
        Err(Errno::SRCH.into())
    }

    /// Whether all of its processes that were asked for run still. The memory of one that
    /// has ended reads as if it had never been touched.
    pub fn is_whole(&self) -> io::Result<bool> {
        let runs = |member: &Directory| member.status().is_ok_and(|status| !status.has_ended);
        Ok(self.members.iter().all(runs) && self.runs()?)
    }

    fn runs(&self) -> io::Result<bool> {
        let mut events = [PollFd::new(self.pidfd, PollFlags::IN)];
        Ok(poll(&mut events, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? == 0)
    }
}

/// The number of the process behind a pidfd, as this `/proc` has it.
fn number_of(proc: &OwnedFd, pidfd: &OwnedFd) -> io::Result<u32> {
    let information = format!("self/fdinfo/{}", pidfd.as_fd().as_raw_fd());
    read_small(open(proc, &information)?)?
        .lines()
        .find_map(|line| line.strip_prefix("Pid:"))
        .and_then(|number| number.trim().parse().ok())
        .filter(|&number| number > 0)
        .ok_or_else(|| Errno::SRCH.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    fn proc() -> OwnedFd {
        File::open("/proc").unwrap().into()
    }

    #[test]
    fn a_status_is_read() {
        let text = "Name:\tx\nState:\tS (sleeping)\nPPid:\t7\nNSpid:\t812\t9\t1\n";
        let status = Status { parent: 7, inner: 1, has_ended: false };
        assert_eq!(Status::parse(text), Some(status));
        assert!(Status::parse(&text.replace("S (", "Z (")).unwrap().has_ended);
        assert_eq!(Status::parse("PPid:\t7\n"), None);
    }

    #[test]
    fn a_process_is_found_by_its_pidfd_and_missed_when_it_has_ended() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = Pid::from_child(&child);
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        let proc = proc();
        let mut sandbox = Sandbox::open(&proc, &pidfd).unwrap();
        assert_eq!(sandbox.number, child.id());
        assert!(sandbox.is_whole().unwrap());
        assert_eq!(sandbox.space(4711).err().unwrap().raw_os_error(), Some(libc::ESRCH));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!sandbox.is_whole().unwrap());
        let ended = Sandbox::open(&proc, &pidfd).err().unwrap();
        assert_eq!(ended.raw_os_error(), Some(libc::ESRCH));
        assert_eq!(sandbox.first.status().unwrap_err().raw_os_error(), Some(libc::ESRCH));
    }
}
