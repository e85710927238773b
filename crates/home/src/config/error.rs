//! What is wrong with a `thaw.toml`, and where.

use std::path::{Path, PathBuf};

/// Why a function's configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file is missing or unreadable.
    #[error("cannot read {} ({error}); a function's directory has a thaw.toml in it, which `thaw init` writes", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// The text is not a valid configuration.
    #[error("{}:{line}:{column}: {message}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Column in characters, from 1.
        column: usize,
        /// What is wrong, and what would be right.
        message: String,
    },
}

impl ConfigError {
    /// An error at byte `offset` of `text`.
    pub(super) fn at(path: &Path, text: &str, offset: usize, message: String) -> Self {
        let (line, column) = line_and_column(text, offset);
        Self::Invalid { path: path.to_owned(), line, column, message }
    }

    /// Translates what the TOML reader says into one sentence with a hint.
    pub fn from_toml(path: &Path, text: &str, error: &toml::de::Error) -> Self {
        let offset = error.span().map_or(0, |span| span.start);
        Self::at(path, text, offset, explain(error.message()))
    }
}

/// Adds the nearest valid key to serde's "unknown field" message, and joins
/// messages of several lines into one.
fn explain(message: &str) -> String {
    let message = message.split('\n').map(str::trim).collect::<Vec<_>>().join(", ");
    let message = for_people(message);
    let Some(rest) = message.strip_prefix("unknown field `") else { return message };
    let Some((wrong, rest)) = rest.split_once('`') else { return message };
    // What follows lists the valid keys, each between backquotes.
    let valid: Vec<&str> = rest.split('`').skip(1).step_by(2).collect();
    let hint = match nearest(wrong, &valid) {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!("the keys here are {}", valid.join(", ")),
    };
    format!("unknown key `{wrong}`; {hint}")
}

/// Says which type is expected in words of TOML instead of Rust's.
fn for_people(message: String) -> String {
    let Some((said, expected)) = message.rsplit_once(", expected ") else { return message };
    let said = match said {
        "invalid type: sequence" => "invalid type: list",
        "invalid type: map" => "invalid type: table",
        said => said,
    };
    let known = match expected {
        "i8" | "i16" | "i32" | "i64" | "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number",
        "a nonzero u8" | "a nonzero u16" | "a nonzero u32" | "a nonzero u64" => {
            "a whole number from 1"
        }
        "f32" | "f64" => "a number",
        "a sequence" => "a list in brackets",
        "a map" => "a table",
        "a string" | "a borrowed string" => "a text in quotes",
        "a boolean" => "true or false",
        other if other.starts_with("struct ") => "a table, such as `{ key = \"value\" }`",
        other if other.starts_with("enum ") => "a text in quotes",
        other => other,
    };
    format!("{said}, expected {known}")
}

/// The candidate that `wrong` was most likely meant to be.
pub(super) fn nearest<'a>(wrong: &str, candidates: &[&'a str]) -> Option<&'a str> {
    candidates
        .iter()
        .map(|candidate| (strsim::jaro_winkler(wrong, candidate), *candidate))
        .filter(|(likeness, _)| *likeness > 0.8)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}

fn line_and_column(text: &str, offset: usize) -> (usize, usize) {
    let mut end = offset.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let before = &text[..end];
    let line_start = before.rfind('\n').map_or(0, |at| at + 1);
    (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_count_from_one_in_characters() {
        assert_eq!(line_and_column("", 0), (1, 1));
        assert_eq!(line_and_column("ab\ncd", 4), (2, 2));
        assert_eq!(line_and_column("ä=1", 2), (1, 2));
        assert_eq!(line_and_column("ab", 99), (1, 3));
    }

    #[test]
    fn types_are_told_in_words_of_toml() {
        let told = |text: &str| match toml::from_str::<crate::config::FunctionConfig>(text) {
            Err(error) => explain(error.message()),
            Ok(_) => panic!("{text}"),
        };
        let texts = [
            ("port = \"x\"", "invalid type: string \"x\", expected a whole number"),
            ("workdir = 3", "invalid type: integer `3`, expected a text in quotes"),
            ("command = 3", "invalid type: integer `3`, expected a list in brackets"),
            (
                "entry = 3",
                "invalid type: integer `3`, expected a table, such as `{ key = \"value\" }`",
            ),
            ("persist = 3", "invalid type: integer `3`, expected true or false"),
        ];
        for (text, expected) in texts {
            assert_eq!(told(text), expected, "{text}");
        }
    }

    #[test]
    fn the_nearest_key_is_suggested() {
        assert_eq!(nearest("memroy", &["memory", "cpu"]), Some("memory"));
        assert_eq!(nearest("xyz", &["memory", "cpu"]), None);
    }
}
