//! The program that is being built: running in a sandbox, watched until it is at
//! its entry point.

use super::absent::Absent;
use super::command::note_denials;
use super::doubt::{Doubt, Reason, Wakers};
use super::freeze::FreezeFailure;
use super::output::{Flow, Output};
use super::template::Template;
use super::{BuildEvent, BuildOptions, OnEvent};
use crate::lacking::Lacking;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, TrySendError};
use std::thread;
use std::time::{Duration, Instant};
use thaw_abi::control::{
    EntryPoint, FLAG_FREEZE_AT_ENTRY, FLAG_SAY_LOSSES, FLAG_START_PATH, Losses,
};
use thaw_home::config::{ByteSize, EntryKind, FreezeAt, FunctionConfig};
use thaw_home::function::StoredFunction;
use thaw_home::rootfs::StoredRootfs;
use thaw_sandbox::{
    BootFlags, Console, ConsoleOutput, Event, GuestExit, LimitReached, Mount, MountKind, Sandbox,
    StartSpec, WeakLimits, WrittenFiles, ZygoteConfig, ZygoteParent,
};
use tokio::signal::unix::{SignalKind, signal};

/// How often output is passed on while the program runs.
pub(super) const TICK: Duration = Duration::from_millis(50);
/// The same while the program prints faster than that.
pub(super) const TICK_IN_A_FLOOD: Duration = Duration::from_millis(1);
/// How long a program may take to its entry point, unless the user says otherwise.
const ENTRY_TIMEOUT: Duration = Duration::from_secs(60);
/// Signals to this process that may wait to be passed on.
const SIGNALS_MAX: usize = 8;

/// What a program has to do to be frozen, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Awaited {
    /// As in "before it waited …".
    pub(super) past: String,
    /// As in "it did not wait …".
    pub(super) infinitive: String,
    /// What to look at if it does not.
    pub(super) doubt: &'static str,
    /// Where it has to listen, if it has to.
    port: Option<u16>,
    wakers: Wakers,
}

impl Awaited {
    fn new(config: &FunctionConfig) -> Self {
        let port = config.port_number();
        let (verb, rest, doubt) = match (config.entry.freeze, config.entry.kind) {
            (_, EntryKind::Sandbox) => {
                ("wait", " for processes".to_owned(), "does the host let it rest")
            }
            (FreezeAt::Program, _) => {
                ("write", " to /dev/thaw".to_owned(), "does it ask to be frozen")
            }
            (FreezeAt::Signal(signal), _) => {
                ("get", format!(" {}", signal.name()), "does it send itself the signal")
            }
            (FreezeAt::Wait, EntryKind::Http | EntryKind::Tcp) => {
                ("wait", format!(" for a client on port {port}"), "does it listen there")
            }
            (FreezeAt::Wait, EntryKind::Udp) => {
                ("wait", format!(" for a datagram on port {port}"), "is its socket bound there")
            }
            (FreezeAt::Wait, EntryKind::Stdin) => {
                ("wait", " for standard input".to_owned(), "does it read from there")
            }
        };
        let past = match verb {
            "write" => "wrote",
            "get" => "got",
            _ => "waited",
        };
        let listens = config.entry.freeze == FreezeAt::Wait
            && matches!(config.entry.kind, EntryKind::Http | EntryKind::Tcp);
        let is_alone = config.volumes.is_empty() && config.egress.is_closed();
        Self {
            past: format!("{past}{rest}"),
            infinitive: format!("{verb}{rest}"),
            doubt,
            port: listens.then_some(port),
            wakers: if is_alone { Wakers::Timers } else { Wakers::Others },
        }
    }
}

/// Said when a program with secrets ends too early.
const NO_SECRETS: &str = "a build has no values of secrets: /run/secrets is empty. If the program \
    needs one, let it read the file when a request comes; or let it ask for its freeze before it \
    reads the file, with `freeze = \"program\"` in [entry] of thaw.toml";

/// Why the program did not come to where it should.
pub(super) enum Stop {
    Ended(GuestExit),
    NoEntryPoint(Duration, Option<Reason>),
    NotStarted(String),
    Died(String),
    /// It reached its limit; the most bytes that it has used, if the host counts them.
    OutOfMemory(Option<u64>),
    Training(String),
    /// Nobody waits for it any more.
    Unwanted,
    Io(io::Error),
}

/// A program in a sandbox, on its way to its entry point.
pub(super) struct Program {
    sandbox: Sandbox,
    parent: ZygoteParent,
    output: Output,
    flow: Flow,
    awaited: Awaited,
    /// What it may use.
    memory: ByteSize,
    /// Whether its copies get values of secrets, which a build does not have.
    has_secrets: bool,
    /// What it has not of its directory, if it has not all.
    absent: Option<Absent>,
    /// How a program comes into its sandbox that is missing there.
    lacking: Lacking,
    /// The number of the signal that freezes it, whenever this process gets it.
    signals: Option<mpsc::Receiver<u32>>,
    /// Whether somebody waits for it still; `None`: as long as it takes.
    wanted: Option<Arc<AtomicBool>>,
    /// The connections that copies will find reset, as the sandbox said last.
    losses: Option<Losses>,
    /// The files that die with a copy, as the sandbox said last.
    written: Option<WrittenFiles>,
}

impl Program {
    /// Starts the function's program over its files.
    pub(super) fn start(
        function: &StoredFunction,
        rootfs: &StoredRootfs,
        options: &BuildOptions,
    ) -> Result<Self, FreezeFailure> {
        Self::begin(None, 0, function, rootfs, options)
    }

    /// The same with an interpreter that is to become a runtime template, at the path where it looks for its program.
    pub(super) fn start_interpreter(
        function: &StoredFunction,
        rootfs: &StoredRootfs,
        options: &BuildOptions,
    ) -> Result<Self, FreezeFailure> {
        Self::begin(None, FLAG_START_PATH, function, rootfs, options)
    }

    /// The same in a copy of a runtime template, whose files `rootfs` extends.
    pub(super) fn start_in(
        template: &Template,
        function: &StoredFunction,
        rootfs: &StoredRootfs,
        options: &BuildOptions,
    ) -> Result<Self, FreezeFailure> {
        Self::begin(Some(template), 0, function, rootfs, options)
    }

    fn begin(
        template: Option<&Template>,
        flags: BootFlags,
        function: &StoredFunction,
        rootfs: &StoredRootfs,
        options: &BuildOptions,
    ) -> Result<Self, FreezeFailure> {
        let mut output = Output::new("program");
        let (stdout, stderr, console) = (output.pipe()?, output.pipe()?, output.pipe()?);
        let stdin = File::open("/dev/null")?;
        let config = &function.config;
        let signals = match config.entry.freeze {
            FreezeAt::Signal(signal) => Some(pass_signals(signal.number())?),
            _ => None,
        };

        let parent = start_parent(console, options.weak_limits)?;
        let (uid, gid) = config.ids();
        let volumes = match &options.volumes {
            Some(volumes) => volumes.of_new_function(config)?,
            None if config.volumes.is_empty() => Vec::new(),
            None => return Err(FreezeFailure::NoVolumes),
        };
        let mounts = config.volumes.iter().zip(volumes).map(|(volume, mount)| Mount {
            at: volume.path.clone().into(),
            kind: MountKind::Volume(mount),
        });
        let spec = StartSpec {
            program: None,
            argv: config.command.iter().map(Into::into).collect(),
            env: function.environment_strings(),
            cwd: config.workdir.clone().into(),
            hostname: config.name.as_str().into(),
            uid,
            gid,
            port: config.port_number(),
            entry_signal: config.entry.freeze.signal_number(),
            cpus: config.limits.cpu.get(),
            memory_limit: config.limits.memory.bytes(),
            process_limit: config.limits.processes.get(),
            // The author's limit is for requests, not for the start.
            cpu_time_limit: None,
            flags: flags
                | FLAG_FREEZE_AT_ENTRY
                | FLAG_SAY_LOSSES
                | config.entry_flags()
                | config.entry.freeze.flags()
                | function.cpu_baseline.flags()
                | thaw_home::debug::flags(),
            rootfs: rootfs.rootfs(),
            egress: config.egress.policy(),
            mounts: mounts.collect(),
            stdio: [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()],
            window: None,
        };
        // Afterwards the program alone holds the write ends.
        let zygote = match function.cpu_baseline.level() {
            None => parent.create_with(config.processes())?,
            Some(_) => parent.create_masked()?,
        };
        zygote.join(options.cores.as_ref())?;
        let sandbox = match template {
            None => zygote.start(&spec)?,
            Some(template) => {
                zygote.start_in(&template.plan_over(rootfs)?, &spec, template.writes())?
            }
        };
        let (flow, awaited) = (Flow::Calm, Awaited::new(config));
        Ok(Self {
            sandbox,
            parent,
            output,
            flow,
            awaited,
            memory: config.limits.memory,
            has_secrets: !config.secrets.is_default(),
            absent: Absent::of(function),
            lacking: Lacking::program_of(config),
            signals,
            wanted: options.wanted.clone(),
            losses: None,
            written: None,
        })
    }

    /// The sandbox that it runs in.
    pub(super) fn sandbox(&mut self) -> &mut Sandbox {
        &mut self.sandbox
    }

    /// Waits until the program is at its entry point, and not for longer than that can happen;
    /// without a time of the user's, not for longer than that can be expected.
    pub(super) fn run_to_entry(
        &mut self,
        timeout: Option<Duration>,
        on_event: &mut OnEvent<'_>,
    ) -> Result<EntryPoint, Stop> {
        let began = Instant::now();
        let mut doubt = Doubt::new(self.awaited.port, self.awaited.wakers);
        (self.losses, self.written) = (None, None);
        loop {
            match self.step(on_event)? {
                Some(Event::EntryPoint(entry)) => return Ok(entry),
                Some(Event::Activity(activity)) => doubt.heard_activity(activity),
                Some(Event::Described(described)) => doubt.heard(&described, began.elapsed()),
                Some(Event::Losses(losses)) => self.losses = Some(losses),
                Some(Event::Written(written)) => self.written = Some(written),
                // Events of other kinds may come without end.
                _ => {}
            }
            let waited = began.elapsed();
            if doubt.is_certain(waited, timeout) || waited >= timeout.unwrap_or(ENTRY_TIMEOUT) {
                return Err(Stop::NoEntryPoint(waited, doubt.reason()));
            }
            if let Some(reason) = doubt.says(waited) {
                let awaited = &self.awaited.infinitive;
                let most = match reason {
                    Reason::Nowhere { .. } | Reason::Busy { .. } => {
                        format!("; it has {} s in all", timeout.unwrap_or(ENTRY_TIMEOUT).as_secs())
                    }
                    Reason::Elsewhere(_) | Reason::Restless { .. } => String::new(),
                };
                let note = format!("the program does not {awaited} yet: {reason}{most}");
                on_event(BuildEvent::Note(&note));
            }
            if doubt.asks(waited) {
                self.sandbox.request_description().map_err(Stop::Io)?;
            }
        }
    }

    /// The next event that is no end, or `None` when there is none for a [`TICK`].
    /// Takes about that long at most, whatever the program prints.
    pub(super) fn step(&mut self, on_event: &mut OnEvent<'_>) -> Result<Option<Event>, Stop> {
        let patience = match self.flow {
            Flow::Calm => TICK,
            Flow::Flood => TICK_IN_A_FLOOD,
        };
        let event = self.sandbox.wait_event(Some(patience)).map_err(Stop::Io)?;
        self.flow = self.output.pass_on(on_event);
        if !is_wanted(self.wanted.as_ref()) {
            return Err(Stop::Unwanted);
        }
        if let Some(number) = self.signals.as_ref().and_then(|signals| signals.try_recv().ok()) {
            self.sandbox.send_signal(number).map_err(Stop::Io)?;
        }
        match event {
            Some(Event::Exit(exit)) => Err(Stop::Ended(exit)),
            Some(Event::Failed(reason)) => Err(Stop::NotStarted(reason)),
            Some(Event::Violation(violation)) => Err(Stop::Died(violation.to_string())),
            Some(Event::Hangup) => {
                let status = self.sandbox.wait().to_string();
                Err(match self.sandbox.limit_reached() {
                    Some(LimitReached::Memory) => Stop::OutOfMemory(self.sandbox.memory_peak()),
                    Some(limit) => Stop::Died(limit.to_string()),
                    None => Stop::Died(status),
                })
            }
            event => Ok(event),
        }
    }

    /// Ends it and says what went wrong.
    pub(super) fn fail(self, stop: Stop, on_event: &mut OnEvent<'_>) -> FreezeFailure {
        let Self { sandbox, parent, output, awaited, memory, has_secrets, absent, lacking, .. } =
            self;
        let events = sandbox.take_egress_events();
        drop((sandbox, parent));
        let output = output.finish(on_event);
        note_denials(&events, "`allow` in [egress]", on_event);
        if has_secrets && matches!(stop, Stop::Ended(_)) {
            on_event(BuildEvent::Note(NO_SECRETS));
        }
        if let (Stop::Ended(_), Some(absent)) = (&stop, absent)
            && let Some(note) = absent.note(&output)
        {
            on_event(BuildEvent::Note(&note));
        }
        match stop {
            Stop::Ended(exit) => {
                let how = match exit {
                    GuestExit::Code(code) => format!("with exit code {code}"),
                    GuestExit::Signal(signal) => format!("by signal {signal}"),
                };
                FreezeFailure::Ended { how, awaited, output }
            }
            Stop::NoEntryPoint(waited, reason) => {
                let Awaited { infinitive, doubt, .. } = awaited;
                let or_else = || format!("{doubt}, and is `--timeout` long enough?");
                let why = reason.map_or_else(or_else, |reason| reason.to_string());
                FreezeFailure::NoEntryPoint { awaited: infinitive, waited, why, output }
            }
            Stop::NotStarted(reason) => {
                let reason = lacking.explain(&reason).unwrap_or(reason);
                FreezeFailure::NotStarted { reason, output }
            }
            Stop::Died(reason) => FreezeFailure::Died { reason, output },
            Stop::OutOfMemory(peak) => FreezeFailure::OutOfMemory {
                awaited: awaited.past,
                memory,
                used: used(peak, memory),
                output,
            },
            Stop::Training(reason) => FreezeFailure::Training { reason, output },
            Stop::Unwanted => FreezeFailure::Unwanted,
            Stop::Io(error) => FreezeFailure::Io(error),
        }
    }

    /// Which connections copies will find reset.
    pub(super) fn losses(&self) -> Option<&Losses> {
        self.losses.as_ref()
    }

    /// Which files die with a copy.
    pub(super) fn written(&self) -> Option<&WrittenFiles> {
        self.written.as_ref()
    }

    /// The sandbox, at rest, and what must outlive it.
    pub(super) fn into_sandbox(mut self, on_event: &mut OnEvent<'_>) -> (Sandbox, ZygoteParent) {
        self.output.pass_on(on_event);
        self.output.note_dropped(on_event);
        note_denials(&self.sandbox.take_egress_events(), "`allow` in [egress]", on_event);
        (self.sandbox, self.parent)
    }
}

/// Whether somebody waits for a program still.
pub(super) fn is_wanted(wanted: Option<&Arc<AtomicBool>>) -> bool {
    wanted.is_none_or(|wanted| wanted.load(Ordering::Relaxed))
}

/// How much a program has used that was ended at its memory limit, for people.
fn used(peak: Option<u64>, limit: ByteSize) -> String {
    // Others may have had more in the same control group.
    let used = peak.map(|peak| ByteSize(peak).min(limit));
    used.map_or(String::new(), |used| format!(" (it used {})", used.approximate()))
}

/// Starts what makes sandboxes for a build; their kernels' last words go to `console`.
pub(super) fn start_parent(
    console: OwnedFd,
    weak_limits: WeakLimits,
) -> Result<ZygoteParent, FreezeFailure> {
    let mut console = File::from(console);
    let console = Console::lines(thaw_home::debug::console_rate(), move |output| {
        // Nobody reads any more when the build has ended.
        let _ = match output {
            ConsoleOutput::Line { text, .. } => writeln!(console, "{text}"),
            dropped => writeln!(console, "{dropped}"),
        };
    })?;
    let config =
        ZygoteConfig { weak_limits, ..ZygoteConfig::for_few(thaw_home::debug::kernel()?, console) };
    Ok(ZygoteParent::start(config)?)
}

/// Sends `number` over the channel whenever this process gets that signal.
fn pass_signals(number: u32) -> io::Result<mpsc::Receiver<u32>> {
    let (sender, receiver) = mpsc::sync_channel(SIGNALS_MAX);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let kind = SignalKind::from_raw(number as i32);
    let mut signals = runtime.block_on(async { signal(kind) })?;
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        runtime.block_on(async {
            // One that finds no room is one of many, of which the first ones do.
            while signals.recv().await.is_some()
                && !matches!(sender.try_send(number), Err(TrySendError::Disconnected(_)))
            {
            }
        });
    })?;
    Ok(receiver)
}
