//! The processes of sandboxes as the state helper sees them in `/proc`.
//!
//! A number in `/proc` can be another process's a moment later. A directory that was opened
//! cannot: it belongs to one process for good (proc(5)), and its files fail with `ESRCH` when
//! that has been reaped. So a directory is opened first and then checked.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, RawDir, openat};
use rustix::io::Errno;
use thaw_abi::image::MAX_SPACES;

use crate::pagemap::PageMap;

/// Most bytes of a small file of `/proc`.
const SMALL_MAX: u64 = 64 * 1024;
/// Bytes of `/proc/PID/status` that are looked at: what is wanted comes first.
const STATUS_MAX: usize = 4096;
/// Bytes of the entries of a directory that are read at once.
const ENTRIES_AT_ONCE: usize = 4096;
/// Most processes of a sandbox beside its first: as many as an image has address spaces.
const MEMBERS_MAX: usize = MAX_SPACES as usize - 1;
/// The file of a process that sums its memory up (proc_pid_smaps(5)).
const SUMMARY: &str = "smaps_rollup";
/// Number of the sandbox' own process in its pid namespace.
pub(crate) const FIRST_PROCESS: u32 = 1;

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

    /// The numbers of its children: each thread has those that it has made.
    fn children(&self) -> io::Result<Vec<u32>> {
        let threads = open(&self.path, "task")?;
        let mut buffer = Vec::with_capacity(ENTRIES_AT_ONCE);
        let mut entries = RawDir::new(&threads, buffer.spare_capacity_mut());
        let mut children = Vec::new();
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let name = entry.file_name().to_str().unwrap_or_default();
            if name.starts_with('.') {
                continue;
            }
            match self.file(&format!("task/{name}/children")).and_then(read_small) {
                Ok(list) => {
                    let numbers = list.split_whitespace();
                    children.extend(numbers.filter_map(|child| child.parse::<u32>().ok()));
                }
                // It has ended meanwhile, and its children are another thread's.
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(children)
    }

    fn space(&self) -> io::Result<Space> {
        Ok(Space { memory: self.file("mem")?, pages: PageMap::new(self.file("pagemap")?) })
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

    /// From an open file, which belongs to one process for good.
    fn read(file: &File) -> io::Result<Self> {
        let mut bytes = [0; STATUS_MAX];
        let len = file.read_at(&mut bytes, 0)?;
        Self::parse(&String::from_utf8_lossy(&bytes[..len])).ok_or_else(|| Errno::SRCH.into())
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

/// A sandbox and the memory of its processes.
pub(crate) struct Sandbox {
    pidfd: OwnedFd,
    number: u32,
    first: Directory,
    /// Memory that was not taken yet, by the number in the pid namespace of the sandbox.
    spaces: HashMap<u32, Space>,
    /// `/proc/PID/status` of all but the first process, by the same.
    members: HashMap<u32, File>,
    /// Those of them whose memory was taken.
    taken: Vec<File>,
    /// `/proc/PID/smaps_rollup` of each process that was there when they were opened.
    summaries: Vec<File>,
    /// `/proc/PID/maps` of the first process, if it was opened.
    maps: Option<File>,
}

impl Sandbox {
    /// The sandbox whose first process is behind `pidfd`, and the memory of that one.
    ///
    /// # Errors
    /// `ESRCH`: it has ended.
    pub fn open(proc: &OwnedFd, pidfd: OwnedFd) -> io::Result<Self> {
        let number = number_of(proc, &pidfd)?;
        let first = Directory::open(proc, number)?;
        let spaces = HashMap::from([(FIRST_PROCESS, first.space()?)]);
        let (members, taken, summaries, maps) = Default::default();
        let sandbox = Self { pidfd, number, first, spaces, members, taken, summaries, maps };
        // Its number is its own as long as it runs, so the directory is.
        if sandbox.runs()? { Ok(sandbox) } else { Err(Errno::SRCH.into()) }
    }

    /// Opens the memory of its other processes, too.
    pub fn open_members(&mut self, proc: &OwnedFd) -> io::Result<()> {
        self.for_each_member(proc, |sandbox, directory, status, file| {
            sandbox.spaces.insert(status.inner, directory.space()?);
            sandbox.members.insert(status.inner, file);
            Ok(())
        })
    }

    /// Opens what the host says of the memory of all its processes.
    pub fn open_summaries(&mut self, proc: &OwnedFd) -> io::Result<()> {
        self.summaries.push(self.first.file(SUMMARY)?);
        self.for_each_member(proc, |sandbox, directory, _, _| {
            sandbox.summaries.push(directory.file(SUMMARY)?);
            Ok(())
        })
    }

    /// Opens what the host says of the mappings of its first process.
    pub fn open_maps(&mut self) -> io::Result<()> {
        self.maps = Some(self.first.file("maps")?);
        Ok(())
    }

    /// `/proc/PID/maps` of its first process.
    ///
    /// # Errors
    /// `ENOENT`: it was not opened.
    pub fn maps(&self) -> io::Result<&File> {
        self.maps.as_ref().ok_or_else(|| Errno::NOENT.into())
    }

    /// `/proc/PID/smaps_rollup` of its processes, the first one's first.
    pub fn summaries(&self) -> &[File] {
        &self.summaries
    }

    /// Looks at each of its processes but the first.
    fn for_each_member(
        &mut self,
        proc: &OwnedFd,
        mut visit: impl FnMut(&mut Self, &Directory, &Status, File) -> io::Result<()>,
    ) -> io::Result<()> {
        for number in self.first.children()?.into_iter().take(MEMBERS_MAX) {
            match self.visit_member(proc, number, &mut visit) {
                // It has ended meanwhile, or is ending: its memory is forbidden before it is gone. If
                // it is missed, that is an error then.
                Err(error)
                    if matches!(
                        error.raw_os_error(),
                        Some(libc::ESRCH | libc::ENOENT | libc::EACCES)
                    ) => {}
                result => result?,
            }
        }
        // As long as this one runs, its number is its own, and its children are.
        if self.runs()? { Ok(()) } else { Err(Errno::SRCH.into()) }
    }

    fn visit_member(
        &mut self,
        proc: &OwnedFd,
        number: u32,
        visit: &mut impl FnMut(&mut Self, &Directory, &Status, File) -> io::Result<()>,
    ) -> io::Result<()> {
        let directory = Directory::open(proc, number)?;
        let file = directory.file("status")?;
        let status = Status::read(&file)?;
        // A child of somebody else may have got the number meanwhile.
        match status.parent == self.number && !status.has_ended {
            true => visit(self, &directory, &status, file),
            false => Ok(()),
        }
    }

    /// The memory of the process that is `number` in the pid namespace of the sandbox.
    ///
    /// # Errors
    /// `ESRCH`: there is none, or it was taken before.
    pub fn take_space(&mut self, number: u32) -> io::Result<Space> {
        self.taken.extend(self.members.remove(&number));
        self.spaces.remove(&number).ok_or_else(|| Errno::SRCH.into())
    }

    /// Whether its first process and all whose memory was taken run still. The memory of one that
    /// has ended reads as if it had never been touched.
    pub fn is_whole(&self) -> io::Result<bool> {
        let runs = |member: &File| Status::read(member).is_ok_and(|status| !status.has_ended);
        Ok(self.taken.iter().all(runs) && self.runs()?)
    }

    fn runs(&self) -> io::Result<bool> {
        let mut events = [PollFd::new(&self.pidfd, PollFlags::IN)];
        Ok(poll(&mut events, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? == 0)
    }
}

/// The number of the process behind a pidfd, as this `/proc` has it.
pub(crate) fn number_of(proc: &OwnedFd, pidfd: &OwnedFd) -> io::Result<u32> {
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
        let mut sandbox = Sandbox::open(&proc, pidfd.try_clone().unwrap()).unwrap();
        assert_eq!(sandbox.number, child.id());
        sandbox.open_members(&proc).unwrap();
        assert!(sandbox.is_whole().unwrap() && sandbox.members.is_empty());
        sandbox.take_space(FIRST_PROCESS).unwrap();
        for missing in [FIRST_PROCESS, 4711] {
            let error = sandbox.take_space(missing).err().unwrap();
            assert_eq!(error.raw_os_error(), Some(libc::ESRCH));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!sandbox.is_whole().unwrap());
        for error in [Sandbox::open(&proc, pidfd).err(), sandbox.open_members(&proc).err()] {
            let errno = error.unwrap().raw_os_error();
            assert!(matches!(errno, Some(libc::ESRCH | libc::ENOENT)), "{errno:?}");
        }
    }

    #[test]
    fn children_of_every_thread_are_members() {
        let (send, child) = std::sync::mpsc::channel();
        let (go_on, wait) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
            send.send(child.id()).unwrap();
            let _ = wait.recv();
            child.kill().unwrap();
            child.wait().unwrap();
        });
        let child = child.recv().unwrap();
        let own = rustix::process::getpid();
        let pidfd = pidfd_open(own, PidfdFlags::empty()).unwrap();
        let proc = proc();
        let mut sandbox = Sandbox::open(&proc, pidfd).unwrap();
        sandbox.open_members(&proc).unwrap();
        let found = sandbox.take_space(child);
        drop(go_on);
        thread.join().unwrap();
        found.unwrap();
    }

    #[test]
    fn a_member_that_ends_is_missed() {
        let mut shell = std::process::Command::new("sh")
            .args(["-c", "sleep 60 & sleep 60 & echo; wait"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        shell.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
        let pidfd = pidfd_open(Pid::from_child(&shell), PidfdFlags::empty()).unwrap();
        let proc = proc();
        let mut sandbox = Sandbox::open(&proc, pidfd).unwrap();
        sandbox.open_members(&proc).unwrap();
        let mut members: Vec<u32> =
            sandbox.spaces.keys().copied().filter(|&number| number != FIRST_PROCESS).collect();
        assert_eq!(members.len(), 2);
        for &member in &members {
            sandbox.take_space(member).unwrap();
        }
        assert!(sandbox.is_whole().unwrap());
        let kill = |number: u32| {
            let pid = Pid::from_raw(number as i32).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        };
        kill(members.pop().unwrap());
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while sandbox.is_whole().unwrap() {
            assert!(std::time::Instant::now() < deadline, "it is not missed");
        }
        members.into_iter().for_each(kill);
        shell.kill().unwrap();
        shell.wait().unwrap();
    }
}
