//! `thaw bench sandbox`: how long the node takes for what a sandbox is asked, without a client, beside
//! the same command as a process of the host and in a plain container; and the memory of many
//! sandboxes.

mod container;
mod large;
mod native;
mod population;

pub use large::LargeFileReport;
pub use population::{
    PausedWith, PopulationMemory, PopulationOptions, PopulationReport, population,
};

use super::rig::{Rig, RigOptions};
use super::{BenchError, OnProgress, Percentiles};
use container::Container;
use serde::Serialize;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thaw_daemon::daemon::ServeError;
use thaw_home::config::Isolation;
use thaw_home::function::BuiltFunction;
use thaw_home::home::Home;
use thaw_node::boots::BootKind;
use thaw_node::remote::{ExecRequest, ExecState};
use thaw_node::sandboxes::{NewSandbox, Sandboxes, Started};
use thaw_node::swap::SwapSpace;
use thaw_store::Store;

/// Rounds that are not counted.
const WARM_UPS: usize = 2;
/// A file in a sandbox, and what is written to it and read.
const FILE: &str = "/tmp/thaw-bench";
const CONTENTS: [u8; 1024] = [b'x'; 1024];

/// How long after a copy runs all of its memory is there.
const COPIED_AFTER: Duration = Duration::from_secs(1);
/// How long a paused sandbox may take to give up its memory, and how often that is looked at.
const GIVEN_BACK_MAX: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(1);

/// What is measured.
#[derive(Clone, Debug)]
pub struct SandboxOptions {
    /// How often each is done.
    pub count: usize,
    /// The command that is run, which is to end with 0.
    pub command: Vec<String>,
    /// A program that runs in each sandbox of the image before it is copied and paused, and has
    /// printed something by then.
    pub program: Option<Vec<String>>,
}

/// What was measured, in microseconds: from a request to the node's own code to its answer.
#[derive(Clone, Debug, Serialize)]
pub struct SandboxReport {
    /// The function whose image sandboxes are copies of.
    pub function: String,
    /// How often each was done.
    pub n: usize,
    /// A sandbox is made of an instance that was booted ahead.
    pub create_ready_us: Percentiles,
    /// A sandbox is made of the image, which is in memory.
    pub create_image_us: Percentiles,
    /// From the request for one of a ready instance until the end of its first command is known.
    pub begin_ready_us: Percentiles,
    /// The same for one of the image.
    pub begin_image_us: Percentiles,
    /// The first command runs in one of a ready instance, from its start until its end is known.
    pub command_ready_us: Percentiles,
    /// The same in one of the image.
    pub command_us: Percentiles,
    /// The next command runs in either.
    pub next_command_us: Percentiles,
    /// A file of 1 KiB is written, by a session of its own.
    pub write_us: Percentiles,
    /// It is read, by a session of its own.
    pub read_us: Percentiles,
    /// A copy of it is made.
    pub fork_us: Percentiles,
    /// From the request for a copy until the end of its first command is known.
    pub fork_command_us: Percentiles,
    /// Nothing in it runs any more.
    pub pause_us: Percentiles,
    /// From the request for a pause until its memory is in a file, and given back to the host.
    pub given_back_us: Percentiles,
    /// It runs after that.
    pub resume_us: Percentiles,
    /// It runs when it is resumed at once after a pause, while its memory is being written.
    pub resume_early_us: Percentiles,
    /// The command runs as a process of the host.
    pub native_us: Option<Percentiles>,
    /// It runs in a plain container.
    pub container: Option<ContainerReport>,
    /// Large files.
    pub large_file: Option<LargeFileReport>,
    /// Why something is not there, one sentence each.
    pub missing: Vec<String>,
}

/// The same command in a plain container.
#[derive(Clone, Debug, Serialize)]
pub struct ContainerReport {
    /// What runs it, with its options.
    pub runtime: String,
    /// A new one, from its request to the end of its command.
    pub run_us: Percentiles,
    /// The command runs in one that lives.
    pub exec_us: Percentiles,
}

/// Measures sandboxes of a stored function.
///
/// # Errors
/// The function cannot be booted here, or a sandbox of it does not do what is asked.
pub fn sandbox(
    home: &Home,
    name: &str,
    options: &SandboxOptions,
    progress: &mut OnProgress<'_>,
) -> Result<SandboxReport, BenchError> {
    let store = Store::open(&home.store())?;
    let function = BuiltFunction::read(&store, name)?;
    let directory = home.work("bench-sandboxes").map_err(ServeError::from)?;
    let mut samples = Samples::default();
    let mut beside = Beside::start(&directory, &options.command);
    let mut large_file = None;
    for kind in [BootKind::Ready, BootKind::Warm] {
        let subject = Subject::start(home, &store, &function, kind)?;
        for round in 0..WARM_UPS + options.count {
            progress(&format!("{name}: {} {}", kind.name(), round + 1));
            let taken = subject.round(options)?;
            if round >= WARM_UPS {
                samples.add(kind, &taken);
                beside.round(&options.command);
            }
        }
        if kind == BootKind::Warm {
            let mut say = |round| progress(&format!("{name}: large file {round}"));
            match large::measure(&subject, &directory, options.count, &mut say) {
                Ok(report) => large_file = Some(report),
                Err(error) => beside.missing.push(error.to_string()),
            }
        }
    }
    Ok(SandboxReport { large_file, ..samples.report(name, options.count, beside) })
}

/// What the command takes without a sandbox, turn by turn with those in one.
struct Beside {
    native: Vec<u64>,
    container: Option<Container>,
    run: Vec<u64>,
    exec: Vec<u64>,
    missing: Vec<String>,
}

impl Beside {
    fn start(directory: &Path, command: &[String]) -> Self {
        let container = Container::start(&directory.join("containers"), command);
        let (container, missing) = match container {
            Ok(container) => (Some(container), Vec::new()),
            Err(reason) => (None, vec![reason]),
        };
        let (native, run, exec) = Default::default();
        Self { native, container, run, exec, missing }
    }

    fn round(&mut self, command: &[String]) {
        match native::run(command) {
            Ok(took) => self.native.push(took),
            Err(reason) => self.miss(format!("not as a process of the host: {reason}")),
        }
        let Some(container) = &self.container else { return };
        match container.run().and_then(|run| Ok((run, container.exec(command)?))) {
            Ok((run, exec)) => {
                self.run.push(run);
                self.exec.push(exec);
            }
            Err(reason) => {
                let runtime = container.runtime();
                self.container = None;
                self.miss(format!("not in a container of {runtime}: {reason}"));
            }
        }
    }

    fn miss(&mut self, reason: String) {
        if !self.missing.contains(&reason) {
            self.missing.push(reason);
        }
    }

    fn native(&mut self) -> Option<Percentiles> {
        (!self.native.is_empty()).then(|| Percentiles::of_ns(&mut self.native))
    }

    fn container(&mut self) -> Option<ContainerReport> {
        let runtime = self.container.as_ref()?.runtime();
        let (run_us, exec_us) =
            (Percentiles::of_ns(&mut self.run), Percentiles::of_ns(&mut self.exec));
        Some(ContainerReport { runtime, run_us, exec_us })
    }
}

/// A node, and its sandboxes.
struct Subject {
    function: String,
    kind: BootKind,
    rig: Rig,
    sandboxes: Arc<Sandboxes>,
}

/// How many things are measured besides the making and the commands.
const USES: usize = 8;

/// Nanoseconds of one round.
struct Round {
    create: u64,
    command: u64,
    next_command: u64,
    /// A file written and read, a copy, a copy with a command, a pause, until it has given up its
    /// memory, a resumption after that, and one before that.
    rest: Option<[u64; USES]>,
}

impl Subject {
    fn start(
        home: &Home,
        store: &Store,
        function: &BuiltFunction,
        kind: BootKind,
    ) -> Result<Self, BenchError> {
        Self::for_many(home, store, function, RigOptions::single(kind).instances, kind)
    }

    /// The same for so many sandboxes at a time.
    fn for_many(
        home: &Home,
        store: &Store,
        function: &BuiltFunction,
        instances: u32,
        kind: BootKind,
    ) -> Result<Self, BenchError> {
        let single = RigOptions::single(kind);
        let options = RigOptions { isolation: Isolation::Instance, instances, ..single };
        let rig = Rig::start(home, store, function, options)?;
        rig.services.shared().hibernate_in(SwapSpace::begin(home.swap()?)?);
        let directory = home.work("bench-sandboxes").map_err(ServeError::from)?.join("known");
        // Those of an earlier measurement have ended with it.
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory)?;
        let sandboxes = Sandboxes::load(rig.services.clone(), &directory)?;
        let function = function.function.config.name.to_string();
        Ok(Self { function, kind, rig, sandboxes })
    }

    /// One sandbox, from its beginning to its end. Of one that was made of an image what files,
    /// copies and pauses take is measured, too.
    fn round(&self, options: &SandboxOptions) -> Result<Round, BenchError> {
        self.prepare()?;
        let (name, create) = self.timed(self.make())?;
        let command = self.command(&name, options)?;
        let next_command = self.command(&name, options)?;
        let rest = match self.kind {
            BootKind::Ready => None,
            _ => Some(self.uses(&name, options)?),
        };
        self.end(&name)?;
        Ok(Round { create, command, next_command, rest })
    }

    /// Sees to it that a sandbox can be made at once.
    fn prepare(&self) -> Result<(), BenchError> {
        self.rig.launcher.prepare(self.kind).map_err(BenchError::Launch)?;
        Ok(self.rig.pool.wait_full().map_err(ServeError::from)?)
    }

    /// Makes a sandbox; its name.
    async fn make(&self) -> Result<String, BenchError> {
        let new = NewSandbox { function: self.function.clone(), ..NewSandbox::default() };
        Ok(self.sandboxes.create(new).await?.name)
    }

    fn new_sandbox(&self) -> Result<String, BenchError> {
        self.prepare()?;
        self.rig.block_on(self.make())
    }

    /// Ends the only sandbox.
    fn end(&self, name: &str) -> Result<(), BenchError> {
        self.sandboxes.kill(name)?;
        self.rig.wait_empty()?;
        // The next measurement removes the file.
        self.rig.block_on(self.sandboxes.written());
        Ok(())
    }

    fn uses(&self, name: &str, options: &SandboxOptions) -> Result<[u64; USES], BenchError> {
        let sandboxes = &self.sandboxes;
        let (_, write) = self.timed(sandboxes.write_file(name, FILE, &CONTENTS))?;
        let most = CONTENTS.len() as u32;
        let (found, read) = self.timed(sandboxes.read_file(name, FILE, most))?;
        if found != CONTENTS {
            return Err(BenchError::Verb(format!("{FILE} is not what was written to it")));
        }
        let program = options.program.as_ref().map(|argv| self.begin(name, argv)).transpose()?;
        let (copy, fork) = self.timed(sandboxes.fork(name, ""))?;
        let command = self.command(&copy.name, options)?;
        sandboxes.kill(&copy.name)?;
        // A pause waits until the copy has all of its memory, which is not what is measured here.
        std::thread::sleep(COPIED_AFTER);
        let (_, pause) = self.timed(sandboxes.pause(name))?;
        let given_back = pause + self.timed(self.given_back(name))?.1;
        let (_, resume) = self.timed(sandboxes.resume(name))?;
        self.rig.block_on(sandboxes.pause(name))?;
        let (_, resume_early) = self.timed(sandboxes.resume(name))?;
        if let Some(program) = program
            && !matches!(program.state(), ExecState::Running { .. })
        {
            return Err(BenchError::Verb("the program in the sandbox has ended".to_owned()));
        }
        Ok([write, read, fork, fork + command, pause, given_back, resume, resume_early])
    }

    /// Waits until a paused sandbox has given up its memory.
    async fn given_back(&self, name: &str) -> Result<(), BenchError> {
        let deadline = Instant::now() + GIVEN_BACK_MAX;
        while self.sandboxes.find(name)?.state.as_deref() == Some("paused") {
            if Instant::now() > deadline {
                return Err(BenchError::NoPhase("that a paused sandbox gives up its memory"));
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    /// Starts a program that goes on, and waits until it has printed something.
    fn begin(&self, name: &str, argv: &[String]) -> Result<Started, BenchError> {
        let request = ExecRequest { argv: argv.to_vec(), stdin: true, ..ExecRequest::default() };
        Ok(self.rig.block_on(self.sandboxes.start(name, &request))?.0)
    }

    fn command(&self, name: &str, options: &SandboxOptions) -> Result<u64, BenchError> {
        let request = ExecRequest { argv: options.command.clone(), ..ExecRequest::default() };
        let (ended, took) = self.timed(self.sandboxes.run(name, &request))?;
        match ended {
            ExecState::Ended { code: Some(0), .. } => Ok(took),
            _ => Err(BenchError::Command { command: options.command.join(" ") }),
        }
    }

    /// The outcome of something, and how many nanoseconds it took.
    fn timed<T, E>(&self, does: impl Future<Output = Result<T, E>>) -> Result<(T, u64), BenchError>
    where
        BenchError: From<E>,
    {
        let began = Instant::now();
        let done = self.rig.block_on(does);
        let took = began.elapsed().as_nanos() as u64;
        Ok((done?, took))
    }
}

/// Samples, in nanoseconds.
#[derive(Default)]
struct Samples {
    ready: FirstUse,
    image: FirstUse,
    next_command: Vec<u64>,
    rest: [Vec<u64>; USES],
}

/// Those of sandboxes that were made in one way.
#[derive(Default)]
struct FirstUse {
    create: Vec<u64>,
    begin: Vec<u64>,
    command: Vec<u64>,
}

impl Samples {
    fn add(&mut self, kind: BootKind, round: &Round) {
        let first = match kind {
            BootKind::Ready => &mut self.ready,
            _ => &mut self.image,
        };
        first.create.push(round.create);
        first.begin.push(round.create + round.command);
        first.command.push(round.command);
        self.next_command.push(round.next_command);
        for (samples, one) in self.rest.iter_mut().zip(round.rest.into_iter().flatten()) {
            samples.push(one);
        }
    }

    fn report(mut self, function: &str, n: usize, mut beside: Beside) -> SandboxReport {
        let [
            write_us,
            read_us,
            fork_us,
            fork_command_us,
            pause_us,
            given_back_us,
            resume_us,
            resume_early_us,
        ] = self.rest.each_mut().map(|samples| Percentiles::of_ns(samples));
        SandboxReport {
            function: function.to_owned(),
            n,
            create_ready_us: Percentiles::of_ns(&mut self.ready.create),
            create_image_us: Percentiles::of_ns(&mut self.image.create),
            begin_ready_us: Percentiles::of_ns(&mut self.ready.begin),
            begin_image_us: Percentiles::of_ns(&mut self.image.begin),
            command_ready_us: Percentiles::of_ns(&mut self.ready.command),
            command_us: Percentiles::of_ns(&mut self.image.command),
            next_command_us: Percentiles::of_ns(&mut self.next_command),
            write_us,
            read_us,
            fork_us,
            fork_command_us,
            pause_us,
            given_back_us,
            resume_us,
            resume_early_us,
            native_us: beside.native(),
            container: beside.container(),
            large_file: None,
            missing: beside.missing,
        }
    }
}
