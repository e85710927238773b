//! The memory of many sandboxes: idle ones with a shell each, and paused ones.

use super::{BenchError, OnProgress, Subject};
use crate::memory::{HostMemory, TreeMemory};
use serde::Serialize;
use std::time::{Duration, Instant};
use thaw_daemon::daemon::ServeError;
use thaw_home::function::BuiltFunction;
use thaw_home::home::Home;
use thaw_node::asleep::AsleepSpace;
use thaw_node::boots::BootKind;
use thaw_node::remote::{ExecRequest, ExecState};
use thaw_node::sandboxes::Started;
use thaw_store::Store;

/// How long sandboxes are left alone before their memory is counted.
const SETTLED: Duration = Duration::from_secs(2);
/// Rows and columns of the shells' terminals.
const TERMINAL: (u16, u16) = (24, 80);

/// What is measured.
#[derive(Clone, Debug)]
pub struct PopulationOptions {
    /// Idle sandboxes at the same time.
    pub idle: usize,
    /// Paused ones at the same time.
    pub paused: usize,
    /// What runs in those that are paused.
    pub paused_with: PausedWith,
    /// The shell. It waits at a terminal once it has printed something.
    pub shell: Vec<String>,
}

/// What runs in a sandbox that is paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PausedWith {
    /// A shell, which is there again when its sandbox wakes.
    Shell,
    /// Nothing that was started from outside.
    Nothing,
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct PopulationReport {
    /// The function whose image sandboxes are copies of.
    pub function: String,
    /// Sandboxes with a shell that waits.
    pub idle: Option<PopulationMemory>,
    /// Sandboxes that are paused.
    pub paused: Option<PopulationMemory>,
}

/// Memory of sandboxes that live at the same time, in KiB.
#[derive(Clone, Debug, Serialize)]
pub struct PopulationMemory {
    /// Sandboxes.
    pub n: usize,
    /// Why there are not as many as wanted.
    pub failure: Option<String>,
    /// Milliseconds that it took to make one, on average.
    pub made_ms: f64,
    /// Pages and page tables of their processes, and what this process, which stands for the
    /// daemon, has grown by. Pages of files do not count.
    pub own: TreeMemory,
    /// What the host's kernel has more than before: objects, stacks, counters. Other work on the
    /// machine counts, too.
    pub kernel_kib: i64,
    /// `own` and `kernel_kib` together, of one sandbox.
    pub each_kib: f64,
    /// What the host uses more than before. Other work on the machine counts, too.
    pub host: HostMemory,
}

/// Counts the memory of sandboxes of a stored function.
///
/// # Errors
/// The function cannot be booted here, or not even the first sandbox can be made.
pub fn population(
    home: &Home,
    name: &str,
    options: &PopulationOptions,
    progress: &mut OnProgress<'_>,
) -> Result<PopulationReport, BenchError> {
    thaw_daemon::daemon::raise_file_limit();
    let store = Store::open(&home.store())?;
    let function = BuiltFunction::read(&store, name)?;
    let subject = |wanted: usize| {
        let instances = u32::try_from(wanted).unwrap_or(u32::MAX).saturating_add(16);
        let subject = Subject::for_many(home, &store, &function, instances, BootKind::Warm)?;
        let asleep = home.work("bench-asleep").map_err(ServeError::from)?;
        subject.rig.services.shared().sleep_in(AsleepSpace::at(asleep));
        Ok::<_, BenchError>(subject)
    };
    let mut kind = |label: &str, wanted: usize, state: State| {
        let mut say = |done: usize| progress(&format!("{name}, {label}: {done} of {wanted}"));
        match wanted {
            0 => Ok(None),
            _ => Crowd::of(&subject(wanted)?, options, state).measure(wanted, &mut say).map(Some),
        }
    };
    let idle = kind("idle", options.idle, State::Idle)?;
    let paused = kind("paused", options.paused, State::Paused)?;
    Ok(PopulationReport { function: name.to_owned(), idle, paused })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    Paused,
}

/// Sandboxes of one kind.
struct Crowd<'a> {
    subject: &'a Subject,
    options: &'a PopulationOptions,
    state: State,
    shells: Vec<Started>,
}

impl<'a> Crowd<'a> {
    fn of(subject: &'a Subject, options: &'a PopulationOptions, state: State) -> Self {
        Self { subject, options, state, shells: Vec::new() }
    }

    fn measure(
        mut self,
        wanted: usize,
        progress: &mut dyn FnMut(usize),
    ) -> Result<PopulationMemory, BenchError> {
        // The first one makes what the others use again.
        let first = self.add()?;
        self.subject.end(&first)?;
        self.shells.clear();
        let before = (HostMemory::now()?, TreeMemory::now()?);
        let began = Instant::now();
        let (mut made, mut failure) = (0, None);
        while made < wanted && failure.is_none() {
            match self.add() {
                Ok(_) => made += 1,
                Err(error) => failure = Some(error.to_string()),
            }
            progress(made);
        }
        let made_ms = began.elapsed().as_secs_f64() * 1000.0 / made.max(1) as f64;
        std::thread::sleep(SETTLED);
        let (host, own) = (HostMemory::now()?.since(before.0), TreeMemory::now()?.since(before.1));
        let kernel_kib = host.slab_kib + host.kernel_stacks_kib + host.per_cpu_kib;
        let all_kib = own.pss_kib + own.page_tables_kib + kernel_kib;
        let each_kib = (all_kib as f64 / made.max(1) as f64 * 10.0).round() / 10.0;
        failure = failure.or_else(|| self.complaint(made));
        let made_ms = (made_ms * 10.0).round() / 10.0;
        Ok(PopulationMemory { n: made, failure, made_ms, own, kernel_kib, each_kib, host })
    }

    /// One sandbox more, in its state; its name.
    fn add(&mut self) -> Result<String, BenchError> {
        let (subject, node) = (self.subject, &self.subject.sandboxes);
        let name = subject.new_sandbox()?;
        if self.state == State::Idle || self.options.paused_with == PausedWith::Shell {
            let request = ExecRequest {
                argv: self.options.shell.clone(),
                terminal: Some(TERMINAL),
                stdin: true,
                ..ExecRequest::default()
            };
            self.shells.push(subject.rig.block_on(node.start(&name, &request))?.0);
        }
        if self.state == State::Paused {
            let instance = subject.rig.block_on(node.pause(&name))?.instance;
            subject.rig.block_on(subject.given_back(&name))?;
            // As it does by itself after `sleep_after` of its function.
            let asleep = subject.rig.block_on(subject.rig.service.put_to_sleep(Some(instance)));
            asleep.map_err(|why| BenchError::NotHibernated { why })?;
        }
        Ok(name)
    }

    /// What is not as it should be with so many sandboxes.
    fn complaint(&self, made: usize) -> Option<String> {
        let there = self.subject.sandboxes.list().len();
        if there < made {
            return Some(format!("{} sandboxes ended by themselves", made - there));
        }
        let is_over = |shell: &&Started| !matches!(shell.state(), ExecState::Running { .. });
        let over = self.shells.iter().filter(is_over).count();
        (over > 0).then(|| format!("{over} shells ended by themselves"))
    }
}
