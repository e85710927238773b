//! `thaw top`: what the node does, again and again.

use crate::client::{Daemon, DaemonArguments};
use crate::failure::Outcome;
use crate::output::{self, Table};
use clap::Args;
use rustix::stdio::stdout;
use rustix::termios::{isatty, tcgetwinsize};
use std::fmt::Write;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::Duration;
use thaw_home::config::TimeSpan;
use thaw_node::history::{FunctionStats, NodeStats, Stats};

/// Show what the node does: requests, times, boots and instances by function, the busiest first.
///
/// The daemon takes a sample every five seconds. Ends with Ctrl-C. Where standard output is no
/// terminal it prints once.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  thaw top\n  thaw top --json")]
pub struct Arguments {
    /// Print JSON, once.
    #[arg(long)]
    json: bool,
    /// Print once.
    #[arg(long)]
    once: bool,
    /// How often to print.
    #[arg(long, value_name = "DURATION", default_value = "5s")]
    every: TimeSpan,
    #[command(flatten)]
    daemon: DaemonArguments,
}

/// Shortest time between two looks.
const EVERY_MIN: Duration = Duration::from_millis(200);
/// Lines besides those of functions.
const HEAD_LINES: usize = 5;
/// Home, and erase to the end of the screen (ECMA-48, CUP and ED).
const CLEAR: &str = "\x1b[H\x1b[J";

pub fn run(arguments: &Arguments) -> Outcome {
    let daemon = Daemon::find(&arguments.daemon)?;
    if arguments.json {
        output::print_json(&daemon.get::<Stats>("/stats")?)?;
        return Ok(ExitCode::SUCCESS);
    }
    if arguments.once || !isatty(stdout()) {
        output::print(&text(&daemon.get("/stats")?, usize::MAX, usize::MAX))?;
        return Ok(ExitCode::SUCCESS);
    }
    loop {
        let stats: Stats = daemon.get("/stats")?;
        let size = tcgetwinsize(stdout()).ok();
        let rows = size.map_or(24, |size| usize::from(size.ws_row)).saturating_sub(HEAD_LINES);
        let columns = size.map_or(80, |size| usize::from(size.ws_col));
        output::print(&format!("{CLEAR}{}", text(&stats, rows.max(1), columns.max(20))))?;
        sleep(arguments.every.0.max(EVERY_MIN));
    }
}

/// The page, with so many functions at most, cut at so many columns.
fn text(stats: &Stats, functions: usize, columns: usize) -> String {
    let mut text = head(stats);
    let mut all: Vec<&FunctionStats> = stats.functions.iter().collect();
    all.sort_by(|a, b| b.requests.total_cmp(&a.requests).then_with(|| a.name.cmp(&b.name)));
    let titles =
        ["FUNCTION", "REQ/S", "ERR/S", "P50", "P95", "QUEUE95", "BOOT", "BOOTS/S", "INSTANCES"];
    let mut table = Table::new(&titles);
    for function in all.into_iter().take(functions) {
        table.row(row(function));
    }
    text.push_str(&table.text());
    text.lines().map(|line| line.chars().take(columns).collect::<String>() + "\n").collect()
}

fn head(stats: &Stats) -> String {
    let node = &stats.node;
    let mut text = String::new();
    let live: usize =
        node.all.instances.iter().filter(|(state, _)| *state != "asleep").map(|(_, n)| n).sum();
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "thaw {}, up {}s: {} instances (room for {}), {} of {} zygotes, {} memory, {:.2} CPUs",
        stats.version,
        stats.uptime_s,
        live,
        node.instances_free,
        node.zygotes,
        node.zygotes_target,
        output::size(node.memory_bytes),
        node.cpus
    );
    let _ = writeln!(
        text,
        "{} requests/s, {} errors/s, {} refusals/s, p50 {}, p95 {}, {} connections out{}\n",
        rate(node.all.requests),
        rate(node.all.server_errors),
        rate(node.all.refusals),
        time(node.all.request_p50_ms),
        time(node.all.request_p95_ms),
        node.egress_connections,
        traffic(node)
    );
    text
}

fn row(function: &FunctionStats) -> Vec<String> {
    let states: Vec<_> =
        function.instances.iter().map(|(state, count)| format!("{count} {state}")).collect();
    vec![
        function.name.clone(),
        rate(function.requests),
        rate(function.server_errors + function.refusals),
        time(function.request_p50_ms),
        time(function.request_p95_ms),
        time(function.queue_p95_ms),
        time(function.boot_ms),
        rate(function.boots.values().sum()),
        if states.is_empty() { "-".to_owned() } else { states.join(", ") },
    ]
}

/// What these carry, where somebody counts it.
fn traffic(node: &NodeStats) -> String {
    let size = |rate: f64| output::size(rate as u64);
    let rates = node.egress_sent.zip(node.egress_received);
    rates.map_or_else(String::new, |(sent, received)| {
        format!(" ({}/s sent, {}/s received)", size(sent), size(received))
    })
}

fn rate(value: f64) -> String {
    if value >= 100.0 { format!("{value:.0}") } else { format!("{value:.1}") }
}

/// Milliseconds with a fitting unit.
fn time(ms: Option<f64>) -> String {
    match ms {
        None => "-".to_owned(),
        Some(ms) if ms < 1.0 => format!("{:.0}us", ms * 1000.0),
        Some(ms) if ms < 1000.0 => format!("{ms:.1}ms"),
        Some(ms) => format!("{:.1}s", ms / 1000.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function(name: &str, requests: f64) -> FunctionStats {
        FunctionStats { name: name.to_owned(), requests, ..FunctionStats::default() }
    }

    #[test]
    fn the_busiest_come_first_and_the_page_fits() {
        let functions = vec![function("idle", 0.0), function("busy", 12.0), function("some", 3.0)];
        let stats = Stats { functions, ..Stats::default() };
        let text = text(&stats, 2, 40);
        let order: Vec<_> = ["busy", "some"].map(|name| text.find(name).unwrap()).into();
        assert!(order[0] < order[1] && !text.contains("idle"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 40), "{text}");
    }

    #[test]
    fn bytes_are_shown_where_they_are_counted() {
        let counted = NodeStats {
            egress_sent: Some(2048.0),
            egress_received: Some(1024.0),
            ..NodeStats::default()
        };
        assert_eq!(traffic(&counted), " (2.0KiB/s sent, 1.0KiB/s received)");
        assert_eq!(traffic(&NodeStats::default()), "");
    }

    #[test]
    fn times_have_units() {
        let shown = [None, Some(0.25), Some(12.34), Some(61_000.0)].map(time);
        assert_eq!(shown, ["-", "250us", "12.3ms", "61.0s"]);
    }
}
