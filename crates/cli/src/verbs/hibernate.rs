//! `thaw hibernate`: a live instance gives up its memory.

use crate::client::{Daemon, DaemonArguments};
use crate::failure::Outcome;
use crate::output;
use clap::Args;
use std::process::ExitCode;
use thaw_node::admin::Hibernated;

/// Have an idle instance give up its memory.
///
/// The daemon waits until nothing in the instance can run, writes its memory to a swap
/// file of its own, and has it drop that memory, page tables included. Its process and its
/// connections stay. A request, a byte on an open connection, or `thaw wake` brings the
/// memory back. `limits.hibernate_after` in thaw.toml does the same after a time.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw hibernate hello-python\n  \
    thaw hibernate hello-python --instance 17")]
pub struct Arguments {
    /// The function.
    name: String,
    /// The instance, by its number in `thaw ps`; default: the one that has been idle longest.
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
    let done: Hibernated = daemon.post(&format!("/functions/{name}/hibernate{query}"))?;
    if arguments.json {
        output::print_json(&serde_json::to_value(&done).expect("plain data"))?;
    } else {
        output::print(&format!(
            "hibernated instance {} of {}: {:.1} MiB written in {:.0} ms\n",
            done.instance,
            done.function,
            done.hibernated.stored as f64 / f64::from(1 << 20),
            done.hibernated.write_ms,
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
