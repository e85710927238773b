//! `thaw gc`: removes what nothing refers to.

use crate::failure::{Failure, Outcome};
use crate::output;
use clap::Args;
use serde_json::json;
use std::process::ExitCode;
use thaw_home::config::FunctionName;
use thaw_home::home::Home;
use thaw_home::partial::kernels_of_partial;
use thaw_home::volumes::VolumeStore;
use thaw_node::asleep::images_of_sleepers;
use thaw_node::sandboxes::functions_of_sandboxes;
use thaw_node::work::{RemovedWork, remove_work_of_nobody};
use thaw_store::{GcReport, Kept, Name, Removal, Store, VERSIONS_KEPT};

/// Remove files from the store that no function and no checkpoint refers to, kernel builds
/// that no image needs included. Kernel builds of functions that are being pulled with `--lazy` stay.
///
/// What builds have kept of functions that are gone (packages, caches of package managers) goes, too.
///
/// Of each function the three newest versions stay, besides the active one, those that have a
/// share of the requests, the one to which `thaw rollback` would go, and those that sandboxes were
/// made of, as long as these live.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  thaw gc --dry-run\n  thaw gc --keep 1")]
pub struct Arguments {
    /// Only say what would be removed.
    #[arg(long)]
    dry_run: bool,
    /// How many of the newest versions of each function stay.
    #[arg(long, value_name = "N", default_value_t = VERSIONS_KEPT)]
    keep: usize,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let home = Home::existing()?;
    let store = Store::open(&home.store())?;
    let asleep = home.asleep()?;
    let images = || images_of_sleepers(&asleep);
    let removal = if arguments.dry_run { Removal::DryRun } else { Removal::Remove };
    let kernels = || kernels_of_partial(&home.partial());
    let of_sandboxes = |(function, version): (FunctionName, u32)| {
        Some((Name::new(function.as_str()).ok()?, version))
    };
    let in_use = || {
        let all = functions_of_sandboxes(home.root())?;
        Ok(all.into_iter().filter_map(of_sandboxes).collect())
    };
    let versions = arguments.keep;
    let kept = Kept { images: &images, kernels: &kernels, versions, in_use: &in_use };
    let report = store.gc_keeping(removal, &kept).map_err(Failure::failed)?;
    let work = remove_work_of_nobody(&home, &store, removal).map_err(Failure::failed)?;
    if !arguments.dry_run {
        // Snapshots of checkpoints that are gone.
        VolumeStore::of(home).sweep(&store).map_err(Failure::failed)?;
    }
    if arguments.json {
        output::print_json(&json!({
            "dry_run": arguments.dry_run,
            "versions": report.versions.len(),
            "images": report.images.len(),
            "rootfs_indexes": report.indexes.len(),
            "blobs": report.blobs.len(),
            "kernels": report.kernels.len(),
            "templates": report.templates.len(),
            "working_sets": report.working_sets.len(),
            "left_overs": report.left_overs.len(),
            "work": work.names.len(),
            "bytes": report.bytes + work.bytes,
        }))?;
    } else {
        output::print(&summary(&report, &work, arguments.dry_run))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn summary(report: &GcReport, work: &RemovedWork, dry_run: bool) -> String {
    if report.is_empty() && work.names.is_empty() {
        return "nothing to remove\n".to_owned();
    }
    format!(
        "{} {} versions, {} images, {} rootfs indexes, {} files, {} kernel builds, {} runtime templates, {} \
         left-overs and what builds kept of {} functions: {:.1} MiB\n",
        if dry_run { "would remove" } else { "removed" },
        report.versions.len(),
        report.images.len(),
        report.indexes.len(),
        report.blobs.len(),
        report.kernels.len(),
        report.templates.len(),
        report.left_overs.len() + report.working_sets.len(),
        work.names.len(),
        (report.bytes + work.bytes) as f64 / f64::from(1 << 20),
    )
}
