//! `thaw bench density`.

use super::report::{Progress, ReportArguments, cell};
use crate::failure::Outcome;
use crate::output::{Table, size};
use clap::Args;
use thaw_bench::{self as bench, DensityReport};
use thaw_home::home::Home;

/// Measure disk and memory for each function as more and more are there.
///
/// Functions are counted in the order of their names. Of each one instance serves a request and then
/// stays, idle. Disk is of blocks, each file once; ALONE is what the function would need if nothing were
/// shared. scripts/many-functions builds functions of several runtimes to measure.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  scripts/many-functions 100 && thaw bench density --output results"
)]
pub struct Arguments {
    /// The functions [default: all].
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    #[command(flatten)]
    report: ReportArguments,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let mut progress = Progress::new();
    let home = Home::from_environment()?;
    let report = bench::density(&home, &arguments.names, &mut |what| progress.show(what))?;
    drop(progress);
    arguments.report.show("density", &report, &text(&report), || report.svg())
}

fn text(report: &DensityReport) -> String {
    let mut table =
        Table::new(&["functions", "last", "disk", "own", "alone", "host memory", "Pss, KiB"]);
    for (at, step) in report.steps.iter().enumerate() {
        table.row(vec![
            (at + 1).to_string(),
            step.function.clone(),
            size(step.disk_bytes),
            size(step.own_bytes),
            size(step.alone_bytes),
            size(step.host_kib.max(0) as u64 * 1024),
            step.pss_kib.to_string(),
        ]);
    }
    let mut text = table.text();
    text += &format!(
        "each of {}: {} on disk ({} if nothing were shared), {} KiB of host memory, Pss without \
         files {} KiB (median)\n{} such functions fit on a terabyte\n",
        report.functions,
        size(report.disk_bytes_each),
        size(report.disk_bytes_each_alone),
        cell(report.memory_kib_each),
        report.pss_kib_median,
        report.functions_per_terabyte,
    );
    for failure in &report.failures {
        text += &format!("{} failed: {}\n", failure.function, failure.reason);
    }
    text
}
