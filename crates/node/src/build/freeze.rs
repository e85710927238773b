//! The second stage of a build: running the program to its entry point and
//! writing the image.

use super::import::read_lines;
use super::{BuildEvent, BuildOptions, OnEvent};
use crate::config::egress_policy;
use crate::function::StoredFunction;
use crate::rootfs::StoredRootfs;
use rustix::pipe::{PipeFlags, pipe_with};
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use thaw_abi::control::{EntryPoint, FLAG_FREEZE_AT_ENTRY};
use thaw_sandbox::{
    BootError, Console, Event, Fit, FreezeError, FreezeReport, FreezeSpec, GuestExit, Image,
    ImageError, KernelError, MergePolicy, PlanError, Sandbox, StartSpec, ZygoteConfig, ZygoteError,
    ZygoteParent, cpu_features,
};
use thaw_store::{ImageId, IndexId, Session, StoreError};

/// Lines of output that an error repeats.
const LAST_LINES: usize = 20;
/// How often output is passed on while the program runs.
const TICK: Duration = Duration::from_millis(50);

/// How a program was frozen.
#[derive(Clone, Debug)]
pub struct Frozen {
    /// Time from the start of the program to its entry point.
    pub start: Duration,
    /// What the image holds.
    pub report: FreezeReport,
}

/// Why a program could not be frozen.
#[derive(Debug, thiserror::Error)]
pub enum FreezeFailure {
    /// The program ended instead of serving.
    #[error("the program ended {how} before it waited for a client on port {port}; {}", last(.output))]
    Ended {
        /// With which code or signal.
        how: String,
        /// The port it should listen on.
        port: u16,
        /// Its last lines of output.
        output: Vec<String>,
    },
    /// The program does not come to wait for clients.
    #[error("the program did not wait for a client on port {port} within {} s; does it listen there, and is `--timeout` long enough? {}", timeout.as_secs_f64(), last(.output))]
    NoEntryPoint {
        /// The port it should listen on.
        port: u16,
        /// How long it had.
        timeout: Duration,
        /// Its last lines of output.
        output: Vec<String>,
    },
    /// The sandbox could not start the program.
    #[error("the program could not be started: {reason}; {}", last(.output))]
    NotStarted {
        /// Why.
        reason: String,
        /// What was printed.
        output: Vec<String>,
    },
    /// The sandbox ended unexpectedly.
    #[error("the sandbox ended unexpectedly ({reason}); {}", last(.output))]
    Died {
        /// How.
        reason: String,
        /// What was printed.
        output: Vec<String>,
    },
    /// There is no kernel.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// No sandbox could be made.
    #[error(transparent)]
    Zygote(#[from] ZygoteError),
    /// No program could be started in it.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The image could not be written.
    #[error(transparent)]
    Freeze(#[from] FreezeError),
    /// The image that was written is not usable.
    #[error("the new image is not usable: {0}")]
    Image(#[from] ImageError),
    /// The image that was written cannot be booted.
    #[error("the new image cannot be booted: {0}")]
    Plan(#[from] PlanError),
    /// The store refused something.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The host refused something.
    #[error("cannot talk to the sandbox ({0}); try again")]
    Io(#[from] io::Error),
}

fn last(output: &[String]) -> String {
    match output {
        [] => "it printed nothing".to_owned(),
        lines => format!("its last output was:\n  {}", lines.join("\n  ")),
    }
}

/// The output of a program: passed on as it comes, the last lines kept.
struct Output {
    lines: mpsc::Receiver<String>,
    kept: VecDeque<String>,
}

impl Output {
    fn pass_on(&mut self, on_event: &mut OnEvent<'_>) {
        while let Ok(line) = self.lines.try_recv() {
            self.keep(line, on_event);
        }
    }

    fn keep(&mut self, line: String, on_event: &mut OnEvent<'_>) {
        on_event(BuildEvent::Output { from: "program", line: &line });
        if self.kept.len() == LAST_LINES {
            self.kept.pop_front();
        }
        self.kept.push_back(line);
    }

    /// Takes what is still on its way when the program has ended.
    fn last(mut self, on_event: &mut OnEvent<'_>) -> Vec<String> {
        let deadline = Instant::now() + Duration::from_millis(500);
        while let Ok(line) = self.lines.recv_timeout(deadline - Instant::now().min(deadline)) {
            self.keep(line, on_event);
        }
        self.kept.into()
    }
}

/// Runs the function's program over `index` to its entry point, and stores its
/// image.
pub(super) fn freeze(
    session: &mut Session,
    function: &StoredFunction,
    index: IndexId,
    options: &BuildOptions,
    on_event: &mut OnEvent<'_>,
) -> Result<(ImageId, Frozen), FreezeFailure> {
    let rootfs = StoredRootfs::open(session, index)?;
    on_event(BuildEvent::Stage("running the program to its entry point"));
    let (sender, lines) = mpsc::channel();
    let pipe = || -> io::Result<OwnedFd> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
        read_lines(File::from(reader), sender.clone());
        Ok(writer)
    };
    let (stdout, stderr, console) = (pipe()?, pipe()?, pipe()?);
    drop(sender);
    let mut output = Output { lines, kept: VecDeque::new() };
    let stdin = File::open("/dev/null")?;

    let console = Console::Shared(Arc::new(console));
    let parent = ZygoteParent::start(ZygoteConfig::new(crate::debug::kernel()?, console))?;
    let config = &function.config;
    let spec = StartSpec {
        program: None,
        argv: config.command.iter().map(Into::into).collect(),
        env: function.environment_strings(),
        cwd: config.workdir.clone().into(),
        hostname: config.name.as_str().into(),
        uid: 0,
        gid: 0,
        port: config.port.get(),
        cpus: config.limits.cpu.get(),
        memory_limit: config.limits.memory.bytes(),
        // The author's limit is for requests, not for the start.
        cpu_time_limit: None,
        flags: FLAG_FREEZE_AT_ENTRY | crate::debug::flags(),
        rootfs: rootfs.rootfs(),
        egress: egress_policy(&config.egress.allow),
        mounts: Vec::new(),
        stdio: [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()],
        window: None,
    };
    let started = Instant::now();
    let mut sandbox = parent.create()?.start(&spec)?;
    // From here on the program alone holds the write ends.
    drop((stdout, stderr));
    let entry = match run_to_entry(&mut sandbox, config.port.get(), options, &mut output, on_event)
    {
        Ok(entry) => entry,
        Err(stop) => {
            drop(sandbox);
            drop(parent);
            return Err(stop.into_failure(output.last(on_event)));
        }
    };
    let start = started.elapsed();
    output.pass_on(on_event);

    on_event(BuildEvent::Stage("freezing"));
    let spec = FreezeSpec {
        index_hash: *index.as_bytes(),
        program: config.command[0].clone(),
        arguments: config.command.join(" "),
        about: serde_json::to_string(function).expect("a function is plain data"),
        max_stored: config.limits.memory.bytes(),
        merge: MergePolicy::default(),
    };
    let new = session.new_image_file()?;
    let report = thaw_sandbox::freeze(&sandbox, entry, &spec, new.file())?;
    drop(sandbox);
    let id = session.commit_image(new)?;
    // What cannot be booted must not be stored as a function.
    open_image(session, id, &rootfs)?.plan(rootfs.file(), rootfs.file_len(), rootfs.blobs())?;
    Ok((id, Frozen { start, report }))
}

/// Opens a stored image and checks that it can be booted here.
///
/// # Errors
/// It is missing, damaged, or does not fit the kernel, the machine or the files.
pub(crate) fn open_image(
    store: &thaw_store::Store,
    id: ImageId,
    rootfs: &StoredRootfs,
) -> Result<Image, FreezeFailure> {
    let image = Image::open(store.open_image(id)?)?;
    image.check_fit(&Fit {
        kernel_build: crate::debug::kernel()?.build_id(),
        index_hash: *rootfs.id().as_bytes(),
        cpu_features: cpu_features(),
    })?;
    Ok(image)
}

/// Why the program did not come to its entry point.
enum Stop {
    Ended(GuestExit, u16),
    NoEntryPoint(u16, Duration),
    NotStarted(String),
    Died(String),
    Io(io::Error),
}

impl Stop {
    fn into_failure(self, output: Vec<String>) -> FreezeFailure {
        match self {
            Self::Ended(exit, port) => {
                let how = match exit {
                    GuestExit::Code(code) => format!("with exit code {code}"),
                    GuestExit::Signal(signal) => format!("by signal {signal}"),
                };
                FreezeFailure::Ended { how, port, output }
            }
            Self::NoEntryPoint(port, timeout) => {
                FreezeFailure::NoEntryPoint { port, timeout, output }
            }
            Self::NotStarted(reason) => FreezeFailure::NotStarted { reason, output },
            Self::Died(reason) => FreezeFailure::Died { reason, output },
            Self::Io(error) => FreezeFailure::Io(error),
        }
    }
}

fn run_to_entry(
    sandbox: &mut Sandbox,
    port: u16,
    options: &BuildOptions,
    output: &mut Output,
    on_event: &mut OnEvent<'_>,
) -> Result<EntryPoint, Stop> {
    let deadline = Instant::now() + options.entry_timeout;
    loop {
        let event = sandbox.wait_event(Some(TICK)).map_err(Stop::Io)?;
        output.pass_on(on_event);
        match event {
            Some(Event::EntryPoint(entry)) => return Ok(entry),
            Some(Event::Exit(exit)) => return Err(Stop::Ended(exit, port)),
            Some(Event::Failed(reason)) => return Err(Stop::NotStarted(reason)),
            Some(Event::Violation(violation)) => return Err(Stop::Died(violation.to_string())),
            Some(Event::Hangup) => return Err(Stop::Died(sandbox.wait().to_string())),
            Some(Event::Prepared | Event::Booted(_) | Event::ConnectionClosed { .. }) => {}
            None if Instant::now() >= deadline => {
                return Err(Stop::NoEntryPoint(port, options.entry_timeout));
            }
            None => {}
        }
    }
}
