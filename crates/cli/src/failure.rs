//! How a verb fails, and what the caller's shell sees of it.

use std::fmt::Display;
use std::process::ExitCode;
use thaw_daemon::admin::Problem;

/// Why a verb did not do what it was asked.
#[derive(Debug, PartialEq, Eq)]
pub enum Failure {
    /// It was asked properly but could not be done: exit code 1.
    Failed(String),
    /// It was asked for something that makes no sense: exit code 2.
    Misused(String),
    /// The program that was to be run is not there, or cannot be executed: a shell's exit code.
    NotRun(String, u8),
    /// The reader of our output went away, as in `thaw ps | head -1`.
    OutputClosed,
}

/// What a verb returns: the exit code, which is 0 unless a program's own is
/// passed through.
pub type Outcome = Result<ExitCode, Failure>;

impl Failure {
    /// A failure that says `cause`.
    pub fn failed(cause: impl Display) -> Self {
        Self::Failed(cause.to_string())
    }

    /// A misuse that says `cause`.
    pub fn misused(cause: impl Display) -> Self {
        Self::Misused(cause.to_string())
    }

    /// What the daemon says. It may quote what a sandbox said.
    pub fn of(problem: &Problem) -> Self {
        let reason = thaw_sandbox::escape(problem.reason.as_bytes());
        match problem.exit_code() {
            Some(code) => Self::NotRun(reason, code),
            None => Self::Failed(reason),
        }
    }

    /// One sentence for standard error.
    pub fn message(&self) -> Option<&str> {
        match self {
            Self::Failed(message) | Self::Misused(message) | Self::NotRun(message, _) => {
                Some(message)
            }
            Self::OutputClosed => None,
        }
    }

    /// The process's exit code.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Failed(_) => ExitCode::from(1),
            Self::Misused(_) => ExitCode::from(2),
            Self::NotRun(_, code) => ExitCode::from(*code),
            Self::OutputClosed => ExitCode::SUCCESS,
        }
    }
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::failed(error)
    }
}

/// A message without what a terminal would act on: it may repeat what the author of a
/// function wrote, or what a program printed.
pub fn harmless(message: &str) -> String {
    let lines = message.split('\n').map(|line| thaw_sandbox::escape(line.as_bytes()));
    lines.collect::<Vec<_>>().join("\n")
}
