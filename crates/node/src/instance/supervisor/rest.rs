//! An instance that rests for somebody: to be frozen, copied or checkpointed.

use super::{Supervisor, keep_time};
use crate::instance::launch::{Checkpoint, Checkpointed, FrozenInstance, Launcher, Read};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use thaw_abi::control::EntryPoint;
use tokio::sync::oneshot;
use tokio::time::Instant;

/// Where to say how a freeze went.
pub(crate) type FreezeReply = oneshot::Sender<Result<FrozenInstance, String>>;
/// Where to say how copying went.
pub(crate) type CopyReply = oneshot::Sender<Result<Copied, String>>;

/// Where to say how a checkpoint went, and for how long the instance rested.
pub(crate) type CheckpointReply = oneshot::Sender<Result<(Checkpointed, Duration), String>>;

/// The copied memory of an instance that has gone on.
pub(crate) struct Copied {
    /// Boots instances that begin where that one was.
    pub launcher: Arc<dyn Launcher>,
    /// For how long it rested, from the moment at which it was asked to.
    pub pause: Duration,
}

impl fmt::Debug for Copied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Copied").field("pause", &self.pause).finish_non_exhaustive()
    }
}

/// Who wants the instance to come to rest.
pub(super) enum Rest {
    Freeze(FreezeReply),
    Copy(CopyReply, Instant),
    Checkpoint(Checkpoint, CheckpointReply, Instant),
}

impl Rest {
    /// Whether the instance goes on afterwards.
    fn is_checkpoint(&self) -> bool {
        !matches!(self, Self::Freeze(_))
    }

    /// Whether whoever has asked still waits.
    fn is_wanted(&self) -> bool {
        match self {
            Self::Freeze(reply) => !reply.is_closed(),
            Self::Copy(reply, _) => !reply.is_closed(),
            Self::Checkpoint(_, reply, _) => !reply.is_closed(),
        }
    }

    /// Whoever has asked hears why there is none.
    fn refuse(self, reason: String) {
        // Who has asked may have lost patience.
        match self {
            Self::Freeze(reply) => drop(reply.send(Err(reason))),
            Self::Copy(reply, _) => drop(reply.send(Err(reason))),
            Self::Checkpoint(_, reply, _) => drop(reply.send(Err(reason))),
        }
    }
}

impl Supervisor {
    /// Asks the instance to come to rest, for one who wants it at a time.
    pub(super) fn ask_to_rest(&mut self, rest: Rest) {
        let asked = match &self.rest {
            Some(earlier) if earlier.is_wanted() || !rest.is_checkpoint() => {
                return rest.refuse("it is being copied already; try again".to_owned());
            }
            // It was asked, and its rest is for somebody else now.
            Some(_) => Ok(()),
            None if rest.is_checkpoint() => self.instance.request_checkpoint(),
            None => self.instance.request_rest(),
        };
        match asked {
            Ok(()) => self.rest = Some(rest),
            // The report of its end is on the way.
            Err(error) => rest.refuse(format!("instance {} has ended ({error})", self.id)),
        }
    }

    /// The instance rests, as somebody has asked, who may have lost patience.
    pub(super) fn at_rest(&mut self, rest: EntryPoint) {
        let wanted = self.rest.take();
        // Others of the runtime's tasks go on elsewhere meanwhile.
        match wanted {
            Some(lost) if lost.is_checkpoint() && !lost.is_wanted() => self.go_on(),
            Some(Rest::Copy(reply, since)) => {
                let copied = tokio::task::block_in_place(|| self.instance.copy(rest));
                self.go_on();
                tokio::task::spawn_blocking(move || {
                    let done = copied.and_then(|Read { gone_on, finish }| {
                        let pause = gone_on.saturating_duration_since(since.into_std());
                        finish().map(|launcher| Copied { launcher, pause })
                    });
                    let _ = reply.send(done);
                });
            }
            Some(Rest::Checkpoint(new, reply, since)) => {
                let written = tokio::task::block_in_place(|| self.instance.checkpoint(rest, new));
                self.go_on();
                tokio::task::spawn_blocking(move || {
                    let done = written.and_then(|Read { gone_on, finish }| {
                        let pause = gone_on.saturating_duration_since(since.into_std());
                        finish().map(|checkpoint| (checkpoint, pause))
                    });
                    let _ = reply.send(done);
                });
            }
            Some(Rest::Freeze(reply)) => {
                let _ = reply.send(tokio::task::block_in_place(|| self.instance.freeze(rest)));
                self.instance.kill();
            }
            None => self.instance.kill(),
        }
    }

    /// Ends the rest of the instance.
    pub(super) fn go_on(&mut self) {
        self.instance.resume();
        self.keep_at = keep_time();
    }
}
