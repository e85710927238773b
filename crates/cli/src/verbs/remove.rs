//! `thaw remove`: forgets a function.

use crate::client::Daemon;
use crate::failure::{Failure, Outcome};
use clap::Args;
use std::process::ExitCode;
use thaw_build::artifact;
use thaw_home::home::Home;
use thaw_home::secrets::SecretStore;
use thaw_node::catalog::Reload;
use thaw_node::pulls::{PullInfo, PullState};
use thaw_node::sandboxes::SandboxInfo;
use thaw_store::{Name, Store};

/// Forget a function and its secrets; `thaw gc` then frees its files.
///
/// A running daemon gives it no more requests. Its idle instances end at once, its sandboxes too, those
/// that are at work when they have answered, after `drain` of [limits] at the latest.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  thaw remove hello-python && thaw gc")]
pub struct Arguments {
    /// The function.
    name: String,
}

/// What a removal leaves.
pub const NOT_ERASED: &str = "`thaw gc` unlinks the files. Not erased: blocks that the disk or snapshots of the \
     file system keep, backups and other copies, and memory of instances that are still live";

pub fn run(arguments: &Arguments) -> Outcome {
    let home = Home::existing()?;
    let store = Store::open(&home.store())?;
    let name = Name::new(&arguments.name)?;
    stop_fetching(&home, name.as_str())?;
    // One that was never pulled to its end is nowhere else.
    let was_partial = artifact::remove_partial(&home, name.as_str())?;
    match store.remove_function(&name) {
        Err(error) if was_partial && error.is_not_found() => {}
        removed => removed?,
    }
    // Another function of its name must not get them.
    if let Ok(function) = arguments.name.parse() {
        SecretStore::of(home.clone()).remove_all(&function).map_err(Failure::failed)?;
    }
    if let Some(daemon) = Daemon::running(&home) {
        let sandboxes = count_sandboxes(&daemon, name.as_str());
        let _: Reload = daemon.post("/reload")?;
        match sandboxes {
            0 => {}
            1 => eprintln!("thaw: 1 sandbox of {name} ends with it"),
            _ => eprintln!("thaw: {sandboxes} sandboxes of {name} end with it"),
        }
    }
    eprintln!("thaw: {NOT_ERASED}; its checkpoints stay");
    Ok(ExitCode::SUCCESS)
}

/// How many sandboxes of a function there are.
fn count_sandboxes(daemon: &Daemon, function: &str) -> usize {
    // A daemon of an older build has none.
    let all: Vec<SandboxInfo> = daemon.get("/sandboxes").unwrap_or_default();
    all.iter().filter(|info| info.function.as_str() == function).count()
}

/// Has a daemon leave a function alone of which it fetches the rest.
fn stop_fetching(home: &Home, function: &str) -> Result<(), Failure> {
    let Some(daemon) = Daemon::running(home) else { return Ok(()) };
    // One of an older build has none.
    let pulls: Vec<PullInfo> = daemon.get("/pulls").unwrap_or_default();
    let is_its = |pull: &&PullInfo| {
        let state = pull.fetching.state;
        pull.function.as_deref() == Some(function)
            && matches!(state, PullState::Waiting | PullState::Fetching)
    };
    for pull in pulls.iter().filter(is_its) {
        let _: PullInfo = daemon.send_empty("DELETE", &format!("/pulls/{}", pull.id))?;
    }
    Ok(())
}
