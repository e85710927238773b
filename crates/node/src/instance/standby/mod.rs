//! What is kept ready for the next boots of one image: instances that were
//! booted ahead, and a live template.

mod policy;
mod rewinds;
mod stock;

pub use policy::BootPolicy;
pub(super) use rewinds::Lent;

use super::launch::{ComingBack, LaunchError, RewindInfo, StandbyInfo, StandbyState};
use super::recording::Shows;
use super::rewinding::{Fate, IDLE, RewindPolicy, Served, Trial, processor_time};
use super::sandboxed::{Boot, Handed, ImageBoots};
use super::terms::Output;
use crate::boots::BootKind;
use crate::logs::InstanceLog;
use crate::tenants::Lease;
use rewinds::Rewinds;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use stock::{Forked, Ready, Stock};
use thaw_home::clock::monotonic_ns;
use thaw_sandbox::{
    Effort, MemoryReader, ReadySandbox, RewindError, Sandbox, Secrets, Template, ThawOptions,
};
use tokio::sync::Notify;

/// How long the background leaves the processors to the boot that has just
/// begun, as long as there is something left for the next one.
const COURTESY: Duration = Duration::from_millis(2);
/// After a template could not be made, boots go on from the image this long.
const RETRY: Duration = Duration::from_secs(5);

/// What is kept ready.
pub(super) struct Standby {
    policy: BootPolicy,
    stock: Mutex<Stock>,
    rewinds: Rewinds,
    trial: Trial,
    /// One of those that were being put back is ready, or has ended.
    came_back: Arc<Notify>,
    /// Instances that run and will be ready again.
    lent: Arc<AtomicUsize>,
    /// Somebody makes what is missing.
    busy: AtomicBool,
}

/// An instance that has served its request.
pub(super) struct Spent {
    pub sandbox: Sandbox,
    pub log: InstanceLog,
    /// Its share of what the tenant may have.
    pub lease: Lease,
    pub lent: Option<Lent>,
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

impl Standby {
    pub fn new(policy: BootPolicy) -> Self {
        let rewinds = Rewinds::default();
        let (lent, busy) = (Arc::default(), AtomicBool::new(false));
        let (trial, came_back) = (Trial::default(), Arc::new(Notify::new()));
        Self {
            policy,
            stock: Mutex::new(Stock::new(policy)),
            rewinds,
            trial,
            came_back,
            lent,
            busy,
        }
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
        let surplus = self.stock().prune(self.policy(), || boots.terms.lease());
        // Ended outside the lock.
        drop(surplus);
    }

    fn stock(&self) -> MutexGuard<'_, Stock> {
        self.stock.lock().expect("no holder panics")
    }

    /// What there is.
    pub fn info(&self) -> StandbyInfo {
        let stock = self.stock();
        StandbyInfo {
            ready: stock.ready.iter().map(|ready| ready.held.pid()).collect(),
            template: stock.template.as_ref().map(|leased| leased.template.pid()),
            forked: stock.forked.iter().map(|forked| forked.held.pid()).collect(),
            rewinds: self.policy.rewind.map(|_| RewindInfo {
                measured: self.trial.verdict().filter(|_| self.measures()),
                ..self.rewinds.info(self.lent())
            }),
        }
    }

    /// What counts the memory of what there is. One that has ended is left out.
    pub fn memory_readers(&self) -> Vec<(StandbyState, MemoryReader)> {
        let stock = self.stock();
        let ready = stock.ready.iter().map(|ready| (StandbyState::Ready, &ready.held));
        let forked = stock.forked.iter().map(|forked| (StandbyState::Forked, &forked.held));
        let template = stock.template.iter().filter_map(|leased| {
            Some((StandbyState::Template, MemoryReader::of_template(&leased.template).ok()?))
        });
        let reader = |(state, held)| Some((state, MemoryReader::of_ready(held).ok()?));
        ready.chain(forked).filter_map(reader).chain(template).collect()
    }

    /// Ends the instances that are ready, and copies forked ahead; others will be made.
    pub fn give_up_ready(&self) {
        let given_up = {
            let mut stock = self.stock();
            (std::mem::take(&mut stock.ready), std::mem::take(&mut stock.forked))
        };
        // Ended outside the lock.
        drop(given_up);
    }

    /// The room of an instance that is ready, or of a copy forked ahead, for the boot that is
    /// about to use it.
    pub fn spare_room(&self) -> Option<Lease> {
        let mut stock = self.stock();
        let of_ready = stock.ready.iter_mut().find_map(|ready| ready.lease.take());
        of_ready.or_else(|| stock.forked.iter_mut().find_map(|forked| forked.lease.take()))
    }

    /// Ends one instance that is ready, or else a copy forked ahead, or else the template;
    /// whether there was one.
    pub fn give_up_one(&self) -> bool {
        let mut stock = self.stock();
        if let Some(ready) = stock.ready.pop_front() {
            drop(stock);
            // Ended outside the lock.
            drop(ready);
            return true;
        }
        let (forked, template) = (stock.forked.pop_front(), None);
        let template = if forked.is_none() { stock.template.take() } else { template };
        if forked.is_some() || template.is_some() {
            // Otherwise its room would be taken again at once.
            stock.template_after = Some(Instant::now() + RETRY);
        }
        drop(stock);
        // Ended outside the lock.
        forked.is_some() || template.is_some()
    }

    /// Ends what there is, for good.
    pub fn stand_down(&self) {
        let kept = {
            let mut stock = self.stock();
            stock.closed = true;
            let forked = std::mem::take(&mut stock.forked);
            (std::mem::take(&mut stock.ready), forked, stock.template.take())
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
        let stock = self.stock();
        !stock.ready.is_empty() || !stock.forked.is_empty()
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
        self.stock().template.is_some()
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
            let Ready { held, log, lease: _, time } = self.stock().take(policy, comes_back)?;
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
            let Forked { held, pipes, lease: _ } = self.stock().take_forked()?;
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
        let template = self.stock().template.as_ref()?.template.clone();
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
                let mut stock = self.stock();
                stock.template = None;
                stock.template_after = Some(Instant::now() + RETRY);
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
            self.stock().forked_was_taken = false;
            let filled = self.fill_ready(boots);
            if let Err(Unready::Failed(error)) = &filled {
                tracing::warn!("cannot boot an instance ahead: {error}");
            }
            if self.policy.template
                && boots.is_settled()
                && let Err(error) = self.fill_template(boots)
            {
                tracing::warn!("cannot make a template: {error}");
                self.stock().template_after = Some(Instant::now() + RETRY);
            }
            self.busy.store(false, Ordering::Relaxed);
            // What was taken at the end of this, nobody else has been told of.
            let stock = self.stock();
            let wants_ready = filled.is_ok() && stock.wants_more(&boots.ready_plan(), self.lent());
            if !wants_ready && !stock.forked_was_taken {
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
        while self.stock().wants_more(&plan, self.lent()) {
            let lease = boots.terms.lease().ok_or(Unready::NoRoom)?;
            let zygote = boots
                .pool
                .take_with(boots.terms.processes)
                .map_err(|error| LaunchError::Failed(error.to_string()))?;
            let pipes = boots.output.pipes()?;
            let mut held = zygote
                .hold(&plan, &boots.terms.options(Some(&pipes)))
                .map_err(|error| LaunchError::Failed(error.to_string()))?;
            held.label(&boots.terms.label);
            if policy.rewind.is_some() {
                self.take_down(&mut held)?;
            }
            let log = pipes.log();
            pipes.handed_over();
            let ready = Ready { held, log, lease: Some(lease), time: None };
            self.keep(boots, |stock| stock.add(ready));
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
                Err(LaunchError::Failed(format!("it cannot be put back: {why}")))
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
                        true => standby.keep(&boots, |stock| stock.add(ready)),
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
    fn keep<T>(&self, boots: &ImageBoots, add: impl FnOnce(&mut Stock) -> Option<T>) {
        let refused = add(&mut self.stock());
        boots.terms.kept_ready();
        // Ended outside the lock.
        drop(refused);
    }

    /// Makes a template if there is none that is up to date, its next copies, and what further
    /// ones need.
    pub fn fill_template(&self, boots: &ImageBoots) -> Result<(), LaunchError> {
        let failed = |error: &dyn std::fmt::Display| LaunchError::Failed(error.to_string());
        let plan = boots.plan();
        let (known, after) = {
            let stock = self.stock();
            let template = stock.template.as_ref().map(|leased| leased.template.clone());
            (template, stock.template_after)
        };
        let has_to_wait = after.is_some_and(|after| Instant::now() < after);
        let usable =
            known.filter(|template| Arc::ptr_eq(template.plan(), &plan) && !template.has_ended());
        if let Some(template) = usable {
            template.fill_seats().map_err(|error| failed(&error))?;
            return if has_to_wait { Ok(()) } else { self.fork_ahead(boots, &template) };
        }
        if self.stock().closed || has_to_wait {
            return Ok(());
        }
        // One that is to be replaced has the room already.
        let has_room = self.stock().template.is_some();
        let lease = if has_room { None } else { boots.terms.lease() };
        if lease.is_none() && !has_room {
            return Ok(());
        }
        let parent = boots.pool.parent().map_err(|error| failed(&error))?;
        let template =
            parent.template(&plan, &boots.terms.options(None)).map_err(|error| failed(&error))?;
        template.label(&boots.terms.label);
        let template = Arc::new(template);
        self.keep(boots, |stock| stock.put_template(template.clone(), lease));
        self.fork_ahead(boots, &template)
    }

    /// Forks copies until there are as many ahead as there should be, if the tenant has room
    /// for them.
    fn fork_ahead(&self, boots: &ImageBoots, template: &Arc<Template>) -> Result<(), LaunchError> {
        let surplus = self.stock().prune_forked(template.plan(), || boots.terms.lease());
        // Ended outside the lock.
        drop(surplus);
        while self.stock().wants_forked(template) {
            let Some(lease) = boots.terms.lease() else { return Ok(()) };
            let pipes = boots.output.pipes()?;
            let held = template
                .fork_ahead(&boots.terms.options(None))
                .map_err(|error| LaunchError::Failed(error.to_string()))?;
            self.keep(boots, |stock| stock.add_forked(Forked { held, pipes, lease: Some(lease) }));
        }
        Ok(())
    }
}
