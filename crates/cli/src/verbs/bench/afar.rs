//! `thaw bench afar`.

use super::report::{Progress, ReportArguments, cell, check_path};
use crate::failure::{Failure, Outcome};
use crate::output::{self, Table};
use crate::verbs::numbers::count;
use clap::Args;
use std::num::NonZeroUsize;
use std::time::Duration;
use thaw_bench::{self as bench, AfarOptions, AfarReport};
use thaw_home::home::Home;

/// Measure the first answer of a function that the node has never seen.
///
/// The function is pushed to a registry behind a line of this delay and rate, and pulled from there
/// into an empty store, by `thaw pull --lazy` and by `thaw pull`. The goal is one round trip, the
/// transfer of what a boot needs, and a cold boot of the same function. Needs Debian's
/// `docker-registry`. The line is made by this program: it has no slow start of TCP.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  thaw bench afar hello-python --delay-ms 20 --gbit 1 -n 5 --json"
)]
pub struct Arguments {
    /// The function, which has served a request before.
    name: String,
    /// Round trip to the registry, in milliseconds.
    #[arg(long, value_name = "MS", default_value = "20")]
    delay_ms: f64,
    /// Rate of the line, in Gbit/s.
    #[arg(long, value_name = "RATE", default_value = "1")]
    gbit: f64,
    /// Pulls of each kind.
    #[arg(short, long = "count", value_name = "N", default_value = "5", value_parser = count::<NonZeroUsize>)]
    n: NonZeroUsize,
    /// Path of the requests.
    #[arg(long, default_value = "/")]
    path: String,
    #[command(flatten)]
    report: ReportArguments,
}

pub fn run(arguments: &Arguments) -> Outcome {
    check_path(&arguments.path)?;
    let delay = Duration::try_from_secs_f64(arguments.delay_ms / 1e3);
    let delay = delay.ok().filter(|delay| *delay <= Duration::from_secs(10));
    let delay = delay.ok_or_else(|| Failure::misused("--delay-ms must be from 0 to 10000"))?;
    if !(0.001..=1000.0).contains(&arguments.gbit) {
        return Err(Failure::misused("--gbit must be from 0.001 to 1000"));
    }
    let (gbit, count, path) = (arguments.gbit, arguments.n.get(), arguments.path.clone());
    let options = AfarOptions { delay, gbit, count, path };
    let mut progress = Progress::new();
    let home = Home::from_environment()?;
    let report = bench::afar(&home, &arguments.name, &options, &mut |what| progress.show(what))?;
    drop(progress);
    arguments.report.show("afar", &report, &text(&report), || report.svg())
}

fn text(report: &AfarReport) -> String {
    let mut table = Table::new(&[&report.function, "ms p50", "to the goal"]);
    let ms = |us: f64| cell(us / 1e3);
    table.row(vec!["goal".to_owned(), ms(report.goal_us), "1".to_owned()]);
    table.row(vec!["pull --lazy".to_owned(), ms(report.lazy_us.p50), cell(report.to_goal)]);
    table.row(vec!["pull".to_owned(), ms(report.whole_us.p50), cell(report.whole_to_goal)]);
    let sizes = format!(
        "{} of {} are needed for a boot, which takes {} ms\n",
        output::size(report.run_bytes),
        output::size(report.bytes),
        ms(report.cold_boot_us)
    );
    table.text() + &sizes
}
