//! How a monitor executes another program in its own place (execve(2)), as in an upgrade, and how
//! that one has what the monitor had.
//!
//! Process id, children, blocked signals and those that wait stay. Descriptors stay with their
//! numbers, those that are listed ([`Leaving`]). All else is a text in a sealed file in memory
//! ([`seal`]). Before that, the other program is asked whether it understands this very text
//! ([`ask`]).
#![allow(unsafe_code)]

use std::collections::HashSet;
use std::ffi::{CString, OsString};
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, set_no_new_privs};
use serde::{Deserialize, Serialize};

use crate::confine::hold_capabilities;
use crate::sys;

/// Most bytes of a state: all notes that a monitor may keep, and as much again.
const STATE_MAX: u64 = 256 << 20;
/// What a state's file must be sealed against.
const SEALS: SealFlags =
    SealFlags::WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::SEAL);
/// Descriptors from this one on can be handed over; the standard streams stay anyway.
const FIRST_NUMBER: RawFd = 3;
/// Most bytes of an answer that are read.
const ANSWER_MAX: usize = 4096;
/// How often somebody looks whether the other program has answered.
const LOOK: Duration = Duration::from_millis(2);

/// A descriptor that is handed over, which keeps its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Number(RawFd);

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The descriptors that are to stay open over an exec.
#[derive(Debug, Default)]
pub struct Leaving<'a>(Vec<BorrowedFd<'a>>);

impl<'a> Leaving<'a> {
    /// Lists one; the number under which the other program finds it.
    pub fn add(&mut self, descriptor: BorrowedFd<'a>) -> Number {
        self.0.push(descriptor);
        Number(descriptor.as_raw_fd())
    }

    /// Executes a program in the place of this one, with the descriptors that are listed and no
    /// others. Returns only on failure, and then everything is as it was.
    pub fn execute(
        &self,
        program: BorrowedFd<'_>,
        arguments: Vec<OsString>,
        environment: impl Iterator<Item = (OsString, OsString)>,
    ) -> io::Error {
        // Also what somebody has left open for this process.
        let others = || sys::close_on_exec_from(FIRST_NUMBER.cast_unsigned());
        if let Err(error) = others() {
            return error;
        }
        let failure = self.try_execute(program, arguments, environment);
        // This process executes helpers, which are to inherit none.
        others().err().unwrap_or(failure)
    }

    fn try_execute(
        &self,
        program: BorrowedFd<'_>,
        arguments: Vec<OsString>,
        environment: impl Iterator<Item = (OsString, OsString)>,
    ) -> io::Error {
        let pairs = environment.map(|(mut name, value)| {
            name.push("=");
            name.push(value);
            name
        });
        let strings = |strings: Vec<OsString>| {
            strings
                .into_iter()
                .map(|text| CString::new(text.into_vec()))
                .collect::<Result<Vec<_>, _>>()
        };
        let (arguments, environment) = match (strings(arguments), strings(pairs.collect())) {
            (Ok(arguments), Ok(environment)) => (arguments, environment),
            (Err(error), _) | (_, Err(error)) => return error.into(),
        };
        match self.0.iter().try_for_each(|descriptor| sys::keep_over_exec(*descriptor)) {
            Ok(()) => sys::execute_with(program, &arguments, &environment),
            Err(error) => error,
        }
    }
}

/// Writes a state into a file that nobody can change any more.
///
/// # Errors
/// The host's, or the text is too long.
pub fn seal(text: &[u8]) -> io::Result<OwnedFd> {
    if text.len() as u64 > STATE_MAX {
        return Err(Errno::FBIG.into());
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(memfd_create("thaw-monitor", flags)?);
    file.write_all(text)?;
    file.rewind()?;
    fcntl_add_seals(&file, SEALS)?;
    Ok(file.into())
}

/// The text of a [`seal`]ed file.
///
/// # Errors
/// It is no such file, or too long.
pub fn read_sealed(file: impl AsFd) -> io::Result<Vec<u8>> {
    let is_sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SEALS));
    let file = File::from(file.as_fd().try_clone_to_owned()?);
    let length = file.metadata()?.len();
    if !is_sealed || length > STATE_MAX {
        return Err(io::Error::other("no monitor has made this file"));
    }
    let mut text = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    // Its position is that of others, too.
    file.read_exact_at(&mut text, 0)?;
    Ok(text)
}

/// The descriptors that the program before this one has left open in this process.
#[derive(Debug)]
pub struct Left(HashSet<RawFd>);

impl Left {
    /// What a program that was executed by [`Leaving::execute`] begins with: the text of the state
    /// whose descriptor has this number, and all others. None is inherited further.
    ///
    /// # Errors
    /// There is no state at that number.
    ///
    /// # Safety
    ///
    /// To be called once, and before this process owns descriptors other than its standard streams.
    pub unsafe fn arrive(state: RawFd) -> io::Result<(Vec<u8>, Self)> {
        sys::close_on_exec_from(FIRST_NUMBER.cast_unsigned())?;
        let mut left = Self(HashSet::new());
        let state = left.take(Number(state))?;
        Ok((read_sealed(&state)?, left))
    }

    /// Takes one.
    ///
    /// # Errors
    /// It is not open, or was taken before.
    pub fn take(&mut self, number: Number) -> io::Result<OwnedFd> {
        if number.0 < FIRST_NUMBER || !self.0.insert(number.0) {
            return Err(Errno::BADF.into());
        }
        // SAFETY: whoever has made this value promises that this process owned no descriptors
        // then; those that it has made since have numbers that were free, and this one was not,
        // since the program before this one had it. Here each is taken once.
        unsafe { sys::own_descriptor(number.0) }
    }
}

/// Why another program is not executed.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// It does not answer as a Thaw that takes over this state does.
    #[error("it {0}")]
    Said(String),
    /// It cannot be asked.
    #[error("it cannot be asked ({0})")]
    Host(#[from] io::Error),
}

/// Starts a program with a state as its standard input, and waits until it has written `expected`
/// to its standard output and ended well. It has no capability and no other descriptors, gets no
/// environment, and is killed after `patience`.
///
/// # Errors
/// It has not: what it has said instead.
pub fn ask(
    program: BorrowedFd<'_>,
    arguments: &[OsString],
    state: BorrowedFd<'_>,
    expected: &str,
    patience: Duration,
) -> Result<(), Refused> {
    let mut child = asked(program, arguments, state)?.spawn()?;
    let status = wait_until(&mut child, Instant::now() + patience).inspect_err(|_| {
        // Somebody reaps it, like all children.
        let _ = child.kill();
    })?;
    let said = read_rest(child.stdout.take())?;
    match status {
        Some(status) if status.success() && said == expected => Ok(()),
        Some(status) => {
            let complaint = read_rest(child.stderr.take())?;
            Err(Refused::Said(describe(status, &complaint)))
        }
        None => Err(Refused::Said(format!("has not answered within {} s", patience.as_secs_f64()))),
    }
}

/// What an answer that is none was, in words.
fn describe(status: ExitStatus, complaint: &str) -> String {
    match complaint.lines().next().map(|line| line.trim_start_matches("thaw: ")) {
        Some(line) if !line.is_empty() => format!("says: {}", crate::escape(line.as_bytes())),
        _ => format!("does not answer as a Thaw that can do that ({status})"),
    }
}

fn asked(
    program: BorrowedFd<'_>,
    arguments: &[OsString],
    state: BorrowedFd<'_>,
) -> io::Result<Command> {
    let mut command = Command::new(path_of(program));
    if let Some((name, arguments)) = arguments.split_first() {
        command.arg0(name).args(arguments);
    }
    command
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::from(state.try_clone_to_owned()?))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // SAFETY: between fork and exec nothing is called but the host.
    unsafe {
        command.pre_exec(|| {
            sys::reset_signals();
            sys::close_on_exec_from(FIRST_NUMBER.cast_unsigned())?;
            hold_capabilities(CapabilitySet::empty())?;
            // Executing a file gives root none back.
            Ok(set_no_new_privs(true)?)
        });
    }
    Ok(command)
}

/// A path by which a process that inherits `program` executes it.
pub(super) fn path_of(program: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", program.as_raw_fd())
}

/// Waits for the end of a child; kills it at the deadline, and says so by `None`. It is not waited for
/// then: whoever reaps the children of this process reaps it, too.
fn wait_until(child: &mut Child, deadline: Instant) -> io::Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            child.kill()?;
            return Ok(None);
        }
        std::thread::sleep(LOOK);
    }
}

/// What lies in a pipe. Nobody is waited for who could write more.
fn read_rest(pipe: Option<impl Read + AsFd>) -> io::Result<String> {
    let Some(mut pipe) = pipe else { return Ok(String::new()) };
    rustix::io::ioctl_fionbio(&pipe, true)?;
    let mut bytes = vec![0; ANSWER_MAX];
    let length = match pipe.read(&mut bytes) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
        read => read?,
    };
    Ok(String::from_utf8_lossy(&bytes[..length]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    fn ask_shell(script: &str, patience: Duration) -> Result<(), String> {
        let shell = File::open("/bin/sh").unwrap();
        let arguments = ["sh", "-c", script].map(OsString::from);
        let state = seal(b"the state").unwrap();
        ask(shell.as_fd(), &arguments, state.as_fd(), "yes\n", patience)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn a_program_is_asked_with_the_state_and_has_no_rights() {
        ask_shell("[ \"$(cat)\" = 'the state' ] && echo yes", PATIENCE).unwrap();
        ask_shell("grep -q '^CapEff:.*0000000000000000$' /proc/self/status && echo yes", PATIENCE)
            .unwrap();
        // `ls` has one more open, that of the directory.
        ask_shell("[ \"$(ls /proc/self/fd | wc -l)\" -le 4 ] && echo yes", PATIENCE).unwrap();
    }

    #[test]
    fn other_answers_and_none_are_refused() {
        for (script, says) in [
            ("echo no", "does not answer"),
            ("true", "does not answer"),
            ("echo yes; exit 1", "does not answer"),
            ("echo 'thaw: not this version' >&2; exit 1", "it says: not this version"),
        ] {
            let refused = ask_shell(script, PATIENCE).unwrap_err();
            assert!(refused.contains(says), "{script}: {refused}");
        }
        let refused = ask_shell("sleep 60", Duration::from_millis(50)).unwrap_err();
        assert!(refused.contains("not answered within 0.05 s"), "{refused}");
        // Somebody goes on who could write more.
        ask_shell("sleep 60 & echo yes; kill $!", PATIENCE).unwrap();
    }

    #[test]
    fn a_state_is_what_was_sealed_and_nothing_else_is_one() {
        let text = vec![b'x'; 100_000];
        let sealed = seal(&text).unwrap();
        for _ in 0..2 {
            assert_eq!(read_sealed(&sealed).unwrap(), text);
        }
        rustix::io::write(&sealed, b"y").unwrap_err();
        let open = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        read_sealed(&open).unwrap_err();
        read_sealed(File::open("/dev/null").unwrap()).unwrap_err();
    }

    #[test]
    fn each_descriptor_is_taken_once() {
        let mut left = Left(HashSet::new());
        let number = Number(OwnedFd::from(File::open("/dev/null").unwrap()).into_raw());
        let taken = left.take(number).unwrap();
        assert_eq!(taken.as_raw_fd(), number.0);
        left.take(number).unwrap_err();
        left.take(Number(1)).unwrap_err();
        left.take(Number(1_000_000)).unwrap_err();
    }

    trait IntoRaw {
        fn into_raw(self) -> RawFd;
    }

    impl IntoRaw for OwnedFd {
        fn into_raw(self) -> RawFd {
            std::os::fd::IntoRawFd::into_raw_fd(self)
        }
    }

    #[test]
    fn a_program_that_cannot_be_executed_leaves_everything_as_it_was() {
        let null = File::open("/dev/null").unwrap();
        let mut leaving = Leaving::default();
        leaving.add(null.as_fd());
        let error = leaving.execute(null.as_fd(), vec!["null".into()], std::iter::empty());
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        let flags = rustix::io::fcntl_getfd(&null).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }
}
