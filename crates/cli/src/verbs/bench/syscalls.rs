//! `thaw bench syscalls`.

use crate::failure::{Failure, Outcome};
use crate::output::{self, Table};
use crate::verbs::numbers::count;
use clap::Args;
use std::io::{IsTerminal, stderr};
use std::num::NonZeroUsize;
use std::process::ExitCode;
use thaw_bench::syscalls::{self, Pair, SyscallOptions, SyscallReport};
use thaw_home::home::Home;

/// Measure what programs do once they run: on this host and in a sandbox, turn by turn.
///
/// System calls, requests per second of built functions under `wrk`, and plain
/// computing. A sample of a short call is the mean of many in a row.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  thaw bench syscalls --http hello-go --http hello-c")]
pub struct Arguments {
    /// Turns of both sides.
    #[arg(short, long = "rounds", value_name = "N", default_value = "10", value_parser = count::<NonZeroUsize>)]
    n: NonZeroUsize,
    /// Measure the server of a built function, too; may be given several times.
    #[arg(long, value_name = "FUNCTION")]
    http: Vec<String>,
    /// Do not measure computing programs.
    #[arg(long)]
    no_compute: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let options = SyscallOptions {
        rounds: arguments.n.get(),
        http: arguments.http.clone(),
        compute: !arguments.no_compute,
        sandbox: sandbox()?,
    };
    let live = stderr().is_terminal();
    let mut progress = |next: &str| {
        if live {
            eprint!("\r\x1b[Kmeasuring {next}");
        }
    };
    let report = syscalls::syscalls(Home::from_environment, &options, &mut progress);
    if live {
        eprint!("\r\x1b[K");
    }
    let report = report?;
    if arguments.json {
        output::print_json(&report)?;
    } else {
        output::print(&text(&report))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// `thaw run` with this host's files, before the command.
pub(super) fn sandbox() -> Result<Vec<String>, Failure> {
    let executable = std::env::current_exe()?.to_string_lossy().into_owned();
    // The program is this one, which may lie where only its user can read it.
    let files = ["run", "--as-root", "--rootfs", "/"];
    let limits = ["--cpus", "2", "--memory", "2GiB", "--"];
    let arguments = files.into_iter().chain(limits);
    Ok([executable].into_iter().chain(arguments.map(str::to_owned)).collect())
}

fn text(report: &SyscallReport) -> String {
    let mut calls = table("ns a call", "p99", "ratio");
    for call in &report.calls {
        let figures = [(call.p50_ns, call.ratio_p50), (call.p99_ns, call.ratio_p99)];
        calls.row(row(call.what.to_owned(), figures));
    }
    let mut text = calls.text();
    if !report.http.is_empty() {
        let mut servers = table("requests/s under wrk", "best", "ratio");
        for server in &report.http {
            let name = format!("{}, {} connections", server.function, server.connections);
            let best = (server.best_per_s, server.best_ratio);
            servers.row(row(name, [(server.requests_per_s, server.ratio), best]));
        }
        text += &format!("\n{}", servers.text());
    }
    if !report.compute.is_empty() {
        let mut programs = table("computing, ms", "best", "speed");
        for program in &report.compute {
            let best = (program.best_ms, program.best_speed);
            programs.row(row(program.language.to_owned(), [(program.ms, program.speed), best]));
        }
        text += &format!("\n{}", programs.text());
    }
    for language in &report.missing {
        text += &format!("not measured, since this host lacks it: {language}\n");
    }
    text
}

/// A table of medians of both sides and of another figure's, each with its ratio.
fn table(what: &str, other: &str, ratio: &str) -> Table {
    let other = format!("Thaw {other}");
    Table::new(&[what, "Thaw p50", "native", ratio, &other, "native", ratio])
}

fn row(name: String, figures: [(Pair, f64); 2]) -> Vec<String> {
    let cells = figures.map(|(figures, ratio)| pair(figures, ratio));
    [name].into_iter().chain(cells.into_iter().flatten()).collect()
}

fn pair(figures: Pair, ratio: f64) -> [String; 3] {
    [format!("{:.1}", figures.thaw), format!("{:.1}", figures.native), format!("{ratio:.2}")]
}
