//! Copies of the volumes of an instance that is checkpointed, while all who use them are at rest.

use super::command::Held;
use std::sync::{Mutex, MutexGuard, PoisonError};
use thaw_home::volumes::{SnapshotsAtRest, VolumeSnapshot};
use thaw_sandbox::{Copied, Volume};

/// Snapshots of volumes that are being made, and the instances that are at rest for them. Without
/// [`VolumesAtRest::keep`], nothing of them is left when it is dropped.
#[derive(Debug)]
pub struct VolumesAtRest {
    listed: Vec<VolumeSnapshot>,
    stage: Mutex<Stage>,
}

#[derive(Debug)]
enum Stage {
    /// The instances rest until the files are copied.
    Begun(SnapshotsAtRest, Vec<Held>),
    Copied(SnapshotsAtRest),
    /// It was given up, is kept, or has failed.
    Over,
}

/// Whether copying could be given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GiveUp {
    /// Nothing was copied, and nothing will be.
    Done,
    /// The files are copied; the others have gone on.
    TooLate,
}

impl VolumesAtRest {
    pub(crate) fn new(
        snapshots: SnapshotsAtRest,
        listed: Vec<VolumeSnapshot>,
        held: Vec<Held>,
    ) -> Self {
        Self { listed, stage: Mutex::new(Stage::Begun(snapshots, held)) }
    }

    /// What the snapshots will be called.
    pub fn snapshots(&self) -> Vec<VolumeSnapshot> {
        self.listed.clone()
    }

    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies the files, and lets the others go on. `open` says how many files of a volume the
    /// instance itself has open, which must be at rest. May block for seconds.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub fn copy(&self, open: &dyn Fn(&Volume) -> usize) -> Result<(), String> {
        let mut stage = self.stage();
        let Stage::Begun(snapshots, held) = std::mem::replace(&mut *stage, Stage::Over) else {
            return Err("it came to rest too late; try again".to_owned());
        };
        let resting = |volume: &Volume| {
            open(volume) + held.iter().map(|held| held.open_files_of(volume)).sum::<usize>()
        };
        snapshots.copy(&resting).map_err(|error| error.to_string())?;
        *stage = Stage::Copied(snapshots);
        Ok(())
    }

    /// Gives up what has not been copied by now: the others go on, and nothing of it is left. May
    /// block for as long as copying takes.
    pub(crate) fn give_up(&self) -> GiveUp {
        let mut stage = self.stage();
        match &*stage {
            Stage::Begun(..) => {
                *stage = Stage::Over;
                GiveUp::Done
            }
            Stage::Copied(_) | Stage::Over => GiveUp::TooLate,
        }
    }

    /// Leaves nothing of what is not kept by now. May block for as long as copying or keeping takes.
    pub(crate) fn discard(&self) {
        *self.stage() = Stage::Over;
    }

    /// Makes the copies durable, and keeps them if `store` succeeds, which has somebody refer to them;
    /// with what was copied of the first volume.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub fn keep<T>(
        &self,
        store: impl FnOnce() -> Result<T, String>,
    ) -> Result<(T, Copied), String> {
        let mut stage = self.stage();
        let Stage::Copied(snapshots) = std::mem::replace(&mut *stage, Stage::Over) else {
            return Err("its volumes were not copied".to_owned());
        };
        let copied = snapshots.copied();
        Ok((snapshots.keep(store)?, copied))
    }
}
