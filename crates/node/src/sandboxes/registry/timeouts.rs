//! What happens to sandboxes when their time has come, and to those that an earlier daemon has
//! paused.

use super::{OnTimeout, SandboxInfo, SandboxProblem, Sandboxes, deadline, now_ms};
use crate::instance::InstanceState;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::sleep;

/// How often it is looked whether the time of one has come.
const LOOK: Duration = Duration::from_millis(250);
/// How often it is looked at all whether their instances are there.
const LOOK_AT_ALL: Duration = Duration::from_secs(60);
/// How many are paused again at a time.
const PAUSES_AT_ONCE: usize = 8;
/// How old the times in the file may be: each use moves one.
const TIMES_WRITTEN: Duration = Duration::from_secs(3);

/// The times of all, as far as they are not of one.
#[derive(Default)]
pub(super) struct Times {
    /// Instances whose time has come, and with which something is being done for that.
    acting: Mutex<BTreeSet<u64>>,
    /// Some have changed that the file does not say.
    have_changed: AtomicBool,
}

impl Times {
    fn acting(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.acting.lock().expect("no holder panics")
    }
}

/// One whose time has come, as it was then.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Due {
    name: String,
    instance: u64,
    deadline_ms: Option<u64>,
    on_timeout: OnTimeout,
}

impl Due {
    fn of(info: &SandboxInfo) -> Self {
        Self {
            name: info.name.clone(),
            instance: info.instance,
            deadline_ms: info.deadline_ms,
            on_timeout: info.on_timeout,
        }
    }
}

impl Sandboxes {
    /// Its time begins anew, if it is one.
    pub fn used(self: &Arc<Self>, instance: u64) {
        let mut all = self.all.lock();
        let name =
            all.values().find(|info| info.instance == instance).map(|info| info.name.clone());
        if let Some(info) = name.and_then(|name| all.get_mut(&name)) {
            info.deadline_ms = deadline(info.timeout_s);
            self.times.have_changed.fetch_or(info.timeout_s.is_some(), Ordering::Relaxed);
        }
        drop(all);
        self.wanted(instance);
    }

    /// Changes when its time has come.
    ///
    /// # Errors
    /// There is none.
    pub fn set_timeout(
        self: &Arc<Self>,
        name: &str,
        seconds: Option<u64>,
    ) -> Result<(), SandboxProblem> {
        let name = self.find(name)?.name;
        if let Some(info) = self.all.lock().get_mut(&name) {
            info.timeout_s = seconds;
            info.deadline_ms = deadline(seconds);
        }
        self.all.write_soon();
        Ok(())
    }

    /// The sandbox of an instance has no timeout any more, if it is one.
    pub fn keep_without_timeout(self: &Arc<Self>, instance: u64) {
        // A plain instance has none.
        let _ = self.set_timeout(&instance.to_string(), None);
    }

    /// Does what is to be done when the time of one has come, for as long as the node lives.
    pub async fn watch(self: Arc<Self>) {
        tokio::join!(self.clone().pause_again(), self.watch_times());
    }

    async fn watch_times(self: &Arc<Self>) {
        let (mut pauses, mut written) = (JoinSet::new(), Instant::now());
        let mut looked_at_all = Instant::now();
        loop {
            sleep(LOOK).await;
            while pauses.try_join_next().is_some() {}
            self.forget_departed();
            if looked_at_all.elapsed() > LOOK_AT_ALL {
                let this = self.clone();
                // If it panics, the next one is tried.
                let _ = spawn_blocking(move || this.forget_gone()).await;
                looked_at_all = Instant::now();
            }
            for due in self.all_due() {
                match due.on_timeout {
                    OnTimeout::Kill => self.end(&due),
                    // One that computes takes a minute to refuse.
                    OnTimeout::Pause => {
                        self.times.acting().insert(due.instance);
                        let this = self.clone();
                        pauses.spawn(async move { this.pause_in_time(&due).await });
                    }
                }
            }
            if written.elapsed() > TIMES_WRITTEN
                && self.times.have_changed.swap(false, Ordering::Relaxed)
            {
                self.write().await;
                written = Instant::now();
            }
        }
    }

    /// Those with which nothing is done yet.
    fn all_due(&self) -> Vec<Due> {
        let (now, acting) = (now_ms(), self.times.acting().clone());
        let is_due = |info: &&SandboxInfo| {
            info.deadline_ms.is_some_and(|at| at <= now) && !acting.contains(&info.instance)
        };
        self.all.lock().values().filter(is_due).map(Due::of).collect()
    }

    /// Whether nobody has used it since, or made another one of its name.
    fn is_still(&self, due: &Due) -> bool {
        self.all.lock().get(&due.name).is_some_and(|info| Due::of(info) == *due)
    }

    fn end(self: &Arc<Self>, due: &Due) {
        if self.is_still(due) {
            let ended = self.kill(&due.name).map(drop);
            self.say(due, ended);
        }
    }

    async fn pause_in_time(self: &Arc<Self>, due: &Due) {
        if self.is_still(due) {
            let paused = self.pause(&due.name).await.map(drop);
            if paused.is_ok() && self.is_still(due) {
                // Without a time it is paused until somebody wants something of it.
                if let Some(info) = self.all.lock().get_mut(&due.name) {
                    info.deadline_ms = None;
                }
                self.times.have_changed.store(true, Ordering::Relaxed);
            }
            self.say(due, paused);
        }
        self.times.acting().remove(&due.instance);
    }

    fn say(self: &Arc<Self>, due: &Due, done: Result<(), SandboxProblem>) {
        let sandbox = &due.name;
        match done {
            Ok(()) => tracing::info!(sandbox, "its time has come: {:?}", due.on_timeout),
            Err(error) => {
                tracing::warn!(sandbox, "its time has come, and it goes on: {error}");
                // It is tried again after as long.
                if self.is_still(due) {
                    self.used(due.instance);
                }
            }
        }
    }

    /// Pauses those again that an earlier daemon has paused; those that are asleep sleep on.
    async fn pause_again(self: Arc<Self>) {
        let paused: Vec<_> = self.all.lock().values().filter(|info| info.paused).cloned().collect();
        let mut pauses = JoinSet::new();
        for SandboxInfo { name, .. } in paused {
            if pauses.len() >= PAUSES_AT_ONCE {
                pauses.join_next().await;
            }
            let this = self.clone();
            pauses.spawn(async move { this.pause_one_again(&name).await });
        }
        while pauses.join_next().await.is_some() {}
    }

    async fn pause_one_again(self: &Arc<Self>, name: &str) {
        let Ok(info) = self.find(name) else { return };
        let sleeps = InstanceState::Asleep.name();
        // Somebody may have used it since.
        if !info.paused || info.state.as_deref() == Some(sleeps) {
            return;
        }
        if let Err(error) = self.pause(name).await {
            tracing::warn!(sandbox = name, "it was paused, and runs now: {error}");
        }
    }
}
