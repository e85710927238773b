//! `thaw import`: a directory becomes a stored root file system.

use crate::failure::Outcome;
use crate::output;
use clap::Args;
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use thaw_node::home::Home;
use thaw_node::rootfs;
use thaw_store::Store;

/// Import a directory as a root file system with a name.
///
/// Functions and `thaw run` then use it by that name, and share its files.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  thaw import ./alpine alpine && thaw run --rootfs alpine -- /bin/sh"
)]
pub struct Arguments {
    /// The directory.
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// The name.
    name: String,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let store = Store::open(&Home::from_environment()?.store())?;
    let (index, report) =
        rootfs::import(&store, &arguments.directory, &arguments.name, &mut |_| {})?;
    if arguments.json {
        output::print_json(&json!({
            "name": arguments.name,
            "rootfs": index.to_string(),
            "files": report.files,
            "bytes": report.bytes,
        }))?;
    } else {
        let mib = report.bytes as f64 / f64::from(1 << 20);
        output::print(&format!(
            "imported {} files, {mib:.1} MiB, as {}\n",
            report.files, arguments.name
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
