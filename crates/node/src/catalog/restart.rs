//! Restarting a function: the same versions of it, served by new instances.

use super::Catalog;
use crate::service::Served;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use thaw_home::config::{FunctionConfig, FunctionName};
use thaw_home::function::{BuiltFunction, FunctionError};
use thaw_home::home::Home;
use thaw_home::secrets::SecretStore;
use thaw_store::{FunctionRecord, Name, StoreError};

/// What a restart has begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Restarted {
    /// The function.
    pub function: String,
    /// Instances of before: idle ones have ended, each other one does when it has answered and its
    /// connections are idle, at the latest after `limits.drain`.
    pub instances: usize,
    /// The numbers of these.
    #[serde(default)]
    pub ending: Vec<u64>,
    /// Sandboxes: they stay, and have the values of secrets that they were made with.
    #[serde(default)]
    pub sandboxes: usize,
}

/// Why a function is not restarted. What serves it goes on.
#[derive(Debug, thiserror::Error)]
pub enum RestartError {
    /// There is none.
    #[error("no function is named `{0}`; `thaw list` shows those that are served")]
    Unknown(String),
    /// It is being pulled.
    #[error("`{0}` is not here as a whole yet; restart it when its pull is complete")]
    Partial(String),
    /// It could not be served.
    #[error("`{function}` goes on as it was: {reason}")]
    NotServed {
        /// The function.
        function: String,
        /// Why new instances would not do.
        reason: String,
    },
    /// It would be other versions that serve it.
    #[error(
        "`{0}` goes on as it was: its versions or their shares have changed in the store and are not \
         served yet; send the daemon SIGHUP to serve them, and then restart the function"
    )]
    Changed(String),
    /// It is not usable.
    #[error(transparent)]
    Function(#[from] FunctionError),
    /// The store cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Catalog {
    /// Serves the versions of a function that get requests by new instances: those of before get no
    /// more requests, and those that are asleep end: a program may remember what it has read.
    /// Sandboxes stay: they have state that nobody else has.
    /// Reads whole images, so it may take seconds.
    ///
    /// # Errors
    /// There is no such function, or new instances could not be made: nothing has changed then.
    pub fn restart(self: &Arc<Self>, home: &Home, name: &str) -> Result<Restarted, RestartError> {
        let _reloading = self.reloading.lock().expect("no holder panics");
        let unknown = || RestartError::Unknown(name.to_owned());
        let before = self.services.served(name).ok_or_else(unknown)?;
        if before.services().any(|service| service.version() == super::partial::PARTIAL) {
            return Err(RestartError::Partial(name.to_owned()));
        }
        let record = self.store.get_function(&Name::new(name).map_err(|_| unknown())?)?;
        if !is_served(&record, &before) {
            return Err(RestartError::Changed(name.to_owned()));
        }
        let active = BuiltFunction::from_version(&record.name, record.active())?;
        check_secrets(home, &active.function.config)?;
        for version in record.versions().into_iter().filter(|found| record.shares(found.number)) {
            let shared = BuiltFunction::from_version(&record.name, version)?;
            check_secrets(home, &shared.function.config)?;
        }
        let known = active.function.config.name.clone();
        self.serve_anew(&known, &record, &active)?;
        let ending: Vec<u64> =
            before.services().flat_map(|service| service.ids_of_others()).collect();
        let instances = ending.len();
        let all = self.services.versions_of(name);
        let sandboxes = all.iter().map(|service| service.held_count()).sum();
        tracing::info!(function = name, instances, sandboxes, "restarted");
        Ok(Restarted { function: name.to_owned(), instances, ending, sandboxes })
    }

    fn serve_anew(
        self: &Arc<Self>,
        name: &FunctionName,
        record: &FunctionRecord,
        active: &BuiltFunction,
    ) -> Result<(), RestartError> {
        let versions = |catalog: &Self| {
            let known = catalog.known.lock().expect("no holder panics");
            known.get(name).map(|known| known.versions.clone()).unwrap_or_default()
        };
        let before = versions(self);
        let mut report = super::Reload::default();
        let service = self.version(active, None, &mut report);
        let shares = self.shares(record, &service, None, &mut report);
        if let Some(reason) = report.broken.remove(name.as_str()) {
            // What is served is what was known.
            let mut known = self.known.lock().expect("no holder panics");
            known.entry(name.clone()).or_default().versions = before;
            return Err(RestartError::NotServed { function: name.to_string(), reason });
        }
        self.services.deploy(Served::split(service, shares));
        Ok(())
    }
}

/// Whether the versions of a record are those that are served, with the same shares.
fn is_served(record: &FunctionRecord, served: &Served) -> bool {
    let stored: Vec<_> =
        record.split.iter().map(|share| (share.version, share.percent, &share.header)).collect();
    record.active().number == served.active().version() && stored.into_iter().eq(served.portions())
}

/// New instances must have their secrets: those of before may live on old ones.
fn check_secrets(home: &Home, config: &FunctionConfig) -> Result<(), RestartError> {
    let secrets = SecretStore::of(home.clone());
    match secrets.missing(&config.name, &config.secrets.names) {
        None => Ok(()),
        Some(missing) => Err(RestartError::NotServed {
            function: config.name.to_string(),
            reason: missing.to_string(),
        }),
    }
}
