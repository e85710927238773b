//! `thaw freeze`: a live instance becomes its function's image.

use crate::client::{Daemon, DaemonArguments};
use crate::failure::Outcome;
use crate::output;
use clap::Args;
use std::process::ExitCode;
use thaw_node::admin::Frozen;

/// Freeze a live instance as its function's new image.
///
/// The daemon takes an idle instance, with everything that it has loaded and
/// learnt since its boot, waits until nothing in it can run, and makes its memory
/// the image that copies are thawed from; the instance itself ends. Functions
/// with isolation = "instance" have such instances. Every copy has what the
/// instance has kept of its requests, so send it only data that all may see.
///
/// To choose the moment while a function is built, see `freeze` in [entry] of
/// thaw.toml; to send requests before it is frozen, see [train].
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw freeze hello-python\n  \
    thaw freeze hello-python --instance 17")]
pub struct Arguments {
    /// The function.
    name: String,
    /// The instance, by its number in `thaw ps`; default: of the idle ones, the one
    /// that has served most.
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
    let done: Frozen = daemon.post(&format!("/functions/{name}/freeze{query}"))?;
    if arguments.json {
        output::print_json(&serde_json::to_value(&done).expect("plain data"))?;
    } else {
        output::print(&format!(
            "froze instance {} of {} in {:.0} ms: image of {:.1} MiB in {} mappings\n",
            done.instance,
            done.function,
            done.frozen.freeze_ms,
            done.frozen.stored as f64 / f64::from(1 << 20),
            done.frozen.mappings,
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
