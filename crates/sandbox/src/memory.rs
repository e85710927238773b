//! How much memory the processes of a sandbox have, for themselves and with others.
//!
//! The host counts it (`smaps_rollup`, proc_pid_smaps(5)), by walking through all mappings and page
//! tables of a process: some microseconds for each MiB that is there. The state helper opens the
//! files, since nobody else may.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use rustix::io::Errno;

use crate::sandbox::Sandbox;
use crate::state::Subject;
use crate::state::protocol::{ANSWER_DONE, Answer, REQUEST_MEMORY};
use crate::zygote::{ReadySandbox, Template};

/// How long the host may take to count: a guest decides how many pages and mappings it has.
const COUNTING_MAX: Duration = Duration::from_secs(2);
/// Bytes of a file that are looked at: the host writes some 700.
const SUMMARY_MAX: usize = 4096;

/// Memory of a sandbox, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SandboxMemory {
    /// Its proportional share: a page that three processes map counts as a third.
    pub pss: u64,
    /// Pages that one of its processes alone maps.
    pub private: u64,
    /// Pages that others map, too: of the same image, of the same files, or its own processes.
    pub shared: u64,
    /// Its processes.
    pub processes: u64,
}

impl SandboxMemory {
    /// The sum over processes, by their files; the first is that of the sandbox itself.
    ///
    /// # Errors
    /// The sandbox has ended, or the host does not tell.
    pub(crate) fn sum(summaries: &[File]) -> io::Result<Self> {
        let mut sum = Self::default();
        for (number, file) in summaries.iter().enumerate() {
            let mut bytes = [0; SUMMARY_MAX];
            match file.read_at(&mut bytes, 0) {
                // A process of its own that has just ended has no memory.
                Err(error) if number > 0 && is_end(&error) => continue,
                Ok(0) if number > 0 => continue,
                Ok(0) => return Err(Errno::SRCH.into()),
                Ok(len) => sum.add(&String::from_utf8_lossy(&bytes[..len]))?,
                Err(error) => return Err(error),
            }
        }
        Ok(sum)
    }

    fn add(&mut self, text: &str) -> io::Result<()> {
        let unsupported = || io::Error::from_raw_os_error(libc::EOPNOTSUPP);
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
            kib.map(|kib| kib * 1024).ok_or_else(unsupported)
        };
        self.pss += field("Pss")?;
        self.private += field("Private_Clean")? + field("Private_Dirty")?;
        self.shared += field("Shared_Clean")? + field("Shared_Dirty")?;
        self.processes += 1;
        Ok(())
    }

    /// As a worker says it.
    pub(crate) fn answer(self) -> Answer {
        let Self { pss, private, shared, processes } = self;
        let numbers = [pss, private, shared, processes, 0, 0, 0, 0];
        Answer { numbers, ..Answer::new(ANSWER_DONE) }
    }

    fn of_answer(answer: &Answer) -> Self {
        let [pss, private, shared, processes, ..] = answer.numbers;
        Self { pss, private, shared, processes }
    }
}

fn is_end(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ESRCH | libc::ENOENT | libc::EACCES))
}

/// What is needed of a sandbox to have its memory counted, on another thread than the one that
/// serves it.
#[derive(Debug)]
pub struct MemoryReader {
    subject: Subject,
}

impl MemoryReader {
    /// For a sandbox.
    ///
    /// # Errors
    /// The host has no descriptors left.
    pub fn new(sandbox: &Sandbox) -> io::Result<Self> {
        Ok(Self { subject: sandbox.subject()? })
    }

    /// For an instance that was booted ahead.
    ///
    /// # Errors
    /// As [`MemoryReader::new`].
    pub fn of_ready(ready: &ReadySandbox) -> io::Result<Self> {
        Self::new(ready.sandbox())
    }

    /// For a live template.
    ///
    /// # Errors
    /// As [`MemoryReader::new`].
    pub fn of_template(template: &Template) -> io::Result<Self> {
        Self::new(template.sandbox())
    }

    /// Has the memory counted. Another process does so, which has to be started the first time.
    ///
    /// # Errors
    /// The sandbox has ended ([`io::ErrorKind::NotFound`]), the host takes too long
    /// ([`io::ErrorKind::TimedOut`]) or does not tell.
    pub fn read(&self) -> io::Result<SandboxMemory> {
        let request = REQUEST_MEMORY.to_le_bytes();
        let answered = self.subject.ask(&request, &[], COUNTING_MAX, |helper| helper.finish());
        let (answer, text) = answered?;
        match answer.kind {
            ANSWER_DONE => Ok(SandboxMemory::of_answer(&answer)),
            _ if answer.errno == libc::ESRCH => Err(io::ErrorKind::NotFound.into()),
            _ => Err(answer.host_error(&text)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(text: &str) -> File {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(text.as_bytes(), 0).unwrap();
        file
    }

    #[test]
    fn processes_are_summed_up_by_whole_names() {
        let text = "7e0000000000-7fff0000 ---p 0 00:00 0 [rollup]\nRss: 90 kB\nPss: 40 kB\n\
                    Pss_File: 7 kB\nShared_Clean: 60 kB\nShared_Dirty: 2 kB\n\
                    Private_Clean: 8 kB\nPrivate_Dirty: 20 kB\n";
        let memory = SandboxMemory::sum(&[summary(text), summary(text), summary("")]).unwrap();
        let kib = |kib: u64| kib * 2 * 1024;
        let expected = (kib(40), kib(28), kib(62), 2);
        assert_eq!((memory.pss, memory.private, memory.shared, memory.processes), expected);
        assert_eq!(SandboxMemory::of_answer(&memory.answer()), memory);
    }

    #[test]
    fn a_sandbox_that_has_ended_or_a_host_that_does_not_tell_is_an_error() {
        let ended = SandboxMemory::sum(&[summary("")]).unwrap_err();
        assert_eq!(ended.raw_os_error(), Some(libc::ESRCH));
        let old = SandboxMemory::sum(&[summary("Rss: 90 kB\nPss: 40 kB\n")]).unwrap_err();
        assert_eq!(old.raw_os_error(), Some(libc::EOPNOTSUPP));
    }

    #[test]
    fn this_process_has_memory() {
        let own = File::open("/proc/self/smaps_rollup").unwrap();
        let memory = SandboxMemory::sum(&[own]).unwrap();
        assert!(memory.private > 0 && memory.pss >= memory.private, "{memory:?}");
    }
}
