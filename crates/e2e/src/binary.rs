//! Finding the `thaw` binary and looking into the kernel that it carries.

use object::{Object, ObjectSymbol};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The root of the repository.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository")
}

fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository().join("target"), PathBuf::from)
}

/// Where tests put what they build: guest programs, stores.
pub fn build_directory() -> PathBuf {
    target().join("tmp/e2e")
}

/// The binary under test: `THAW_BIN`, or the release build.
pub fn thaw_binary() -> PathBuf {
    if let Some(path) = std::env::var_os("THAW_BIN") {
        let path = PathBuf::from(path);
        assert!(path.is_file(), "THAW_BIN is {}, which is no file", path.display());
        return path;
    }
    let path = target().join("release/thaw");
    assert!(
        path.is_file(),
        "{} is missing; build it with `cargo build --release -p thaw-cli`, or set THAW_BIN",
        path.display()
    );
    path
}

/// A `thaw` command with no variables of the caller that change what it does.
pub fn thaw() -> Command {
    let mut command = Command::new(thaw_binary());
    for variable in ["THAW_HOME", "THAW_TRACE", "THAW_NO_PATCHING", "THAW_LOG"] {
        command.env_remove(variable);
    }
    command
}

/// Address of a symbol of the kernel that the binary runs.
pub fn kernel_symbol(name: &str) -> u64 {
    let bytes = match std::env::var_os("THAW_KERNEL") {
        Some(path) => std::fs::read(path).expect("the file that THAW_KERNEL names"),
        None => embedded_kernel(),
    };
    let file = object::File::parse(&*bytes).expect("an ELF file");
    file.symbols()
        .find(|symbol| symbol.name() == Ok(name))
        .unwrap_or_else(|| panic!("the kernel has no symbol {name}"))
        .address()
}

/// The kernel that the binary has inside, changed in a few bytes: a kernel build of its own.
/// `change` gets the file and the place behind the owner of the note of this type.
pub fn changed_kernel(note: u32, owner: &[u8], change: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let mut bytes = embedded_kernel();
    let head = [&note.to_le_bytes()[..], owner].concat();
    let is_head = |window: &[u8]| window == head;
    let at = bytes.windows(head.len()).position(is_head).expect("the kernel has that note");
    change(&mut bytes[at + head.len()..]);
    bytes
}

fn embedded_kernel() -> Vec<u8> {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("kernel.elf");
    let status = thaw().args(["doctor", "--kernel-elf"]).arg(&path).status().expect("thaw runs");
    assert!(status.success(), "thaw doctor --kernel-elf: {status}");
    std::fs::read(&path).expect("the kernel's ELF file")
}
