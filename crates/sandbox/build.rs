//! Builds the Thaw kernel, a freestanding ELF, so that the library can carry
//! it inside. `THAW_KERNEL_ELF` names a prebuilt ELF to be taken instead.

use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Up to which cost LLVM inlines functions of the kernel that have no hint. Its own choice at this level of
/// optimization is 250, with which the kernel is larger than the huge page that it is to fit in
/// (docs/decisions/0009).
const INLINED_COST: u32 = 150;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=THAW_KERNEL_ELF");
    println!("cargo:rerun-if-changed=../kernel");
    println!("cargo:rerun-if-changed=../platform");
    println!("cargo:rerun-if-changed=../abi");

    let elf = match std::env::var_os("THAW_KERNEL_ELF") {
        Some(path) => {
            let path = PathBuf::from(path);
            println!("cargo:rerun-if-changed={}", path.display());
            path
        }
        None => build_kernel(),
    };
    println!("cargo:rustc-env=THAW_KERNEL_ELF_PATH={}", elf.display());
}

/// Runs a nested cargo in a target directory of its own (the outer cargo holds
/// the lock of the usual one) and returns the path of the kernel ELF.
fn build_kernel() -> PathBuf {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    // Asked for at run time: a target directory may serve several checkouts.
    let here = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    let target = kernel_target(&out, &here);
    let manifest = Path::new(&here).join("../../Cargo.toml");
    let mut cargo = Command::new(std::env::var_os("CARGO").expect("cargo sets CARGO"));
    cargo
        .args(["build", "-p", "thaw-kernel", "--bin", "thaw-kernel"])
        .args(["--features", "freestanding", "--profile", "kernel", "--target-dir"])
        .arg(&target)
        .arg("--manifest-path")
        .arg(manifest);
    // The kernel's code must not depend on how this crate is built: no flags of
    // the outer build (coverage, sanitizers, clippy as the compiler) reach it.
    for (name, _) in std::env::vars_os() {
        let name_text = name.to_string_lossy();
        // What says where crates come from stays.
        let registry =
            ["CARGO_HOME", "CARGO_NET_", "CARGO_HTTP_", "CARGO_REGISTRIES_", "CARGO_SOURCE_"]
                .iter()
                .any(|prefix| name_text.starts_with(prefix));
        let inherited = name_text.starts_with("CARGO_") && !registry;
        let flags = [
            "RUSTFLAGS",
            "RUSTDOCFLAGS",
            "RUSTC_WRAPPER",
            "RUSTC_WORKSPACE_WRAPPER",
            "RUSTC",
            "MAKEFLAGS",
            "MFLAGS",
        ]
        .contains(&&*name_text);
        if inherited || flags {
            cargo.env_remove(&name);
        }
    }
    cargo.env("CARGO_ENCODED_RUSTFLAGS", format!("-Cllvm-args=-inline-threshold={INLINED_COST}"));
    let status = cargo.status().unwrap_or_else(|error| panic!("cannot run cargo: {error}"));
    assert!(
        status.success(),
        "the Thaw kernel does not build; mend it, or set THAW_KERNEL_ELF to a prebuilt one"
    );
    // The next build of this crate in another profile may replace the file there.
    let elf = out.join("thaw-kernel");
    if let Err(error) = std::fs::copy(target.join("kernel/thaw-kernel"), &elf) {
        panic!("cannot copy the kernel to {} ({error})", elf.display());
    }
    elf
}

/// One target directory for the kernel of a checkout, whatever this crate is built for
/// (product, tests, lints): the kernel is the same, and takes a minute.
fn kernel_target(out: &Path, checkout: &OsStr) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    checkout.hash(&mut hasher);
    // OUT_DIR is TARGET/PROFILE/build/thaw-sandbox-HASH/out.
    let target = out.ancestors().nth(4).expect("OUT_DIR lies in a target directory");
    target.join(format!("thaw-kernel-{:016x}", hasher.finish()))
}
