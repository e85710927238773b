//! `thaw bench throughput`: boots and requests per second on all processors,
//! for a growing number of clients (Metropolis' Figure 6).

use super::client::{exchange, get};
use super::figure::{FigureError, Lines};
use super::rig::{Rig, RigOptions};
use super::{BenchError, OnProgress, Percentiles};
use serde::Serialize;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use thaw_home::config::Isolation;
use thaw_home::home::Home;
use thaw_node::boots::BootKind;
use thaw_node::instance::{BootPolicy, RewindPolicy};
use thaw_store::Store;

/// Zygotes and instances kept ready, as `thaw serve` does by default.
const READY: usize = 16;
/// Most instances at a time.
const INSTANCES: u32 = 512;
/// Requests before those that count.
const WARM_UPS: usize = 20;
/// After those, what boots begin from is made again.
const REST: Duration = Duration::from_millis(200);

/// What is measured.
#[derive(Clone, Debug)]
pub struct ThroughputOptions {
    /// Numbers of concurrent clients.
    pub clients: Vec<usize>,
    /// What serves, turn by turn.
    pub served: Vec<Served>,
    /// How long each measurement takes.
    pub duration: Duration,
    /// Path of the requests.
    pub path: String,
}

/// What serves the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Served {
    /// An instance for each request, from the image.
    Warm,
    /// An instance for each request, forked.
    Fork,
    /// An instance for each request, booted ahead as long as there are such.
    Ready,
    /// Instances that are put back into the state before their request.
    Rewind,
    /// Instances that stay.
    Reuse,
}

impl Served {
    /// All.
    pub const ALL: [Self; 5] = [Self::Warm, Self::Fork, Self::Ready, Self::Rewind, Self::Reuse];

    /// The name, as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Warm => "warm",
            Self::Fork => "fork",
            Self::Ready => "ready",
            Self::Rewind => "rewind",
            Self::Reuse => "reuse",
        }
    }

    fn options(self) -> RigOptions {
        let kind = match self {
            Self::Warm | Self::Reuse => BootKind::Warm,
            Self::Fork => BootKind::Fork,
            Self::Ready | Self::Rewind => BootKind::Ready,
        };
        let isolation = match self {
            Self::Reuse => Isolation::Instance,
            _ => Isolation::Request,
        };
        let ready = match self {
            Self::Ready => READY,
            Self::Rewind => 1,
            _ => 0,
        };
        let single = RigOptions::single(kind);
        let mut options = RigOptions { isolation, zygotes: READY, instances: INSTANCES, ..single };
        options.launch.policy = BootPolicy {
            ready,
            rewind: (self == Self::Rewind)
                .then_some(RewindPolicy { most: INSTANCES as usize, where_it_wins: false }),
            template: self == Self::Fork,
            automatic: true,
        };
        options
    }
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct ThroughputReport {
    /// The function.
    pub function: String,
    /// Processors of this machine, which clients and instances share.
    pub processors: usize,
    /// By number of clients, then by what serves.
    pub rates: Vec<Rate>,
}

/// Requests of a number of clients, each waiting for its response before it
/// asks again, over a new connection.
#[derive(Clone, Debug, Serialize)]
pub struct Rate {
    /// What served them.
    pub served: Served,
    /// Concurrent clients.
    pub clients: usize,
    /// Requests that were answered.
    pub requests: usize,
    /// Requests per second.
    pub requests_per_s: f64,
    /// Boots per second.
    pub boots_per_s: f64,
    /// Of the boots, those of each kind.
    pub boots: BootCounts,
    /// From connecting to the end of the response, in microseconds.
    pub latency_us: Percentiles,
    /// Why there is nothing more, if a request failed.
    pub failure: Option<String>,
}

/// Numbers of boots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BootCounts {
    /// From an image that was perhaps not in memory.
    pub cold: u64,
    /// From an image.
    pub warm: u64,
    /// From a template.
    pub fork: u64,
    /// From an instance that was booted ahead.
    pub ready: u64,
}

impl BootCounts {
    fn now(rig: &Rig) -> Self {
        let of = |kind| rig.services.shared().boots().count(kind);
        Self {
            cold: of(BootKind::Cold),
            warm: of(BootKind::Warm),
            fork: of(BootKind::Fork),
            ready: of(BootKind::Ready),
        }
    }

    fn since(self, before: Self) -> Self {
        Self {
            cold: self.cold - before.cold,
            warm: self.warm - before.warm,
            fork: self.fork - before.fork,
            ready: self.ready - before.ready,
        }
    }

    fn total(self) -> u64 {
        self.cold + self.warm + self.fork + self.ready
    }
}

/// Measures a stored function; what serves takes turns for every number of
/// clients.
///
/// # Errors
/// The function cannot be booted here.
pub fn throughput(
    home: &Home,
    name: &str,
    options: &ThroughputOptions,
    progress: &mut OnProgress<'_>,
) -> Result<ThroughputReport, BenchError> {
    thaw_daemon::daemon::raise_file_limit();
    let store = Store::open(&home.store())?;
    let function = super::http_server(&store, name)?;
    let request = get(name, &options.path);
    let mut rigs = Vec::new();
    for &served in &options.served {
        let rig = Rig::start(home, &store, &function, served.options())?;
        for _ in 0..WARM_UPS {
            exchange(rig.address, &request)?;
        }
        rigs.push((served, rig));
    }
    let mut rates = Vec::new();
    for clients in &options.clients {
        for (served, rig) in &rigs {
            progress(&format!("{name}: {}, {clients} clients", served.name()));
            std::thread::sleep(REST);
            rates.push(rate(rig, *served, *clients, options.duration, &request));
        }
    }
    let processors = std::thread::available_parallelism()?.get();
    Ok(ThroughputReport { function: name.to_owned(), processors, rates })
}

fn rate(rig: &Rig, served: Served, clients: usize, duration: Duration, request: &[u8]) -> Rate {
    let before = BootCounts::now(rig);
    let started = Instant::now();
    let until = started + duration;
    let results: Vec<_> = std::thread::scope(|scope| {
        let client = || ask(rig.address, request, until);
        let all: Vec<_> = (0..clients).map(|_| scope.spawn(client)).collect();
        all.into_iter().map(|client| client.join().expect("a client does not panic")).collect()
    });
    let seconds = started.elapsed().as_secs_f64();
    let boots = BootCounts::now(rig).since(before);
    let mut latencies = Vec::new();
    let mut failure = None;
    for (own, error) in results {
        latencies.extend(own);
        failure = failure.or(error.map(|error| error.to_string()));
    }
    let per_second = |count: f64| (count / seconds * 10.0).round() / 10.0;
    Rate {
        served,
        clients,
        requests: latencies.len(),
        requests_per_s: per_second(latencies.len() as f64),
        boots_per_s: per_second(boots.total() as f64),
        boots,
        latency_us: Percentiles::of_ns(&mut latencies),
        failure,
    }
}

/// One client; returns what its requests took, in nanoseconds.
fn ask(address: SocketAddr, request: &[u8], until: Instant) -> (Vec<u64>, Option<BenchError>) {
    let mut latencies = Vec::new();
    while Instant::now() < until {
        let asked = Instant::now();
        if let Err(error) = exchange(address, request) {
            return (latencies, Some(error));
        }
        latencies.push(asked.elapsed().as_nanos() as u64);
    }
    (latencies, None)
}

impl ThroughputReport {
    /// A figure of the rates over the clients.
    ///
    /// # Errors
    /// It cannot be drawn.
    pub fn svg(&self) -> Result<String, FigureError> {
        let line = |served: &Served| {
            let own = self.rates.iter().filter(|rate| rate.served == *served);
            let points = own.map(|rate| (rate.clients as f64, rate.requests_per_s));
            (served.name().to_owned(), points.collect())
        };
        let was_measured = |served: &&Served| self.rates.iter().any(|rate| rate.served == **served);
        let title = format!("{} on {} processors", self.function, self.processors);
        let lines = Lines {
            title: &title,
            x: "concurrent clients",
            y: "requests per second",
            series: Served::ALL.iter().filter(was_measured).map(line).collect(),
        };
        lines.svg()
    }
}
