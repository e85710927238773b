//! Commands against a daemon, and what its instances say.

use crate::{Daemon, Outcome, get, run, thaw};
use serde_json::Value;

/// Runs a verb of `thaw` on a daemon's home.
pub fn command(daemon: &Daemon, arguments: &[&str]) -> Outcome {
    run(thaw().env("THAW_HOME", daemon.home()).args(arguments))
}

/// What one instance says.
#[track_caller]
pub fn ask(daemon: &Daemon, function: &str, instance: u64, path: &str) -> Value {
    let instance = instance.to_string();
    let said = command(daemon, &["invoke", function, "--instance", &instance, "--path", path]);
    serde_json::from_str(&said.success()).expect("JSON")
}

/// Boots an instance; its number.
#[track_caller]
pub fn begin(daemon: &Daemon, function: &str) -> u64 {
    assert_eq!(get(daemon.gateway(), function, "/").status, 200);
    daemon.instance(function).0
}
