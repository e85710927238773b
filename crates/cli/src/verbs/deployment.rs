//! What the verbs have in common that change which version of a function gets its requests.

use crate::client::{Daemon, DaemonArguments};
use crate::failure::{Failure, Outcome};
use crate::output;
use clap::Args;
use thaw_daemon::deploy::{DeployError, Deployment};
use thaw_home::home::Home;
use thaw_store::Store;

/// Whom to ask, and how to tell what was done.
#[derive(Debug, Args)]
pub struct Telling {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonArguments,
}

impl Telling {
    /// The daemon that is named, or else the one that runs.
    pub fn daemon(&self) -> Result<Option<Daemon>, Failure> {
        match self.daemon.is_named() {
            true => Daemon::find(&self.daemon).map(Some),
            false => Ok(Daemon::running(&Home::existing()?)),
        }
    }

    /// Has the daemon do something by `action`, a part of the path below the function's, or does
    /// it in the store if there is no daemon. Tells what holds now.
    ///
    /// # Errors
    /// It is refused.
    pub fn change(
        &self,
        function: &str,
        action: &str,
        in_store: impl FnOnce(&Store) -> Result<Deployment, DeployError>,
    ) -> Outcome {
        let deployment = match self.daemon()? {
            Some(daemon) => {
                daemon.post(&format!("/functions/{}/{action}", output::escape(function)))?
            }
            None => {
                let store = Store::open(&Home::existing()?.store())?;
                in_store(&store).map_err(Failure::failed)?
            }
        };
        self.tell(&deployment, describe)
    }

    /// Prints it.
    ///
    /// # Errors
    /// Nobody reads it.
    pub fn tell(
        &self,
        deployment: &Deployment,
        text: impl FnOnce(&Deployment) -> String,
    ) -> Outcome {
        output::print_done(self.json, deployment, text)
    }
}

/// Where requests go, in a line.
fn describe(deployment: &Deployment) -> String {
    let mut parts = Vec::new();
    for version in &deployment.versions {
        let header = version.header.as_ref();
        let header = header.map(|header| format!("those with {}: {}", header.name, header.value));
        let percent = (version.percent > 0).then(|| format!("{} percent", version.percent));
        let what: Vec<String> = percent.into_iter().chain(header).collect();
        if version.percent == 100 {
            parts.push(format!("all requests go to version {}", version.number));
        } else if !what.is_empty() {
            parts.push(format!("{} to version {}", what.join(" and "), version.number));
        }
    }
    format!("{}: {}", deployment.function, parts.join(", "))
}
