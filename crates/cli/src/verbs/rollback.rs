//! `thaw rollback`: takes back the last change of a function.

use super::deployment::Telling;
use crate::failure::Outcome;
use clap::Args;
use thaw_daemon::deploy;

/// Take back the last change of a function: end what `thaw split` has begun, or else send all
/// requests to the version that was active before.
///
/// The versions stay; `thaw activate` goes forth again.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  thaw rollback hello-python")]
pub struct Arguments {
    /// The function.
    name: String,
    #[command(flatten)]
    telling: Telling,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let Arguments { name, telling } = arguments;
    telling.change(name, "rollback", |store| deploy::roll_back(store, name))
}
