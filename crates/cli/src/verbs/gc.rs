//! `thaw gc`: removes what nothing refers to.

use crate::failure::{Failure, Outcome};
use crate::output;
use clap::Args;
use serde_json::json;
use std::process::ExitCode;
use thaw_node::asleep::images_of_sleepers;
use thaw_node::home::Home;

use thaw_store::{GcReport, Removal, Store};

/// Remove files from the store that no function and no checkpoint refers to, kernel builds
/// that no image needs included.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  thaw gc --dry-run")]
pub struct Arguments {
    /// Only say what would be removed.
    #[arg(long)]
    dry_run: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let home = Home::from_environment()?;
    let store = Store::open(&home.store())?;
    let asleep = images_of_sleepers(&home.asleep()?)?;
    let removal = if arguments.dry_run { Removal::DryRun } else { Removal::Remove };
    let report = store.gc_keeping(removal, &asleep).map_err(Failure::failed)?;
    if arguments.json {
        output::print_json(&json!({
            "dry_run": arguments.dry_run,
            "images": report.images.len(),
            "rootfs_indexes": report.indexes.len(),
            "blobs": report.blobs.len(),
            "kernels": report.kernels.len(),
            "templates": report.templates.len(),
            "working_sets": report.working_sets.len(),
            "left_overs": report.left_overs.len(),
            "bytes": report.bytes,
        }))?;
    } else {
        output::print(&summary(&report, arguments.dry_run))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn summary(report: &GcReport, dry_run: bool) -> String {
    if report.is_empty() {
        return "nothing to remove\n".to_owned();
    }
    format!(
        "{} {} images, {} rootfs indexes, {} files, {} kernel builds, {} runtime templates and {} \
         left-overs: {:.1} MiB\n",
        if dry_run { "would remove" } else { "removed" },
        report.images.len(),
        report.indexes.len(),
        report.blobs.len(),
        report.kernels.len(),
        report.templates.len(),
        report.left_overs.len() + report.working_sets.len(),
        report.bytes as f64 / f64::from(1 << 20),
    )
}
