//! What the supervisor of an instance can be told, and what it answers.

use super::connections::ConnectionTable;
use super::launch::Launcher;
use super::live::{
    Checkpoint, Checkpointed, FrozenInstance, HibernatedInstance, InstanceUse, Origin,
    SleepingInstance,
};
use crate::remote::limits::Unchanged;
use crate::tenants::Lease;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use thaw_home::config::{DomainName, FunctionName};
use thaw_home::seal::owner::KeyId;
use thaw_sandbox::{Awake, MemoryReader, ResourceLimits, Volume};
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::Instant;

/// What the next daemon has to know of an instance.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct InstanceNote {
    pub id: u64,
    pub function: FunctionName,
    /// Identifies the image that it was booted from.
    pub image: String,
    /// When it was booted, in milliseconds since 1970.
    pub booted_ms: u64,
    /// The function's tenant.
    pub domain: Option<DomainName>,
    /// Bytes of memory that it may use.
    pub memory: u64,
    /// What it was made of.
    #[serde(default)]
    pub origin: Origin,
    /// Its function has volumes.
    #[serde(default)]
    pub has_volumes: bool,
    /// Its kernel knows how to take back what it has open in volumes.
    #[serde(default)]
    pub renews_volumes: bool,
}

/// What a supervisor can be told.
#[derive(Debug)]
pub(crate) enum Command {
    /// Make sure that the instance reads what it was sent.
    Watch,
    /// Look when the next connection is due.
    Look,
    /// A first request was answered on a connection that stays.
    Served,
    /// Make its memory the image of the function, and end; it is idle.
    Freeze(FreezeReply),
    /// Copy its memory; it goes on.
    Copy(CopyReply),
    /// Write its memory to the store; it goes on. There may be room for its memory a second time.
    Checkpoint(Checkpoint, CheckpointReply, Option<Lease>),
    /// Come to rest while volumes are copied, and stay so.
    Hold(Hold),
    /// It need not stay at rest any more.
    LetGo,
    /// The memory of its twin was read; or it has ended before, and the instance is to be copied once
    /// more, while it rests.
    TwinRead(Option<Rest>),
    /// Give up its memory; it is idle.
    Hibernate(HibernateReply),
    /// Run nothing until somebody wants something of it, and give up its memory.
    Pause(PauseReply),
    /// Give up its memory if it is idle; nobody waits for that.
    Relieve,
    /// Take its memory back.
    Wake(WakeReply),
    /// Somebody does not wait any more who wanted it to be hibernated or paused.
    Withdraw,
    /// Leave a file and end, if it is idle; perhaps nobody waits for that.
    Sleep(Option<SleepReply>),
    /// The same for others who want its room: end if it cannot.
    SleepOrEnd,
    /// Its version is served no longer: have connections end that are idle.
    Retire,
    /// Say what counts its memory.
    Memory(oneshot::Sender<MemoryReader>),
    /// Say what it uses.
    Use(oneshot::Sender<InstanceUse>),
    /// Change what it may use.
    Limits(ResourceLimits, oneshot::Sender<Result<(), Unchanged>>),
    /// Be kept for the next daemon at once, with all connections that were handed over.
    Leave,
    /// Have the program end by itself, if its function gives it time for that.
    Stop,
    /// The same for others who want its room, and wait for a part of that time only.
    StopForOthers,
    End,
    /// End, since it takes no connection; if it has ended by itself, that is how it ended.
    EndUnreachable,
    /// End, since it has taken too long, as the text says.
    EndLate(String),
}

/// The place of one instance.
#[derive(Debug)]
pub(crate) struct Place {
    /// Its share of the node's capacity.
    pub _capacity: OwnedSemaphorePermit,
    /// Its share of what its tenant may have.
    pub lease: Lease,
}

/// Where to say how a freeze went.
pub(crate) type FreezeReply = oneshot::Sender<Result<FrozenInstance, String>>;
/// Where to say how copying went.
pub(crate) type CopyReply = oneshot::Sender<Result<Copied, String>>;

/// Where to say how a checkpoint went, and how the instance rested.
pub(crate) type CheckpointReply = oneshot::Sender<Result<(Checkpointed, Pause), String>>;

/// How an instance rested whose memory was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pause {
    /// For how long, from the moment at which it was asked to.
    pub time: Duration,
    /// It went on at once, and a twin was read.
    pub had_twin: bool,
}

/// The copied memory of an instance that has gone on.
pub(crate) struct Copied {
    /// Boots instances that begin where that one was.
    pub launcher: Arc<dyn Launcher>,
    /// How it rested.
    pub pause: Pause,
}

impl fmt::Debug for Copied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Copied").field("pause", &self.pause).finish_non_exhaustive()
    }
}

/// Somebody wants an instance to be at rest while these volumes are copied.
#[derive(Debug)]
pub(crate) struct Hold {
    pub volumes: Vec<Arc<Volume>>,
    pub reply: oneshot::Sender<Result<Held, String>>,
}

/// An instance that is at rest until this is dropped.
pub(crate) struct Held {
    table: Arc<ConnectionTable>,
    volumes: Vec<Arc<Volume>>,
    /// How many files of each the instance has open.
    open: Vec<usize>,
}

impl Held {
    /// Of an instance that rests, with so many files open in each of these volumes.
    pub fn new(table: Arc<ConnectionTable>, volumes: Vec<Arc<Volume>>, open: Vec<usize>) -> Self {
        Self { table, volumes, open }
    }

    /// How many files of a volume the instance has open.
    pub fn open_files_of(&self, volume: &Volume) -> usize {
        let all = self.volumes.iter().zip(&self.open);
        let of_it = all.filter(|(one, _)| std::ptr::eq(&raw const ***one, volume));
        of_it.map(|(_, open)| open).sum()
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held").field("open", &self.open).finish_non_exhaustive()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.table.tell(Command::LetGo);
    }
}

/// Who wants the instance to come to rest.
#[derive(Debug)]
pub(crate) enum Rest {
    Freeze(FreezeReply),
    Copy(CopyReply, Instant),
    Hold(Hold),
    /// It rests, and stays so.
    Held,
    /// With room for a twin, if there is any.
    Checkpoint(Checkpoint, CheckpointReply, Instant, Option<Lease>),
}

impl Rest {
    /// Whether the instance goes on afterwards.
    pub fn is_checkpoint(&self) -> bool {
        !matches!(self, Self::Freeze(_))
    }

    /// The same for an instance that is asked only now, so that its pause begins now.
    pub fn asked_now(self) -> Self {
        match self {
            Self::Copy(reply, _) => Self::Copy(reply, Instant::now()),
            Self::Checkpoint(new, reply, _, room) => {
                Self::Checkpoint(new, reply, Instant::now(), room)
            }
            other => other,
        }
    }

    /// Why an instance of an encrypted checkpoint must not be written so: it would lie on disk as it
    /// is.
    pub fn lays_bare(&self, owner_key: Option<KeyId>) -> Option<String> {
        let key = owner_key?;
        let from = format!("it comes from a checkpoint that is encrypted with key {key}");
        match self {
            Self::Checkpoint(new, ..) if new.key.is_none() => {
                Some(format!("{from}; give a key with --key-file for this one, too"))
            }
            Self::Freeze(_) => Some(format!("{from}, and images of functions are not encrypted")),
            _ => None,
        }
    }

    /// Whether whoever has asked still waits.
    pub fn is_wanted(&self) -> bool {
        match self {
            Self::Freeze(reply) => !reply.is_closed(),
            Self::Copy(reply, _) => !reply.is_closed(),
            Self::Hold(hold) => !hold.reply.is_closed(),
            Self::Held => true,
            Self::Checkpoint(_, reply, ..) => !reply.is_closed(),
        }
    }

    /// Whoever has asked hears why there is none.
    pub fn refuse(self, reason: String) {
        // Who has asked may have lost patience.
        match self {
            Self::Freeze(reply) => drop(reply.send(Err(reason))),
            Self::Copy(reply, _) => drop(reply.send(Err(reason))),
            Self::Hold(hold) => drop(hold.reply.send(Err(reason))),
            Self::Held => {}
            Self::Checkpoint(_, reply, ..) => drop(reply.send(Err(reason))),
        }
    }
}

/// Where to say how a hibernation went.
pub(crate) type HibernateReply = oneshot::Sender<Result<HibernatedInstance, String>>;
/// Where to say that nothing in it runs.
pub(crate) type PauseReply = oneshot::Sender<Result<(), String>>;
/// Where to say how it woke; `None`: it was awake.
pub(crate) type WakeReply = oneshot::Sender<Result<Option<Awake>, String>>;
/// Where to say how falling asleep went.
pub(crate) type SleepReply = oneshot::Sender<Result<SleepingInstance, String>>;
