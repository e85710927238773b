//! `thaw ps`: live instances, those that are asleep, and those that are ready.

use crate::client::{Daemon, DaemonArguments};
use crate::failure::{Failure, Outcome};
use crate::output::{self, Table};
use clap::Args;
use serde_json::{Value, json};
use std::process::ExitCode;
use thaw_daemon::admin::FunctionInfo;
use thaw_node::service::InstanceInfo;

/// List the live instances, those that are asleep, and those that are ready for a request.
///
/// An instance that is ready has been booted ahead, and has no number until it gets its first
/// connection.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  thaw ps --json")]
pub struct Arguments {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonArguments,
}

/// State of an instance that was booted ahead.
const READY: &str = "ready";

pub fn run(arguments: &Arguments) -> Outcome {
    let daemon = Daemon::find(&arguments.daemon)?;
    let instances: Vec<InstanceInfo> = daemon.get("/instances")?;
    let functions: Vec<FunctionInfo> = daemon.get("/functions")?;
    if arguments.json {
        output::print_json(&as_json(&instances, &functions)?)?;
    } else {
        output::print(&table(&instances, &functions))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn as_json(instances: &[InstanceInfo], functions: &[FunctionInfo]) -> Result<Value, Failure> {
    let mut all = instances.iter().map(serde_json::to_value).collect::<Result<Vec<_>, _>>()?;
    all.extend(functions.iter().flat_map(|function| {
        function.ready.iter().map(|pid| {
            json!({
                "id": null, "function": function.name, "version": function.version, "pid": pid,
                "state": READY, "connections": 0, "served": 0, "age_s": null, "kept": null
            })
        })
    }));
    Ok(Value::Array(all))
}

/// The instances, one a line, and those of `functions` that are ready.
pub fn table(instances: &[InstanceInfo], functions: &[FunctionInfo]) -> String {
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
    for function in functions {
        for pid in &function.ready {
            table.row(vec![
                "-".to_owned(),
                function.name.to_string(),
                function.version.to_string(),
                READY.to_owned(),
                pid.to_string(),
                "0".to_owned(),
                "0".to_owned(),
                "-".to_owned(),
            ]);
        }
    }
    table.text()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_ready_stands_in_the_columns_of_its_kind() {
        let function = json!({
            "name": "f", "version": 3, "image": "", "port": 80, "listen": null,
            "isolation": "instance", "kind": "http", "instances": 0, "ready": [41, 42],
            "problem": null
        });
        let text = table(&[], &[serde_json::from_value(function).unwrap()]);
        let rows: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[1], ["-", "f", "3", "ready", "41", "0", "0", "-"], "{text}");
        assert!(rows.iter().all(|row| row.len() == rows[0].len()), "{text}");
    }
}
