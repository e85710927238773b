//! `thaw bench mix`: requests to many functions, of which few get most (Zipf's law), served by Thaw
//! with instances that stay, by the same programs as ordinary processes that are kept alive, and by a
//! process for each request.

use super::client::{PATIENCE, get};
use super::figure::{Bars, FigureError, Series};
use super::isolate::enter_network;
use super::memory::HostMemory;
use super::native::{NativeProgram, NativeServers, Specification, specify};
use super::rig::{Node, RigOptions};
use super::{BenchError, BootsFailure, OnProgress, Percentiles};
use serde::Serialize;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};
use thaw_home::config::Isolation;
use thaw_home::function::BuiltFunction;
use thaw_home::home::Home;
use thaw_node::boots::BootKind;
use thaw_node::instance::BootPolicy;
use thaw_store::Store;

/// Zygotes that are kept ready.
const ZYGOTES: usize = 8;
/// Bytes of a response that are read at once.
const PIECE: usize = 16 << 10;
/// After this long without a byte more, no measurement goes on.
const SETTLED: Duration = Duration::from_millis(300);

/// What is measured.
#[derive(Clone, Debug)]
pub struct MixOptions {
    /// Concurrent clients.
    pub clients: usize,
    /// How long each side is asked.
    pub duration: Duration,
    /// The function of rank k gets a share proportional to k to the power of minus this.
    pub exponent: f64,
    /// The sides, one after the other.
    pub sides: Vec<Side>,
    /// Path of the requests.
    pub path: String,
}

/// What serves the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    /// Thaw, with instances that stay.
    Thaw,
    /// An ordinary process for each function, which stays.
    Processes,
    /// An ordinary process for each request.
    ProcessPerRequest,
}

impl Side {
    /// All.
    pub const ALL: [Self; 3] = [Self::Thaw, Self::Processes, Self::ProcessPerRequest];

    /// The name, as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Thaw => "thaw",
            Self::Processes => "processes",
            Self::ProcessPerRequest => "process-per-request",
        }
    }
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct MixReport {
    /// Functions in the mix.
    pub functions: usize,
    /// Processors of this machine, which clients and servers share.
    pub processors: usize,
    /// Concurrent clients.
    pub clients: usize,
    /// Of Zipf's law.
    pub exponent: f64,
    /// By side.
    pub sides: Vec<Mixed>,
    /// Functions that could not be measured.
    pub failures: Vec<BootsFailure>,
}

/// Requests that one side has served.
#[derive(Clone, Debug, Serialize)]
pub struct Mixed {
    /// The side.
    pub side: Side,
    /// Requests that were answered.
    pub requests: usize,
    /// Requests per second.
    pub requests_per_s: f64,
    /// From connecting to the end of the response, in microseconds; with a process for each request,
    /// from its start to the first byte.
    pub latency_us: Percentiles,
    /// Functions that were asked at least once.
    pub functions_asked: usize,
    /// Memory of the host for all that serves, in KiB.
    pub host_kib: i64,
    /// Instances that Thaw has booted while it was measured.
    pub boots: u64,
    /// Why there is nothing more, if so.
    pub failure: Option<String>,
}

/// Measures functions, or all in the store. A side that fails is part of the report.
///
/// # Errors
/// The store cannot be read or has no function, or this host cannot run sandboxes.
pub fn mix(
    home: &Home,
    names: &[String],
    options: &MixOptions,
    progress: &mut OnProgress<'_>,
) -> Result<MixReport, BenchError> {
    thaw_daemon::daemon::raise_file_limit();
    let store = Store::open(&home.store())?;
    let (functions, failures) = super::http_servers(&store, names)?;
    let mix = Mix { home, store, functions: shuffled(functions), options };
    let mut sides = Vec::new();
    // Nothing can be asked where none of the functions can be measured.
    let asked = if mix.functions.is_empty() { &[] } else { &options.sides[..] };
    for &side in asked {
        progress(side.name());
        let before = HostMemory::now()?;
        let measured = match side {
            Side::Thaw => mix.by_thaw(before, progress),
            Side::Processes => mix.by_processes(before),
            Side::ProcessPerRequest => mix.by_process_per_request(before),
        };
        sides.push(measured.unwrap_or_else(|error| Mixed::failed(side, &error)));
        std::thread::sleep(SETTLED);
    }
    Ok(MixReport {
        functions: mix.functions.len(),
        processors: std::thread::available_parallelism()?.get(),
        clients: options.clients,
        exponent: options.exponent,
        sides,
        failures,
    })
}

/// In an order that has nothing to do with names, and is the same each time.
fn shuffled(mut functions: Vec<BuiltFunction>) -> Vec<BuiltFunction> {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for last in (1..functions.len()).rev() {
        functions.swap(last, random.below(last + 1));
    }
    functions
}

/// Functions by rank, the most popular first.
struct Mix<'a> {
    home: &'a Home,
    store: Store,
    functions: Vec<BuiltFunction>,
    options: &'a MixOptions,
}

/// What one client has measured.
#[derive(Default)]
struct Samples {
    /// Nanoseconds.
    latencies: Vec<u64>,
    /// How often each function was asked.
    asked: Vec<u32>,
    failure: Option<String>,
}

impl Mix<'_> {
    fn by_thaw(
        &self,
        before: HostMemory,
        progress: &mut OnProgress<'_>,
    ) -> Result<Mixed, BenchError> {
        let clients = self.options.clients as u32;
        let instances = self.functions.len() as u32 * clients;
        let node = Node::start(self.home, &self.store, ZYGOTES, instances)?;
        let single = RigOptions::single(BootKind::Warm);
        let mut options =
            RigOptions { isolation: Isolation::Instance, instances: clients, ..single };
        options.launch.policy = BootPolicy { automatic: true, ..BootPolicy::NONE };
        for function in &self.functions {
            node.serve(function, options)?;
        }
        let address = node.listen(None)?;
        for (rank, request) in self.requests().iter().enumerate() {
            progress(&format!("thaw: {rank} of {}", self.functions.len()));
            ask(TcpStream::connect(address)?, request)?;
        }
        let boots =
            || BootKind::ALL.iter().map(|kind| node.services.shared().boots().count(*kind)).sum();
        let booted: u64 = boots();
        let mixed = self.ask_all(Side::Thaw, before, |_| Ok(TcpStream::connect(address)?))?;
        Ok(Mixed { boots: boots() - booted, ..mixed })
    }

    fn by_processes(&self, before: HostMemory) -> Result<Mixed, BenchError> {
        let programs = self.programs()?;
        let servers = NativeServers::start(&programs)?;
        let connect = |rank: usize| {
            enter_network(&servers.networks[rank])?;
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, programs[rank].port));
            Ok(TcpStream::connect(address)?)
        };
        self.ask_all(Side::Processes, before, connect)
    }

    fn by_process_per_request(&self, before: HostMemory) -> Result<Mixed, BenchError> {
        let programs = self.programs()?;
        let Some(first) = programs.first() else { return Err(BenchError::NoFunctions) };
        let starters = (0..self.options.clients).map(|_| NativeProgram::of(first));
        let starters = starters.collect::<Result<Vec<_>, _>>()?;
        self.measure(Side::ProcessPerRequest, before, starters, |starter, rank| {
            Ok(starter.sample_of(&programs[rank])?)
        })
    }

    fn programs(&self) -> Result<Vec<Specification>, BenchError> {
        let programs = self.functions.iter().zip(self.requests());
        let programs =
            programs.map(|(function, request)| specify(self.home, &function.function, &request));
        Ok(programs.collect::<Result<Vec<_>, _>>()?)
    }

    fn requests(&self) -> Vec<Vec<u8>> {
        let name = |function: &BuiltFunction| function.function.config.name.to_string();
        self.functions.iter().map(|function| get(&name(function), &self.options.path)).collect()
    }

    /// Clients that connect anew for each request.
    fn ask_all(
        &self,
        side: Side,
        before: HostMemory,
        connect: impl Fn(usize) -> Result<TcpStream, BenchError> + Sync,
    ) -> Result<Mixed, BenchError> {
        let requests = self.requests();
        let clients = vec![(); self.options.clients];
        self.measure(side, before, clients, |(), rank| {
            let asked = Instant::now();
            ask(connect(rank)?, &requests[rank])?;
            Ok(asked.elapsed().as_nanos() as u64)
        })
    }

    /// Has every client ask one function after the other, as the law has it, until time is up.
    fn measure<C: Send>(
        &self,
        side: Side,
        before: HostMemory,
        clients: Vec<C>,
        ask: impl Fn(&mut C, usize) -> Result<u64, BenchError> + Sync,
    ) -> Result<Mixed, BenchError> {
        let zipf = Zipf::new(self.functions.len(), self.options.exponent);
        let started = Instant::now();
        let until = started + self.options.duration;
        let run = |number: usize, mut client: C| {
            let mut random = Random(1 + number as u64);
            let asked = vec![0; self.functions.len()];
            let mut samples = Samples { asked, ..Samples::default() };
            while Instant::now() < until {
                let rank = zipf.rank(random.unit());
                match ask(&mut client, rank) {
                    Ok(ns) => samples.latencies.push(ns),
                    Err(error) => {
                        let name = &self.functions[rank].function.config.name;
                        samples.failure = Some(format!("{name}: {error}"));
                        break;
                    }
                }
                samples.asked[rank] += 1;
            }
            samples
        };
        let all: Vec<Samples> = std::thread::scope(|scope| {
            let run = &run;
            let all: Vec<_> = clients
                .into_iter()
                .enumerate()
                .map(|(number, client)| scope.spawn(move || run(number, client)))
                .collect();
            all.into_iter().map(|client| client.join().expect("a client does not panic")).collect()
        });
        let host = HostMemory::now()?.since(before);
        Ok(Mixed::of(side, all, started.elapsed(), host.used_kib))
    }
}

impl Mixed {
    fn of(side: Side, all: Vec<Samples>, took: Duration, host_kib: i64) -> Self {
        let functions = all.first().map_or(0, |samples| samples.asked.len());
        let is_asked = |rank: &usize| all.iter().any(|samples| samples.asked[*rank] > 0);
        let functions_asked = (0..functions).filter(is_asked).count();
        let (mut latencies, mut failure) = (Vec::new(), None);
        for samples in all {
            latencies.extend(samples.latencies);
            failure = failure.or(samples.failure);
        }
        let per_s = latencies.len() as f64 / took.as_secs_f64();
        Self {
            side,
            requests: latencies.len(),
            requests_per_s: (per_s * 10.0).round() / 10.0,
            latency_us: Percentiles::of_ns(&mut latencies),
            functions_asked,
            host_kib,
            boots: 0,
            failure,
        }
    }

    fn failed(side: Side, error: &BenchError) -> Self {
        let failure = Some(error.to_string());
        Self { failure, ..Self::of(side, Vec::new(), Duration::from_secs(1), 0) }
    }
}

/// One request, until the server closes the connection.
fn ask(mut client: TcpStream, request: &[u8]) -> Result<(), BenchError> {
    client.set_nodelay(true)?;
    client.set_read_timeout(Some(PATIENCE))?;
    client.write_all(request)?;
    let mut piece = [0; PIECE];
    let mut head: Vec<u8> = Vec::new();
    loop {
        match client.read(&mut piece) {
            Ok(0) => break,
            Ok(len) if head.len() < 32 => head.extend_from_slice(&piece[..len.min(200)]),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    let head = String::from_utf8_lossy(&head);
    let status = head.split(' ').nth(1).and_then(|code| code.parse::<u16>().ok());
    match status {
        Some(200..=399) => Ok(()),
        _ => Err(BenchError::Response(head.into_owned())),
    }
}

/// Zipf's law over some ranks.
struct Zipf {
    /// Sums of the shares up to each rank; the last is 1.
    sums: Vec<f64>,
}

impl Zipf {
    fn new(ranks: usize, exponent: f64) -> Self {
        let share = |rank: usize| ((rank + 1) as f64).powf(-exponent);
        let total: f64 = (0..ranks).map(share).sum();
        let mut sum = 0.0;
        let add = |rank| {
            sum += share(rank) / total;
            sum
        };
        Self { sums: (0..ranks).map(add).collect() }
    }

    /// The rank that a number from 0 to 1 falls on.
    fn rank(&self, number: f64) -> usize {
        let rank = self.sums.partition_point(|sum| *sum <= number);
        rank.min(self.sums.len().saturating_sub(1))
    }
}

/// Numbers that look random and are the same each time (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// From 0 to less than 1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

impl MixReport {
    /// A figure of the rates and the percentiles.
    ///
    /// # Errors
    /// It cannot be drawn.
    pub fn svg(&self) -> Result<String, FigureError> {
        let series = |name: &str, of: fn(&Mixed) -> f64| Series {
            name: name.to_owned(),
            values: self.sides.iter().map(|side| Some(of(side)).filter(|n| *n > 0.0)).collect(),
            marks: Vec::new(),
        };
        let title = format!("{} functions, {} clients", self.functions, self.clients);
        let bars = Bars {
            title: &title,
            axis: "requests per second; µs",
            categories: self.sides.iter().map(|side| side.side.name().to_owned()).collect(),
            series: vec![
                series("requests per second", |side| side.requests_per_s),
                series("latency p50, µs", |side| side.latency_us.p50),
                series("latency p99, µs", |side| side.latency_us.p99),
            ],
            logarithmic: true,
        };
        bars.svg()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_follow_the_law() {
        let zipf = Zipf::new(100, 1.0);
        let mut random = Random(7);
        let mut counts = [0_u32; 100];
        const DRAWN: u32 = 200_000;
        (0..DRAWN).for_each(|_| counts[zipf.rank(random.unit())] += 1);
        // The harmonic number of 100 is 5.187.
        for rank in [0, 1, 9, 99] {
            let expected = f64::from(DRAWN) / 5.187 / (rank + 1) as f64;
            let found = f64::from(counts[rank]);
            assert!((found / expected - 1.0).abs() < 0.2, "rank {rank}: {found} of {expected}");
        }
        assert_eq!((zipf.rank(0.0), zipf.rank(1.0)), (0, 99));
        let even = Zipf::new(4, 0.0);
        assert_eq!([0.1, 0.3, 0.6, 0.9].map(|number| even.rank(number)), [0, 1, 2, 3]);
    }

    #[test]
    fn sides_are_summed_up_over_clients() {
        let client = |asked: [u32; 2], ns: u64| Samples {
            latencies: vec![ns; 2],
            asked: asked.to_vec(),
            failure: None,
        };
        let clients = vec![client([2, 0], 1000), client([0, 2], 3000)];
        let mixed = Mixed::of(Side::Thaw, clients, Duration::from_secs(2), 5);
        assert_eq!((mixed.requests, mixed.requests_per_s, mixed.functions_asked), (4, 2.0, 2));
        assert_eq!((mixed.latency_us.p50, mixed.latency_us.p99), (1.0, 3.0));
        let failed = Mixed::failed(Side::Processes, &BenchError::NoFunctions);
        assert!(failed.failure.is_some() && failed.requests == 0);
    }
}
