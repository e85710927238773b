//! Processes from outside in live instances, from one daemon to the next: their streams wait while
//! there is none.

use super::NodeState;
use crate::replace::replace;
use crate::sandboxes::ExecNote;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;
use tokio::time::timeout;

/// How long sandboxes may take to have their processes wait.
const WAIT_PATIENCE: Duration = Duration::from_secs(2);
/// Name of the file.
const FILE: &str = "sandbox-processes.json";

/// The processes of the instances that an earlier daemon has left, by their numbers.
#[derive(Debug, Default)]
pub(super) struct LeftExecs {
    all: Mutex<BTreeMap<u64, Vec<ExecNote>>>,
    file: OnceLock<PathBuf>,
}

/// Those of one instance, as the file has them.
#[derive(Debug, Serialize, Deserialize)]
struct OfInstance {
    instance: u64,
    execs: Vec<ExecNote>,
}

impl NodeState {
    /// Reads what an earlier daemon has left in this directory, if it has left something. That is
    /// true once: the file goes.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub(crate) fn expect_execs(&self, directory: &Path) -> io::Result<()> {
        let file = directory.join(FILE);
        let left = match fs::read(&file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            read => {
                let left = read.and_then(|text| Ok(serde_json::from_slice(&text)?));
                left.unwrap_or_else(|error| {
                    let file = file.display();
                    tracing::error!("{file}: {error}; processes in sandboxes have no streams");
                    Vec::new()
                })
            }
        };
        match fs::remove_file(&file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let left = left.into_iter().map(|OfInstance { instance, execs }| (instance, execs));
        *self.left_execs.all.lock().expect("no holder panics") = left.collect();
        // Nobody says it twice.
        let _ = self.left_execs.file.set(file);
        Ok(())
    }

    /// The processes of an instance that an earlier daemon has left, which wait for this one.
    pub(crate) fn take_left_execs(&self, instance: u64) -> Option<Vec<ExecNote>> {
        self.left_execs.all.lock().expect("no holder panics").remove(&instance)
    }

    /// Has the processes of all live instances wait for the next daemon. A sandbox that computes and
    /// does not look is waited for, but not for long.
    pub(crate) async fn leave_execs(&self) {
        let Some(file) = self.left_execs.file.get() else { return };
        let tables: Vec<_> =
            self.everything().iter().flat_map(|service| service.with_execs()).collect();
        let left = tables.iter().map(|(instance, table)| {
            let execs = table.execs().notes().into_iter().map(ExecNote::for_disk).collect();
            OfInstance { instance: *instance, execs }
        });
        let left: Vec<_> = left.filter(|left| !left.execs.is_empty()).collect();
        if left.is_empty() {
            return;
        }
        let text = serde_json::to_vec(&left).expect("plain data");
        if let Err(error) = replace(file, &text) {
            let file = file.display();
            return tracing::warn!("{file}: {error}; streams of processes in sandboxes end now");
        }
        let is_left = |id: &u64| left.iter().any(|left| left.instance == *id);
        let tables: Vec<_> = tables.iter().filter(|(id, _)| is_left(id)).collect();
        for (_, table) in &tables {
            table.execs().wait_for_next(&table.connector());
            table.watch();
        }
        let all = async {
            for (_, table) in &tables {
                table.execs().wait().await;
            }
        };
        if timeout(WAIT_PATIENCE, all).await.is_err() {
            tracing::warn!(
                "streams of processes in sandboxes may end before the next daemon has them"
            );
        }
    }
}
