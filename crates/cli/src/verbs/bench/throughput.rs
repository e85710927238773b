//! `thaw bench throughput`.

use super::report::{Progress, ReportArguments, cell, check_path};
use crate::failure::{Failure, Outcome};
use crate::output::Table;
use crate::verbs::numbers::count;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use std::num::{NonZeroU64, NonZeroUsize};
use std::time::Duration;
use thaw_bench::{self as bench, Served, ThroughputOptions, ThroughputReport};
use thaw_home::home::Home;

/// Measure boots and requests per second on all processors.
///
/// Each client asks, over a new connection, waits for the end of the response, and
/// asks again. Served by one instance for each request, of every kind of boot, and
/// by instances that stay. Clients run on the same processors. Where boots outrun
/// what is kept ready for them, the table says what they were instead.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  thaw bench throughput hello-python --clients 1 --clients 8 --seconds 5"
)]
pub struct Arguments {
    /// The function.
    name: String,
    /// Concurrent clients; may be given several times [default: 1, 2, 4, 8 and 16].
    #[arg(long, value_name = "N", value_parser = count::<NonZeroUsize>)]
    clients: Vec<NonZeroUsize>,
    /// What serves the requests; may be given several times [default: all].
    #[arg(long, value_name = "HOW", value_parser = served_parser())]
    served: Vec<Served>,
    /// How long each measurement takes.
    #[arg(long, value_name = "SECONDS", default_value = "3", value_parser = count::<NonZeroU64>)]
    seconds: NonZeroU64,
    /// Path of the requests.
    #[arg(long, default_value = "/")]
    path: String,
    #[command(flatten)]
    report: ReportArguments,
}

/// Reads the name of what serves.
fn served_parser() -> impl TypedValueParser<Value = Served> {
    let named = |name: String| Served::ALL.into_iter().find(|served| served.name() == name);
    PossibleValuesParser::new(Served::ALL.map(Served::name))
        .map(move |name| named(name).expect("it is one of them"))
}

pub fn run(arguments: &Arguments) -> Outcome {
    check_path(&arguments.path)?;
    let clients: Vec<usize> = match &arguments.clients[..] {
        [] => vec![1, 2, 4, 8, 16],
        clients => clients.iter().map(|clients| clients.get()).collect(),
    };
    let served = match &arguments.served[..] {
        [] => Served::ALL.to_vec(),
        served => served.to_vec(),
    };
    let options = ThroughputOptions {
        clients,
        served,
        duration: Duration::from_secs(arguments.seconds.get()),
        path: arguments.path.clone(),
    };
    let mut progress = Progress::new();
    let home = Home::from_environment()?;
    let report =
        bench::throughput(&home, &arguments.name, &options, &mut |what| progress.show(what))?;
    drop(progress);
    let shown = arguments.report.show("throughput", &report, &text(&report), || report.svg())?;
    match report.rates.iter().find_map(|rate| Some((rate, rate.failure.as_ref()?))) {
        Some((rate, failure)) => Err(Failure::failed(format!(
            "{}, {} clients: a request failed: {failure}",
            rate.served.name(),
            rate.clients
        ))),
        None => Ok(shown),
    }
}

fn text(report: &ThroughputReport) -> String {
    let mut table = Table::new(&[
        "clients",
        "served by",
        "requests/s",
        "boots/s",
        "latency, µs p50",
        "p99",
        "boots were",
    ]);
    for rate in &report.rates {
        let boots = &rate.boots;
        let kinds = [
            ("cold", boots.cold),
            ("warm", boots.warm),
            ("fork", boots.fork),
            ("ready", boots.ready),
        ];
        let kinds = kinds.iter().filter(|(_, count)| *count > 0);
        let kinds: Vec<_> = kinds.map(|(kind, count)| format!("{count} {kind}")).collect();
        table.row(vec![
            rate.clients.to_string(),
            rate.served.name().to_owned(),
            cell(rate.requests_per_s),
            cell(rate.boots_per_s),
            cell(rate.latency_us.p50),
            cell(rate.latency_us.p99),
            kinds.join(", "),
        ]);
    }
    format!("{}, {} processors\n{}", report.function, report.processors, table.text())
}
