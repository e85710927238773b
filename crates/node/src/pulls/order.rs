//! What a daemon and a fetcher say to each other: a line of JSON each.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, Read, Write};
use thaw_build::artifact::Part;

/// Longest line.
const LINE_MAX: u64 = 64 << 10;
/// Longest sentence in one.
const SENTENCE_MAX: usize = 4 << 10;

/// What a fetcher is to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Order {
    /// Go on with a function of which only a part is here.
    GoOn(String),
    /// Pull one.
    Pull(super::NewPull),
}

/// What a fetcher says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum News {
    /// How far it is.
    Progress {
        /// Bytes that are here.
        bytes: u64,
        /// Bytes of all pieces.
        of: u64,
        /// Bytes that were moved.
        moved: u64,
        /// Fetches of pieces that have failed.
        failed: u64,
    },
    /// The daemon is to serve it. The fetcher goes on when the daemon says so.
    Serve {
        /// The function.
        function: String,
        /// How much of it is here.
        part: Part,
    },
    /// Something that may matter.
    Note(String),
    /// All of it is stored.
    Done {
        /// Its name here.
        name: String,
        /// Digest of its manifest, if it is a function.
        digest: Option<String>,
    },
    /// It has ended without.
    Failed {
        /// One sentence.
        reason: String,
        /// Whether what was sent, or is here, is to blame: to try again would not help.
        is_refusal: bool,
    },
}

impl News {
    /// A sentence that fits into a line.
    pub fn sentence(text: &str) -> String {
        let mut end = text.len().min(SENTENCE_MAX);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text[..end].to_owned()
    }
}

/// Says something.
///
/// # Errors
/// The other side has ended.
pub fn say(mut to: impl Write, what: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(what).expect("plain data");
    line.push(b'\n');
    to.write_all(&line)
}

/// What the other side says next; `None`: it has ended.
///
/// # Errors
/// It says something that makes no sense, or too much.
pub fn hear<T: DeserializeOwned>(from: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    from.by_ref().take(LINE_MAX).read_until(b'\n', &mut line)?;
    match line.pop() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(serde_json::from_slice(&line)?)),
        Some(_) => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_heard() {
        let news = [
            News::Progress { bytes: 1, of: 2, moved: u64::MAX, failed: 0 },
            News::Serve { function: "shop".to_owned(), part: Part::Run },
            News::Failed { reason: "line\nbreak".to_owned(), is_refusal: true },
        ];
        let mut said = Vec::new();
        news.iter().for_each(|one| say(&mut said, one).unwrap());
        let mut from = &said[..];
        for one in news {
            assert_eq!(hear::<News>(&mut from).unwrap(), Some(one));
        }
        assert_eq!(hear::<News>(&mut from).unwrap(), None);
    }

    #[test]
    fn nonsense_and_lines_without_end_are_refused() {
        let refused = |bytes: &[u8]| hear::<News>(&mut &bytes[..]).unwrap_err();
        refused(b"{}\n");
        refused(b"{\"note\":\"without an end\"}");
        refused(&vec![b' '; 2 * LINE_MAX as usize]);
        let longest = News::Note(News::sentence(&"\u{1}".repeat(2 * SENTENCE_MAX)));
        let mut said = Vec::new();
        say(&mut said, &longest).unwrap();
        assert_eq!(hear::<News>(&mut &said[..]).unwrap(), Some(longest));
        let bytes = b"{\"progress\":{\"bytes\":1,\"of\":2,\"moved\":3,\"failed\":4}}\n";
        thaw_mutate::survive("fetcher_news", &[&bytes[..]], 1000, |bytes| {
            let mut from = bytes;
            while let Ok(Some(_)) = hear::<News>(&mut from) {}
        });
    }
}
