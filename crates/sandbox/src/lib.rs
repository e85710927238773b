#![doc = include_str!("../README.md")]

pub mod allowed;
pub mod boot;
pub mod broker;
pub mod console;
mod cores;
pub mod egress;
pub mod event;
pub mod freeze;
pub mod hibernate;
pub mod host;
pub mod image;
pub mod kernel;
pub mod limits;
pub mod monitor;
pub mod partial;
pub mod prefetch;
pub mod remote;
pub mod sandbox;
pub mod working_set;
pub mod zygote;

#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;

mod area;
#[cfg(test)]
mod becomes;
mod confine;
mod join;
mod memory;
mod message;
mod pagemap;
mod recordings;
mod resolver;
mod rewind;
mod state;
mod sys;
mod text;
mod trim;

pub use boot::{
    AskedContents, BootError, BootFlags, BootPlan, MemoryWrites, Mount, MountKind, PlanError,
    PostCopy, RESUMED_MAX, Rootfs, Secrets, StartSpec, ThawOptions, TooManySecrets, connection,
};
pub use broker::{
    BlobSource, BoundAccess, BoundDirectory, ClientFile, ClosedVolume, Copied, FetchAnswer,
    FileNumbers, FileRights, FuseAccess, HostDirectory, HostPolicy, NUMBERED_MAX, OwnFiles, Volume,
    VolumeClient, VolumeMount, VolumeShare, copy_snapshot, copy_volume, cut_to_lengths,
    leave_requests_about_volumes, settle_copy, volume_descriptors,
};
pub use console::{Console, ConsoleOutput, ConsoleRate};
pub use cores::{CoreError, CoreGroup, CoreScheduling};
pub use egress::{
    Denied, DialError, Dialer, EgressBytes, EgressEntry, EgressEvents, EgressOutcome, EgressPolicy,
    EgressQuota, EgressReport, EgressRule, EgressRuleError, EgressRules, FunctionEgressBytes,
    GuardedPort, Intercepted, Interceptor, NotTaken, PortGuard, Told, Transport,
    count_egress_bytes, egress_bytes_of_functions, look_at_egress_bytes,
};
pub use event::{
    BootTimes, Event, GuestExit, KilledProcess, Lack, ProgramActivity, Progress, Violation,
    WrittenFiles,
};
pub use freeze::{
    FreezeBase, FreezeError, FreezeReport, FreezeSpec, Freezer, MergePolicy, Step, freeze,
    freeze_live,
};
pub use hibernate::{
    Awake, AwakeCause, Deflated, HibernateError, HibernateSpec, Hibernator, SwapFile, Swapped,
    Timers,
};
pub use image::{
    AncestorFile, Fit, Image, ImageError, can_mask_cpuid, cpu_features, cpu_features_of, lacking,
    level_of, missing_here,
};
pub use kernel::{KERNEL_ELF, Kernel, KernelError, kernel_build_id};
pub use limits::{
    LimitReached, Lowered, Meter, NotChanged, RaisedMemory, ResourceLimits, WeakLimits,
};
pub use memory::{MemoryReader, SandboxMemory};
pub use partial::{MovedFile, PartialLayout, Pieces, Segment, run_layout};
pub use prefetch::{CacheProbe, PrefetchLayout};
pub use remote::{ExecError, ExecSpec, RemoteEvent, RemoteMessage, SignalTo};
pub use rewind::{Effort, Reason as RewindRefusal, RewindError};
pub use sandbox::{Connector, Sandbox, Twin};
pub use state::StateError;
pub use sys::{set_terminal_mode, terminal_mode, unread_by_peer};
pub use text::escape;
pub use trim::{FILES_MAX as TRIM_FILES_MAX, Trimmer, Unchanged};
pub use working_set::{PopulatePolicy, Recorder, WorkingSet, WorkingSetError};
pub use zygote::{
    Adopted, BuildError, BuildPools, KeptForSuccessor, Legacy, OLDER_BUILDS_MAX, Orphan,
    OrphanConnection, PoolConfig, PoolStats, Processes, ReadySandbox, Template, TemplateError,
    UserIds, Zygote, ZygoteConfig, ZygoteError, ZygoteParent, ZygotePool, keep_connection,
    take_over, zygote_parent_main,
};
