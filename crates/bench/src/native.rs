//! The same program, started natively: `fork` and `exec` until its first
//! response byte.
//!
//! A worker does it, in a network namespace of its own. It reads one specification and
//! then one line for each start, which may be the specification of another program, and writes
//! one line for each result. Another kind of worker keeps programs running.

use super::isolate::enter_own_network;
use super::worker::Worker;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use thaw_build::build::PACKAGES;
use thaw_home::clock::monotonic_ns;
use thaw_home::config::RuntimeKind;
use thaw_home::function::{BuiltFunction, StoredFunction};
use thaw_home::home::{Home, HomeError};

/// How long a native start may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// Pause between attempts to connect.
const PAUSE: Duration = Duration::from_micros(20);

/// Why a program cannot be started natively.
#[derive(Debug, thiserror::Error)]
pub enum NativeError {
    /// Its files are not those of this host.
    #[error(
        "`{0}` has a root file system of its own, so it cannot be started natively; use --no-native"
    )]
    OwnRootfs(String),
    /// The function's directory has changed or is gone.
    #[error("the files of the function are not in {} any more ({error}); build it again, or use --no-native", path.display())]
    Source {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// The state directory is not usable.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// The program did not answer.
    #[error(
        "the program, started natively, did not answer ({0}); use --no-native to go on without"
    )]
    NoAnswer(String),
    /// The worker failed.
    #[error("cannot start programs natively ({0}); use --no-native to go on without")]
    Io(#[from] io::Error),
}

/// The program that the worker starts.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Specification {
    pub(crate) command: Vec<String>,
    pub(crate) environment: BTreeMap<String, String>,
    /// Below which the function's own files lie.
    pub(crate) root: PathBuf,
    /// The working directory.
    pub(crate) directory: PathBuf,
    /// Where it listens.
    pub(crate) port: u16,
    request: Vec<u8>,
}

impl Specification {
    /// The program, ready to be started.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.command[0]);
        command
            .args(&self.command[1..])
            .env_clear()
            .envs(&self.environment)
            .current_dir(&self.directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
    }
}

/// A program that can be started natively again and again.
pub struct NativeProgram {
    worker: Child,
    orders: ChildStdin,
    results: BufReader<ChildStdout>,
}

impl NativeProgram {
    /// Prepares native starts of a function's program.
    ///
    /// # Errors
    /// Its files are not on this host.
    pub fn prepare(
        home: &Home,
        function: &BuiltFunction,
        request: &[u8],
    ) -> Result<Self, NativeError> {
        Self::of(&specify(home, &function.function, request)?)
    }

    /// Prepares native starts of a program.
    ///
    /// # Errors
    /// The worker cannot be started.
    pub(crate) fn of(specification: &Specification) -> Result<Self, NativeError> {
        let mut worker =
            Worker::Starts.command()?.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let missing = || io::Error::from(ErrorKind::BrokenPipe);
        let mut orders = worker.stdin.take().ok_or_else(missing)?;
        let results = BufReader::new(worker.stdout.take().ok_or_else(missing)?);
        let mut line = serde_json::to_vec(specification).map_err(io::Error::from)?;
        line.push(b'\n');
        orders.write_all(&line)?;
        Ok(Self { worker, orders, results })
    }

    /// Starts the program once; nanoseconds until its first response byte.
    ///
    /// # Errors
    /// It did not answer.
    pub fn sample(&mut self) -> Result<u64, NativeError> {
        self.ordered(b"\n")
    }

    /// The same with another program.
    ///
    /// # Errors
    /// It did not answer.
    pub(crate) fn sample_of(&mut self, other: &Specification) -> Result<u64, NativeError> {
        let mut order = serde_json::to_vec(other).map_err(io::Error::from)?;
        order.push(b'\n');
        self.ordered(&order)
    }

    fn ordered(&mut self, order: &[u8]) -> Result<u64, NativeError> {
        self.orders.write_all(order)?;
        let mut line = String::new();
        self.results.read_line(&mut line)?;
        line.trim().parse().map_err(|_| NativeError::NoAnswer(line.trim().to_owned()))
    }
}

impl Drop for NativeProgram {
    fn drop(&mut self) {
        let _ = self.worker.kill();
        let _ = self.worker.wait();
    }
}

/// Where a function's own files lie for native starts.
pub(crate) fn native_root(home: &Home, name: &str) -> Result<PathBuf, HomeError> {
    Ok(home.work(name)?.join("native"))
}

/// Lays the function's own files out as in the sandbox, below a directory of
/// the host, and translates what names them.
pub(crate) fn specify(
    home: &Home,
    function: &StoredFunction,
    request: &[u8],
) -> Result<Specification, NativeError> {
    specify_below(native_root(home, function.config.name.as_str())?, function, request)
}

/// The same below a directory that is said.
pub(crate) fn specify_below(
    root: PathBuf,
    function: &StoredFunction,
    request: &[u8],
) -> Result<Specification, NativeError> {
    let config = &function.config;
    if config.runtime.is_none() {
        return Err(NativeError::OwnRootfs(config.name.to_string()));
    }
    let _ = fs::remove_dir_all(&root);
    let mut destinations = Vec::new();
    for entry in &config.files {
        let from = function.source.join(&entry.from);
        let destination = entry.destination();
        let to = root.join(destination.trim_start_matches('/'));
        copy(&from, &to).map_err(|error| NativeError::Source { path: from, error })?;
        destinations.push(destination);
    }
    if let Some(packages) = config.runtime.as_ref().and_then(|runtime| runtime.packages.as_ref()) {
        let from = function.source.join(packages);
        let to = root.join(PACKAGES.trim_start_matches('/'));
        copy(&from, &to).map_err(|error| NativeError::Source { path: from, error })?;
        destinations.push(PACKAGES.to_owned());
    }
    let mut place = |path: &str| -> String {
        let own = destinations.iter().any(|own| Path::new(path).starts_with(own));
        match own {
            true => root.join(path.trim_start_matches('/')).to_string_lossy().into_owned(),
            false => path.to_owned(),
        }
    };
    let directory = root.join(config.workdir.trim_start_matches('/'));
    fs::create_dir_all(&directory)?;
    let mut command: Vec<String> = config.command.iter().map(|part| place(part)).collect();
    let environment: BTreeMap<String, String> = function
        .environment
        .iter()
        .map(|(name, value)| {
            let parts: Vec<String> = value.split(':').map(&mut place).collect();
            (name.clone(), parts.join(":"))
        })
        .collect();
    // The sandbox's PATH is of the sandbox; an interpreter was chosen by name.
    if let Some(runtime) = function.runtime()
        && runtime.kind == RuntimeKind::Python3
        && let Some(interpreter) = &runtime.interpreter
        && command[0].starts_with("python")
    {
        command[0] = interpreter.to_string_lossy().into_owned();
    }
    Ok(Specification {
        command,
        environment,
        root,
        directory,
        port: config.port_number(),
        request: request.to_vec(),
    })
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let metadata = fs::metadata(from)?;
    if !metadata.is_dir() {
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent)?;
        }
        return fs::copy(from, to).map(|_| ());
    }
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        // Links that lead nowhere are of no use natively either.
        if entry.path().exists() {
            copy(&entry.path(), &to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

/// Starts a program once for each order, until standard input ends.
pub(crate) fn serve_starts() -> io::Result<()> {
    let mut orders = io::stdin().lock().lines();
    let Some(first) = orders.next() else { return Ok(()) };
    let specification: Specification = serde_json::from_str(&first?)?;
    enter_own_network()?;
    for order in orders {
        let order = order?;
        let other: Option<Specification> = match order.is_empty() {
            true => None,
            false => Some(serde_json::from_str(&order)?),
        };
        match start_once(other.as_ref().unwrap_or(&specification)) {
            Ok(ns) => println!("{ns}"),
            Err(error) => println!("{error}"),
        }
    }
    Ok(())
}

/// Programs that run natively, each in a network namespace of its own.
pub(crate) struct NativeServers {
    worker: Child,
    /// Taken at the end.
    orders: Option<ChildStdin>,
    /// The network namespaces, in the order of the programs.
    pub networks: Vec<File>,
    /// Process ids of the programs.
    pub pids: Vec<u32>,
}

impl NativeServers {
    /// Starts programs and waits until each has answered its first request.
    ///
    /// # Errors
    /// One of them did not.
    pub fn start(programs: &[Specification]) -> Result<Self, NativeError> {
        let mut worker =
            Worker::Servers.command()?.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let missing = || io::Error::from(ErrorKind::BrokenPipe);
        let orders = worker.stdin.take().ok_or_else(missing)?;
        let mut results = BufReader::new(worker.stdout.take().ok_or_else(missing)?);
        let (networks, pids) = (Vec::new(), Vec::new());
        let mut servers = Self { worker, orders: Some(orders), networks, pids };
        for program in programs {
            let mut order = serde_json::to_vec(program).map_err(io::Error::from)?;
            order.push(b'\n');
            servers.orders.as_mut().ok_or_else(missing)?.write_all(&order)?;
            let mut line = String::new();
            results.read_line(&mut line)?;
            let pid: Result<u32, _> = line.trim().parse();
            let pid = pid.map_err(|_| NativeError::NoAnswer(line.trim().to_owned()))?;
            servers.pids.push(pid);
            servers.networks.push(File::open(format!("/proc/{pid}/ns/net"))?);
        }
        Ok(servers)
    }
}

impl Drop for NativeServers {
    fn drop(&mut self) {
        // Without further orders it ends the programs and then itself.
        self.orders = None;
        let _ = self.worker.wait();
    }
}

/// Starts a program for each order and keeps it until standard input ends.
pub(crate) fn serve_servers() -> io::Result<()> {
    let mut running: Vec<Child> = Vec::new();
    let mut serve = || -> io::Result<()> {
        for order in io::stdin().lock().lines() {
            let program: Specification = serde_json::from_str(&order?)?;
            enter_own_network()?;
            running.push(program.command().process_group(0).spawn()?);
            let server = running.last_mut().expect("it was just added");
            first_byte(&program, server)?;
            println!("{}", server.id());
        }
        Ok(())
    };
    let outcome = serve();
    for mut server in running {
        // Some have workers of their own.
        let group = rustix::process::Pid::from_child(&server);
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        server.wait()?;
    }
    outcome
}

fn start_once(specification: &Specification) -> io::Result<u64> {
    let mut command = specification.command();
    let started_ns = monotonic_ns();
    let mut child = command.spawn()?;
    let answered = first_byte(specification, &mut child);
    let ended_ns = monotonic_ns();
    let _ = child.kill();
    child.wait()?;
    answered.map(|()| ended_ns - started_ns)
}

fn first_byte(specification: &Specification, child: &mut Child) -> io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let mut client = loop {
        match TcpStream::connect((Ipv4Addr::LOCALHOST, specification.port)) {
            Ok(client) => break client,
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
            Err(error) => return Err(error),
        }
        if let Some(status) = child.try_wait()? {
            return Err(io::Error::other(format!("it ended, {status}")));
        }
        if Instant::now() >= deadline {
            return Err(ErrorKind::TimedOut.into());
        }
        sleep(PAUSE);
    };
    client.set_nodelay(true)?;
    client.set_read_timeout(Some(PATIENCE))?;
    // A reset at the end leaves no connection in TIME_WAIT on the port that
    // the next start wants to bind.
    rustix::net::sockopt::set_socket_linger(&client, Some(Duration::ZERO))?;
    client.write_all(&specification.request)?;
    client.read_exact(&mut [0])
}
