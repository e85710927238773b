//! Zygotes kept ready in the background.

use std::collections::VecDeque;
use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Zygote, ZygoteConfig, ZygoteError, ZygoteParent};

/// How a pool is kept.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Zygotes kept ready, at least: more, up to [`GROWTH_MAX`] times as many,
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
/// so may their parent.
const ATTEMPTS: u32 = 5;
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
    /// Held while the parent is replaced, so that only one caller does it.
    parent: Mutex<Arc<ZygoteParent>>,
}

#[derive(Debug)]
struct State {
    ready: VecDeque<Zygote>,
    /// Least number that is kept.
    size: usize,
    /// Number that is kept at present, adjusted by demand.
    target: usize,
    /// When a boot last found none, or the target last fell.
    adjusted: Instant,
    /// Memory limit of the last boot: what the next one is likely to have, too.
    memory_limit: u64,
    closing: bool,
    stats: PoolStats,
    /// Why the last attempt of the background thread failed, until one succeeds.
    failure: Option<ZygoteError>,
}

impl ZygotePool {
    /// Starts the zygote parent and fills the pool in the background.
    pub fn new(config: PoolConfig) -> Result<Self, ZygoteError> {
        let parent = ZygoteParent::start(config.zygotes.clone())?;
        let state = State {
            ready: VecDeque::with_capacity(config.size),
            size: config.size,
            target: config.size,
            adjusted: Instant::now(),
            memory_limit: 0,
            closing: false,
            stats: PoolStats::default(),
            failure: None,
        };
        let shared = Arc::new(Shared {
            config: config.zygotes,
            state: Mutex::new(state),
            wanted: Condvar::new(),
            changed: Condvar::new(),
            parent: Mutex::new(Arc::new(parent)),
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

    /// Takes a zygote; when none is ready, makes one, which is slow. An error
    /// means that none can be made at all.
    pub fn take(&self) -> Result<Zygote, ZygoteError> {
        let limit = self.shared.lock().memory_limit;
        let taken = self.take_in_haste(limit);
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
    /// made next will have this memory limit already, in bytes.
    pub fn take_in_haste(&self, memory_limit: u64) -> Result<Zygote, ZygoteError> {
        {
            let mut state = self.shared.lock();
            state.memory_limit = memory_limit;
            while let Some(zygote) = state.ready.pop_front() {
                if zygote.has_ended() {
                    state.stats.failures += 1;
                    continue;
                }
                state.stats.taken += 1;
                return Ok(zygote);
            }
            state.stats.misses += 1;
            state.grow();
        }
        let zygote = self.shared.make()?;
        let mut state = self.shared.lock();
        state.stats.created += 1;
        state.stats.taken += 1;
        Ok(zygote)
    }

    /// Changes how many zygotes are kept ready.
    pub fn set_size(&self, size: usize) {
        let surplus = {
            let mut state = self.shared.lock();
            state.size = size;
            state.target = size;
            let keep = state.ready.len().min(size);
            state.ready.split_off(keep)
        };
        // Ended outside the lock.
        drop(surplus);
        self.shared.wanted.notify_one();
    }

    /// Blocks until the pool is full; an error if a zygote could not be made meanwhile.
    pub fn wait_full(&self) -> Result<(), ZygoteError> {
        let mut state = self.shared.lock();
        loop {
            if state.ready.len() >= state.target {
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
        PoolStats { ready: state.ready.len(), target: state.target, ..state.stats }
    }

    /// The present zygote parent.
    pub fn parent(&self) -> Arc<ZygoteParent> {
        self.shared.parent()
    }

    /// A zygote was dead when it was used: lets go of the others that are, which nobody
    /// may have been told of yet. All die at once with their parent.
    pub fn discard_dead(&self) {
        let mut state = self.shared.lock();
        let (alive, dead) = mem::take(&mut state.ready).into_iter().partition(Zygote::is_running);
        state.ready = alive;
        let dead: VecDeque<Zygote> = dead;
        state.stats.failures += dead.len() as u64;
        drop(state);
        // Ended outside the lock.
        drop(dead);
    }
}

impl State {
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
        let keep = self.ready.len().min(self.target);
        self.ready.split_off(keep)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a zygote, with a new parent if the present one has ended. Somebody may kill
    /// either of them meanwhile: that alone is no reason why there can be no zygote.
    fn make(&self) -> Result<Zygote, ZygoteError> {
        for _ in 1..ATTEMPTS {
            let parent = self.parent();
            match parent.create() {
                Err(ZygoteError::ParentDied) => parent.wait_ended(END_PATIENCE),
                Err(ZygoteError::Killed) => {}
                Err(_) if parent.has_ended() => {}
                result => return result,
            }
            if parent.has_ended() {
                self.replace(&parent)?;
            }
        }
        self.parent().create()
    }

    fn parent(&self) -> Arc<ZygoteParent> {
        self.parent.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Starts another parent in place of this one, which has ended.
    fn replace(&self, ended: &Arc<ZygoteParent>) -> Result<(), ZygoteError> {
        let mut current = self.parent.lock().unwrap_or_else(PoisonError::into_inner);
        // Somebody else may have replaced it in the meantime.
        if Arc::ptr_eq(&current, ended) {
            *current = Arc::new(ZygoteParent::start(self.config.clone())?);
            self.lock().stats.parent_restarts += 1;
        }
        Ok(())
    }

    /// The background thread.
    fn keep_full(&self) {
        let mut state = self.lock();
        while !state.closing {
            let before = state.ready.len();
            state.ready.retain(|zygote| !zygote.has_ended());
            state.stats.failures += (before - state.ready.len()) as u64;
            let surplus = state.shrink();
            if !surplus.is_empty() {
                drop(state);
                // Ended outside the lock.
                drop(surplus);
                state = self.lock();
            }
            if state.ready.len() >= state.target {
                (state, _) = self
                    .wanted
                    .wait_timeout(state, INSPECTION)
                    .unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            if state.ready.len() * 2 >= state.target && !state.ready.is_empty() {
                let (guard, waited) = self
                    .wanted
                    .wait_timeout(state, COURTESY)
                    .unwrap_or_else(PoisonError::into_inner);
                state = guard;
                if !waited.timed_out() {
                    continue;
                }
            }
            let memory_limit = state.memory_limit;
            drop(state);
            let made = self.make();
            if let Ok(zygote) = &made {
                zygote.expect_memory_limit(memory_limit);
            }
            state = self.lock();
            match made {
                Ok(zygote) => {
                    state.stats.created += 1;
                    state.failure = None;
                    state.ready.push_back(zygote);
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
            mem::take(&mut state.ready)
        };
        drop(ready);
        self.shared.wanted.notify_all();
        if let Some(filler) = self.filler.take() {
            // It only panics on a bug, which its own message has reported.
            let _ = filler.join();
        }
        self.shared.lock().ready.clear();
    }
}
