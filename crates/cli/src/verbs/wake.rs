//! `thaw wake`: a hibernated instance takes its memory back; one that is asleep runs again.

use crate::client::{Daemon, DaemonArguments};
use crate::failure::Outcome;
use crate::output;
use clap::Args;
use std::process::ExitCode;
use thaw_node::admin::Woken;

/// Have a hibernated instance take its memory back, or one that is asleep run, before a request
/// does.
///
/// Without a number, one that is asleep wakes only if none is hibernated: the one that was used
/// last. Pages that it has needed after an earlier wake come back at once, all others when they
/// are touched.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw wake hello-python\n  \
    thaw wake hello-python --instance 17")]
pub struct Arguments {
    /// The function.
    name: String,
    /// The instance, by its number in `thaw ps`; default: the one that was hibernated first.
    #[arg(long, value_name = "ID")]
    instance: Option<u64>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonArguments,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let daemon = Daemon::find(&arguments.daemon)?;
    let query = arguments.instance.map(|id| format!("?instance={id}")).unwrap_or_default();
    let name = output::escape(&arguments.name);
    let done: Woken = daemon.post(&format!("/functions/{name}/wake{query}"))?;
    if arguments.json {
        output::print_json(&serde_json::to_value(&done).expect("plain data"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let (instance, function) = (done.instance, &done.function);
    output::print(&match done.wake_us {
        Some(wake_us) => format!("woke instance {instance} of {function} in {wake_us} us\n"),
        None => format!("instance {instance} of {function} is awake\n"),
    })?;
    Ok(ExitCode::SUCCESS)
}
