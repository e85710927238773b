//! Keys of checkpoints, in files of their owners.

use crate::failure::Failure;
use clap::Args;
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use thaw_home::seal::owner::{KEY_MAX, KeyId, OwnerKey};
use zeroize::Zeroizing;

/// The key that a checkpoint is encrypted with.
#[derive(Debug, Args)]
pub struct KeyFile {
    /// File with the key that the checkpoint is encrypted with: 32 to 4096 bytes that nobody can
    /// guess, taken as they are. Thaw does not keep it; without it nobody reads the checkpoint.
    #[arg(long = "key-file", value_name = "FILE")]
    path: Option<PathBuf>,
}

impl KeyFile {
    /// The bytes of the key; empty: none is wanted.
    ///
    /// # Errors
    /// The file cannot be read, or holds no key.
    pub fn read(&self) -> Result<Zeroizing<Vec<u8>>, Failure> {
        let mut bytes = Zeroizing::new(Vec::new());
        let Some(path) = &self.path else { return Ok(bytes) };
        let failed = |why: &dyn std::fmt::Display| {
            Failure::failed(format!("cannot use {}: {why}", path.display()))
        };
        // One byte more shows that it is too long; no copies are left behind by growing.
        bytes.reserve_exact(KEY_MAX + 1);
        let mut file = File::open(path).map_err(|error| failed(&error))?;
        let read = file.by_ref().take(KEY_MAX as u64 + 1).read_to_end(&mut bytes);
        read.map_err(|error| failed(&error))?;
        OwnerKey::new(bytes.clone()).map_err(|error| failed(&error))?;
        Ok(bytes)
    }

    /// What the key of these bytes is told from others by; `None`: there is none.
    ///
    /// # Errors
    /// They are no key.
    pub fn id_of(key: &[u8]) -> Result<Option<KeyId>, Failure> {
        if key.is_empty() {
            return Ok(None);
        }
        let key = OwnerKey::new(Zeroizing::new(key.to_vec())).map_err(Failure::failed)?;
        Ok(Some(key.id()))
    }
}
