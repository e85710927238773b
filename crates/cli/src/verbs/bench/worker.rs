//! `thaw bench worker`: not for people, and not in the help.

use clap::Args;
use std::process::ExitCode;
use thaw_bench::worker::{self, Worker};

/// Do one side of a measurement, as standard input orders.
#[derive(Debug, Args)]
#[command(hide = true)]
pub struct Arguments {
    /// The kind of worker.
    worker: Worker,
}

pub fn run(arguments: &Arguments) -> ExitCode {
    worker::run(arguments.worker)
}
