//! `thaw schedule`: when the node itself calls functions.

use crate::client::{Daemon, DaemonArguments};
use crate::failure::Outcome;
use crate::output::{self, Table};
use clap::{Args, Subcommand};
use std::process::ExitCode;
use std::time::{Duration, UNIX_EPOCH};
use thaw_home::config::FunctionName;
use thaw_node::triggers::ScheduleInfo;

/// Show the schedules of functions ([[schedules]] in thaw.toml), and when they fire next.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw schedule list\n  \
    thaw schedule list report --json")]
pub struct Arguments {
    #[command(subcommand)]
    action: Action,
    #[command(flatten)]
    daemon: DaemonArguments,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// List the schedules of all functions, or of one.
    #[command(visible_alias = "ls")]
    List {
        /// The function.
        function: Option<FunctionName>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

pub fn run(arguments: &Arguments) -> Outcome {
    let Action::List { function, json } = &arguments.action;
    let url = match function {
        Some(function) => format!("/functions/{function}/schedules"),
        None => "/schedules".to_owned(),
    };
    let schedules: Vec<ScheduleInfo> = Daemon::find(&arguments.daemon)?.get(&url)?;
    match json {
        true => output::print_json(&schedules)?,
        false => output::print(&table(&schedules))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The schedules, for people.
pub fn table(schedules: &[ScheduleInfo]) -> String {
    let mut table = Table::new(&[
        "FUNCTION",
        "SCHEDULE",
        "CRON",
        "TIME ZONE",
        "NEXT",
        "LAST",
        "SKIPPED",
        "REASON",
    ]);
    for schedule in schedules {
        table.row(vec![
            schedule.function.clone(),
            schedule.name.clone(),
            schedule.cron.clone(),
            schedule.timezone.clone(),
            time(schedule.next_ms),
            time(schedule.fired_ms),
            schedule.skipped.to_string(),
            schedule.problem.clone().unwrap_or_else(|| "-".to_owned()),
        ]);
    }
    table.text()
}

/// A time in UTC, to the second.
pub fn time(ms: Option<u64>) -> String {
    let time = ms.and_then(|ms| UNIX_EPOCH.checked_add(Duration::from_millis(ms)));
    time.map_or("-".to_owned(), |time| humantime::format_rfc3339_seconds(time).to_string())
}
