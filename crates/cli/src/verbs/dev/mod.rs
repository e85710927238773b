//! `thaw dev`: builds and serves a function again whenever its sources change.
//!
//! One thread decides ([`Session`]); others only tell it what happened: a file changed, a build
//! ended, a signal came, the daemon has gone.

mod children;
mod session;

use super::limits::WeakLimitsArgument;
use crate::failure::{Failure, Outcome};
use clap::Args;
use session::Session;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use thaw_home::config::parse_address;
use thaw_home::config::{CONFIG_FILE, TimeSpan};
use thaw_home::home::Home;

/// Build and serve a function, and again whenever its files change.
///
/// Uses the daemon that serves $THAW_HOME, or starts one of its own, which ends with it.
/// Prints the address, what the build says, and what the function prints. A build that fails
/// says why, and the version before goes on. Ctrl-C ends it.
///
/// Not watched: what .gitignore and .thawignore name; directories named .git, .hg, node_modules,
/// __pycache__, .venv, venv, target, build, dist, vendor and .gradle; and files that the build
/// itself makes.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw dev\n  \
    thaw dev ./my-shop --listen 127.0.0.1:3000\n  \
    thaw dev --tools ~/.cargo --tools ~/.rustup ./my-server")]
pub struct Arguments {
    /// The directory with the function's thaw.toml.
    #[arg(value_name = "DIR", default_value = ".")]
    directory: PathBuf,
    /// Address of the gateway of a daemon of its own; a port alone is one of 127.0.0.1.
    #[arg(long, value_name = "[IP:]PORT", default_value = "127.0.0.1:8080", value_parser = parse_address)]
    listen: SocketAddr,
    /// How long files must be unchanged before they are built.
    #[arg(long, value_name = "DURATION", default_value = "200ms")]
    quiet: TimeSpan,
    /// Show a directory of this host to the build command, read-only; see `thaw build --help`.
    #[arg(long, value_name = "DIR")]
    tools: Vec<PathBuf>,
    /// Run the build command on this host, with all your rights; see `thaw build --help`.
    #[arg(long)]
    trust_build: bool,
    #[command(flatten)]
    weak_limits: WeakLimitsArgument,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let directory = match arguments.directory.canonicalize() {
        Ok(directory) if directory.is_dir() => directory,
        _ => {
            let path = arguments.directory.display();
            return Err(Failure::failed(format!("{path} is not a directory")));
        }
    };
    if !directory.join(CONFIG_FILE).exists() {
        let path = directory.display();
        return Err(Failure::failed(format!(
            "{path} has no {CONFIG_FILE}; `thaw init {path}` writes one"
        )));
    }
    let home = Home::from_environment()?;
    Session::begin(&home, &directory, arguments)?.run()?;
    Ok(ExitCode::SUCCESS)
}
