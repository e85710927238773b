//! The kernel is compiled for a second platform, on which nothing of the first one is there: a use
//! of host processes beside the traits of `thaw_platform::machine` fails here.

use std::path::Path;
use std::process::Command;

#[test]
fn the_kernel_compiles_for_another_platform() {
    // Not the outer build's: that one holds its lock, and its flags are not the kernel's.
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("another-platform");
    let output = Command::new(env!("CARGO"))
        .args(["check", "--quiet", "--locked", "--offline", "--bin", "thaw-kernel"])
        .args(["--features", "freestanding,another-platform", "--target-dir"])
        .arg(target)
        .arg("--manifest-path")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml"))
        .env_remove("RUSTFLAGS")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "the kernel needs its first platform:\n{errors}");
}
