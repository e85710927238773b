//! `thaw bench mix`.

use super::report::{Progress, ReportArguments, cell, check_path};
use crate::failure::{Failure, Outcome};
use crate::output::{Table, size};
use crate::verbs::numbers::count;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use std::num::{NonZeroU64, NonZeroUsize};
use std::time::Duration;
use thaw_bench::{self as bench, MixOptions, MixReport, Side};
use thaw_home::home::Home;

/// Measure requests per second to many functions, of which few get most.
///
/// Clients choose functions by Zipf's law, ask over a new connection and wait for the end of the
/// response. Served by Thaw with instances that stay, by the same programs as ordinary processes that are
/// kept alive, each in a network of its own, and by a process for each request. Clients run on the same
/// processors. scripts/many-functions builds functions to measure.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  thaw bench mix --clients 4 --seconds 10 --output results")]
pub struct Arguments {
    /// The functions [default: all].
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Concurrent clients.
    #[arg(long, value_name = "N", default_value = "4", value_parser = count::<NonZeroUsize>)]
    clients: NonZeroUsize,
    /// How long each side is asked.
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = count::<NonZeroU64>)]
    seconds: NonZeroU64,
    /// Exponent of Zipf's law; 0: all functions get the same.
    #[arg(long, value_name = "S", default_value = "1.0", value_parser = exponent)]
    exponent: f64,
    /// What serves the requests; may be given several times [default: all].
    #[arg(long, value_name = "SIDE", value_parser = side_parser())]
    side: Vec<Side>,
    /// Path of the requests.
    #[arg(long, default_value = "/")]
    path: String,
    #[command(flatten)]
    report: ReportArguments,
}

fn side_parser() -> impl TypedValueParser<Value = Side> {
    let named = |name: String| Side::ALL.into_iter().find(|side| side.name() == name);
    PossibleValuesParser::new(Side::ALL.map(Side::name))
        .map(move |name| named(name).expect("it is one of them"))
}

fn exponent(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|_| "it is no number".to_owned())?;
    match (0.0..=10.0).contains(&number) {
        true => Ok(number),
        false => Err("it must be from 0 to 10".to_owned()),
    }
}

pub fn run(arguments: &Arguments) -> Outcome {
    check_path(&arguments.path)?;
    let sides = match &arguments.side[..] {
        [] => Side::ALL.to_vec(),
        sides => sides.to_vec(),
    };
    let options = MixOptions {
        clients: arguments.clients.get(),
        duration: Duration::from_secs(arguments.seconds.get()),
        exponent: arguments.exponent,
        sides,
        path: arguments.path.clone(),
    };
    let mut progress = Progress::new();
    let home = Home::from_environment()?;
    let report = bench::mix(&home, &arguments.names, &options, &mut |what| progress.show(what))?;
    drop(progress);
    let shown = arguments.report.show("mix", &report, &text(&report), || report.svg())?;
    let failed = report.sides.iter().find_map(|side| Some((side.side, side.failure.as_ref()?)));
    match (failed, report.failures.first()) {
        (Some((side, failure)), _) => {
            Err(Failure::failed(format!("{}: a request failed: {failure}", side.name())))
        }
        (None, Some(failure)) if !arguments.names.is_empty() => {
            Err(Failure::failed(format!("{}: {}", failure.function, failure.reason)))
        }
        _ => Ok(shown),
    }
}

fn text(report: &MixReport) -> String {
    let mut table = Table::new(&[
        "served by",
        "requests/s",
        "latency, µs p50",
        "p90",
        "p99",
        "functions asked",
        "boots",
        "host memory",
    ]);
    for side in &report.sides {
        table.row(vec![
            side.side.name().to_owned(),
            cell(side.requests_per_s),
            cell(side.latency_us.p50),
            cell(side.latency_us.p90),
            cell(side.latency_us.p99),
            side.functions_asked.to_string(),
            side.boots.to_string(),
            size(side.host_kib.max(0) as u64 * 1024),
        ]);
    }
    let mut text = format!(
        "{} functions, {} clients, {} processors, exponent {}\n{}",
        report.functions,
        report.clients,
        report.processors,
        report.exponent,
        table.text()
    );
    for failure in &report.failures {
        text += &format!("{} is not in the mix: {}\n", failure.function, failure.reason);
    }
    text
}
