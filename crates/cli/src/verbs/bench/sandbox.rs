//! `thaw bench sandbox`.

use super::report::{Progress, cell};
use crate::failure::Outcome;
use crate::output::{self, Table};
use crate::verbs::numbers;
use clap::{Args, ValueEnum};
use std::num::NonZeroUsize;
use std::process::ExitCode;
use thaw_bench::{
    self as bench, Percentiles, PopulationMemory, PopulationOptions, PopulationReport,
    SandboxOptions, SandboxReport,
};
use thaw_home::home::Home;

/// Measure what the node takes to make sandboxes, use them, copy, pause and resume them.
///
/// The times are those of the node alone: no client, no connection and no HTTP is in them. The
/// command runs as a process of the host, too, and in a plain container where crun or runc is
/// installed and can run one. With --idle or --paused, the memory of so many sandboxes is counted
/// in place of that.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  thaw bench sandbox box -n 200 --json -- true\n  thaw bench sandbox box --idle 1000 --paused 5000 -- sh"
)]
pub struct Arguments {
    /// The function whose image sandboxes are copies of.
    name: String,
    /// How often each is done.
    #[arg(short, long = "count", value_name = "N", default_value = "100", value_parser = numbers::count::<NonZeroUsize>)]
    n: NonZeroUsize,
    /// A program that `sh` runs in each sandbox before it is copied and paused; it prints something
    /// when it is as far, and goes on.
    #[arg(long, value_name = "COMMAND")]
    program: Option<String>,
    /// Count the memory of so many idle sandboxes; the command is a shell that waits at a terminal.
    #[arg(long, value_name = "N", default_value = "0")]
    idle: usize,
    /// Count the memory of so many paused sandboxes.
    #[arg(long, value_name = "N", default_value = "0")]
    paused: usize,
    /// What runs in those.
    #[arg(long, value_name = "WHAT", value_enum, default_value = "shell")]
    paused_with: PausedWith,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// The command that is run.
    #[arg(last = true, default_value = "true")]
    command: Vec<String>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PausedWith {
    /// The command: a paused sandbox keeps its process on the host.
    Shell,
    /// Nothing that was started from outside: a paused sandbox has no process.
    Nothing,
}

pub fn run(arguments: &Arguments) -> Outcome {
    match arguments.idle + arguments.paused {
        0 => time(arguments),
        _ => count(arguments),
    }
}

fn time(arguments: &Arguments) -> Outcome {
    let shell = |text: &String| ["sh", "-c", text].map(str::to_owned).into();
    let options = SandboxOptions {
        count: arguments.n.get(),
        command: arguments.command.clone(),
        program: arguments.program.as_ref().map(shell),
    };
    let mut progress = Progress::new();
    let home = Home::from_environment()?;
    let report = bench::sandbox(&home, &arguments.name, &options, &mut |what| progress.show(what))?;
    drop(progress);
    match arguments.json {
        true => output::print_json(&report)?,
        false => output::print(&times(&report))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn count(arguments: &Arguments) -> Outcome {
    let options = PopulationOptions {
        idle: arguments.idle,
        paused: arguments.paused,
        paused_with: match arguments.paused_with {
            PausedWith::Shell => bench::PausedWith::Shell,
            PausedWith::Nothing => bench::PausedWith::Nothing,
        },
        shell: arguments.command.clone(),
    };
    let mut progress = Progress::new();
    let home = Home::from_environment()?;
    let report =
        bench::population(&home, &arguments.name, &options, &mut |what| progress.show(what))?;
    drop(progress);
    match arguments.json {
        true => output::print_json(&report)?,
        false => output::print(&memory(&report))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn times(report: &SandboxReport) -> String {
    let title = format!("{}, µs", report.function);
    let mut table = Table::new(&[&title, "min", "p50", "p90", "p99"]);
    let mut row = |what: &str, of: &Percentiles| {
        table.row(vec![what.to_owned(), cell(of.min), cell(of.p50), cell(of.p90), cell(of.p99)]);
    };
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
        ("copy and run the copy's first", &report.fork_command_us),
        ("pause", &report.pause_us),
        ("pause, memory given back", &report.given_back_us),
        ("resume", &report.resume_us),
        ("resume, at once", &report.resume_early_us),
    ] {
        row(what, of);
    }
    if let Some(native) = &report.native_us {
        row("run the command on the host", native);
    }
    if let Some(container) = &report.container {
        row(&format!("a container of its own, {}", container.runtime), &container.run_us);
        row("run the command in a container", &container.exec_us);
    }
    let mut text = match &report.large_file {
        Some(file) => {
            let mib = file.bytes >> 20;
            row(&format!("copy {mib} MiB on the host"), &file.copy_us);
            row(&format!("write {mib} MiB"), &file.write_us);
            row(&format!("read {mib} MiB"), &file.read_us);
            let percent = |speed: f64| (speed * 100.0).round();
            let (write, read) = (percent(file.write_speed), percent(file.read_speed));
            format!(
                "{}Speed by that of the copy: written {write} %, read {read} %.\n",
                table.text()
            )
        }
        None => table.text(),
    };
    report.missing.iter().for_each(|reason| text.push_str(&format!("Missing: {reason}.\n")));
    text
}

fn memory(report: &PopulationReport) -> String {
    let title = format!("{}, MiB", report.function);
    let mut table = Table::new(&[
        &title,
        "sandboxes",
        "KiB each",
        "pages",
        "page tables",
        "kernel",
        "host, all",
        "ms to make",
    ]);
    let mib = |kib: i64| cell(kib as f64 / 1024.0);
    let kinds = [("idle", &report.idle), ("paused", &report.paused)];
    let mut failures = String::new();
    for (name, memory) in kinds {
        let Some(memory) = memory else { continue };
        let PopulationMemory { n, failure, made_ms, own, kernel_kib, each_kib, host } = memory;
        table.row(vec![
            name.to_owned(),
            n.to_string(),
            cell(*each_kib),
            mib(own.pss_kib),
            mib(own.page_tables_kib),
            mib(*kernel_kib),
            mib(host.used_kib),
            cell(*made_ms),
        ]);
        if let Some(failure) = failure {
            failures.push_str(&format!("Not more of them are {name}: {failure}.\n"));
        }
    }
    table.text() + &failures
}
