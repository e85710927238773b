//! The volumes of a program that is started a second time: copies of its own, which end with it.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, chown};
use tempfile::TempDir;
use thaw_home::config::{ByteSize, FunctionConfig};
use thaw_home::home::Home;
use thaw_home::volumes::VolumeStore;
use thaw_sandbox::copy_volume;

/// Most bytes of a volume that are copied for a comparison.
const BYTES_MAX: u64 = 64 << 20;

/// Copies of the volumes of a function.
pub(super) struct CopiedVolumes {
    store: VolumeStore,
    _directory: TempDir,
}

impl CopiedVolumes {
    /// Copies what lies in the volumes of a function in `store` now.
    ///
    /// # Errors
    /// Why not, for people: one is in use, a directory of the host, or too large.
    pub fn of(config: &FunctionConfig, store: Option<&VolumeStore>) -> Result<Self, String> {
        let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
        let root = directory.path().join("home");
        fs::create_dir(&root).map_err(|error| error.to_string())?;
        if let Some(store) = store {
            // Whoever may read the originals writes the copies.
            let owner = fs::metadata(store.home().root());
            let given = owner.and_then(|owner| chown(&root, Some(owner.uid()), Some(owner.gid())));
            given.map_err(|error| error.to_string())?;
        }
        let home = Home::at(root).map_err(|error| error.to_string())?;
        let copies = VolumeStore::of(home.clone());
        for volume in &config.volumes {
            let name = &volume.name;
            let failed = |error: String| format!("volume `{name}` cannot be copied: {error}");
            if volume.host.is_some() {
                return Err(failed("it is a directory of the host".to_owned()));
            }
            let store = store.ok_or_else(|| failed("it is not known".to_owned()))?;
            let found = store.show(name).map_err(|error| failed(error.to_string()))?;
            if found.used > BYTES_MAX {
                return Err(failed(format!("it has more than {} MiB", BYTES_MAX >> 20)));
            }
            let (functions, size) = (std::slice::from_ref(&config.name), ByteSize(found.size));
            copies
                .create(name, size, functions, None)
                .map_err(|error| failed(error.to_string()))?;
            let to = copies.show(name).map_err(|error| failed(error.to_string()))?.path;
            // The directory of the copies can be reached by this user alone.
            let opened = File::open(&found.path).and_then(|from| Ok((from, File::open(&to)?)));
            let (from, to) = opened.map_err(|error| failed(error.to_string()))?;
            let _acting = home.act().map_err(|error| failed(error.to_string()))?;
            let copied = copy_volume(from.as_fd(), to.as_fd(), BYTES_MAX);
            copied.map_err(|error| failed(error.to_string()))?;
        }
        Ok(Self { store: copies, _directory: directory })
    }

    /// Where they are.
    pub fn store(&self) -> VolumeStore {
        self.store.clone()
    }
}
