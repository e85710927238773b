//! `thaw restart`: new instances for a function.

use crate::client::{Daemon, DaemonArguments};
use crate::failure::Outcome;
use crate::output;
use clap::Args;
use thaw_node::catalog::Restarted;

/// Serve a function by new instances, which have the present values of its secrets.
///
/// Idle instances end now, those that are asleep too, and each busy one when it has answered and its connections are idle, at
/// the latest after limits.drain. Sandboxes stay, with the values that they were made with: end them
/// with `thaw sandbox kill` if they are not to have these any more. New requests go to new instances of the same versions meanwhile,
/// so that none is refused. If a secret is not set, nothing changes.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  thaw secret set shop database && thaw restart shop")]
pub struct Arguments {
    /// The function.
    name: String,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonArguments,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let daemon = Daemon::find(&arguments.daemon)?;
    let path = format!("/functions/{}/restart", output::escape(&arguments.name));
    let restarted: Restarted = daemon.post(&path)?;
    output::print_done(arguments.json, &restarted, |restarted: &Restarted| {
        let Restarted { function, instances, sandboxes } = restarted;
        let ends = match instances {
            0 => format!("{function}: no instance was live"),
            1 => format!("{function}: 1 instance gets no more requests and ends"),
            _ => format!("{function}: {instances} instances get no more requests and end"),
        };
        match sandboxes {
            0 => ends,
            1 => format!("{ends}; 1 sandbox stays, with the secrets that it was made with"),
            _ => format!(
                "{ends}; {sandboxes} sandboxes stay, with the secrets that they were made with"
            ),
        }
    })
}
