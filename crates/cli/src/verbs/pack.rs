//! `thaw pack`: packs images that are not in use.

use crate::failure::{Failure, Outcome};
use crate::output;
use clap::Args;
use serde_json::json;
use std::process::ExitCode;
use thaw_home::config::ByteSize;
use thaw_home::home::Home;
use thaw_node::packing::{Nobody, RoomReport, make_room};
use thaw_store::Store;

/// Pack images that no daemon has open, so that they take a tenth of the room on disk.
///
/// The next boot of a packed image unpacks it, which takes some tens of milliseconds. A daemon packs
/// by itself what was not used for longest (thaw serve --unpacked).
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  thaw pack\n  thaw pack --unpacked 2GiB")]
pub struct Arguments {
    /// Room on disk that images may take as they are booted: those that were used last stay
    /// so.
    #[arg(long, value_name = "SIZE", default_value = "0B")]
    unpacked: ByteSize,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let store = Store::open(&Home::existing()?.store())?;
    let report = make_room(&store, arguments.unpacked.bytes(), &Nobody).map_err(Failure::failed)?;
    let RoomReport { packed, freed, in_use, left, failed } = &report;
    if arguments.json {
        output::print_json(&json!({
            "packed": packed,
            "freed": freed,
            "in_use": in_use,
            "left": left,
            "failed": failed,
        }))?;
    } else {
        output::print(&summary(&report))?;
    }
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn summary(report: &RoomReport) -> String {
    let mebibytes = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let mut text = format!(
        "packed {} images, which freed {:.1} MiB; {} are in use; {:.1} MiB are not packed\n",
        report.packed,
        mebibytes(report.freed),
        report.in_use,
        mebibytes(report.left),
    );
    for failure in &report.failed {
        text += &format!("{failure}\n");
    }
    text
}
