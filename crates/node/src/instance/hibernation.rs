//! How a live instance gives up its memory: the conversation with its sandbox.
//!
//! The memory is written on a thread that may wait. The sandbox rests meanwhile, and goes on by
//! itself as soon as there is something to do: then the file is thrown away.

use crate::clock::monotonic_ns;
use crate::swap::SwapSpace;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use thaw_abi::control::Resting;
use thaw_sandbox::{
    Awake, Deflated, FreezeBase, HibernateError, HibernateSpec, Hibernator, Recorder, Sandbox,
    Swapped, Timers, WorkingSet,
};
use tokio::task::JoinHandle;

/// Most instances that are written at a time: each takes a processor, and the disk.
const WRITERS_MAX: usize = 2;
static WRITERS: AtomicUsize = AtomicUsize::new(0);

/// Leave to give up memory, given back when it is dropped.
struct Turn;

impl Turn {
    fn take() -> Option<Self> {
        let more = |count| (count < WRITERS_MAX).then_some(count + 1);
        let relaxed = Ordering::Relaxed;
        WRITERS.fetch_update(relaxed, relaxed, more).ok().map(|_| Self)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        WRITERS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What an instance hibernates with.
#[derive(Clone, Debug)]
pub struct HibernationTerms {
    /// Where its memory goes.
    pub space: Arc<SwapSpace>,
    /// Most bytes of it.
    pub max_stored: u64,
    /// What due timers of the program do.
    pub timers: Timers,
}

/// How far it has come.
enum Phase {
    /// It runs, or waits with its memory.
    Awake,
    /// It was asked to rest.
    Asked(HibernationTerms, FreezeBase, Turn),
    /// It rests, and is written.
    Writing(JoinHandle<Result<Written, HibernateError>>, Turn),
    /// It was told to give up what was written.
    Told(Turn),
    /// It has done so.
    Hibernated,
}

/// What a writer brings.
struct Written {
    deflated: Deflated,
    /// The pages that it has needed since it last woke.
    set: Option<Arc<WorkingSet>>,
}

/// The hibernation of one instance.
pub(super) struct Hibernation {
    phase: Phase,
    /// The number of the last rest that was asked for.
    rest: u64,
    /// The swap file that it has memory in.
    swapped: Option<Swapped>,
    /// The pages that come back at once when it wakes (REAP).
    set: Option<Arc<WorkingSet>>,
}

/// What has come of a hibernation.
#[derive(Debug)]
pub(super) enum Outcome {
    /// The instance has given up its memory.
    Hibernated(Swapped),
    /// It has not, and goes on.
    Failed(HibernateError),
}

impl Default for Hibernation {
    fn default() -> Self {
        Self { phase: Phase::Awake, rest: 0, swapped: None, set: None }
    }
}

impl Hibernation {
    /// Asks the sandbox to rest.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`]: it is on its way, or too many others are; others: it has
    /// ended.
    pub fn begin(
        &mut self,
        sandbox: &mut Sandbox,
        terms: HibernationTerms,
        base: FreezeBase,
    ) -> io::Result<()> {
        let turn = matches!(self.phase, Phase::Awake).then(Turn::take).flatten();
        let turn = turn.ok_or(io::ErrorKind::WouldBlock)?;
        // No daemon before this one had the same moment.
        self.rest = monotonic_ns().max(self.rest + 1);
        sandbox.request_rest(self.rest, terms.timers)?;
        self.phase = Phase::Asked(terms, base, turn);
        Ok(())
    }

    /// Lets the sandbox go on, whatever it does.
    pub fn end(&mut self, sandbox: &mut Sandbox) -> io::Result<()> {
        match self.phase {
            Phase::Awake => Ok(()),
            // It says when it is there again.
            Phase::Hibernated | Phase::Told(_) => sandbox.wake(),
            Phase::Asked(..) | Phase::Writing(..) => {
                self.phase = Phase::Awake;
                sandbox.wake()
            }
        }
    }

    /// Whether its memory is looked at or on its way.
    pub fn is_under_way(&self) -> bool {
        !matches!(self.phase, Phase::Awake | Phase::Hibernated)
    }

    /// The sandbox rests.
    ///
    /// # Errors
    /// It has ended.
    pub fn resting(&mut self, sandbox: &mut Sandbox, resting: Resting) -> io::Result<()> {
        if resting.number != self.rest || !matches!(self.phase, Phase::Asked(..)) {
            // It was not wanted any more; the sandbox hears that, too.
            return Ok(());
        }
        let Phase::Asked(terms, base, turn) = std::mem::replace(&mut self.phase, Phase::Awake)
        else {
            return Ok(());
        };
        let spec = HibernateSpec { max_stored: terms.max_stored, base: Some(base) };
        let hibernator = sandbox.hibernator(resting, spec)?;
        // Pages that come back at once are needed again for that reason alone.
        let recorder = match (&self.swapped, &self.set) {
            (Some(swapped), None) => Some((WorkingSet::recorder(sandbox)?, swapped.clone())),
            _ => None,
        };
        let set = self.set.clone();
        let write = move || write(hibernator, &terms, recorder, set);
        self.phase = Phase::Writing(tokio::task::spawn_blocking(write), turn);
        Ok(())
    }

    /// Passes on what was written; what has failed.
    pub fn poll(&mut self, sandbox: &mut Sandbox, context: &mut Context<'_>) -> Poll<Outcome> {
        let Phase::Writing(writer, _) = &mut self.phase else { return Poll::Pending };
        let Poll::Ready(joined) = Pin::new(writer).poll(context) else { return Poll::Pending };
        let Phase::Writing(_, turn) = std::mem::replace(&mut self.phase, Phase::Awake) else {
            return Poll::Pending;
        };
        let written = joined.unwrap_or_else(|error| Err(io::Error::other(error).into()));
        let told = written.and_then(|written| {
            self.set = written.set;
            self.swapped = Some(sandbox.hibernate(written.deflated)?);
            Ok(())
        });
        match told {
            Ok(()) => {
                self.phase = Phase::Told(turn);
                Poll::Pending
            }
            Err(error) => {
                // One that has ended needs no telling.
                let _ = sandbox.wake();
                Poll::Ready(Outcome::Failed(error))
            }
        }
    }

    /// The sandbox has given up its memory; `None`: nobody has told it to.
    pub fn hibernated(&mut self) -> Option<Outcome> {
        match (&self.phase, &self.swapped) {
            (Phase::Told(_), Some(swapped)) => {
                let outcome = Outcome::Hibernated(swapped.clone());
                self.phase = Phase::Hibernated;
                Some(outcome)
            }
            _ => None,
        }
    }

    /// The sandbox goes on. An earlier rest may have ended long ago.
    pub fn awake(&mut self, awake: Awake) {
        if awake.rest == self.rest {
            self.phase = Phase::Awake;
        }
    }
}

/// Writes the memory of a sandbox; first looks, if wanted, what it has needed since it woke.
fn write(
    hibernator: Hibernator,
    terms: &HibernationTerms,
    recorder: Option<(Recorder, Swapped)>,
    mut set: Option<Arc<WorkingSet>>,
) -> Result<Written, HibernateError> {
    if let Some((recorder, swapped)) = recorder {
        match recorder.record_swap(&swapped) {
            Ok(recorded) => set = Some(Arc::new(recorded)),
            // It wakes by page faults once more.
            Err(error) => tracing::debug!("could not record a working set: {error}"),
        }
    }
    let swap = terms.space.new_file(terms.max_stored)?;
    let deflated = hibernator.write(swap, set.as_deref())?;
    Ok(Written { deflated, set })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_are_written_at_a_time_at_most() {
        let turns: Vec<_> = (0..WRITERS_MAX).map(|_| Turn::take().unwrap()).collect();
        assert!(Turn::take().is_none());
        drop(turns);
        assert!(Turn::take().is_some());
    }
}
