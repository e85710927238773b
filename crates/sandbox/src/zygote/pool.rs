//! Zygotes kept ready in the background.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Processes, Zygote, ZygoteConfig, ZygoteError, ZygoteParent};
use crate::limits::{ResourceLimits, WeakLimits};

/// How a pool is kept.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Zygotes of a kind kept ready, at least: more, up to [`GROWTH_MAX`] times as many,
    /// while boots find none.
    pub size: usize,
    /// How they are made.
    pub zygotes: ZygoteConfig,
}

/// What a pool has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Zygotes ready now.
    pub ready: usize,
    /// Zygotes to be kept ready at present.
    pub target: usize,
    /// Zygotes made so far.
    pub created: u64,
    /// Zygotes taken from the pool.
    pub taken: u64,
    /// Takes that found the pool empty and had to make one.
    pub misses: u64,
    /// Zygotes that died while waiting or failed while being made.
    pub failures: u64,
    /// Times the zygote parent was started anew.
    pub parent_restarts: u64,
}

/// How many zygotes are begun at most until one is made: they may be killed meanwhile, and
/// so may their parent, whose end may be known some attempts later only.
const ATTEMPTS: u32 = 8;
/// How long the end of a parent that answers no more may take to be known.
const END_PATIENCE: Duration = Duration::from_millis(100);
/// How long the background thread rests after a failure.
const RETRY: Duration = Duration::from_millis(200);
/// How long the background thread leaves the processors to a boot that has just
/// taken a zygote, as long as the pool is at least half full.
const COURTESY: Duration = Duration::from_millis(2);
/// How often the background thread looks for zygotes that died while waiting.
const INSPECTION: Duration = Duration::from_secs(1);
/// How many times more zygotes than configured are kept at most.
pub const GROWTH_MAX: usize = 16;
/// After this long without a boot that found no zygote, one fewer is kept.
const DECAY: Duration = Duration::from_secs(5);

/// Zygotes kept ready in the background. Starts its own [`ZygoteParent`], and
/// another one if that dies. Dropping the pool ends the waiting zygotes;
/// sandboxes live on.
///
/// A pool for an older kernel build ([`ZygotePool::on_demand`]) keeps nothing ready: it makes
/// each zygote when it is taken, and its parent when there is none.
#[derive(Debug)]
pub struct ZygotePool {
    shared: Arc<Shared>,
    filler: Option<std::thread::JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    config: ZygoteConfig,
    state: Mutex<State>,
    /// Something for the background thread to do.
    wanted: Condvar,
    /// A zygote was added, or making one failed.
    changed: Condvar,
    /// Held while the parent is started or replaced, so that only one caller does it.
    parent: Mutex<Parent>,
    /// How long the parent is kept while nobody takes a zygote; `None`: always.
    idle_after: Option<Duration>,
}

/// The zygote parent of a pool.
#[derive(Debug)]
struct Parent {
    /// `None`: nobody has needed it, lately.
    running: Option<Arc<ZygoteParent>>,
    used: Instant,
}

#[derive(Debug)]
struct State {
    /// One for each kind of zygote, by [`Processes`].
    stocks: [Stock; Processes::ALL.len()],
    closing: bool,
    stats: PoolStats,
    /// Why the last attempt of the background thread failed, until one succeeds.
    failure: Option<ZygoteError>,
}

/// Zygotes of one kind.
#[derive(Debug)]
struct Stock {
    ready: VecDeque<Zygote>,
    /// Least number that is kept.
    size: usize,
    /// Number that is kept at present, adjusted by demand.
    target: usize,
    /// When a boot last found none, or the target last fell.
    adjusted: Instant,
    /// Limits of the last boot: what the next one is likely to have, too.
    expected: ResourceLimits,
}

impl ZygotePool {
    /// Starts the zygote parent and fills the pool in the background.
    pub fn new(config: PoolConfig) -> Result<Self, ZygoteError> {
        let parent = ZygoteParent::start(config.zygotes.clone())?;
        Self::with(config, Some(Arc::new(parent)), None)
    }

    /// A pool that keeps no zygotes ready, and ends its parent when nobody has taken a zygote
    /// for `idle_after`; sandboxes live on. Starts nothing but a thread.
    pub fn on_demand(zygotes: ZygoteConfig, idle_after: Duration) -> Result<Self, ZygoteError> {
        Self::with(PoolConfig { size: 0, zygotes }, None, Some(idle_after))
    }

    fn with(
        config: PoolConfig,
        parent: Option<Arc<ZygoteParent>>,
        idle_after: Option<Duration>,
    ) -> Result<Self, ZygoteError> {
        let state = State {
            // Others are kept when somebody says that they will be wanted.
            stocks: [Stock::new(config.size), Stock::new(0)],
            closing: false,
            stats: PoolStats::default(),
            failure: None,
        };
        let shared = Arc::new(Shared {
            config: config.zygotes,
            state: Mutex::new(state),
            wanted: Condvar::new(),
            changed: Condvar::new(),
            parent: Mutex::new(Parent { running: parent, used: Instant::now() }),
            idle_after,
        });
        let filler = std::thread::Builder::new()
            .name("zygote-pool".into())
            .spawn({
                let shared = shared.clone();
                move || shared.keep_full()
            })
            .map_err(|source| ZygoteError::Parent { step: "start the pool's thread", source })?;
        Ok(Self { shared, filler: Some(filler) })
    }

    /// Keeps zygotes of this kind ready from now on.
    pub fn keep(&self, processes: Processes) {
        let mut state = self.shared.lock();
        let size = state.stock(Processes::Several).size;
        let stock = state.stock(processes);
        if stock.size == 0 {
            (stock.size, stock.target) = (size, size);
            self.shared.wanted.notify_one();
        }
    }

    /// Takes a zygote; when none is ready, makes one, which is slow. An error
    /// means that none can be made at all.
    pub fn take(&self) -> Result<Zygote, ZygoteError> {
        self.take_with(Processes::default())
    }

    /// The same, with the filter that goes with `processes`.
    pub fn take_with(&self, processes: Processes) -> Result<Zygote, ZygoteError> {
        let expected = self.shared.lock().stock(processes).expected;
        let taken = self.take_of(processes, expected);
        self.replenish();
        taken
    }

    /// Lets the background thread make what was taken.
    pub fn replenish(&self) {
        self.shared.wanted.notify_one();
    }

    /// The same as [`ZygotePool::take`] where every microsecond counts: waking the
    /// background thread takes more of them than all else. The caller calls
    /// [`ZygotePool::replenish`] when the boot is on its way. The zygotes that are
    /// made next will have these limits already.
    pub fn take_in_haste(&self, limits: ResourceLimits) -> Result<Zygote, ZygoteError> {
        self.take_of(Processes::of(limits), limits)
    }

    /// The same for a caller who must not wait; `None`: no zygote is ready.
    pub fn take_ready_in_haste(&self, limits: ResourceLimits) -> Option<Zygote> {
        self.shared.lock().take_ready(Processes::of(limits), limits)
    }

    fn take_of(&self, processes: Processes, limits: ResourceLimits) -> Result<Zygote, ZygoteError> {
        {
            let mut state = self.shared.lock();
            if let Some(zygote) = state.take_ready(processes, limits) {
                return Ok(zygote);
            }
            state.stats.misses += 1;
            state.stock(processes).grow();
        }
        let zygote = self.shared.make(processes)?;
        let mut state = self.shared.lock();
        state.stats.created += 1;
        state.stats.taken += 1;
        Ok(zygote)
    }

    /// Whether a zygote of this kind is ready.
    pub fn has_ready(&self, processes: Processes) -> bool {
        !self.shared.lock().stock(processes).ready.is_empty()
    }

    /// Changes how many zygotes of each kind that is kept are kept ready.
    pub fn set_size(&self, size: usize) {
        let surplus: Vec<_> = {
            let mut state = self.shared.lock();
            let stocks = state.stocks.iter_mut().filter(|stock| stock.size > 0 || size == 0);
            stocks.flat_map(|stock| stock.resize(size)).collect()
        };
        // Ended outside the lock.
        drop(surplus);
        self.shared.wanted.notify_one();
    }

    /// Blocks until the pool is full; an error if a zygote could not be made meanwhile.
    pub fn wait_full(&self) -> Result<(), ZygoteError> {
        let mut state = self.shared.lock();
        loop {
            if state.stocks.iter().all(Stock::is_full) {
                return Ok(());
            }
            if let Some(failure) = state.failure.take() {
                return Err(failure);
            }
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Counters.
    pub fn stats(&self) -> PoolStats {
        let state = self.shared.lock();
        PoolStats {
            ready: state.stocks.iter().map(|stock| stock.ready.len()).sum(),
            target: state.stocks.iter().map(|stock| stock.target).sum(),
            ..state.stats
        }
    }

    /// Whether sandboxes are made although limits are weak.
    pub fn weak_limits(&self) -> WeakLimits {
        self.shared.config.weak_limits
    }

    /// The present zygote parent, started if there is none.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn parent(&self) -> Result<Arc<ZygoteParent>, ZygoteError> {
        self.shared.parent()
    }

    /// Whether it has a zygote parent now.
    pub fn has_parent(&self) -> bool {
        self.shared.lock_parent().running.is_some()
    }

    /// How its zygotes are made.
    pub(super) fn zygotes(&self) -> &ZygoteConfig {
        &self.shared.config
    }

    /// A zygote was dead when it was used: lets go of the others that are, which nobody
    /// may have been told of yet. All die at once with their parent.
    pub fn discard_dead(&self) {
        let mut state = self.shared.lock();
        let mut all_dead = Vec::new();
        for stock in &mut state.stocks {
            let (alive, dead): (_, VecDeque<_>) =
                stock.ready.drain(..).partition(Zygote::is_running);
            stock.ready = alive;
            all_dead.extend(dead);
        }
        state.stats.failures += all_dead.len() as u64;
        drop(state);
        // Ended outside the lock.
        drop(all_dead);
    }
}

impl State {
    fn stock(&mut self, processes: Processes) -> &mut Stock {
        &mut self.stocks[processes as usize]
    }

    /// Takes a zygote that is ready for a sandbox with these limits, which the next one is
    /// likely to have, too.
    fn take_ready(&mut self, processes: Processes, limits: ResourceLimits) -> Option<Zygote> {
        self.stock(processes).expected = limits;
        while let Some(zygote) = self.stock(processes).ready.pop_front() {
            if zygote.has_ended() {
                self.stats.failures += 1;
                continue;
            }
            self.stats.taken += 1;
            return Some(zygote);
        }
        None
    }

    /// Zygotes that died while they waited, and those that are too many by now.
    fn take_useless(&mut self) -> Vec<Zygote> {
        let mut useless = Vec::new();
        for stock in &mut self.stocks {
            let (ended, ready): (VecDeque<_>, _) =
                stock.ready.drain(..).partition(Zygote::has_ended);
            stock.ready = ready;
            self.stats.failures += ended.len() as u64;
            useless.extend(ended);
            useless.extend(stock.shrink());
        }
        useless
    }

    /// The kind of which most is missing, and whether there is enough of it to leave the
    /// processors to others for a moment.
    fn most_wanted(&self) -> Option<(Processes, Haste)> {
        let missing = |processes: &Processes| self.stocks[*processes as usize].missing();
        let wanted = Processes::ALL.into_iter().max_by_key(missing).filter(|p| missing(p) > 0)?;
        let stock = &self.stocks[wanted as usize];
        let has_enough = stock.ready.len() * 2 >= stock.target && !stock.ready.is_empty();
        Some((wanted, if has_enough { Haste::None } else { Haste::Great }))
    }
}

/// How soon a zygote is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Haste {
    None,
    Great,
}

impl Stock {
    fn new(size: usize) -> Self {
        Self {
            ready: VecDeque::with_capacity(size),
            size,
            target: size,
            adjusted: Instant::now(),
            expected: ResourceLimits::default(),
        }
    }

    fn is_full(&self) -> bool {
        self.missing() == 0
    }

    fn missing(&self) -> usize {
        self.target.saturating_sub(self.ready.len())
    }

    /// A boot has found no zygote: keeps twice as many.
    fn grow(&mut self) {
        self.target = (self.target * 2).max(1).min(self.size * GROWTH_MAX);
        self.adjusted = Instant::now();
    }

    /// Keeps one fewer if there has been no want for a while; those that are too
    /// many now.
    fn shrink(&mut self) -> VecDeque<Zygote> {
        if self.target > self.size && self.adjusted.elapsed() > DECAY {
            self.target -= 1;
            self.adjusted = Instant::now();
        }
        self.surplus()
    }

    /// Keeps this many from now on; those that are too many.
    fn resize(&mut self, size: usize) -> VecDeque<Zygote> {
        (self.size, self.target) = (size, size);
        self.surplus()
    }

    fn surplus(&mut self) -> VecDeque<Zygote> {
        self.ready.split_off(self.ready.len().min(self.target))
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a zygote, with a new parent if the present one has ended. Somebody may kill
    /// either of them meanwhile, the new parent while it starts, too: that alone is no
    /// reason why there can be no zygote.
    fn make(&self, processes: Processes) -> Result<Zygote, ZygoteError> {
        for _ in 1..ATTEMPTS {
            let parent = match self.parent() {
                Err(error) if error.is_end_of_parent() => continue,
                parent => parent?,
            };
            match parent.create_with(processes) {
                Err(ZygoteError::ParentDied) => parent.wait_ended(END_PATIENCE),
                Err(ZygoteError::Killed) => {}
                Err(_) if parent.has_ended() => {}
                result => return result,
            }
            match self.replace_ended(&parent) {
                Err(error) if !error.is_end_of_parent() => return Err(error),
                _ => {}
            }
        }
        let parent = self.parent()?;
        // Says why there is none, if no parent has lived long enough.
        self.replace_ended(&parent)?;
        self.parent()?.create_with(processes)
    }

    fn lock_parent(&self) -> MutexGuard<'_, Parent> {
        self.parent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn parent(&self) -> Result<Arc<ZygoteParent>, ZygoteError> {
        let mut parent = self.lock_parent();
        parent.used = Instant::now();
        if let Some(running) = &parent.running {
            return Ok(running.clone());
        }
        let started = Arc::new(ZygoteParent::start(self.config.clone())?);
        Ok(parent.running.insert(started).clone())
    }

    /// Lets go of the parent if nobody has used it for long. It ends with the last sandbox that
    /// it has made.
    fn end_idle_parent(&self) {
        let Some(idle_after) = self.idle_after else { return };
        let mut parent = self.lock_parent();
        let is_idle = parent.used.elapsed() >= idle_after;
        let idle = parent.running.take_if(|_| is_idle);
        drop(parent);
        // Its control groups and ids are given back outside the lock.
        drop(idle);
    }

    /// Starts another parent in place of this one if it has ended.
    fn replace_ended(&self, parent: &Arc<ZygoteParent>) -> Result<(), ZygoteError> {
        if !parent.has_ended() {
            return Ok(());
        }
        let mut current = self.lock_parent();
        // Somebody else may have replaced it in the meantime.
        if current.running.as_ref().is_some_and(|running| Arc::ptr_eq(running, parent)) {
            current.running = Some(Arc::new(ZygoteParent::start(self.config.clone())?));
            self.lock().stats.parent_restarts += 1;
        }
        Ok(())
    }

    /// The background thread.
    fn keep_full(&self) {
        let mut state = self.lock();
        while !state.closing {
            let useless = state.take_useless();
            if !useless.is_empty() {
                drop(state);
                // Ended outside the lock.
                drop(useless);
                state = self.lock();
            }
            let Some((processes, haste)) = state.most_wanted() else {
                (state, _) = self
                    .wanted
                    .wait_timeout(state, INSPECTION)
                    .unwrap_or_else(PoisonError::into_inner);
                if self.idle_after.is_some() {
                    drop(state);
                    self.end_idle_parent();
                    state = self.lock();
                }
                continue;
            };
            if haste == Haste::None {
                let (guard, waited) = self
                    .wanted
                    .wait_timeout(state, COURTESY)
                    .unwrap_or_else(PoisonError::into_inner);
                state = guard;
                if !waited.timed_out() {
                    continue;
                }
            }
            let expected = state.stock(processes).expected;
            drop(state);
            let made = self.make(processes);
            if let Ok(zygote) = &made {
                zygote.expect_limits(expected);
            }
            state = self.lock();
            match made {
                Ok(zygote) => {
                    state.stats.created += 1;
                    state.failure = None;
                    state.stock(processes).ready.push_back(zygote);
                    self.changed.notify_all();
                }
                Err(error) => {
                    state.stats.failures += 1;
                    state.failure = Some(error);
                    self.changed.notify_all();
                    (state, _) = self
                        .wanted
                        .wait_timeout(state, RETRY)
                        .unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }
}

impl Drop for ZygotePool {
    fn drop(&mut self) {
        let ready = {
            let mut state = self.shared.lock();
            state.closing = true;
            state.stocks.iter_mut().flat_map(|stock| stock.resize(0)).collect::<Vec<_>>()
        };
        drop(ready);
        self.shared.wanted.notify_all();
        if let Some(filler) = self.filler.take() {
            // It only panics on a bug, which its own message has reported.
            let _ = filler.join();
        }
        let made_meanwhile: Vec<_> =
            self.shared.lock().stocks.iter_mut().flat_map(|stock| stock.resize(0)).collect();
        drop(made_meanwhile);
    }
}
