//! `thaw restore`: instances of a checkpoint.

use crate::client::{Daemon, DaemonArguments};
use crate::failure::Outcome;
use crate::output;
use clap::Args;
use std::num::NonZeroU32;
use std::process::ExitCode;
use thaw_node::service::Restored;

/// Make instances of a checkpoint, which go on where the checkpointed one was.
///
/// Each has random numbers, limits and logs of its own, and its connections are reset. They serve
/// requests of their function like its other instances.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw checkpoints\n  \
    thaw restore before-upgrade\n  \
    thaw restore before-upgrade -n 10 --json")]
pub struct Arguments {
    /// Name of the checkpoint.
    name: String,
    /// How many instances.
    #[arg(short = 'n', long = "copies", value_name = "N", default_value = "1")]
    copies: NonZeroU32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonArguments,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let daemon = Daemon::find(&arguments.daemon)?;
    let (name, copies) = (output::escape(&arguments.name), arguments.copies);
    let done: Restored = daemon.post(&format!("/checkpoints/{name}/restore?copies={copies}"))?;
    if arguments.json {
        output::print_json(&serde_json::to_value(&done).expect("plain data"))?;
    } else {
        let ids: Vec<_> = done.ids.iter().map(u64::to_string).collect();
        output::print(&format!(
            "restored {} as instance {} of {} within {:.1} ms\n",
            arguments.name,
            ids.join(", "),
            done.function,
            done.running_us as f64 / 1e3,
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
