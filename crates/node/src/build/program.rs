//! The program that is being built: running in a sandbox, watched until it is at
//! its entry point.

use super::freeze::FreezeFailure;
use super::import::read_lines;
use super::{BuildEvent, OnEvent};
use crate::config::{EntryKind, FreezeAt, FunctionConfig};
use crate::function::StoredFunction;
use crate::rootfs::StoredRootfs;
use rustix::pipe::{PipeFlags, pipe_with};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};
use thaw_abi::control::{EntryPoint, FLAG_FREEZE_AT_ENTRY};
use thaw_sandbox::{
    Console, ConsoleOutput, Event, GuestExit, Sandbox, StartSpec, ZygoteConfig, ZygoteParent,
};
use tokio::signal::unix::{SignalKind, signal};

/// Lines of output that an error repeats.
const LAST_LINES: usize = 20;
/// How often output is passed on while the program runs.
pub(super) const TICK: Duration = Duration::from_millis(50);

/// What a program has to do to be frozen, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Awaited {
    /// As in "before it waited …".
    pub(super) past: String,
    /// As in "it did not wait …".
    pub(super) infinitive: String,
    /// What to look at if it does not.
    pub(super) doubt: &'static str,
}

impl Awaited {
    fn new(config: &FunctionConfig) -> Self {
        let port = config.port_number();
        let (verb, rest, doubt) = match (config.entry.freeze, config.entry.kind) {
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
        Self { past: format!("{past}{rest}"), infinitive: format!("{verb}{rest}"), doubt }
    }
}

/// Why the program did not come to where it should.
pub(super) enum Stop {
    Ended(GuestExit),
    NoEntryPoint(Duration),
    NotStarted(String),
    Died(String),
    Training(String),
    Io(io::Error),
}

/// A program in a sandbox, on its way to its entry point.
pub(super) struct Program {
    sandbox: Sandbox,
    parent: ZygoteParent,
    output: Output,
    awaited: Awaited,
    /// The number of the signal that freezes it, whenever this process gets it.
    signals: Option<mpsc::Receiver<u32>>,
}

impl Program {
    /// Starts the function's program over its files.
    pub(super) fn start(
        function: &StoredFunction,
        rootfs: &StoredRootfs,
    ) -> Result<Self, FreezeFailure> {
        let (sender, lines) = mpsc::channel();
        let pipe = || -> io::Result<OwnedFd> {
            let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
            read_lines(File::from(reader), sender.clone());
            Ok(writer)
        };
        let (stdout, stderr, console) = (pipe()?, pipe()?, pipe()?);
        drop(sender);
        let stdin = File::open("/dev/null")?;
        let config = &function.config;
        let signals = match config.entry.freeze {
            FreezeAt::Signal(signal) => Some(pass_signals(signal.number())?),
            _ => None,
        };

        let mut console = File::from(console);
        let console = Console::lines(crate::debug::console_rate(), move |output| {
            // Nobody reads any more when the build has ended.
            let _ = match output {
                ConsoleOutput::Line { text, .. } => writeln!(console, "{text}"),
                dropped => writeln!(console, "{dropped}"),
            };
        })?;
        let parent = ZygoteParent::start(ZygoteConfig::new(crate::debug::kernel()?, console))?;
        let spec = StartSpec {
            program: None,
            argv: config.command.iter().map(Into::into).collect(),
            env: function.environment_strings(),
            cwd: config.workdir.clone().into(),
            hostname: config.name.as_str().into(),
            uid: 0,
            gid: 0,
            port: config.port_number(),
            entry_signal: config.entry.freeze.signal_number(),
            cpus: config.limits.cpu.get(),
            memory_limit: config.limits.memory.bytes(),
            // The author's limit is for requests, not for the start.
            cpu_time_limit: None,
            flags: FLAG_FREEZE_AT_ENTRY
                | config.entry_flags()
                | config.entry.freeze.flags()
                | crate::debug::flags(),
            rootfs: rootfs.rootfs(),
            egress: config.egress.policy(),
            mounts: Vec::new(),
            stdio: [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()],
            window: None,
        };
        // Afterwards the program alone holds the write ends.
        let sandbox = parent.create()?.start(&spec)?;
        let output = Output { lines, kept: VecDeque::new() };
        Ok(Self { sandbox, parent, output, awaited: Awaited::new(config), signals })
    }

    /// The sandbox that it runs in.
    pub(super) fn sandbox(&mut self) -> &mut Sandbox {
        &mut self.sandbox
    }

    /// Waits until the program is at its entry point.
    pub(super) fn run_to_entry(
        &mut self,
        timeout: Duration,
        on_event: &mut OnEvent<'_>,
    ) -> Result<EntryPoint, Stop> {
        let deadline = Instant::now() + timeout;
        loop {
            match self.step(on_event)? {
                Some(Event::EntryPoint(entry)) => return Ok(entry),
                None if Instant::now() >= deadline => return Err(Stop::NoEntryPoint(timeout)),
                _ => {}
            }
        }
    }

    /// The next event that is no end, or `None` when there is none for a [`TICK`].
    pub(super) fn step(&mut self, on_event: &mut OnEvent<'_>) -> Result<Option<Event>, Stop> {
        let event = self.sandbox.wait_event(Some(TICK)).map_err(Stop::Io)?;
        self.output.pass_on(on_event);
        if let Some(number) = self.signals.as_ref().and_then(|signals| signals.try_recv().ok()) {
            self.sandbox.send_signal(number).map_err(Stop::Io)?;
        }
        match event {
            Some(Event::Exit(exit)) => Err(Stop::Ended(exit)),
            Some(Event::Failed(reason)) => Err(Stop::NotStarted(reason)),
            Some(Event::Violation(violation)) => Err(Stop::Died(violation.to_string())),
            Some(Event::Hangup) => Err(Stop::Died(self.sandbox.wait().to_string())),
            event => Ok(event),
        }
    }

    /// Ends it and says what went wrong.
    pub(super) fn fail(self, stop: Stop, on_event: &mut OnEvent<'_>) -> FreezeFailure {
        let Self { sandbox, parent, output, awaited, .. } = self;
        drop((sandbox, parent));
        let output = output.last(on_event);
        match stop {
            Stop::Ended(exit) => {
                let how = match exit {
                    GuestExit::Code(code) => format!("with exit code {code}"),
                    GuestExit::Signal(signal) => format!("by signal {signal}"),
                };
                FreezeFailure::Ended { how, awaited, output }
            }
            Stop::NoEntryPoint(timeout) => FreezeFailure::NoEntryPoint { awaited, timeout, output },
            Stop::NotStarted(reason) => FreezeFailure::NotStarted { reason, output },
            Stop::Died(reason) => FreezeFailure::Died { reason, output },
            Stop::Training(reason) => FreezeFailure::Training { reason, output },
            Stop::Io(error) => FreezeFailure::Io(error),
        }
    }

    /// The sandbox, at rest, and what must outlive it.
    pub(super) fn into_sandbox(mut self, on_event: &mut OnEvent<'_>) -> (Sandbox, ZygoteParent) {
        self.output.pass_on(on_event);
        (self.sandbox, self.parent)
    }
}

/// Sends `number` over the channel whenever this process gets that signal.
fn pass_signals(number: u32) -> io::Result<mpsc::Receiver<u32>> {
    let (sender, receiver) = mpsc::channel();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let kind = SignalKind::from_raw(number as i32);
    let mut signals = runtime.block_on(async { signal(kind) })?;
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        runtime.block_on(async {
            while signals.recv().await.is_some() && sender.send(number).is_ok() {}
        });
    })?;
    Ok(receiver)
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
