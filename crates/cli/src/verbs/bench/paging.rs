//! `thaw bench paging`.

use super::report::{Progress, ReportArguments, cell, check_path};
use crate::failure::{Failure, Outcome};
use crate::output::{Table, size};
use crate::verbs::numbers::count;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use std::num::NonZeroUsize;
use thaw_bench::{self as bench, PagedFunction, PagingOptions, PagingReport, Strategy};
use thaw_home::home::Home;

/// Compare ways to bring the pages of an image in, end to end.
///
/// Each boot is cold: nothing of the image and the files is in memory. eager reads all of it before
/// the boot; lazy reads pages when they are touched; prefault reads the recorded working set; first
/// knows nothing of the image; shared is the same behind a request to the function with most files in
/// common; resident is the least, with everything in memory. Strategies take turns.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  thaw bench paging --output results\n  \
    thaw bench paging flask-python --strategy first --strategy shared -n 20")]
pub struct Arguments {
    /// The functions [default: all].
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Boots of each function by each strategy that are counted.
    #[arg(short, long = "count", value_name = "N", default_value = "10", value_parser = count::<NonZeroUsize>)]
    n: NonZeroUsize,
    /// What brings pages in; may be given several times [default: all].
    #[arg(long, value_name = "STRATEGY", value_parser = strategy_parser())]
    strategy: Vec<Strategy>,
    /// Path of the requests.
    #[arg(long, default_value = "/")]
    path: String,
    #[command(flatten)]
    report: ReportArguments,
}

fn strategy_parser() -> impl TypedValueParser<Value = Strategy> {
    let named = |name: String| Strategy::ALL.into_iter().find(|one| one.name() == name);
    PossibleValuesParser::new(Strategy::ALL.map(Strategy::name))
        .map(move |name| named(name).expect("it is one of them"))
}

pub fn run(arguments: &Arguments) -> Outcome {
    check_path(&arguments.path)?;
    let strategies = match &arguments.strategy[..] {
        [] => Strategy::ALL.to_vec(),
        strategies => strategies.to_vec(),
    };
    let (count, path) = (arguments.n.get(), arguments.path.clone());
    let options = PagingOptions { strategies, count, path };
    let mut progress = Progress::new();
    let home = Home::from_environment()?;
    let report = bench::paging(&home, &arguments.names, &options, &mut |what| progress.show(what))?;
    drop(progress);
    let shown = arguments.report.show("paging", &report, &text(&report), || report.svg())?;
    match report.failures.first() {
        Some(failure) if !arguments.names.is_empty() => {
            Err(Failure::failed(format!("{}: {}", failure.function, failure.reason)))
        }
        _ => Ok(shown),
    }
}

fn text(report: &PagingReport) -> String {
    let mut table = Table::new(&[
        "function",
        "pages",
        "response, µs p50",
        "p90",
        "of resident",
        "warmed up by",
    ]);
    for function in &report.functions {
        for paged in &function.strategies {
            table.row(vec![
                function.function.clone(),
                paged.strategy.name().to_owned(),
                cell(paged.response_us.p50),
                cell(paged.response_us.p90),
                if paged.ratio > 0.0 { format!("{:.2}", paged.ratio) } else { "-".to_owned() },
                warmed_by(function, paged.strategy),
            ]);
        }
    }
    let mut text = table.text();
    for failure in &report.failures {
        text += &format!("{} failed: {}\n", failure.function, failure.reason);
    }
    text
}

fn warmed_by(function: &PagedFunction, strategy: Strategy) -> String {
    match (&function.neighbour, strategy) {
        (Some(neighbour), Strategy::Shared) => {
            format!("{neighbour}, {} of files", size(function.neighbour_bytes))
        }
        _ => String::new(),
    }
}
