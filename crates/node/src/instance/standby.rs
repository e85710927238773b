//! What is kept ready for the next boots of one image: instances that were
//! booted ahead, and a live template.

use super::launch::{ComingBack, LaunchError, RewindInfo, StandbyInfo};
use super::recording::Shows;
use super::rewinding::{Fate, IDLE, RewindPolicy, Served, Trial, processor_time};
use super::sandboxed::{Boot, Handed, ImageBoots};
use super::terms::Output;
use crate::boots::BootKind;
use crate::clock::monotonic_ns;
use crate::logs::{InstanceLog, InstancePipes};
use crate::tenants::Lease;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use thaw_sandbox::{Effort, ReadySandbox, RewindError, Sandbox, Secrets, Template, ThawOptions};
use tokio::sync::Notify;

/// How long the background leaves the processors to the boot that has just
/// begun, as long as there is something left for the next one.
const COURTESY: Duration = Duration::from_millis(2);
/// How often more instances than configured are kept ready at most, in times of
/// demand.
const GROWTH_MAX: usize = 8;
/// After this long without a boot that found nothing ready, one instance fewer
/// is kept.
const DECAY: Duration = Duration::from_secs(10);
/// Copies that a template has forked ahead: a fork that somebody waits for takes three times
/// as long, and at times milliseconds, since the host has a new process wait for its turn.
const FORKED_AHEAD: usize = 1;
/// After a template could not be made, boots go on from the image this long.
const RETRY: Duration = Duration::from_secs(5);

/// How a function's boots are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BootPolicy {
    /// Instances that are kept booted ahead, at least.
    pub ready: usize,
    /// Which instances that have served their request are put back into the state before it.
    pub rewind: Option<RewindPolicy>,
    /// Whether boots fork from a live template.
    pub template: bool,
    /// Whether what was used is made again by itself.
    pub automatic: bool,
}

impl BootPolicy {
    /// Nothing is kept: every boot is from the image.
    pub const NONE: Self = Self { ready: 0, rewind: None, template: false, automatic: false };

    /// Only boots of one kind, each prepared by hand: for measuring.
    pub fn only(kind: BootKind) -> Self {
        Self {
            ready: (kind == BootKind::Ready).into(),
            rewind: None,
            template: kind == BootKind::Fork,
            automatic: false,
        }
    }

    /// Instances that are kept ready at least: what is to be put back has to wait first.
    fn least(self) -> usize {
        self.ready.max(self.rewind.is_some().into())
    }

    /// Most instances that are kept ready.
    fn most(self) -> usize {
        self.ready.saturating_mul(GROWTH_MAX).max(self.rewind.map_or(0, |rewind| rewind.most))
    }
}

/// What is kept ready.
pub(super) struct Standby {
    policy: BootPolicy,
    state: Mutex<State>,
    rewinds: Rewinds,
    trial: Trial,
    /// One of those that were being put back is ready, or has ended.
    came_back: Arc<Notify>,
    /// Instances that run and will be ready again.
    lent: Arc<AtomicUsize>,
    /// Somebody makes what is missing.
    busy: AtomicBool,
}

/// An instance that was booted ahead.
struct Ready {
    held: ReadySandbox,
    log: InstanceLog,
    /// Its share of what the tenant may have, unless a boot that is about to use it has
    /// taken it.
    lease: Option<Lease>,
    /// Processor time that it had had when it was put back, if that counts.
    time: Option<Duration>,
}

/// Counts an instance that runs and will be ready again, until it is, or has ended.
pub(super) struct Lent {
    count: Arc<AtomicUsize>,
    /// Processor time that it had had when it was put back; `None`: it is new.
    time: Option<Duration>,
}

impl Lent {
    fn new(count: &Arc<AtomicUsize>, time: Option<Duration>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self { count: count.clone(), time }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What became of the instances that were to be put back.
#[derive(Default)]
struct Rewinds {
    under_way: AtomicU64,
    done: AtomicU64,
    refusals: Mutex<Refusals>,
}

/// The instances that could not be put back.
#[derive(Default)]
struct Refusals {
    by_reason: BTreeMap<&'static str, u64>,
    last: Option<String>,
}

impl Rewinds {
    fn refuse(&self, error: &RewindError) {
        let mut refusals = self.refusals.lock().expect("no holder panics");
        *refusals.by_reason.entry(error.reason().name()).or_default() += 1;
        refusals.last = Some(error.to_string());
    }

    fn info(&self, lent: usize) -> RewindInfo {
        let refusals = self.refusals.lock().expect("no holder panics");
        let reasons = refusals.by_reason.iter().map(|(name, count)| ((*name).to_owned(), *count));
        RewindInfo {
            under_way: self.under_way.load(Ordering::Acquire),
            done: self.done.load(Ordering::Relaxed),
            lent: lent as u64,
            refused: refusals.by_reason.values().sum(),
            reasons: reasons.collect(),
            last_refusal: refusals.last.clone(),
            measured: None,
        }
    }
}

/// An instance that has served its request.
pub(super) struct Spent {
    pub sandbox: Sandbox,
    pub log: InstanceLog,
    /// Its share of what the tenant may have.
    pub lease: Lease,
    pub lent: Option<Lent>,
}

/// A copy that a template has forked ahead.
struct Forked {
    held: ReadySandbox,
    /// For its output, which it gets with its connection.
    pipes: InstancePipes,
    /// As that of [`Ready`].
    lease: Option<Lease>,
}

/// A template and its share of what the tenant may have.
struct Leased {
    template: Arc<Template>,
    lease: Lease,
}

/// Why no instance is booted ahead.
pub(super) enum Unready {
    /// The tenant may have no more.
    NoRoom,
    /// It cannot be booted.
    Failed(LaunchError),
}

impl From<LaunchError> for Unready {
    fn from(error: LaunchError) -> Self {
        Self::Failed(error)
    }
}

struct State {
    ready: VecDeque<Ready>,
    /// Instances to be kept, adjusted by demand.
    target: usize,
    /// When a boot last found nothing, or the target last fell.
    changed: Instant,
    template: Option<Leased>,
    /// Of this template, and of the one before.
    forked: VecDeque<Forked>,
    /// One of them was taken, and nobody has been told so.
    forked_was_taken: bool,
    /// Not before then is another template tried, or a copy forked ahead.
    template_after: Option<Instant>,
    /// There are no boots any more.
    closed: bool,
}

impl Standby {
    pub fn new(policy: BootPolicy) -> Self {
        let state = State {
            ready: VecDeque::new(),
            target: policy.least(),
            changed: Instant::now(),
            template: None,
            forked: VecDeque::new(),
            forked_was_taken: false,
            template_after: None,
            closed: false,
        };
        let rewinds = Rewinds::default();
        let (lent, busy) = (Arc::default(), AtomicBool::new(false));
        let (trial, came_back) = (Trial::default(), Arc::new(Notify::new()));
        Self { policy, state: Mutex::new(state), rewinds, trial, came_back, lent, busy }
    }

    /// How boots are chosen now.
    fn policy(&self) -> BootPolicy {
        let is_on = |rewind: &RewindPolicy| !rewind.where_it_wins || self.trial.is_on();
        BootPolicy { rewind: self.policy.rewind.filter(is_on), ..self.policy }
    }

    /// Whether it is measured which instances are worth putting back.
    fn measures(&self) -> bool {
        self.policy.rewind.is_some_and(|rewind| rewind.where_it_wins)
    }

    /// Notes that somebody wanted an instance.
    pub fn request(&self, boots: &Arc<ImageBoots>) {
        if self.measures() && self.trial.request(Instant::now()) {
            let boots = Arc::downgrade(boots);
            // Without a runtime nothing is kept for later either.
            let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
            runtime.spawn(async move {
                loop {
                    tokio::time::sleep(IDLE).await;
                    let Some(boots) = boots.upgrade() else { return };
                    if boots.standby().trial.is_over(Instant::now()) {
                        return boots.standby().trim(&boots);
                    }
                }
            });
        }
    }

    /// Ends the instances that are not wanted any more.
    fn trim(&self, boots: &ImageBoots) {
        let surplus = self.state().prune(self.policy(), || boots.terms.lease());
        // Ended outside the lock.
        drop(surplus);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }

    /// What there is.
    pub fn info(&self) -> StandbyInfo {
        let state = self.state();
        StandbyInfo {
            ready: state.ready.iter().map(|ready| ready.held.pid()).collect(),
            template: state.template.as_ref().map(|leased| leased.template.pid()),
            forked: state.forked.iter().map(|forked| forked.held.pid()).collect(),
            rewinds: self.policy.rewind.map(|_| RewindInfo {
                measured: self.trial.verdict().filter(|_| self.measures()),
                ..self.rewinds.info(self.lent())
            }),
        }
    }

    /// Ends the instances that are ready, and copies forked ahead; others will be made.
    pub fn give_up_ready(&self) {
        let given_up = {
            let mut state = self.state();
            (std::mem::take(&mut state.ready), std::mem::take(&mut state.forked))
        };
        // Ended outside the lock.
        drop(given_up);
    }

    /// The room of an instance that is ready, or of a copy forked ahead, for the boot that is
    /// about to use it.
    pub fn spare_room(&self) -> Option<Lease> {
        let mut state = self.state();
        let of_ready = state.ready.iter_mut().find_map(|ready| ready.lease.take());
        of_ready.or_else(|| state.forked.iter_mut().find_map(|forked| forked.lease.take()))
    }

    /// Ends one instance that is ready, or else a copy forked ahead, or else the template;
    /// whether there was one.
    pub fn give_up_one(&self) -> bool {
        let mut state = self.state();
        if let Some(ready) = state.ready.pop_front() {
            drop(state);
            // Ended outside the lock.
            drop(ready);
            return true;
        }
        let (forked, template) = (state.forked.pop_front(), None);
        let template = if forked.is_none() { state.template.take() } else { template };
        if forked.is_some() || template.is_some() {
            // Otherwise its room would be taken again at once.
            state.template_after = Some(Instant::now() + RETRY);
        }
        drop(state);
        // Ended outside the lock.
        forked.is_some() || template.is_some()
    }

    /// Ends what there is, for good.
    pub fn stand_down(&self) {
        let kept = {
            let mut state = self.state();
            state.closed = true;
            let forked = std::mem::take(&mut state.forked);
            (std::mem::take(&mut state.ready), forked, state.template.take())
        };
        // Ended outside the lock.
        drop(kept);
    }

    /// Whether the next boot need not begin from the image.
    pub fn is_ready(&self) -> bool {
        self.has_waiting() || self.has_template()
    }

    /// Whether the next boot only has to wake something.
    pub fn has_waiting(&self) -> bool {
        let state = self.state();
        !state.ready.is_empty() || !state.forked.is_empty()
    }

    /// Boots from what waits to be woken, which is soon done; `None`: nothing does.
    pub fn boot_waiting(
        &self,
        boots: &ImageBoots,
        handed: Handed<'_>,
        secrets: Option<&Secrets>,
    ) -> Option<Boot> {
        let ready = self.boot_ready(boots, handed, secrets);
        ready.or_else(|| self.boot_forked(boots, handed, secrets))
    }

    /// Whether the next boot has a template to fork from, which takes a while.
    pub fn has_template(&self) -> bool {
        self.state().template.is_some()
    }

    fn boot_ready(
        &self,
        boots: &ImageBoots,
        handed: Handed<'_>,
        secrets: Option<&Secrets>,
    ) -> Option<Boot> {
        let policy = self.policy();
        if policy.least() == 0 {
            return None;
        }
        loop {
            // Who boots has a lease.
            let comes_back = self.is_rewinding();
            let Ready { held, log, lease: _, time } = self.state().take(policy, comes_back)?;
            let taken_ns = monotonic_ns();
            let plan = held.plan().clone();
            log.begins();
            let options = ThawOptions { secrets, ..boots.terms.options(None) };
            match held.go(handed, &options) {
                Ok(sandbox) => {
                    let output = Output { log, pipes: None };
                    let kind = BootKind::Ready;
                    let lent = sandbox.can_rewind().then(|| Lent::new(&self.lent, time));
                    let shows = Shows::default();
                    return Some(Boot { sandbox, plan, kind, taken_ns, output, lent, shows });
                }
                Err(error) => tracing::debug!("an instance that was ready is of no use: {error}"),
            }
        }
    }

    /// Uses a copy that was forked ahead.
    fn boot_forked(
        &self,
        boots: &ImageBoots,
        handed: Handed<'_>,
        secrets: Option<&Secrets>,
    ) -> Option<Boot> {
        loop {
            // Who boots has a lease.
            let Forked { held, pipes, lease: _ } = self.state().take_forked()?;
            let taken_ns = monotonic_ns();
            let plan = held.plan().clone();
            let options = ThawOptions { secrets, ..boots.terms.options(Some(&pipes)) };
            match held.go(handed, &options) {
                Ok(sandbox) => {
                    return Some(Boot::fork(sandbox, plan, taken_ns, pipes.into()));
                }
                Err(error) => tracing::debug!("a copy forked ahead is of no use: {error}"),
            }
        }
    }

    /// Forks a copy, since those that were forked ahead are all taken; waits for it. `None`:
    /// the image has to do.
    pub fn boot_fork(
        &self,
        boots: &ImageBoots,
        handed: Handed<'_>,
        secrets: Option<&Secrets>,
    ) -> Option<Boot> {
        let template = self.state().template.as_ref()?.template.clone();
        let pipes = match boots.output.pipes() {
            Ok(pipes) => pipes,
            Err(error) => {
                tracing::warn!("{error}");
                return None;
            }
        };
        let taken_ns = monotonic_ns();
        let options = ThawOptions { secrets, ..boots.terms.options(Some(&pipes)) };
        match template.fork(handed, &options) {
            Ok(sandbox) => {
                let (plan, output) = (template.plan().clone(), pipes.into());
                Some(Boot::fork(sandbox, plan, taken_ns, output))
            }
            Err(error) => {
                tracing::warn!("a template is given up: {error}");
                let mut state = self.state();
                state.template = None;
                state.template_after = Some(Instant::now() + RETRY);
                None
            }
        }
    }

    /// Whether boots are chosen here, and not by who measures them.
    pub fn is_automatic(&self) -> bool {
        self.policy().automatic
    }

    /// Whether there is something to be made in the background.
    pub fn is_wanting(&self, boots: &ImageBoots) -> bool {
        let policy = self.policy();
        policy.automatic
            && (policy.least() > 0 || policy.template && boots.is_settled())
            && !self.busy.load(Ordering::Relaxed)
    }

    /// Makes what is missing and ends what is too much or of an older plan. For
    /// a thread of its own.
    pub fn replenish(&self, boots: &Arc<ImageBoots>) {
        while !self.busy.swap(true, Ordering::Relaxed) {
            if self.is_ready() {
                std::thread::sleep(COURTESY);
            }
            self.state().forked_was_taken = false;
            let filled = self.fill_ready(boots);
            if let Err(Unready::Failed(error)) = &filled {
                tracing::warn!("cannot boot an instance ahead: {error}");
            }
            if self.policy.template
                && boots.is_settled()
                && let Err(error) = self.fill_template(boots)
            {
                tracing::warn!("cannot make a template: {error}");
                self.state().template_after = Some(Instant::now() + RETRY);
            }
            self.busy.store(false, Ordering::Relaxed);
            // What was taken at the end of this, nobody else has been told of.
            let state = self.state();
            let wants_ready = filled.is_ok() && state.wants_more(&boots.ready_plan(), self.lent());
            if !wants_ready && !state.forked_was_taken {
                return;
            }
        }
    }

    /// Boots instances ahead until there are as many as wanted of the newest plan. Older
    /// ones are kept until there are: the next boot must find something.
    pub fn fill_ready(&self, boots: &ImageBoots) -> Result<(), Unready> {
        let policy = self.policy();
        if policy.least() == 0 {
            return Ok(());
        }
        let plan = boots.ready_plan();
        self.trim(boots);
        while self.state().wants_more(&plan, self.lent()) {
            let lease = boots.terms.lease().ok_or(Unready::NoRoom)?;
            let zygote = boots
                .pool
                .take_with(boots.terms.processes)
                .map_err(|error| LaunchError(error.to_string()))?;
            let pipes = boots.output.pipes()?;
            let mut held = zygote
                .hold(&plan, &boots.terms.options(Some(&pipes)))
                .map_err(|error| LaunchError(error.to_string()))?;
            held.label(&boots.terms.label);
            if policy.rewind.is_some() {
                self.take_down(&mut held)?;
            }
            let log = pipes.log();
            pipes.handed_over();
            let ready = Ready { held, log, lease: Some(lease), time: None };
            self.keep(boots, |state| state.add(ready));
        }
        Ok(())
    }

    /// Has the state taken down that an instance can be put back into. If there is nobody to do
    /// so, its first request is served all the same, and it is ended.
    fn take_down(&self, held: &mut ReadySandbox) -> Result<(), LaunchError> {
        let Err(error) = held.take_down() else { return Ok(()) };
        self.rewinds.refuse(&error);
        match error {
            RewindError::Refused(_, why) => {
                Err(LaunchError(format!("it cannot be put back: {why}")))
            }
            _ => Ok(()),
        }
    }

    /// Whether instances are put back when they have served their request.
    pub fn rewinds(&self) -> bool {
        self.policy().rewind.is_some()
    }

    /// Puts an instance back into the state before its request, elsewhere, and keeps it ready
    /// with this lease, or ends it where it is worth no more.
    pub fn rewind(boots: Arc<ImageBoots>, spent: Spent) {
        let Spent { sandbox, log, lease, lent } = spent;
        let measures = boots.standby().measures();
        let time = if measures { processor_time(sandbox.pid()) } else { None };
        if measures {
            let before = lent.as_ref().and_then(|lent| lent.time);
            let served = time.map(|now| Served { now, before });
            if boots.standby().trial.served(served, Instant::now()) == Fate::End {
                return;
            }
        }
        boots.standby().rewinds.under_way.fetch_add(1, Ordering::Relaxed);
        let begun = Instant::now();
        sandbox.rewind(move |result| {
            let standby = boots.standby();
            let took = result.as_ref().ok().map(|(_, effort)| effort.processor_time);
            standby.trial.rewound(took, Instant::now());
            match result {
                Ok((held, Effort { pages, calls, .. })) => {
                    tracing::debug!(pages, calls, took = ?begun.elapsed(), "an instance was put back");
                    standby.rewinds.done.fetch_add(1, Ordering::Relaxed);
                    let ready = Ready { held, log, lease: Some(lease), time };
                    match standby.rewinds() {
                        true => standby.keep(&boots, |state| state.add(ready)),
                        // It was not worth it, and so are the others.
                        false => {
                            drop(ready);
                            standby.trim(&boots);
                        }
                    }
                }
                Err(error) => {
                    standby.rewinds.refuse(&error);
                    tracing::debug!("an instance was not put back: {error}");
                }
            }
            drop(lent);
            standby.rewinds.under_way.fetch_sub(1, Ordering::Release);
            standby.came_back.notify_one();
        });
    }

    /// Whether an instance will soon be ready again.
    pub fn is_rewinding(&self) -> bool {
        self.rewinds.under_way.load(Ordering::Acquire) > 0
    }

    /// What becomes ready when one of the instances that are being put back is ready, or has
    /// ended. To wait for it takes less of the processors than to boot another one, which would
    /// have to be ended in their place. `None`: none is being put back.
    pub fn coming_back(&self) -> Option<ComingBack> {
        self.policy().rewind?;
        // From now on it is told, even if it does not wait yet.
        let mut told = Box::pin(self.came_back.clone().notified_owned());
        told.as_mut().enable();
        if self.is_rewinding() { Some(told) } else { None }
    }

    fn lent(&self) -> usize {
        self.lent.load(Ordering::Relaxed)
    }

    /// Adds something that is ready, and tells those who wait for its room.
    fn keep<T>(&self, boots: &ImageBoots, add: impl FnOnce(&mut State) -> Option<T>) {
        let refused = add(&mut self.state());
        boots.terms.kept_ready();
        // Ended outside the lock.
        drop(refused);
    }

    /// Makes a template if there is none that is up to date, its next copies, and what further
    /// ones need.
    pub fn fill_template(&self, boots: &ImageBoots) -> Result<(), LaunchError> {
        let failed = |error: &dyn std::fmt::Display| LaunchError(error.to_string());
        let plan = boots.plan();
        let (known, after) = {
            let state = self.state();
            let template = state.template.as_ref().map(|leased| leased.template.clone());
            (template, state.template_after)
        };
        let has_to_wait = after.is_some_and(|after| Instant::now() < after);
        let usable =
            known.filter(|template| Arc::ptr_eq(template.plan(), &plan) && !template.has_ended());
        if let Some(template) = usable {
            template.fill_seats().map_err(|error| failed(&error))?;
            return if has_to_wait { Ok(()) } else { self.fork_ahead(boots, &template) };
        }
        if self.state().closed || has_to_wait {
            return Ok(());
        }
        // One that is to be replaced has the room already.
        let has_room = self.state().template.is_some();
        let lease = if has_room { None } else { boots.terms.lease() };
        if lease.is_none() && !has_room {
            return Ok(());
        }
        let parent = boots.pool.parent().map_err(|error| failed(&error))?;
        let template =
            parent.template(&plan, &boots.terms.options(None)).map_err(|error| failed(&error))?;
        template.label(&boots.terms.label);
        let template = Arc::new(template);
        self.keep(boots, |state| state.put_template(template.clone(), lease));
        self.fork_ahead(boots, &template)
    }

    /// Forks copies until there are as many ahead as there should be, if the tenant has room
    /// for them.
    fn fork_ahead(&self, boots: &ImageBoots, template: &Arc<Template>) -> Result<(), LaunchError> {
        let surplus = self.state().prune_forked(template.plan(), || boots.terms.lease());
        // Ended outside the lock.
        drop(surplus);
        while self.state().wants_forked(template) {
            let Some(lease) = boots.terms.lease() else { return Ok(()) };
            let pipes = boots.output.pipes()?;
            let held = template
                .fork_ahead(&boots.terms.options(None))
                .map_err(|error| LaunchError(error.to_string()))?;
            self.keep(boots, |state| state.add_forked(Forked { held, pipes, lease: Some(lease) }));
        }
        Ok(())
    }
}

impl State {
    /// An instance that is ready. Notes the demand if there is none, and none comes back.
    fn take(&mut self, policy: BootPolicy, comes_back: bool) -> Option<Ready> {
        // One that was put back just now has its memory in the processor's caches.
        let next = match policy.rewind {
            Some(_) => VecDeque::pop_back,
            None => VecDeque::pop_front,
        };
        while let Some(ready) = next(&mut self.ready) {
            if !ready.held.has_ended() {
                return Some(ready);
            }
        }
        if comes_back {
            return None;
        }
        // Somebody may be booting until the target is reached: it must not run
        // away from them while boots find nothing. Instances that come back serve many
        // requests, so one is enough for each that found none.
        let more = match policy.rewind {
            Some(_) => self.target.saturating_add(1),
            None => self.target.saturating_mul(2),
        };
        self.target = more.clamp(policy.least(), policy.most());
        self.changed = Instant::now();
        None
    }

    /// Adjusts the target, and returns what is not wanted any more.
    fn prune(&mut self, policy: BootPolicy, lease: impl Fn() -> Option<Lease>) -> Vec<Ready> {
        if self.changed.elapsed() > DECAY {
            self.target = self.target.saturating_sub(1);
            self.changed = Instant::now();
        }
        self.target = self.target.clamp(policy.least(), policy.most());
        let (mut keep, mut surplus) = (VecDeque::new(), Vec::new());
        // The newest are at the end.
        for mut ready in self.ready.drain(..).rev() {
            // A boot that has taken its room may have failed.
            ready.lease = ready.lease.or_else(&lease);
            let may_stay = !ready.held.has_ended() && ready.lease.is_some();
            if may_stay && keep.len() < self.target {
                keep.push_front(ready);
            } else {
                surplus.push(ready);
            }
        }
        self.ready = keep;
        surplus
    }

    /// Whether there are fewer instances of `plan` than there should be, with those that are
    /// lent.
    fn wants_more(&self, plan: &Arc<thaw_sandbox::BootPlan>, lent: usize) -> bool {
        let fresh = self.ready.iter().filter(|ready| Arc::ptr_eq(ready.held.plan(), plan)).count();
        !self.closed && fresh + lent < self.target
    }

    /// Puts a template in the place of another one, whose room it has without a lease of its
    /// own. Returns what is to be ended: itself if nobody wants it, or there is no room.
    fn put_template(
        &mut self,
        template: Arc<Template>,
        lease: Option<Lease>,
    ) -> Option<Arc<Template>> {
        let old = self.template.take();
        let (old, freed) = old.map(|old| (old.template, old.lease)).unzip();
        match lease.or(freed) {
            Some(lease) if !self.closed && !lease.is_beyond_quota() => {
                self.template = Some(Leased { template, lease });
                old
            }
            _ => Some(template),
        }
    }

    /// A copy that was forked ahead.
    fn take_forked(&mut self) -> Option<Forked> {
        while let Some(forked) = self.forked.pop_front() {
            self.forked_was_taken = true;
            if !forked.held.has_ended() {
                return Some(forked);
            }
        }
        None
    }

    /// Whether there are fewer copies ahead of this template than there should be. One that
    /// was given up meanwhile gets no more.
    fn wants_forked(&self, template: &Arc<Template>) -> bool {
        let is_current =
            self.template.as_ref().is_some_and(|leased| Arc::ptr_eq(&leased.template, template));
        !self.closed && is_current && self.forked.len() < FORKED_AHEAD
    }

    /// Takes the copies out that have ended, are of another plan, or have no room.
    fn prune_forked(
        &mut self,
        plan: &Arc<thaw_sandbox::BootPlan>,
        lease: impl Fn() -> Option<Lease>,
    ) -> Vec<Forked> {
        let (mut keep, mut surplus) = (VecDeque::new(), Vec::new());
        for mut forked in self.forked.drain(..) {
            // A boot that has taken its room may have failed.
            forked.lease = forked.lease.or_else(&lease);
            let is_fresh = Arc::ptr_eq(forked.held.plan(), plan) && !forked.held.has_ended();
            if is_fresh && forked.lease.is_some() {
                keep.push_back(forked);
            } else {
                surplus.push(forked);
            }
        }
        self.forked = keep;
        surplus
    }

    /// Adds a copy that was forked ahead; returns it if nobody wants it, or the quota was
    /// lowered meanwhile.
    fn add_forked(&mut self, forked: Forked) -> Option<Forked> {
        if self.closed || forked.lease.as_ref().is_some_and(Lease::is_beyond_quota) {
            return Some(forked);
        }
        self.forked.push_back(forked);
        None
    }

    /// Adds an instance; returns the one that it replaces, or itself if nobody wants it, or
    /// the quota was lowered while it was booted.
    fn add(&mut self, ready: Ready) -> Option<Ready> {
        if self.closed || ready.lease.as_ref().is_some_and(Lease::is_beyond_quota) {
            return Some(ready);
        }
        self.ready.push_back(ready);
        if self.ready.len() > self.target { self.ready.pop_front() } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn demand_raises_the_target_only_so_far() {
        let policy = BootPolicy { ready: 3, rewind: None, template: false, automatic: true };
        let standby = Standby::new(policy);
        let mut state = standby.state();
        assert!(state.take(policy, false).is_none());
        assert_eq!(state.target, 6);
        // What is being put back will do.
        assert!(state.take(policy, true).is_none());
        assert_eq!(state.target, 6);
        for _ in 0..100 {
            assert!(state.take(policy, false).is_none());
        }
        assert_eq!(state.target, 3 * GROWTH_MAX);
    }
}
