//! `thaw bench volume`: files of a volume, from a sandbox and by the same program on the host, turn
//! by turn in the same directory.

mod measures;

pub(crate) use measures::serve_files;

use crate::BenchError;
use crate::syscalls::{Caller, Pair, SideError, percentile, ratio};
use crate::worker::Worker;
use measures::MEASURES;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use thaw_home::config::ByteSize;
use thaw_home::home::Home;
use thaw_home::volumes::{VolumeError, VolumeStore};
use thaw_store::Name;

/// A load of SQLite, which times itself.
const SQLITE: &str = include_str!("sqlite.py");
const PYTHON: &str = "/usr/bin/python3";
/// Bytes that the volume may hold.
const SIZE: &str = "1GiB";
/// Where it is in the sandbox.
const PLACE: &str = "/data";

/// What is measured.
#[derive(Clone, Debug)]
pub struct VolumeOptions {
    /// Turns of both sides.
    pub rounds: usize,
    /// The command that runs another one in a sandbox with this host's files, up to the options
    /// that name volumes.
    pub sandbox: Vec<String>,
}

/// One use of files on both sides.
#[derive(Clone, Debug, Serialize)]
pub struct UseResult {
    /// Short name.
    pub name: &'static str,
    /// What is done.
    pub what: &'static str,
    /// Nanoseconds for one, medians.
    pub p50_ns: Pair,
    /// Nanoseconds for one, 99th percentiles.
    pub p99_ns: Pair,
    /// Median in the sandbox by that on the host.
    pub ratio_p50: f64,
    /// The same of the 99th percentiles.
    pub ratio_p99: f64,
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct VolumeReport {
    /// Turns of both sides.
    pub rounds: usize,
    /// The host's directory in which both sides worked.
    pub directory: PathBuf,
    /// Uses of files, 4 KiB at a time unless they say otherwise.
    pub uses: Vec<UseResult>,
    /// Programs that this host lacks.
    pub missing: Vec<&'static str>,
}

/// Measures a volume that is made for this and removed then; `progress` gets the name of what
/// comes next.
///
/// # Errors
/// The volume cannot be made, or a side does not run.
pub fn volume(
    home: &Home,
    options: &VolumeOptions,
    progress: &mut dyn FnMut(&str),
) -> Result<VolumeReport, BenchError> {
    let volume = OwnVolume::make(home)?;
    let sides = Sides { volume: &volume, sandbox: &options.sandbox };
    progress("reading and writing");
    let mut uses = sides.measure_uses(options.rounds, progress)?;
    let mut missing = Vec::new();
    match Path::new(PYTHON).exists() {
        true => {
            progress("SQLite");
            uses.extend(sides.measure_sqlite(options.rounds)?);
        }
        false => missing.push("Python, for SQLite"),
    }
    let directory = volume.directory.clone();
    Ok(VolumeReport { rounds: options.rounds, directory, uses, missing })
}

/// A volume that is there for as long as this is.
struct OwnVolume {
    volumes: VolumeStore,
    name: Name,
    directory: PathBuf,
}

impl OwnVolume {
    fn make(home: &Home) -> Result<Self, VolumeError> {
        let volumes = VolumeStore::of(home.clone());
        let name = Name::new(&format!("thaw-bench-{}", std::process::id())).expect("a name");
        let size: ByteSize = SIZE.parse().expect("a size");
        volumes.create(&name, size, &[], None)?;
        let directory = volumes.show(&name)?.path;
        Ok(Self { volumes, name, directory })
    }
}

impl Drop for OwnVolume {
    fn drop(&mut self) {
        if let Err(error) = self.volumes.remove(&self.name) {
            eprintln!("the volume of this measurement is still there: {error}");
        }
    }
}

/// Samples of both sides, in nanoseconds.
#[derive(Clone, Default)]
struct Samples {
    native: Vec<f64>,
    thaw: Vec<f64>,
}

impl Samples {
    fn result(mut self, name: &'static str, what: &'static str) -> UseResult {
        let mut pair = |percent| Pair {
            native: percentile(&mut self.native, percent),
            thaw: percentile(&mut self.thaw, percent),
        };
        let (p50_ns, p99_ns) = (pair(50), pair(99));
        let (ratio_p50, ratio_p99) =
            (ratio(p50_ns.thaw, p50_ns.native), ratio(p99_ns.thaw, p99_ns.native));
        UseResult { name, what, p50_ns, p99_ns, ratio_p50, ratio_p99 }
    }
}

/// How a program is run on both sides.
struct Sides<'a> {
    volume: &'a OwnVolume,
    sandbox: &'a [String],
}

impl Sides<'_> {
    /// The command that runs a program in a sandbox, in the volume.
    fn within(&self, program: &[String]) -> Vec<String> {
        let volume = format!("{}:{PLACE}:rw", self.volume.name);
        let options = ["--volume", &volume, "--workdir", PLACE, "--"];
        let sandbox = self.sandbox.iter().cloned().chain(options.map(str::to_owned));
        sandbox.chain(program.iter().cloned()).collect()
    }

    fn measure_uses(
        &self,
        rounds: usize,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Vec<UseResult>, SideError> {
        let executable = std::env::current_exe()?.to_string_lossy().into_owned();
        let arguments = Worker::Files.arguments().map(str::to_owned);
        let worker: Vec<String> = [executable].into_iter().chain(arguments).collect();
        let here = Some(&*self.volume.directory);
        let mut native = Caller::start_in("the worker on the host", &worker, here)?;
        let there = self.within(&worker);
        let mut thaw = Caller::start_in("the worker in the sandbox", &there, None)?;
        let mut samples = vec![Samples::default(); MEASURES.len()];
        // The first round warms both up.
        for round in 0..=rounds {
            for (measure, samples) in MEASURES.iter().zip(&mut samples) {
                progress(&format!("{} {round}", measure.what));
                let of_native = native.take(measure.name)?;
                let of_thaw = thaw.take(measure.name)?;
                if round > 0 {
                    samples.native.extend(of_native);
                    samples.thaw.extend(of_thaw);
                }
            }
        }
        native.finish()?;
        thaw.finish()?;
        let results = MEASURES.iter().zip(samples);
        Ok(results.map(|(measure, samples)| samples.result(measure.name, measure.what)).collect())
    }

    fn measure_sqlite(&self, rounds: usize) -> Result<[UseResult; 2], SideError> {
        let program = [PYTHON, "-c", SQLITE].map(str::to_owned);
        let within = self.within(&program);
        let (mut writes, mut reads) = (Samples::default(), Samples::default());
        for _ in 0..rounds {
            let [write, read] = run_sqlite(&program, &self.volume.directory)?;
            writes.native.extend(write);
            reads.native.extend(read);
            let [write, read] = run_sqlite(&within, Path::new("/"))?;
            writes.thaw.extend(write);
            reads.thaw.extend(read);
        }
        Ok([
            writes.result("sqlite-write", "SQLite, WAL: a transaction of 10 rows"),
            reads.result("sqlite-read", "SQLite, WAL: a query by an index"),
        ])
    }
}

/// Runs the load; what its transactions and queries took.
fn run_sqlite(command: &[String], directory: &Path) -> Result<[Vec<f64>; 2], SideError> {
    let mut program = Command::new(&command[0]);
    program.args(&command[1..]).current_dir(directory).stdin(Stdio::null());
    let output = program.output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let line = |line: &str| line.split(' ').map(|number| number.parse().ok()).collect();
    let lines: Option<Vec<Vec<f64>>> = text.lines().map(line).collect();
    lines.and_then(|lines| lines.try_into().ok()).ok_or_else(|| SideError::Program {
        name: "SQLite",
        said: format!("{text}{}", String::from_utf8_lossy(&output.stderr)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_measures_are_one_word_and_differ() {
        let names: Vec<_> = MEASURES.iter().map(|measure| measure.name).collect();
        for (at, name) in names.iter().enumerate() {
            assert!(!name.contains(' ') && !names[..at].contains(name), "{name}");
        }
    }

    #[test]
    fn sides_are_compared_by_percentiles() {
        let samples = Samples { native: vec![2.0; 9], thaw: vec![3.0; 9] };
        let result = samples.result("a", "b");
        assert_eq!((result.ratio_p50, result.ratio_p99), (1.5, 1.5));
        assert_eq!(result.p50_ns, Pair { native: 2.0, thaw: 3.0 });
    }
}
