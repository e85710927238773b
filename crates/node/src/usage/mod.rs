//! What a node stores and keeps in memory, and what of that its functions share: `thaw df`.
//!
//! Sizes on disk are of blocks, so holes cost nothing. What a function or a checkpoint alone needs is
//! its own: removing it frees that. A function's instances that are asleep belong to it.

mod directory;
mod memory;
mod states;
mod volumes;

pub use memory::{MemoryUse, measure_instance, measure_memory, measure_memory_of};
pub use states::memory_by_state;
pub use volumes::VolumeUsage;

use crate::asleep::{Sleeper, sleepers_in};
use crate::node::NodeState;
use directory::DirectoryUse;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use thaw_home::config::DomainName;
use thaw_home::home::{Home, HomeError};
use thaw_home::tenants::{TenantName, tenant_of};
use thaw_store::{ImageId, Name, OtherUser, Sizes, Store, StoreError, StoreUsage, User, UserKind};

/// Why nothing was counted.
#[derive(Debug, thiserror::Error)]
pub enum UsageError {
    /// The store cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The state directory cannot be used.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// A directory of it cannot be read.
    #[error("cannot count what is in {} ({error}); check its owner and permissions", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
}

/// All of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct UsageReport {
    /// The functions, by name.
    pub functions: Vec<FunctionUsage>,
    /// The checkpoints, by name.
    pub checkpoints: Vec<CheckpointUsage>,
    /// Container images and other root file systems with a name.
    pub images: Vec<RootfsUsage>,
    /// Builds of the Thaw kernel.
    pub kernels: Vec<KernelUsage>,
    /// Volumes, by name.
    #[serde(default)]
    pub volumes: Vec<VolumeUsage>,
    /// The sharing domains; `domain` is null for all functions without one.
    pub domains: Vec<DomainUsage>,
    /// The store as a whole.
    pub store: StoreTotals,
    /// The state directory beside the store.
    pub home: HomeUsage,
    /// What could not be read, one sentence each.
    pub damaged: Vec<String>,
}

/// Bytes on disk.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
pub struct DiskUse {
    /// Needed by nobody else.
    pub own_bytes: u64,
    /// Needed by others, too.
    pub shared_bytes: u64,
    /// What of both is in images that its own image differs from.
    pub base_bytes: u64,
}

impl From<Sizes> for DiskUse {
    fn from(Sizes { own, shared, base }: Sizes) -> Self {
        Self { own_bytes: own, shared_bytes: shared, base_bytes: base }
    }
}

/// A function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct FunctionUsage {
    /// Its name.
    pub name: String,
    /// Its sharing domain.
    pub domain: Option<DomainName>,
    /// The image that its own image differs from; null: it has all of its memory itself.
    #[schemars(with = "Option<String>")]
    pub base: Option<ImageId>,
    /// Its files, its images, and those of its version before.
    #[serde(flatten)]
    pub disk: DiskUse,
    /// Its instances that are asleep.
    pub asleep: AsleepUse,
    /// Its live instances; null: no daemon serves it.
    pub memory: Option<MemoryUse>,
}

/// A checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct CheckpointUsage {
    /// Its name.
    pub name: String,
    /// The function of which an instance was checkpointed.
    pub function: String,
    /// Its sharing domain.
    pub domain: Option<DomainName>,
    /// The image that its own image differs from.
    #[schemars(with = "Option<String>")]
    pub base: Option<ImageId>,
    /// Its files and its image.
    #[serde(flatten)]
    pub disk: DiskUse,
}

/// A root file system with a name, such as an unpacked container image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct RootfsUsage {
    /// Its name.
    pub name: String,
    /// Its files.
    #[serde(flatten)]
    pub disk: DiskUse,
}

/// A build of the Thaw kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct KernelUsage {
    /// Its name.
    pub kernel: String,
    /// Bytes on disk.
    pub bytes: u64,
    /// Images that need it.
    pub images: usize,
}

/// Files of instances that are asleep.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
pub struct AsleepUse {
    /// Instances.
    pub instances: usize,
    /// Bytes on disk.
    pub bytes: u64,
}

impl AsleepUse {
    fn add(&mut self, bytes: u64) {
        self.instances += 1;
        self.bytes += bytes;
    }
}

/// All functions of a sharing domain, and their checkpoints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct DomainUsage {
    /// The domain; null: all functions without one.
    pub domain: Option<DomainName>,
    /// Functions.
    pub functions: usize,
    /// Checkpoints.
    pub checkpoints: usize,
    /// Files and images: what the domain's functions share among themselves is its own.
    #[serde(flatten)]
    pub disk: DiskUse,
    /// Instances that are asleep.
    pub asleep: AsleepUse,
    /// Bytes in swap files of hibernated instances; null: there is no daemon.
    pub swap_bytes: Option<u64>,
    /// Live instances; null: there is no daemon.
    pub memory: Option<MemoryUse>,
}

/// Bytes on disk of the store.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
pub struct StoreTotals {
    /// All of it.
    pub total_bytes: u64,
    /// Images.
    pub images_bytes: u64,
    /// Working sets, and prefetch files.
    pub working_sets_bytes: u64,
    /// Contents of files.
    pub files_bytes: u64,
    /// Indexes of root file systems.
    pub indexes_bytes: u64,
    /// Kernel builds.
    pub kernels_bytes: u64,
    /// Records, and the room that is held for them on a full disk.
    pub records_bytes: u64,
    /// What builds that run now, or were killed, have not published.
    pub unpublished_bytes: u64,
    /// What nobody needs: `thaw gc` removes what is not in use just now.
    pub unused_bytes: u64,
}

/// Bytes on disk of the state directory, beside the store.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
pub struct HomeUsage {
    /// Instances that are asleep.
    pub asleep: AsleepUse,
    /// Swap files of hibernated instances; null: there is no daemon.
    pub swap_bytes: Option<u64>,
    /// Layers of container images whose pull was interrupted.
    pub pulls_bytes: u64,
    /// Pieces of functions that were pulled, kept for those that have them in common.
    pub pieces_bytes: u64,
    /// What builds keep, such as installed packages.
    pub work_bytes: u64,
    /// What functions have printed.
    pub logs_bytes: u64,
    /// The queue of triggers.
    #[serde(default)]
    pub triggers_bytes: u64,
    /// There is more in one of these directories than was looked at.
    pub is_partial: bool,
}

impl UsageReport {
    /// What is on disk. Reads records, indexes and directories, so it may take a second.
    ///
    /// # Errors
    /// The store or the state directory cannot be read.
    pub fn of_disk(home: &Home, store: &Store) -> Result<Self, UsageError> {
        let asleep = home.asleep()?;
        let sleepers = sleepers_in(&asleep)
            .map_err(|error| UsageError::Directory { path: asleep.clone(), error })?;
        let others: Vec<OtherUser> = sleepers.iter().filter_map(other_user).collect();
        let usage = store.usage(&others)?;
        let mut damaged = usage.damaged().to_vec();
        let volumes = volumes::measure(home, &mut damaged);
        let by_function = Sleeping::of(&usage, &sleepers);
        Ok(Self {
            functions: functions(&usage, &by_function),
            checkpoints: checkpoints(&usage),
            images: root_file_systems(&usage),
            kernels: kernels(&usage),
            volumes,
            domains: domains(&usage, &sleepers),
            store: totals(&usage),
            home: home_usage(home, &sleepers)?,
            damaged,
        })
    }

    /// Adds what live instances and swap files take, by function.
    pub fn with_memory(mut self, shared: &NodeState, memory: &BTreeMap<String, MemoryUse>) -> Self {
        for function in &mut self.functions {
            function.memory = Some(memory.get(&function.name).copied().unwrap_or_default());
        }
        for domain in &mut self.domains {
            let own = self.functions.iter().filter(|function| function.domain == domain.domain);
            let own = own.filter_map(|function| function.memory);
            domain.memory = Some(own.fold(MemoryUse::default(), MemoryUse::plus));
            let name = TenantName::of(domain.domain.as_ref());
            let tenants = shared.tenants().all();
            let tenant = tenants.iter().find(|tenant| *tenant.name() == name);
            domain.swap_bytes = Some(tenant.map_or(0, |tenant| tenant.swap().taken()));
        }
        self.home.swap_bytes = Some(self.domains.iter().filter_map(|d| d.swap_bytes).sum());
        self
    }
}

/// An instance that is asleep keeps the image that its own differs from.
fn other_user(sleeper: &Sleeper) -> Option<OtherUser> {
    let name = Name::new(sleeper.function.as_str()).ok()?;
    Some(OtherUser { name, index: sleeper.index, image: sleeper.base })
}

/// What is asleep of each function, and the numbers of those users.
#[derive(Default)]
struct Sleeping<'a>(BTreeMap<&'a str, (AsleepUse, Vec<usize>)>);

impl<'a> Sleeping<'a> {
    fn of(usage: &'a StoreUsage, sleepers: &'a [Sleeper]) -> Self {
        let mut found = Self::default();
        for sleeper in sleepers {
            found.0.entry(sleeper.function.as_str()).or_default().0.add(sleeper.bytes);
        }
        for (number, user) in numbered(usage, UserKind::Other) {
            found.0.entry(user.name.as_str()).or_default().1.push(number);
        }
        found
    }
}

fn numbered(usage: &StoreUsage, kind: UserKind) -> impl Iterator<Item = (usize, &User)> {
    usage.users().iter().enumerate().filter(move |(_, user)| user.kind == kind)
}

fn functions(usage: &StoreUsage, sleeping: &Sleeping<'_>) -> Vec<FunctionUsage> {
    let function = |(number, user): (usize, &User)| {
        let own = sleeping.0.get(user.name.as_str());
        let mut users = vec![number];
        users.extend(own.iter().flat_map(|(_, users)| users));
        FunctionUsage {
            name: user.name.to_string(),
            domain: tenant_of(&user.config).domain().cloned(),
            base: user.base,
            disk: usage.sizes(&users).into(),
            asleep: own.map(|(asleep, _)| *asleep).unwrap_or_default(),
            memory: None,
        }
    };
    numbered(usage, UserKind::Function).map(function).collect()
}

fn checkpoints(usage: &StoreUsage) -> Vec<CheckpointUsage> {
    let checkpoint = |(number, user): (usize, &User)| CheckpointUsage {
        name: user.name.to_string(),
        function: user.config["function"].as_str().unwrap_or_default().to_owned(),
        domain: tenant_of(&user.config).domain().cloned(),
        base: user.base,
        disk: usage.sizes(&[number]).into(),
    };
    numbered(usage, UserKind::Checkpoint).map(checkpoint).collect()
}

fn root_file_systems(usage: &StoreUsage) -> Vec<RootfsUsage> {
    let rootfs = |(number, user): (usize, &User)| RootfsUsage {
        name: user.name.to_string(),
        disk: usage.sizes(&[number]).into(),
    };
    numbered(usage, UserKind::Rootfs).map(rootfs).collect()
}

fn kernels(usage: &StoreUsage) -> Vec<KernelUsage> {
    let kernel = |kernel: &thaw_store::KernelUse| KernelUsage {
        kernel: kernel.id.to_string(),
        bytes: kernel.bytes,
        images: kernel.images,
    };
    usage.kernels().iter().map(kernel).collect()
}

fn domains(usage: &StoreUsage, sleepers: &[Sleeper]) -> Vec<DomainUsage> {
    let mut found: BTreeMap<TenantName, (Vec<usize>, AsleepUse)> = BTreeMap::new();
    for (number, user) in usage.users().iter().enumerate() {
        if matches!(user.kind, UserKind::Function | UserKind::Checkpoint) {
            found.entry(tenant_of(&user.config)).or_default().0.push(number);
        }
    }
    // Users of that kind are the sleepers that have a name, in their order.
    let named = sleepers.iter().filter(|sleeper| other_user(sleeper).is_some());
    for (sleeper, (number, _)) in named.zip(numbered(usage, UserKind::Other)) {
        let (users, asleep) = found.entry(TenantName::of(sleeper.domain.as_ref())).or_default();
        users.push(number);
        asleep.add(sleeper.bytes);
    }
    let domain = |(name, (users, asleep)): (TenantName, (Vec<usize>, AsleepUse))| {
        let count = |kind| users.iter().filter(|user| usage.users()[**user].kind == kind).count();
        DomainUsage {
            domain: name.domain().cloned(),
            functions: count(UserKind::Function),
            checkpoints: count(UserKind::Checkpoint),
            disk: usage.sizes(&users).into(),
            asleep,
            swap_bytes: None,
            memory: None,
        }
    };
    found.into_iter().map(domain).collect()
}

fn totals(usage: &StoreUsage) -> StoreTotals {
    let stored = usage.stored();
    StoreTotals {
        total_bytes: stored.total(),
        images_bytes: stored.images,
        working_sets_bytes: stored.working_sets,
        files_bytes: stored.blobs,
        indexes_bytes: stored.indexes,
        kernels_bytes: stored.kernels,
        records_bytes: stored.records,
        unpublished_bytes: stored.unpublished,
        unused_bytes: stored.unused,
    }
}

/// Bytes on disk below a directory; none of one that cannot be read.
pub(crate) fn bytes_below(path: &std::path::Path) -> u64 {
    DirectoryUse::of(path).map_or(0, |found| found.bytes)
}

fn home_usage(home: &Home, sleepers: &[Sleeper]) -> Result<HomeUsage, UsageError> {
    let mut asleep = AsleepUse::default();
    sleepers.iter().for_each(|sleeper| asleep.add(sleeper.bytes));
    let below = |name: &str| {
        let path = home.root().join(name);
        DirectoryUse::of(&path).map_err(|error| UsageError::Directory { path, error })
    };
    let (pulls, pieces, partial) = (below("pulls")?, below("pieces")?, below("partial")?);
    let (work, logs, triggers) = (below("work")?, below("logs")?, below("triggers")?);
    Ok(HomeUsage {
        asleep,
        swap_bytes: None,
        pulls_bytes: pulls.bytes,
        pieces_bytes: pieces.bytes + partial.bytes,
        work_bytes: work.bytes,
        logs_bytes: logs.bytes,
        triggers_bytes: triggers.bytes,
        is_partial: [pulls, pieces, partial, work, logs].iter().any(|found| found.is_partial),
    })
}
