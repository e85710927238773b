//! Live instances: what the node asks of them, and what they report.

use super::end::End;
use super::hibernation::HibernationTerms;
use super::launch::{Client, Launcher};
use super::volumes::VolumesAtRest;
use crate::asleep::{AsleepImage, NewAsleep};
use crate::remote::limits::Unchanged;
use crate::remote::{ExecNote, MemoryHeld, RemoteChannel};
use crate::tenants::Lease;
use serde::{Deserialize, Serialize};
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::task::{Context, Poll};
use thaw_abi::control::EntryPoint;
use thaw_home::config::StopSignal;
use thaw_home::seal::owner::{KeyId, OwnerKey};
use thaw_home::volumes::VolumeSnapshot;
use thaw_sandbox::{
    Awake, BootTimes, EgressEvents, EgressPolicy, KilledProcess, Lack, MemoryReader, RemoteEvent,
    ResourceLimits, Twin, Volume,
};
use thaw_store::{ImageId, IndexId, Name};

/// What an instance uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InstanceUse {
    /// CPU time of all its processes; none where nobody counts it.
    pub cpu_time: Option<std::time::Duration>,
    /// Its memory.
    pub memory: MemoryHeld,
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

    /// Its memory that counts in its limit.
    fn memory_held(&self) -> MemoryHeld {
        MemoryHeld::default()
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

    /// Asks the instance, which is idle, to rest for a moment and to give back the pages that are equal to
    /// those of its image. [`Report::Trimmed`] follows, unless that is taken back.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`]: try again later; others: it has ended, or cannot do so.
    fn trim(&mut self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Takes [`Instance::trim`] back if it has not come to its end.
    fn end_trim(&mut self) {}

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

    /// Whether its kernel takes back from the next daemon what it has open in volumes.
    fn renews_volumes(&self) -> bool {
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
pub trait Connector: RemoteChannel {
    /// Hands a further connection to the guest.
    ///
    /// # Errors
    /// The instance has ended, or does not take what it is given.
    fn connect(&self, client: &Client) -> io::Result<()>;

    /// Gives it another host name; where its kernel is of another build, it keeps the one it has.
    ///
    /// # Errors
    /// The instance has ended, or does not take what it is given.
    fn name_host(&self, _name: &str) -> io::Result<()> {
        Ok(())
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
    /// Its program has asked for something that it does not have.
    Lacks(Lack),
    /// One of its processes was ended, since its memory was used up.
    OomKilled(KilledProcess),
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
    /// It has given back so many bytes of pages that were equal to those of its image, or had something to
    /// do before that; or one sentence on why that could not be.
    Trimmed(Result<Option<u64>, String>),
    /// It was at rest or hibernated, and goes on.
    Awake(Awake),
    /// It has ended.
    Gone(End),
}
