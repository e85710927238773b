//! Sessions: everything that adds to the store.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::ops::Deref;
use std::path::{Path, PathBuf};

use crate::error::{Context, Result};
use crate::id::{BlobHash, Name};
use crate::known::KnownFiles;
use crate::lock::lock_shared;
use crate::stage::{Existing, SHARED_MODE, Stage, sync_directory};
use crate::store::Store;

/// The right to add to the store. While a session lives, the garbage collector
/// waits, so whoever imports files, freezes an image and records a function
/// does all of it in one session: nothing it made can vanish before it is
/// referred to. Sessions of different processes and threads run side by side.
///
/// What was not published when a session ends, or its process dies, is removed.
/// A session gives access to everything of its [`Store`].
#[derive(Debug)]
pub struct Session {
    pub(crate) store: Store,
    pub(crate) stage: Stage,
    /// Blobs that are written but not published yet, and where they are.
    pub(crate) staged: HashMap<BlobHash, PathBuf>,
    /// Sharing domains of these blobs.
    pub(crate) domains: BTreeSet<Name>,
    /// Files of the host whose contents are known.
    pub(crate) known: KnownFiles,
    /// Whether cloning files into the store has worked, or not been tried.
    pub(crate) clones: bool,
    /// Shared lock of the store. The last field: released after the stage is gone.
    _lock: File,
}

impl Store {
    /// Begins to add to the store; waits while the garbage collector runs.
    pub fn session(&self) -> Result<Session> {
        let _acting = self.layout.act()?;
        let path = self.layout.lock();
        let lock = File::open(&path).context("open", &path)?;
        lock_shared(&lock, &path)?;
        let stage = self.reserve().spend(|| Stage::create(&self.layout))?;
        // The next one may need it; most stores have it.
        let _ = self.reserve().fill();
        Ok(Session {
            store: self.clone(),
            stage,
            staged: HashMap::new(),
            domains: BTreeSet::new(),
            known: KnownFiles::default(),
            clones: true,
            _lock: lock,
        })
    }
}

impl Session {
    /// Writes a small file so that its name stands for either its old or its
    /// whole new content, whenever the machine stops.
    pub(crate) fn write_record(
        &mut self,
        to: &Path,
        content: &[&[u8]],
        existing: Existing,
    ) -> Result<()> {
        self.write_record_as(to, content, existing, SHARED_MODE)
    }

    /// The same with other permissions.
    pub(crate) fn write_record_as(
        &mut self,
        to: &Path,
        content: &[&[u8]],
        existing: Existing,
        mode: u32,
    ) -> Result<()> {
        self.stage.write_record(to, content, existing, mode)
    }

    /// Removes a file and makes that durable; says whether it was there.
    pub(crate) fn remove_record(&mut self, path: &Path) -> Result<bool> {
        match fs::remove_file(path) {
            Ok(()) => sync_directory(parent(path)).map(|()| true),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error).context("remove", path),
        }
    }
}

/// The directory of a file in the store.
pub(crate) fn parent(path: &Path) -> &Path {
    path.parent().expect("every file of the store lies below its root")
}

impl Deref for Session {
    type Target = Store;

    fn deref(&self) -> &Store {
        &self.store
    }
}
