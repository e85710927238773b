//! `thaw bench volume`.

use super::report::{Progress, cell};
use super::syscalls::sandbox;
use crate::failure::Outcome;
use crate::output::{self, Table};
use crate::verbs::numbers::count;
use clap::Args;
use std::num::NonZeroUsize;
use std::process::ExitCode;
use thaw_bench::{self as bench, VolumeOptions, VolumeReport};
use thaw_home::home::Home;

/// Measure files of a volume: from a sandbox and on this host, turn by turn.
///
/// Both sides work in the same directory of a volume that is made for this. 4 KiB are read and
/// written at a time unless a line says otherwise. SQLite is measured if this host has Python.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  thaw bench volume --rounds 20 --json")]
pub struct Arguments {
    /// Turns of both sides.
    #[arg(short, long = "rounds", value_name = "N", default_value = "10", value_parser = count::<NonZeroUsize>)]
    n: NonZeroUsize,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let mut sandbox = sandbox()?;
    // What separates options from the command comes after the volume.
    sandbox.pop();
    let options = VolumeOptions { rounds: arguments.n.get(), sandbox };
    let mut progress = Progress::new();
    let home = Home::from_environment()?;
    let report = bench::volume(&home, &options, &mut |what| progress.show(what))?;
    drop(progress);
    match arguments.json {
        true => output::print_json(&report)?,
        false => output::print(&text(&report))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn text(report: &VolumeReport) -> String {
    let columns = ["µs", "Thaw p50", "native", "ratio", "Thaw p99", "native", "ratio"];
    let mut table = Table::new(&columns);
    let us = |ns: f64| cell(ns / 1000.0);
    for one in &report.uses {
        table.row(vec![
            one.what.to_owned(),
            us(one.p50_ns.thaw),
            us(one.p50_ns.native),
            format!("{:.2}", one.ratio_p50),
            us(one.p99_ns.thaw),
            us(one.p99_ns.native),
            format!("{:.2}", one.ratio_p99),
        ]);
    }
    let mut text = table.text();
    for missing in &report.missing {
        text += &format!("not measured, since this host lacks it: {missing}\n");
    }
    text
}
