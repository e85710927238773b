//! Scripts: files that name their interpreter in the first line (execve(2)).

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Most bytes of the first line of a script (`BINPRM_BUF_SIZE`, execve(2)).
const LINE_MAX: u64 = 256;

/// The interpreter that the first line of a file names, if it is a script.
pub fn interpreter(file: File) -> Option<PathBuf> {
    let mut line = Vec::new();
    BufReader::new(file.take(LINE_MAX)).read_until(b'\n', &mut line).ok()?;
    let mut words =
        line.strip_prefix(b"#!")?.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    Some(Path::new(OsStr::from_bytes(words.next()?)).to_owned())
}
