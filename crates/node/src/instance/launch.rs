//! The seam between the node and what it runs: everything above it is tested
//! without a sandbox.

use super::hibernation::HibernationTerms;
use super::sandboxed::Decrypted;
use super::volumes::VolumesAtRest;
use crate::admission::Admitted;
use crate::asleep::{AsleepImage, NewAsleep};
use crate::boots::BootKind;
use crate::config::{ByteSize, StopSignal, TimeSpan};
use crate::edge::Addresses;
use crate::sandboxes::ExecNote;
use crate::sandboxes::limits::Unchanged;
use crate::seal::owner::{KeyId, OwnerKey};
use crate::tenants::Lease;
use crate::volumes::VolumeSnapshot;
use serde::{Deserialize, Serialize};
use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::SystemTime;
use thaw_abi::control::EntryPoint;
use thaw_sandbox::{
    Awake, BootTimes, EgressEvents, EgressPolicy, FreezeBase, GuestExit, LimitReached,
    MemoryReader, Orphan, RemoteEvent, RemoteMessage, ResourceLimits, Twin, Volume, VolumeMount,
};
use thaw_store::{ImageId, IndexId, KernelId, Name};

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
        Err(LaunchError("this launcher takes nothing over".to_owned()))
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
        Err(LaunchError("its instances cannot have volumes".to_owned()))
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
#[error("{0}")]
pub struct LaunchError(pub String);

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

/// A live instance. Dropping it ends it.
pub trait Instance: Send {
    /// Process id on the host.
    fn pid(&self) -> u32;

    /// Tells the instance its number on this node, with which its lines are logged.
    fn identify(&mut self, _id: u64) {}

    /// Says something about the instance in its function's log.
    fn remark(&self, _text: &str) {}

    /// Says there how the instance has ended, behind all that it has printed.
    fn log_end(&self, _how: String) {}

    /// What hands further connections to the guest, from anywhere.
    fn connector(&self) -> Arc<dyn Connector>;

    /// Makes a guest that computes look at the connections that it was handed; others
    /// do by themselves.
    fn ring_if_unread(&mut self);

    /// Ends the instance at once; [`Report::Gone`] follows.
    fn kill(&mut self);

    /// The same for one that takes no connection, which has mostly ended by itself: then the report
    /// says how.
    fn end_unreachable(&mut self) {
        self.kill();
    }

    /// Asks the program to end. Whoever asks ends the instance if it does not.
    ///
    /// # Errors
    /// It cannot be asked.
    fn terminate(&mut self, _signal: StopSignal) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// The next report; after [`Report::Gone`] there is none.
    fn poll_report(&mut self, context: &mut Context<'_>) -> Poll<Report>;

    /// Has it outlive this daemon if that is killed, with a note for the next one. Does
    /// nothing where nobody would keep it. Returns what becomes true when that is so.
    ///
    /// # Errors
    /// It has ended, or as many are kept as may be.
    fn keep(&mut self, _note: &str) -> io::Result<Option<Arc<AtomicBool>>> {
        Ok(None)
    }

    /// What it was booted from, and the root file system that it has, if it is known: not those of
    /// its function if it was forked, restored or asleep.
    fn origin(&self) -> Origin {
        Origin::default()
    }

    /// The key of the encrypted checkpoint that it comes from: its memory does not get to disk
    /// without one.
    fn owner_key(&self) -> Option<KeyId> {
        None
    }

    /// What counts its memory, on any thread.
    ///
    /// # Errors
    /// The host has no descriptors left, or does not count.
    fn memory_reader(&self) -> io::Result<MemoryReader> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Puts it under a policy of its own. To be called before the first report is asked for.
    ///
    /// # Errors
    /// It cannot have one, or has ended.
    fn use_egress(&mut self, _policy: &Arc<EgressPolicy>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Changes its memory and processors.
    ///
    /// # Errors
    /// It is being copied, has more than that, or its limits cannot change.
    fn set_limits(&mut self, _limits: ResourceLimits) -> Result<(), Unchanged> {
        Err(Unchanged::Refused("the limits of this instance cannot change".to_owned()))
    }

    /// CPU time that all processes of it have used; none where nobody counts it.
    fn cpu_time(&self) -> Option<std::time::Duration> {
        None
    }

    /// Called when the instance has served its first connection and still
    /// lives. It may be looked at for a moment afterwards: [`Instance::kill`] waits
    /// for that, two seconds at most.
    fn first_request_done(&mut self);

    /// Whether the instance, which has served its request, can be put back into the state before
    /// it.
    fn can_rewind(&self) -> bool {
        false
    }

    /// Puts it back, elsewhere, and keeps it for a later boot with its share of what the tenant
    /// may have. If that fails it is ended. Only where [`Instance::can_rewind`] says so.
    fn rewind(self: Box<Self>, _lease: Lease) {}

    /// Asks the instance, which is idle, to give up its memory. [`Report::Resting`] follows as soon
    /// as nothing in it runs, unless it rests already; then [`Report::Hibernated`],
    /// [`Report::NotHibernated`], or [`Report::Awake`] if there is something to do for it
    /// before that.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`]: try again later; others: it has ended, or cannot do so.
    fn hibernate(&mut self, _terms: HibernationTerms) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Has it take back its memory; [`Report::Awake`] follows. A connection has the same effect.
    ///
    /// # Errors
    /// It has ended.
    fn wake(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Asks the instance to come to rest; [`Report::AtRest`] follows when nothing
    /// in it can run.
    ///
    /// # Errors
    /// The instance has ended.
    fn request_rest(&mut self) -> io::Result<()>;

    /// Asks the instance to come to rest at once, whatever it is doing; [`Report::AtRest`]
    /// follows. With a twin it has gone on by then ([`EntryPoint::process`]).
    ///
    /// # Errors
    /// The instance has ended, or cannot be copied.
    fn request_checkpoint(&mut self, _twin: Twin) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// What copies the memory of the instance, which is at rest or has a twin. Its result makes the
    /// copy what boots instances that begin where this one was.
    ///
    /// # Errors
    /// One sentence for the operator.
    fn copy(&mut self, _rest: EntryPoint) -> Result<Reading<Arc<dyn Launcher>>, String> {
        Err("this instance cannot be copied".to_owned())
    }

    /// What writes the memory of the instance, which is at rest or has a twin, to the store. Its
    /// result makes the image durable and names it.
    ///
    /// # Errors
    /// One sentence for the operator.
    fn checkpoint(
        &mut self,
        _rest: EntryPoint,
        _new: Checkpoint,
    ) -> Result<Reading<Checkpointed>, String> {
        Err("this instance cannot be checkpointed".to_owned())
    }

    /// Whether it has volumes, of its function or its own.
    fn has_volumes(&self) -> bool {
        false
    }

    /// How many files of a volume the instance has open.
    fn open_files_of(&self, _volume: &Volume) -> usize {
        0
    }

    /// The memory of the instance's twin has been read, or is not wanted any more.
    fn end_twin(&mut self) {}

    /// Writes the memory of the instance, which is at rest and does not go on, to its file. May
    /// block for as long as that takes.
    ///
    /// # Errors
    /// One sentence for the operator.
    fn write_asleep(&mut self, _rest: EntryPoint, _new: &NewAsleep) -> Result<AsleepImage, String> {
        Err("this instance cannot sleep".to_owned())
    }

    /// Lets the instance go on if it is at rest.
    fn resume(&mut self) {}

    /// Makes the memory of the instance, which is at rest, the image of its
    /// function. May block for seconds.
    ///
    /// # Errors
    /// One sentence for the operator.
    fn freeze(&mut self, rest: EntryPoint) -> Result<FrozenInstance, String>;
}

/// What an instance was made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Checksum of the image that it was booted from.
    pub image: Option<ImageId>,
    /// Its root file system.
    pub index: Option<IndexId>,
}

/// A checkpoint that is wanted.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// Its name.
    pub name: Name,
    /// Whose it is.
    pub owner: Option<Name>,
    /// What has to be known to restore it.
    pub config: serde_json::Value,
    /// It is to be encrypted.
    pub key: Option<CheckpointKey>,
    /// The files of its volumes are copied with it: they are to be, while it rests.
    pub volumes: Option<Arc<VolumesAtRest>>,
}

impl Checkpoint {
    /// With the processes from outside that go on in what is restored.
    pub(crate) fn with_execs(mut self, notes: Vec<ExecNote>) -> Self {
        if !notes.is_empty() {
            let noted = |note: ExecNote| match self.key {
                Some(_) => note.beside_secrets(),
                None => note.for_disk(),
            };
            let notes: Vec<_> = notes.into_iter().map(noted).collect();
            self.config["execs"] = serde_json::to_value(notes).expect("plain data");
        }
        self
    }

    /// What an encrypted one is authenticated as: no other of the same key can take its place.
    pub(crate) fn sealed_name(name: &Name, owner: Option<&Name>) -> String {
        // Names have no slash.
        format!("{}/{name}", owner.map_or("", Name::as_str))
    }
}

/// What a checkpoint is encrypted with.
#[derive(Clone, Debug)]
pub struct CheckpointKey {
    /// The key.
    pub key: Arc<OwnerKey>,
    /// Room in the tenant's memory for what is written until it is encrypted.
    pub memory: Arc<Lease>,
}

/// Reads the memory of an instance, on any thread, and says how far it is. It blocks for as long as
/// that takes.
pub type Reading<T> =
    Box<dyn FnOnce(&mut dyn FnMut(ReadingStep<T>)) -> Result<Finish<T>, Unread> + Send>;

/// How far the reading of an instance's memory is.
pub enum ReadingStep<T> {
    /// What comes of it can be used already, before all is read, and what is made of it waits for
    /// the rest by itself.
    Usable(T),
    /// All is read: from now on the instance may go on, or its twin end.
    Read,
}

/// What is left to do of a copy when its memory has been read. It may block.
pub type Finish<T> = Box<dyn FnOnce() -> Result<T, String> + Send>;

/// Why the memory of an instance was not read: one sentence for the operator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unread {
    /// Who had it has ended, as it seems: the instance, or only its twin.
    #[error("{0}")]
    Ended(String),
    /// Anything else.
    #[error("{0}")]
    Failed(String),
}

/// A checkpoint in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Checkpointed {
    /// Its name.
    pub name: String,
    /// Its image.
    pub image: String,
    /// How many other images it refers to.
    pub ancestors: usize,
    /// Bytes of memory stored in it.
    pub stored: u64,
    /// Entries of its mapping table.
    pub mappings: usize,
    /// The id of the key that it is encrypted with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub key: Option<KeyId>,
    /// Snapshots of its volumes that belong to it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<VolumeSnapshot>,
}

/// Hands connections to an instance.
pub trait Connector: Send + Sync {
    /// Hands a further connection to the guest.
    ///
    /// # Errors
    /// The instance has ended, or does not take what it is given.
    fn connect(&self, client: &Client) -> io::Result<()>;

    /// Says something about processes and files inside the instance, with sockets.
    ///
    /// # Errors
    /// The instance has ended, or does not take what it is given.
    fn send_remote(&self, _message: RemoteMessage, _sockets: &[BorrowedFd<'_>]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Whether its kernel can have processes from outside go on in another boot, and under another
    /// daemon: one of this build can.
    fn can_have_execs_go_on(&self) -> bool {
        false
    }
}

/// What became of an instance that was frozen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct FrozenInstance {
    /// The new image.
    pub image: String,
    /// Bytes of the image file, holes included.
    pub file_len: u64,
    /// Bytes of memory stored in it.
    pub stored: u64,
    /// Entries of its mapping table.
    pub mappings: usize,
    /// Milliseconds that it took.
    pub freeze_ms: f64,
}

/// What became of an instance that was hibernated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct HibernatedInstance {
    /// Bytes of memory in its swap file.
    pub stored: u64,
    /// Ranges of pages that come back at once when it wakes; 0: they come back when they are
    /// touched.
    pub ranges: usize,
    /// Milliseconds that writing took.
    pub write_ms: f64,
}

/// What became of an instance that was put to sleep.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct SleepingInstance {
    /// Bytes of memory in its file.
    pub stored: u64,
    /// Bytes of its file on disk.
    pub on_disk: u64,
    /// Milliseconds that writing took.
    pub write_ms: f64,
}

/// What an instance reports.
#[derive(Clone, Debug, PartialEq)]
pub enum Report {
    /// Its boot is complete.
    Booted(BootTimes),
    /// The guest has closed the connection with this number.
    ConnectionClosed(u64),
    /// Its policy has denied outgoing connections.
    Egress(EgressEvents),
    /// Something has become of a process that was started from outside.
    Remote(RemoteEvent),
    /// Nothing in it can run, as was asked.
    AtRest(EntryPoint),
    /// Nothing in it runs, and its memory is being written, as was asked.
    Resting,
    /// It has given up its memory.
    Hibernated(HibernatedInstance),
    /// Its memory could not be written: one sentence for the operator. It rests until
    /// [`Instance::wake`] or [`Instance::hibernate`].
    NotHibernated {
        /// One sentence.
        why: String,
        /// It may have gone on while its memory was written.
        is_torn: bool,
    },
    /// It was at rest or hibernated, and goes on.
    Awake(Awake),
    /// It has ended.
    Gone(End),
}

/// How an instance ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum End {
    /// The program ended by itself.
    #[error("the program ended {}", describe(*.0))]
    Exited(GuestExit),
    /// The kernel could not thaw the image.
    #[error("the image could not be thawed: {0}")]
    Failed(String),
    /// The sandbox broke the protocol.
    #[error("the sandbox was ended: {0}")]
    Violation(String),
    /// A part of its memory or files is elsewhere and could not be fetched.
    #[error("a part of the function could not be fetched: {0}")]
    NotFetched(String),
    /// It was hibernated, and its memory cannot be brought back: nothing of it has run.
    #[error("{0}")]
    MemoryLost(String),
    /// It has used up what its limits allow.
    #[error("the sandbox was ended because {0}")]
    LimitReached(Overrun),
    /// It has gone on after its tenant's CPU time was spent.
    #[error("the sandbox was ended because its tenant has spent its CPU time")]
    TenantSpent,
    /// The host ended the process, and the signal if it is known.
    #[error("the sandbox was killed{}", .0.map(explain_signal).unwrap_or_default())]
    Killed(Option<i32>),
    /// The same, before the sandbox has reported its boot, which it does when the program
    /// first waits or answers. If a connection is untouched, another instance can have it.
    #[error("the sandbox was killed{}", .0.map(explain_signal).unwrap_or_default())]
    KilledInBoot(Option<i32>),
    /// It has served its request, and is another instance from now on.
    #[error("the sandbox was put back into the state before its request")]
    Rewound,
}

/// A limit that an instance has reached, for the operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overrun {
    /// Which one.
    pub limit: LimitReached,
    /// The most bytes of memory that it has used, if it is the limit of memory and the host counts
    /// them. The group may have been another sandbox's before.
    pub memory_peak: Option<u64>,
    /// The setting that has the limit and its value, when they are known.
    pub setting: Option<LimitSetting>,
}

/// A setting of `thaw.toml` that limits instances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LimitSetting {
    /// `limits.memory`.
    Memory(ByteSize),
    /// `limits.cpu_time`.
    CpuTime(TimeSpan),
}

impl fmt::Display for Overrun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.limit)?;
        match &self.setting {
            Some(LimitSetting::Memory(most)) => {
                write!(f, ", `limits.memory` of {most}")?;
                if let Some(peak) = self.memory_peak {
                    write!(f, ", and used {}", ByteSize(peak).min(*most).approximate())?;
                }
                write!(f, "; raise `limits.memory` in thaw.toml")
            }
            Some(LimitSetting::CpuTime(most)) => {
                write!(f, ", `limits.cpu_time` of {most}; raise `limits.cpu_time` in thaw.toml")
            }
            None => Ok(()),
        }
    }
}

fn describe(exit: GuestExit) -> String {
    match exit {
        GuestExit::Code(code) => format!("with exit code {code}"),
        GuestExit::Signal(signal) => format!("by signal {signal}"),
    }
}

fn explain_signal(signal: i32) -> String {
    let why = match signal {
        libc::SIGKILL => ", because somebody or the host killed it",
        libc::SIGSYS => ", because it made a host call that its filter forbids",
        _ => "",
    };
    format!(" by signal {signal}{why}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_was_reached_says_what_to_do() {
        let overrun = |memory_peak, setting| {
            let overrun = Overrun { limit: LimitReached::Memory, memory_peak, setting };
            End::LimitReached(overrun).to_string()
        };
        let begin = "the sandbox was ended because it reached its memory limit";
        assert_eq!(overrun(Some(1), None), begin);
        let most = || Some(LimitSetting::Memory(ByteSize::mebibytes(128)));
        let end = "; raise `limits.memory` in thaw.toml";
        assert_eq!(overrun(None, most()), format!("{begin}, `limits.memory` of 128MiB{end}"));
        // The second peak is that of another sandbox in the same control group.
        for (peak, used) in [(100 << 20, "100.0MiB"), (200 << 20, "128.0MiB")] {
            let expected = format!("{begin}, `limits.memory` of 128MiB, and used {used}{end}");
            assert_eq!(overrun(Some(peak), most()), expected);
        }
    }
}
