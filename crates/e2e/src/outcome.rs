//! Running a command to its end, with a limit on how long that may take.

use crate::processes;
use std::io::{Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long a command may take before it is taken for stuck, unless said otherwise.
const PATIENCE: Duration = Duration::from_secs(300);

/// What became of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The exit code; 128 and the signal's number after death by a signal; none
    /// if it was stuck and had to be killed.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Outcome {
    /// Standard output of a command that must succeed.
    #[track_caller]
    pub fn success(self) -> String {
        assert_eq!(self.code, Some(0), "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        self.stdout
    }

    /// What a command says that must fail.
    #[track_caller]
    pub fn refusal(self) -> String {
        assert_ne!(self.code, Some(0), "{}", self.stdout);
        self.stderr
    }
}

/// Runs a command with empty standard input.
pub fn run(command: &mut Command) -> Outcome {
    run_with_input(command, b"")
}

/// Runs a command with `input` as its standard input.
pub fn run_with_input(command: &mut Command, input: &[u8]) -> Outcome {
    run_within(PATIENCE, command, input)
}

/// Runs a command that may take `patience` with `input` as its standard input.
pub fn run_within(patience: Duration, command: &mut Command, input: &[u8]) -> Outcome {
    // A process group of its own, so that a stuck command goes with all it started.
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child =
        command.spawn().unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
    let mut stdin = child.stdin.take().expect("piped");
    let input = input.to_owned();
    // A program that does not read its input closes the pipe: no error here.
    let feeder = thread::spawn(move || drop(stdin.write_all(&input)));
    let stdout = drain(child.stdout.take().expect("piped"));
    let stderr = drain(child.stderr.take().expect("piped"));
    let code = wait(&mut child, patience);
    feeder.join().expect("the feeder");
    Outcome {
        code,
        stdout: stdout.join().expect("the reader"),
        stderr: stderr.join().expect("the reader"),
    }
}

fn drain(mut stream: impl Read + Send + 'static) -> JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // An error here is the end of a stream whose process was killed.
        let _ = stream.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

fn wait(child: &mut Child, patience: Duration) -> Option<i32> {
    let deadline = Instant::now() + patience;
    loop {
        if let Some(status) = child.try_wait().expect("the child is ours") {
            return Some(status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0)));
        }
        if Instant::now() >= deadline {
            eprintln!("stuck for {patience:?}:\n{}", processes::activity(child.id()));
            let group = rustix::process::Pid::from_child(child);
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
            let _ = child.wait();
            return None;
        }
        thread::sleep(Duration::from_millis(2));
    }
}
