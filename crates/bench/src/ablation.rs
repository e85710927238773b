//! `thaw bench ablation`: boots with one technique left out at a time
//! (Catalyzer's Figure 12).

use super::client::get;
use super::cold::PageCache;
use super::figure::{Bars, FigureError, Series};
use super::rig::{Rig, RigOptions};
use super::{BenchError, OnProgress, Percentiles};
use serde::Serialize;
use thaw_build::build::{BuildOptions, freeze_aside};
use thaw_home::function::BuiltFunction;
use thaw_home::home::Home;
use thaw_node::boots::{BootKind, Phases};
use thaw_node::instance::WorkingSetUse;
use thaw_sandbox::MergePolicy;
use thaw_store::Store;

/// Boots that are not counted.
const WARM_UPS: usize = 3;

/// What is measured.
#[derive(Clone, Debug)]
pub struct AblationOptions {
    /// Cold or warm: the others do not begin from an image.
    pub boot: BootKind,
    /// Boots without each technique that are counted.
    pub count: usize,
    /// Path of the requests.
    pub path: String,
}

/// What can be left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Technique {
    /// Mappings that wait until they are touched (overlay memory).
    LazyMapping,
    /// Mapping and populating what the first request touched.
    WorkingSet,
    /// Descriptors that come with the boot command.
    IoCache,
    /// Processes made before they are wanted.
    Zygotes,
    /// Merging of neighbouring mappings at the freeze.
    Merging,
}

impl Technique {
    /// All.
    pub const ALL: [Self; 5] =
        [Self::LazyMapping, Self::WorkingSet, Self::IoCache, Self::Zygotes, Self::Merging];

    /// The name, as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::LazyMapping => "lazy-mapping",
            Self::WorkingSet => "working-set",
            Self::IoCache => "io-cache",
            Self::Zygotes => "zygotes",
            Self::Merging => "merging",
        }
    }
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct AblationReport {
    /// The function.
    pub function: String,
    /// What the boots began from.
    pub boot: BootKind,
    /// Boots of each variant.
    pub n: usize,
    /// The first has everything.
    pub variants: Vec<Variant>,
}

/// Boots without one technique, in microseconds since the connection was
/// accepted.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Variant {
    /// What was left out.
    pub without: Option<Technique>,
    /// Mappings of the image.
    pub mappings: usize,
    /// To the guest's first instruction.
    pub first_instruction_us: Percentiles,
    /// To the first response byte.
    pub first_byte_us: Percentiles,
    /// Median to the first instruction by that with everything.
    pub ratio_first_instruction: f64,
    /// The same to the first response byte.
    pub ratio_first_byte: f64,
}

/// A variant while it is measured.
struct Subject {
    without: Option<Technique>,
    rig: Rig,
    cache: PageCache,
    phases: Vec<Phases>,
}

/// Measures a stored function; all variants take turns.
///
/// # Errors
/// The function cannot be booted here or frozen anew, or does not answer.
pub fn ablation(
    home: &Home,
    name: &str,
    options: &AblationOptions,
    progress: &mut OnProgress<'_>,
) -> Result<AblationReport, BenchError> {
    let store = Store::open(&home.store())?;
    let function = super::http_server(&store, name)?;
    let request = get(name, &options.path);
    let mut subjects = Vec::new();
    for without in [None].into_iter().chain(Technique::ALL.map(Some)) {
        progress(&format!("{name}: preparing boots without {}", describe(without)));
        subjects.push(Subject::start(home, &store, &function, options.boot, without)?);
    }
    for round in 0..WARM_UPS + options.count {
        let counts = round >= WARM_UPS;
        for subject in &mut subjects {
            if options.boot == BootKind::Cold {
                subject.cache.drop_image_and_blobs()?;
            }
            let boot = subject.rig.boot(options.boot, &request)?;
            subject.rig.wait_empty()?;
            if counts {
                subject.phases.push(boot.phases);
            }
        }
        if counts {
            progress(&format!("{name}: {} of {}", round - WARM_UPS + 1, options.count));
        }
    }
    let variants = compare(&subjects)?;
    Ok(AblationReport { function: name.to_owned(), boot: options.boot, n: options.count, variants })
}

fn describe(without: Option<Technique>) -> &'static str {
    without.map_or("nothing", Technique::name)
}

impl Subject {
    fn start(
        home: &Home,
        store: &Store,
        function: &BuiltFunction,
        boot: BootKind,
        without: Option<Technique>,
    ) -> Result<Self, BenchError> {
        let mut options = RigOptions::single(boot);
        let mut own = None;
        match without {
            None => {}
            Some(Technique::LazyMapping) => options.launch.techniques.lazy_mapping = false,
            Some(Technique::WorkingSet) => options.launch.working_set = WorkingSetUse::Off,
            Some(Technique::IoCache) => options.launch.techniques.io_cache = false,
            Some(Technique::Zygotes) => options.zygotes = 0,
            Some(Technique::Merging) => {
                let merge = MergePolicy { clean_gap_pages: 0, zero_gap_pages: 0 };
                let build = BuildOptions { merge, ..Default::default() };
                own = Some(freeze_aside(store, function, &build)?);
            }
        }
        let function = own.as_ref().unwrap_or(function);
        let rig = Rig::start(home, store, function, options)?;
        let cache = PageCache::of(home, store, function)?;
        Ok(Self { without, rig, cache, phases: Vec::new() })
    }
}

fn compare(subjects: &[Subject]) -> Result<Vec<Variant>, BenchError> {
    let mut variants: Vec<Variant> = Vec::new();
    for subject in subjects {
        let summary = super::boot::summarize(&subject.phases)?;
        let (first_instruction_us, first_byte_us) = (summary.first_instruction, summary.first_byte);
        let all_on = variants.first();
        let ratio = |of: &Percentiles, by: Option<&Percentiles>| {
            by.map_or(1.0, |by| (of.p50 / by.p50.max(f64::MIN_POSITIVE) * 100.0).round() / 100.0)
        };
        variants.push(Variant {
            without: subject.without,
            mappings: subject.rig.launcher.image().mappings().len(),
            first_instruction_us,
            first_byte_us,
            ratio_first_instruction: ratio(
                &first_instruction_us,
                all_on.map(|all| &all.first_instruction_us),
            ),
            ratio_first_byte: ratio(&first_byte_us, all_on.map(|all| &all.first_byte_us)),
        });
    }
    Ok(variants)
}

impl AblationReport {
    /// A figure of the medians.
    ///
    /// # Errors
    /// It cannot be drawn.
    pub fn svg(&self) -> Result<String, FigureError> {
        let series = |name: &str, of: fn(&Variant) -> f64| Series {
            name: name.to_owned(),
            values: self.variants.iter().map(|variant| Some(of(variant))).collect(),
            marks: Vec::new(),
        };
        let category = |variant: &Variant| match variant.without {
            None => "everything".to_owned(),
            Some(technique) => format!("no {}", technique.name()),
        };
        let title = format!("{}, {} boots, medians", self.function, self.boot.name());
        let bars = Bars {
            title: &title,
            axis: "µs since the connection was accepted",
            categories: self.variants.iter().map(category).collect(),
            series: vec![
                series("first instruction", |variant| variant.first_instruction_us.p50),
                series("first response byte", |variant| variant.first_byte_us.p50),
            ],
            logarithmic: false,
        };
        bars.svg()
    }
}
