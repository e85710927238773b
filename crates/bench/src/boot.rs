//! `thaw bench boot`: boots of functions, kind by kind, with the same program
//! started natively in between.

use super::client::{eventually, exchange, get};
use super::cold::PageCache;
use super::figure::{Bars, FigureError, Series};
use super::memory::ProcessMemory;
use super::native::NativeProgram;
use super::rig::{Rig, RigOptions};
use super::{BenchError, OnProgress, Percentiles};
use serde::Serialize;
use std::time::{Duration, Instant};
use thaw_home::config::Isolation;
use thaw_home::function::BuiltFunction;
use thaw_home::home::Home;
use thaw_node::boots::{BootKind, Phases};
use thaw_node::instance::WorkingSetUse;
use thaw_store::Store;

/// Boots that are not counted: they fill caches and record the working set.
const WARM_UPS: usize = 3;
/// Of many functions, each program is started natively until that has taken
/// this long; slow ones take seconds.
const NATIVE_BUDGET: Duration = Duration::from_secs(15);

/// What is measured.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// What the boots begin from. Cold: nothing of the image and the files is
    /// resident, as far as no other process maps them.
    pub boots: Vec<BootKind>,
    /// Boots of each kind that are counted.
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
    /// Starts that were counted.
    pub n: usize,
}

/// What was measured of one kind of boot of one function.
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
    /// From the first instruction to the first response byte: what the program
    /// took, the faults of its pages included.
    pub execution_us: Percentiles,
    /// The native starts; none if they were not asked for or did not succeed.
    pub native_us: Option<NativePercentiles>,
    /// What cold boots have read from the prefetch file; not part of the JSON.
    #[serde(skip)]
    pub prefetch: Option<PrefetchRead>,
    /// Memory that one idle instance has for itself after its first request, in
    /// KiB: its proportional set size without pages of files.
    pub pss_kib: u64,
}

/// The pages of the first request, read by one sequential reader with nothing cached.
#[derive(Clone, Copy, Debug)]
pub struct PrefetchRead {
    /// Bytes of the pages.
    pub bytes: u64,
    /// From the first `pread` to the end of the last, in microseconds.
    pub read_us: Percentiles,
}

/// What was measured of many functions.
#[derive(Clone, Debug, Serialize)]
pub struct BootsReport {
    /// Function by function, boot by boot.
    pub boots: Vec<BenchReport>,
    /// What could not be measured.
    pub failures: Vec<BootsFailure>,
}

/// What could not be measured, and why.
#[derive(Clone, Debug, Serialize)]
pub struct BootsFailure {
    /// The function.
    pub function: String,
    /// The kind of boot; none if it was the native start, or all of them.
    pub boot: Option<BootKind>,
    /// Why.
    pub reason: String,
}

/// Measures one kind of boot of a stored function. Needs no daemon and does not
/// disturb one.
///
/// # Errors
/// The function cannot be booted here, or does not answer.
pub fn boot(
    home: &Home,
    name: &str,
    kind: BootKind,
    options: &BenchOptions,
    progress: &mut OnProgress<'_>,
) -> Result<BenchReport, BenchError> {
    let store = Store::open(&home.store())?;
    let subject = Subject::new(home, &store, name, options)?;
    let mut native = subject.native(None)?;
    let mut turns = subject.take_turns(&[kind], native.as_mut(), progress)?;
    let turn = turns.pop().expect("one kind was asked for");
    if let Some(failure) = native.as_mut().and_then(|native| native.failure.take()) {
        return Err(failure);
    }
    subject.report(turn, native.as_ref())
}

/// Measures every kind of boot in `options` of the functions named, or of all
/// in the store. What fails is part of the report and stops nothing else.
///
/// # Errors
/// The store cannot be read, or has no function.
pub fn boots(
    home: &Home,
    names: &[String],
    options: &BenchOptions,
    progress: &mut OnProgress<'_>,
) -> Result<BootsReport, BenchError> {
    let store = Store::open(&home.store())?;
    let mut report = BootsReport { boots: Vec::new(), failures: Vec::new() };
    let names = match names {
        [] => all_functions(&store, &mut report)?,
        names => names.to_vec(),
    };
    for name in &names {
        let fail = |boot, error: BenchError| BootsFailure {
            function: name.clone(),
            boot,
            reason: error.to_string(),
        };
        let subject = match Subject::new(home, &store, name, options) {
            Ok(subject) => subject,
            Err(error) => {
                report.failures.push(fail(None, error));
                continue;
            }
        };
        // A cold boot empties the page cache that the others need.
        let (cold, resident): (Vec<_>, Vec<_>) =
            options.boots.iter().copied().partition(|kind| *kind == BootKind::Cold);
        for kinds in [cold, resident].into_iter().filter(|kinds| !kinds.is_empty()) {
            let mut native = match subject.native(Some(NATIVE_BUDGET)) {
                Ok(native) => native,
                Err(error) => {
                    report.failures.push(fail(None, error));
                    None
                }
            };
            match subject.take_turns(&kinds, native.as_mut(), progress) {
                Err(error) => report.failures.push(fail(None, error)),
                Ok(turns) => {
                    for turn in turns {
                        let kind = turn.kind;
                        match subject.report(turn, native.as_ref()) {
                            Ok(boot) => report.boots.push(boot),
                            Err(error) => report.failures.push(fail(Some(kind), error)),
                        }
                    }
                }
            }
            if let Some(error) = native.and_then(|native| native.failure) {
                report.failures.push(fail(None, error));
            }
        }
    }
    Ok(report)
}

fn all_functions(store: &Store, report: &mut BootsReport) -> Result<Vec<String>, BenchError> {
    let list = store.list_functions()?;
    for (name, error) in &list.damaged {
        let (function, reason) = (name.to_string(), error.to_string());
        report.failures.push(BootsFailure { function, boot: None, reason });
    }
    let mut names: Vec<_> = list.records.iter().map(|record| record.name.to_string()).collect();
    names.sort();
    match names.is_empty() && report.failures.is_empty() {
        true => Err(BenchError::NoFunctions),
        false => Ok(names),
    }
}

/// A function that is measured.
struct Subject<'a> {
    home: &'a Home,
    store: &'a Store,
    function: BuiltFunction,
    options: &'a BenchOptions,
    name: &'a str,
    request: Vec<u8>,
}

/// One kind of boot and its samples so far.
struct Turn {
    kind: BootKind,
    rig: Option<Rig>,
    phases: Vec<Phases>,
    /// Bytes and nanoseconds of each sequential read of the prefetch file.
    reads: Vec<(u64, u64)>,
    failure: Option<BenchError>,
}

/// Native starts and their samples so far, in nanoseconds.
struct Native {
    program: NativeProgram,
    samples: Vec<u64>,
    /// How much longer they may take.
    budget: Option<Duration>,
    failure: Option<BenchError>,
}

impl<'a> Subject<'a> {
    fn new(
        home: &'a Home,
        store: &'a Store,
        name: &'a str,
        options: &'a BenchOptions,
    ) -> Result<Self, BenchError> {
        let function = super::http_server(store, name)?;
        Ok(Self { home, store, function, options, name, request: get(name, &options.path) })
    }

    fn native(&self, budget: Option<Duration>) -> Result<Option<Native>, BenchError> {
        if !self.options.native {
            return Ok(None);
        }
        let program = NativeProgram::prepare(self.home, &self.function, &self.request)?;
        Ok(Some(Native { program, samples: Vec::new(), budget, failure: None }))
    }

    /// Boots of all kinds and native starts, turn by turn. A kind that fails
    /// drops out.
    fn take_turns(
        &self,
        kinds: &[BootKind],
        mut native: Option<&mut Native>,
        progress: &mut OnProgress<'_>,
    ) -> Result<Vec<Turn>, BenchError> {
        let cache = match kinds.contains(&BootKind::Cold) {
            true => Some(PageCache::of(self.home, self.store, &self.function)?),
            false => None,
        };
        let mut turns: Vec<_> = kinds.iter().map(|kind| self.turn(*kind)).collect();
        for round in 0..WARM_UPS + self.options.count {
            let counts = round >= WARM_UPS;
            if counts {
                let done = round - WARM_UPS + 1;
                progress(&format!("{}: {done} of {}", self.name, self.options.count));
            }
            for turn in &mut turns {
                if let Some(cache) = &cache {
                    cache.drop_image_and_blobs()?;
                    if counts {
                        // While nothing else is read: afterwards the page cache fills.
                        turn.reads.extend(cache.read_pages()?);
                        cache.drop_image_and_blobs()?;
                    }
                }
                turn.take(&self.request, counts);
            }
            if let Some(native) = &mut native {
                if let Some(cache) = &cache {
                    cache.drop_host_files();
                }
                native.take(counts);
            }
        }
        Ok(turns)
    }

    fn turn(&self, kind: BootKind) -> Turn {
        let mut options = RigOptions::single(kind);
        options.launch.working_set = self.options.working_set;
        let rig = Rig::start(self.home, self.store, &self.function, options);
        let (rig, failure) = match rig {
            Ok(rig) => (Some(rig), None),
            Err(error) => (None, Some(error)),
        };
        let phases = Vec::with_capacity(self.options.count);
        Turn { kind, rig, phases, reads: Vec::new(), failure }
    }

    fn report(&self, turn: Turn, native: Option<&Native>) -> Result<BenchReport, BenchError> {
        let Turn { kind, rig, phases, reads, failure } = turn;
        let mut rig = match (rig, failure) {
            (_, Some(failure)) => return Err(failure),
            (Some(rig), None) => rig,
            (None, None) => unreachable!("there is no rig only if it failed"),
        };
        let starts = native.filter(|native| !native.samples.is_empty());
        Ok(BenchReport {
            function: self.name.to_owned(),
            boot: kind,
            n: phases.len(),
            phases_us: summarize(&phases)?,
            execution_us: execution(&phases)?,
            native_us: starts.map(|native| NativePercentiles {
                first_byte: Percentiles::of_ns(&mut native.samples.clone()),
                n: native.samples.len(),
            }),
            prefetch: reads.last().map(|&(bytes, _)| PrefetchRead {
                bytes,
                read_us: Percentiles::of_ns(
                    &mut reads.iter().map(|&(_, ns)| ns).collect::<Vec<_>>(),
                ),
            }),
            pss_kib: memory_of_an_idle_instance(&mut rig, kind, &self.request)?,
        })
    }
}

impl Turn {
    fn take(&mut self, request: &[u8], counts: bool) {
        let Some(rig) = self.rig.as_ref().filter(|_| self.failure.is_none()) else { return };
        let booted = rig.boot(self.kind, request).and_then(|boot| {
            rig.wait_empty()?;
            Ok(boot.phases)
        });
        match booted {
            Ok(phases) if counts => self.phases.push(phases),
            Ok(_) => {}
            Err(error) => self.failure = Some(error),
        }
    }
}

impl Native {
    fn take(&mut self, counts: bool) {
        let is_enough = self.budget.is_some_and(|left| left.is_zero()) && !self.samples.is_empty();
        if is_enough || self.failure.is_some() {
            return;
        }
        let started = Instant::now();
        match self.program.sample() {
            Ok(ns) if counts => self.samples.push(ns),
            Ok(_) => {}
            Err(error) => self.failure = Some(error.into()),
        }
        self.budget = self.budget.map(|left| left.saturating_sub(started.elapsed()));
    }
}

/// Boots an instance that stays after its first request, and looks at it.
fn memory_of_an_idle_instance(
    rig: &mut Rig,
    kind: BootKind,
    request: &[u8],
) -> Result<u64, BenchError> {
    rig.serve_as(Isolation::Instance);
    rig.launcher.prepare(kind).map_err(BenchError::Launch)?;
    exchange(rig.address, request)?;
    let idle = || {
        let instances = rig.service.instances();
        instances.first().filter(|instance| instance.connections == 0).map(|i| i.pid)
    };
    let pid = eventually(idle).ok_or(BenchError::NoPhase("that it is idle"))?;
    Ok(ProcessMemory::of(pid)?.pss_kib)
}

/// Percentiles of one figure of all boots; the error says what was missing.
fn percentiles(
    phases: &[Phases],
    name: &'static str,
    figure: impl Fn(&Phases) -> Option<u64>,
) -> Result<Percentiles, BenchError> {
    let samples: Option<Vec<u64>> = phases.iter().map(figure).collect();
    let mut samples = samples.ok_or(BenchError::NoPhase(name))?;
    Ok(Percentiles::of_ns(&mut samples))
}

pub(crate) fn summarize(phases: &[Phases]) -> Result<PhasePercentiles, BenchError> {
    let of = |name, phase: fn(&Phases) -> Option<u64>| percentiles(phases, name, phase);
    Ok(PhasePercentiles {
        zygote: of("when its zygote was taken", |p| Some(p.zygote))?,
        received: of("when it had its boot command", |p| p.received)?,
        mapped: of("when its memory was mapped", |p| p.mapped)?,
        first_instruction: of("its first instruction", |p| p.first_instruction)?,
        first_byte: of("its first response byte", |p| p.first_byte)?,
    })
}

fn execution(phases: &[Phases]) -> Result<Percentiles, BenchError> {
    percentiles(phases, "its first response byte", |p| {
        Some(p.first_byte?.saturating_sub(p.first_instruction?))
    })
}

impl BootsReport {
    /// A figure of the medians: each function's boots and its native start, up
    /// to the first response byte, and the first instruction on the way.
    ///
    /// # Errors
    /// It cannot be drawn.
    pub fn svg(&self) -> Result<String, FigureError> {
        let mut categories: Vec<String> = Vec::new();
        for boot in &self.boots {
            if !categories.contains(&boot.function) {
                categories.push(boot.function.clone());
            }
        }
        let series = |name: &str, value: &dyn Fn(&BenchReport) -> Option<(f64, f64)>| {
            let of = |function: &String| {
                let boots = || self.boots.iter().filter(|boot| boot.function == *function);
                boots().find_map(value)
            };
            let found: Vec<_> = categories.iter().map(of).collect();
            Series {
                name: name.to_owned(),
                values: found.iter().map(|pair| pair.map(|(all, _)| all)).collect(),
                marks: found.iter().map(|pair| pair.map(|(_, mark)| mark)).collect(),
            }
        };
        let mut all = Vec::new();
        for kind in BootKind::OF_FUNCTIONS {
            all.push(series(kind.name(), &|boot| {
                let phases = &boot.phases_us;
                (boot.boot == kind).then_some((phases.first_byte.p50, phases.first_instruction.p50))
            }));
        }
        let native = |boot: &BenchReport| {
            let native = boot.native_us.filter(|_| boot.boot != BootKind::Cold)?;
            Some((native.first_byte.p50, native.first_byte.p50))
        };
        let mut natively = series("native start", &native);
        natively.marks.clear();
        all.push(natively);
        all.retain(|series| series.values.iter().any(Option::is_some));
        let bars = Bars {
            title: "To the first response byte (mark: first guest instruction), medians",
            axis: "µs since the connection was accepted",
            categories,
            series: all,
            logarithmic: true,
        };
        bars.svg()
    }
}
