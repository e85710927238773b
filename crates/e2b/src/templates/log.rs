//! What a build says, line by line. Logs lie in memory: the next daemon knows how a build has ended,
//! and not its lines.

use super::names::beginning;
use crate::control::{now_ms, time_text};
use serde_json::{Value, json};
use std::sync::{Mutex, MutexGuard};

/// Most bytes of a line; a longer one becomes several.
const LINE_MAX: usize = 4 << 10;
/// Most lines of a build.
pub const LINES_MAX: usize = 10_000;
/// Most bytes of them.
pub const BYTES_MAX: usize = 512 << 10;
/// Most lines in one answer, as with E2B.
pub const PAGE_MAX: usize = 100;
/// Most bytes of output that an error shows.
const TAIL_MAX: usize = 2 << 10;

/// How much a line matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// What a program prints to standard error.
    Warn,
    /// What is done, and what programs print.
    Info,
    /// Why a build has failed.
    Error,
}

/// One line.
#[derive(Clone, Debug)]
struct Line {
    at_ms: u64,
    level: Level,
    text: String,
    step: String,
}

impl Line {
    fn shown(&self) -> Value {
        let level = match self.level {
            Level::Warn => "warn",
            Level::Info => "info",
            Level::Error => "error",
        };
        json!({
            "timestamp": time_text(self.at_ms),
            "level": level,
            "message": self.text,
            "step": self.step,
        })
    }
}

#[derive(Default)]
struct Lines {
    all: Vec<Line>,
    bytes: usize,
    is_full: bool,
}

/// The lines of one build.
#[derive(Default)]
pub struct BuildLog(Mutex<Lines>);

impl BuildLog {
    /// Adds a line of a step, unless there are too many already. An error finds room always. Of a
    /// long line the beginning is kept: a step may be a whole program.
    pub fn add(&self, step: &str, level: Level, text: &str) {
        let text = beginning(text, LINE_MAX);
        let mut lines = self.lines();
        let line = |text: &str, level| Line {
            at_ms: now_ms(),
            level,
            text: text.to_owned(),
            step: step.to_owned(),
        };
        let has_room = lines.all.len() < LINES_MAX && lines.bytes + text.len() <= BYTES_MAX;
        if level == Level::Error || has_room && !lines.is_full {
            lines.bytes += text.len();
            lines.all.push(line(text, level));
        } else if !lines.is_full {
            lines.is_full = true;
            lines.all.push(line("The log is full; what follows is not kept.", Level::Warn));
        }
    }

    /// So many lines as one answer has, from a number on.
    pub fn page(&self, offset: usize, limit: usize) -> Vec<Value> {
        let lines = self.lines();
        lines.all.iter().skip(offset).take(limit.min(PAGE_MAX)).map(Line::shown).collect()
    }

    /// The last lines of a step.
    pub fn last_of(&self, step: &str, count: usize) -> Vec<Value> {
        let lines = self.lines();
        let of_step: Vec<_> = lines.all.iter().filter(|line| line.step == step).collect();
        of_step[of_step.len().saturating_sub(count)..].iter().map(|line| line.shown()).collect()
    }

    fn lines(&self) -> MutexGuard<'_, Lines> {
        self.0.lock().expect("no holder panics")
    }
}

/// What comes of one stream of a program, cut into lines.
#[derive(Default)]
pub struct Cutter(Vec<u8>);

impl Cutter {
    /// Takes bytes, and gives each line that is whole.
    pub fn take(&mut self, bytes: &[u8], mut line: impl FnMut(&str)) {
        for byte in bytes {
            match byte {
                b'\n' => self.end(&mut line),
                byte => self.0.push(*byte),
            }
            if self.0.len() >= LINE_MAX {
                self.end(&mut line);
            }
        }
    }

    /// Gives what has no end of a line yet, if it is something.
    pub fn finish(&mut self, mut line: impl FnMut(&str)) {
        if !self.0.is_empty() {
            self.end(&mut line);
        }
    }

    fn end(&mut self, line: &mut impl FnMut(&str)) {
        let bytes = std::mem::take(&mut self.0);
        line(String::from_utf8_lossy(&bytes).trim_end_matches('\r'));
    }
}

/// The last bytes that a program has printed, which an error shows.
#[derive(Default)]
pub struct Tail(Vec<u8>);

impl Tail {
    /// Takes bytes.
    pub fn take(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
        let surplus = self.0.len().saturating_sub(TAIL_MAX);
        self.0.drain(..surplus);
    }

    /// As text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.0).trim().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_in_pages_and_have_bounds() {
        let log = BuildLog::default();
        for n in 0..LINES_MAX + 10 {
            log.add("1", Level::Info, &n.to_string());
        }
        log.add("1", Level::Error, "why");
        assert_eq!(log.page(0, usize::MAX).len(), PAGE_MAX);
        assert_eq!(log.page(250, 1)[0]["message"], "250");
        let last = log.page(LINES_MAX, 10);
        assert_eq!(last.len(), 2, "{last:?}");
        assert!(last[0]["message"].as_str().unwrap().contains("full"));
        assert_eq!((&last[1]["message"], &last[1]["level"]), (&json!("why"), &json!("error")));
        assert!(log.page(LINES_MAX + 2, 10).is_empty());
        assert_eq!(log.last_of("1", 1)[0]["message"], "why");
        let log = BuildLog::default();
        for _ in 0..BYTES_MAX / LINE_MAX + 10 {
            log.add("1", Level::Info, &"x".repeat(LINE_MAX));
        }
        assert_eq!(log.lines().all.len(), BYTES_MAX / LINE_MAX + 1);
        // A step that is longer than the log leaves room for what it prints.
        let log = BuildLog::default();
        log.add("1", Level::Info, &"ä".repeat(BYTES_MAX));
        log.add("1", Level::Info, "printed");
        let texts: Vec<_> = log.page(0, 2).iter().map(|line| line["message"].clone()).collect();
        assert_eq!((texts[0].as_str().unwrap().len(), &texts[1]), (LINE_MAX, &json!("printed")));
    }

    #[test]
    fn output_is_cut_into_lines() {
        let (mut cutter, mut lines) = (Cutter::default(), Vec::new());
        for piece in [&b"one\r\ntw"[..], b"o\n\nth", b"ree\xff"] {
            cutter.take(piece, |line| lines.push(line.to_owned()));
        }
        cutter.finish(|line| lines.push(line.to_owned()));
        assert_eq!(lines, ["one", "two", "", "three\u{fffd}"]);
        lines.clear();
        cutter.take(&vec![b'x'; 2 * LINE_MAX], |line| lines.push(line.to_owned()));
        assert_eq!(lines.iter().map(String::len).collect::<Vec<_>>(), [LINE_MAX, LINE_MAX]);
        let mut tail = Tail::default();
        tail.take(&vec![b'a'; TAIL_MAX]);
        tail.take(b"end\n");
        assert!(tail.text().len() < TAIL_MAX && tail.text().ends_with("aend"));
    }
}
