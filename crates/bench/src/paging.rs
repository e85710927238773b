//! `thaw bench paging`: cold boots by strategy (Metropolis' Figure 5): what brings the pages of an
//! image in, and when.

use super::client::{exchange, get};
use super::cold::PageCache;
use super::figure::{Bars, FigureError, Series};
use super::rig::{Rig, RigOptions};
use super::{BenchError, BootsFailure, OnProgress, Percentiles};
use serde::Serialize;
use std::time::{Duration, Instant};
use thaw_home::function::BuiltFunction;
use thaw_home::home::Home;
use thaw_node::boots::BootKind;
use thaw_node::instance::WorkingSetUse;
use thaw_sandbox::PopulatePolicy;
use thaw_store::Store;

/// Boots that are not counted: they record the working set.
const WARM_UPS: usize = 3;
/// Behind the neighbour's request, its files are still being read.
const REST: Duration = Duration::from_millis(100);

/// What is measured.
#[derive(Clone, Debug)]
pub struct PagingOptions {
    /// The strategies, turn by turn.
    pub strategies: Vec<Strategy>,
    /// Boots of each function by each strategy that are counted.
    pub count: usize,
    /// Path of the requests.
    pub path: String,
}

/// What brings pages in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Strategy {
    /// All memory of the image is read before the boot.
    Eager,
    /// Pages are read when they are touched.
    Lazy,
    /// The recorded working set is read from its file during the boot (REAP).
    Prefault,
    /// The image has never run on this machine, and neither has another: nothing is known of it.
    First,
    /// The same, but the function with most files in common has just served a request.
    Shared,
    /// Everything is in memory.
    Resident,
}

impl Strategy {
    /// All.
    pub const ALL: [Self; 6] =
        [Self::Eager, Self::Lazy, Self::Prefault, Self::First, Self::Shared, Self::Resident];

    /// The name, as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Eager => "eager",
            Self::Lazy => "lazy",
            Self::Prefault => "prefault",
            Self::First => "first",
            Self::Shared => "shared",
            Self::Resident => "resident",
        }
    }

    fn working_set(self) -> WorkingSetUse {
        match self {
            Self::Eager | Self::Lazy => WorkingSetUse::Off,
            Self::First | Self::Shared => WorkingSetUse::Unknown,
            Self::Prefault | Self::Resident => WorkingSetUse::Populate(PopulatePolicy::Write),
        }
    }
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct PagingReport {
    /// Boots of each function by each strategy.
    pub n: usize,
    /// The functions.
    pub functions: Vec<PagedFunction>,
    /// What could not be measured.
    pub failures: Vec<BootsFailure>,
}

/// A function by every strategy.
#[derive(Clone, Debug, Serialize)]
pub struct PagedFunction {
    /// The function.
    pub function: String,
    /// The one that warms it up with [`Strategy::Shared`]; none: it shares files with nobody.
    pub neighbour: Option<String>,
    /// Bytes of files that they share.
    pub neighbour_bytes: u64,
    /// By strategy.
    pub strategies: Vec<Paged>,
}

/// Requests to a function by one strategy.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Paged {
    /// The strategy.
    pub strategy: Strategy,
    /// From connecting to the end of the response, in microseconds; the reading before an eager boot
    /// included.
    pub response_us: Percentiles,
    /// Bytes that were read before an eager boot.
    pub read_bytes: u64,
    /// Median by that with everything in memory; 0 without that strategy.
    pub ratio: f64,
}

/// Measures functions, or all in the store. What fails is part of the report and stops nothing else.
///
/// # Errors
/// The store cannot be read, or has no function.
pub fn paging(
    home: &Home,
    names: &[String],
    options: &PagingOptions,
    progress: &mut OnProgress<'_>,
) -> Result<PagingReport, BenchError> {
    let store = Store::open(&home.store())?;
    let mut report = PagingReport { n: options.count, functions: Vec::new(), failures: Vec::new() };
    let (all, broken) = super::http_servers(&store, &[])?;
    let wanted: Vec<String> = match names {
        [] => all.iter().map(|function| function.function.config.name.to_string()).collect(),
        names => names.to_vec(),
    };
    report.failures.extend(broken.into_iter().filter(|_| names.is_empty()));
    let neighbours = Neighbours::of(home, &store, all)?;
    for name in wanted {
        progress(&name);
        let paged = Subject::new(home, &store, &name, &neighbours, options)
            .and_then(|mut subject| subject.measure(options, progress));
        match paged {
            Ok(paged) => report.functions.push(paged),
            Err(error) => {
                report.failures.push(BootsFailure {
                    function: name,
                    boot: Some(BootKind::Cold),
                    reason: error.to_string(),
                });
            }
        }
    }
    Ok(report)
}

/// The functions of the store and their files.
struct Neighbours(Vec<(BuiltFunction, PageCache)>);

impl Neighbours {
    fn of(home: &Home, store: &Store, all: Vec<BuiltFunction>) -> Result<Self, BenchError> {
        let with_files = |function: BuiltFunction| {
            let files = PageCache::of(home, store, &function)?;
            Ok((function, files))
        };
        all.into_iter().map(with_files).collect::<Result<_, BenchError>>().map(Self)
    }

    /// The one with most bytes of files in common with a function.
    fn nearest(
        &self,
        name: &str,
        files: &PageCache,
    ) -> Result<Option<(&BuiltFunction, &PageCache, u64)>, BenchError> {
        let mut nearest = None;
        for (function, others) in &self.0 {
            let bytes = files.bytes_shared_with(others)?;
            let is_nearer = nearest.is_none_or(|(_, _, most)| bytes > most);
            if function.function.config.name.as_str() != name && bytes > 0 && is_nearer {
                nearest = Some((function, others, bytes));
            }
        }
        Ok(nearest)
    }
}

/// A function that is measured.
struct Subject<'a> {
    name: String,
    request: Vec<u8>,
    files: PageCache,
    neighbour: Option<Neighbour<'a>>,
    rigs: Vec<(Strategy, Rig)>,
}

struct Neighbour<'a> {
    name: String,
    request: Vec<u8>,
    files: &'a PageCache,
    bytes: u64,
    rig: Rig,
}

impl<'a> Subject<'a> {
    fn new(
        home: &Home,
        store: &Store,
        name: &str,
        neighbours: &'a Neighbours,
        options: &PagingOptions,
    ) -> Result<Self, BenchError> {
        let function = super::http_server(store, name)?;
        let files = PageCache::of(home, store, &function)?;
        let start = |function: &BuiltFunction, working_set| {
            let mut options = RigOptions::single(BootKind::Warm);
            options.launch.working_set = working_set;
            Rig::start(home, store, function, options)
        };
        let wants_neighbour = options.strategies.contains(&Strategy::Shared);
        let neighbour = match neighbours.nearest(name, &files)?.filter(|_| wants_neighbour) {
            Some((function, files, bytes)) => {
                let name = function.function.config.name.to_string();
                let rig = start(function, Strategy::Prefault.working_set())?;
                let request = get(&name, "/");
                Some(Neighbour { name, request, files, bytes, rig })
            }
            None => None,
        };
        let mut rigs = Vec::new();
        for &strategy in &options.strategies {
            if strategy != Strategy::Shared || neighbour.is_some() {
                rigs.push((strategy, start(&function, strategy.working_set())?));
            }
        }
        let request = get(name, &options.path);
        Ok(Self { name: name.to_owned(), request, files, neighbour, rigs })
    }

    fn measure(
        &mut self,
        options: &PagingOptions,
        progress: &mut OnProgress<'_>,
    ) -> Result<PagedFunction, BenchError> {
        let mut samples = vec![(Vec::new(), 0); self.rigs.len()];
        for round in 0..WARM_UPS + options.count {
            progress(&format!("{}: {round} of {}", self.name, WARM_UPS + options.count));
            for (at, (strategy, rig)) in self.rigs.iter().enumerate() {
                let (took, read) = self.turn(*strategy, rig)?;
                if round >= WARM_UPS {
                    samples[at].0.push(took.as_nanos() as u64);
                    samples[at].1 = read;
                }
            }
        }
        let of_rigs = self.rigs.iter().zip(samples);
        let mut strategies: Vec<Paged> = of_rigs
            .map(|((strategy, _), (mut samples, read_bytes))| {
                let response_us = Percentiles::of_ns(&mut samples);
                Paged { strategy: *strategy, response_us, read_bytes, ratio: 0.0 }
            })
            .collect();
        let resident = strategies.iter().find(|paged| paged.strategy == Strategy::Resident);
        if let Some(least) = resident.map(|paged| paged.response_us.p50) {
            for paged in &mut strategies {
                paged.ratio = (paged.response_us.p50 / least * 100.0).round() / 100.0;
            }
        }
        Ok(PagedFunction {
            function: self.name.clone(),
            neighbour: self.neighbour.as_ref().map(|neighbour| neighbour.name.clone()),
            neighbour_bytes: self.neighbour.as_ref().map_or(0, |neighbour| neighbour.bytes),
            strategies,
        })
    }

    /// One request, and the bytes that were read for it before.
    fn turn(&self, strategy: Strategy, rig: &Rig) -> Result<(Duration, u64), BenchError> {
        rig.pool.wait_full().map_err(thaw_daemon::daemon::ServeError::from)?;
        match (strategy, &self.neighbour) {
            (Strategy::Resident, _) => {
                // The request before this one has brought everything in.
                self.ask(rig)?;
            }
            (Strategy::Shared, Some(neighbour)) => {
                neighbour.files.drop_image_and_blobs()?;
                self.files.drop_image_and_blobs()?;
                exchange(neighbour.rig.address, &neighbour.request)?;
                neighbour.rig.wait_empty()?;
                std::thread::sleep(REST);
                self.files.drop_own(neighbour.files)?;
            }
            _ => self.files.drop_image_and_blobs()?,
        }
        let started = Instant::now();
        let read = match strategy {
            Strategy::Eager => self.files.read_all(rig.launcher.image().mappings())?,
            _ => 0,
        };
        self.ask(rig)?;
        let took = started.elapsed();
        rig.wait_empty()?;
        Ok((took, read))
    }

    fn ask(&self, rig: &Rig) -> Result<(), BenchError> {
        exchange(rig.address, &self.request)?;
        Ok(())
    }
}

impl PagingReport {
    /// A figure of the medians, function by function.
    ///
    /// # Errors
    /// It cannot be drawn.
    pub fn svg(&self) -> Result<String, FigureError> {
        let median = |function: &PagedFunction, strategy| {
            let paged = function.strategies.iter().find(|paged| paged.strategy == strategy);
            paged.map(|paged| paged.response_us.p50)
        };
        let series = |strategy: Strategy| Series {
            name: strategy.name().to_owned(),
            values: self.functions.iter().map(|function| median(function, strategy)).collect(),
            marks: Vec::new(),
        };
        let bars = Bars {
            title: "Cold boots by paging strategy, medians",
            axis: "µs from connecting to the end of the response",
            categories: self.functions.iter().map(|paged| paged.function.clone()).collect(),
            series: Strategy::ALL.into_iter().map(series).collect(),
            logarithmic: true,
        };
        bars.svg()
    }
}
