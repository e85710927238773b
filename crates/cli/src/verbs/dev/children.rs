//! What `thaw dev` starts: builds, and a daemon of its own.
//!
//! They have process groups of their own, so that a Ctrl-C at the terminal ends `thaw dev`, and
//! that ends them.

use super::Arguments;
use super::session::Happening;
use crate::failure::Failure;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::SyncSender;
use std::thread;
use std::time::Duration;
use thaw_sandbox::WeakLimits;

/// How long the daemon may go on with what it serves when `thaw dev` ends.
const DRAIN: &str = "1s";
/// Zygotes of a daemon that serves one person.
const ZYGOTES: &str = "4";
/// How long the daemon may take to listen.
const START: Duration = Duration::from_secs(60);

/// `thaw` itself, apart from this process's terminal.
fn thaw() -> Result<Command, Failure> {
    let own = std::env::current_exe()
        .map_err(|error| Failure::failed(format!("cannot find its own program ({error})")))?;
    let mut command = Command::new(own);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
    if std::env::var_os("THAW_LOG").is_none() {
        command.env("THAW_LOG", "warn");
    }
    Ok(command)
}

fn limits(command: &mut Command, arguments: &Arguments) {
    if arguments.weak_limits.chosen() == WeakLimits::Accept {
        command.arg("--weak-limits");
    }
}

/// Ends a process as `kill` does.
fn end(child: &Child) {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    // It may have ended by itself.
    let _ = pid.map(|pid| kill_process(pid, Signal::TERM));
}

/// A build that is running.
pub(super) struct Build {
    child: Child,
}

impl Build {
    /// Begins one; its end is a [`Happening::Built`].
    pub fn begin(
        directory: &Path,
        arguments: &Arguments,
        happenings: &SyncSender<Happening>,
    ) -> Result<Self, Failure> {
        let mut command = thaw()?;
        command.args(["build", "--json", "--no-compare"]);
        limits(&mut command, arguments);
        for tools in &arguments.tools {
            command.arg("--tools").arg(tools);
        }
        if arguments.trust_build {
            command.arg("--trust-build");
        }
        let mut child = command.arg("--").arg(directory).spawn()?;
        let stdout = child.stdout.take().expect("it was asked for");
        let happenings = happenings.clone();
        thread::Builder::new().name("build".to_owned()).spawn(move || {
            drain(stdout);
            let _ = happenings.send(Happening::Built);
        })?;
        Ok(Self { child })
    }

    /// How it ended, once it has said so.
    pub fn finish(mut self) -> Result<ExitStatus, Failure> {
        Ok(self.child.wait()?)
    }

    /// Ends it before it is done, and with it a build command that runs on this host: it leads a
    /// process group of its own.
    pub fn cancel(mut self) {
        let group = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        // It may have ended by itself.
        let _ = group.map(|group| kill_process_group(group, Signal::TERM));
        let _ = self.child.wait();
    }
}

/// Reads to the end, which comes with the end of the program.
fn drain(mut stdout: ChildStdout) {
    let mut bytes = [0; 4096];
    while stdout.read(&mut bytes).is_ok_and(|count| count > 0) {}
}

/// A daemon of `thaw dev`'s own.
pub(super) struct OwnDaemon {
    child: Child,
}

impl OwnDaemon {
    /// Starts one and waits until it serves; its end is a [`Happening::DaemonEnded`].
    pub fn start(
        arguments: &Arguments,
        happenings: &SyncSender<Happening>,
    ) -> Result<Self, Failure> {
        let mut command = thaw()?;
        let listen = arguments.listen.to_string();
        command.args(["serve", "--listen", &listen, "--drain", DRAIN, "--zygotes", ZYGOTES]);
        limits(&mut command, arguments);
        let mut child = command.spawn()?;
        let stdout = child.stdout.take().expect("it was asked for");
        let happenings = happenings.clone();
        let (is_up, up) = std::sync::mpsc::channel();
        thread::Builder::new().name("daemon".to_owned()).spawn(move || {
            let mut stdout = BufReader::new(stdout);
            let mut line = String::new();
            // It says where it serves when it does.
            if stdout.read_line(&mut line).is_ok_and(|count| count > 0) {
                let _ = is_up.send(());
            }
            drop(is_up);
            while stdout.read_line(&mut line).is_ok_and(|count| count > 0) {
                line.clear();
            }
            let _ = happenings.send(Happening::DaemonEnded);
        })?;
        if up.recv_timeout(START).is_err() {
            end(&child);
            let _ = child.wait();
            return Err(Failure::failed(format!(
                "the daemon did not come up on {listen}; it says above why, and --listen names another address"
            )));
        }
        Ok(Self { child })
    }

    /// Ends it, and with it all copies.
    pub fn stop(mut self) {
        end(&self.child);
        let _ = self.child.wait();
    }
}
