//! Guest programs: compiled, run on the host and in a sandbox, compared.

use crate::binary::{build_directory, repository, thaw};
use crate::outcome::{Outcome, run_with_input};
use similar::TextDiff;
use std::fmt::Write as _;
use std::fs::{self, File, FileTimes, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

/// How a C program is linked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Linking {
    /// One file, nothing else needed.
    Static,
    /// A position-independent static program.
    StaticPie,
    /// With an interpreter and shared libraries.
    Dynamic,
}

/// The directory with all guest programs.
fn sources() -> PathBuf {
    repository().join("tests/guest")
}

/// Names of the programs in a folder of `tests/guest`, sorted.
pub fn programs(folder: &str, extension: &str) -> Vec<String> {
    let entries = fs::read_dir(sources().join(folder)).expect("tests/guest");
    let mut names: Vec<String> = entries
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|e| e == extension))
        .map(|path| path.file_stem().expect("a stem").to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// Compiles a program of `tests/guest`, such as `c/start`, unless that was done
/// since the source last changed.
pub fn compile(name: &str, linking: Linking) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let source = sources().join(name).with_extension("c");
    let folder = match linking {
        Linking::Static => "static",
        Linking::StaticPie => "static-pie",
        Linking::Dynamic => "dynamic",
    };
    let directory = build_directory().join("guest").join(folder);
    fs::create_dir_all(&directory).expect("a directory for guest programs");
    let program = directory.join(source.file_stem().expect("a stem"));
    let changed = |path: &Path| fs::metadata(path).and_then(|m| m.modified()).ok();
    let headers = ["c/guest.h", "hostile/calls.h"].map(|header| changed(&sources().join(header)));
    let newest = headers.into_iter().fold(changed(&source), Ord::max);
    if changed(&program) > newest {
        return program;
    }
    let flags: &[&str] = match linking {
        Linking::Static => &["-static"],
        Linking::StaticPie => &["-static-pie"],
        Linking::Dynamic => &[],
    };
    // Other test programs may compile or run it just now.
    let new = program.with_extension(std::process::id().to_string());
    // Some calls pass on purpose what the compiler can see to be wrong.
    let output = Command::new("cc")
        .args(["-std=gnu17", "-O1", "-g", "-Wall", "-Wextra", "-Werror"])
        .args(["-Wno-nonnull", "-Wno-stringop-overflow", "-Wno-stringop-overread"])
        .args(flags)
        .arg("-o")
        .arg(&new)
        .arg(&source)
        .output()
        .expect("a C compiler (cc); install gcc");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::rename(new, &program).expect("a guest program");
    program
}

/// The interpreter that the tests use: the system's, if it has one.
pub fn python() -> PathBuf {
    let system = PathBuf::from("/usr/bin/python3");
    if system.exists() { system } else { PathBuf::from("python3") }
}

/// Files that exist before a program starts; in a sandbox they are the lower layer.
#[derive(Debug)]
pub struct Fixture {
    directory: tempfile::TempDir,
}

impl Fixture {
    /// Makes the files that `tests/guest/c/file_lower.c` describes.
    pub fn new() -> Self {
        let directory = tempfile::Builder::new().prefix("thaw-fixture-").tempdir().expect("/tmp");
        let fixture = Self { directory };
        fixture.fill();
        fixture
    }

    /// Where they are.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Makes everything as it was at first.
    pub fn refill(&self) {
        for entry in fs::read_dir(self.path()).expect("the fixture") {
            let path = entry.expect("an entry").path();
            if path.is_dir() && !path.is_symlink() {
                fs::remove_dir_all(&path).expect("removable");
            } else {
                fs::remove_file(&path).expect("removable");
            }
        }
        self.fill();
    }

    fn fill(&self) {
        let at = |name: &str| self.path().join(name);
        let big: Vec<u8> = (0..3 * 4096 + 123_usize).map(|i| (i * 7 + i / 256) as u8).collect();
        fs::create_dir_all(at("dir/sub")).expect("a directory");
        let files: [(&str, &[u8], u32); 9] = [
            ("hello.txt", b"hello, lower layer\n", 0o644),
            ("big.bin", &big, 0o644),
            ("empty", b"", 0o644),
            ("dir/a", b"file a\n", 0o644),
            ("dir/b", b"file b\n", 0o644),
            ("dir/c", b"file c\n", 0o644),
            ("dir/sub/deep.txt", b"deep\n", 0o644),
            ("hard1", b"hard\n", 0o644),
            ("script.sh", b"#!/bin/sh\necho hi\n", 0o755),
        ];
        let secret: (&str, &[u8], u32) = ("secret.txt", b"secret\n", 0o400);
        for (name, content, mode) in files.into_iter().chain([secret]) {
            fs::write(at(name), content).expect("a file");
            let time = UNIX_EPOCH + Duration::new(1_000_000_000, 123_456_789);
            let file = File::open(at(name)).expect("the file");
            file.set_times(FileTimes::new().set_modified(time)).expect("its time");
            fs::set_permissions(at(name), Permissions::from_mode(mode)).expect("its mode");
        }
        for directory in ["dir", "dir/sub"] {
            fs::set_permissions(at(directory), Permissions::from_mode(0o755)).expect("its mode");
        }
        fs::hard_link(at("hard1"), at("hard2")).expect("a hard link");
        for (target, link) in [("hello.txt", "link"), ("nowhere", "dangling"), ("loop", "loop")] {
            symlink(target, at(link)).expect("a symbolic link");
        }
    }

    /// Everything about the files that a program could have changed, as text.
    pub fn state(&self) -> String {
        let mut text = String::new();
        describe(self.path(), &mut text);
        text
    }
}

impl Default for Fixture {
    fn default() -> Self {
        Self::new()
    }
}

fn describe(directory: &Path, text: &mut String) {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(directory).expect("readable").map(|e| e.expect("an entry").path()).collect();
    paths.sort();
    for path in paths {
        let info = fs::symlink_metadata(&path).expect("attributes");
        let (mode, links) = (info.mode(), info.nlink());
        let (secs, nanos) = (info.mtime(), info.mtime_nsec());
        write!(text, "{} {mode:o} {links} {secs}.{nanos:09} ", path.display()).expect("a string");
        if info.is_dir() {
            text.push('\n');
            describe(&path, text);
        } else if info.is_symlink() {
            writeln!(text, "{:?}", fs::read_link(&path).expect("a target")).expect("a string");
        } else {
            writeln!(text, "{:?}", fs::read(&path).expect("content")).expect("a string");
        }
    }
}

/// Runs a C program on the host and in a sandbox and compares; the fixture's
/// path is its first argument, then come `arguments`.
pub fn compare_c(name: &str, linking: Linking, patching: bool, arguments: &[&str]) {
    let program = compile(&format!("c/{name}"), linking);
    compare(&[program], arguments, patching);
}

/// Runs a Python program on the host and in a sandbox and compares.
pub fn compare_python(name: &str, patching: bool) {
    let script = sources().join("python").join(name).with_extension("py");
    compare(&[python(), script], &[], patching);
}

fn compare(program: &[PathBuf], arguments: &[&str], patching: bool) {
    let fixture = Fixture::new();
    let mut command = program.to_vec();
    match arguments {
        [] => command.push(fixture.path().to_owned()),
        arguments => command.extend(arguments.iter().map(PathBuf::from)),
    }
    let native = on_host(&command);
    assert!(native.code.is_some(), "{command:?} does not even end on the host:\n{}", native.stdout);
    fixture.refill();
    let before = fixture.state();
    let sandboxed = in_sandbox(&command, patching, false);
    if sandboxed.code == native.code
        && sandboxed.stdout == native.stdout
        && sandboxed.stderr == native.stderr
    {
        assert_eq!(before, fixture.state(), "the sandboxed program changed files of the host");
        return;
    }
    let differences = differences(&native, &sandboxed);
    fixture.refill();
    let traced = in_sandbox(&command, patching, true);
    let lines: Vec<&str> = traced.stderr.lines().collect();
    panic!(
        "{command:?}: exit {:?} on the host, {:?} in the sandbox\n{differences}\n\
         the end of the trace:\n{}\n",
        native.code,
        sandboxed.code,
        lines[lines.len().saturating_sub(25)..].join("\n"),
    );
}

/// What a run in the sandbox printed in another way than the one on the host.
pub(crate) fn differences(native: &Outcome, sandboxed: &Outcome) -> String {
    [("stdout", &native.stdout, &sandboxed.stdout), ("stderr", &native.stderr, &sandboxed.stderr)]
        .map(|(name, a, b)| {
            TextDiff::from_lines(a, b)
                .unified_diff()
                .header(&format!("{name} on the host"), &format!("{name} in the sandbox"))
                .to_string()
        })
        .concat()
}

/// What every run has in its environment, besides `HOME`.
const ENVIRONMENT: [(&str, &str); 5] = [
    ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
    ("TERM", "dumb"),
    ("LANG", "C.UTF-8"),
    ("PYTHONDONTWRITEBYTECODE", "1"),
    ("GUEST_VALUE", "from outside"),
];

const INPUT: &[u8] = b"input of the program\n";

/// Starts a program on the host as one starts in a sandbox: in `/`, with an empty
/// environment, the standard descriptors only, and no signal ignored, whatever this
/// process has inherited (from make, from an editor, from a shell's background).
pub(crate) fn host_command(command: &[PathBuf]) -> Command {
    let mut native = Command::new("/usr/bin/env");
    native.args(["--default-signal", "/bin/sh"]);
    native.args(["-c", "exec \"$@\" 3<&- 4<&- 5<&- 6<&- 7<&- 8<&- 9<&-", "sh"]);
    native.args(command).env_clear().current_dir("/");
    native
}

fn on_host(command: &[PathBuf]) -> Outcome {
    let mut native = host_command(command);
    run_with_input(native.envs(ENVIRONMENT).env("HOME", "/root"), INPUT)
}

fn in_sandbox(command: &[PathBuf], patching: bool, traced: bool) -> Outcome {
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let mut sandboxed = thaw();
    sandboxed.args([
        "run",
        "--as-root",
        "--rootfs",
        "/",
        "--cpus=2",
        "--user",
        &format!("{uid}:{gid}"),
    ]);
    for (name, value) in ENVIRONMENT {
        sandboxed.arg(format!("--env={name}={value}"));
    }
    sandboxed.arg("--").args(command);
    if !patching {
        sandboxed.env("THAW_NO_PATCHING", "1");
    }
    if traced {
        sandboxed.env("THAW_TRACE", "syscalls");
    }
    run_with_input(&mut sandboxed, INPUT)
}
