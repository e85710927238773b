//! Classes of Java that are committed besides their sources are those that the sources give.

use std::path::Path;
use std::process::Command;
use tempfile::TempDir;
use thaw_skip::skip;

/// The compiler of Debian 12; another one may write other files.
const COMPILER: &str = "javac 17.";

/// What `scripts/java-classes` makes of a source; `None`: there is no such compiler, and the test is
/// skipped.
pub(super) fn compiled(source: &str) -> Option<TempDir> {
    let version = Command::new("javac").arg("-version").output();
    let version = version.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    if !version.is_ok_and(|version| version.starts_with(COMPILER)) {
        skip(&format!("no {COMPILER}"));
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/java-classes");
    let output = Command::new(script).arg(source).arg(directory.path()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    Some(directory)
}
