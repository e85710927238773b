//! Measuring boots, through the same gateway and life cycle as in service, with
//! the same program started natively in between.

mod cold;
mod isolate;
pub mod native;
mod stats;
pub mod syscalls;

pub use stats::Percentiles;

use crate::boots::{BootKind, Phases};
use crate::config::{Isolation, TimeSpan};
use crate::daemon::{ServeError, start_pool};
use crate::function::{BuiltFunction, FunctionError};
use crate::gateway::{Gateway, GatewayConfig};
use crate::home::Home;
use crate::instance::{BootPolicy, LaunchError, SandboxLauncher, WorkingSetUse};
use crate::logs::FunctionLog;
use crate::node::Shared;
use crate::service::Service;
use cold::PageCache;
use native::{NativeError, NativeProgram};
use serde::Serialize;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use thaw_sandbox::ZygotePool;
use thaw_store::{Store, StoreError};
use tokio::runtime::Runtime;

/// Boots that are not counted: they fill caches and record the working set.
const WARM_UPS: usize = 3;
/// Zygotes kept ready; one is used at a time.
const ZYGOTES: usize = 4;
/// How long one response may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// What is measured.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// What the boots begin from. Cold: nothing of the image and the files is
    /// resident, as far as no other process maps them.
    pub boot: BootKind,
    /// Boots that are counted.
    pub count: usize,
    /// Path of the requests.
    pub path: String,
    /// Whether and how working sets are used.
    pub working_set: WorkingSetUse,
    /// Whether to start the program natively, too.
    pub native: bool,
}

/// Percentiles of every phase, in microseconds since the connection was accepted.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PhasePercentiles {
    /// A zygote, a template or an instance was taken.
    pub zygote: Percentiles,
    /// The sandbox had its boot command; not part of the JSON.
    #[serde(skip)]
    pub received: Percentiles,
    /// All eager mappings were in place.
    pub mapped: Percentiles,
    /// The guest's first instruction was about to run.
    pub first_instruction: Percentiles,
    /// The guest had sent its first response byte.
    pub first_byte: Percentiles,
}

/// The same program started natively, in microseconds since before its `fork`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct NativePercentiles {
    /// The client had read the first response byte.
    pub first_byte: Percentiles,
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct BenchReport {
    /// The function.
    pub function: String,
    /// What the boots began from.
    pub boot: BootKind,
    /// Boots that were counted.
    pub n: usize,
    /// Phases of the boots.
    pub phases_us: PhasePercentiles,
    /// The native starts; none if they were not asked for.
    pub native_us: Option<NativePercentiles>,
    /// Memory that one idle instance has for itself after its first request, in
    /// KiB: its proportional set size without pages of files.
    pub pss_kib: u64,
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The function is not usable.
    #[error(transparent)]
    Function(#[from] FunctionError),
    /// The function's files are not usable.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The function cannot be served.
    #[error(transparent)]
    Load(#[from] crate::catalog::LoadError),
    /// This host cannot run sandboxes.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// The program cannot be started natively.
    #[error(transparent)]
    Native(#[from] NativeError),
    /// The state directory is not usable.
    #[error(transparent)]
    Home(#[from] crate::home::HomeError),
    /// A side of a comparison does not run.
    #[error(transparent)]
    Side(#[from] syscalls::SideError),
    /// A response was not as it should be.
    #[error("the function answered {0:?}; try `thaw invoke` first")]
    Response(String),
    /// What a boot is to begin from could not be made.
    #[error(transparent)]
    Launch(LaunchError),
    /// A boot was not of the kind that is measured.
    #[error("a boot was {} where {} was asked for; `thaw -v bench boot` shows why", .found.name(), .asked.name())]
    OtherBoot {
        /// What was to be measured.
        asked: BootKind,
        /// What happened.
        found: BootKind,
    },
    /// A sandbox did not report its phases.
    #[error("an instance did not report {0}; `thaw invoke --timings` shows more")]
    NoPhase(&'static str),
    /// The host refused something.
    #[error("cannot measure ({0})")]
    Io(#[from] io::Error),
}

/// Boots of one function, ready to be measured.
struct Bench {
    runtime: Runtime,
    shared: Arc<Shared>,
    pool: Arc<ZygotePool>,
    service: Arc<Service>,
    launcher: Arc<SandboxLauncher>,
    kind: BootKind,
    address: SocketAddr,
    request: Vec<u8>,
}

/// Measures boots of a stored function; `progress` gets the number of those
/// that are done. Needs no daemon and does not disturb one.
///
/// # Errors
/// The function cannot be booted here, or does not answer.
pub fn boot(
    home: &Home,
    name: &str,
    options: &BenchOptions,
    progress: &mut dyn FnMut(usize),
) -> Result<BenchReport, BenchError> {
    let store = Store::open(&home.store())?;
    let function = BuiltFunction::read(&store, name)?;
    let request =
        format!("GET {} HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n", options.path);
    let cache = match options.boot {
        BootKind::Cold => Some(PageCache::of(&store, &function)?),
        _ => None,
    };
    // Before any thread exists: it enters namespaces of its own.
    let mut native = match options.native {
        true => Some(NativeProgram::prepare(home, &function, request.as_bytes())?),
        false => None,
    };
    let bench = Bench::start(home, &store, function.clone(), options, request.into_bytes())?;
    for _ in 0..WARM_UPS {
        bench.sample()?;
        if let Some(native) = &mut native {
            native.sample()?;
        }
    }
    let mut phases = Vec::with_capacity(options.count);
    let mut natives = Vec::with_capacity(options.count);
    for done in 0..options.count {
        if let Some(cache) = &cache {
            cache.drop_image_and_blobs()?;
        }
        phases.push(bench.sample()?);
        if let Some(native) = &mut native {
            if let Some(cache) = &cache {
                cache.drop_host_files();
            }
            natives.push(native.sample()?);
        }
        progress(done + 1);
    }
    let pss_kib = bench.memory_of_an_idle_instance(&function, options)?;
    Ok(BenchReport {
        function: name.to_owned(),
        boot: options.boot,
        n: options.count,
        phases_us: summarize(&phases)?,
        native_us: native
            .map(|_| NativePercentiles { first_byte: Percentiles::of_ns(&mut natives) }),
        pss_kib,
    })
}

impl Bench {
    fn start(
        home: &Home,
        store: &Store,
        function: BuiltFunction,
        options: &BenchOptions,
        request: Vec<u8>,
    ) -> Result<Self, BenchError> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let entered = runtime.enter();
        let pool = start_pool(ZYGOTES)?;
        let shared = Shared::new(1024);
        let launcher = launcher(
            home,
            store,
            &function,
            &pool,
            options.working_set,
            BootPolicy::only(options.boot),
        )?;
        let mut config = function.function.config;
        config.isolation = Isolation::Request;
        config.limits.timeout = TimeSpan(PATIENCE);
        let service = Service::new(config, String::new(), launcher.clone(), shared.clone());
        shared.install(service.clone());
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        runtime
            .spawn(Gateway::new(shared.clone(), GatewayConfig::default()).listen(listener, None));
        drop(entered);
        let kind = options.boot;
        Ok(Self { runtime, shared, pool, service, launcher, kind, address, request })
    }

    /// One boot, begun when the system is at rest.
    fn sample(&self) -> Result<Phases, BenchError> {
        self.launcher.prepare(self.kind).map_err(BenchError::Launch)?;
        self.pool.wait_full().map_err(ServeError::from)?;
        let asked_ns = crate::clock::monotonic_ns();
        let local = exchange(self.address, &self.request)?;
        let boot = eventually(|| self.shared.boots().by_peer(local, asked_ns))
            .ok_or(BenchError::NoPhase("its boot"))?;
        eventually(|| (self.service.instance_count() == 0).then_some(()))
            .ok_or(BenchError::NoPhase("its end"))?;
        let is_as_asked = match self.kind {
            BootKind::Cold | BootKind::Warm => {
                matches!(boot.kind, BootKind::Cold | BootKind::Warm)
            }
            kind => boot.kind == kind,
        };
        if !is_as_asked {
            return Err(BenchError::OtherBoot { asked: self.kind, found: boot.kind });
        }
        Ok(boot.phases)
    }

    /// Boots an instance that stays after its first request, and looks at it.
    fn memory_of_an_idle_instance(
        &self,
        function: &BuiltFunction,
        options: &BenchOptions,
    ) -> Result<u64, BenchError> {
        let mut config = self.service.config().clone();
        config.isolation = Isolation::Instance;
        let launcher = self.service.launcher();
        let service =
            Service::new(config, function.image.to_string(), launcher, self.shared.clone());
        self.shared.install(service.clone());
        tracing::debug!(path = options.path, "measuring memory");
        exchange(self.address, &self.request)?;
        let idle = || {
            let instances = service.instances();
            instances.first().filter(|instance| instance.connections == 0).map(|i| i.pid)
        };
        let pid = eventually(idle).ok_or(BenchError::NoPhase("that it is idle"))?;
        let kib = private_kib(pid)?;
        service.kill_all();
        self.runtime.block_on(self.shared.drain(Duration::from_secs(1)));
        Ok(kib)
    }
}

fn launcher(
    home: &Home,
    store: &Store,
    function: &BuiltFunction,
    pool: &Arc<ZygotePool>,
    working_set: WorkingSetUse,
    policy: BootPolicy,
) -> Result<Arc<SandboxLauncher>, BenchError> {
    let load = |error: crate::catalog::LoadError| BenchError::Load(error);
    let config = &function.function.config;
    let rootfs = function.rootfs(store)?;
    let image = crate::build::open_image(store, function.image, &rootfs)
        .map_err(|error| load(error.into()))?;
    let logs = home.logs().map_err(ServeError::from)?;
    let log = FunctionLog::open(&logs, &format!("{}.bench", config.name))?;
    let launcher = SandboxLauncher::new(
        pool.clone(),
        store,
        rootfs,
        function.image,
        image,
        log.pipes()?,
        config,
        working_set,
        policy,
    );
    Ok(Arc::new(launcher.map_err(|error| load(error.into()))?))
}

/// One request; returns the client's address.
fn exchange(address: SocketAddr, request: &[u8]) -> Result<SocketAddr, BenchError> {
    let mut client = TcpStream::connect(address)?;
    client.set_nodelay(true)?;
    client.set_read_timeout(Some(PATIENCE))?;
    let local = client.local_addr()?;
    client.write_all(request)?;
    let mut response = Vec::new();
    client.read_to_end(&mut response)?;
    let head = String::from_utf8_lossy(&response[..response.len().min(200)]).into_owned();
    let status = head.split(' ').nth(1).and_then(|code| code.parse::<u16>().ok());
    match status {
        Some(200..=399) => Ok(local),
        _ => Err(BenchError::Response(head)),
    }
}

/// Asks again and again until there is an answer.
fn eventually<T>(question: impl Fn() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        if let Some(answer) = question() {
            return Some(answer);
        }
        if Instant::now() >= deadline {
            return None;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn summarize(phases: &[Phases]) -> Result<PhasePercentiles, BenchError> {
    let of = |name, phase: fn(&Phases) -> Option<u64>| {
        let samples: Option<Vec<u64>> = phases.iter().map(phase).collect();
        match samples {
            Some(mut samples) => Ok(Percentiles::of_ns(&mut samples)),
            None => Err(BenchError::NoPhase(name)),
        }
    };
    Ok(PhasePercentiles {
        zygote: of("when its zygote was taken", |p| Some(p.zygote))?,
        received: of("when it had its boot command", |p| p.received)?,
        mapped: of("when its memory was mapped", |p| p.mapped)?,
        first_instruction: of("its first instruction", |p| p.first_instruction)?,
        first_byte: of("its first response byte", |p| p.first_byte)?,
    })
}

/// Proportional set size of a process without pages of files (proc_pid_smaps(5)).
fn private_kib(pid: u32) -> io::Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let field = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().ok()
    };
    match (field("Pss"), field("Pss_File")) {
        (Some(all), Some(files)) => Ok(all.saturating_sub(files)),
        _ => Err(io::Error::new(io::ErrorKind::Unsupported, "this kernel does not tell Pss_File")),
    }
}
