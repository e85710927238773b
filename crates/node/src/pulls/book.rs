//! Which pulls the daemon has begun, how far each is, and which come next.

use super::options::options_of;
use super::order::{News, Order};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use thaw_build::artifact::Part;
use thaw_home::partial::{self, RecordIdentity};

/// Fetchers at a time. Each fetches some pieces at a time.
pub(super) const FETCHERS_MAX: usize = 4;
/// How long a pull keeps its fetcher if others wait and all places are taken. Long enough for pieces to
/// come over a slow link: those that are under way when its turn ends begin anew.
const TURN: Duration = Duration::from_secs(5 * 60);
/// Pulls that wait and that a client has asked for.
const WAITING_MAX: usize = 64;
/// Pulls that have ended and can be asked for still.
const ENDED_MAX: usize = 64;
/// Sentences that are kept of a pull.
const NOTES_MAX: usize = 16;
/// How long another version of a function is served before the pull of its rest is ended. When all of it
/// has just been stored, or its first part is, both look the same for a moment.
const SUPERSEDED_FOR: Duration = Duration::from_secs(5);
/// Pauses before a pull is tried again: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// A function, or a container image, that is to be pulled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NewPull {
    /// What to pull, as `registry/repository:tag`, `@digest`, or `s3://bucket/path:tag`.
    pub reference: String,
    /// A name of one's own for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The sharing domain of the function.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// Whether a function that no key has signed may have outgoing connections.
    #[serde(default)]
    pub allow_egress: bool,
    /// Whether it is served as soon as what a boot needs is here.
    #[serde(default)]
    pub lazy: bool,
}

/// Where a pull stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PullState {
    /// It waits for its turn, or for its next try.
    Waiting,
    /// A fetcher is at work.
    Fetching,
    /// `thaw pull --lazy` fetches it.
    Command,
    /// All of it is stored.
    Done,
    /// It has failed, and is not tried again.
    Failed,
    /// Somebody has ended it.
    Cancelled,
}

/// A pull.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct PullInfo {
    /// Its number in the life of this daemon.
    pub id: u64,
    /// What is pulled; none: the node goes on with a function of which a part was here.
    pub reference: Option<String>,
    /// The function, as soon as its name is known.
    pub function: Option<String>,
    /// How far it is.
    #[serde(flatten)]
    pub fetching: Fetching,
    /// Digest of the manifest, when all of it is stored.
    pub digest: Option<String>,
    /// Sentences for whoever has asked for it.
    pub notes: Vec<String>,
}

/// How far a pull is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Fetching {
    /// Where it stands.
    pub state: PullState,
    /// Whether the function is served already.
    pub served: bool,
    /// Bytes of pieces that are here; 0 as long as nobody knows.
    pub bytes: u64,
    /// Bytes of all pieces.
    pub of: u64,
    /// Bytes that were moved by the present fetcher.
    pub moved: u64,
    /// Times that a piece could not be had by the present fetcher.
    pub failed_fetches: u64,
    /// How often it was tried in a row without a piece more.
    pub failed_tries: u32,
    /// Why it has failed, or is to be tried again.
    pub problem: Option<String>,
}

/// Why a pull cannot be begun.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PullsError {
    /// It makes no sense.
    #[error("{0}")]
    Wrong(String),
    /// So many wait already.
    #[error("{WAITING_MAX} pulls wait already; try again when some are done")]
    Full,
}

/// All pulls of a daemon.
#[derive(Debug, Default)]
pub struct Pulls {
    state: Mutex<State>,
    /// For whoever begins them.
    news: Condvar,
}

#[derive(Debug, Default)]
struct State {
    last: u64,
    pulls: BTreeMap<u64, Pull>,
    /// Partial functions that are left alone as long as their record is this one: somebody has ended
    /// their pull, or it was refused.
    left_alone: HashMap<String, Option<RecordIdentity>>,
    /// Partial functions that a command fetches.
    by_command: BTreeSet<String>,
    /// Something may be begun.
    has_news: bool,
    is_stopping: bool,
}

#[derive(Debug)]
struct Pull {
    order: Order,
    reference: Option<String>,
    function: Option<String>,
    fetching: Fetching,
    not_before: Option<Instant>,
    /// Since when it has waited for a fetcher, if it waits.
    waits_since: Instant,
    /// When a fetcher began it last.
    begun: Option<Instant>,
    /// Its fetcher was ended for one that waits.
    is_turn_over: bool,
    /// Since when another version of it is served.
    superseded: Option<Instant>,
    digest: Option<String>,
    notes: Vec<String>,
    /// All of it is stored, and a part is served no more.
    is_whole: bool,
    /// Of its fetcher.
    socket: Option<UnixStream>,
}

impl Pull {
    fn new(order: Order) -> Self {
        let (reference, function) = match &order {
            Order::GoOn(function) => (None, Some(function.clone())),
            Order::Pull(new) => (Some(new.reference.clone()), None),
        };
        let fetching = Fetching {
            state: PullState::Waiting,
            served: function.is_some(),
            bytes: 0,
            of: 0,
            moved: 0,
            failed_fetches: 0,
            failed_tries: 0,
            problem: None,
        };
        Self {
            order,
            reference,
            function,
            fetching,
            not_before: None,
            waits_since: Instant::now(),
            begun: None,
            is_turn_over: false,
            superseded: None,
            digest: None,
            notes: Vec::new(),
            is_whole: false,
            socket: None,
        }
    }

    fn is_active(&self) -> bool {
        matches!(self.fetching.state, PullState::Waiting | PullState::Fetching)
    }

    /// Whether it may be begun, and has its turn by that.
    fn is_due(&self, now: Instant) -> bool {
        self.fetching.state == PullState::Waiting && self.not_before.is_none_or(|at| at <= now)
    }

    /// Whether its fetcher has had its turn, and may be ended: the next one goes on with the pieces that are
    /// here. One that has them all stores them, which would begin anew.
    fn has_had_its_turn(&self, now: Instant) -> bool {
        let has_begun = self.begun.is_some_and(|begun| now.duration_since(begun) >= TURN);
        let is_fetching = self.fetching.state == PullState::Fetching && self.socket.is_some();
        let Fetching { bytes, of, .. } = self.fetching;
        let can_be_resumed = match self.order {
            Order::GoOn(_) => bytes < of || of == 0,
            Order::Pull(_) => bytes < of && bytes > 0,
        };
        is_fetching && has_begun && can_be_resumed && !self.is_whole
    }

    fn info(&self, id: u64) -> PullInfo {
        PullInfo {
            id,
            reference: self.reference.clone(),
            function: self.function.clone(),
            fetching: self.fetching.clone(),
            digest: self.digest.clone(),
            notes: self.notes.clone(),
        }
    }
}

/// What has changed by a piece of news, for whoever counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Bytes that were moved.
    pub moved: u64,
    /// Fetches of pieces that have failed.
    pub failed_fetches: u64,
}

impl Pulls {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }

    /// Begins a pull that a client asks for.
    ///
    /// # Errors
    /// It makes no sense, or too many wait.
    pub fn begin(&self, new: NewPull) -> Result<PullInfo, PullsError> {
        options_of(&new)?;
        let mut state = self.state();
        let waits = |pull: &&Pull| pull.fetching.state == PullState::Waiting;
        let asked = |pull: &&Pull| matches!(pull.order, Order::Pull(_));
        if state.pulls.values().filter(waits).filter(asked).count() >= WAITING_MAX {
            return Err(PullsError::Full);
        }
        let id = state.add(Order::Pull(new));
        let info = state.pulls[&id].info(id);
        drop(state);
        self.look();
        Ok(info)
    }

    /// All of them, the oldest first.
    pub fn all(&self) -> Vec<PullInfo> {
        self.state().pulls.iter().map(|(id, pull)| pull.info(*id)).collect()
    }

    /// One of them.
    pub fn of(&self, id: u64) -> Option<PullInfo> {
        self.state().pulls.get(&id).map(|pull| pull.info(id))
    }

    /// Ends one. What is here of its function stays, and is left alone.
    pub fn cancel(&self, partial: &Path, id: u64) -> Option<PullInfo> {
        let mut state = self.state();
        let pull = state.pulls.get_mut(&id)?;
        if pull.is_active() {
            pull.fetching.state = PullState::Cancelled;
            end(pull);
            if let Some(function) = pull.function.clone() {
                state.leave_alone(partial, function);
            }
        }
        Some(state.pulls[&id].info(id))
    }

    /// How the rest of a partial function comes.
    pub fn fetching(&self, function: &str) -> Option<Fetching> {
        let state = self.state();
        let of_function = |pull: &&Pull| pull.function.as_deref() == Some(function);
        let known = state.pulls.values().rev().find(of_function);
        let mut fetching = known.map(|pull| pull.fetching.clone());
        if state.by_command.contains(function) {
            let command = Pull::new(Order::GoOn(function.to_owned())).fetching;
            fetching = Some(Fetching { state: PullState::Command, ..command });
        }
        fetching
    }

    /// How many are in each state.
    pub fn count(&self) -> Vec<(PullState, usize)> {
        let state = self.state();
        let count = |wanted| {
            let all = state.pulls.values();
            (wanted, all.filter(|pull| pull.fetching.state == wanted).count())
        };
        let mut counts = [PullState::Waiting, PullState::Fetching].map(count).to_vec();
        counts.push((PullState::Command, state.by_command.len()));
        counts
    }

    /// Finds partial functions that are `served` and that nobody fetches, and pulls them. Ends the
    /// pulls of those that are not served any more: a newer version of them is stored.
    pub fn adopt(&self, partial: &Path, served: &BTreeSet<String>) {
        let names: BTreeSet<String> = partial::names(partial).into_iter().collect();
        let names: BTreeSet<String> = names.intersection(served).cloned().collect();
        let active = {
            let mut state = self.state();
            state.end_superseded(served);
            let active = state.active();
            state.left_alone.retain(|name, _| names.contains(name));
            state.by_command.retain(|name| names.contains(name) && !active.contains(name));
            active
        };
        for name in names.difference(&active) {
            let is_fetched = partial::is_being_fetched(partial, name);
            let mut state = self.state();
            // A pull of a client may have found its name meanwhile, or be about to.
            let is_active = state.active().contains(name);
            match is_fetched && !is_active && !state.has_nameless_fetcher() {
                true => state.by_command.insert(name.clone()),
                false => state.by_command.remove(name),
            };
            let is_busy = is_active || is_fetched;
            let identity = partial::identity(partial, name);
            if !is_busy && state.left_alone.get(name) != Some(&identity) {
                state.add(Order::GoOn(name.clone()));
            }
        }
    }

    /// The next pull that may be begun, which counts as begun from now on: the one that has waited longest
    /// since it came, failed or had its turn, so that none keeps another one from its turn. If all places are taken, a fetcher
    /// that has had its turn is ended for it.
    pub fn next(&self) -> Option<(u64, Order)> {
        self.next_at(Instant::now())
    }

    fn next_at(&self, now: Instant) -> Option<(u64, Order)> {
        let mut state = self.state();
        if state.is_stopping {
            return None;
        }
        let busy = state.pulls.values().filter(|pull| pull.fetching.state == PullState::Fetching);
        if busy.count() >= FETCHERS_MAX {
            state.end_a_turn(now);
            return None;
        }
        let waiting = state.pulls.iter_mut().filter(|(_, pull)| pull.is_due(now));
        let (id, pull) = waiting.min_by_key(|(id, pull)| (pull.waits_since, **id))?;
        (pull.begun, pull.is_turn_over) = (Some(now), false);
        pull.fetching.state = PullState::Fetching;
        (pull.fetching.moved, pull.fetching.failed_fetches) = (0, 0);
        Some((*id, pull.order.clone()))
    }

    /// Its fetcher is at the other end of this socket. False: it is not wanted any more.
    pub fn connected(&self, id: u64, socket: UnixStream) -> bool {
        let mut state = self.state();
        let is_stopping = state.is_stopping;
        let Some(pull) = state.pulls.get_mut(&id) else { return false };
        pull.socket = Some(socket);
        let is_wanted = pull.fetching.state == PullState::Fetching && !is_stopping;
        if !is_wanted {
            end(pull);
        }
        is_wanted
    }

    /// Notes how far a pull is.
    pub fn note(&self, id: u64, news: &News) -> Counted {
        let mut state = self.state();
        let Some(pull) = state.pulls.get_mut(&id) else { return Counted::default() };
        let mut counted = Counted::default();
        match news {
            News::Progress { bytes, of, moved, failed } => {
                let fetching = &mut pull.fetching;
                counted.moved = moved.saturating_sub(fetching.moved);
                counted.failed_fetches = failed.saturating_sub(fetching.failed_fetches);
                (fetching.bytes, fetching.of) = (*bytes, *of);
                (fetching.moved, fetching.failed_fetches) = (*moved, *failed);
                if *moved > 0 {
                    (fetching.failed_tries, fetching.problem) = (0, None);
                }
            }
            News::Serve { function, part } => {
                pull.function = Some(function.clone());
                pull.fetching.served = true;
                match part {
                    // Should it fail from here on, what is here is gone on with.
                    Part::Run => pull.order = Order::GoOn(function.clone()),
                    Part::Whole => pull.is_whole = true,
                }
            }
            News::Note(note) if pull.notes.len() < NOTES_MAX => pull.notes.push(note.clone()),
            News::Note(_) | News::Done { .. } | News::Failed { .. } => {}
        }
        counted
    }

    /// Its fetcher has ended, with this last news. How long until it is tried again, if it is; no time if
    /// others have their turn first.
    pub fn ended(&self, partial: &Path, id: u64, last: News) -> Option<Duration> {
        let mut state = self.state();
        let pull = state.pulls.get_mut(&id)?;
        pull.socket = None;
        if pull.fetching.state != PullState::Fetching {
            return None;
        }
        let (reason, is_refusal) = match last {
            News::Done { name, digest } => {
                pull.fetching.state = PullState::Done;
                pull.fetching.problem = None;
                (pull.function, pull.digest) = (Some(name), digest);
                state.forget_old();
                return None;
            }
            News::Failed { reason, is_refusal } => (reason, is_refusal),
            _ => ("its fetcher has ended".to_owned(), false),
        };
        pull.waits_since = Instant::now();
        if pull.is_turn_over && !is_refusal {
            pull.not_before = None;
            pull.fetching.state = PullState::Waiting;
            return Some(Duration::ZERO);
        }
        pull.fetching.problem = Some(reason);
        pull.fetching.failed_tries += 1;
        // Of what a client has asked for, nothing is here that could be gone on with.
        let is_partial = matches!(pull.order, Order::GoOn(_));
        if is_refusal || !is_partial {
            pull.fetching.state = PullState::Failed;
            if let Some(function) = pull.function.clone().filter(|_| is_partial) {
                state.leave_alone(partial, function);
            }
            state.forget_old();
            return None;
        }
        let doubled = PAUSES.0 * 2_u32.saturating_pow(pull.fetching.failed_tries.min(10) - 1);
        let pause = doubled.min(PAUSES.1);
        pull.not_before = Some(Instant::now() + pause);
        pull.fetching.state = PullState::Waiting;
        Some(pause)
    }

    /// Waits until something may be begun, for so long at most. False: nothing is begun any more.
    pub fn wait(&self, at_most: Duration) -> bool {
        let is_quiet = |state: &mut State| !state.has_news && !state.is_stopping;
        let waited = self.news.wait_timeout_while(self.state(), at_most, is_quiet);
        let mut state = waited.expect("no holder panics").0;
        state.has_news = false;
        !state.is_stopping
    }

    /// Something may be begun: somebody has asked for it, or a fetcher has ended.
    pub fn look(&self) {
        self.state().has_news = true;
        self.news.notify_one();
    }

    /// Ends all fetchers. What is here is gone on with by the next daemon.
    pub fn stop(&self) {
        let mut state = self.state();
        state.is_stopping = true;
        state.pulls.values_mut().for_each(end);
        self.news.notify_one();
    }
}

/// Ends the fetcher of a pull, if it has one.
fn end(pull: &mut Pull) {
    if let Some(socket) = pull.socket.take() {
        let _ = socket.shutdown(Shutdown::Both);
    }
}

impl State {
    fn add(&mut self, order: Order) -> u64 {
        self.forget_old();
        self.last += 1;
        self.pulls.insert(self.last, Pull::new(order));
        self.last
    }

    /// Ends the fetcher that has been at work for longest, if its turn is over and another pull waits. One
    /// at a time; for pulls that have just failed none, which may fail for ever.
    fn end_a_turn(&mut self, now: Instant) {
        let is_ending =
            |pull: &Pull| pull.is_turn_over && pull.fetching.state == PullState::Fetching;
        let is_wanted = |pull: &Pull| {
            let waits_for = now.saturating_duration_since(pull.waits_since);
            pull.is_due(now) && (pull.fetching.failed_tries == 0 || waits_for >= TURN)
        };
        if !self.pulls.values().any(is_wanted) || self.pulls.values().any(is_ending) {
            return;
        }
        let had = self.pulls.values_mut().filter(|pull| pull.has_had_its_turn(now));
        if let Some(pull) = had.min_by_key(|pull| pull.begun) {
            pull.is_turn_over = true;
            end(pull);
        }
    }

    /// The functions of pulls that have not ended.
    fn active(&self) -> BTreeSet<String> {
        let active = self.pulls.values().filter(|pull| pull.is_active());
        active.filter_map(|pull| pull.function.clone()).collect()
    }

    /// Whether a fetcher that serves a part has not said yet of which function.
    fn has_nameless_fetcher(&self) -> bool {
        let is_lazy = |pull: &Pull| matches!(&pull.order, Order::Pull(new) if new.lazy);
        let mut all = self.pulls.values();
        all.any(|pull| pull.socket.is_some() && pull.function.is_none() && is_lazy(pull))
    }

    fn end_superseded(&mut self, served: &BTreeSet<String>) {
        for pull in self.pulls.values_mut() {
            let Order::GoOn(function) = &pull.order else { continue };
            let is_active = pull.fetching.state == PullState::Waiting
                || pull.fetching.state == PullState::Fetching;
            if !is_active || pull.is_whole || served.contains(function) {
                pull.superseded = None;
                continue;
            }
            if pull.superseded.get_or_insert_with(Instant::now).elapsed() >= SUPERSEDED_FOR {
                pull.fetching.state = PullState::Cancelled;
                pull.fetching.problem = Some("another version of it is served".to_owned());
                end(pull);
            }
        }
    }

    fn leave_alone(&mut self, partial: &Path, function: String) {
        let identity = partial::identity(partial, &function);
        self.left_alone.insert(function, identity);
    }

    fn forget_old(&mut self) {
        let ended = self.pulls.iter().filter(|(_, pull)| !pull.is_active()).map(|(id, _)| *id);
        let ended: Vec<u64> = ended.collect();
        for id in &ended[..ended.len().saturating_sub(ENDED_MAX)] {
            self.pulls.remove(id);
        }
    }
}

#[cfg(test)]
mod tests;
