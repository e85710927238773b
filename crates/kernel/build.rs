//! Link arguments of the freestanding kernel ELF, and the guest's vdso.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for arg in [
        "-nostartfiles",
        "-nostdlib",
        "-static",
        "-no-pie",
        "-Wl,-z,noexecstack",
        "-Wl,-z,norelro",
        "-Wl,-z,max-page-size=0x200000",
        "-Wl,--build-id=sha1",
    ] {
        println!("cargo:rustc-link-arg-bins={arg}");
    }
    let script = Path::new(&std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"))
        .join("src/kernel.lds");
    println!("cargo:rerun-if-changed={}", script.display());
    println!("cargo:rustc-link-arg-bins=-Wl,-T,{}", script.display());
    build_vdso();
}

/// Assembles and links the vdso with the C compiler that Rust links with.
fn build_vdso() {
    let folder = Path::new("src/exec");
    let (source, versions) = (folder.join("vdso.S"), folder.join("vdso.map"));
    println!("cargo:rerun-if-changed={}", source.display());
    println!("cargo:rerun-if-changed={}", versions.display());
    let script = folder.join("vdso.lds");
    println!("cargo:rerun-if-changed={}", script.display());
    let out = Path::new(&std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("vdso.so");
    let status = Command::new("cc")
        .args([
            "-shared",
            "-nostdlib",
            "-s",
            "-Wl,-soname=linux-vdso.so.1",
            "-Wl,--hash-style=both",
        ])
        .args([
            "-Wl,-z,max-page-size=4096",
            "-Wl,-z,noseparate-code",
            "-Wl,--build-id=none",
            "-Wl,-Bsymbolic",
        ])
        .arg(format!("-Wl,--version-script={}", versions.display()))
        .arg(format!("-Wl,-T,{}", script.display()))
        .arg("-o")
        .arg(&out)
        .arg(&source)
        .status();
    match status {
        Ok(status) if status.success() => {}
        outcome => {
            panic!("cc cannot build the guest's vdso ({outcome:?}); install gcc and binutils")
        }
    }
}
