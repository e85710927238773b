//! Measuring what programs do once they run: system calls, requests per second,
//! and plain computing, on the host and in a sandbox, turn by turn.

mod caller;
mod calls;
mod compute;
mod http;

pub(crate) use caller::{serve_calls, serve_orders};
pub use compute::ComputeResult;
pub use http::HttpResult;
pub(crate) use http::serve_server;

use super::BenchError;
use super::worker::Worker;
use compute::Programs;
use serde::Serialize;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use thaw_home::home::Home;

/// Samples of every measure that a side takes in its turn.
const SAMPLES: usize = 20;

/// What is measured.
#[derive(Clone, Debug)]
pub struct SyscallOptions {
    /// Turns of both sides.
    pub rounds: usize,
    /// Functions whose servers are measured under `wrk`.
    pub http: Vec<String>,
    /// Whether to measure computing programs.
    pub compute: bool,
    /// The command that runs another one in a sandbox with this host's files; the
    /// other one's name and arguments follow it.
    pub sandbox: Vec<String>,
}

/// A figure of both sides.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Pair {
    /// On the host.
    pub native: f64,
    /// In a sandbox.
    pub thaw: f64,
}

/// One kind of call on both sides.
#[derive(Clone, Debug, Serialize)]
pub struct CallResult {
    /// Short name.
    pub name: &'static str,
    /// What is called.
    pub what: &'static str,
    /// Whether the host has no part in it.
    pub inside: bool,
    /// Nanoseconds for one call, medians.
    pub p50_ns: Pair,
    /// Nanoseconds for one call, 99th percentiles.
    pub p99_ns: Pair,
    /// Median in the sandbox by that on the host.
    pub ratio_p50: f64,
    /// The same of the 99th percentiles.
    pub ratio_p99: f64,
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct SyscallReport {
    /// Turns of both sides.
    pub rounds: usize,
    /// System calls.
    pub calls: Vec<CallResult>,
    /// Servers.
    pub http: Vec<HttpResult>,
    /// Computing programs.
    pub compute: Vec<ComputeResult>,
    /// Languages that this host lacks.
    pub missing: Vec<&'static str>,
}

/// Why one side could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum SideError {
    /// A program said something else than a figure.
    #[error("{name} failed: {}", said.trim())]
    Program {
        /// Which.
        name: &'static str,
        /// What it printed.
        said: String,
    },
    /// There is no `wrk`.
    #[error("cannot run wrk ({0}); install Debian's package wrk, or leave --http away")]
    NoWrk(io::Error),
    /// The host refused something.
    #[error("cannot measure ({0})")]
    Io(#[from] io::Error),
}

/// Measures; `progress` gets the name of what comes next.
///
/// # Errors
/// A side does not run, or a function does not answer.
pub fn syscalls(
    home: impl FnOnce() -> Result<Home, thaw_home::home::HomeError>,
    options: &SyscallOptions,
    progress: &mut dyn FnMut(&str),
) -> Result<SyscallReport, BenchError> {
    progress("system calls");
    let mut report = SyscallReport {
        rounds: options.rounds,
        calls: calls(options)?,
        http: Vec::new(),
        compute: Vec::new(),
        missing: Vec::new(),
    };
    if !options.http.is_empty() {
        let home = home()?;
        for name in &options.http {
            progress(name);
            report.http.push(http::measure(&home, name, options.rounds)?);
        }
    }
    if options.compute {
        progress("computing");
        let programs = Programs::prepare().map_err(SideError::from)?;
        (report.compute, report.missing) = programs.measure(&options.sandbox, options.rounds)?;
    }
    Ok(report)
}

/// Measures that fork come last, in sandboxes of their own: what is shared by
/// several processes costs a little more.
fn calls(options: &SyscallOptions) -> Result<Vec<CallResult>, SideError> {
    let (forking, others): (Vec<_>, Vec<_>) =
        calls::MEASURES.iter().partition(|measure| measure.forks);
    let mut results = measure(&others, options)?;
    results.extend(measure(&forking, options)?);
    Ok(results)
}

fn measure(
    measures: &[&calls::Measure],
    options: &SyscallOptions,
) -> Result<Vec<CallResult>, SideError> {
    let executable = std::env::current_exe()?.to_string_lossy().into_owned();
    let arguments = Worker::Calls.arguments().map(str::to_owned);
    let here: Vec<String> = [executable].into_iter().chain(arguments).collect();
    let mut native = Caller::start("the worker on the host", &here)?;
    let there: Vec<String> = options.sandbox.iter().chain(&here).cloned().collect();
    let mut thaw = Caller::start("the worker in the sandbox", &there)?;
    let mut samples: Vec<(Vec<f64>, Vec<f64>)> = vec![Default::default(); measures.len()];
    // The first round warms both up.
    for round in 0..=options.rounds {
        for (measure, (natives, thaws)) in measures.iter().zip(&mut samples) {
            let of_native = native.take(measure.name)?;
            let of_thaw = thaw.take(measure.name)?;
            if round > 0 {
                natives.extend(of_native);
                thaws.extend(of_thaw);
            }
        }
    }
    Ok(measures.iter().zip(samples).map(|(measure, (n, t))| compare(measure, n, t)).collect())
}

fn compare(measure: &calls::Measure, mut native: Vec<f64>, mut thaw: Vec<f64>) -> CallResult {
    let mut pair = |percent| Pair {
        native: percentile(&mut native, percent),
        thaw: percentile(&mut thaw, percent),
    };
    let (p50_ns, p99_ns) = (pair(50), pair(99));
    CallResult {
        name: measure.name,
        what: measure.what,
        inside: measure.inside,
        p50_ns,
        p99_ns,
        ratio_p50: ratio(p50_ns.thaw, p50_ns.native),
        ratio_p99: ratio(p99_ns.thaw, p99_ns.native),
    }
}

/// A worker that takes samples.
pub(crate) struct Caller {
    name: &'static str,
    process: Child,
    /// `None` once there are no more.
    orders: Option<ChildStdin>,
    results: BufReader<ChildStdout>,
}

impl Caller {
    fn start(name: &'static str, command: &[String]) -> Result<Self, SideError> {
        Self::start_in(name, command, None)
    }

    /// Starts it in a directory, or in this process' own.
    pub(crate) fn start_in(
        name: &'static str,
        command: &[String],
        directory: Option<&Path>,
    ) -> Result<Self, SideError> {
        let mut process = Command::new(&command[0]);
        process.args(&command[1..]).stdin(Stdio::piped()).stdout(Stdio::piped());
        directory.map(|directory| process.current_dir(directory));
        let mut process = process.spawn()?;
        let missing = || io::Error::from(io::ErrorKind::BrokenPipe);
        let orders = Some(process.stdin.take().ok_or_else(missing)?);
        let results = BufReader::new(process.stdout.take().ok_or_else(missing)?);
        let mut worker = Self { name, process, orders, results };
        match worker.line()?.trim() {
            "ready" => Ok(worker),
            other => Err(SideError::Program { name, said: other.to_owned() }),
        }
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        self.results.read_line(&mut line)?;
        Ok(line)
    }

    pub(crate) fn take(&mut self, measure: &str) -> Result<Vec<f64>, SideError> {
        let orders =
            self.orders.as_mut().ok_or_else(|| io::Error::from(io::ErrorKind::BrokenPipe))?;
        writeln!(orders, "{measure} {SAMPLES}")?;
        let line = self.line()?;
        let samples: Result<Vec<f64>, _> = line.split_whitespace().map(str::parse).collect();
        match samples {
            Ok(samples) if samples.len() == SAMPLES => Ok(samples),
            _ => Err(SideError::Program { name: self.name, said: format!("{measure}: {line}") }),
        }
    }

    /// Has no more orders, and waits until it has put its things away.
    pub(crate) fn finish(mut self) -> Result<(), SideError> {
        self.orders = None;
        self.process.wait()?;
        Ok(())
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// By the nearest-rank method; 0 without samples.
pub(crate) fn percentile(samples: &mut [f64], percent: usize) -> f64 {
    samples.sort_unstable_by(f64::total_cmp);
    let rank = (samples.len() * percent).div_ceil(100).max(1);
    samples.get(rank - 1).map_or(0.0, |sample| (sample * 10.0).round() / 10.0)
}

fn median(samples: &mut [f64]) -> f64 {
    percentile(samples, 50)
}

pub(crate) fn ratio(of: f64, by: f64) -> f64 {
    if by > 0.0 { (of / by * 1000.0).round() / 1000.0 } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples() {
        let mut samples: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        assert_eq!(percentile(&mut samples, 50), 100.0);
        assert_eq!(percentile(&mut samples, 99), 198.0);
        assert_eq!(percentile(&mut [], 50), 0.0);
    }

    #[test]
    fn names_of_measures_are_one_word_and_differ() {
        let names: Vec<_> = calls::MEASURES.iter().map(|measure| measure.name).collect();
        for (at, name) in names.iter().enumerate() {
            assert!(!name.contains(' ') && !names[..at].contains(name), "{name}");
        }
    }
}
