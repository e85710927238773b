//! Volumes that stay open for a moment after a request for their files: whoever opens one counts all that
//! is in it, for which others wait who open one.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};
use thaw_home::volumes::{VolumeError, VolumeStore};
use thaw_sandbox::{BoundAccess, VolumeMount, VolumeShare};
use thaw_store::Name;
use tokio::time::sleep;

/// For how long.
const IDLE: Duration = Duration::from_secs(10);
/// Most of them; each has some descriptors.
const OPEN_MAX: usize = 64;

/// Volumes that are open, and when they were wanted last.
#[derive(Default)]
pub struct OpenVolumes {
    all: Mutex<BTreeMap<Name, (VolumeMount, Instant)>>,
    /// What all requests for files may make the node keep: as much as a tenant.
    share: VolumeShare,
}

impl OpenVolumes {
    /// One of them, which is opened if it is not. May block.
    pub fn get(&self, store: &VolumeStore, name: &Name) -> Result<VolumeMount, VolumeError> {
        if let Some((mount, wanted)) = self.all().get_mut(name) {
            *wanted = Instant::now();
            return Ok(mount.clone());
        }
        let mount = store.of_operator(name, BoundAccess::Write, &self.share)?;
        let mut all = self.all();
        if all.len() >= OPEN_MAX {
            let oldest = all.iter().min_by_key(|(_, (_, wanted))| *wanted);
            let oldest = oldest.map(|(name, _)| name.clone());
            oldest.and_then(|oldest| all.remove(&oldest));
        }
        all.insert(name.clone(), (mount.clone(), Instant::now()));
        Ok(mount)
    }

    /// Closes one, which is going to be removed.
    pub fn close(&self, name: &Name) {
        self.all().remove(name);
    }

    /// Closes those that nobody has wanted for a while, for as long as this is there.
    pub async fn close_idle(this: Weak<Self>) {
        loop {
            sleep(IDLE).await;
            let Some(this) = this.upgrade() else { return };
            this.all().retain(|_, (_, wanted)| wanted.elapsed() < IDLE);
        }
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<Name, (VolumeMount, Instant)>> {
        self.all.lock().expect("no holder panics")
    }
}
