//! `thaw bench`: measurements that a user can repeat.

mod boot;
mod syscalls;

use crate::failure::Outcome;
use clap::{Args, Subcommand};

/// Measure.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  thaw bench boot hello-python --boot warm -n 1000 --json")]
pub struct Arguments {
    #[command(subcommand)]
    subject: Subject,
}

#[derive(Debug, Subcommand)]
enum Subject {
    Boot(boot::Arguments),
    Syscalls(syscalls::Arguments),
}

pub fn run(arguments: &Arguments) -> Outcome {
    match &arguments.subject {
        Subject::Boot(arguments) => boot::run(arguments),
        Subject::Syscalls(arguments) => syscalls::run(arguments),
    }
}
