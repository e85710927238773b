//! Text from a sandbox, made fit for logs and terminals.

use std::fmt::Write;

/// Most bytes of a message that [`printable`] keeps.
const MESSAGE_MAX: usize = 1024;

/// The text with everything that a terminal would act on, or that would change
/// how its surroundings are read, written as an escape (`\x1b`, `\u{202e}`):
/// control characters but for tabs, line and paragraph separators, and the
/// controls of bidirectional text. Invalid UTF-8 becomes U+FFFD.
pub fn escape(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\t' => escaped.push('\t'),
            // Writing to a string does not fail.
            '\0'..='\x7f' if character.is_control() => {
                let _ = write!(escaped, "\\x{:02x}", u32::from(character));
            }
            _ if character.is_control() || changes_direction(character) => {
                let _ = write!(escaped, "\\u{{{:x}}}", u32::from(character));
            }
            _ => escaped.push(character),
        }
    }
    escaped
}

/// Line separators, and the controls of Unicode's bidirectional algorithm (UAX #9, 2).
fn changes_direction(character: char) -> bool {
    matches!(
        character,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
    )
}

/// A message from a sandbox: at most 1 KiB of it, escaped.
pub(crate) fn printable(text: &[u8]) -> String {
    escape(&text[..text.len().min(MESSAGE_MAX)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_act_on_is_written_out() {
        assert_eq!(escape(b"\x1b[2Jred\r\n"), "\\x1b[2Jred\\x0d\\x0a");
        assert_eq!(escape("a\u{9b}31m\u{202e}b".as_bytes()), "a\\u{9b}31m\\u{202e}b");
        assert_eq!(escape("é\tü \u{fffd}".as_bytes()), "é\tü \u{fffd}");
        assert_eq!(escape(b"a\xffb"), "a\u{fffd}b");
    }

    #[test]
    fn messages_are_cut() {
        assert_eq!(printable(&[b'x'; 5000]).len(), MESSAGE_MAX);
    }
}
