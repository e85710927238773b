//! The same command in a plain container of crun or runc, with the programs of the host.

use super::native::timed;
use serde_json::{Value, json};
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Container runtimes with the options they are tried with, in this order. crun wants one version
/// of control groups; where there are both, it may run without any.
const RUNTIMES: [&[&str]; 3] = [&["crun"], &["crun", "--cgroup-manager=disabled"], &["runc"]];
/// Directories of programs and their libraries; with `/usr` merged, all but it are links.
const PROGRAMS: [&str; 6] = ["usr", "bin", "sbin", "lib", "lib32", "lib64"];
/// Directories on which something is mounted.
const PLACES: [&str; 3] = ["proc", "dev", "tmp"];

/// A container that lives, and the means to run others.
pub(super) struct Container {
    runtime: &'static [&'static str],
    directory: PathBuf,
    lives: bool,
}

impl Container {
    /// Makes a container that sleeps, with the first runtime that can run `argv` in one. One
    /// sentence if none can.
    pub(super) fn start(directory: &Path, argv: &[String]) -> Result<Self, String> {
        let mut reasons = Vec::new();
        for runtime in RUNTIMES {
            let mut container = Self { runtime, directory: directory.to_owned(), lives: false };
            match container.prepare(argv) {
                Ok(()) => return Ok(container),
                Err(reason) => reasons.push(format!("{}: {reason}", runtime.join(" "))),
            }
        }
        Err(format!("no plain container was run beside it ({})", reasons.join("; ")))
    }

    /// The runtime and its options.
    pub(super) fn runtime(&self) -> String {
        self.runtime.join(" ")
    }

    /// Nanoseconds for a new container, from its request to the end of its command.
    pub(super) fn run(&self) -> Result<u64, String> {
        self.timed(&["run", "--bundle", &self.bundle("once"), &name("once")])
    }

    /// Nanoseconds for a command in the container that lives.
    pub(super) fn exec(&self, argv: &[String]) -> Result<u64, String> {
        let id = name("lives");
        let arguments = ["exec", &id].into_iter().chain(argv.iter().map(String::as_str));
        self.timed(&arguments.collect::<Vec<_>>())
    }

    fn prepare(&mut self, argv: &[String]) -> Result<(), String> {
        let said = |error: io::Error| error.to_string();
        let sleeps = ["sleep", "infinity"].map(str::to_owned);
        write_bundle(&self.directory.join("once"), argv).map_err(said)?;
        write_bundle(&self.directory.join("lives"), &sleeps).map_err(said)?;
        self.run()?;
        let bundle = self.bundle("lives");
        let mut command = self.command(&["run", "--detach", "--bundle", &bundle, &name("lives")]);
        // The one that lives would hold the ends of pipes.
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.lives = true;
        match command.status().map_err(said)?.success() {
            true => self.exec(argv).map(drop),
            false => Err("it cannot start one that goes on".to_owned()),
        }
    }

    fn bundle(&self, name: &str) -> String {
        self.directory.join(name).to_string_lossy().into_owned()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.runtime[0]);
        command.arg("--root").arg(self.directory.join("state"));
        command.args(&self.runtime[1..]).args(arguments);
        command
    }

    fn timed(&self, arguments: &[&str]) -> Result<u64, String> {
        let (output, took) =
            timed(&mut self.command(arguments)).map_err(|error| error.to_string())?;
        let text = String::from_utf8_lossy(&output.stderr);
        let last = text.lines().rev().find(|line| !line.trim().is_empty());
        match output.status.success() {
            true => Ok(took),
            false => Err(last.unwrap_or("it has not ended well").trim().to_owned()),
        }
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        if self.lives
            && let Err(error) = timed(&mut self.command(&["delete", "--force", &name("lives")]))
        {
            eprintln!("a container of this measurement is still there: {error}");
        }
    }
}

fn name(of: &str) -> String {
    format!("thaw-bench-{}-{of}", std::process::id())
}

/// Writes a bundle (OCI runtime specification) whose files are the host's programs.
fn write_bundle(bundle: &Path, argv: &[String]) -> io::Result<()> {
    let root = bundle.join("rootfs");
    let _ = fs::remove_dir_all(&root);
    for place in PLACES {
        fs::create_dir_all(root.join(place))?;
    }
    let mut bound = Vec::new();
    for name in PROGRAMS {
        let (host, place) = (Path::new("/").join(name), root.join(name));
        match fs::symlink_metadata(&host) {
            Ok(found) if found.is_symlink() => symlink(fs::read_link(&host)?, place)?,
            Ok(_) => {
                fs::create_dir_all(place)?;
                bound.push(host);
            }
            Err(_) => {}
        }
    }
    let text = serde_json::to_vec(&configuration(argv, &bound))?;
    fs::write(bundle.join("config.json"), text)
}

fn configuration(argv: &[String], bound: &[PathBuf]) -> Value {
    let mut mounts = vec![
        json!({ "destination": "/proc", "type": "proc", "source": "proc" }),
        json!({ "destination": "/dev", "type": "tmpfs", "source": "tmpfs" }),
        json!({ "destination": "/tmp", "type": "tmpfs", "source": "tmpfs" }),
    ];
    mounts.extend(bound.iter().map(|host| {
        json!({ "destination": host, "type": "bind", "source": host, "options": ["rbind", "ro"] })
    }));
    let namespaces = ["pid", "mount", "ipc", "uts", "network"].map(|kind| json!({ "type": kind }));
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "user": { "uid": 0, "gid": 0 },
            "args": argv,
            "env": ["PATH=/usr/bin:/bin"],
            "cwd": "/",
        },
        "root": { "path": "rootfs", "readonly": true },
        "mounts": mounts,
        "linux": { "namespaces": namespaces },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bundle_has_the_programs_of_the_host() {
        let directory = tempfile::tempdir().unwrap();
        // A second one takes the place of the first.
        for argv in [["false"], ["true"]] {
            write_bundle(directory.path(), &argv.map(str::to_owned)).unwrap();
        }
        let text = fs::read(directory.path().join("config.json")).unwrap();
        let configuration: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(configuration["process"]["args"], json!(["true"]));
        let binds = |mount: &&Value| mount["type"] == "bind";
        let mounts = configuration["mounts"].as_array().unwrap();
        for mount in mounts.iter().filter(binds) {
            let place = mount["destination"].as_str().unwrap().trim_start_matches('/');
            assert!(directory.path().join("rootfs").join(place).is_dir(), "{mount}");
        }
        assert!(mounts.iter().any(|mount| mount["destination"] == "/usr"), "{configuration}");
    }

    #[test]
    fn who_cannot_run_containers_says_why() {
        let directory = tempfile::tempdir().unwrap();
        let Err(reason) = Container::start(directory.path(), &["/no/such/program".to_owned()])
        else {
            panic!("nobody has this program");
        };
        assert!(reason.starts_with("no plain container was run beside it (crun: "), "{reason}");
    }
}
