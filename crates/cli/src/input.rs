//! Reading what a shell has redirected or piped into a verb.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, fstat};
use rustix::io::Errno;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// How long a pipe may stay empty. Programs at the front of a pipeline have begun to write by
/// then; nobody writes to a pipe that ssh(1), a CI runner or `docker run -i` keeps open.
const PATIENCE: Duration = Duration::from_secs(1);

/// What standard input has for a request.
#[derive(Debug, PartialEq, Eq)]
pub enum Input {
    /// These bytes, from a file or a pipe.
    Bytes(Vec<u8>),
    /// Nothing: an empty file, a pipe that has ended, a terminal, or something else.
    Nothing,
    /// It is a pipe that somebody holds open, to which nothing is written.
    Silent,
}

/// What to do about a pipe that stays empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenSilent {
    /// Read nothing.
    GoOn,
    /// Tell people, and wait for as long as it takes.
    Wait,
}

/// Reads `input` to its end if it is a file or a pipe. `when_silent` is asked only if it matters.
///
/// # Errors
/// The host refuses.
pub fn read(
    input: impl Read + AsFd,
    when_silent: impl FnOnce() -> WhenSilent,
) -> io::Result<Input> {
    read_within(PATIENCE, input, when_silent)
}

fn read_within(
    patience: Duration,
    input: impl Read + AsFd,
    when_silent: impl FnOnce() -> WhenSilent,
) -> io::Result<Input> {
    match FileType::from_raw_mode(fstat(&input)?.st_mode) {
        FileType::RegularFile => {}
        FileType::Fifo if is_readable_within(patience, &input)? => {}
        FileType::Fifo if when_silent() == WhenSilent::Wait => {
            eprintln!("thaw: waiting for standard input, which is a pipe; --data gives the body");
        }
        FileType::Fifo => return Ok(Input::Silent),
        _ => return Ok(Input::Nothing),
    }
    let bytes = read_all(input)?;
    Ok(if bytes.is_empty() { Input::Nothing } else { Input::Bytes(bytes) })
}

/// All bytes to the end.
///
/// # Errors
/// The host refuses.
pub fn read_all(mut input: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    input.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Whether there is something to read in that time, or the end.
fn is_readable_within(patience: Duration, input: &impl AsFd) -> io::Result<bool> {
    let end = Instant::now() + patience;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(input, PollFlags::IN)], Some(&left)) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Write;
    use std::thread;

    const SHORT: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn what_is_piped_is_read_to_its_end() {
        let (reader, mut writer) = io::pipe().unwrap();
        let feeder = thread::spawn(move || {
            for part in [b"one ", b"two "] {
                thread::sleep(SHORT);
                writer.write_all(part).unwrap();
            }
        });
        let input = read_within(LONG, reader, || WhenSilent::GoOn).unwrap();
        assert_eq!(input, Input::Bytes(b"one two ".to_vec()));
        feeder.join().unwrap();
    }

    #[test]
    fn a_pipe_that_is_empty_is_not_waited_for() {
        let (reader, writer) = io::pipe().unwrap();
        assert_eq!(read_within(SHORT, reader, || WhenSilent::GoOn).unwrap(), Input::Silent);
        drop(writer);
        // One that nobody can write to any more has nothing, at once.
        let (reader, writer) = io::pipe().unwrap();
        drop(writer);
        assert_eq!(read_within(LONG, reader, || WhenSilent::GoOn).unwrap(), Input::Nothing);
    }

    #[test]
    fn who_wants_what_is_piped_waits_for_it() {
        let (reader, mut writer) = io::pipe().unwrap();
        let feeder = thread::spawn(move || {
            thread::sleep(SHORT * 4);
            writer.write_all(b"late").unwrap();
        });
        let input = read_within(SHORT, reader, || WhenSilent::Wait).unwrap();
        assert_eq!(input, Input::Bytes(b"late".to_vec()));
        feeder.join().unwrap();
    }

    #[test]
    fn files_are_read_and_devices_are_not() {
        let device = File::open("/dev/null").unwrap();
        assert_eq!(read_within(LONG, device, || WhenSilent::Wait).unwrap(), Input::Nothing);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        for (content, input) in [("", Input::Nothing), ("x", Input::Bytes(b"x".to_vec()))] {
            std::fs::write(&path, content).unwrap();
            let file = File::open(&path).unwrap();
            assert_eq!(read_within(LONG, file, || WhenSilent::GoOn).unwrap(), input);
        }
    }
}
