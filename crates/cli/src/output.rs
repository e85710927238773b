//! Printing what verbs found: tables for people, JSON for programs.

use crate::failure::{Failure, Outcome};
use serde::Serialize;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Writes text to standard output.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(Failure::OutputClosed),
        Err(error) => Err(Failure::failed(format!("cannot write to standard output ({error})"))),
    }
}

/// Writes one JSON value and a line end.
pub fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value)?;
    print(&format!("{text}\n"))
}

/// Tells what a verb has done: all of it as JSON, or a line for people.
pub fn print_done<T: Serialize>(
    as_json: bool,
    done: &T,
    line: impl FnOnce(&T) -> String,
) -> Outcome {
    match as_json {
        true => print_json(done)?,
        false => print(&format!("{}\n", line(done)))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// A table whose columns are as wide as their widest cell.
#[derive(Debug, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these column titles.
    pub fn new(titles: &[&str]) -> Self {
        Self { rows: vec![titles.iter().map(|title| (*title).to_owned()).collect()] }
    }

    /// Adds a row, with a cell for each title.
    pub fn row(&mut self, cells: Vec<String>) {
        debug_assert!(
            self.rows.first().is_none_or(|first| first.len() == cells.len()),
            "{cells:?} are not as many as the titles"
        );
        self.rows.push(cells);
    }

    /// The text, one line a row, without trailing blanks.
    pub fn text(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows.iter().filter_map(|row| row.get(column)).map(|c| c.chars().count()).max()
        };
        let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
        let mut text = String::new();
        for row in &self.rows {
            let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
            text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
            text.push('\n');
        }
        text
    }
}

/// How long ago a time was, in its largest unit.
pub fn ago(ms: u64) -> String {
    let then = UNIX_EPOCH + Duration::from_millis(ms);
    let seconds = SystemTime::now().duration_since(then).unwrap_or_default().as_secs();
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// Numbers for people.
pub fn list(numbers: &[u64]) -> String {
    numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
}

/// A number of bytes for people.
pub fn size(bytes: u64) -> String {
    let (number, unit) = match bytes {
        0 => return "0".to_owned(),
        bytes if bytes >= 1 << 30 => (bytes as f64 / f64::from(1 << 30), "GiB"),
        bytes if bytes >= 1 << 20 => (bytes as f64 / f64::from(1 << 20), "MiB"),
        bytes => (bytes as f64 / f64::from(1 << 10), "KiB"),
    };
    format!("{number:.1}{unit}")
}

/// Percent-encodes everything that has a meaning in a URL's query.
pub fn escape(text: &str) -> String {
    let keep = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    text.bytes()
        .map(|byte| if keep(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

/// A command line, with quotes where a shell would want them.
pub fn command_line(words: &[impl AsRef<str>]) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    let quoted = words.iter().map(AsRef::as_ref).map(|word| {
        match !word.is_empty() && word.chars().all(is_plain) {
            true => word.to_owned(),
            false => format!("'{}'", word.replace('\'', "'\\''")),
        }
    });
    thaw_sandbox::escape(quoted.collect::<Vec<_>>().join(" ").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&["NAME", "N"]);
        table.row(vec!["a".into(), "1".into()]);
        table.row(vec!["längst".into(), "22".into()]);
        assert_eq!(table.text(), "NAME    N\na       1\nlängst  22\n");
    }

    #[test]
    fn sizes_have_the_unit_that_fits() {
        let sizes = [0, 512, 4096, (1 << 20) - 1, 1 << 20, 3 << 29].map(size);
        assert_eq!(sizes, ["0", "0.5KiB", "4.0KiB", "1024.0KiB", "1.0MiB", "1.5GiB"]);
    }

    #[test]
    fn queries_are_escaped() {
        assert_eq!(escape("/a b?c=d&e"), "%2Fa%20b%3Fc%3Dd%26e");
    }

    #[test]
    fn ages_are_in_their_largest_unit() {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64;
        for (seconds, shown) in
            [(5, "5 s"), (65, "1 min"), (7300, "2 h"), (86_400 * 3 + 9, "3 days")]
        {
            assert_eq!(ago(now - seconds * 1000), shown);
        }
    }
}
