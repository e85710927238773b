//! What a sandbox or a command of a build prints: read a bounded amount at a time
//! by the thread that watches the program, escaped, and cut off where it is too
//! much.
//!
//! There are no threads and no queues. A program that prints faster than its
//! watcher reads waits for room in its pipe, as it would at a terminal.

use super::{BuildEvent, OnEvent};
use crate::lines::LineSplitter;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionbio, read};
use rustix::pipe::{PipeFlags, pipe_with};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// Lines of output that an error repeats.
const LAST_LINES: usize = 20;
/// Bytes of a line that are shown.
const LINE_SHOWN: usize = 2048;
/// Lines of one program that are shown.
const LINES_SHOWN: u64 = 100_000;
/// Bytes of one program that are shown.
const BYTES_SHOWN: u64 = 16 << 20;
/// Bytes that are read from one pipe before the program's watcher looks at
/// anything else.
const READ_AT_ONCE: usize = 256 << 10;
/// Bytes that are captured of one pipe; the rest is thrown away.
const CAPTURED_MAX: usize = 1 << 20;
/// How long output may be on its way when the program has ended.
const AFTER_THE_END: Duration = Duration::from_millis(500);

/// Whether a program prints faster than its output is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    /// Everything that it has printed so far was read.
    Calm,
    /// There may be more.
    Flood,
}

/// The output of a program: passed on as it comes, the last lines kept.
pub(super) struct Output {
    /// Who prints.
    from: &'static str,
    pipes: Vec<Pipe>,
    /// Pipes that were made.
    made: usize,
    kept: VecDeque<String>,
    shown_lines: u64,
    shown_bytes: u64,
    /// Lines that were read and not shown.
    dropped: u64,
    /// What was printed into each pipe, if it is captured instead of shown.
    captured: Option<Vec<Vec<u8>>>,
}

/// The read end of a pipe, not blocking.
struct Pipe {
    reader: OwnedFd,
    /// In the order in which they were made.
    number: usize,
    lines: LineSplitter,
}

impl Output {
    /// The output of `from`, without pipes yet.
    pub fn new(from: &'static str) -> Self {
        Self {
            from,
            pipes: Vec::new(),
            made: 0,
            kept: VecDeque::new(),
            shown_lines: 0,
            shown_bytes: 0,
            dropped: 0,
            captured: None,
        }
    }

    /// The same for output that is not shown but kept, [`CAPTURED_MAX`] bytes of each
    /// pipe.
    pub fn capturing(from: &'static str) -> Self {
        Self { captured: Some(Vec::new()), ..Self::new(from) }
    }

    /// Makes a pipe to be read; its write end.
    pub fn pipe(&mut self) -> io::Result<OwnedFd> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
        ioctl_fionbio(&reader, true)?;
        let number = self.made;
        self.made += 1;
        if let Some(captured) = &mut self.captured {
            captured.push(Vec::new());
        }
        self.pipes.push(Pipe { reader, number, lines: LineSplitter::default() });
        Ok(writer)
    }

    /// Passes on what was printed, at most [`READ_AT_ONCE`] bytes of each pipe.
    pub fn pass_on(&mut self, on_event: &mut OnEvent<'_>) -> Flow {
        let mut flow = Flow::Calm;
        let mut pipes = std::mem::take(&mut self.pipes);
        pipes.retain_mut(|pipe| match self.drain(pipe, on_event) {
            Drained::Ended => false,
            Drained::Empty => true,
            Drained::More => {
                flow = Flow::Flood;
                true
            }
        });
        self.pipes = pipes;
        flow
    }

    /// Waits until there is output, all write ends are closed or `patience` has
    /// passed.
    pub fn wait(&self, patience: Duration) -> io::Result<()> {
        if self.pipes.is_empty() {
            std::thread::sleep(patience);
            return Ok(());
        }
        let interest = |pipe| PollFd::from_borrowed_fd(AsFd::as_fd(pipe), PollFlags::IN);
        let mut pipes: Vec<PollFd<'_>> =
            self.pipes.iter().map(|pipe| interest(&pipe.reader)).collect();
        let patience =
            Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: patience.subsec_nanos().into() };
        match poll(&mut pipes, Some(&patience)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Passes on what is still on its way when the program has ended, and says how
    /// much was left out; the last lines. Somebody may still hold a write end and
    /// print on, so this takes [`AFTER_THE_END`] at most.
    pub fn finish(mut self, on_event: &mut OnEvent<'_>) -> Vec<String> {
        self.drain_until(Instant::now() + AFTER_THE_END, on_event);
        for mut pipe in std::mem::take(&mut self.pipes) {
            pipe.lines.finish(|line| self.take(line, on_event));
        }
        self.note_dropped(on_event);
        self.kept.into()
    }

    /// Says how much was left out, if anything was.
    pub fn note_dropped(&self, on_event: &mut OnEvent<'_>) {
        if self.dropped > 0 {
            on_event(BuildEvent::Note(&format!(
                "{} lines of output were left out: only the first {LINES_SHOWN} lines and {} MiB \
                 are shown",
                self.dropped,
                BYTES_SHOWN >> 20
            )));
        }
    }

    /// Reads until all write ends are closed, but no longer than this.
    fn drain_until(&mut self, deadline: Instant, on_event: &mut OnEvent<'_>) {
        loop {
            self.pass_on(on_event);
            let left = deadline.saturating_duration_since(Instant::now());
            if self.pipes.is_empty() || left.is_zero() || self.wait(left).is_err() {
                return;
            }
        }
    }

    fn drain(&mut self, pipe: &mut Pipe, on_event: &mut OnEvent<'_>) -> Drained {
        let mut buffer = [0; 16 << 10];
        let mut total = 0;
        while total < READ_AT_ONCE {
            match read(&pipe.reader, &mut buffer) {
                Ok(0) => {
                    pipe.lines.finish(|line| self.take(line, on_event));
                    return Drained::Ended;
                }
                Ok(count) => {
                    total += count;
                    self.received(pipe, &buffer[..count], on_event);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Drained::Empty,
                Err(_) => return Drained::Ended,
            }
        }
        Drained::More
    }

    fn received(&mut self, pipe: &mut Pipe, bytes: &[u8], on_event: &mut OnEvent<'_>) {
        match &mut self.captured {
            Some(captured) => {
                let captured = &mut captured[pipe.number];
                let room = CAPTURED_MAX - captured.len();
                captured.extend_from_slice(&bytes[..bytes.len().min(room)]);
            }
            None => pipe.lines.push(bytes, |line| self.take(line, on_event)),
        }
    }

    /// What was captured of the first two pipes, when the program has ended.
    pub fn captured(mut self) -> (Vec<u8>, Vec<u8>) {
        let deadline = Instant::now() + AFTER_THE_END;
        self.drain_until(deadline, &mut |_| {});
        let mut captured = self.captured.unwrap_or_default().into_iter();
        (captured.next().unwrap_or_default(), captured.next().unwrap_or_default())
    }

    /// Shows a line if it is not too much, and keeps it.
    fn take(&mut self, line: &[u8], on_event: &mut OnEvent<'_>) {
        let text = shown(line);
        if self.shown_lines < LINES_SHOWN && self.shown_bytes < BYTES_SHOWN {
            self.shown_lines += 1;
            self.shown_bytes += text.len() as u64;
            on_event(BuildEvent::Output { from: self.from, line: &text });
        } else {
            self.dropped += 1;
        }
        if self.kept.len() == LAST_LINES {
            self.kept.pop_front();
        }
        self.kept.push_back(text);
    }
}

/// How far a pipe was read.
enum Drained {
    Empty,
    More,
    Ended,
}

/// A line as people see it: nothing in it acts on their terminal.
fn shown(line: &[u8]) -> String {
    let cut = &line[..line.len().min(LINE_SHOWN)];
    let mut text = thaw_sandbox::escape(cut);
    if cut.len() < line.len() {
        text.push_str(&format!(" … ({} more bytes)", line.len() - cut.len()));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Write;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    /// What a build would show.
    fn lines(events: &mut Vec<String>) -> impl FnMut(BuildEvent<'_>) {
        |event| match event {
            BuildEvent::Output { line, .. } => events.push(line.to_owned()),
            BuildEvent::Note(note) => events.push(format!("note: {note}")),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_flood_is_read_in_bounded_pieces_and_counted() {
        let mut output = Output::new("program");
        let mut writer = File::from(output.pipe().unwrap());
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let flood = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                writer.write_all(&[b'\n'; 65536]).unwrap();
            }
            writer.write_all(b"the end").unwrap();
        });
        let mut count = 0;
        let mut notes = Vec::new();
        let mut on_event = |event: BuildEvent<'_>| match event {
            BuildEvent::Note(note) => notes.push(note.to_owned()),
            _ => count += 1,
        };
        let mut dropped = 0;
        while dropped < LINES_SHOWN {
            let before = output.shown_lines + output.dropped;
            output.wait(Duration::from_secs(5)).unwrap();
            output.pass_on(&mut on_event);
            let read = output.shown_lines + output.dropped - before;
            assert!(read <= (READ_AT_ONCE + (16 << 10)) as u64, "{read} lines at once");
            assert!(output.kept.len() <= LAST_LINES);
            dropped = output.dropped;
        }
        stop.store(true, Ordering::Relaxed);
        // The writer may wait for room.
        while !flood.is_finished() {
            output.wait(Duration::from_millis(10)).unwrap();
            output.pass_on(&mut on_event);
        }
        flood.join().unwrap();
        let last = output.finish(&mut on_event);
        assert_eq!(last.last().map(String::as_str), Some("the end"));
        assert_eq!(count, LINES_SHOWN);
        assert!(
            notes.len() == 1 && notes[0].contains("lines of output were left out"),
            "{notes:?}"
        );
    }

    #[test]
    fn long_lines_and_escapes_are_made_harmless() {
        let mut output = Output::new("program");
        let mut writer = File::from(output.pipe().unwrap());
        writer.write_all(b"\x1b[2Jred\r\n").unwrap();
        writer.write_all(&[b'x'; 3 * LINE_SHOWN]).unwrap();
        drop(writer);
        let mut events = Vec::new();
        output.finish(&mut lines(&mut events));
        assert_eq!(events[0], "\\x1b[2Jred");
        assert!(events[1].ends_with(&format!(" … ({} more bytes)", 2 * LINE_SHOWN)));
        assert_eq!(events.len(), 2);
    }

    #[test]
    fn a_writer_that_stays_does_not_hold_the_end_up() {
        let mut output = Output::new("program");
        let mut writer = File::from(output.pipe().unwrap());
        writer.write_all(b"unfinished").unwrap();
        let mut events = Vec::new();
        let last = output.finish(&mut lines(&mut events));
        assert_eq!((last, events), (vec!["unfinished".to_owned()], vec!["unfinished".to_owned()]));
        drop(writer);
    }
}
