//! `thaw activate`: all requests of a function go to one of its versions.

use super::deployment::Telling;
use crate::failure::Outcome;
use crate::output;
use clap::Args;
use thaw_daemon::deploy;

/// Send all requests of a function to one of its versions.
///
/// A running daemon does so at once, and no request is lost: requests that are under way are
/// answered by the version that has them, and open connections end when they are idle, after
/// `drain` of [limits] at the latest. Shares of other versions end.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw activate hello-python 3\n  \
    thaw activate hello-python stable")]
pub struct Arguments {
    /// The function.
    name: String,
    /// The version, by its number or its label in `thaw versions`.
    version: String,
    #[command(flatten)]
    telling: Telling,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let Arguments { name, version, telling } = arguments;
    let action = format!("activate?version={}", output::escape(version));
    telling.change(name, &action, |store| deploy::activate(store, name, version))
}
