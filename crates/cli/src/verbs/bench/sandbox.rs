//! `thaw bench sandbox`.

use super::report::{Progress, cell};
use crate::failure::Outcome;
use crate::output::{self, Table};
use clap::Args;
use std::num::NonZeroUsize;
use std::process::ExitCode;
use thaw_bench::{self as bench, SandboxOptions, SandboxReport};
use thaw_node::home::Home;

/// Measure what the node takes to make sandboxes, use them, copy, pause and resume them.
///
/// The times are those of the node alone: no client, no connection and no HTTP is in them.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  thaw bench sandbox box -n 200 --json -- true")]
pub struct Arguments {
    /// The function whose image sandboxes are copies of.
    name: String,
    /// How often each is done.
    #[arg(short, long = "count", value_name = "N", default_value = "100")]
    n: NonZeroUsize,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// The command that is run.
    #[arg(last = true, default_value = "true")]
    command: Vec<String>,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let options = SandboxOptions { count: arguments.n.get(), command: arguments.command.clone() };
    let mut progress = Progress::new();
    let home = Home::from_environment()?;
    let report = bench::sandbox(&home, &arguments.name, &options, &mut |what| progress.show(what))?;
    drop(progress);
    match arguments.json {
        true => output::print_json(&report)?,
        false => output::print(&text(&report))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn text(report: &SandboxReport) -> String {
    let title = format!("{}, µs", report.function);
    let mut table = Table::new(&[&title, "min", "p50", "p90", "p99"]);
    for (what, of) in [
        ("make one of a ready instance", &report.create_ready_us),
        ("make one of the image", &report.create_image_us),
        ("run the first command, ready", &report.command_ready_us),
        ("run the first command, of the image", &report.command_us),
        ("make and run the first, ready", &report.begin_ready_us),
        ("make and run the first, of the image", &report.begin_image_us),
        ("run the next command", &report.next_command_us),
        ("write a file of 1 KiB", &report.write_us),
        ("read it", &report.read_us),
        ("copy", &report.fork_us),
        ("pause", &report.pause_us),
        ("resume", &report.resume_us),
    ] {
        table.row(vec![what.to_owned(), cell(of.min), cell(of.p50), cell(of.p90), cell(of.p99)]);
    }
    table.text()
}
