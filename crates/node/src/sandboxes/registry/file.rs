//! The file by which the next daemon knows the sandboxes of this one.

use super::timeouts::Times;
use super::{SandboxInfo, Sandboxes};
use crate::service::Services;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Display;
use std::io;
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::sync::{Arc, Mutex};
use thaw_home::config::FunctionName;
use thaw_home::state_file::table::{Change, Table};
use thaw_home::state_file::{Lines, State, StateFile, lines};

/// Name of the file.
const FILE: &str = "sandboxes.json";
/// What its lines call them.
const TABLE: &str = "sandboxes";

/// What the file has: the sandboxes, by their names.
#[derive(Clone, Default)]
pub(super) struct Known(Table<SandboxInfo>);

impl Deref for Known {
    type Target = Table<SandboxInfo>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Known {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl State for Known {
    const LOST: &'static str = "the next daemon does not know them";

    fn to_bytes(&self) -> Vec<u8> {
        let all: Vec<_> = self.values().collect();
        serde_json::to_vec(&all).expect("plain data")
    }

    fn take_changes(&mut self) -> Option<Vec<u8>> {
        Some(self.0.take_changes(TABLE))
    }
}

impl Sandboxes {
    /// Those that the file in a directory knows and whose instances are there.
    ///
    /// # Errors
    /// The file is there and cannot be read.
    pub fn load(services: Arc<Services>, directory: &Path) -> io::Result<Arc<Self>> {
        let file = directory.join(FILE);
        let known = match known_in(&file) {
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                let aside = file.with_extension("damaged");
                std::fs::rename(&file, &aside)?;
                let aside = aside.display();
                tracing::error!("{error}; its sandboxes are instances only, and {aside} keeps it");
                Table::default()
            }
            read => {
                let (known, rest) = read?;
                if let Err(error) = rest {
                    tracing::error!("{error}; what has changed after that is lost");
                }
                known
            }
        };
        let (mut all, before) = (Table::default(), known.clone());
        for mut one in known.values().cloned() {
            match services.service_of(one.instance) {
                Some(service) if *service.name() == one.function => {
                    service.hold(one.instance);
                    // An older Thaw knew none.
                    one.version = service.version();
                    all.insert(one.name.clone(), one);
                }
                // It is asleep, and its function is being frozen anew.
                None if services.may_have_instance(one.instance) => {
                    all.insert(one.name.clone(), one);
                }
                // Numbers of instances begin anew with each monitor.
                _ => tracing::warn!(sandbox = one.name, "its instance has ended meanwhile"),
            }
        }
        let is_changed = *all != *before;
        let (all, making) = (StateFile::new(file, Known(all)), Mutex::default());
        let this = Self { services, all, making, times: Times::default() };
        if is_changed {
            this.all.write_soon();
        }
        Ok(Arc::new(this))
    }

    /// Writes them down for the next daemon; the log says why if it cannot.
    pub(super) async fn write(&self) {
        let _ = self.all.write().await;
    }

    /// Waits until what has changed so far is in the file, or the log says why it is not.
    pub async fn written(&self) {
        let _ = self.all.written().await;
    }
}

/// The functions of which the file in a directory knows sandboxes, and their versions, by their
/// instances; none if it cannot be read, which [`Sandboxes::load`] says.
pub fn versions_of_sandboxes(directory: &Path) -> HashMap<u64, (FunctionName, u32)> {
    let known = known_in(&directory.join(FILE)).map(|(known, _)| known).unwrap_or_default();
    let version = |info: &SandboxInfo| (info.instance, (info.function.clone(), info.version));
    known.values().map(version).collect()
}

/// The versions of functions of which the file in a directory knows sandboxes: the store has to
/// keep them.
///
/// # Errors
/// The file is there and cannot be read.
pub fn functions_of_sandboxes(directory: &Path) -> io::Result<BTreeSet<(FunctionName, u32)>> {
    let (known, rest) = known_in(&directory.join(FILE))?;
    rest?;
    Ok(known.values().map(|info| (info.function.clone(), info.version)).collect())
}

/// Those that a file knows; none if it is not there. [`io::ErrorKind::InvalidData`]: it is damaged. If only
/// a change is, those of before it, and what is wrong.
fn known_in(file: &Path) -> io::Result<(Table<SandboxInfo>, io::Result<()>)> {
    let why =
        |kind, error: &dyn Display| io::Error::new(kind, format!("{}: {error}", file.display()));
    let read = lines(file).map_err(|error| why(error.kind(), &error))?;
    let Some(Lines { whole, changes }) = read else { return Ok((Table::default(), Ok(()))) };
    let damaged = |error: serde_json::Error| why(io::ErrorKind::InvalidData, &error);
    let all: Vec<SandboxInfo> = serde_json::from_slice(&whole).map_err(damaged)?;
    let by_name = all.into_iter().map(|info| (info.name.clone(), info));
    let mut known = Table::from(by_name.collect::<BTreeMap<_, _>>());
    for change in changes {
        match serde_json::from_slice::<Change<_>>(&change) {
            Ok(change) => known.apply(change),
            Err(error) => return Ok((known, Err(damaged(error)))),
        }
    }
    Ok((known, Ok(())))
}
