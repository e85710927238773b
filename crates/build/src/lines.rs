//! Cutting a stream of bytes into lines.

/// Longest line in bytes; a longer one is broken.
pub const LINE_MAX: usize = 16 * 1024;

/// Cuts a stream of bytes into lines.
#[derive(Debug, Default)]
pub struct LineSplitter {
    partial: Vec<u8>,
}

impl LineSplitter {
    /// Takes bytes and gives every line that they complete, without line ends.
    pub fn push(&mut self, bytes: &[u8], mut line: impl FnMut(&[u8])) {
        let mut parts = bytes.split(|byte| *byte == b'\n').peekable();
        while let Some(part) = parts.next() {
            self.partial.extend_from_slice(part);
            let complete = parts.peek().is_some();
            while self.partial.len() > LINE_MAX {
                let rest = self.partial.split_off(LINE_MAX);
                line(&self.partial);
                self.partial = rest;
            }
            if complete {
                line(self.partial.strip_suffix(b"\r").unwrap_or(&self.partial));
                self.partial.clear();
            }
        }
        // What one large read needed is not kept for each pipe.
        self.partial.shrink_to(LINE_MAX);
    }

    /// Whether no line has been begun.
    pub fn is_empty(&self) -> bool {
        self.partial.is_empty()
    }

    /// Gives what is left when the stream has ended.
    pub fn finish(&mut self, mut line: impl FnMut(&[u8])) {
        if !self.partial.is_empty() {
            line(&self.partial);
            self.partial.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_wherever_the_bytes_break() {
        let mut lines = Vec::new();
        let mut splitter = LineSplitter::default();
        let mut take = |line: &[u8]| lines.push(String::from_utf8(line.to_vec()).unwrap());
        for piece in ["a", "b\nc", "\n\nd\r\n", "e"] {
            splitter.push(piece.as_bytes(), &mut take);
        }
        splitter.finish(&mut take);
        assert_eq!(lines, ["ab", "c", "", "d", "e"]);
        let mut lengths = Vec::new();
        splitter.push(&vec![b'x'; 2 * LINE_MAX + 1], |line| lengths.push(line.len()));
        splitter.push(b"\n", |line| lengths.push(line.len()));
        assert_eq!(lengths, [LINE_MAX, LINE_MAX, 1]);
        assert!(splitter.partial.capacity() <= LINE_MAX);
    }
}
