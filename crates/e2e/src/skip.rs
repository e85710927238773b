//! Tests that cannot be made on this machine.

use std::fs::{self, File};
use std::io::{Write, stderr};
use std::path::Path;

/// Says loudly that a test cannot be made here, and why. With `THAW_SKIPPED=FILE` a line is
/// added to that file, so that `make test` counts them; with `THAW_NO_SKIP` set the test
/// fails instead.
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

/// Whether this host has a control group for this, of either version.
pub fn has_controller(name: &str) -> bool {
    let v2 = if name == "cpuacct" { "cpu" } else { name };
    let listed = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
    Path::new("/sys/fs/cgroup").join(name).is_dir() || listed.split_whitespace().any(|c| c == v2)
}
