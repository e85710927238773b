//! SDKs of others from PyPI and npm, and what tests need to have them talk to a daemon.

use crate::{Daemon, DaemonOptions, build_directory, run, run_within, skip};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// How long installing packages may take.
const PATIENCE: Duration = Duration::from_secs(400);
/// E2B's SDK for Python that the tests use; docs/e2b.md says that it works.
pub const E2B_SDK: &str = "e2b==2.63.0";
/// The same for JavaScript.
pub const E2B_JS_SDK: &str = "e2b@2.51.0";
/// A key of E2B's API.
pub const E2B_KEY: &str = "e2b_0123456789abcdef0123456789abcdef";

/// A Python with these packages, each `NAME==VERSION`; made once for a build directory. None, and a
/// skipped test, if it cannot be had.
pub fn python_with(packages: &[&str]) -> Option<PathBuf> {
    let venv = build_directory().join(packages.join("-").replace("==", "-"));
    let (python, is_whole) = (venv.join("bin/python3"), venv.join("is-whole"));
    fs::create_dir_all(&venv).expect("a directory");
    // Tests run side by side, in several processes.
    let lock = File::create(venv.with_extension("lock")).expect("a file");
    lock.lock().expect("a lock");
    if is_whole.exists() {
        return Some(python);
    }
    let mut make = Command::new("python3");
    let made = run_within(PATIENCE, make.args(["-m", "venv", "--clear"]).arg(&venv), b"");
    if made.code != Some(0) {
        skip(&format!("this python3 makes no virtual environment: {}", made.stderr));
        return None;
    }
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).args(packages);
    let installed = run_within(PATIENCE, &mut pip, b"");
    if installed.code != Some(0) {
        skip(&format!("PyPI does not give {}: {}", packages.join(" "), installed.stderr));
        return None;
    }
    fs::write(is_whole, "").expect("a file");
    Some(python)
}

/// A directory with these packages for the Python of the host's system, which sandboxes have; made once
/// for a build directory. None, and a skipped test, if they cannot be had.
pub fn python_site(packages: &[&str]) -> Option<PathBuf> {
    let site = build_directory().join(format!("site-{}", packages.join("-").replace("==", "-")));
    let is_whole = site.join("is-whole");
    fs::create_dir_all(&site).expect("a directory");
    // Tests run side by side, in several processes.
    let lock = File::create(site.with_extension("lock")).expect("a file");
    lock.lock().expect("a lock");
    if is_whole.exists() {
        return Some(site);
    }
    let python = python_with(packages)?;
    let say = "import sys; print('%d.%d' % sys.version_info[:2])";
    let version = run(Command::new("/usr/bin/python3").args(["-c", say])).success();
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]);
    pip.args(["--only-binary=:all:", "--python-version", version.trim(), "--target"]).arg(&site);
    let installed = run_within(PATIENCE, pip.args(packages), b"");
    if installed.code != Some(0) {
        skip(&format!("PyPI does not give {}: {}", packages.join(" "), installed.stderr));
        return None;
    }
    fs::write(is_whole, "").expect("a file");
    Some(site)
}

/// The module of a package of npm, `NAME@VERSION`; made once for a build directory. None, and a skipped
/// test, if it cannot be had.
pub fn js_module(package: &str) -> Option<PathBuf> {
    let (name, version) = package.rsplit_once('@').expect("a name and a version");
    let place = build_directory().join(format!("{}-js-{version}", name.replace(['@', '/'], "")));
    let (module, is_whole) = (place.join("node_modules").join(name), place.join("is-whole"));
    if !Path::new("/usr/bin/npm").exists() {
        skip("there is no npm here");
        return None;
    }
    fs::create_dir_all(&place).expect("a directory");
    // Tests run side by side, in several processes.
    let lock = File::create(place.with_extension("lock")).expect("a file");
    lock.lock().expect("a lock");
    if is_whole.exists() {
        return Some(module);
    }
    let mut npm = Command::new("npm");
    npm.args(["install", "--silent", "--no-save", package]).current_dir(&place);
    let installed = run_within(PATIENCE, &mut npm, b"");
    if installed.code != Some(0) {
        skip(&format!("npm does not give {package}: {}", installed.stderr));
        return None;
    }
    fs::write(is_whole, "").expect("a file");
    Some(module)
}

/// Writes an `e2b.toml` that knows [`E2B_KEY`], with these lines of `[templates]`.
pub fn write_e2b_settings(home: &Path, templates: &str) {
    let hash: String = Sha256::digest(E2B_KEY).iter().map(|byte| format!("{byte:02x}")).collect();
    let key = format!("[[keys]]\nname = \"tests\"\nsha256 = \"{hash}\"\n");
    fs::write(home.join("e2b.toml"), format!("[templates]\n{templates}\n{key}")).expect("a file");
}

/// A daemon that serves E2B's API and the dashboard.
pub fn start_with_e2b(home: &Path) -> Daemon {
    let arguments = ["--e2b", "127.0.0.1:0", "--dashboard", "127.0.0.1:0"];
    Daemon::start(home, &DaemonOptions { arguments: arguments.map(str::to_owned).into() })
}

/// An address of a daemon, by its name in daemon.json.
pub fn announced(daemon: &Daemon, name: &str) -> String {
    let text = fs::read(daemon.home().join("daemon.json")).expect("a running daemon");
    let announced: Value = serde_json::from_slice(&text).expect("JSON");
    announced[name].as_str().expect("an address").to_owned()
}

/// Has a program's SDK talk to a daemon.
pub fn use_e2b(program: &mut Command, daemon: &Daemon) {
    let url = format!("http://{}", announced(daemon, "e2b"));
    program.env("PYTHONPYCACHEPREFIX", build_directory().join("pycache"));
    program.env("E2B_API_URL", &url).env("E2B_SANDBOX_URL", &url).env("E2B_API_KEY", E2B_KEY);
}

/// A copy of an example without some of what its requirements.txt names, to be built.
pub fn example_without(example: &Path, into: &Path, packages: &[&str]) {
    run(Command::new("cp").arg("-r").arg(example).arg(into)).success();
    let _ = fs::remove_dir_all(into.join("build"));
    let file = into.join("requirements.txt");
    let text = fs::read_to_string(&file).expect("requirements.txt");
    let is_kept = |line: &&str| {
        let name = line.split("==").next().unwrap_or(line);
        !packages.contains(&name)
    };
    let kept: Vec<_> = text.lines().filter(is_kept).collect();
    assert_eq!(text.lines().count() - kept.len(), packages.len(), "{packages:?} in {text}");
    fs::write(file, kept.join("\n") + "\n").expect("requirements.txt");
}
