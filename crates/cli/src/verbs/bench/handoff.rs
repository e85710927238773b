//! `thaw bench handoff`.

use super::report::{Progress, ReportArguments, cell, check_path};
use crate::failure::Outcome;
use crate::output::Table;
use crate::verbs::numbers::count;
use clap::Args;
use std::num::NonZeroUsize;
use thaw_bench::{self as bench, HandoffOptions, HandoffReport};
use thaw_home::config::ByteSize;
use thaw_home::home::Home;

/// Compare socket handoff with a proxy, for large arguments.
///
/// A client posts the argument to an instance that stays, and reads the response:
/// once through the gateway, which hands the client's socket over, once through a
/// plain TCP proxy in front of it, which copies every byte. The functions should
/// answer with what they were sent.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  thaw bench handoff hello-python --argument 6MB --path /echo -n 200"
)]
pub struct Arguments {
    /// The functions.
    #[arg(default_value = "hello-python")]
    names: Vec<String>,
    /// Exchanges on each way that are counted.
    #[arg(short, long = "count", value_name = "N", default_value = "100", value_parser = count::<NonZeroUsize>)]
    n: NonZeroUsize,
    /// Size of the argument.
    #[arg(long, value_name = "SIZE", default_value = "6MB")]
    argument: ByteSize,
    /// Path of the requests.
    #[arg(long, default_value = "/echo")]
    path: String,
    #[command(flatten)]
    report: ReportArguments,
}

pub fn run(arguments: &Arguments) -> Outcome {
    check_path(&arguments.path)?;
    let options = HandoffOptions {
        count: arguments.n.get(),
        argument: usize::try_from(arguments.argument.bytes())?,
        path: arguments.path.clone(),
    };
    let mut progress = Progress::new();
    let home = Home::from_environment()?;
    let report =
        bench::handoff(&home, &arguments.names, &options, &mut |what| progress.show(what))?;
    drop(progress);
    arguments.report.show("handoff", &report, &text(&report), || report.svg())
}

fn text(report: &HandoffReport) -> String {
    let title = format!("{} bytes, µs p50 / p99", report.argument_bytes);
    let mut table = Table::new(&[
        &title,
        "handoff",
        "proxy",
        "ratio",
        "host's CPU time, handoff",
        "proxy",
        "response bytes",
    ]);
    let both = |of: &bench::Percentiles| format!("{} / {}", cell(of.p50), cell(of.p99));
    for function in &report.functions {
        table.row(vec![
            function.function.clone(),
            both(&function.handoff.latency_us),
            both(&function.proxy.latency_us),
            format!("{:.2}", function.ratio),
            both(&function.handoff.host_cpu_us),
            both(&function.proxy.host_cpu_us),
            function.response_bytes.to_string(),
        ]);
    }
    table.text()
}
