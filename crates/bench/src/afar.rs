//! `thaw bench afar`: the first answer of a function that the node has never seen, from a registry
//! that is far away.

use super::client::{eventually, exchange, get};
use super::figure::{Bars, FigureError, Series};
use super::link::{LineOptions, line_to};
use super::{BenchError, BenchOptions, OnProgress, Percentiles, boot, http_server};
use serde::Serialize;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use thaw_home::home::Home;
use thaw_node::boots::BootKind;
use thaw_node::instance::WorkingSetUse;
use thaw_sandbox::PopulatePolicy;
use thaw_store::Store;

/// Debian's `docker-registry`.
const REGISTRY: &str = "docker-registry";
/// Cold boots that the goal is made of.
const COLD_BOOTS: usize = 5;

/// What is measured.
#[derive(Clone, Debug)]
pub struct AfarOptions {
    /// Round trip to the registry.
    pub delay: Duration,
    /// Rate of the line, in Gbit/s.
    pub gbit: f64,
    /// Pulls of each kind.
    pub count: usize,
    /// Path of the requests.
    pub path: String,
}

/// What was measured. Times are in microseconds.
#[derive(Clone, Debug, Serialize)]
pub struct AfarReport {
    /// The function.
    pub function: String,
    /// Pulls of each kind.
    pub n: usize,
    /// Round trip to the registry, in milliseconds.
    pub delay_ms: f64,
    /// Rate of the line, in Gbit/s.
    pub gbit: f64,
    /// Bytes of what a boot needs, compressed.
    pub run_bytes: u64,
    /// Bytes of all that was pushed, compressed.
    pub bytes: u64,
    /// Median of cold boots to the first byte, with the function in the store.
    pub cold_boot_us: f64,
    /// One round trip, the transfer of `run_bytes`, and the cold boot.
    pub goal_us: f64,
    /// From the beginning of `thaw pull --lazy` to the whole answer.
    pub lazy_us: Percentiles,
    /// From the beginning of `thaw pull` to the whole answer.
    pub whole_us: Percentiles,
    /// Median of `lazy_us` as a multiple of the goal.
    pub to_goal: f64,
    /// The same of `whole_us`.
    pub whole_to_goal: f64,
}

impl AfarReport {
    /// A figure of goal and medians.
    ///
    /// # Errors
    /// The figure cannot be drawn.
    pub fn svg(&self) -> Result<String, FigureError> {
        let values = [self.goal_us, self.lazy_us.p50, self.whole_us.p50];
        let title = format!(
            "{}, first answer over {} ms and {} Gbit/s",
            self.function, self.delay_ms, self.gbit
        );
        let bars = Bars {
            title: &title,
            axis: "µs",
            categories: ["goal", "pull --lazy", "pull"].map(str::to_owned).to_vec(),
            series: vec![Series {
                name: "median".to_owned(),
                values: values.into_iter().map(Some).collect(),
                marks: Vec::new(),
            }],
            logarithmic: true,
        };
        bars.svg()
    }
}

/// Measures a stored function, which is pushed to a registry of this measurement's own.
///
/// # Errors
/// There is no `docker-registry`, or the function does not answer.
pub fn afar(
    home: &Home,
    name: &str,
    options: &AfarOptions,
    progress: &mut OnProgress<'_>,
) -> Result<AfarReport, BenchError> {
    http_server(&Store::open(&home.store())?, name)?;
    progress("cold boots");
    let cold = BenchOptions {
        boots: vec![BootKind::Cold],
        count: COLD_BOOTS,
        path: options.path.clone(),
        working_set: WorkingSetUse::Populate(PopulatePolicy::Write),
        native: false,
    };
    let cold_boot_us = boot(home, name, BootKind::Cold, &cold, progress)?.phases_us.first_byte.p50;
    progress("pushing");
    let place = Place::new()?;
    let registry = Registry::start(&place.0)?;
    let reference = |address: SocketAddr| format!("localhost:{}/afar/{name}:1", address.port());
    thaw(home.root(), &["push", name, &reference(registry.address)])?;
    let (run_bytes, bytes) = registry.sizes(&format!("afar/{name}"))?;
    let line = LineOptions { round_trip: options.delay, bits: options.gbit * 1e9 };
    let far = reference(line_to(registry.address, line)?);
    let mut times = [Vec::new(), Vec::new()];
    for turn in 0..options.count {
        // In turns, so that what else the machine does counts for both.
        for (samples, lazily) in times.iter_mut().zip([true, false]) {
            progress(&format!("pull {} of {}", turn + 1, options.count));
            samples.push(first_answer(&place.0, name, (&far, lazily), &options.path)?);
        }
    }
    let goal = line.round_trip + line.transfer(run_bytes);
    let goal_us = goal.as_secs_f64() * 1e6 + cold_boot_us;
    let [lazy_us, whole_us] = times.map(|mut samples| Percentiles::of_ns(&mut samples));
    let ratio = |us: f64| (us / goal_us * 100.0).round() / 100.0;
    Ok(AfarReport {
        function: name.to_owned(),
        n: options.count,
        delay_ms: options.delay.as_secs_f64() * 1e3,
        gbit: options.gbit,
        run_bytes,
        bytes,
        cold_boot_us,
        goal_us,
        lazy_us,
        whole_us,
        to_goal: ratio(lazy_us.p50),
        whole_to_goal: ratio(whole_us.p50),
    })
}

/// A directory that is gone afterwards.
struct Place(PathBuf);

impl Place {
    fn new() -> io::Result<Self> {
        let path = std::env::temp_dir().join(format!("thaw-bench-afar-{}", std::process::id()));
        std::fs::create_dir(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A process that ends with the measurement.
struct Ending(Child);

impl Drop for Ending {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        // A daemon ends its sandboxes.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.0.wait();
    }
}

fn command(home: &Path, arguments: &[&str]) -> io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.env("THAW_HOME", home).args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    Ok(command)
}

/// Runs a verb of this program to its end.
fn thaw(home: &Path, arguments: &[&str]) -> Result<(), BenchError> {
    let output = command(home, arguments)?.output()?;
    match output.status.success() {
        true => Ok(()),
        false => Err(failed(&output.stderr)),
    }
}

fn failed(stderr: &[u8]) -> BenchError {
    let said = String::from_utf8_lossy(stderr);
    BenchError::Verb(said.trim().to_owned())
}

/// Nanoseconds from the beginning of a pull into an empty store to the first answer.
fn first_answer(
    place: &Path,
    name: &str,
    (reference, lazily): (&str, bool),
    path: &str,
) -> Result<u64, BenchError> {
    let home = place.join("home");
    std::fs::create_dir_all(&home)?;
    let mut serve = command(&home, &["serve", "--weak-limits", "--listen", "127.0.0.1:0"])?;
    let daemon = Ending(serve.stderr(Stdio::null()).spawn()?);
    let gateway = eventually(|| gateway_of(&home)).ok_or(BenchError::NoPhase("its daemon"))?;
    // Its zygotes are made meanwhile, as those of a node that serves others are.
    std::thread::sleep(Duration::from_secs(1));
    let request = get(name, path);
    let begin = Instant::now();
    let mut arguments = vec!["pull", reference, "--refreeze", "never"];
    if lazily {
        arguments = vec!["pull", reference, "--lazy"];
    }
    let mut pull = Ending(command(&home, &arguments)?.stderr(Stdio::null()).spawn()?);
    loop {
        if exchange(gateway, &request).is_ok() {
            break;
        }
        if pull.0.try_wait()?.is_some_and(|status| !status.success()) {
            return Err(BenchError::Verb(format!("`thaw {}` failed", arguments.join(" "))));
        }
        std::thread::sleep(Duration::from_micros(300));
    }
    let took = begin.elapsed().as_nanos() as u64;
    let status = pull.0.wait()?;
    drop(daemon);
    std::fs::remove_dir_all(&home)?;
    match status.success() {
        true => Ok(took),
        false => Err(BenchError::Verb(format!("`thaw {}` failed", arguments.join(" ")))),
    }
}

fn gateway_of(home: &Path) -> Option<SocketAddr> {
    let text = std::fs::read(home.join("daemon.json")).ok()?;
    let value: serde_json::Value = serde_json::from_slice(&text).ok()?;
    let gateway = value["gateway"].as_str()?.parse().ok()?;
    TcpStream::connect(gateway).ok().map(|_| gateway)
}

/// A registry for one measurement.
struct Registry {
    address: SocketAddr,
    _process: Ending,
}

impl Registry {
    fn start(place: &Path) -> Result<Self, BenchError> {
        let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
        let config = place.join("registry.yml");
        let text = format!(
            "version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  addr: {address}\n",
            place.join("registry").display()
        );
        std::fs::write(&config, text)?;
        let mut command = Command::new(REGISTRY);
        command.arg("serve").arg(&config).stdin(Stdio::null());
        let started = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let process = started.map_err(|error| {
            BenchError::Verb(format!("cannot run {REGISTRY} ({error}); install it"))
        })?;
        let process = Ending(process);
        let listens = || TcpStream::connect(address).ok();
        eventually(listens).ok_or(BenchError::NoPhase("its registry"))?;
        Ok(Self { address, _process: process })
    }

    /// Compressed bytes of the run, and of everything.
    fn sizes(&self, repository: &str) -> Result<(u64, u64), BenchError> {
        let mut stream = TcpStream::connect(self.address)?;
        write!(
            stream,
            "GET /v2/{repository}/manifests/1 HTTP/1.0\r\n\
             Accept: application/vnd.oci.image.manifest.v1+json\r\n\r\n"
        )?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        let nothing = || BenchError::NoPhase("its manifest");
        let body = answer.windows(4).position(|end| end == b"\r\n\r\n").ok_or_else(nothing)?;
        let manifest: serde_json::Value =
            serde_json::from_slice(&answer[body + 4..]).map_err(|_| nothing())?;
        let layers = manifest["layers"].as_array().ok_or_else(nothing)?;
        let size = |layer: &serde_json::Value| layer["size"].as_u64().unwrap_or(0);
        let is_run = |layer: &&serde_json::Value| {
            layer["mediaType"].as_str().is_some_and(|kind| kind.contains(".run."))
        };
        let run = layers.iter().find(is_run).map(size).ok_or_else(|| {
            BenchError::Verb("the function cannot be booted before all of it is pulled".to_owned())
        })?;
        Ok((run, layers.iter().map(size).sum()))
    }
}
