//! The line discipline: what happens to bytes between a keyboard and a program
//! (termios(3); `n_tty` of Linux). Pure state, without any waiting.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::termios::*;
use crate::task::signal::{SIGINT, SIGQUIT, SIGTSTP, Signal};

/// Longest line in canonical mode, in bytes (termios(3), MAX_CANON).
const LINE_MAX: usize = 4095;
/// Most bytes that wait to be read.
const INPUT_MAX: usize = 64 << 10;
/// Most bytes of output that wait to be read from the other side.
pub const OUTPUT_MAX: usize = 64 << 10;

/// A byte that waits to be read, or a mark between bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Input {
    /// An ordinary byte.
    Byte(u8),
    /// The last byte of a line.
    End(u8),
    /// `VEOF`: the end of a line that shows no byte.
    EndOfFile,
}

/// What the receiver of a byte has to do besides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    None,
    /// Send this signal to the foreground process group.
    Signal(Signal),
}

/// The state of a terminal's line discipline.
pub struct Discipline {
    /// Modes.
    pub termios: Termios,
    /// Output for the other side: what programs write, and echo.
    pub output: VecDeque<u8>,
    /// Output is stopped (`VSTOP`, `TCOOFF`).
    pub stopped: bool,
    input: VecDeque<Input>,
    /// The line being edited.
    line: Vec<u8>,
    /// The next byte is taken as it is (`VLNEXT`).
    literal: bool,
    column: usize,
    /// Column in which the line begins.
    line_column: usize,
}

impl Default for Discipline {
    fn default() -> Self {
        Self {
            termios: Termios::STANDARD,
            output: VecDeque::new(),
            stopped: false,
            input: VecDeque::new(),
            line: Vec::new(),
            literal: false,
            column: 0,
            line_column: 0,
        }
    }
}

impl Discipline {
    /// Whether the other side may send another byte.
    pub fn has_room(&self) -> bool {
        self.input.len() + self.line.len() < INPUT_MAX
    }

    /// Takes a byte from the other side.
    pub fn receive(&mut self, byte: u8) -> Effect {
        let modes = self.termios;
        let mut byte = if modes.has_input(ISTRIP) { byte & 0x7f } else { byte };
        if core::mem::take(&mut self.literal) {
            self.accept(byte);
            return Effect::None;
        }
        if modes.has_input(IXON) {
            if modes.is(VSTART, byte) || self.stopped && modes.has_input(IXANY) {
                self.stopped = false;
                if modes.is(VSTART, byte) {
                    return Effect::None;
                }
            } else if modes.is(VSTOP, byte) {
                self.stopped = true;
                return Effect::None;
            }
        }
        if modes.has_local(ISIG) {
            let signals = [(VINTR, SIGINT), (VQUIT, SIGQUIT), (VSUSP, SIGTSTP)];
            if let Some((_, signal)) = signals.iter().find(|(index, _)| modes.is(*index, byte)) {
                if !modes.has_local(NOFLSH) {
                    self.flush_input();
                    self.output.clear();
                }
                self.stopped = false;
                self.echo(byte);
                return Effect::Signal(*signal);
            }
        }
        match byte {
            b'\r' if modes.has_input(IGNCR) => return Effect::None,
            b'\r' if modes.has_input(ICRNL) => byte = b'\n',
            b'\n' if modes.has_input(INLCR) => byte = b'\r',
            _ => {}
        }
        if modes.has_local(ICANON) {
            self.edit(byte);
        } else {
            self.echo(byte);
            self.input.push_back(Input::Byte(byte));
        }
        Effect::None
    }

    /// Canonical mode: the characters that edit a line, and those that end one.
    fn edit(&mut self, byte: u8) {
        let modes = self.termios;
        let extended = modes.has_local(IEXTEN);
        if modes.is(VERASE, byte) {
            self.erase_character();
        } else if modes.is(VKILL, byte) {
            self.kill_line();
        } else if extended && modes.is(VWERASE, byte) {
            self.erase_word();
        } else if extended && modes.is(VLNEXT, byte) {
            self.literal = true;
            if modes.has_local(ECHO) && modes.has_local(ECHOCTL) {
                self.output.extend(b"^\x08");
            }
        } else if extended && modes.has_local(ECHO) && modes.is(VREPRINT, byte) {
            self.echo(byte);
            self.newline();
            let line = core::mem::take(&mut self.line);
            self.line_column = self.column;
            line.iter().for_each(|&byte| self.echo(byte));
            self.line = line;
        } else if modes.is(VEOF, byte) {
            self.finish(Input::EndOfFile);
        } else if byte == b'\n' {
            if modes.has_local(ECHO) || modes.has_local(ECHONL) {
                self.newline();
            }
            self.finish(Input::End(byte));
        } else if modes.is(VEOL, byte) || extended && modes.is(VEOL2, byte) {
            self.echo(byte);
            self.finish(Input::End(byte));
        } else {
            self.accept(byte);
        }
    }

    fn accept(&mut self, byte: u8) {
        if !self.termios.has_local(ICANON) {
            self.echo(byte);
            self.input.push_back(Input::Byte(byte));
            return;
        }
        if self.line.len() >= LINE_MAX {
            if self.termios.has_input(IMAXBEL) {
                self.output.push_back(7);
            }
            return;
        }
        if self.line.is_empty() {
            self.line_column = self.column;
        }
        self.echo(byte);
        self.line.push(byte);
    }

    fn finish(&mut self, end: Input) {
        self.input.extend(self.line.drain(..).map(Input::Byte));
        self.input.push_back(end);
    }

    /// Shows a byte that was typed.
    fn echo(&mut self, byte: u8) {
        if !self.termios.has_local(ECHO) || self.output.len() >= 2 * OUTPUT_MAX {
            return;
        }
        let control = byte < 32 && byte != b'\t' && byte != b'\n' || byte == 127;
        if control && self.termios.has_local(ECHOCTL) {
            self.output.extend([b'^', byte ^ 64]);
            self.column += 2;
        } else {
            self.put(byte);
        }
    }

    fn newline(&mut self) {
        self.put(b'\n');
    }

    /// Columns that a byte of the line takes when it is echoed in column `at`.
    fn width(&self, byte: u8, at: usize) -> usize {
        match byte {
            b'\t' => 8 - at % 8,
            0..32 | 127 if self.termios.has_local(ECHOCTL) => 2,
            0..32 | 127 => 0,
            128..192 if self.termios.has_input(IUTF8) => 0,
            _ => 1,
        }
    }

    fn erase_character(&mut self) {
        if self.line.is_empty() {
            return;
        }
        let erased = self.cut_character();
        self.echo_erase(erased, self.termios.characters[VERASE]);
    }

    /// Takes the last character off the line; returns its first byte.
    fn cut_character(&mut self) -> u8 {
        let mut last = self.line.pop().unwrap_or(0);
        if self.termios.has_input(IUTF8) {
            while last & 0xc0 == 0x80 {
                match self.line.pop() {
                    Some(byte) => last = byte,
                    None => break,
                }
            }
        }
        last
    }

    /// Removes a character from the screen that is no longer in the line.
    fn echo_erase(&mut self, erased: u8, key: u8) {
        if !self.termios.has_local(ECHO) {
            return;
        }
        if !self.termios.has_local(ECHOE) {
            self.echo(key);
            return;
        }
        let mut column = self.line_column;
        for &byte in &self.line {
            column += self.width(byte, column);
        }
        let width = self.width(erased, column);
        for _ in 0..width {
            if erased == b'\t' {
                self.output.push_back(8);
            } else {
                self.output.extend(b"\x08 \x08");
            }
        }
        self.column = column;
    }

    fn erase_word(&mut self) {
        let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 128;
        let key = self.termios.characters[VWERASE];
        let mut seen = false;
        while let Some(&last) = self.line.last() {
            if is_word(last) {
                seen = true;
            } else if seen {
                break;
            }
            let erased = self.cut_character();
            self.echo_erase(erased, key);
        }
    }

    fn kill_line(&mut self) {
        let key = self.termios.characters[VKILL];
        let erases = [ECHO, ECHOE, ECHOK, ECHOKE].iter().all(|&flag| self.termios.has_local(flag));
        if erases {
            while !self.line.is_empty() {
                let erased = self.cut_character();
                self.echo_erase(erased, key);
            }
            return;
        }
        self.line.clear();
        self.echo(key);
        if self.termios.has_local(ECHO) && self.termios.has_local(ECHOK) {
            self.newline();
        }
    }

    /// Takes a byte that a program writes; `false` if there is no room.
    pub fn send(&mut self, byte: u8) -> bool {
        if self.output.len() >= OUTPUT_MAX || self.stopped {
            return false;
        }
        self.put(byte);
        true
    }

    /// Output processing.
    fn put(&mut self, byte: u8) {
        let modes = self.termios;
        if !modes.has_output(OPOST) {
            self.output.push_back(byte);
            return;
        }
        match byte {
            b'\n' if modes.has_output(ONLCR) => {
                self.output.extend(b"\r\n");
                self.column = 0;
            }
            b'\n' => {
                if modes.has_output(ONLRET) {
                    self.column = 0;
                }
                self.output.push_back(byte);
            }
            b'\r' if modes.has_output(ONOCR) && self.column == 0 => {}
            b'\r' if modes.has_output(OCRNL) => {
                self.output.push_back(b'\n');
                if modes.has_output(ONLRET) {
                    self.column = 0;
                }
            }
            b'\r' => {
                self.output.push_back(byte);
                self.column = 0;
            }
            b'\t' => {
                let width = 8 - self.column % 8;
                self.column += width;
                if modes.output & XTABS == XTABS {
                    self.output.extend(core::iter::repeat_n(b' ', width));
                } else {
                    self.output.push_back(byte);
                }
            }
            8 => {
                self.column = self.column.saturating_sub(1);
                self.output.push_back(byte);
            }
            _ => {
                self.column += self.width(byte, self.column).min(1) * usize::from(byte >= 32);
                self.output.push_back(byte);
            }
        }
    }

    /// Bytes that a read could return now.
    pub fn available(&self) -> usize {
        if !self.termios.has_local(ICANON) {
            return self.input.len();
        }
        let end = self.input.iter().rposition(|input| !matches!(input, Input::Byte(_)));
        end.map_or(0, |end| end + 1)
    }

    /// How many bytes must be there before a read returns.
    fn wanted(&self, room: usize) -> usize {
        if self.termios.has_local(ICANON) {
            return 1;
        }
        match self.min_and_time() {
            (0, time) => usize::from(time > 0),
            (minimum, _) => usize::from(minimum).min(room),
        }
    }

    fn min_and_time(&self) -> (u8, u8) {
        (self.termios.characters[VMIN], self.termios.characters[VTIME])
    }

    /// Whether there is something to read, as poll(2) says it. With a time between bytes, the first
    /// one is enough (`input_available_p` in drivers/tty/n_tty.c).
    pub fn is_readable(&self) -> bool {
        let wanted = match self.min_and_time() {
            (minimum, 0) if !self.termios.has_local(ICANON) => usize::from(minimum),
            _ => 1,
        };
        self.available() >= wanted.max(1)
    }

    /// Limit of the wait for the next byte, in nanoseconds: for the first one if `VMIN` is 0, for
    /// those after the first one otherwise (termios(3), "MIN > 0, TIME > 0").
    pub fn timeout_ns(&self) -> Option<u64> {
        let (minimum, time) = self.min_and_time();
        let is_timed = time > 0 && (minimum == 0 || self.available() > 0);
        let is_raw = !self.termios.has_local(ICANON);
        (is_raw && is_timed).then(|| u64::from(time) * 100_000_000)
    }

    /// Takes what a read of `room` bytes returns; `None`: wait.
    pub fn read(&mut self, room: usize) -> Option<Vec<u8>> {
        if self.available() < self.wanted(room) {
            return None;
        }
        Some(self.take(room))
    }

    /// Takes what there is, up to `room` bytes and the end of a line.
    pub fn take(&mut self, room: usize) -> Vec<u8> {
        let canonical = self.termios.has_local(ICANON);
        let mut bytes = Vec::new();
        let count = self.available();
        for _ in 0..count {
            match self.input.front() {
                Some(Input::EndOfFile) if canonical => {
                    self.input.pop_front();
                    break;
                }
                _ if bytes.len() == room => break,
                None => break,
                Some(&Input::Byte(byte)) => bytes.push(byte),
                Some(&Input::End(byte)) => {
                    bytes.push(byte);
                    if canonical {
                        self.input.pop_front();
                        break;
                    }
                }
                // Read in another mode than it was typed in, it is a byte.
                Some(Input::EndOfFile) => bytes.push(0),
            }
            self.input.pop_front();
        }
        bytes
    }

    /// Changes the modes. A line being edited can be read once lines do not
    /// matter any more.
    pub fn set_termios(&mut self, termios: Termios) {
        let was_canonical = self.termios.has_local(ICANON);
        self.termios = Termios { line: self.termios.line, ..termios };
        if was_canonical && !termios.has_local(ICANON) {
            self.input.extend(self.line.drain(..).map(Input::Byte));
        }
        if !was_canonical
            && termios.has_local(ICANON)
            && let Some(last) = self.input.back_mut()
            && let Input::Byte(byte) = *last
        {
            // What was typed without lines can be read, as a line is.
            *last = Input::End(byte);
        }
        if !termios.has_input(IXON) {
            self.stopped = false;
        }
    }

    /// Drops what has not been read.
    pub fn flush_input(&mut self) {
        self.input.clear();
        self.line.clear();
        self.literal = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::String;

    fn typed(discipline: &mut Discipline, text: &[u8]) -> Vec<Effect> {
        let effects = text.iter().map(|&byte| discipline.receive(byte));
        effects.filter(|effect| *effect != Effect::None).collect()
    }

    fn shown(discipline: &mut Discipline) -> String {
        String::from_utf8(discipline.output.drain(..).collect()).unwrap()
    }

    #[test]
    fn lines_are_edited_and_echoed() {
        let mut tty = Discipline::default();
        typed(&mut tty, b"ab\x7fc");
        assert_eq!(tty.read(100), None);
        assert_eq!(shown(&mut tty), "ab\x08 \x08c");
        typed(&mut tty, b"\rnext");
        assert_eq!(shown(&mut tty), "\r\nnext");
        assert_eq!(tty.read(2).unwrap(), b"ac");
        assert_eq!(tty.read(100).unwrap(), b"\n");
        assert_eq!(tty.read(100), None);
        typed(&mut tty, b"\x17\x7f");
        assert_eq!(shown(&mut tty), "\x08 \x08".repeat(4));
        typed(&mut tty, b"one two\x17");
        shown(&mut tty);
        typed(&mut tty, b"\x16\x03x\x7f\x7f\n");
        assert_eq!(shown(&mut tty), "^\x08^Cx\x08 \x08\x08 \x08\x08 \x08\r\n");
        assert_eq!(tty.read(100).unwrap(), b"one \n");
    }

    #[test]
    fn the_end_of_input_is_an_empty_line() {
        let mut tty = Discipline::default();
        typed(&mut tty, b"abc\x04\x04");
        assert_eq!(tty.read(100).unwrap(), b"abc");
        assert_eq!(tty.read(100).unwrap(), b"");
        assert_eq!(tty.read(100), None);
    }

    #[test]
    fn signals_flush_and_are_echoed() {
        let mut tty = Discipline::default();
        assert_eq!(typed(&mut tty, b"abc\x03"), [Effect::Signal(SIGINT)]);
        assert_eq!(shown(&mut tty), "^C");
        assert_eq!(
            typed(&mut tty, b"\x1a\x1c"),
            [Effect::Signal(SIGTSTP), Effect::Signal(SIGQUIT)]
        );
        typed(&mut tty, b"\n");
        assert_eq!(tty.read(100).unwrap(), b"\n");
    }

    #[test]
    fn raw_mode_passes_everything() {
        let mut tty = Discipline::default();
        let raw = Termios { input: 0, output: 0, local: 0, ..tty.termios };
        tty.set_termios(raw);
        assert!(typed(&mut tty, b"a\x03\r\x7f").is_empty());
        assert_eq!(shown(&mut tty), "");
        assert_eq!(tty.read(3).unwrap(), b"a\x03\r");
        assert!(tty.send(b'\n'));
        assert_eq!(shown(&mut tty), "\n");
        tty.termios.characters[VMIN] = 4;
        assert!(!tty.is_readable());
        assert_eq!(tty.read(1).unwrap(), b"\x7f");
        tty.termios.characters[VMIN] = 0;
        assert_eq!(tty.read(1).unwrap(), b"");
        tty.termios.characters[VTIME] = 3;
        assert_eq!((tty.read(1), tty.timeout_ns()), (None, Some(300_000_000)));
        // The time between bytes begins with the first one.
        tty.termios.characters[VMIN] = 3;
        assert_eq!((tty.is_readable(), tty.timeout_ns()), (false, None));
        typed(&mut tty, b"ab");
        assert_eq!((tty.is_readable(), tty.read(100)), (true, None));
        assert_eq!((tty.timeout_ns(), tty.available()), (Some(300_000_000), 2));
        assert_eq!(tty.read(2).unwrap(), b"ab");
    }

    #[test]
    fn output_is_stopped_and_started() {
        let mut tty = Discipline::default();
        typed(&mut tty, b"\x13");
        assert!(!tty.send(b'x'));
        typed(&mut tty, b"\x11");
        assert!(tty.send(b'x'));
    }

    #[test]
    fn tabs_and_characters_of_several_bytes_are_erased_whole() {
        let mut tty = Discipline::default();
        tty.termios.input |= IUTF8;
        typed(&mut tty, "aü\x7f".as_bytes());
        assert_eq!(shown(&mut tty), "aü\x08 \x08");
        typed(&mut tty, b"\t\x7f");
        assert_eq!(shown(&mut tty), "\t\x08\x08\x08\x08\x08\x08\x08");
    }

    #[test]
    fn a_line_has_a_greatest_length() {
        let mut tty = Discipline::default();
        typed(&mut tty, &[b'x'; 5000]);
        typed(&mut tty, b"\n");
        assert_eq!(tty.read(10_000).unwrap().len(), LINE_MAX + 1);
    }
}
