//! The process that makes the calls: this same executable, once on the host and
//! once in a sandbox.
//!
//! It reads lines of a measure's name and a number of samples, and answers each
//! with the samples, in nanoseconds for one call.

use super::calls::{self, Workplace};
use std::io::{self, BufRead, Write};
use std::process::ExitCode;

/// Environment variable that makes this executable a worker.
pub const WORKER_VARIABLE: &str = "THAW_BENCH_WORKER";

/// The worker's `main`, if this process is one.
pub fn worker_main() -> Option<ExitCode> {
    match std::env::var(WORKER_VARIABLE).ok()?.as_str() {
        "http" => Some(report(super::http::native_main())),
        _ => Some(report(serve())),
    }
}

/// An error goes where its parent reads it, in place of a result.
fn report(outcome: io::Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn serve() -> io::Result<()> {
    let workplace = Workplace::prepare()?;
    let mut output = io::stdout().lock();
    writeln!(output, "ready")?;
    for order in io::stdin().lock().lines() {
        let order = order?;
        let parsed = order.split_once(' ').and_then(|(name, samples)| {
            let measure = calls::MEASURES.iter().find(|measure| measure.name == name)?;
            Some((measure, samples.parse::<usize>().ok()?))
        });
        let Some((measure, samples)) = parsed else {
            return Err(io::Error::other(format!("no such measure: {order}")));
        };
        let samples = measure.take(&workplace, samples)?;
        let samples: Vec<String> = samples.iter().map(f64::to_string).collect();
        writeln!(output, "{}", samples.join(" "))?;
    }
    Ok(())
}
