//! `thaw split`: a version gets a share of its function's requests.

use super::deployment::Telling;
use crate::failure::{Failure, Outcome};
use crate::output;
use clap::Args;
use thaw_daemon::deploy;
use thaw_store::HeaderRule;

/// Give a version a share of its function's requests, beside the active version.
///
/// Each request is given to a version by its header or else by chance, also on a connection that
/// is kept. A connection that is handed over whole stays with the version that it was given to.
/// --percent 0 without --header ends the share, and so do `thaw activate` and `thaw build`. With
/// [rollback] in its thaw.toml, a version is taken out of service by itself when too many of its
/// requests fail.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw split hello-python 4 --percent 10\n  \
    thaw split hello-python 4 --header x-canary=yes\n  \
    thaw split hello-python 4 --percent 0")]
pub struct Arguments {
    /// The function.
    name: String,
    /// The version, by its number or its label in `thaw versions`.
    version: String,
    /// Of a hundred requests so many go to the version.
    #[arg(long, value_name = "N", required_unless_present = "header",
          value_parser = clap::value_parser!(u8).range(0..=100))]
    percent: Option<u8>,
    /// Requests with this header go there in any case; the value is compared as a whole.
    #[arg(long, value_name = "NAME=VALUE")]
    header: Option<String>,
    #[command(flatten)]
    telling: Telling,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let Arguments { name, version, telling, .. } = arguments;
    let percent = arguments.percent.unwrap_or(0);
    let rule = arguments.header.as_deref().map(HeaderRule::parse).transpose();
    let rule = rule.map_err(Failure::failed)?;
    let header = arguments.header.as_deref();
    let header = header.map(|header| format!("&header={}", output::escape(header)));
    let version_text = output::escape(version);
    let action =
        format!("split?version={version_text}&percent={percent}{}", header.unwrap_or_default());
    telling.change(name, &action, |store| deploy::split(store, name, version, percent, rule))
}
