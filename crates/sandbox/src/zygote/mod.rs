//! Zygotes: processes with all done that does not depend on the function.

mod adopt;
mod builds;
mod handle;
mod id_range;
mod kernel_file;
mod parent;
mod pool;
mod process;
mod protocol;
mod ready;
mod template;
mod verify;

pub use adopt::{
    Adopted, KeptForSuccessor, Legacy, Orphan, OrphanConnection, keep_connection, take_over,
};
pub use builds::{BuildError, BuildPools, OLDER_BUILDS_MAX};
pub use handle::ZygoteParent;
pub use parent::zygote_parent_main;
pub use pool::{PoolConfig, PoolStats, ZygotePool};
pub use protocol::UserIds;
pub use ready::ReadySandbox;
pub use template::{Template, TemplateError};

pub(crate) use handle::refuse_weak_limits;
pub(crate) use id_range::IdRange;
pub(crate) use parent::{Subordinate, map_to_themselves, set_ids};
pub use process::own_pid;
pub(crate) use process::{ExitCell, Process, pid_of};
pub(crate) use protocol::{PARENT_ARGUMENT, Step, receive, send};

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytemuck::bytes_of;
use rustix::rand::{GetRandomFlags, getrandom};
use thaw_abi::control::{Connection, MSG_STDIO, THAW_AND_HOLD, THAW_AND_RUN, THAW_AND_START};
use thaw_abi::cpu::Baseline;

use crate::boot::{BootError, BootPlan, MemoryWrites, MountKind, Rootfs, StartSpec, ThawOptions};
use crate::broker::{Broker, Directories, Ids, VolumeHolder, VolumeMount, VolumeUser};
pub use crate::console::Console;
use crate::console::HostEnd;
use crate::cores::CoreGroup;
use crate::egress::{EgressPolicy, Sockets};
use crate::host;
use crate::kernel::Kernel;
use crate::limits::{self, ResourceLimits, WeakLimits};
use crate::message;
use crate::sandbox::Sandbox;

/// How many host processes and virtual CPUs the filter of a sandbox lets it have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Processes {
    /// As many as its limits allow.
    #[default]
    Several,
    /// One of each: it cannot even ask the host for another
    /// ([`thaw_abi::filter::List::SingleProcess`]).
    One,
}

impl Processes {
    /// All values.
    pub const ALL: [Self; 2] = [Self::Several, Self::One];

    /// The filter that goes with these limits.
    pub fn of(limits: ResourceLimits) -> Self {
        if limits.processes == 1 { Self::One } else { Self::Several }
    }
}

/// How zygotes are made.
#[derive(Clone, Debug)]
pub struct ZygoteConfig {
    /// The program that a zygote runs.
    pub kernel: Kernel,
    /// Where it writes traces and panics.
    pub console: Console,
    /// First of the host user and group ids of all zygote parents, when the caller is
    /// root: each gets a range from here on that no other parent of the machine has,
    /// the first id for itself, the others for its sandboxes. A caller that is not
    /// root gets part of its range of `/etc/subuid`.
    pub uid_base: u32,
    /// Most sandboxes at a time, and so the number of user ids, or fewer where there
    /// are not enough for several parents.
    pub max_sandboxes: u32,
    /// How long a zygote may take to become ready.
    pub ready_timeout: Duration,
    /// Where the kernel may be stored, without a name: best on a file system whose
    /// page cache has huge pages.
    pub directory: Option<PathBuf>,
    /// Whether sandboxes may be made on a host that does not enforce their limits.
    pub weak_limits: WeakLimits,
}

impl ZygoteConfig {
    /// The usual configuration for this kernel.
    pub fn new(kernel: Kernel, console: Console) -> Self {
        Self {
            kernel,
            console,
            uid_base: 2_000_000,
            max_sandboxes: 16_384,
            ready_timeout: Duration::from_secs(10),
            directory: None,
            weak_limits: WeakLimits::Refuse,
        }
    }

    /// The same for a caller that has a few sandboxes at most: it leaves user ids to
    /// other zygote parents, of which a machine may have many at a time.
    pub fn for_few(kernel: Kernel, console: Console) -> Self {
        Self { max_sandboxes: 8, ..Self::new(kernel, console) }
    }
}

/// The step that fails if a zygote parent has ended as soon as it served.
const FIND_PARENT: &str = "find its process id";

/// Why there is no zygote.
#[derive(Debug, thiserror::Error)]
pub enum ZygoteError {
    /// The zygote parent could not be started.
    #[error(
        "cannot start the zygote parent ({step}): {source}; {}",
        host::advice(step, source).unwrap_or("`thaw doctor` says what this host lacks")
    )]
    Parent {
        /// What failed.
        step: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// The host does not enforce some limits, and weaker ones are not accepted.
    #[error(
        "this host does not enforce limits of {limits} ({reason}); {}, or accept weaker limits with \
         --weak-limits",
        limits::way_out()
    )]
    WeakLimits {
        /// Which, in words.
        limits: String,
        /// Why not.
        reason: String,
    },
    /// The zygote parent has ended, and all sandboxes with it.
    #[error("the zygote parent has ended, and all sandboxes with it")]
    ParentDied,
    /// A zygote could not be made.
    #[error("cannot make a zygote ({step}): {source}")]
    Create {
        /// What failed.
        step: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// Somebody has killed the zygote while it was made: another one may live.
    #[error(
        "the new zygote was killed before it was ready; `dmesg` says if the host ran out of memory"
    )]
    Killed,
    /// As many sandboxes as allowed are alive.
    #[error("{limit} sandboxes are alive, as many as allowed; end some or raise the limit")]
    Full {
        /// [`ZygoteConfig::max_sandboxes`].
        limit: u32,
    },
    /// The kernel did not become ready.
    #[error("the kernel in the new zygote did not become ready: {0}")]
    NotReady(String),
    /// The zygote is not isolated as it must be. It has been killed.
    #[error(
        "the new zygote is not isolated ({field} is {found}, must be {required}) and was killed"
    )]
    NotIsolated {
        /// Field of `/proc/PID/status`.
        field: &'static str,
        /// Its value.
        found: String,
        /// The value it must have.
        required: &'static str,
    },
}

impl ZygoteError {
    /// Whether a zygote parent ended while it started and has not said why, as one that
    /// was killed.
    fn is_end_of_parent(&self) -> bool {
        let Self::Parent { step, source } = self else { return false };
        match source.kind() {
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe => true,
            io::ErrorKind::NotFound => *step == FIND_PARENT,
            _ => false,
        }
    }
}

/// A process that waits to become a sandbox. Dropping it kills it.
#[derive(Debug)]
pub struct Zygote {
    process: Process,
    control: OwnedFd,
    console: HostEnd,
}

impl Zygote {
    fn new(process: Process, control: OwnedFd, console: HostEnd) -> Self {
        Self { process, control, console }
    }

    /// Process id as seen by the caller's `/proc`.
    pub fn pid(&self) -> u32 {
        self.process.pid
    }

    /// Whether its process has ended while it waited.
    pub fn has_ended(&self) -> bool {
        self.process.exit.get().is_some()
    }

    /// Whether what is written to images can be read of its process.
    pub(crate) fn check_memory_is_readable(&self) -> io::Result<()> {
        self.process.subject()?.check()
    }

    /// Whether its process runs. Takes a host call, and knows of an end before
    /// [`Zygote::has_ended`] does.
    fn is_running(&self) -> bool {
        self.process.is_running().unwrap_or(false)
    }

    /// A descriptor that becomes readable when the process has ended.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.process.pidfd()
    }

    /// Starts a program.
    pub fn start(self, spec: &StartSpec<'_>) -> Result<Sandbox, BootError> {
        let message = crate::boot::encode_start(spec, &MemoryWrites::default())?;
        let limits = spec.limits();
        self.set_limits(limits, spec.cpu_time_limit)?;
        let index = match &spec.rootfs {
            Rootfs::Index { file, .. } => Some(file.as_fd()),
            Rootfs::HostDirectory(_) => None,
        };
        let volumes = spec.volumes();
        let mut broker = self.broker(spec.rootfs.clone(), &spec.egress, volumes)?;
        broker.use_terminal(spec.stdio).map_err(BootError::Send)?;
        let directories = directories(spec);
        if !directories.is_empty() {
            let control = self.control.try_clone().map_err(BootError::Files)?;
            broker.serve_files(directories, control).map_err(BootError::Files)?;
        }
        message::send(&self.control, &[IoSlice::new(&message)], index.as_slice())
            .map_err(boot_error)?;
        let stdio = message::header(MSG_STDIO, 0, 0);
        message::send(&self.control, &[IoSlice::new(bytes_of(&stdio))], &spec.stdio)
            .map_err(boot_error)?;
        // It has come up while the sandbox did.
        broker.wait_for_files().map_err(BootError::Files)?;
        let mut sandbox = self.into_sandbox(broker);
        sandbox.hold_to(Baseline::from_flags(spec.flags));
        Ok(sandbox)
    }

    /// Becomes a copy of a frozen image, with a client's connected,
    /// non-blocking socket if there is one. On an error the socket is still
    /// with the caller, who may try another zygote.
    pub fn thaw(
        self,
        plan: &BootPlan,
        connection: Option<(Connection, BorrowedFd<'_>)>,
        options: &ThawOptions<'_>,
    ) -> Result<Sandbox, BootError> {
        self.set_limits(options.limits, options.cpu_time_limit)?;
        self.join(options.cores)?;
        let send = || plan.send(&self.control, THAW_AND_RUN, connection, options);
        self.process.woken_here(send).map_err(boot_error)?;
        let mut broker = self.broker(plan.rootfs(), options.egress, numbered(options.volumes))?;
        if plan.is_partial() {
            broker = broker.fetch_blobs(self.control.try_clone().map_err(BootError::Send)?);
        }
        Ok(self.into_sandbox(broker).thawed_from(plan))
    }

    /// Becomes a copy of a runtime template and starts a program in it: `plan` is that of the
    /// template's image over the program's own index, which has all inodes and blobs of the
    /// template's under the same numbers. The program reads nothing from standard input. It finds
    /// `writes` in its memory.
    ///
    /// # Errors
    /// As [`Zygote::start`]; nothing can be mounted.
    pub fn start_in(
        self,
        plan: &BootPlan,
        spec: &StartSpec<'_>,
        writes: &MemoryWrites,
    ) -> Result<Sandbox, BootError> {
        if !spec.mounts.is_empty() {
            return Err(BootError::NotPrepared("a copy of a template has no mounts".to_owned()));
        }
        let message = crate::boot::encode_start(spec, writes)?;
        let limits = spec.limits();
        let options = ThawOptions {
            streams: Some([spec.stdio[1], spec.stdio[2]]),
            limits,
            cpu_time_limit: spec.cpu_time_limit,
            flags: spec.flags,
            hostname: "",
            secrets: None,
            egress: &spec.egress,
            resumed: &[],
            volumes: &[],
            cores: None,
        };
        self.set_limits(limits, spec.cpu_time_limit)?;
        plan.send(&self.control, THAW_AND_START, None, &options).map_err(boot_error)?;
        message::send(&self.control, &[IoSlice::new(&message)], &[]).map_err(boot_error)?;
        let broker = self.broker(spec.rootfs.clone(), &spec.egress, numbered(&[]))?;
        Ok(self.into_sandbox(broker).thawed_from(plan))
    }

    /// Becomes a copy of a frozen image that waits, with all done that can be
    /// done before it is wanted. Takes milliseconds.
    pub fn hold(
        self,
        plan: &Arc<BootPlan>,
        options: &ThawOptions<'_>,
    ) -> Result<ReadySandbox, BootError> {
        self.set_limits(options.limits, options.cpu_time_limit)?;
        self.join(options.cores)?;
        plan.send(&self.control, THAW_AND_HOLD, None, options).map_err(boot_error)?;
        let broker = self.broker(plan.rootfs(), options.egress, numbered(options.volumes))?;
        ReadySandbox::prepare(self.into_sandbox(broker).thawed_from(plan), plan.clone())
    }

    /// Lets it share cores with the members of a group only. What it becomes, and all that
    /// this starts, is in the group, too.
    ///
    /// # Errors
    /// It has ended, or the host refuses to.
    pub fn join(&self, group: Option<&CoreGroup>) -> Result<(), BootError> {
        let Some(group) = group else { return Ok(()) };
        group.take_in(&self.process).map_err(|error| match error.raw_os_error() {
            Some(libc::ESRCH) => BootError::ZygoteDied,
            _ => BootError::Cores(error),
        })
    }

    /// Sets limits that are likely to be wanted at the boot.
    fn expect_limits(&self, limits: ResourceLimits) {
        self.process.limits.expect(limits);
    }

    fn set_limits(
        &self,
        limits: ResourceLimits,
        cpu_time: Option<Duration>,
    ) -> Result<(), BootError> {
        self.process.set_limits(limits, cpu_time).map_err(|error| {
            let has_ended = error.raw_os_error() == Some(libc::ESRCH) || self.has_ended();
            if has_ended { BootError::ZygoteDied } else { BootError::Limits(error) }
        })
    }

    /// See [`Sandbox::label`]. What it says from its boot on has the label.
    pub fn label(&self, label: &Arc<str>) {
        self.console.set_label(label);
    }

    fn broker<'a>(
        &self,
        rootfs: Rootfs,
        egress: &Arc<EgressPolicy>,
        volumes: impl Iterator<Item = (u32, &'a VolumeMount)> + Clone,
    ) -> Result<Broker, BootError> {
        broker((&self.process, &self.control), rootfs, egress, volumes)
    }

    fn into_sandbox(self, broker: Broker) -> Sandbox {
        Sandbox::new(self.process, self.control, self.console, broker)
    }
}

/// The directories of the host that a program is to see.
fn directories(spec: &StartSpec<'_>) -> Directories {
    let root = match &spec.rootfs {
        Rootfs::HostDirectory(root) => Some(root.clone()),
        Rootfs::Index { .. } => None,
    };
    let mut directories = Directories::new(root);
    let own = Ids { uid: spec.uid, gid: spec.gid };
    for (number, mount) in spec.mounts.iter().enumerate() {
        if let MountKind::Bind(directory) = &mount.kind {
            directories.bind(number as u32, directory, own);
        }
    }
    directories
}

/// The volumes of a copy by number of the mount.
fn numbered(volumes: &[VolumeMount]) -> impl Iterator<Item = (u32, &VolumeMount)> + Clone {
    (0..).zip(volumes)
}

/// What serves the requests of a sandbox, which has not begun yet: no process of it can make a
/// file of a volume longer.
fn broker<'a>(
    (process, control): (&Process, &OwnedFd),
    rootfs: Rootfs,
    egress: &Arc<EgressPolicy>,
    volumes: impl Iterator<Item = (u32, &'a VolumeMount)> + Clone,
) -> Result<Broker, BootError> {
    let mut holder = [0; size_of::<VolumeHolder>()];
    if volumes.clone().next().is_some() {
        crate::limits::forbid_growing_files(process).map_err(BootError::Limits)?;
        let filled = getrandom(&mut holder, GetRandomFlags::empty());
        filled.map_err(|error| BootError::Send(error.into()))?;
    }
    let user = VolumeUser::new(VolumeHolder::from_ne_bytes(holder));
    broker_of(control, rootfs, egress, volumes, &user)
}

/// What serves the requests of a sandbox.
fn broker_of<'a>(
    control: &OwnedFd,
    rootfs: Rootfs,
    egress: &Arc<EgressPolicy>,
    volumes: impl Iterator<Item = (u32, &'a VolumeMount)> + Clone,
    user: &VolumeUser<'_>,
) -> Result<Broker, BootError> {
    let sockets = if egress.is_closed() && !egress.is_of_sandbox() {
        None
    } else {
        let control = control.try_clone().map_err(BootError::Send)?;
        Some(Sockets::new(egress.clone(), control))
    };
    Broker::new(rootfs, sockets).serve_volumes(volumes, user, control).map_err(BootError::Files)
}

fn boot_error(error: io::Error) -> BootError {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => BootError::ZygoteDied,
        _ => BootError::Send(error),
    }
}
