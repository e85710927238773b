//! What requests of an image touch: recorded with the first one, and now and then from then on,
//! since requests differ.
//!
//! | a copy | shows |
//! | --- | --- |
//! | that is booted while no working set is known | all that it touches |
//! | of every 256th boot, and of the 64th | the same: it is booted from the image as if no working set were known, which takes its request some milliseconds; fewer than one in a hundred, so that the 99th percentile does not know it |
//! | that is booted cold, from the prefetch file | the pages that it misses there; if it misses none, one of the next 2, 4, up to 64 cold boots is looked at again |

use super::cold::Prefetched;
use super::sandboxed::ImageBoots;
use crate::allowance::Allowance;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use thaw_abi::control::FLAG_BY_PAGE;
use thaw_sandbox::{BootPlan, PopulatePolicy, Recorder, Sandbox, WorkingSet};
use tokio::task::JoinHandle;

/// How often it is tried at once to record a working set that takes too long.
const RECORDINGS_TRIED: u32 = 3;
/// How long until it is tried again after that, first and at most: each try takes a processor for a
/// second, and most often it is the host that is busy, not the function that touches too much.
const TRY_AGAIN: Duration = Duration::from_secs(30);
const TRY_AGAIN_MAX: Duration = Duration::from_secs(3600);
/// Most working sets that are recorded at a time: each takes a processor.
const RECORDINGS_MAX: usize = 2;
/// The boot that shows its working set again first, and how many there are from one to the next
/// afterwards.
const FIRST_SAMPLE: u64 = 64;
const SAMPLE_EVERY: u64 = 256;
/// Working sets that are taken in place of a known one: so many at once, and then one in so many
/// seconds. Each writes up to 48 MiB, and a guest chooses what its requests touch.
const RENEWALS: usize = 8;
const RENEWED_EVERY: f64 = 30.0;
/// Most cold boots from one that is looked at to the next.
const LOOK_MAX: u32 = 64;

/// What is known of the pages that requests touch.
pub(super) enum WorkingSetState {
    /// The next instance that has served a request shows it.
    Wanted(PopulatePolicy),
    /// The same, not before this: it has taken too long again and again.
    WantedLater(PopulatePolicy, Instant),
    /// It is in the plan, which populates by this policy.
    Known(Arc<WorkingSet>, PopulatePolicy),
    /// It is not used, or could not be recorded.
    Off,
    /// It is never recorded, and every boot is done as if it were to be.
    Unknown,
}

/// What the first request of a copy shows of the working set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Shows {
    /// All, if no working set is known.
    #[default]
    First,
    /// All.
    Whole,
    /// The pages that are not in the prefetch file.
    Misses,
}

/// Recordings of an image, beside the first.
pub(super) struct Recordings {
    /// How often there was no time to record a working set.
    timed_out: AtomicU32,
    /// One is under way.
    is_busy: AtomicBool,
    /// Boots of any kind.
    boots: AtomicU64,
    /// The next boot is to show its whole working set.
    is_due: AtomicBool,
    looks: Looks,
    renewals: Mutex<Allowance>,
}

impl Default for Recordings {
    fn default() -> Self {
        let renewals = Allowance::new(1.0 / RENEWED_EVERY, RENEWALS as f64, Instant::now());
        Self {
            timed_out: AtomicU32::new(0),
            is_busy: AtomicBool::new(false),
            boots: AtomicU64::new(0),
            is_due: AtomicBool::new(false),
            looks: Looks::default(),
            renewals: Mutex::new(renewals),
        }
    }
}

impl Recordings {
    /// Whether another working set may take the place of the known one at `now`.
    fn may_renew(&self, now: Instant) -> bool {
        self.renewals.lock().expect("no holder panics").left(now) >= 1.0
    }

    fn renewed(&self) {
        self.renewals.lock().expect("no holder panics").spend(1);
    }

    /// A boot that was to show something has failed.
    pub(super) fn not_shown(&self, shows: Shows) {
        if shows == Shows::Whole {
            self.is_due.store(true, Ordering::Relaxed);
        }
    }
}

/// Which cold boots are looked at.
#[derive(Default)]
struct Looks {
    /// Cold boots until the next one that is.
    ahead: AtomicU32,
    /// Doubled with each in which nothing was missed.
    gap: AtomicU32,
}

impl Looks {
    /// Whether this cold boot is one.
    fn is_due(&self) -> bool {
        let one_less = |ahead: u32| ahead.checked_sub(1);
        self.ahead.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_err()
    }

    fn found(&self, has_missed: bool) {
        let gap = match has_missed {
            true => 0,
            false => (self.gap.load(Ordering::Relaxed) * 2).clamp(1, LOOK_MAX),
        };
        self.gap.store(gap, Ordering::Relaxed);
        self.ahead.store(gap, Ordering::Relaxed);
    }
}

/// When a working set is wanted again whose recording has taken too long so many times; `None`: of the
/// next instance.
fn wanted_again(timed_out: u32, now: Instant) -> Option<Instant> {
    let doublings = timed_out.checked_sub(RECORDINGS_TRIED)?;
    let pause = TRY_AGAIN.saturating_mul(1u32.checked_shl(doublings).unwrap_or(u32::MAX));
    Some(now + pause.min(TRY_AGAIN_MAX))
}

/// Whether the boot that has so many before it shows its whole working set.
fn is_sample(boots: u64) -> bool {
    boots == FIRST_SAMPLE || boots > 0 && boots.is_multiple_of(SAMPLE_EVERY)
}

impl ImageBoots {
    /// A boot begins: whether it has to be from the image, to show its working set. Most boots of a
    /// busy function are not from there.
    pub(super) fn begins_sample(&self) -> bool {
        let recordings = &self.recordings;
        if self.standby.is_automatic()
            && is_sample(recordings.boots.fetch_add(1, Ordering::Relaxed))
            && self.known_working_set().is_some()
        {
            recordings.is_due.store(true, Ordering::Relaxed);
        }
        self.is_sample_due()
    }

    /// Whether the next boot has to be from the image, to show its working set.
    pub(super) fn is_sample_due(&self) -> bool {
        self.recordings.is_due.load(Ordering::Relaxed)
    }

    /// How the next boot from the image is done, and what it shows.
    pub(super) fn showing_plan(&self, cold: Option<&Prefetched>) -> (Arc<BootPlan>, Shows) {
        if let Some(cold) = cold {
            let shows = if self.recordings.looks.is_due() { Shows::Misses } else { Shows::First };
            return (cold.plan(), shows);
        }
        if self.recordings.is_due.swap(false, Ordering::Relaxed) {
            match self.bare_plan() {
                Ok(plan) => return (Arc::new(plan), Shows::Whole),
                Err(error) => tracing::debug!("no working set is recorded: {error}"),
            }
        }
        (self.plan(), Shows::First)
    }

    /// A copy that shows its working set maps page by page: that takes its first request a few
    /// microseconds a page.
    pub(super) fn recording_flags(&self, shows: Shows) -> u32 {
        match shows {
            Shows::First if self.is_settled() && !self.is_unknown() => 0,
            _ => FLAG_BY_PAGE,
        }
    }

    /// Whether every boot is taken for the first.
    pub(super) fn is_unknown(&self) -> bool {
        let state = self.working_set.lock().expect("no holder panics");
        matches!(*state, WorkingSetState::Unknown)
    }

    /// The working set that is in use, if there is one.
    pub(super) fn known_working_set(&self) -> Option<(Arc<WorkingSet>, PopulatePolicy)> {
        match &*self.working_set.lock().expect("no holder panics") {
            WorkingSetState::Known(set, policy) => Some((set.clone(), *policy)),
            _ => None,
        }
    }

    /// Begins to record what `sandbox`, booted from `plan`, has touched, on a thread
    /// that may wait. `None`: nobody wants to know, or others are asked just now.
    pub fn begin_recording(
        self: &Arc<Self>,
        sandbox: &Sandbox,
        plan: &Arc<BootPlan>,
        shows: Shows,
    ) -> Option<JoinHandle<()>> {
        let turn = self.wants(shows)?;
        let recorder = match WorkingSet::recorder(sandbox) {
            Ok(recorder) => recorder,
            Err(error) => {
                // The instance may just have ended; the next one will do.
                tracing::debug!("could not record a working set: {error}");
                return None;
            }
        };
        let (shared, plan) = (self.clone(), plan.clone());
        let record = move || {
            match turn.of {
                Of::First(policy) => shared.record_first(recorder, &plan, policy),
                Of::More => shared.record_more(recorder, &plan, shows),
            }
            drop(turn);
        };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => Some(runtime.spawn_blocking(record)),
            // Without a runtime there is nobody whom this holds up.
            Err(_) => {
                record();
                None
            }
        }
    }

    /// Leave to record, if that is wanted of a copy that shows so much.
    fn wants(self: &Arc<Self>, shows: Shows) -> Option<RecordingTurn> {
        let mut state = self.working_set.lock().expect("no holder panics");
        let now = Instant::now();
        match *state {
            WorkingSetState::WantedLater(_, at) if at > now => None,
            WorkingSetState::Wanted(policy) | WorkingSetState::WantedLater(policy, _) => {
                let turn = RecordingTurn::take(self, Of::First(policy))?;
                // Only one instance is asked; if it fails, boots go on without.
                *state = WorkingSetState::Off;
                Some(turn)
            }
            WorkingSetState::Known(..)
                if shows != Shows::First && self.recordings.may_renew(now) =>
            {
                RecordingTurn::take(self, Of::More)
            }
            _ => None,
        }
    }

    /// Records a working set, stores it, and makes later boots use it.
    fn record_first(self: &Arc<Self>, recorder: Recorder, plan: &BootPlan, policy: PopulatePolicy) {
        let set = match recorder.record(plan) {
            Ok(set) => set,
            Err(error) => {
                // The instance may just have ended; the next one will do.
                tracing::debug!("could not record a working set: {error}");
                let is_late = error.kind() == io::ErrorKind::TimedOut;
                let again = is_late.then(|| self.recording_timed_out()).flatten();
                *self.working_set.lock().expect("no holder panics") = match again {
                    Some(at) => WorkingSetState::WantedLater(policy, at),
                    None => WorkingSetState::Wanted(policy),
                };
                return;
            }
        };
        self.adopt_working_set(set, policy);
        self.replenish();
    }

    /// The working set could not be recorded in time; when it is wanted again, if not of the next instance.
    fn recording_timed_out(&self) -> Option<Instant> {
        let timed_out = self.recordings.timed_out.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        let now = Instant::now();
        let again = wanted_again(timed_out, now)?;
        if timed_out == RECORDINGS_TRIED {
            let function = self.terms.function.as_str();
            let pause_s = (again - now).as_secs();
            tracing::warn!(
                function,
                "recording its working set has taken more than a second {timed_out} times, since the host is busy or \
                 it touches very much memory: boots go on without one, and it is tried again in {pause_s} s"
            );
        }
        Some(again)
    }

    /// Adds to the known working set what another request has touched.
    fn record_more(self: &Arc<Self>, recorder: Recorder, plan: &BootPlan, shows: Shows) {
        let Some((known, policy)) = self.known_working_set() else { return };
        let recorded = match shows {
            Shows::Misses => recorder.record_misses(plan),
            _ => recorder.record(plan),
        };
        // One that has ended has shown nothing.
        let recorded = recorded.inspect_err(|error| tracing::debug!("not recorded: {error}"));
        let united = match (shows, recorded) {
            (Shows::Misses, recorded) => {
                let united = recorded.ok().and_then(|recorded| known.with_misses(&recorded));
                self.recordings.looks.found(united.is_some());
                united
            }
            (_, recorded) => recorded.ok().map(|recorded| known.after(&recorded)),
        };
        if let Some(united) = united {
            self.recordings.renewed();
            self.adopt_working_set(united, policy);
        }
    }

    /// Makes boots use a working set from now on, and stores it; its pages, too, if they are
    /// others than before.
    fn adopt_working_set(self: &Arc<Self>, set: WorkingSet, policy: PopulatePolicy) {
        let before = self.known_working_set();
        let is_same = before.is_some_and(|(before, _)| before.has_same_pages(&set));
        if let Err(error) = self.store.put_working_set(self.image_id, &set.to_bytes()) {
            tracing::warn!("could not store a working set: {error}");
        }
        let new_plan = |policy| self.plan_with(&set, policy).map(Arc::new);
        match new_plan(policy).and_then(|plan| Ok((plan, new_plan(PopulatePolicy::Both)?))) {
            Ok((plan, ready_plan)) => {
                let (ranges, recordings) = (plan.populate().len(), set.recordings());
                let (read, written) = set.pages();
                tracing::debug!(ranges, recordings, read, written, "recorded a working set");
                *self.plan.write().expect("no holder panics") = plan;
                *self.ready_plan.write().expect("no holder panics") = ready_plan;
                let set = Arc::new(set);
                *self.working_set.lock().expect("no holder panics") =
                    WorkingSetState::Known(set.clone(), policy);
                if !is_same {
                    self.store_prefetch_file(&set, policy);
                }
            }
            Err(error) => tracing::warn!("a working set cannot be used: {error}"),
        }
    }
}

static RECORDINGS: AtomicUsize = AtomicUsize::new(0);

/// What is recorded.
#[derive(Clone, Copy)]
enum Of {
    /// The first working set of an image.
    First(PopulatePolicy),
    /// More of a known one.
    More,
}

/// Leave to record a working set, given back when it is dropped.
struct RecordingTurn {
    boots: Arc<ImageBoots>,
    of: Of,
}

impl RecordingTurn {
    fn take(boots: &Arc<ImageBoots>, of: Of) -> Option<Self> {
        let relaxed = Ordering::Relaxed;
        let more = |count| (count < RECORDINGS_MAX).then_some(count + 1);
        RECORDINGS.fetch_update(relaxed, relaxed, more).ok()?;
        if boots.recordings.is_busy.swap(true, Ordering::Acquire) {
            RECORDINGS.fetch_sub(1, relaxed);
            return None;
        }
        Some(Self { boots: boots.clone(), of })
    }
}

impl Drop for RecordingTurn {
    fn drop(&mut self) {
        self.boots.recordings.is_busy.store(false, Ordering::Release);
        RECORDINGS.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn fewer_than_one_boot_in_a_hundred_is_a_sample() {
        assert!(!is_sample(0) && is_sample(64) && is_sample(256) && !is_sample(257));
        for boots in [100, 1000, 100_000] {
            let samples = (0..boots).filter(|boot| is_sample(*boot)).count() as u64;
            assert!(samples >= 1 && samples * 100 <= boots, "{samples} of {boots}");
        }
    }

    #[test]
    fn working_sets_are_renewed_at_a_bounded_rate() {
        let recordings = Recordings::default();
        let begin = Instant::now();
        let renewed = (0..100)
            .filter(|_| recordings.may_renew(begin))
            .inspect(|_| recordings.renewed())
            .count();
        assert_eq!(renewed, RENEWALS);
        let soon = begin + Duration::from_secs_f64(RENEWED_EVERY / 2.0);
        let later = begin + Duration::from_secs_f64(RENEWED_EVERY + 1.0);
        assert!(!recordings.may_renew(soon) && recordings.may_renew(later));
    }

    #[test]
    fn a_recording_that_takes_too_long_is_tried_again_ever_more_seldom() {
        let now = Instant::now();
        assert!((0..RECORDINGS_TRIED).all(|timed_out| wanted_again(timed_out, now).is_none()));
        let pause = |timed_out| wanted_again(timed_out, now).expect("a pause") - now;
        assert_eq!(pause(RECORDINGS_TRIED), TRY_AGAIN);
        assert_eq!(pause(RECORDINGS_TRIED + 2), 4 * TRY_AGAIN);
        assert!(
            [RECORDINGS_TRIED + 7, 100, u32::MAX].into_iter().all(|t| pause(t) == TRY_AGAIN_MAX)
        );
    }

    #[test]
    fn cold_boots_that_miss_nothing_are_looked_at_ever_more_seldom() {
        let looks = Looks::default();
        let boots_until_due = || (0..).find(|_| looks.is_due()).unwrap();
        assert_eq!(boots_until_due(), 0);
        let mut gaps = Vec::new();
        for _ in 0..9 {
            looks.found(false);
            gaps.push(boots_until_due());
        }
        assert_eq!(gaps, [1, 2, 4, 8, 16, 32, 64, 64, 64]);
        looks.found(true);
        assert_eq!(boots_until_due(), 0);
    }
}
