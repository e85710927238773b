//! What the store keeps of a built function.

use crate::config::{CpuBaseline, FunctionConfig, HIDDEN, RuntimeConfig};
use crate::rootfs::StoredRootfs;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use thaw_store::{ImageId, IndexId, Name, Store, StoreError, Version};

/// A built function: its author's configuration and what the build added.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoredFunction {
    /// What the author wrote.
    pub config: FunctionConfig,
    /// The whole environment of the program.
    pub environment: BTreeMap<String, String>,
    /// Where it was built from, for people; empty: it was pulled.
    pub source: PathBuf,
    /// Where it was pulled from, if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
    /// What the program sees of the processor until it is frozen.
    #[serde(default)]
    pub cpu_baseline: CpuBaseline,
    /// What the build has found that its copies will not like.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<Finding>,
}

/// Something that copies will not like.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// What it is about.
    pub kind: FindingKind,
    /// A sentence for people.
    pub text: String,
}

/// What a finding is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FindingKind {
    /// A connection to the outside that was open at the freeze.
    Connection,
    /// A generator of random numbers that draws the same in all copies.
    Generator,
    /// Files that were written outside of volumes.
    File,
    /// Times that were read before the freeze and are kept.
    Time,
}

impl Finding {
    /// Whether a later freeze of the same program has it, too, without looking again.
    pub fn is_of_program(&self) -> bool {
        matches!(self.kind, FindingKind::Generator | FindingKind::Time)
    }
}

/// What a function was pulled as.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Its name in the registry.
    pub reference: String,
    /// Digest of its manifest.
    pub digest: String,
    /// Whether a key had signed it that registries.toml named for its registry.
    pub is_signed: bool,
}

/// A function of the store with the names of its parts.
#[derive(Clone, Debug, PartialEq)]
pub struct BuiltFunction {
    /// The function itself.
    pub function: StoredFunction,
    /// Its root file system.
    pub index: IndexId,
    /// Its image.
    pub image: ImageId,
    /// When it was built, milliseconds since the epoch.
    pub created_ms: u64,
    /// The number of the version.
    pub number: u32,
}

/// Why a stored function cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FunctionError {
    /// The store does not have it.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Its record was written by another version of Thaw.
    #[error("the record of `{name}` cannot be read ({reason}); build the function again")]
    Record {
        /// The function.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// It was never frozen.
    #[error("`{name}` has no image; build the function again")]
    NoImage {
        /// The function.
        name: String,
    },
}

impl BuiltFunction {
    /// Reads a function's record.
    ///
    /// # Errors
    /// There is no such function, or its record is not usable.
    pub fn read(store: &Store, name: &str) -> Result<Self, FunctionError> {
        let name = Name::new(name).map_err(StoreError::from)?;
        Self::from_record(store.get_function(&name)?)
    }

    /// Interprets the active version in a function's record.
    ///
    /// # Errors
    /// The record is not usable.
    pub fn from_record(record: thaw_store::FunctionRecord) -> Result<Self, FunctionError> {
        Self::from_version(&record.name, record.active())
    }

    /// Interprets a version of a function.
    ///
    /// # Errors
    /// It is not usable.
    pub fn from_version(name: &Name, version: Version) -> Result<Self, FunctionError> {
        let Version { config, index, image, created_ms, number, .. } = version;
        let name = name.to_string();
        let function: StoredFunction = serde_json::from_value(config).map_err(|error| {
            FunctionError::Record { name: name.clone(), reason: error.to_string() }
        })?;
        let image = image.ok_or(FunctionError::NoImage { name })?;
        Ok(Self { function, index, image, created_ms, number })
    }

    /// Opens the function's root file system.
    ///
    /// # Errors
    /// It is missing or damaged.
    pub fn rootfs(&self, store: &Store) -> Result<StoredRootfs, StoreError> {
        StoredRootfs::open(store, self.index)
    }
}

impl StoredFunction {
    /// The environment to be shown: without the values that the function's author has
    /// set.
    pub fn environment_without_secrets(&self) -> BTreeMap<String, String> {
        let show = |(name, value): (&String, &String)| {
            let is_secret = self.config.env.contains_key(name);
            (name.clone(), if is_secret { HIDDEN.to_owned() } else { value.clone() })
        };
        self.environment.iter().map(show).collect()
    }

    /// Environment in the form `NAME=value`.
    pub fn environment_strings(&self) -> Vec<std::ffi::OsString> {
        self.environment.iter().map(|(name, value)| format!("{name}={value}").into()).collect()
    }

    /// The runtime that was collected from the host, if one was.
    pub fn runtime(&self) -> Option<&RuntimeConfig> {
        self.config.runtime.as_ref()
    }
}
