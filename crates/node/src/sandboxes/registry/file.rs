//! The file by which the next daemon knows the sandboxes of this one.

use super::timeouts::Times;
use super::{SandboxInfo, Sandboxes};
use crate::config::FunctionName;
use crate::node::NodeState;
use crate::replace::replace;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use tokio::runtime::Handle;
use tokio::sync::Mutex as AsyncMutex;
use tokio::task::spawn_blocking;

/// Name of the file.
const FILE: &str = "sandboxes.json";

/// How much of what was changed is in the file.
#[derive(Default)]
pub(super) struct Written {
    /// So many changes there were.
    changes: AtomicU64,
    /// The file has so many of them. Held while it is written.
    up_to: Arc<AsyncMutex<u64>>,
}

impl Written {
    /// One more; its number.
    fn note_change(&self) -> u64 {
        self.changes.fetch_add(1, SeqCst) + 1
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
        let this = Self {
            node,
            file,
            all: Mutex::new(all),
            making: Mutex::default(),
            written: Written::default(),
            times: Times::default(),
        };
        if is_changed {
            this.write_now();
        }
        Ok(Arc::new(this))
    }

    /// Writes them down for the next daemon, in a thread for that. When this is done, what was changed
    /// before is in the file; many who wait share a write.
    pub(super) async fn write(self: &Arc<Self>) {
        let change = self.written.note_change();
        self.write_up_to(change).await;
    }

    /// The same for one who does not wait.
    pub(super) fn write_soon(self: &Arc<Self>) {
        let change = self.written.note_change();
        match Handle::try_current() {
            Ok(runtime) => {
                let this = self.clone();
                drop(runtime.spawn(async move { this.write_up_to(change).await }));
            }
            Err(_) => self.write_now(),
        }
    }

    /// Waits until what has changed so far is in the file.
    pub async fn written(self: &Arc<Self>) {
        self.write_up_to(self.written.changes.load(SeqCst)).await;
    }

    async fn write_up_to(self: &Arc<Self>, change: u64) {
        let mut written = self.written.up_to.clone().lock_owned().await;
        if *written >= change {
            return;
        }
        let this = self.clone();
        let write = move || {
            // It may have more of what changes from now on, which is written again.
            let changes = this.written.changes.load(SeqCst);
            this.write_now();
            *written = changes;
        };
        // If it panics, the next one is tried.
        let _ = spawn_blocking(write).await;
    }

    /// By one at a time: whoever writes last has read last.
    fn write_now(&self) {
        let all: Vec<_> = self.all().values().cloned().collect();
        let text = serde_json::to_vec(&all).expect("plain data");
        if let Err(error) = replace(&self.file, &text) {
            tracing::warn!("{}: {error}; the next daemon does not know them", self.file.display());
        }
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
