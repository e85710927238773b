//! Tests that cannot be made on this machine.

use std::fs;
use std::path::Path;

pub use thaw_skip::skip;

/// Whether this host has a control group for this, of either version.
pub fn has_controller(name: &str) -> bool {
    let v2 = if name == "cpuacct" { "cpu" } else { name };
    let listed = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
    Path::new("/sys/fs/cgroup").join(name).is_dir() || listed.split_whitespace().any(|c| c == v2)
}
