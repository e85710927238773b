//! How a live instance gives up its memory: the conversation with its sandbox.
//!
//! The memory is written on a thread that may wait. The sandbox rests meanwhile, and goes on by
//! itself as soon as there is something to do: then the file is thrown away.

use super::sealed::{Sealed, Unsealed, Unsealing, gate};
use crate::swap::SwapSpace;
use crate::tenants::{Lease, SwapLease, SwapRoom, Tenant};
use std::fs::File;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use thaw_abi::control::Resting;
use thaw_home::clock::monotonic_ns;
use thaw_home::debug::is_swap_slow;
use thaw_sandbox::{
    Awake, AwakeCause, Deflated, FreezeBase, FreezeError, HibernateError, HibernateSpec,
    Hibernator, Recorder, Sandbox, SwapFile, Swapped, Timers, Unchanged, WorkingSet,
    kernel_build_id,
};
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, spawn_blocking};

/// Most instances that are written or compared at a time: each takes a processor, and the disk. No sandbox can
/// keep a place: one that has come to rest waits for it, and gives it back when it is written.
const READERS_MAX: usize = 2;
static READERS: Semaphore = Semaphore::const_new(READERS_MAX);

/// An instance that is written, or compared, or waits for that. The result is thrown away if nobody
/// wants it any more; whoever reads the instance keeps the place until it has heard of that.
struct Reader<T> {
    reading: JoinHandle<Result<T, HibernateError>>,
    is_wanted: Arc<AtomicBool>,
}

impl<T: Send + 'static> Reader<T> {
    /// One that reads as long as this is true.
    fn new(
        is_wanted: Arc<AtomicBool>,
        read: impl FnOnce(&dyn Fn() -> bool) -> Result<T, HibernateError> + Send + 'static,
    ) -> Self {
        let wanted = is_wanted.clone();
        let reading = tokio::spawn(async move {
            let place = READERS.acquire().await.map_err(io::Error::other)?;
            let read = spawn_blocking(move || {
                let _place = place;
                read(&|| wanted.load(SeqCst))
            });
            read.await.map_err(io::Error::other)?
        });
        Self { reading, is_wanted }
    }

    /// One that cannot read.
    fn failed(error: io::Error) -> Self {
        let reading = tokio::spawn(async move { Err(error.into()) });
        Self { reading, is_wanted: Arc::default() }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<T, HibernateError>> {
        let joined = ready!(Pin::new(&mut self.reading).poll(context));
        Poll::Ready(joined.unwrap_or_else(|error| Err(io::Error::other(error).into())))
    }
}

impl<T> Drop for Reader<T> {
    fn drop(&mut self) {
        self.is_wanted.store(false, SeqCst);
        self.reading.abort();
    }
}

/// How often it is looked whether a disk that tests have slowed down goes on.
const SLOW_SWAP_LOOK: Duration = Duration::from_millis(10);

/// Most files besides the last one that an instance keeps disk in: one is left whenever some of its
/// processes do not give up their memory, as it says.
const EARLIER_MAX: usize = 1;
/// The same where they are encrypted, each with a copy in memory, or verified: only the last one
/// is, and one is asked for.
const EARLIER_GATED_MAX: usize = 0;

/// What an instance hibernates with.
#[derive(Clone, Debug)]
pub struct HibernationTerms {
    /// Where its memory goes.
    pub space: Arc<SwapSpace>,
    /// What its tenant may have there.
    pub room: Arc<SwapRoom>,
    /// Its tenant, whose memory the decrypted copy counts in.
    pub tenant: Arc<Tenant>,
    /// Most bytes of it.
    pub max_stored: u64,
    /// What due timers of the program do.
    pub timers: Timers,
    /// How its memory lies on disk.
    pub storage: SwapStorage,
}

/// How memory lies on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwapStorage {
    /// As it is.
    Plain,
    /// As it is, and compared with a checksum before it comes back.
    Verified,
    /// Encrypted with a key that this process has, and nobody else.
    Encrypted,
}

/// How far it has come.
enum Phase {
    /// It runs, or waits with its memory.
    Awake,
    /// It was asked to rest.
    Asked(Purpose, FreezeBase),
    /// It rests, and is written.
    Writing(Reader<Written>, Resting),
    /// It rests, and is compared with its image.
    Comparing(Reader<Unchanged>),
    /// It was told to give back so many bytes, and to go on.
    Trimming(u64),
    /// It rests, and could not be written: it goes on, or is written again.
    Kept(Resting),
    /// It was told to give up what was written, to this file. It keeps what it has if it goes on
    /// before it hears that.
    Told(Box<Swapped>, Arc<Given>),
    /// It has done so.
    Hibernated,
}

/// What an instance is to rest for.
enum Purpose {
    /// To give up all of its memory.
    Hibernate(HibernationTerms),
    /// To give back what is equal to its image.
    Trim,
}

/// How long an instance took to answer after it woke in one way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Wakes {
    count: u32,
    /// In nanoseconds.
    shortest: u64,
}

impl Wakes {
    /// Wakes of one way from which on it is known how long they take.
    const ENOUGH: u32 = 2;

    fn note(&mut self, took_ns: u64) {
        self.shortest = if self.count == 0 { took_ns } else { self.shortest.min(took_ns) };
        self.count = self.count.saturating_add(1);
    }

    fn is_known(self) -> bool {
        self.count >= Self::ENOUGH
    }
}

/// Whether to bring pages back at once: programs that write few pages answer sooner without.
/// Each way is tried, then it is the one that took less.
fn is_batch_better(batch: Wakes, faults: Wakes) -> bool {
    match (batch.is_known(), faults.is_known()) {
        (false, _) => true,
        (true, false) => false,
        (true, true) => batch.shortest <= faults.shortest,
    }
}

/// A swap file that a sandbox was given.
struct Given {
    /// Its room.
    lease: SwapLease,
    file: File,
    /// What its content has to come back from, or to be compared with, before the sandbox goes on.
    sealed: Option<Arc<Sealed>>,
    /// Room for that content in memory, where it is from the next wake on.
    _memory: Option<Lease>,
    /// Its tenant.
    tenant: Arc<Tenant>,
}

impl Given {
    /// Gives the disk back, whoever keeps a descriptor of the file: the sandbox does not need it.
    fn discard(self: Arc<Self>) {
        let Some(sealed) = self.sealed.clone() else { return self.empty() };
        // Its content may be decrypted just now, into as much memory.
        spawn_blocking(move || {
            sealed.discard();
            self.empty();
        });
    }

    fn empty(&self) {
        if let Err(error) = self.file.set_len(0) {
            tracing::warn!("a swap file that was replaced keeps its disk: {error}");
        }
    }
}

/// What a writer brings.
struct Written {
    deflated: Deflated,
    given: Given,
    /// The pages that it has needed since it last woke.
    set: Option<Arc<WorkingSet>>,
}

/// The hibernation of one instance.
pub(super) struct Hibernation {
    phase: Phase,
    /// The number of the last rest that was asked for.
    rest: u64,
    /// Whether it has come to rest as this daemon has asked.
    has_rested: bool,
    /// The swap file that it has memory in.
    swapped: Option<Swapped>,
    /// That file.
    given: Option<Arc<Given>>,
    /// Those from before it that some of its processes may have memory in. They keep their room.
    earlier: Vec<Arc<Given>>,
    /// The pages that come back at once when it wakes (REAP).
    set: Option<Arc<WorkingSet>>,
    /// The same, as it is being recorded.
    recorded: Option<Recorded>,
    /// Whether the file that it was hibernated over last brings them back.
    is_batch: bool,
    /// How long it took to answer with them, and without.
    batch: Wakes,
    faults: Wakes,
    /// Its file is being decrypted, since it wakes.
    unsealing: Option<Unsealing>,
    /// What has become of a rest in which it was to give back what is equal to its image, until that is
    /// reported.
    trimmed: Option<Result<Option<u64>, HibernateError>>,
}

/// A recording in the making: nothing in it yet, or none could be made.
type Recorded = Arc<Mutex<Option<WorkingSet>>>;

/// What has come of a hibernation.
#[derive(Debug)]
pub(super) enum Outcome {
    /// The instance has given up its memory.
    Hibernated(Swapped),
    /// It could not be written, and rests with its memory.
    Failed(HibernateError),
    /// It has given back so many bytes, or had something to do before that, and goes on; or it could not
    /// be compared.
    Trimmed(Result<Option<u64>, HibernateError>),
    /// Its memory cannot be brought back: it is to be ended, and has executed nothing of it.
    Lost(io::Error),
}

impl Default for Hibernation {
    fn default() -> Self {
        Self {
            phase: Phase::Awake,
            rest: 0,
            has_rested: false,
            swapped: None,
            given: None,
            earlier: Vec::new(),
            set: None,
            recorded: None,
            is_batch: false,
            batch: Wakes::default(),
            faults: Wakes::default(),
            unsealing: None,
            trimmed: None,
        }
    }
}

impl Hibernation {
    /// Asks the sandbox to rest. One that rests, and could not be written, is written again.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`]: it is on its way; others: it has ended.
    pub fn begin(
        &mut self,
        sandbox: &mut Sandbox,
        terms: HibernationTerms,
        base: FreezeBase,
    ) -> io::Result<()> {
        if !matches!(self.phase, Phase::Awake | Phase::Kept(_)) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let earlier_max = match terms.storage {
            SwapStorage::Plain => EARLIER_MAX,
            SwapStorage::Encrypted | SwapStorage::Verified => EARLIER_GATED_MAX,
        };
        if self.earlier.len() > earlier_max {
            return Err(io::Error::other(
                "some of its processes did not give up their memory when they were asked before",
            ));
        }
        if terms.storage != SwapStorage::Plain && sandbox.kernel_build_id() != kernel_build_id() {
            // It may not know how to wait at a gate.
            return Err(io::Error::other(
                "it runs under another build of the Thaw kernel, and swap files that are encrypted \
                 or verified need that of the daemon; build the function anew",
            ));
        }
        if let Phase::Kept(resting) = self.phase {
            return self.begin_writing(sandbox, resting, terms, base);
        }
        // No daemon before this one had the same moment.
        self.rest = monotonic_ns().max(self.rest + 1);
        sandbox.request_rest(self.rest, terms.timers)?;
        self.phase = Phase::Asked(Purpose::Hibernate(terms), base);
        Ok(())
    }

    /// Asks the sandbox to rest, to give back the pages that are equal to those of its image.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`]: it rests, or is on its way to; others: it has ended, or cannot do so.
    pub fn begin_trim(&mut self, sandbox: &mut Sandbox, base: FreezeBase) -> io::Result<()> {
        if !matches!(self.phase, Phase::Awake) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        if sandbox.kernel_build_id() != kernel_build_id() {
            // It may not know what it is told.
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.rest = monotonic_ns().max(self.rest + 1);
        sandbox.request_rest_to_trim(self.rest)?;
        self.phase = Phase::Asked(Purpose::Trim, base);
        Ok(())
    }

    /// Lets the sandbox go on if it was asked to rest for that.
    pub fn end_trim(&mut self, sandbox: &mut Sandbox) {
        if matches!(
            self.phase,
            Phase::Asked(Purpose::Trim, _) | Phase::Comparing(_) | Phase::Trimming(_)
        ) {
            self.phase = Phase::Awake;
            // One that has ended needs no telling.
            let _ = sandbox.wake();
        }
    }

    /// Lets the sandbox go on, whatever it does.
    pub fn end(&mut self, sandbox: &mut Sandbox) -> io::Result<()> {
        match self.phase {
            Phase::Awake => Ok(()),
            // It says when it is there again.
            Phase::Hibernated | Phase::Told(..) => sandbox.wake(),
            Phase::Asked(..)
            | Phase::Writing(..)
            | Phase::Comparing(_)
            | Phase::Trimming(_)
            | Phase::Kept(_) => {
                self.phase = Phase::Awake;
                sandbox.wake()
            }
        }
    }

    /// Whether it has given up its memory and has not got it back.
    pub fn is_hibernated(&self) -> bool {
        matches!(self.phase, Phase::Hibernated)
    }

    /// Bytes of its memory that are in a swap file, as long as it is hibernated.
    pub fn bytes_elsewhere(&self) -> u64 {
        let swapped = self.swapped.as_ref().filter(|_| self.is_hibernated());
        swapped.map_or(0, |swapped| swapped.stored)
    }

    /// Whether it has its memory, and was not asked to rest.
    pub fn is_awake(&self) -> bool {
        matches!(self.phase, Phase::Awake)
    }

    /// Whether its memory is looked at or on its way.
    pub fn is_under_way(&self) -> bool {
        !matches!(self.phase, Phase::Awake | Phase::Hibernated | Phase::Kept(_))
    }

    /// The sandbox rests; whether that is wanted still, so that it is being written. If that cannot
    /// be begun, it has failed.
    pub fn resting(&mut self, sandbox: &mut Sandbox, resting: Resting) -> bool {
        self.has_rested |= resting.number == self.rest;
        if resting.number != self.rest || !matches!(self.phase, Phase::Asked(..)) {
            // It was not wanted any more; the sandbox hears that, too.
            return false;
        }
        match std::mem::replace(&mut self.phase, Phase::Awake) {
            Phase::Asked(Purpose::Hibernate(terms), base) => {
                if let Err(error) = self.begin_writing(sandbox, resting, terms, base) {
                    self.phase = Phase::Writing(Reader::failed(error), resting);
                }
            }
            Phase::Asked(Purpose::Trim, base) => {
                self.phase = Phase::Comparing(compare(sandbox, resting, &base));
            }
            _ => return false,
        }
        true
    }

    /// Begins to write the memory of the sandbox, which rests.
    fn begin_writing(
        &mut self,
        sandbox: &mut Sandbox,
        resting: Resting,
        terms: HibernationTerms,
        base: FreezeBase,
    ) -> io::Result<()> {
        let max_stored =
            terms.max_stored.min(terms.room.left(self.given.as_ref().map(|given| &given.lease)));
        let spec = HibernateSpec { max_stored, base: Some(base) };
        let is_wanted = Arc::new(AtomicBool::new(true));
        let wanted = is_wanted.clone();
        let hibernator = sandbox.hibernator(resting, spec)?.while_wanted(wanted.clone());
        if let Some(recorded) = self.recorded.take() {
            let set = recorded.lock().expect("nobody panics with it").take();
            self.set = set.map(Arc::new);
        }
        // Pages that come back at once are needed again for that reason alone.
        let recorder = match (&self.swapped, &self.set) {
            (Some(swapped), None) => {
                let recorder = WorkingSet::recorder(sandbox)?.while_wanted(wanted);
                Some((recorder, swapped.clone()))
            }
            _ => None,
        };
        let set = self.set.clone();
        let old = self.given.clone();
        let is_batch = is_batch_better(self.batch, self.faults);
        let write = move |is_wanted: &dyn Fn() -> bool| {
            write(hibernator, &terms, recorder, set, is_batch, old, is_wanted)
        };
        self.phase = Phase::Writing(Reader::new(is_wanted, write), resting);
        Ok(())
    }

    /// Passes on what was written; what has failed. After that the sandbox rests until
    /// [`Hibernation::end`].
    pub fn poll(&mut self, sandbox: &mut Sandbox, context: &mut Context<'_>) -> Poll<Outcome> {
        if let Some(trimmed) = self.trimmed.take() {
            return Poll::Ready(Outcome::Trimmed(trimmed));
        }
        if let Some(Unsealing(unsealing)) = &mut self.unsealing
            && let Poll::Ready(joined) = Pin::new(unsealing).poll(context)
        {
            self.unsealing = None;
            if let Err(error) = joined.unwrap_or_else(|error| Err(io::Error::other(error))) {
                return Poll::Ready(Outcome::Lost(error));
            }
        }
        let (written, resting) = match &mut self.phase {
            Phase::Writing(writer, resting) => (ready!(writer.poll(context)), *resting),
            Phase::Comparing(reader) => {
                let compared = ready!(reader.poll(context));
                return self.compared(sandbox, compared);
            }
            _ => return Poll::Pending,
        };
        self.phase = Phase::Kept(resting);
        let told = written.and_then(|written| {
            self.set = written.set;
            Ok((sandbox.hibernate(written.deflated)?, written.given))
        });
        match told {
            Ok((swapped, given)) => {
                self.phase = Phase::Told(Box::new(swapped), Arc::new(given));
                Poll::Pending
            }
            Err(error) => Poll::Ready(Outcome::Failed(error)),
        }
    }

    /// Has the sandbox, which rests, give back what was found, and go on.
    fn compared(
        &mut self,
        sandbox: &mut Sandbox,
        compared: Result<Unchanged, HibernateError>,
    ) -> Poll<Outcome> {
        let told = compared.and_then(|unchanged| {
            sandbox.trim(&unchanged)?;
            Ok(unchanged.bytes())
        });
        // One that has ended needs no telling.
        let _ = sandbox.wake();
        match told {
            Ok(bytes) => {
                self.phase = Phase::Trimming(bytes);
                Poll::Pending
            }
            Err(error) => {
                self.phase = Phase::Awake;
                Poll::Ready(Outcome::Trimmed(Err(error)))
            }
        }
    }

    /// Whether this daemon has never asked the sandbox to rest.
    pub fn has_asked_nothing(&self) -> bool {
        self.rest == 0
    }

    /// Whether what the sandbox says of rests may be its answer to an earlier daemon: it has said
    /// nothing of those that this one has asked for.
    pub fn may_answer_earlier_daemon(&self) -> bool {
        !self.has_rested
    }

    /// The sandbox has given up its memory; `None`: nobody has told it to.
    pub fn hibernated(&mut self) -> Option<Outcome> {
        match std::mem::replace(&mut self.phase, Phase::Awake) {
            Phase::Told(swapped, given) => {
                let outcome = Outcome::Hibernated((*swapped).clone());
                self.is_batch = swapped.is_batch();
                self.swapped = Some(*swapped);
                if let Some(sealed) = given.sealed.clone() {
                    // It may be large.
                    spawn_blocking(move || sealed.empty());
                }
                let old = self.given.replace(given).into_iter().chain(self.earlier.drain(..));
                old.for_each(|old| old.discard());
                self.phase = Phase::Hibernated;
                Some(outcome)
            }
            other => {
                self.phase = other;
                None
            }
        }
    }

    /// The sandbox wakes and wants its memory decrypted; false: it has none that is encrypted.
    pub fn unseal(&mut self) -> bool {
        if self.may_answer_earlier_daemon() {
            // That had the key. The sandbox notices it, and says so.
            return true;
        }
        let is_hibernated = matches!(self.phase, Phase::Hibernated) && self.unsealing.is_none();
        let given = self.given.as_ref().filter(|_| is_hibernated);
        let sealed = given.and_then(|given| Some((given.sealed.clone()?, given.tenant.clone())));
        let Some((sealed, tenant)) = sealed.filter(|(sealed, _)| sealed.is_sealed()) else {
            return false;
        };
        self.unsealing = Some(Unsealing::new(sealed, tenant));
        true
    }

    /// The sandbox has answered somebody. If it has woken by page faults for that, what it has
    /// needed is recorded now: later it has also written what the next answer need not wait for.
    pub fn served(&mut self, sandbox: &Sandbox) {
        let is_first = matches!(self.phase, Phase::Awake) && self.set.is_none();
        let Some(swapped) = self.swapped.clone().filter(|_| is_first && self.recorded.is_none())
        else {
            return;
        };
        // One that has ended needs no recording.
        let Ok(recorder) = WorkingSet::recorder(sandbox) else { return };
        let recorded = Recorded::default();
        self.recorded = Some(recorded.clone());
        spawn_blocking(move || match recorder.record_swap(&swapped) {
            Ok(set) => *recorded.lock().expect("nobody panics with it") = Some(set),
            Err(error) => tracing::debug!("could not record a working set: {error}"),
        });
    }

    /// The sandbox goes on; false: not from the rest that it was asked for last. Before the first
    /// it may be one of an earlier daemon.
    pub fn awake(&mut self, awake: Awake) -> bool {
        if awake.rest != self.rest {
            return self.has_asked_nothing();
        }
        match (std::mem::replace(&mut self.phase, Phase::Awake), awake.cause) {
            // Some of its processes have given up their memory; others may have the earlier file.
            (Phase::Told(swapped, given), AwakeCause::Unanswered) => {
                self.swapped = Some(*swapped);
                self.earlier.extend(self.given.replace(given));
            }
            // It has gone on before it took the file.
            (Phase::Told(_, given), _) => given.discard(),
            (Phase::Trimming(bytes), AwakeCause::Message) => self.trimmed = Some(Ok(Some(bytes))),
            (Phase::Asked(Purpose::Trim, _), AwakeCause::Unanswered) => {
                let several = "it has several processes, which are not trimmed";
                self.trimmed = Some(Err(io::Error::other(several).into()));
            }
            (Phase::Asked(Purpose::Trim, _) | Phase::Comparing(_) | Phase::Trimming(_), _) => {
                self.trimmed = Some(Ok(None));
            }
            _ => {}
        }
        if let Some(answered_ns) = awake.answered_ns.filter(|_| awake.was_hibernated) {
            let wakes = if self.is_batch { &mut self.batch } else { &mut self.faults };
            wakes.note(answered_ns.saturating_sub(awake.woken_ns));
        }
        true
    }
}

/// Begins to compare a sandbox at rest with its image.
fn compare(sandbox: &Sandbox, resting: Resting, base: &FreezeBase) -> Reader<Unchanged> {
    match sandbox.trimmer(resting, base.files()) {
        // Nobody interrupts it, which would end the state helper: it takes a short time at most.
        Ok(trimmer) => Reader::new(Arc::default(), move |_| Ok(trimmer.find()?)),
        Err(error) => Reader::failed(error),
    }
}

/// Writes the memory of a sandbox; first looks, if wanted, what it has needed since it woke.
fn write(
    hibernator: Hibernator,
    terms: &HibernationTerms,
    recorder: Option<(Recorder, Swapped)>,
    mut set: Option<Arc<WorkingSet>>,
    is_batch: bool,
    old: Option<Arc<Given>>,
    is_wanted: &dyn Fn() -> bool,
) -> Result<Written, HibernateError> {
    while is_wanted() && is_swap_slow() {
        std::thread::sleep(SLOW_SWAP_LOOK);
    }
    if !is_wanted() {
        return Err(io::Error::from(io::ErrorKind::Interrupted).into());
    }
    if let Some((recorder, swapped)) = recorder {
        match recorder.record_swap(&swapped) {
            Ok(recorded) => set = Some(Arc::new(recorded)),
            // It wakes by page faults once more.
            Err(error) => tracing::debug!("could not record a working set: {error}"),
        }
    }
    let old = old.as_ref().map(|old| &old.lease);
    let mut shut = None;
    let (unsealed, swap) = match terms.storage {
        SwapStorage::Plain => {
            (None, terms.space.new_file(terms.max_stored.min(terms.room.left(old)))?)
        }
        SwapStorage::Verified => {
            let swap = terms.space.new_file(terms.max_stored.min(terms.room.left(old)))?;
            let (told, own) = gate()?;
            shut = Some(own);
            (None, SwapFile { gate: Some(told), ..swap })
        }
        SwapStorage::Encrypted => {
            let (unsealed, swap) = Unsealed::new()?;
            (Some(unsealed), swap)
        }
    };
    let file = swap.write.try_clone()?;
    let deflated = match hibernator.write(swap, set.as_deref().filter(|_| is_batch)) {
        Err(HibernateError::Write(FreezeError::TooLarge { needed, .. }))
            if needed <= terms.max_stored =>
        {
            // It was stopped at the end of its tenant's room.
            terms.room.take(needed, old)?;
            return Err(io::Error::from(io::ErrorKind::QuotaExceeded).into());
        }
        deflated => deflated?,
    };
    let memory = match &unsealed {
        Some(unsealed) => {
            let kept = terms.tenant.keep_memory(unsealed.len()?);
            Some(kept.map_err(io::Error::other)?)
        }
        None => None,
    };
    // Others of the tenant may have taken the room meanwhile.
    let sealed = unsealed.map(|unsealed| unsealed.seal(&terms.space, is_wanted)).transpose()?;
    let verified = shut.map(|gate| Sealed::verified(file.try_clone()?, gate)).transpose()?;
    let sealed = sealed.or(verified).map(Arc::new);
    let encrypted_len = sealed.as_ref().and_then(|sealed| sealed.encrypted_len());
    let bytes = encrypted_len.unwrap_or(deflated.swapped.file_len);
    let lease = terms.room.take(bytes, old)?;
    let given = Given { lease, file, sealed, _memory: memory, tenant: terms.tenant.clone() };
    Ok(Written { deflated, given, set })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_to_wake_is_tried_and_then_the_shorter_one_stays() {
        let wakes = |times: &[u64]| {
            let mut wakes = Wakes::default();
            times.iter().for_each(|&took| wakes.note(took));
            wakes
        };
        assert!(is_batch_better(Wakes::default(), wakes(&[900])));
        assert!(is_batch_better(wakes(&[1000]), wakes(&[900])));
        assert!(!is_batch_better(wakes(&[1000, 1000]), wakes(&[900])));
        assert!(!is_batch_better(wakes(&[1000, 950]), wakes(&[900, 1200])));
        assert!(is_batch_better(wakes(&[1000, 850]), wakes(&[900, 1200])));
        // A later, shorter one changes it.
        assert!(!is_batch_better(wakes(&[1000, 850]), wakes(&[900, 1200, 840])));
    }
}
