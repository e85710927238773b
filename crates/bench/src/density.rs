//! `thaw bench density`: disk and memory as functions are added, one instance of each
//! (Metropolis' Table 4 and Figure 7).

use super::client::{eventually, exchange, get};
use super::figure::{FigureError, Lines};
use super::memory::{HostMemory, ProcessMemory};
use super::rig::{Node, RigOptions};
use super::{BenchError, BootsFailure, OnProgress};
use serde::Serialize;
use thaw_home::config::Isolation;
use thaw_home::function::BuiltFunction;
use thaw_home::home::Home;
use thaw_node::boots::BootKind;
use thaw_store::{Store, StoreUsage, UserKind};

/// Zygotes that are kept ready.
const ZYGOTES: usize = 4;

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct DensityReport {
    /// The functions that were counted.
    pub functions: usize,
    /// Bytes on disk for each of them: all that they need, by their number.
    pub disk_bytes_each: u64,
    /// The same if nothing were shared.
    pub disk_bytes_each_alone: u64,
    /// KiB of the host for each idle instance.
    pub memory_kib_each: f64,
    /// Median of what an idle instance has for itself, in KiB: its proportional set size without
    /// pages of files.
    pub pss_kib_median: u64,
    /// How many of the functions fit on a terabyte (10^12 bytes), at that many bytes each.
    pub functions_per_terabyte: u64,
    /// Function by function.
    pub steps: Vec<DensityStep>,
    /// What could not be measured.
    pub failures: Vec<BootsFailure>,
}

/// After one function more.
#[derive(Clone, Debug, Serialize)]
pub struct DensityStep {
    /// The function.
    pub function: String,
    /// Bytes on disk of all functions so far.
    pub disk_bytes: u64,
    /// What the function alone needs.
    pub alone_bytes: u64,
    /// What nobody else of all needs.
    pub own_bytes: u64,
    /// Memory of the host since before the first instance, in KiB.
    pub host_kib: i64,
    /// What its idle instance has for itself in the end, in KiB.
    pub pss_kib: u64,
}

/// Measures functions, or all in the store, in the order of their names.
///
/// # Errors
/// The store cannot be read or has no function, or this host cannot run sandboxes.
pub fn density(
    home: &Home,
    names: &[String],
    progress: &mut OnProgress<'_>,
) -> Result<DensityReport, BenchError> {
    thaw_daemon::daemon::raise_file_limit();
    let store = Store::open(&home.store())?;
    let (functions, mut failures) = super::http_servers(&store, names)?;
    let usage = store.usage(&[])?;
    let node = Node::start(home, &store, ZYGOTES, functions.len() as u32)?;
    let address = node.listen(None)?;
    let options =
        RigOptions { isolation: Isolation::Instance, ..RigOptions::single(BootKind::Warm) };
    let mut so_far: Vec<usize> = Vec::new();
    let (mut steps, mut served) = (Vec::new(), Vec::new());
    let before = HostMemory::now()?;
    for function in &functions {
        let name = function.function.config.name.to_string();
        progress(&name);
        let begun = node.serve(function, options).and_then(|(service, _)| {
            exchange(address, &get(&name, "/"))?;
            let is_idle =
                || service.instances().first().filter(|one| one.connections == 0).cloned();
            let instance = eventually(is_idle).ok_or(BenchError::NoPhase("that it is idle"))?;
            Ok(instance.pid)
        });
        match begun {
            Ok(pid) => {
                let number = number_of(&usage, function);
                so_far.push(number);
                let host_kib = HostMemory::now()?.since(before).used_kib;
                steps.push(step(&usage, name, number, &so_far, host_kib));
                served.push(pid);
            }
            Err(error) => {
                let reason = error.to_string();
                failures.push(BootsFailure { function: name, boot: None, reason });
            }
        }
    }
    // In the end: pages that the first instance had alone, later ones share.
    for (step, pid) in steps.iter_mut().zip(served) {
        step.pss_kib = ProcessMemory::of(pid)?.pss_kib;
    }
    Ok(report(steps, failures))
}

/// The number of a function among the users of the store.
fn number_of(usage: &StoreUsage, function: &BuiltFunction) -> usize {
    let name = function.function.config.name.as_str();
    let is_it =
        |user: &thaw_store::User| user.kind == UserKind::Function && user.name.as_str() == name;
    usage.users().iter().position(is_it).expect("it was just read from the store")
}

fn step(
    usage: &StoreUsage,
    function: String,
    number: usize,
    so_far: &[usize],
    host_kib: i64,
) -> DensityStep {
    let (all, alone) = (usage.sizes(so_far), usage.sizes(&[number]));
    DensityStep {
        function,
        disk_bytes: all.own + all.shared,
        alone_bytes: alone.own + alone.shared,
        own_bytes: alone.own,
        host_kib,
        pss_kib: 0,
    }
}

fn report(steps: Vec<DensityStep>, failures: Vec<BootsFailure>) -> DensityReport {
    let functions = steps.len();
    let count = functions.max(1) as u64;
    let disk = steps.last().map_or(0, |step| step.disk_bytes) / count;
    let mut pss: Vec<u64> = steps.iter().map(|step| step.pss_kib).collect();
    pss.sort_unstable();
    let host = steps.last().map_or(0, |step| step.host_kib) as f64 / count as f64;
    DensityReport {
        functions,
        disk_bytes_each: disk,
        disk_bytes_each_alone: steps.iter().map(|step| step.alone_bytes).sum::<u64>() / count,
        memory_kib_each: host.round(),
        pss_kib_median: pss.get(pss.len() / 2).copied().unwrap_or(0),
        functions_per_terabyte: 1_000_000_000_000 / disk.max(1),
        steps,
        failures,
    }
}

impl DensityReport {
    /// A figure of what all functions need, as they are added.
    ///
    /// # Errors
    /// It cannot be drawn.
    pub fn svg(&self) -> Result<String, FigureError> {
        const MIB: f64 = 1024.0 * 1024.0;
        let line = |name: &str, of: &dyn Fn(usize, &DensityStep) -> f64| {
            let steps = self.steps.iter().enumerate();
            let points = steps.map(|(at, step)| ((at + 1) as f64, of(at, step))).collect();
            (name.to_owned(), points)
        };
        let alone = |at: usize| self.steps[..=at].iter().map(|step| step.alone_bytes).sum::<u64>();
        let lines = Lines {
            title: "Disk and memory of functions, one instance of each",
            x: "functions",
            y: "MiB",
            series: vec![
                line("disk", &|_, step| step.disk_bytes as f64 / MIB),
                line("disk if nothing were shared", &|at, _| alone(at) as f64 / MIB),
                line("memory of the host", &|_, step| step.host_kib.max(0) as f64 / 1024.0),
            ],
        };
        lines.svg()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(disk_bytes: u64, alone_bytes: u64, pss_kib: u64) -> DensityStep {
        let function = "f".to_owned();
        DensityStep { function, disk_bytes, alone_bytes, own_bytes: 0, host_kib: 300, pss_kib }
    }

    #[test]
    fn what_is_shared_counts_once() {
        let steps = vec![step(10_000, 10_000, 5), step(12_000, 9_000, 7), step(15_000, 11_000, 6)];
        let report = report(steps, Vec::new());
        assert_eq!((report.disk_bytes_each, report.disk_bytes_each_alone), (5_000, 10_000));
        assert_eq!((report.functions_per_terabyte, report.pss_kib_median), (200_000_000, 6));
        assert_eq!(report.memory_kib_each, 100.0);
        assert!(report.svg().unwrap().contains("if nothing were shared"));
        let empty = super::report(Vec::new(), Vec::new());
        assert_eq!(empty.functions, 0);
    }
}
