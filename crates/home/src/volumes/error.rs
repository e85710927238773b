//! Why something cannot be done with a volume.

use crate::config::{ByteSize, FunctionName, QuotasError};
use crate::home::HomeError;
use crate::tenants::TenantName;
use std::io;
use std::path::{Path, PathBuf};
use thaw_store::{Name, StoreError};

/// What cannot be done with a volume.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// There is none of that name.
    #[error(
        "there is no volume `{0}`; `thaw volume create {0} --size 1GiB --function NAME` makes one"
    )]
    Missing(Name),
    /// There is none of a name that a function mounts.
    #[error(
        "there is no volume `{name}`, which function `{function}` mounts; `thaw volume create {name} \
         --size {size} --function {function}` makes it"
    )]
    MissingFor {
        /// The volume.
        name: Name,
        /// The function.
        function: FunctionName,
        /// How large the function wants it to be.
        size: ByteSize,
    },
    /// There is one of that name.
    #[error("there is a volume `{0}` already; choose another name, or remove it")]
    Exists(Name),
    /// A function may not use it.
    #[error(
        "volume `{name}` is not for function `{function}`; `thaw volume allow {name} {function}` \
         changes that"
    )]
    NotFor {
        /// The volume.
        name: Name,
        /// The function.
        function: FunctionName,
    },
    /// It is another one than a sandbox had.
    #[error(
        "volume `{0}` was removed, and is another one by now than the sandbox had; `thaw sandbox kill` \
         ends the sandbox"
    )]
    Another(Name),
    /// Somebody uses it.
    #[error(
        "volume `{0}` is in use; remove the functions that name it, or stop the daemon, and try \
         again"
    )]
    InUse(Name),
    /// A snapshot of it is being made, or put back.
    #[error("a snapshot of volume `{0}` is being made or put back; try again when that is done")]
    Busy(Name),
    /// Another process has it.
    #[error(
        "volume `{0}` is in use by another process of this host, `thaw build` or `thaw run -v`; try \
         again when that has ended"
    )]
    UsedElsewhere(Name),
    /// Sandboxes have files of it open that are not at rest.
    #[error(
        "files of volume `{0}` are open in sandboxes that are booted ahead, or are just ending; try \
         again, or have their functions keep none ready"
    )]
    OthersOpen(Name),
    /// It is a directory of the host, whose files are not put back.
    #[error(
        "volume `{0}` is a directory of the host, which is not put back and can be copied only while \
         nobody uses it"
    )]
    HostFiles(Name),
    /// A checkpoint has a snapshot.
    #[error(
        "checkpoint `{checkpoint}` needs snapshot `{label}` of volume `{name}`; `thaw checkpoints \
         --remove {checkpoint}` removes both"
    )]
    Needed {
        /// The volume.
        name: Name,
        /// The snapshot.
        label: Name,
        /// The checkpoint.
        checkpoint: Name,
    },
    /// The store cannot be read.
    #[error(transparent)]
    Store(StoreError),
    /// A directory of the host cannot be a volume.
    #[error("{} cannot be a volume: {reason}", path.display())]
    Host {
        /// The directory.
        path: PathBuf,
        /// Why not, and the way out.
        reason: String,
    },
    /// A function wants a directory of the host that the volume is not.
    #[error(
        "volume `{name}` is not the directory {} of this host; the operator makes it so with \
         `thaw volume create {name} --host {} --size SIZE --function {function}`",
        path.display(), path.display()
    )]
    NotHost {
        /// The volume.
        name: Name,
        /// The function.
        function: FunctionName,
        /// The directory that it names.
        path: PathBuf,
    },
    /// The tenant would have too much.
    #[error(
        "the quota of {tenant} is {quota} for volumes, and with this one it would have {needed} \
         bytes; give it a smaller size, remove volumes or snapshots with `thaw volume remove`, or \
         have the operator raise `volumes` in tenants.toml"
    )]
    Quota {
        /// The tenant.
        tenant: TenantName,
        /// What it may have.
        quota: ByteSize,
        /// Bytes that it would have.
        needed: u64,
    },
    /// The quotas cannot be read.
    #[error(transparent)]
    Quotas(#[from] QuotasError),
    /// A snapshot is missing.
    #[error("volume `{name}` has no snapshot `{label}`; `thaw volume show {name}` lists them")]
    NoSnapshot {
        /// The volume.
        name: Name,
        /// The snapshot.
        label: Name,
    },
    /// A snapshot of that label is there.
    #[error("volume `{name}` has a snapshot `{label}` already; choose another label")]
    SnapshotExists {
        /// The volume.
        name: Name,
        /// The snapshot.
        label: Name,
    },
    /// There are too many.
    #[error("there can be {0} at most; remove some")]
    TooMany(String),
    /// It cannot be opened.
    #[error(
        "volume `{name}`, whose files lie in {}, cannot be opened: {error}; mend what prevents that, and \
         try again", files.display()
    )]
    Unusable {
        /// The volume.
        name: Name,
        /// Where its files lie.
        files: PathBuf,
        /// What the host says.
        error: io::Error,
    },
    /// The host refuses.
    #[error("cannot {action} {}: {error}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// With what.
        path: PathBuf,
        /// What the host says.
        error: io::Error,
    },
    /// The state directory is not usable.
    #[error(transparent)]
    Home(#[from] HomeError),
}

pub(super) fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> VolumeError {
    let path = path.to_owned();
    move |error| VolumeError::Io { action, path, error }
}
