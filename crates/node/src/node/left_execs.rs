//! Processes from outside in live instances, from one daemon to the next: their streams wait while
//! there is none.

use super::NodeState;
use crate::instance::ConnectionTable;
use crate::remote::ExecNote;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use thaw_home::replace::replace;
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
    /// Reads what an earlier daemon has left in this directory, if it has left something.
    pub fn expect_execs(&self, directory: &Path) {
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
        let left = left.into_iter().map(|OfInstance { instance, execs }| (instance, execs));
        *self.left_execs.all.lock().expect("no holder panics") = left.collect();
        // Nobody says it twice.
        let _ = self.left_execs.file.set(file);
    }

    /// All that was left is taken over, or has ended. Before that the file stays, for whoever follows a
    /// daemon that does not come so far.
    pub fn forget_left_execs(&self) {
        let Some(file) = self.left_execs.file.get() else { return };
        match fs::remove_file(file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!("{}: {error}; the next daemon reads it again", file.display());
            }
            _ => {}
        }
    }

    /// The processes of an instance that an earlier daemon has left, which wait for this one.
    pub(crate) fn take_left_execs(&self, instance: u64) -> Option<Vec<ExecNote>> {
        self.left_execs.all.lock().expect("no holder panics").remove(&instance)
    }

    /// Has the processes of live instances wait for the next daemon, and notes them; with each instance
    /// comes whether its memory is encrypted when it sleeps. A sandbox that computes and does not look is
    /// waited for, but not for long.
    pub(crate) async fn leave_execs_of(&self, tables: &[(u64, Arc<ConnectionTable>, bool)]) {
        let Some(file) = self.left_execs.file.get() else { return };
        if tables.is_empty() {
            return;
        }
        for (_, table, _) in tables {
            table.execs().wait_for_next(&*table.connector());
            table.watch();
        }
        let all = async {
            for (_, table, _) in tables {
                table.execs().wait().await;
            }
        };
        if timeout(WAIT_PATIENCE, all).await.is_err() {
            tracing::warn!(
                "streams of processes in sandboxes may end before the next daemon has them"
            );
        }
        let left = tables.iter().map(|(instance, table, is_secret)| {
            // Of one that is just being started nobody can say what becomes of it.
            let running = table.execs().notes().into_iter().filter(|note| note.pid.is_some());
            let noted = |note: ExecNote| match is_secret {
                true => note.beside_secrets(),
                false => note.for_disk(),
            };
            OfInstance { instance: *instance, execs: running.map(noted).collect() }
        });
        let text = serde_json::to_vec(&left.collect::<Vec<_>>()).expect("plain data");
        if let Err(error) = replace(file, &text) {
            let file = file.display();
            tracing::warn!(
                "{file}: {error}; streams of processes in sandboxes end with this daemon"
            );
        }
    }
}
