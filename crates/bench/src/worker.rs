//! Worker processes: this same executable, started again to do one side of a measurement.
//!
//! A worker reads orders from standard input and answers each with one line on standard
//! output. It has one thread, because the two workers on the host move into a network
//! namespace of their own, which a process with several threads cannot do completely.

use crate::{native, syscalls, volume};
use std::io;
use std::process::{Command, ExitCode};
use std::str::FromStr;

/// The arguments that make an executable a worker; the name of a [`Worker`] follows them.
///
/// A program that uses this crate has to call [`run`] when it is started with these
/// arguments, before it starts a thread.
pub const WORKER_ARGUMENTS: [&str; 2] = ["bench", "worker"];

/// A kind of worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Worker {
    /// Starts a program on the host, again and again, and times its first response byte.
    Starts,
    /// Makes system calls, on the host or in a sandbox, and times them.
    Calls,
    /// Reads and writes files of its current directory, on the host or in a sandbox.
    Files,
    /// Runs a server on the host and asks it with `wrk`.
    Server,
    /// Runs many servers on the host, each in a network of its own.
    Servers,
}

impl Worker {
    /// Every kind.
    pub const ALL: [Self; 5] =
        [Self::Starts, Self::Calls, Self::Files, Self::Server, Self::Servers];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Starts => "starts",
            Self::Calls => "calls",
            Self::Files => "files",
            Self::Server => "server",
            Self::Servers => "servers",
        }
    }

    /// The arguments of such a worker, after the executable.
    pub fn arguments(self) -> [&'static str; 3] {
        let [verb, subject] = WORKER_ARGUMENTS;
        [verb, subject, self.name()]
    }

    /// The command that starts such a worker on the host.
    pub(crate) fn command(self) -> io::Result<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(self.arguments());
        Ok(command)
    }
}

/// No kind of worker has that name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no such worker; the workers are starts, calls, files, server and servers")]
pub struct UnknownWorker;

impl FromStr for Worker {
    type Err = UnknownWorker;

    fn from_str(name: &str) -> Result<Self, UnknownWorker> {
        Self::ALL.into_iter().find(|worker| worker.name() == name).ok_or(UnknownWorker)
    }
}

/// Does the work of a worker until standard input ends.
///
/// An error goes to standard output in the place of a result, where the measuring process
/// reads it.
pub fn run(worker: Worker) -> ExitCode {
    let outcome = match worker {
        Worker::Starts => native::serve_starts(),
        Worker::Calls => syscalls::serve_calls(),
        Worker::Files => volume::serve_files(),
        Worker::Server => syscalls::serve_server(),
        Worker::Servers => native::serve_servers(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for worker in Worker::ALL {
            assert_eq!(worker.name().parse(), Ok(worker));
            assert!(UnknownWorker.to_string().contains(worker.name()));
        }
        assert_eq!("http".parse::<Worker>(), Err(UnknownWorker));
    }
}
