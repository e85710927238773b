//! `thaw checkpoints`: the checkpoints in the store.

use crate::failure::Outcome;
use crate::output::{self, Table, size};
use crate::verbs::remove::NOT_ERASED;
use clap::Args;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use thaw_daemon::admin::CheckpointInfo;
use thaw_home::home::Home;
use thaw_home::volumes::VolumeStore;
use thaw_store::{Name, Store};

/// List the checkpoints in the store, or remove one.
///
/// A checkpoint that others differ from cannot be removed before them. The next `thaw gc` frees
/// its files; copies of it that the file system or a backup has are not erased.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw checkpoints\n  \
    thaw checkpoints --remove before-upgrade && thaw gc")]
pub struct Arguments {
    /// Remove the checkpoint of this name.
    #[arg(long, value_name = "NAME", conflicts_with = "json")]
    remove: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let home = Home::existing()?;
    let store = Store::open(&home.store())?;
    if let Some(name) = &arguments.remove {
        store.remove_checkpoint(&Name::new(name)?)?;
        let volumes = VolumeStore::of(home);
        if let Err(error) = volumes.sweep(&store) {
            eprintln!("thaw: {error}; `thaw gc` removes the files of its volumes");
        }
        eprintln!("thaw: {NOT_ERASED}");
        return Ok(ExitCode::SUCCESS);
    }
    let checkpoints = CheckpointInfo::all(&store)?;
    if arguments.json {
        output::print_json(&checkpoints)?;
    } else {
        output::print(&table(&checkpoints))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The volumes whose files a checkpoint has.
fn volumes(checkpoint: &CheckpointInfo) -> String {
    let names: Vec<_> =
        checkpoint.volumes.iter().map(|snapshot| snapshot.volume.as_str()).collect();
    if names.is_empty() { "-".to_owned() } else { names.join(" ") }
}

fn table(checkpoints: &[CheckpointInfo]) -> String {
    let mut table =
        Table::new(&["NAME", "FUNCTION", "AGE", "OWN SIZE", "DIFFERS FROM", "KEY", "VOLUMES"]);
    for checkpoint in checkpoints {
        let made = UNIX_EPOCH + Duration::from_millis(checkpoint.created_ms);
        let age = SystemTime::now().duration_since(made).unwrap_or_default();
        // The parent stands for all others, which it has itself.
        let parent = checkpoint.ancestors.last().map(|image| image.chars().take(16).collect());
        table.row(vec![
            checkpoint.name.clone(),
            checkpoint.function.clone(),
            format!("{}s", age.as_secs()),
            size(checkpoint.allocated),
            parent.unwrap_or_else(|| "-".to_owned()),
            checkpoint.key.clone().unwrap_or_else(|| "-".to_owned()),
            volumes(checkpoint),
        ]);
    }
    table.text()
}
