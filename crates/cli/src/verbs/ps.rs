//! `thaw ps`: live instances, and those that are asleep.

use crate::client::{Daemon, DaemonArguments};
use crate::failure::Outcome;
use crate::output::{self, Table};
use clap::Args;
use std::process::ExitCode;
use thaw_node::service::InstanceInfo;

/// List the live instances, and those that are asleep.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  thaw ps --json")]
pub struct Arguments {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonArguments,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let instances: Vec<InstanceInfo> = Daemon::find(&arguments.daemon)?.get("/instances")?;
    if arguments.json {
        output::print_json(&instances)?;
    } else {
        output::print(&table(&instances))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The instances, one a line.
pub fn table(instances: &[InstanceInfo]) -> String {
    let mut table =
        Table::new(&["ID", "FUNCTION", "VERSION", "STATE", "PID", "CONNECTIONS", "SERVED", "AGE"]);
    for instance in instances {
        table.row(vec![
            instance.id.to_string(),
            instance.function.to_string(),
            instance.version.to_string(),
            instance.state.name().to_owned(),
            if instance.pid == 0 { "-".to_owned() } else { instance.pid.to_string() },
            instance.connections.to_string(),
            instance.served.to_string(),
            format!("{}s", instance.age_s),
        ]);
    }
    table.text()
}
