//! Requests per second of a function's server under `wrk`: on the host in a
//! network of its own, and as an instance behind the gateway.

use super::{Pair, SideError, median, ratio};
use crate::BenchError;
use crate::isolate::enter_own_network;
use crate::native::{Specification, specify};
use crate::rig::{Rig, RigOptions};
use crate::worker::Worker;
use serde::Serialize;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use thaw_home::config::{Connections, Isolation};
use thaw_home::function::BuiltFunction;
use thaw_home::home::Home;
use thaw_node::boots::BootKind;
use thaw_node::instance::WorkingSetUse;
use thaw_store::Store;

/// Connections that `wrk` keeps open.
const CONNECTIONS: u32 = 16;
/// How long it asks, for one figure.
const SECONDS: u32 = 2;
/// How long a server may take to listen.
const PATIENCE: Duration = Duration::from_secs(30);

/// Throughput of a server on both sides.
#[derive(Clone, Debug, Serialize)]
pub struct HttpResult {
    /// The function.
    pub function: String,
    /// Connections at a time.
    pub connections: u32,
    /// Requests per second, medians.
    pub requests_per_s: Pair,
    /// Throughput in the sandbox by that on the host.
    pub ratio: f64,
    /// Requests per second of the best turns.
    pub best_per_s: Pair,
    /// The ratio of these.
    pub best_ratio: f64,
}

/// Measures a stored function.
///
/// # Errors
/// There is no `wrk`, or the function does not answer.
pub fn measure(home: &Home, name: &str, rounds: usize) -> Result<HttpResult, BenchError> {
    let store = Store::open(&home.store())?;
    let function = BuiltFunction::read(&store, name)?;
    let mut native = Native::start(&specify(home, &function.function, b"")?)?;
    let behind = behind_gateway(home, &store, &function)?;
    let (mut natives, mut thaws) = (Vec::new(), Vec::new());
    // The first round warms both up.
    for round in 0..=rounds {
        let of_native = native.ask()?;
        let of_thaw = wrk(behind.address, name)?;
        if round > 0 {
            natives.push(of_native);
            thaws.push(of_thaw);
        }
    }
    let requests_per_s = Pair { native: median(&mut natives), thaw: median(&mut thaws) };
    let best = |turns: &mut [f64]| super::percentile(turns, 100);
    let best_per_s = Pair { native: best(&mut natives), thaw: best(&mut thaws) };
    Ok(HttpResult {
        function: name.to_owned(),
        connections: CONNECTIONS,
        requests_per_s,
        ratio: ratio(requests_per_s.thaw, requests_per_s.native),
        best_per_s,
        best_ratio: ratio(best_per_s.thaw, best_per_s.native),
    })
}

/// Requests per second that `wrk` gets answered.
fn wrk(address: SocketAddr, host: &str) -> Result<f64, SideError> {
    let output = Command::new("wrk")
        .args(["-t1".to_owned(), format!("-c{CONNECTIONS}"), format!("-d{SECONDS}s")])
        .args(["-H".to_owned(), format!("Host: {host}"), format!("http://{address}/")])
        .output()
        .map_err(SideError::NoWrk)?;
    let text = String::from_utf8_lossy(&output.stdout);
    let field = |name: &str| text.lines().find_map(|line| line.trim().strip_prefix(name));
    let rate = field("Requests/sec:").and_then(|rate| rate.trim().parse().ok());
    match (rate, field("Non-2xx"), field("Socket errors:")) {
        (Some(rate), None, None) if rate > 0.0 => Ok(rate),
        _ => Err(SideError::Program { name: "wrk", said: text.into_owned() }),
    }
}

/// The server as an instance that all connections are handed to.
fn behind_gateway(home: &Home, store: &Store, function: &BuiltFunction) -> Result<Rig, BenchError> {
    let mut options = RigOptions {
        isolation: Isolation::Instance,
        zygotes: 1,
        instances: 1,
        concurrency: CONNECTIONS * 4 + 1,
        // The server is measured, not the gateway.
        connections: Connections::Handover,
        ..RigOptions::single(BootKind::Warm)
    };
    options.launch.working_set = WorkingSetUse::Off;
    Rig::start(home, store, function, options)
}

/// The server on the host: a worker starts it in a network of its own and runs `wrk`
/// there.
struct Native {
    worker: Child,
    /// Taken at the end.
    orders: Option<ChildStdin>,
    results: BufReader<ChildStdout>,
}

impl Native {
    fn start(server: &Specification) -> Result<Self, SideError> {
        let mut worker =
            Worker::Server.command()?.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let missing = || io::Error::from(io::ErrorKind::BrokenPipe);
        let mut orders = worker.stdin.take().ok_or_else(missing)?;
        let results = BufReader::new(worker.stdout.take().ok_or_else(missing)?);
        serde_json::to_writer(&orders, server).map_err(io::Error::from)?;
        orders.write_all(b"\n")?;
        Ok(Self { worker, orders: Some(orders), results })
    }

    fn ask(&mut self) -> Result<f64, SideError> {
        if let Some(orders) = &mut self.orders {
            orders.write_all(b"\n")?;
        }
        let mut line = String::new();
        self.results.read_line(&mut line)?;
        let rate = line.trim().parse();
        rate.map_err(|_| SideError::Program { name: "the server on the host", said: line })
    }
}

impl Drop for Native {
    fn drop(&mut self) {
        // Without further orders it ends the server and then itself.
        self.orders = None;
        let _ = self.worker.wait();
    }
}

/// Starts the server and asks it once for each order, until standard input ends.
pub(crate) fn serve_server() -> io::Result<()> {
    let mut orders = io::stdin().lock().lines();
    let Some(first) = orders.next() else { return Ok(()) };
    let server: Specification = serde_json::from_str(&first?)?;
    enter_own_network()?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, server.port));
    let mut running = server.command().spawn()?;
    let outcome = await_listener(address, &mut running).and_then(|()| {
        for order in orders {
            order?;
            println!("{}", wrk(address, "localhost").map_err(io::Error::other)?);
        }
        Ok(())
    });
    let _ = running.kill();
    running.wait()?;
    outcome
}

fn await_listener(address: SocketAddr, server: &mut Child) -> io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while TcpStream::connect(address).is_err() {
        if let Some(status) = server.try_wait()? {
            return Err(io::Error::other(format!("it ended, {status}")));
        }
        if Instant::now() >= deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        sleep(Duration::from_millis(1));
    }
    Ok(())
}
