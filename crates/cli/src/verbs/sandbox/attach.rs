//! `thaw sandbox attach` and `thaw sandbox logs`: processes that were started before.

use crate::client::{Daemon, DaemonArguments};
use crate::exec_client;
use crate::failure::{Failure, Outcome};
use crate::output::{self, Table};
use crate::verbs::exec::instance_of;
use clap::Args;
use std::io::{self, Write};
use std::process::ExitCode;
use thaw_node::remote::{ExecInfo, ExecState};

/// Attach to a process that was started from outside.
///
/// What it has printed so far is shown first, as far as it was kept, and then what it prints. The
/// process goes on when this command ends.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw sandbox attach box\n  \
    thaw sandbox attach box 1234")]
pub struct Arguments {
    #[command(flatten)]
    which: Which,
}

/// Show what processes in a sandbox have printed, as far as it was kept.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw sandbox logs box\n  \
    thaw sandbox logs box 1234\n  \
    thaw sandbox logs box --list")]
pub struct LogArguments {
    #[command(flatten)]
    which: Which,
    /// List the processes instead.
    #[arg(long)]
    list: bool,
    /// With --list, print JSON.
    #[arg(long, requires = "list")]
    json: bool,
}

/// A process.
#[derive(Debug, Args)]
struct Which {
    /// The sandbox, by its name or the number of its instance.
    name: String,
    /// The process, by its number; without, that of `thaw run --name`, or the last one that was started.
    process: Option<u64>,
    #[command(flatten)]
    daemon: DaemonArguments,
}

impl Which {
    fn all(&self, daemon: &Daemon, instance: u64) -> Result<Vec<ExecInfo>, Failure> {
        daemon.get(&format!("/instances/{instance}/execs"))
    }

    fn one(&self, daemon: &Daemon, instance: u64, alive: bool) -> Result<ExecInfo, Failure> {
        let fits = |info: &ExecInfo| match self.process {
            Some(id) => info.id == id,
            None => !alive || matches!(info.state, ExecState::Running { .. }),
        };
        let fitting = self.all(daemon, instance)?.into_iter().filter(fits);
        // Of those that fit equally, the last one.
        let found = fitting.max_by_key(|info| info.ends_sandbox);
        found.ok_or_else(|| {
            Failure::failed(format!(
                "{} has no such process; `thaw sandbox logs {} --list` shows those there are",
                self.name, self.name
            ))
        })
    }
}

pub fn run(arguments: &Arguments) -> Outcome {
    let which = &arguments.which;
    let daemon = Daemon::find(&which.daemon)?;
    let instance = instance_of(&daemon, &which.name)?;
    let info = which.one(&daemon, instance, true)?;
    exec_client::attach(&daemon, instance, info.id, info.terminal)
}

pub fn logs(arguments: &LogArguments) -> Outcome {
    let which = &arguments.which;
    let daemon = Daemon::find(&which.daemon)?;
    let instance = instance_of(&daemon, &which.name)?;
    if arguments.list {
        let all = which.all(&daemon, instance)?;
        match arguments.json {
            true => output::print_json(&all)?,
            false => output::print(&table(&all))?,
        }
        return Ok(ExitCode::SUCCESS);
    }
    let info = which.one(&daemon, instance, false)?;
    let path = format!("/instances/{instance}/execs/{}/output", info.id);
    let mut answer = daemon.stream(&path)?;
    io::copy(&mut answer.body_mut().as_reader(), &mut io::stdout())?;
    io::stdout().flush()?;
    Ok(ExitCode::SUCCESS)
}

/// Processes, a line each.
fn table(all: &[ExecInfo]) -> String {
    let mut table = Table::new(&["PROCESS", "STATE", "AGE", "COMMAND"]);
    for info in all {
        let state = info.state.to_string();
        let command = thaw_sandbox::escape(info.argv.join(" ").as_bytes());
        table.row(vec![info.id.to_string(), state, format!("{} s", info.age_s), command]);
    }
    table.text()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_a_line_each() {
        let info = |id, argv: &[&str], state| ExecInfo {
            id,
            argv: argv.iter().map(|&word| word.to_owned()).collect(),
            terminal: false,
            ends_sandbox: false,
            state,
            age_s: 7,
        };
        let all = [
            info(1, &["sh", "-c", "a\x1b[m\n"], ExecState::Running { pid: 5 }),
            info(2, &["ls"], ExecState::Ended { code: Some(3), signal: None }),
            info(13, &["ls"], ExecState::Ended { code: None, signal: Some(9) }),
            info(14, &["no"], ExecState::Failed { reason: "none".to_owned(), code: Some(127) }),
        ];
        let expected = "PROCESS  STATE              AGE  COMMAND\n\
                        1        running as 5       7 s  sh -c a\\x1b[m\\x0a\n\
                        2        ended with 3       7 s  ls\n\
                        13       ended by signal 9  7 s  ls\n\
                        14       not started        7 s  no\n";
        assert_eq!(table(&all), expected);
    }
}
