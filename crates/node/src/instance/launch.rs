//! The seam between the node and what it runs: everything above it is tested without a sandbox. Here is
//! what boots instances; those that live are in [`super::live`].

use super::live::Instance;
use super::sandboxed::Decrypted;
use crate::admission::Admitted;
use crate::boots::BootKind;
use crate::edge::Addresses;
use crate::remote::ExecNote;
use crate::tenants::Lease;
use serde::{Deserialize, Serialize};
use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::time::SystemTime;
use thaw_sandbox::{EgressPolicy, FreezeBase, MemoryReader, Orphan, ResourceLimits, VolumeMount};
use thaw_store::{ImageId, IndexId, KernelId};

/// A client's connection on its way into an instance. The gateway keeps its own
/// descriptor of the socket, to answer in the instance's place if need be.
#[derive(Debug)]
pub struct Client {
    /// The node's number for the connection.
    pub id: u64,
    /// The connected socket, non-blocking.
    pub socket: OwnedFd,
    /// Address of the client.
    pub peer: SocketAddr,
    /// Address that the client connected to.
    pub local: SocketAddr,
    /// When the connection was accepted, in nanoseconds of `CLOCK_MONOTONIC`.
    pub accepted_ns: u64,
    /// The first request is a `HEAD`: an answer must have no body.
    pub wants_head_only: bool,
    /// Who talks to the client.
    pub way: Way,
    /// The connection's share of the clients that the node takes in, if it has one of its
    /// own.
    pub admitted: Option<Admitted>,
    /// What other requests may use of it, as soon as an instance has it, beside the one that it was
    /// made for: only who has made it knows what that is. Nothing on most.
    pub(crate) shared: Weak<dyn Any + Send + Sync>,
}

impl Client {
    /// Both ends of the connection.
    pub fn addresses(&self) -> Addresses {
        Addresses { client: self.peer, gateway: self.local }
    }
}

/// How the bytes of a connection go between a client and an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The socket is the client's own: the instance talks to the client, and the
    /// instance's supervisor sees from the socket's counters how that goes.
    HandedOver,
    /// The socket is one end of a pair whose other end the gateway has, which keeps the
    /// times of what passes through.
    Routed,
}

/// See [`Launcher::coming_back`].
pub type ComingBack = Pin<Box<dyn Future<Output = ()> + Send>>;

/// See [`Launcher::opening`].
pub type Opening = Pin<Box<dyn Future<Output = Result<(), LaunchError>> + Send>>;

/// Boots instances of one function.
pub trait Launcher: Send + Sync {
    /// What has to end before a boot, and takes long: somebody opens the image, which is packed. It
    /// begins with the first who asks, and takes one thread for all who wait; to be called in a
    /// Tokio runtime. `None`: there is nothing to wait for.
    fn opening(self: Arc<Self>) -> Option<Opening> {
        None
    }

    /// Boots an instance with a client's connection in it. May block for a millisecond or
    /// two, or longer on a busy host, to make what it is booted from.
    ///
    /// # Errors
    /// No instance could be booted; the client's socket is untouched.
    fn launch(&self, client: Option<&Client>) -> Result<Launched, LaunchError>;

    /// The same without blocking: from something that waits for it. Takes a fraction of a
    /// millisecond.
    ///
    /// # Errors
    /// Nothing waits, or no instance could be booted; the client's socket is untouched.
    fn launch_now(&self, client: Option<&Client>) -> Result<Launched, NotNow> {
        match self.is_ready() {
            true => Ok(self.launch(client)?),
            false => Err(NotNow::WouldWait),
        }
    }

    /// What becomes ready when it is worth trying [`Launcher::launch_now`] again, from before
    /// this call on: some instance comes back to be used anew. It does not take long. `None`:
    /// nothing comes back.
    fn coming_back(&self) -> Option<ComingBack> {
        None
    }

    /// Takes over a sandbox of an earlier daemon over the same files, which was booted from the
    /// image with this checksum, if that is known. It connects by this policy if it has one of its
    /// own.
    ///
    /// # Errors
    /// It has ended, or the host is out of resources.
    fn take_over(
        &self,
        _orphan: Orphan,
        _thawed: Option<ImageId>,
        _egress: Option<&Arc<EgressPolicy>>,
        _limits: ResourceLimits,
    ) -> Result<Box<dyn Instance>, LaunchError> {
        Err(LaunchError::Failed("this launcher takes nothing over".to_owned()))
    }

    /// Prepares the boot of an instance that sleeps in a file, whose image has this checksum and
    /// differs from `base`, if that is still open. The clients are connected to it in the image,
    /// and will be again. With `decrypted` the file lies in memory. Reads the whole file, so it
    /// may block.
    ///
    /// # Errors
    /// The file is damaged or fits nothing here, or cannot be read now.
    fn waken(
        &self,
        _file: File,
        _checksum: ImageId,
        _base: Option<&FreezeBase>,
        _clients: Vec<Arc<Client>>,
        _decrypted: Option<Decrypted>,
        _limits: ResourceLimits,
    ) -> Result<Arc<dyn Launcher>, WakeError> {
        Err(WakeError::Lost("this launcher wakes nothing".to_owned()))
    }

    /// What boots the same instances with more volumes, behind those that they have, and the number of
    /// the mount of the first of these. They are not mounted yet, unless the memory of the instances
    /// has them mounted by these numbers. Blocks.
    ///
    /// # Errors
    /// They are no sandboxes, or their own volumes cannot be used.
    fn mounting(&self, _more: &[VolumeMount]) -> Result<(Arc<dyn Launcher>, u32), LaunchError> {
        Err(LaunchError::Failed("its instances cannot have volumes".to_owned()))
    }

    /// Its instances have these processes from outside in their memory, and are told which of them go
    /// on ([`Launched::execs`]). To be said once, before the first boot.
    fn go_on_with(&self, _execs: Vec<ExecNote>) {}

    /// By what its instances connect to the outside; `None`: they are no sandboxes, or it cannot be
    /// known now.
    fn egress(&self) -> Option<Arc<EgressPolicy>> {
        None
    }

    /// The root file system of its instances; `None`: it is not in the store.
    fn index(&self) -> Option<IndexId> {
        None
    }

    /// The kernel build that its instances run under; `None`: they are no sandboxes.
    fn kernel_build(&self) -> Option<KernelId> {
        None
    }

    /// Whether there is something to boot from now, without blocking. It may be gone when it
    /// is wanted.
    fn is_ready(&self) -> bool;

    /// What is kept for the next boots.
    fn standby(&self) -> StandbyInfo {
        StandbyInfo::default()
    }

    /// What counts the memory of what is kept for the next boots, and in which state each is.
    fn standby_memory(&self) -> Vec<(StandbyState, MemoryReader)> {
        Vec::new()
    }

    /// Room that an instance takes which was booted ahead, for the boot that is about to
    /// use it.
    fn spare_room(&self) -> Option<Lease> {
        None
    }

    /// Ends one process that is kept for the next boots, so that others have its room;
    /// whether there was one.
    fn give_up_one(&self) -> bool {
        false
    }

    /// An instance that was booted ahead has died: what has struck it may have struck
    /// the others, too, and not be seen yet. None of them is used.
    fn give_up_ready(&self) {}

    /// The function is served no longer, or by another launcher: ends what is
    /// kept for the next boots.
    fn stand_down(&self) {}

    /// The function was removed: instances that are busy yet get no secrets any more.
    fn withdraw_secrets(&self) {}

    /// When somebody last wanted to boot from its image, if that can be closed and was wanted.
    fn last_used(&self) -> Option<SystemTime> {
        None
    }

    /// Closes its image if nothing needs it. The next boot opens it again.
    fn close_if_unused(&self) {}
}

/// What is kept for the next boots of a function, as the admin API shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct StandbyInfo {
    /// Process ids of the instances that were booted ahead.
    pub ready: Vec<u32>,
    /// Process id of the live template.
    pub template: Option<u32>,
    /// Process ids of the copies that it has forked ahead.
    #[serde(default)]
    pub forked: Vec<u32>,
    /// What became of instances that had served their request, if they are put back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rewinds: Option<RewindInfo>,
}

/// In which state something is that is kept for the next boots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StandbyState {
    /// An instance that was booted ahead.
    Ready,
    /// A copy that a template has forked ahead.
    Forked,
    /// A live template.
    Template,
}

impl StandbyState {
    /// Its name in the metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Forked => "forked",
            Self::Template => "template",
        }
    }
}

/// How often instances were put back into the state before their request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct RewindInfo {
    /// They are being put back now.
    pub under_way: u64,
    /// They were, and were ready again.
    pub done: u64,
    /// Instances that run, or are being put back, and will be ready again.
    #[serde(default)]
    pub lent: u64,
    /// They could not be, and were ended.
    pub refused: u64,
    /// How many of those for which reason, in one word.
    #[serde(default)]
    pub reasons: BTreeMap<String, u64>,
    /// Why, the last time.
    pub last_refusal: Option<String>,
    /// Whether it is worth it, if that is to be measured and was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<RewindVerdict>,
}

/// Whether it takes less processor time to put instances back than to make new ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct RewindVerdict {
    /// Processor time of a request with a new instance, in microseconds, without what the host
    /// takes to end it.
    pub new_us: u64,
    /// The same with one that was put back, and with that.
    pub rewound_us: u64,
    /// Whether instances are put back, as long as requests come often.
    pub wins: bool,
}

/// An instance whose boot command has been sent.
pub struct Launched {
    /// The instance.
    pub instance: Box<dyn Instance>,
    /// What it was booted from.
    pub kind: BootKind,
    /// When that had been taken, in nanoseconds of `CLOCK_MONOTONIC`.
    pub zygote_ns: u64,
    /// Processes from outside that its memory has, whose streams wait until they are told what
    /// becomes of them; `None`: they are at their end.
    pub execs: Option<Arc<[ExecNote]>>,
}

impl fmt::Debug for Launched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Launched").field("pid", &self.instance.pid()).finish_non_exhaustive()
    }
}

/// Why no instance could be booted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// It was tried, and the host or the image did not allow it.
    #[error("{0}")]
    Failed(String),
    /// The node lacks something that every instance has to have, such as a volume or the value of a
    /// secret; with the command that brings it.
    #[error("{0}")]
    Lacking(String),
}

/// Why an instance that is asleep cannot be booted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WakeError {
    /// It never can.
    #[error("{0}")]
    Lost(String),
    /// It may be possible later.
    #[error("{0}")]
    Later(String),
}

/// Why no instance could be booted without blocking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotNow {
    /// What it is booted from has to be made first ([`Launcher::launch`]).
    WouldWait,
    /// None can be booted.
    Failed(LaunchError),
}

impl From<LaunchError> for NotNow {
    fn from(error: LaunchError) -> Self {
        Self::Failed(error)
    }
}
