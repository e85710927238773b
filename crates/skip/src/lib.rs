#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{Write, stderr};

/// Says loudly that a test cannot be made here, and why. With `THAW_SKIPPED=FILE` a line is
/// added to that file, so that `make test` counts them; with `THAW_NO_SKIP` set the test
/// fails instead.
///
/// # Panics
/// `THAW_NO_SKIP` is set, or nothing can be added to the file.
pub fn skip(reason: &str) {
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    assert!(std::env::var_os("THAW_NO_SKIP").is_none(), "{test} cannot be made: {reason}");
    let line = format!("SKIPPED {test}: {reason}\n");
    // Not by a macro: the test harness would keep that to itself.
    let _ = stderr().write_all(line.as_bytes());
    if let Some(list) = std::env::var_os("THAW_SKIPPED") {
        let list = File::options().create(true).append(true).open(list);
        list.and_then(|mut list| list.write_all(line.as_bytes()))
            .expect("the list of THAW_SKIPPED");
    }
}
