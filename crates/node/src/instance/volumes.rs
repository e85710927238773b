//! Copies of the volumes of an instance that is checkpointed, while all who use them are at rest.

use super::supervisor::Held;
use crate::volumes::{SnapshotsAtRest, VolumeSnapshot};
use std::sync::{Mutex, PoisonError};
use thaw_sandbox::{Copied, Volume};

/// Snapshots of volumes that are being made, and the instances that are at rest for them. Without
/// [`VolumesAtRest::keep`], nothing of them is left when it is dropped.
#[derive(Debug)]
pub struct VolumesAtRest {
    snapshots: SnapshotsAtRest,
    listed: Vec<VolumeSnapshot>,
    /// `None`: they have gone on.
    held: Mutex<Option<Vec<Held>>>,
}

impl VolumesAtRest {
    pub(crate) fn new(
        snapshots: SnapshotsAtRest,
        listed: Vec<VolumeSnapshot>,
        held: Vec<Held>,
    ) -> Self {
        Self { snapshots, listed, held: Mutex::new(Some(held)) }
    }

    /// What the snapshots will be called.
    pub fn snapshots(&self) -> Vec<VolumeSnapshot> {
        self.listed.clone()
    }

    fn take_held(&self) -> Option<Vec<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Copies the files, and lets the others go on. `open` says how many files of a volume the
    /// instance itself has open, which must be at rest. May block for seconds.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub fn copy(&self, open: &dyn Fn(&Volume) -> usize) -> Result<(), String> {
        let held = self.take_held().ok_or(
            "it came to rest so late that others that have its volumes had to go on; try again",
        )?;
        let resting = |volume: &Volume| {
            open(volume) + held.iter().map(|held| held.open_files_of(volume)).sum::<usize>()
        };
        self.snapshots.copy(&resting).map_err(|error| error.to_string())
    }

    /// Lets the others go on if nothing has been copied yet: nothing will be.
    pub fn let_go(&self) {
        drop(self.take_held());
    }

    /// Makes the copies durable, and keeps them if `store` succeeds, which has somebody refer to them.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub fn keep<T>(&self, store: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
        self.snapshots.keep(store)
    }

    /// What was copied of the first volume.
    pub fn copied(&self) -> Copied {
        self.snapshots.copied()
    }
}
