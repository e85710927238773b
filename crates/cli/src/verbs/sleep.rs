//! `thaw sleep`: the process of a live instance ends, and a file is left of it.

use crate::client::{Daemon, DaemonArguments};
use crate::failure::Outcome;
use crate::output;
use clap::Args;
use std::process::ExitCode;
use thaw_node::admin::FellAsleep;

/// Put an idle instance to sleep: its process ends, and a file is left.
///
/// The daemon writes to a file how the memory of the instance differs from the image of its
/// function, and ends its process. Clients stay connected to the gateway. The next request, `thaw
/// wake`, or anything else that asks for the instance by its number boots it from the file: with
/// all that it had in memory, under the same number. `limits.sleep_after` in thaw.toml does the
/// same after a time.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw sleep hello-python\n  \
    thaw sleep hello-python --instance 17")]
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
    let done: FellAsleep = daemon.post(&format!("/functions/{name}/sleep{query}"))?;
    if arguments.json {
        output::print_json(&serde_json::to_value(&done).expect("plain data"))?;
    } else {
        output::print(&format!(
            "instance {} of {} is asleep: {:.1} MiB written in {:.0} ms\n",
            done.instance,
            done.function,
            done.asleep.stored as f64 / f64::from(1 << 20),
            done.asleep.write_ms,
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
