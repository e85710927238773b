//! What the admin API says.

use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use thaw_home::config::{EntryKind, FunctionConfig, FunctionName, Isolation};
use thaw_home::function::BuiltFunction;
use thaw_home::volumes::VolumeSnapshot;
use thaw_node::boots::BootRecord;
use thaw_node::catalog::{Catalog, PARTIAL};
use thaw_node::instance::{FrozenInstance, HibernatedInstance, SleepingInstance, StandbyInfo};
use thaw_node::pulls::Fetching;
use thaw_node::service::{InstanceInfo, Service};
use thaw_sandbox::Copied;
use thaw_store::{CheckpointRecord, ImageForm, ImageInfo, Store, StoreError};

/// Boots that a [`FunctionDetail`] shows.
const BOOTS_SHOWN: usize = 16;

/// An answer that says why something was not done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Problem {
    /// A short name of the error.
    pub error: String,
    /// One sentence.
    pub reason: String,
}

impl Problem {
    pub(super) const PROGRAM_NOT_FOUND: &str = "program_not_found";
    pub(super) const PROGRAM_NOT_EXECUTABLE: &str = "program_not_executable";

    /// The exit code of a shell that is told to run a program which cannot be run, if that is the
    /// problem.
    pub fn exit_code(&self) -> Option<u8> {
        match self.error.as_str() {
            Self::PROGRAM_NOT_FOUND => Some(127),
            Self::PROGRAM_NOT_EXECUTABLE => Some(126),
            _ => None,
        }
    }
}

/// A function, in short.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct FunctionInfo {
    /// Its name.
    pub name: FunctionName,
    /// The number of its active version.
    #[serde(default)]
    pub version: u32,
    /// Its image.
    pub image: String,
    /// Port on which the program listens.
    pub port: u16,
    /// Its own gateway address, if it has one.
    pub listen: Option<SocketAddr>,
    /// When an instance may serve a second connection.
    pub isolation: Isolation,
    /// How clients reach it.
    pub kind: EntryKind,
    /// Live instances.
    pub instances: usize,
    /// Process ids of the instances that were booted ahead.
    pub ready: Vec<u32>,
    /// Milliseconds for which it still gets no request, since its instances have crashed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backs_off_ms: Option<u64>,
    /// How the rest of it comes, if only a part is here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fetching: Option<Fetching>,
    /// Why it cannot be served, if so, or which version was taken out of service for its
    /// failures.
    pub problem: Option<String>,
}

/// A function, in full.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct FunctionDetail {
    /// The function in short.
    #[serde(flatten)]
    pub info: FunctionInfo,
    /// Its configuration, without the values of its environment variables.
    #[schemars(with = "serde_json::Value")]
    pub config: FunctionConfig,
    /// Its live instances.
    pub live: Vec<InstanceInfo>,
    /// What is kept for its next boots.
    pub standby: StandbyInfo,
    /// Its most recent boots, newest first; times in nanoseconds.
    pub boots: Vec<BootRecord>,
}

/// An instance that has become its function's image.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Frozen {
    /// The function.
    pub function: FunctionName,
    /// The instance, which has ended.
    pub instance: u64,
    /// Its image.
    #[serde(flatten)]
    pub frozen: FrozenInstance,
}

/// A checkpoint in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct CheckpointInfo {
    /// Its name.
    pub name: String,
    /// The function of which an instance was checkpointed.
    pub function: String,
    /// The sharing domain that it belongs to.
    pub domain: Option<String>,
    /// Its image.
    pub image: String,
    /// Images that it differs from, the oldest first.
    pub ancestors: Vec<String>,
    /// Bytes of its own image on disk.
    pub allocated: u64,
    /// When it was made, milliseconds since the epoch.
    pub created_ms: u64,
    /// The id of the key that it is encrypted with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Snapshots of volumes that belong to it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<VolumeSnapshot>,
}

/// A snapshot of a volume that was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct SnapshotMade {
    /// Regular files.
    pub files: u64,
    /// Those of them that share their blocks with the original.
    pub shared: u64,
}

impl From<Copied> for SnapshotMade {
    fn from(Copied { files, shared }: Copied) -> Self {
        Self { files, shared }
    }
}

impl CheckpointInfo {
    /// All checkpoints of a store, by name; of damaged ones the log tells.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn all(store: &Store) -> Result<Vec<Self>, StoreError> {
        let list = store.list_checkpoints()?;
        for (name, error) in &list.damaged {
            tracing::warn!("checkpoint {name} cannot be read: {error}");
        }
        let images = store.list_images()?;
        Ok(list.records.into_iter().map(|record| Self::of(store, &images, record)).collect())
    }

    fn of(store: &Store, images: &[ImageInfo], record: CheckpointRecord) -> Self {
        let function = record.config["function"].as_str().unwrap_or_default().to_owned();
        let volumes = VolumeSnapshot::of_checkpoint(&record);
        // One that is damaged does not hide the others; restoring says what is wrong.
        let ancestors = store.image_ancestors(record.image).unwrap_or_default();
        let of_image = images.iter().find(|image| image.id == record.image);
        Self {
            name: record.name.to_string(),
            function,
            domain: record.owner.map(|owner| owner.to_string()),
            image: record.image.to_string(),
            ancestors: ancestors.iter().map(ToString::to_string).collect(),
            allocated: of_image.map_or(0, |image| image.allocated),
            created_ms: record.created_ms,
            key: record.config["key"].as_str().map(str::to_owned),
            volumes,
        }
    }
}

/// An instance that has given up its memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Hibernated {
    /// The function.
    pub function: FunctionName,
    /// The instance.
    pub instance: u64,
    /// What was written.
    #[serde(flatten)]
    pub hibernated: HibernatedInstance,
}

/// An instance that was put to sleep.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct FellAsleep {
    /// The function.
    pub function: FunctionName,
    /// The instance.
    pub instance: u64,
    /// What was written.
    #[serde(flatten)]
    pub asleep: SleepingInstance,
}

/// An instance that is awake.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Woken {
    /// The function.
    pub function: FunctionName,
    /// The instance.
    pub instance: u64,
    /// Microseconds until its memory was in place again, or until it ran if it was asleep;
    /// `None`: it was awake.
    pub wake_us: Option<u64>,
}

/// An image in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ImageSummary {
    /// Its name.
    pub image: String,
    /// The functions that it belongs to; empty for one that nothing refers to.
    pub functions: Vec<String>,
    /// The same with the version, as in `hello@3`: of versions that are not active, too.
    #[serde(default)]
    pub versions: Vec<String>,
    /// The checkpoints that it belongs to.
    #[serde(default)]
    pub checkpoints: Vec<String>,
    /// Names of the images that it differs from and cannot be used without, the root first.
    #[serde(default)]
    pub ancestors: Vec<String>,
    /// Bytes of the file, holes included.
    pub len: u64,
    /// Bytes on disk.
    pub allocated: u64,
    /// Whether it lies there packed, as it is booted, or both.
    #[serde(default)]
    #[schemars(with = "String")]
    pub form: ImageForm,
    /// Whether a working set was recorded.
    pub has_working_set: bool,
}

impl FunctionInfo {
    pub(crate) fn new(service: &Service, catalog: &Catalog) -> Self {
        let config = service.config();
        Self {
            name: config.name.clone(),
            version: service.version(),
            image: service.image().to_owned(),
            port: config.port_number(),
            listen: config.listen,
            isolation: config.isolation,
            kind: config.entry.kind,
            instances: service.instance_count(),
            ready: service.launcher().standby().ready,
            backs_off_ms: service.backs_off().map(|left| left.as_millis() as u64),
            fetching: (service.version() == PARTIAL)
                .then(|| service.shared().pulls().fetching(config.name.as_str()))
                .flatten(),
            problem: catalog
                .problem(&config.name)
                .or_else(|| service.unreachable())
                .or_else(|| missing_secret(service))
                .or_else(|| lacking_volume(service)),
        }
    }
}

/// Why copies cannot be thawed for want of a secret, if so.
fn missing_secret(service: &Service) -> Option<String> {
    let config = service.config();
    let missing = service.shared().secrets()?.missing(&config.name, &config.secrets.names)?;
    Some(missing.to_string())
}

/// Why copies cannot be thawed for want of a volume, if so.
fn lacking_volume(service: &Service) -> Option<String> {
    let config = service.config();
    let volumes = service.shared().volumes().ok()?;
    Some(volumes.lacking(&config.name, &config.volumes)?.to_string())
}

impl FunctionDetail {
    pub(crate) fn new(service: &Service, admin: &super::Admin) -> Self {
        Self {
            info: FunctionInfo::new(service, &admin.catalog),
            config: service.config().without_secrets(),
            live: service.instances(),
            standby: service.launcher().standby(),
            boots: admin.shared().boots().of(service.name().as_str(), BOOTS_SHOWN),
        }
    }
}

/// All images of a store, with the functions that they belong to.
///
/// # Errors
/// The store cannot be read.
pub fn summarize_images(store: &Store) -> Result<Vec<ImageSummary>, StoreError> {
    let records = store.list_functions()?.records;
    let versions: Vec<_> = records
        .iter()
        .flat_map(|record| record.versions().into_iter().map(|version| (&record.name, version)))
        .collect();
    let functions: Vec<_> = records
        .iter()
        .filter_map(|record| BuiltFunction::from_record(record.clone()).ok())
        .collect();
    let checkpoints = store.list_checkpoints()?.records;
    let summarize = |image: ImageInfo| ImageSummary {
        image: image.id.to_string(),
        checkpoints: checkpoints
            .iter()
            .filter(|checkpoint| checkpoint.image == image.id)
            .map(|checkpoint| checkpoint.name.to_string())
            .collect(),
        // What is damaged is for the check of the store to tell.
        ancestors: store
            .image_ancestors(image.id)
            .unwrap_or_default()
            .iter()
            .map(ToString::to_string)
            .collect(),
        functions: functions
            .iter()
            .filter(|function| function.image == image.id)
            .map(|function| function.function.config.name.to_string())
            .collect(),
        versions: versions
            .iter()
            .filter(|(_, version)| version.image == Some(image.id))
            .map(|(name, version)| format!("{name}@{}", version.number))
            .collect(),
        len: image.len,
        allocated: image.allocated,
        form: image.form,
        has_working_set: image.working_set_len > 0,
    };
    Ok(store.list_images()?.into_iter().map(summarize).collect())
}
