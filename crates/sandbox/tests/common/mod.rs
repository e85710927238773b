//! What the tests with real processes share: a stand-in kernel, written in C,
//! and a pool of its zygotes.
#![allow(unsafe_code, dead_code)]

pub mod sleeper;

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use thaw_sandbox::{
    BlobSource, Console, Event, HostDirectory, Kernel, Rootfs, Sandbox, StartSpec, WeakLimits,
    Zygote, ZygoteConfig, ZygoteParent, zygote_parent_main,
};

/// A test binary has no `main` of its own in which to become a zygote parent,
/// so it does so before the test harness starts.
extern "C" fn before_main() {
    zygote_parent_main();
}

#[used]
// SAFETY: the section holds pointers to functions that the C library calls
// before `main`, with the signature of `before_main`.
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = before_main;

/// The ELF file of a stand-in kernel that is compiled with these flags.
pub fn standin_elf(flags: &[&str]) -> Vec<u8> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/common/standin.c");
    let output = tempfile::tempdir().unwrap();
    let elf = output.path().join("standin");
    let status = Command::new("cc")
        .args([
            "-O1",
            "-fPIE",
            "-ffreestanding",
            "-fno-stack-protector",
            "-fno-builtin",
            "-nostdlib",
        ])
        .args(["-static", "-no-pie", "-Wl,-z,noexecstack"])
        .args(["-Wl,-Ttext-segment=0x7e0000000000", "-Wl,--build-id=none", "-w"])
        .args(flags)
        .arg("-o")
        .arg(&elf)
        .arg(source)
        .status()
        .expect("a C compiler is installed");
    assert!(status.success());
    std::fs::read(elf).unwrap()
}

fn compile(flags: &[&str]) -> Kernel {
    Kernel::from_elf(standin_elf(flags)).unwrap()
}

/// The stand-in kernel.
pub fn standin() -> Kernel {
    static KERNEL: OnceLock<Kernel> = OnceLock::new();
    KERNEL.get_or_init(|| compile(&[])).clone()
}

/// A stand-in kernel that does not install a filter.
pub fn careless_standin() -> Kernel {
    static KERNEL: OnceLock<Kernel> = OnceLock::new();
    KERNEL.get_or_init(|| compile(&["-DNO_FILTER"])).clone()
}

pub fn config() -> ZygoteConfig {
    // Tests that need control groups ask for them: [`has_groups`].
    ZygoteConfig { weak_limits: WeakLimits::Accept, ..ZygoteConfig::new(standin(), Console::Pipe) }
}

pub fn parent() -> ZygoteParent {
    ZygoteParent::start(config()).unwrap()
}

pub fn zygote() -> Zygote {
    parent().create().unwrap()
}

/// Blobs with these contents.
pub struct Blobs(pub Vec<Vec<u8>>);

impl BlobSource for Blobs {
    fn open_blob(&self, blob: u32) -> io::Result<OwnedFd> {
        let content = self.0.get(blob as usize).ok_or(io::ErrorKind::NotFound)?;
        let mut file = tempfile::NamedTempFile::new()?;
        io::Write::write_all(&mut file, content)?;
        Ok(File::open(file.path())?.into())
    }
}

/// A rootfs with these blobs and an index that nobody reads.
pub fn index_rootfs(blobs: Vec<Vec<u8>>) -> Rootfs {
    Rootfs::Index {
        file: Arc::new(tempfile::tempfile().unwrap()),
        len: 0,
        blobs: Arc::new(Blobs(blobs)),
    }
}

pub fn host_rootfs(path: &Path) -> Rootfs {
    Rootfs::HostDirectory(Arc::new(HostDirectory::open(path).unwrap()))
}

/// Starts `command` of the stand-in with one argument.
pub fn start_with(
    zygote: Zygote,
    command: &str,
    argument: &str,
    rootfs: Rootfs,
    change: impl FnOnce(&mut StartSpec<'_>),
) -> Sandbox {
    let stderr = io::stderr();
    let mut spec = StartSpec {
        program: None,
        argv: vec![OsString::from(command), OsString::from(argument)],
        env: Vec::new(),
        cwd: "/".into(),
        hostname: "standin".into(),
        uid: 0,
        gid: 0,
        port: 0,
        entry_signal: 0,
        cpus: 1,
        memory_limit: 0,
        process_limit: 0,
        cpu_time_limit: None,
        flags: 0,
        rootfs,
        egress: Arc::default(),
        mounts: Vec::new(),
        stdio: [stderr.as_fd(); 3],
        window: None,
    };
    change(&mut spec);
    zygote.start(&spec).unwrap()
}

pub fn start(command: &str, argument: &str) -> Sandbox {
    start_with(zygote(), command, argument, index_rootfs(Vec::new()), |_| {})
}

/// The next event; panics when there is none for long.
pub fn next(sandbox: &mut Sandbox) -> Event {
    sandbox.wait_event(Some(Duration::from_secs(20))).unwrap().expect("an event")
}

/// The text that the stand-in says next.
pub fn said(sandbox: &mut Sandbox) -> String {
    match next(sandbox) {
        Event::Failed(text) => text,
        event => panic!("{event:?}"),
    }
}

/// Whether the host enforces all limits of this parent's sandboxes; the test is skipped
/// if not.
pub fn has_groups(parent: &ZygoteParent) -> bool {
    match parent.missing_controllers().first() {
        None => true,
        Some(missing) => {
            thaw_skip::skip(&format!("no control groups ({})", missing.reason));
            false
        }
    }
}
