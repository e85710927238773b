//! `thaw remove`: forgets a function.

use crate::client::Daemon;
use crate::failure::{Failure, Outcome};
use clap::Args;
use std::process::ExitCode;
use thaw_node::catalog::Reload;
use thaw_node::home::Home;
use thaw_node::secrets::SecretStore;
use thaw_store::{Name, Store};

/// Forget a function and its secrets; `thaw gc` then frees its files.
///
/// A running daemon gives it no more requests. Its idle instances end at once, those that are at
/// work when they have answered, after `drain` of [limits] at the latest.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  thaw remove hello-python && thaw gc")]
pub struct Arguments {
    /// The function.
    name: String,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let home = Home::from_environment()?;
    let store = Store::open(&home.store())?;
    store.remove_function(&Name::new(&arguments.name)?)?;
    // Another function of its name must not get them.
    if let Ok(function) = arguments.name.parse() {
        SecretStore::of(home.clone()).remove_all(&function).map_err(Failure::failed)?;
    }
    if let Some(daemon) = Daemon::running(&home) {
        let _: Reload = daemon.post("/reload")?;
    }
    Ok(ExitCode::SUCCESS)
}
