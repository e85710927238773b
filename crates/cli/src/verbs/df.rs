//! `thaw df`: what is stored, what live instances take, and what of it is shared.

use crate::client::{Daemon, DaemonArguments};
use crate::failure::{Failure, Outcome};
use crate::output::{self, Table, size};
use clap::Args;
use std::process::ExitCode;
use thaw_home::config::DomainName;
use thaw_home::home::Home;
use thaw_node::usage::{AsleepUse, DiskUse, MemoryUse, UsageReport};
use thaw_store::{ImageId, Store};

/// Show what functions take on disk and in memory, and what they share.
///
/// OWN is what nobody else needs, so that removing the function frees it; SHARED is what others
/// need, too: files of equal content, and images. BASE is the image that the function's own image
/// differs from, and what lies there. Sizes are of blocks on disk. MEMORY OWN are pages that one
/// instance alone has; MEMORY SHARED are pages that several have, each counted for every instance.
/// Of volumes, directories and what lies in them count. Without a daemon there are no live instances, and the store alone is counted.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  thaw df\n  thaw df --json")]
pub struct Arguments {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonArguments,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let report = report(&arguments.daemon)?;
    if arguments.json {
        output::print_json(&report)?;
    } else {
        output::print(&text(&report))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The daemon's, which knows the live instances, if there is one.
fn report(arguments: &DaemonArguments) -> Result<UsageReport, Failure> {
    if arguments.is_named() {
        return Daemon::find(arguments)?.get("/df");
    }
    let home = Home::existing()?;
    match Daemon::running(&home) {
        Some(daemon) => daemon.get("/df"),
        None => {
            let store = Store::open(&home.store())?;
            UsageReport::of_disk(&home, &store).map_err(Failure::failed)
        }
    }
}

fn text(report: &UsageReport) -> String {
    let tables =
        [functions(report), checkpoints(report), images(report), volumes(report), domains(report)];
    let mut text = tables.into_iter().flatten().collect::<Vec<_>>().join("\n");
    if !text.is_empty() {
        text.push('\n');
    }
    text + &totals(report)
}

/// One line a function; nothing if there are none.
fn functions(report: &UsageReport) -> Option<String> {
    let mut table = Table::new(&[
        "FUNCTION",
        "OWN",
        "SHARED",
        "BASE",
        "INSTANCES",
        "MEMORY OWN",
        "MEMORY SHARED",
        "ASLEEP",
    ]);
    for function in &report.functions {
        let mut row = vec![function.name.clone()];
        row.extend(disk(&function.disk));
        row.push(base(function.base, &function.disk));
        row.extend(memory(function.memory));
        row.push(asleep(function.asleep));
        table.row(row);
    }
    (!report.functions.is_empty()).then(|| table.text())
}

fn checkpoints(report: &UsageReport) -> Option<String> {
    let mut table = Table::new(&["CHECKPOINT", "FUNCTION", "OWN", "SHARED", "BASE"]);
    for checkpoint in &report.checkpoints {
        let mut row = vec![checkpoint.name.clone(), checkpoint.function.clone()];
        row.extend(disk(&checkpoint.disk));
        row.push(base(checkpoint.base, &checkpoint.disk));
        table.row(row);
    }
    (!report.checkpoints.is_empty()).then(|| table.text())
}

fn images(report: &UsageReport) -> Option<String> {
    let mut table = Table::new(&["CONTAINER IMAGE", "OWN", "SHARED"]);
    for image in &report.images {
        let mut row = vec![image.name.clone()];
        row.extend(disk(&image.disk));
        table.row(row);
    }
    (!report.images.is_empty()).then(|| table.text())
}

fn volumes(report: &UsageReport) -> Option<String> {
    let mut table = Table::new(&["VOLUME", "ON DISK", "MAY HOLD", "SNAPSHOTS", "DOMAIN"]);
    for volume in &report.volumes {
        let more = if volume.is_partial { " or more" } else { "" };
        let host = if volume.is_host { ", of the host" } else { "" };
        table.row(vec![
            volume.name.clone(),
            format!("{}{more}{host}", size(volume.bytes)),
            size(volume.size),
            match volume.snapshots {
                0 => "-".to_owned(),
                count => format!("{count}, {}{more}", size(volume.snapshots_bytes)),
            },
            volume.domain.as_ref().map_or_else(|| "-".to_owned(), |name| name.name().to_string()),
        ]);
    }
    (!report.volumes.is_empty()).then(|| table.text())
}

/// One line a domain, unless all functions are without one.
fn domains(report: &UsageReport) -> Option<String> {
    let mut table = Table::new(&[
        "DOMAIN",
        "FUNCTIONS",
        "OWN",
        "SHARED",
        "INSTANCES",
        "MEMORY OWN",
        "MEMORY SHARED",
        "ASLEEP",
        "SWAP",
    ]);
    let name = |domain: &Option<DomainName>| {
        domain.as_ref().map_or_else(|| "-".to_owned(), |domain| domain.name().to_string())
    };
    for domain in &report.domains {
        let mut row = vec![name(&domain.domain), domain.functions.to_string()];
        row.extend(disk(&domain.disk));
        row.extend(memory(domain.memory));
        row.push(asleep(domain.asleep));
        row.push(domain.swap_bytes.map_or_else(|| "-".to_owned(), size));
        table.row(row);
    }
    let has_named = report.domains.iter().any(|domain| domain.domain.is_some());
    has_named.then(|| table.text())
}

fn totals(report: &UsageReport) -> String {
    let store = &report.store;
    let kernels = match report.kernels.len() {
        1 => "1 kernel build".to_owned(),
        count => format!("{count} kernel builds"),
    };
    let mut text = format!(
        "store: {} (files {}, images {}, working sets {}, {kernels} {}, indexes and records {}, \
         unpublished {})\n",
        size(store.total_bytes),
        size(store.files_bytes),
        size(store.images_bytes),
        size(store.working_sets_bytes),
        size(store.kernels_bytes),
        size(store.indexes_bytes + store.records_bytes),
        size(store.unpublished_bytes),
    );
    let home = &report.home;
    text += &format!(
        "beside it: asleep {}, swap {}, kept by builds {}{}, interrupted pulls {}, pieces of functions {}, logs {}, queue of triggers {}\n",
        size(home.asleep.bytes),
        home.swap_bytes.map_or_else(|| "-".to_owned(), size),
        size(home.work_bytes),
        if home.is_partial { " or more" } else { "" },
        size(home.pulls_bytes),
        size(home.pieces_bytes),
        size(home.logs_bytes),
        size(home.triggers_bytes),
    );
    if store.unused_bytes > 0 {
        let unused = size(store.unused_bytes);
        text += &format!("{unused} of the store is needed by nothing; `thaw gc` removes it\n");
    }
    for damaged in &report.damaged {
        text += &format!("not counted: {damaged}\n");
    }
    text
}

fn disk(disk: &DiskUse) -> [String; 2] {
    [size(disk.own_bytes), size(disk.shared_bytes)]
}

fn base(base: Option<ImageId>, disk: &DiskUse) -> String {
    match base {
        // As long as in `thaw images`.
        Some(base) => format!("{} {}", &base.to_string()[..16], size(disk.base_bytes)),
        None => "-".to_owned(),
    }
}

/// Live instances and their memory; of a part of them it is the least.
fn memory(memory: Option<MemoryUse>) -> [String; 3] {
    let Some(memory) = memory else { return ["-", "-", "-"].map(str::to_owned) };
    let more = if memory.counted < memory.instances { "+" } else { "" };
    let bytes = |bytes| format!("{}{more}", size(bytes));
    [memory.instances.to_string(), bytes(memory.private_bytes), bytes(memory.shared_bytes)]
}

fn asleep(asleep: AsleepUse) -> String {
    match asleep.instances {
        0 => "-".to_owned(),
        count => format!("{count}, {}", size(asleep.bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_node::usage::{DomainUsage, FunctionUsage, HomeUsage, StoreTotals};

    const MIB: u64 = 1 << 20;

    fn function(name: &str, base: Option<ImageId>) -> FunctionUsage {
        FunctionUsage {
            name: name.to_owned(),
            domain: None,
            base,
            disk: DiskUse { own_bytes: MIB, shared_bytes: 9 * MIB, base_bytes: 4 * MIB },
            asleep: AsleepUse::default(),
            memory: None,
        }
    }

    fn report(functions: Vec<FunctionUsage>) -> UsageReport {
        UsageReport {
            functions,
            checkpoints: Vec::new(),
            images: Vec::new(),
            volumes: Vec::new(),
            kernels: Vec::new(),
            domains: Vec::new(),
            store: StoreTotals { unused_bytes: 3 * MIB, ..StoreTotals::default() },
            home: HomeUsage::default(),
            damaged: vec!["index 1 is damaged".to_owned()],
        }
    }

    #[test]
    fn people_see_own_shared_and_base() {
        let mut live = function("live", None);
        let counted =
            MemoryUse { instances: 3, counted: 2, private_bytes: MIB, ..MemoryUse::default() };
        live.memory = Some(counted);
        live.asleep = AsleepUse { instances: 2, bytes: 5 * MIB };
        let based = function("based", Some(ImageId([0xab; 32])));
        let text = text(&report(vec![live, based]));
        let line = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap();
        let cells = |name: &str| line(name).split("  ").filter(|cell| !cell.is_empty()).count();
        assert!(line("live").contains("1.0MiB+") && line("live").contains("2, 5.0MiB"), "{text}");
        assert!(line("based").contains("abababababababab 4.0MiB"), "{text}");
        assert_eq!((cells("live"), cells("based")), (8, 8), "{text}");
        assert!(!text.contains("DOMAIN") && !text.contains("CHECKPOINT"), "{text}");
        assert!(text.contains("3.0MiB of the store is needed by nothing"), "{text}");
        assert!(text.contains("not counted: index 1 is damaged"), "{text}");
    }

    #[test]
    fn domains_are_shown_where_there_are_some() {
        let domain = |name: Option<&str>| DomainUsage {
            domain: name.map(|name| name.parse().unwrap()),
            functions: 2,
            checkpoints: 0,
            disk: DiskUse::default(),
            asleep: AsleepUse::default(),
            swap_bytes: Some(7 * MIB),
            memory: None,
        };
        let mut some = report(Vec::new());
        some.domains = vec![domain(None), domain(Some("customer"))];
        let shown = text(&some);
        assert!(shown.contains("customer") && shown.contains("7.0MiB"), "{shown}");
        some.domains.pop();
        assert!(!text(&some).contains("DOMAIN"));
    }
}
