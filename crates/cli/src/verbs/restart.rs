//! `thaw restart`: new instances for a function.

use crate::client::{Daemon, DaemonArguments};
use crate::failure::{Failure, Outcome};
use crate::output;
use clap::Args;
use std::thread;
use std::time::Duration;
use thaw_node::catalog::Restarted;
use thaw_node::service::InstanceInfo;

/// How often it is looked whether instances have ended.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Serve a function by new instances, which have the present values of its secrets.
///
/// Idle instances end now, those that are asleep too, and each busy one when it has answered and its connections are idle, at
/// the latest after limits.drain. Sandboxes stay, with the values that they were made with: end them
/// with `thaw sandbox kill` if they are not to have these any more. New requests go to new instances of the same versions meanwhile,
/// so that none is refused. If a secret is not set, nothing changes.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw secret set shop database && thaw restart shop\n  \
    thaw restart shop --wait                   # nobody uses the old value any more")]
pub struct Arguments {
    /// The function.
    name: String,
    /// Wait until the instances of before have ended, which takes `limits.drain` at the longest.
    #[arg(long)]
    wait: bool,
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
    if arguments.wait {
        wait_for_the_end(&daemon, &restarted)?;
    }
    output::print_done(arguments.json, &restarted, |restarted: &Restarted| {
        let Restarted { function, instances, sandboxes, .. } = restarted;
        let ends = match instances {
            1 if arguments.wait => format!("{function}: the instance of before has ended"),
            2.. if arguments.wait => {
                format!("{function}: the {instances} instances of before have ended")
            }
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

/// Waits until none of the instances of before is left; the daemon ends them when their time is over.
fn wait_for_the_end(daemon: &Daemon, restarted: &Restarted) -> Result<(), Failure> {
    let ending = numbers(restarted)?;
    loop {
        let left: Vec<InstanceInfo> = daemon.get("/instances")?;
        if !left.iter().any(|instance| ending.contains(&instance.id)) {
            return Ok(());
        }
        thread::sleep(LOOK_EVERY);
    }
}

/// The numbers of the instances that end, which daemons of before do not say.
fn numbers(restarted: &Restarted) -> Result<&[u64], Failure> {
    let Restarted { function, instances, ending, .. } = restarted;
    match ending.len() == *instances {
        true => Ok(ending),
        false => Err(Failure::failed(format!(
            "{function} was restarted, but its daemon is of an older version and does not say which \
             instances end: `thaw ps` shows those that are left"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_waits_for_instances_without_numbers() {
        let restarted = |text| serde_json::from_str::<Restarted>(text).unwrap();
        let older = restarted(r#"{ "function": "shop", "instances": 2 }"#);
        assert!(numbers(&older).unwrap_err().message().unwrap().contains("older version"));
        let new = restarted(r#"{ "function": "shop", "instances": 2, "ending": [3, 4] }"#);
        assert_eq!(numbers(&new).ok(), Some(&[3, 4][..]));
        assert!(numbers(&restarted(r#"{ "function": "shop", "instances": 0 }"#)).is_ok());
    }
}
