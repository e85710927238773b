//! Images that are frozen anew: those that are too old, that crash, or that cannot be used.

use super::{Build, Catalog};
use crate::service::Service;
use std::collections::BTreeSet;
use std::num::NonZero;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use thaw_build::build::{self, BuildError, BuildOptions};
use thaw_home::config::FunctionName;
use tokio::task::JoinSet;

/// How often the age of images is looked at.
const LOOK_FOR_OLD: Duration = Duration::from_secs(15);
/// Time between two attempts to freeze a function anew that is served from an image of an older
/// kernel build.
const OLDER_BUILD_PAUSE: Duration = Duration::from_secs(60);

impl Catalog {
    /// Freezes functions anew that cannot be served as they are, whose instances crash, or
    /// whose images are as old as their owners want them to become, until the task is
    /// dropped.
    pub async fn keep_fresh(self: Arc<Self>) {
        let most = std::thread::available_parallelism().map_or(1, NonZero::get);
        let mut ticks = tokio::time::interval(LOOK_FOR_OLD);
        let mut at_work = JoinSet::new();
        let mut in_work = BTreeSet::new();
        loop {
            tokio::select! {
                _ = ticks.tick() => {
                    self.want_old_ones_fresh();
                    self.want_older_builds_fresh();
                }
                (name, number) = self.node().refreshes().next(), if at_work.len() < most => {
                    // One that is being frozen anew is not begun a second time.
                    if in_work.insert((name.clone(), number)) {
                        at_work.spawn(self.clone().refreeze(name, number));
                    }
                }
                Some(Ok(version)) = at_work.join_next() => {
                    in_work.remove(&version);
                }
            }
        }
    }

    /// Has the images frozen anew that have reached the age that `refresh` names. One that
    /// could not be frozen is tried again when it is as much older.
    fn want_old_ones_fresh(&self) {
        let now_ms = u128::from(now_ms());
        let mut known = self.known.lock().expect("no holder panics");
        for service in self.services.services() {
            let known = known.get_mut(service.name());
            let known = known.and_then(|known| known.versions.get_mut(&service.version()));
            let (Some(age), Some(known)) = (service.config().refresh, known) else {
                continue;
            };
            let fresh_ms = u128::from(known.created_ms.max(known.tried_ms));
            if now_ms.saturating_sub(fresh_ms) >= age.0.as_millis() {
                known.tried_ms = now_ms as u64;
                known.waits_for_instances = false;
                self.node().refreshes().want(service.name().clone(), service.version());
            }
        }
    }

    /// Has functions frozen anew that are served from images of older kernel builds. Where
    /// instances stay, a new image ends them, so it waits until there are none.
    fn want_older_builds_fresh(&self) {
        let now_ms = now_ms();
        let mut known = self.known.lock().expect("no holder panics");
        for service in self.services.services() {
            let known = known.get_mut(service.name());
            let known = known.and_then(|known| known.versions.get_mut(&service.version()));
            let Some(known) = known else { continue };
            let pause_ms = OLDER_BUILD_PAUSE.as_millis() as u64;
            let is_due = now_ms.saturating_sub(known.tried_ms) >= pause_ms;
            if known.build == Build::Older && is_due && live_and_staying(&service) == 0 {
                known.tried_ms = now_ms;
                known.waits_for_instances = true;
                self.node().refreshes().want(service.name().clone(), service.version());
            }
        }
    }

    /// Whether a version may have a new image now, which ends its instances.
    fn may_replace(&self, name: &FunctionName, number: u32) -> Result<(), BuildError> {
        let known = self.known.lock().expect("no holder panics");
        let version = known.get(name).and_then(|known| known.versions.get(&number));
        if !version.is_some_and(|known| known.waits_for_instances) {
            return Ok(());
        }
        drop(known);
        match self.served_version(name, number).map_or(0, |service| live_and_staying(&service)) {
            0 => Ok(()),
            live => Err(BuildError::InUse(live)),
        }
    }

    /// A version of a function, if it gets requests.
    fn served_version(&self, name: &FunctionName, number: u32) -> Option<Arc<Service>> {
        let served = self.services.served(name.as_str())?;
        served.services().find(|service| service.version() == number).cloned()
    }

    /// Freezes a version of a function anew and serves the new image. Returns which it was.
    async fn refreeze(self: Arc<Self>, name: FunctionName, number: u32) -> (FunctionName, u32) {
        let (catalog, function) = (self.clone(), name.clone());
        let refrozen = tokio::task::spawn_blocking(move || {
            let weak_limits = catalog.pool().weak_limits();
            let service = catalog.served_version(&function, number);
            let cores = service.and_then(|service| service.tenant().cores().cloned());
            let volumes = catalog.node().secrets().map(|secrets| secrets.volumes());
            let options = BuildOptions { weak_limits, cores, volumes, ..BuildOptions::default() };
            let may_replace = || catalog.may_replace(&function, number);
            let (store, name) = (&catalog.store, function.as_str());
            build::refreeze(store, name, number, &options, &may_replace, &mut |_| {})
                .map_err(|error| error.to_string())?;
            catalog.reload().map_err(|error| error.to_string())
        });
        match refrozen.await.map_err(|error| error.to_string()).flatten() {
            Ok(_) => {
                tracing::info!(function = %name, "froze the function anew");
                if let Some(service) = self.served_version(&name, number) {
                    service.end_backoff();
                }
            }
            Err(error) => {
                tracing::error!(function = %name, "could not freeze the function anew: {error}");
            }
        }
        (name, number)
    }
}

/// Instances that more than one client may use, those that are asleep too: a new image ends them.
fn live_and_staying(service: &Service) -> usize {
    if service.is_single_use() { 0 } else { service.instance_count() + service.asleep_count() }
}

/// Milliseconds since the epoch.
fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}
