//! The file by which the next daemon knows the sandboxes of this one.

use super::timeouts::Times;
use super::{SandboxInfo, Sandboxes};
use crate::node::NodeState;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::sync::{Arc, Mutex};
use thaw_home::config::FunctionName;
use thaw_home::state_file::{State, StateFile};

/// Name of the file.
const FILE: &str = "sandboxes.json";

/// What the file has: the sandboxes, by their names.
#[derive(Clone, Default)]
pub(super) struct Known(BTreeMap<String, SandboxInfo>);

impl Deref for Known {
    type Target = BTreeMap<String, SandboxInfo>;

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
}

impl Sandboxes {
    /// Those that the file in a directory knows and whose instances are there.
    ///
    /// # Errors
    /// The file is there and cannot be read.
    pub fn load(node: Arc<NodeState>, directory: &Path) -> io::Result<Arc<Self>> {
        let file = directory.join(FILE);
        let known: Vec<SandboxInfo> = match std::fs::read(&file) {
            Ok(bytes) => match serde_json::from_slice(&bytes) {
                Ok(known) => known,
                Err(error) => {
                    let aside = file.with_extension("damaged");
                    std::fs::rename(&file, &aside)?;
                    let (file, aside) = (file.display(), aside.display());
                    tracing::error!(
                        "{file}: {error}; its sandboxes are instances only, and {aside} keeps it"
                    );
                    Vec::new()
                }
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        let (mut all, before) = (BTreeMap::new(), known.clone());
        for mut one in known {
            match node.service_of(one.instance) {
                Some(service) if *service.name() == one.function => {
                    service.hold(one.instance);
                    // An older Thaw knew none.
                    one.version = service.version();
                    all.insert(one.name.clone(), one);
                }
                // It is asleep, and its function is being frozen anew.
                None if node.may_have_instance(one.instance) => {
                    all.insert(one.name.clone(), one);
                }
                // Numbers of instances begin anew with each monitor.
                _ => tracing::warn!(sandbox = one.name, "its instance has ended meanwhile"),
            }
        }
        let is_changed = !all.values().eq(&before);
        let (all, making) = (StateFile::new(file, Known(all)), Mutex::default());
        let this = Self { node, all, making, times: Times::default() };
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
    let known = known_in(directory).unwrap_or_default();
    known.into_iter().map(|info| (info.instance, (info.function, info.version))).collect()
}

/// The versions of functions of which the file in a directory knows sandboxes: the store has to
/// keep them.
///
/// # Errors
/// The file is there and cannot be read.
pub fn functions_of_sandboxes(directory: &Path) -> io::Result<BTreeSet<(FunctionName, u32)>> {
    let known = known_in(directory)?;
    Ok(known.into_iter().map(|info| (info.function, info.version)).collect())
}

fn known_in(directory: &Path) -> io::Result<Vec<SandboxInfo>> {
    let file = directory.join(FILE);
    let why =
        |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", file.display()));
    match std::fs::read(&file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        read => serde_json::from_slice(&read.map_err(why)?).map_err(|error| why(error.into())),
    }
}
