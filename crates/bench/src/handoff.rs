//! `thaw bench handoff`: a function that gets its client's socket, compared
//! with one behind a proxy that copies every byte (Metropolis' Figure 3).

use super::client::{exchange, post};
use super::figure::{Bars, FigureError, Series};
use super::rig::{Rig, RigOptions};
use super::{BenchError, OnProgress, Percentiles};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Instant;
use thaw_home::config::Isolation;
use thaw_home::home::Home;
use thaw_node::boots::BootKind;
use thaw_store::Store;
use tokio::io::copy_bidirectional_with_sizes;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;

/// Exchanges that are not counted.
const WARM_UPS: usize = 3;
/// Buffer of the proxy for each direction, in bytes.
const BUFFER: usize = 64 << 10;

/// What is measured.
#[derive(Clone, Debug)]
pub struct HandoffOptions {
    /// Exchanges on each way that are counted.
    pub count: usize,
    /// Bytes of the argument.
    pub argument: usize,
    /// Path of the requests.
    pub path: String,
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct HandoffReport {
    /// Bytes of the argument.
    pub argument_bytes: usize,
    /// Function by function.
    pub functions: Vec<Comparison>,
}

/// One function on both ways.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The function.
    pub function: String,
    /// Exchanges on each way.
    pub n: usize,
    /// Bytes of a response.
    pub response_bytes: usize,
    /// The client's socket is handed to the instance.
    pub handoff: Way,
    /// A proxy stands in between, and copies.
    pub proxy: Way,
    /// Median latency with the handoff by that with the proxy.
    pub ratio: f64,
}

/// One way of a client's bytes to an instance, and back.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Way {
    /// From connecting to the end of the response, in microseconds.
    pub latency_us: Percentiles,
    /// CPU time of the gateway and of the proxy, in microseconds for one
    /// exchange; neither the client's nor the instance's.
    pub host_cpu_us: Percentiles,
}

/// Measures stored functions that answer a `POST`; both ways take turns.
///
/// # Errors
/// A function cannot be booted here, or does not answer.
pub fn handoff(
    home: &Home,
    names: &[String],
    options: &HandoffOptions,
    progress: &mut OnProgress<'_>,
) -> Result<HandoffReport, BenchError> {
    let store = Store::open(&home.store())?;
    let mut functions = Vec::new();
    for name in names {
        functions.push(compare(home, &store, name, options, progress)?);
    }
    Ok(HandoffReport { argument_bytes: options.argument, functions })
}

fn compare(
    home: &Home,
    store: &Store,
    name: &str,
    options: &HandoffOptions,
    progress: &mut OnProgress<'_>,
) -> Result<Comparison, BenchError> {
    let function = super::http_server(store, name)?;
    let rig_options = RigOptions {
        isolation: Isolation::Instance,
        instances: 1,
        concurrency: 8,
        ..RigOptions::single(BootKind::Warm)
    };
    let rig = Rig::start(home, store, &function, rig_options)?;
    let proxy = Proxy::start(rig.address)?;
    let request = post(name, &options.path, &vec![b'x'; options.argument]);
    let (mut direct, mut proxied) = (Samples::default(), Samples::default());
    for round in 0..WARM_UPS + options.count {
        let counts = round >= WARM_UPS;
        direct.take(rig.address, &request, counts)?;
        proxied.take(proxy.address, &request, counts)?;
        if counts {
            progress(&format!("{name}: {} of {}", round - WARM_UPS + 1, options.count));
        }
    }
    let (response_bytes, handoff, proxy) =
        (direct.response_bytes, direct.summarize(), proxied.summarize());
    let ratio = handoff.latency_us.p50 / proxy.latency_us.p50.max(f64::MIN_POSITIVE);
    let (function, n) = (name.to_owned(), options.count);
    Ok(Comparison { function, n, response_bytes, handoff, proxy, ratio })
}

/// Samples of one way, in nanoseconds.
#[derive(Default)]
struct Samples {
    latencies: Vec<u64>,
    cpu: Vec<u64>,
    response_bytes: usize,
}

impl Samples {
    fn take(
        &mut self,
        address: SocketAddr,
        request: &[u8],
        counts: bool,
    ) -> Result<(), BenchError> {
        let (asked, cpu_before) = (Instant::now(), other_threads_cpu_ns());
        let (_, response_bytes) = exchange(address, request)?;
        let latency = asked.elapsed().as_nanos() as u64;
        let cpu = other_threads_cpu_ns().saturating_sub(cpu_before);
        self.response_bytes = response_bytes;
        if counts {
            self.latencies.push(latency);
            self.cpu.push(cpu);
        }
        Ok(())
    }

    fn summarize(mut self) -> Way {
        Way {
            latency_us: Percentiles::of_ns(&mut self.latencies),
            host_cpu_us: Percentiles::of_ns(&mut self.cpu),
        }
    }
}

/// CPU time of this process without that of the calling thread, the client.
fn other_threads_cpu_ns() -> u64 {
    let ns = |clock| {
        let time = clock_gettime(clock);
        time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
    };
    ns(ClockId::ProcessCPUTime).saturating_sub(ns(ClockId::ThreadCPUTime))
}

/// A plain TCP proxy in front of the gateway.
struct Proxy {
    address: SocketAddr,
    /// Ends it when dropped.
    _runtime: Runtime,
}

impl Proxy {
    fn start(target: SocketAddr) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let listener = runtime.block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))?;
        let address = listener.local_addr()?;
        runtime.spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(relay(client, target));
            }
        });
        Ok(Self { address, _runtime: runtime })
    }
}

async fn relay(mut client: TcpStream, target: SocketAddr) -> io::Result<()> {
    client.set_nodelay(true)?;
    let mut server = TcpStream::connect(target).await?;
    server.set_nodelay(true)?;
    let copied = copy_bidirectional_with_sizes(&mut client, &mut server, BUFFER, BUFFER).await;
    copied.map(|_| ())
}

impl HandoffReport {
    /// A figure of the median latencies.
    ///
    /// # Errors
    /// It cannot be drawn.
    pub fn svg(&self) -> Result<String, FigureError> {
        let series = |name: &str, of: fn(&Comparison) -> f64| Series {
            name: name.to_owned(),
            values: self.functions.iter().map(|function| Some(of(function))).collect(),
            marks: Vec::new(),
        };
        let title = format!("Arguments of {} bytes, median latency", self.argument_bytes);
        let bars = Bars {
            title: &title,
            axis: "µs from connecting to the end of the response",
            categories: self.functions.iter().map(|f| f.function.clone()).collect(),
            series: vec![
                series("socket handoff", |function| function.handoff.latency_us.p50),
                series("proxy", |function| function.proxy.latency_us.p50),
            ],
            logarithmic: false,
        };
        bars.svg()
    }
}
