//! `thaw bench scale`: boots while more and more instances of the function live
//! (Catalyzer's Figure 15), and the memory that they take.

use super::client::{eventually, get};
use super::figure::{FigureError, Lines};
use super::memory::{HostMemory, ProcessMemory};
use super::rig::{Rig, RigOptions};
use super::{BenchError, OnProgress, Percentiles};
use serde::Serialize;
use std::time::{Duration, Instant};
use thaw_home::config::Isolation;
use thaw_home::function::BuiltFunction;
use thaw_home::home::Home;
use thaw_node::boots::{BootKind, Phases};
use thaw_store::Store;

/// Boots before those that count: they record the working set and end.
const WARM_UPS: usize = 3;
/// Groups of boots whose medians are compared.
const GROUPS: usize = 10;
/// Boots in a row. What an instance does a moment after its boot, such as
/// entering its control group, must not disturb those that follow.
const IN_A_ROW: usize = 10;
/// It is done by then.
const SETTLED: Duration = Duration::from_millis(160);

/// What is measured.
#[derive(Clone, Debug)]
pub struct ScaleOptions {
    /// Kinds of boots, one after the other.
    pub boots: Vec<BootKind>,
    /// Instances that live in the end.
    pub count: usize,
    /// Path of the requests.
    pub path: String,
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct ScaleReport {
    /// The function.
    pub function: String,
    /// One kind of boot after the other.
    pub boots: Vec<Growth>,
}

/// Boots of one kind while instances accumulate.
#[derive(Clone, Debug, Serialize)]
pub struct Growth {
    /// What the boots began from.
    pub boot: BootKind,
    /// Instances that lived in the end.
    pub n: usize,
    /// Why there are not as many as wanted.
    pub failure: Option<String>,
    /// Tenths of the boots, in their order.
    pub groups: Vec<Group>,
    /// To the first instruction: median of the last group by that of the first.
    pub growth: f64,
    /// The same of the shortest boots of those groups, which other work on the
    /// machine changes less.
    pub growth_of_shortest: f64,
    /// Memory of the idle instances, right after the last boot. Those of more than ten seconds ago have
    /// given something back.
    pub memory: ScaleMemory,
    /// The same once they have been idle for so long that they have given back what they do not need.
    pub memory_trimmed: ScaleMemory,
}

/// How often it is looked whether instances give something back: longer than they are idle before that.
const TRIM_LOOK: Duration = Duration::from_secs(12);
/// How long that is waited for.
const TRIM_MAX: Duration = Duration::from_secs(120);

/// Boots in a row, in microseconds since the connection was accepted.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Group {
    /// Instances that live after the last of them.
    pub instances: usize,
    /// To the guest's first instruction.
    pub first_instruction_us: Percentiles,
    /// The shortest of these.
    pub shortest_us: f64,
    /// To the first response byte.
    pub first_byte_us: Percentiles,
}

/// Memory of idle instances, each after one request.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct ScaleMemory {
    /// Proportional set size without pages of files: the mean instance's, in KiB.
    pub pss_kib: f64,
    /// The same of the largest.
    pub pss_max_kib: u64,
    /// Page tables, the mean instance's, in KiB.
    pub page_tables_kib: f64,
    /// What the host uses for all of them, in KiB: what changed since before the
    /// first boot.
    pub host: HostMemory,
}

/// Boots `count` instances that stay, kind by kind.
///
/// # Errors
/// Not even the first instance can be booted.
pub fn scale(
    home: &Home,
    name: &str,
    options: &ScaleOptions,
    progress: &mut OnProgress<'_>,
) -> Result<ScaleReport, BenchError> {
    thaw_daemon::daemon::raise_file_limit();
    let store = Store::open(&home.store())?;
    let function = super::http_server(&store, name)?;
    let mut boots = Vec::new();
    for kind in &options.boots {
        let mut say = |done: usize| {
            progress(&format!("{name}, {} boots: {done} of {}", kind.name(), options.count));
        };
        boots.push(grow(home, &store, &function, *kind, options, &mut say)?);
    }
    Ok(ScaleReport { function: name.to_owned(), boots })
}

fn grow(
    home: &Home,
    store: &Store,
    function: &BuiltFunction,
    kind: BootKind,
    options: &ScaleOptions,
    progress: &mut dyn FnMut(usize),
) -> Result<Growth, BenchError> {
    let request = get(function.function.config.name.as_str(), &options.path);
    let rig_options = RigOptions {
        isolation: Isolation::Request,
        instances: u32::try_from(options.count).unwrap_or(u32::MAX).saturating_add(16),
        ..RigOptions::single(kind)
    };
    let mut rig = Rig::start(home, store, function, rig_options)?;
    for _ in 0..WARM_UPS {
        rig.boot(kind, &request)?;
        rig.wait_empty()?;
    }
    rig.serve_as(Isolation::Instance);
    let before = HostMemory::now()?;
    let mut phases: Vec<Phases> = Vec::with_capacity(options.count);
    let mut failure = None;
    for done in 0..options.count {
        if done.is_multiple_of(IN_A_ROW) {
            std::thread::sleep(SETTLED);
        }
        match boot_to_stay(&rig, kind, &request) {
            Ok(boot) => phases.push(boot),
            Err(error) => {
                failure = Some(error.to_string());
                break;
            }
        }
        progress(done + 1);
    }
    std::thread::sleep(SETTLED);
    let right_after = memory(&rig, before)?;
    let memory_trimmed = trimmed_memory(&rig, before)?;
    let alive = rig.service.instance_count();
    if failure.is_none() && alive < options.count {
        failure = Some(format!("{} instances ended by themselves", options.count - alive));
    }
    let groups = groups(&phases)?;
    let growth = |of: fn(&Group) -> f64| match (groups.first(), groups.last()) {
        (Some(first), Some(last)) => of(last) / of(first).max(f64::MIN_POSITIVE),
        _ => 1.0,
    };
    let (growth, growth_of_shortest) =
        (growth(|group| group.first_instruction_us.p50), growth(|group| group.shortest_us));
    Ok(Growth {
        boot: kind,
        n: alive,
        failure,
        groups,
        growth,
        growth_of_shortest,
        memory: right_after,
        memory_trimmed,
    })
}

/// Waits until the instances give nothing back any more, for two minutes at most.
fn trimmed_memory(rig: &Rig, before: HostMemory) -> Result<ScaleMemory, BenchError> {
    let begun = Instant::now();
    let mut last = memory(rig, before)?;
    loop {
        std::thread::sleep(TRIM_LOOK);
        let now = memory(rig, before)?;
        let is_less = now.pss_kib < last.pss_kib - 1.0;
        last = now;
        if begun.elapsed() > TRIM_MAX || begun.elapsed() > 3 * TRIM_LOOK && !is_less {
            return Ok(last);
        }
    }
}

/// Boots an instance and sees to it that it gets no other connection.
fn boot_to_stay(rig: &Rig, kind: BootKind, request: &[u8]) -> Result<Phases, BenchError> {
    let boot = rig.boot(kind, request)?;
    let is_idle = || {
        let instances = rig.service.instances();
        instances.iter().any(|i| i.id == boot.instance && i.connections == 0).then_some(())
    };
    eventually(is_idle).ok_or(BenchError::NoPhase("that it is idle"))?;
    rig.service.hold(boot.instance);
    Ok(boot.phases)
}

fn memory(rig: &Rig, before: HostMemory) -> Result<ScaleMemory, BenchError> {
    let host = HostMemory::now()?.since(before);
    let instances = rig.service.instances();
    let mut all = ScaleMemory { host, ..Default::default() };
    for instance in &instances {
        let own = ProcessMemory::of(instance.pid)?;
        all.pss_kib += own.pss_kib as f64;
        all.pss_max_kib = all.pss_max_kib.max(own.pss_kib);
        all.page_tables_kib += own.page_tables_kib as f64;
    }
    let count = instances.len().max(1) as f64;
    all.pss_kib = (all.pss_kib / count).round();
    all.page_tables_kib = (all.page_tables_kib / count).round();
    Ok(all)
}

fn groups(phases: &[Phases]) -> Result<Vec<Group>, BenchError> {
    let size = phases.len().div_ceil(GROUPS).max(1);
    let mut instances = 0;
    let group = |boots: &[Phases]| {
        instances += boots.len();
        let summary = super::boot::summarize(boots)?;
        let shortest = boots.iter().filter_map(|boot| boot.first_instruction).min();
        Ok(Group {
            instances,
            first_instruction_us: summary.first_instruction,
            shortest_us: Percentiles::of_ns(&mut [shortest.unwrap_or_default()]).p50,
            first_byte_us: summary.first_byte,
        })
    };
    phases.chunks(size).map(group).collect()
}

impl ScaleReport {
    /// A figure of the medians as the instances grow.
    ///
    /// # Errors
    /// It cannot be drawn.
    pub fn svg(&self) -> Result<String, FigureError> {
        let line = |growth: &Growth, what: &str, of: fn(&Group) -> f64| {
            let points = growth.groups.iter().map(|group| (group.instances as f64, of(group)));
            (format!("{}, {what}", growth.boot.name()), points.collect())
        };
        let first_instructions = self
            .boots
            .iter()
            .map(|growth| line(growth, "first instruction", |g| g.first_instruction_us.p50));
        let first_bytes = self
            .boots
            .iter()
            .map(|growth| line(growth, "first response byte", |g| g.first_byte_us.p50));
        let title = format!("{}: boots beside live instances, medians", self.function);
        let lines = Lines {
            title: &title,
            x: "live instances",
            y: "µs since the connection was accepted",
            series: first_instructions.chain(first_bytes).collect(),
        };
        lines.svg()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boots_are_grouped_by_tenths() {
        let phases = |n: u64| Phases {
            zygote: 1,
            received: Some(2),
            mapped: Some(3),
            first_instruction: Some(n * 1000),
            first_byte: Some(n * 2000),
        };
        let boots: Vec<_> = (1..=25).map(phases).collect();
        let groups = groups(&boots).unwrap();
        let sizes: Vec<_> = groups.iter().map(|group| group.instances).collect();
        assert_eq!(sizes, [3, 6, 9, 12, 15, 18, 21, 24, 25]);
        assert_eq!(groups[0].first_instruction_us.p50, 2.0);
        assert_eq!((groups[1].shortest_us, groups[1].first_instruction_us.p50), (4.0, 5.0));
        assert_eq!(groups[8].first_byte_us.p50, 50.0);
    }
}
