//! Wild system calls from inside a sandbox, by the thousand: the kernel neither
//! panics nor hangs, and every process can still be killed.
//!
//! `THAW_FUZZ_SECONDS` says for how long (8 by default), `THAW_FUZZ_SEED` with which
//! seed besides the fixed one. docs/fuzzing.md explains how to narrow a failure down.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;
use thaw_e2e::{Linking, Outcome, compile, run_within, thaw};

/// A root with the program, and with files for it to act on.
fn make_root(root: &Path) {
    for directory in ["tmp", "proc", "dev", "sys", "etc", "bind", "lower/sub"] {
        fs::create_dir_all(root.join(directory)).expect("a directory");
    }
    fs::write(root.join("lower/file"), "lower\n").expect("a file");
    fs::write(root.join("lower/sub/deep"), "deep\n").expect("a file");
    symlink("file", root.join("lower/link")).expect("a link");
    let program = compile("hostile/sysfuzz", Linking::Static);
    fs::copy(program, root.join("sysfuzz")).expect("the program");
}

fn seconds() -> u64 {
    let text = std::env::var("THAW_FUZZ_SECONDS").unwrap_or_else(|_| "8".to_owned());
    text.parse().expect("THAW_FUZZ_SECONDS is a number of seconds")
}

fn fuzz(seed: u64, memory: &str) -> Outcome {
    let scratch = tempfile::Builder::new().prefix("thaw-sysfuzz-").tempdir().expect("/tmp");
    let (root, bound) = (scratch.path().join("root"), scratch.path().join("bound"));
    make_root(&root);
    fs::create_dir(&bound).expect("a directory");
    fs::write(scratch.path().join("outside"), "outside").expect("a file");
    let (seconds, seed) = (seconds(), seed.to_string());
    let mut command = thaw();
    command.args(["run", "--cpus=2", "--memory", memory, "--rootfs"]).arg(&root);
    command.arg("--bind").arg(format!("{}:/bind:rw", bound.display()));
    command.args(["--", "/sysfuzz", "--seed", &seed, "--seconds", &seconds.to_string()]);
    // A batch that hangs is killed by its parent; this is for a kernel that hangs.
    let outcome = run_within(Duration::from_secs(seconds + 120), &mut command, b"");
    let outside = fs::read_to_string(scratch.path().join("outside")).expect("the file outside");
    assert_eq!(outside, "outside", "seed {seed} changed a file outside");
    outcome
}

#[track_caller]
fn assert_survived(seed: u64, outcome: &Outcome) {
    // A batch may write to the standard streams: only the last lines matter.
    let said: Vec<&str> = outcome.stdout.lines().filter(|l| l.contains("sysfuzz: ")).collect();
    println!("{}", said.join("\n"));
    let end = outcome.stderr.len().saturating_sub(4000);
    let errors = String::from_utf8_lossy(&outcome.stderr.as_bytes()[end..]);
    assert!(
        outcome.code == Some(0) && said.iter().any(|line| line.contains("sysfuzz: done")),
        "seed {seed}: exit {:?}\n{}\n{errors}",
        outcome.code,
        said.join("\n"),
    );
}

#[test]
fn the_kernel_survives_wild_system_calls() {
    assert_survived(1, &fuzz(1, "256MiB"));
}

#[test]
fn the_kernel_survives_wild_system_calls_by_chance() {
    let by_clock = || {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        u64::from(now.expect("the clock is right").subsec_nanos())
    };
    let seed = std::env::var("THAW_FUZZ_SEED")
        .map_or_else(|_| by_clock(), |text| text.parse().expect("THAW_FUZZ_SEED is a number"));
    println!("the seed is {seed}");
    assert_survived(seed, &fuzz(seed, "256MiB"));
}

/// A kernel that has failed in one process ends the sandbox, wherever in the family
/// that process is and whatever the others do.
#[test]
fn a_panic_in_an_orphan_ends_the_sandbox() {
    let program = compile("hostile/orphan_panic", Linking::Static);
    for _ in 0..5 {
        let mut command = thaw();
        command.args(["run", "--as-root", "--cpus=2", "--rootfs", "/", "--"]).arg(&program);
        let outcome = run_within(Duration::from_secs(30), &mut command, b"");
        assert!(outcome.code.is_some(), "the sandbox did not end: {}", outcome.stderr);
        assert_ne!(outcome.code, Some(0), "{}", outcome.stderr);
        assert!(outcome.stderr.contains("thaw kernel panicked"), "{}", outcome.stderr);
    }
}
