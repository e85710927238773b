//! `thaw bench hibernate`.

use super::report::{Progress, ReportArguments, cell, check_path};
use crate::failure::Outcome;
use crate::output::Table;
use crate::verbs::numbers::count;
use clap::Args;
use std::num::NonZeroUsize;
use thaw_bench::{self as bench, HibernateOptions, HibernateReport};
use thaw_home::home::Home;

/// Measure requests to hibernated instances, and their memory.
///
/// The latency of a request to an instance in every state, from connecting to the first byte,
/// and the memory of an instance in every state. Cold is the program started on the host, without
/// a sandbox; warm is an instance that was thawed.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  thaw bench hibernate hello-python -n 100 --instances 10")]
pub struct Arguments {
    /// The function.
    name: String,
    /// Requests in each state.
    #[arg(short, long = "count", value_name = "N", default_value = "50", value_parser = count::<NonZeroUsize>)]
    n: NonZeroUsize,
    /// Instances whose memory is measured.
    #[arg(long, value_name = "N", default_value = "10", value_parser = count::<NonZeroUsize>)]
    instances: NonZeroUsize,
    /// Instances that are asleep when their memory is measured.
    #[arg(long, value_name = "N", default_value = "80", value_parser = count::<NonZeroUsize>)]
    asleep: NonZeroUsize,
    /// Path of the requests.
    #[arg(long, default_value = "/")]
    path: String,
    #[command(flatten)]
    report: ReportArguments,
}

pub fn run(arguments: &Arguments) -> Outcome {
    check_path(&arguments.path)?;
    let options = HibernateOptions {
        count: arguments.n.get(),
        instances: arguments.instances.get(),
        asleep: arguments.asleep.get(),
        path: arguments.path.clone(),
    };
    let mut progress = Progress::new();
    let home = Home::from_environment()?;
    let report =
        bench::hibernate(&home, &arguments.name, &options, &mut |what| progress.show(what))?;
    drop(progress);
    arguments.report.show("hibernate", &report, &text(&report), || report.svg())
}

fn text(report: &HibernateReport) -> String {
    let mut table =
        Table::new(&[&report.function, "first byte, µs p50", "p90", "p99", "memory, KiB"]);
    for (state, latency, memory) in report.rows() {
        let figure = |of: fn(&bench::Percentiles) -> f64| {
            latency.as_ref().map_or_else(|| "-".to_owned(), |latency| cell(of(latency)))
        };
        table.row(vec![
            state.to_owned(),
            figure(|latency| latency.p50),
            figure(|latency| latency.p90),
            figure(|latency| latency.p99),
            memory.map_or_else(|| "-".to_owned(), cell),
        ]);
    }
    table.text()
}
