//! Sandboxes of the daemon before this one that have a volume.
//!
//! Only they know which files they have open, which locks these have, and where files end whose length
//! was delegated. So nobody gets at the volume before they have said so:
//!
//! | stage | who is served |
//! | --- | --- |
//! | unknown | nobody: who is left is not known yet |
//! | letting go | nobody: each of them says that it writes by no delegation of the former daemon any more, within [`LET_GO_MAX`]. Files are cut to their lengths then, and counted |
//! | reclaiming | each of those who are left, until it says that it has opened its files and taken its locks again; for [`RECLAIM_MAX`] at most |
//! | over | everybody |
//!
//! NFS servers do the same after a restart (RFC 8881, 8.4.2).

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::io::pwrite;
use rustix::process::{Signal, pidfd_send_signal};

use super::lengths::{self, Holds};
use super::{Volume, tree};

/// How long a sandbox may take to let go.
const LET_GO_MAX: Duration = Duration::from_secs(5);
/// How long sandboxes may take to open their files again.
const RECLAIM_MAX: Duration = Duration::from_secs(4);
/// How long one that is killed may still write.
const END_MAX: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// The pause before files are cut once more, if that has failed.
const AGAIN: Duration = Duration::from_secs(1);

/// Is told why a volume cannot begin, once for each cause; that is tried again.
type CannotBegin = fn(&Arc<Volume>, &io::Error);

/// Tells a sandbox from all others of this machine, whichever daemon it has; 0: none.
pub type VolumeHolder = u64;

/// Who is left of the daemon before this one, and how far they are.
pub(super) struct Left {
    /// Nobody is waited for any more.
    is_over: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    stage: Stage,
    holders: BTreeMap<VolumeHolder, LeftHolder>,
    /// Why the volume could not begin when that was tried last.
    problem: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Unknown,
    LettingGo,
    Reclaiming,
    Over,
}

/// A sandbox that is left.
struct LeftHolder {
    has_let_go: bool,
    /// It has its files again, as far as that can be.
    is_done: bool,
    process: OwnedFd,
}

impl Left {
    /// Nobody is left; or who is, is said later.
    pub fn new(are_some_left: bool) -> Self {
        let stage = if are_some_left { Stage::Unknown } else { Stage::Over };
        let state = Mutex::new(State { stage, ..State::default() });
        Self { is_over: AtomicBool::new(!are_some_left), state, changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether everybody is served.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Notes that a sandbox is left, whose first process this is. Too late when nobody is waited for any
    /// more, which then do not wait for this one.
    pub fn add(&self, holder: VolumeHolder, process: OwnedFd) {
        let mut state = self.state();
        if state.stage == Stage::Unknown {
            let left = LeftHolder { has_let_go: false, is_done: false, process };
            state.holders.insert(holder, left);
        }
    }

    fn has_let_go(&self, holder: VolumeHolder) -> bool {
        self.state().holders.get(&holder).is_some_and(|left| left.has_let_go)
    }

    /// Notes that a sandbox has let go.
    pub fn let_go(&self, holder: VolumeHolder) {
        if let Some(left) = self.state().holders.get_mut(&holder) {
            left.has_let_go = true;
        }
        self.changed.notify_all();
    }

    /// Notes that a sandbox that has let go has its files again.
    pub fn done(&self, holder: VolumeHolder) {
        if let Some(left) = self.state().holders.get_mut(&holder) {
            left.is_done = left.has_let_go;
        }
        self.changed.notify_all();
    }

    /// Notes that nothing runs in a sandbox any more.
    pub fn forget(&self, holder: VolumeHolder) {
        if self.is_over() {
            return;
        }
        self.state().holders.remove(&holder);
        self.changed.notify_all();
    }

    /// Waits until a sandbox is served, or has ended.
    pub fn pass(&self, holder: VolumeHolder, has_ended: &AtomicBool) {
        if self.is_over() {
            return;
        }
        let has_to_wait = |state: &mut State| match state.stage {
            _ if has_ended.load(Ordering::Relaxed) => false,
            Stage::Unknown | Stage::LettingGo => true,
            // One that has its own again may want what others had.
            Stage::Reclaiming => state.holders.get(&holder).is_none_or(|left| left.is_done),
            Stage::Over => false,
        };
        let waited = self.changed.wait_while(self.state(), has_to_wait);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn go_to(&self, stage: Stage) {
        let mut state = self.state();
        state.stage = stage;
        if stage == Stage::Over {
            state.holders.clear();
            self.is_over.store(true, Ordering::Release);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Goes to the next stage if all who are left were not known before; whether they were not.
    fn begin(&self) -> bool {
        let mut state = self.state();
        let is_first = state.stage == Stage::Unknown;
        if is_first {
            state.stage = Stage::LettingGo;
        }
        is_first
    }

    /// Notes why the volume could not begin; whether that was not so before.
    pub(super) fn is_new_problem(&self, error: &io::Error) -> bool {
        let problem = Some(error.to_string());
        let mut state = self.state();
        let is_new = state.problem != problem;
        state.problem = problem;
        is_new
    }

    /// Waits until this holds of all who are left, and kills those of whom it does not by then.
    fn wait_or_kill(&self, until: Instant, is_done: impl Fn(&LeftHolder) -> bool) {
        let waits = |state: &mut State| !state.holders.values().all(&is_done);
        let patience = until.saturating_duration_since(Instant::now());
        drop(self.changed.wait_timeout_while(self.state(), patience, waits));
        let mut state = self.state();
        let holders = std::mem::take(&mut state.holders).into_iter();
        let (in_time, late) = holders.partition(|(_, left)| is_done(left));
        state.holders = in_time;
        drop(state);
        kill(late);
    }

    /// Kills a sandbox that has not all of what it had.
    pub fn end(&self, holder: VolumeHolder) {
        let lost = self.state().holders.remove_entry(&holder);
        kill(lost.into_iter().collect());
        self.changed.notify_all();
    }
}

/// Kills sandboxes, and waits until they have ended.
fn kill(holders: BTreeMap<VolumeHolder, LeftHolder>) {
    for left in holders.values() {
        // One that has ended needs no signal.
        let _ = pidfd_send_signal(&left.process, Signal::KILL);
    }
    for left in holders.values() {
        let _ = poll(&mut [PollFd::new(&left.process, PollFlags::IN)], Some(&END_MAX));
    }
}

impl Volume {
    /// Goes on with those who are left of the daemon before this one, all of whom are known now. To be
    /// called with all volumes that were opened when that was not so: one sandbox may have several.
    /// One that cannot begin is tried again, and `cannot_begin` is told why.
    ///
    /// # Errors
    /// There are no threads left: some are served by nobody until the daemon is restarted.
    pub fn go_on_with_left(volumes: Vec<Arc<Self>>, cannot_begin: CannotBegin) -> io::Result<()> {
        let begun = volumes.into_iter().filter(|volume| volume.left.begin());
        for volumes in connected(begun) {
            let thread = std::thread::Builder::new().name("volumes-left".into());
            thread.spawn(move || wait_for_left(volumes, cannot_begin))?;
        }
        Ok(())
    }

    /// Cuts files to their lengths, and counts what is there: no sandbox changes the volume.
    fn begin_after_left(&self) -> io::Result<()> {
        self.take_rights()?;
        let place = self.place();
        let files = place.directory.directory();
        let is_shared = self.is_used_elsewhere()?;
        let _others = self.lock_others()?;
        if let Some(lengths) = &self.lengths {
            lengths::cut(files.as_fd(), &lengths.directory, &|holder| match self
                .left
                .has_let_go(holder)
            {
                true => Holds::Nothing,
                false if is_shared => Holds::OfAnother,
                false => Holds::UntilItEnds,
            })?;
        }
        if is_shared {
            // The other process changes what is counted. What was granted stays counted.
            return Ok(());
        }
        let used = tree::count(files.as_fd(), self.quota);
        pwrite(&self.usage, &used.to_ne_bytes(), 0)?;
        Ok(())
    }

    /// Lets other processes have the volume, too.
    fn let_others_in(&self) {
        // It has the lock already, or waits for nobody but who has just come.
        let _ = flock(&self.users, FlockOperation::LockShared);
    }
}

/// Volumes of which one sandbox may wait for another one's, apart from all others.
fn connected(volumes: impl Iterator<Item = Arc<Volume>>) -> Vec<Vec<Arc<Volume>>> {
    let mut all: Vec<(BTreeSet<VolumeHolder>, Vec<Arc<Volume>>)> = Vec::new();
    for volume in volumes {
        let own: BTreeSet<_> = volume.left.state().holders.keys().copied().collect();
        let mut one = (own.clone(), vec![volume]);
        for (holders, volumes) in all.extract_if(.., |(holders, _)| !holders.is_disjoint(&own)) {
            one.0.extend(holders);
            one.1.extend(volumes);
        }
        all.push(one);
    }
    all.into_iter().map(|(_, volumes)| volumes).collect()
}

fn wait_for_left(mut volumes: Vec<Arc<Volume>>, cannot_begin: CannotBegin) {
    let until = Instant::now() + LET_GO_MAX;
    volumes.iter().for_each(|volume| volume.left.wait_or_kill(until, |left| left.has_let_go));
    // Without that nobody knows how long files are: who waits hears that it takes too long, and a volume
    // that nobody has any more is given up.
    while !volumes.is_empty() {
        let begun: Vec<_> =
            volumes.extract_if(.., |volume| has_begun(volume, cannot_begin)).collect();
        reclaim(&begun);
        if !volumes.is_empty() {
            std::thread::sleep(AGAIN);
            volumes.retain(|volume| Arc::strong_count(volume) > 1);
        }
    }
}

/// Has a volume begin; whether it has.
fn has_begun(volume: &Arc<Volume>, cannot_begin: CannotBegin) -> bool {
    let Err(error) = volume.begin_after_left() else { return true };
    if volume.left.is_new_problem(&error) {
        cannot_begin(volume, &error);
    }
    false
}

/// Serves those who are left, and then everybody.
fn reclaim(volumes: &[Arc<Volume>]) {
    volumes.iter().for_each(|volume| volume.left.go_to(Stage::Reclaiming));
    // Others would take locks that one who is late takes itself to have.
    let until = Instant::now() + RECLAIM_MAX;
    for volume in volumes {
        volume.left.wait_or_kill(until, |left| left.is_done);
        volume.left.go_to(Stage::Over);
        volume.let_others_in();
    }
}
