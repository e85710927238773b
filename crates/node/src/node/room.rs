//! Room for instances: how many may run, and who waits for it.

use super::NodeState;
use crate::tenants::Tenant;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::sync::futures::Notified;

/// How long somebody who waits for room relies on an instance that is about to end, or to sleep, before
/// another one does.
const COMING_PATIENCE: Duration = Duration::from_secs(1);

impl NodeState {
    pub(crate) fn capacity(&self) -> Arc<Semaphore> {
        self.capacity.clone()
    }

    /// Somebody waits until an instance more may run, as long as the value lives.
    pub(crate) fn wait_for_room(&self) -> impl Drop + Send + '_ {
        struct Waiting<'a>(&'a NodeState);
        impl Drop for Waiting<'_> {
            fn drop(&mut self) {
                self.0.waiting.fetch_sub(1, Ordering::SeqCst);
                // It may have heard of an instance that it does not need, or has got the room on which
                // another one relies.
                self.0.instance_is_idle();
            }
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        Waiting(self)
    }

    /// An instance has become idle, and can make room for another. One of those who wait
    /// hears of it; a wake-up that comes too late for it goes to the next.
    pub(crate) fn instance_is_idle(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.idle.notify_one();
        }
    }

    /// Resolves when an instance of any function has become idle.
    pub(crate) fn idle_instance(&self) -> Notified<'_> {
        self.idle.notified()
    }

    /// An instance takes its time to end, and can be hurried by those who wait for room.
    pub(crate) fn instance_is_in_grace(&self, tenant: &Tenant) {
        tenant.room().stir();
        self.instance_is_idle();
    }

    /// Has those who wait for room rely for so long on what is about to make some, before they look for
    /// something else. The first one stays.
    pub fn rely_on_coming_room_for(&self, patience: Duration) {
        // The first one stays.
        let _ = self.coming_patience.set(patience);
    }

    pub(crate) fn coming_patience(&self) -> Duration {
        self.coming_patience.get().copied().unwrap_or(COMING_PATIENCE)
    }

    /// How many wait until an instance more may run.
    pub(crate) fn waiting_for_room(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }

    /// How many instances are about to give their room back.
    pub(crate) fn ending_count(&self) -> usize {
        self.tenants.all().iter().map(|tenant| tenant.room().ending()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;

    #[tokio::test]
    async fn who_waits_no_more_passes_on_what_it_has_heard() {
        let node = NodeState::new(1);
        let (first, _second) = (node.wait_for_room(), node.wait_for_room());
        node.instance_is_idle();
        node.idle_instance().await;
        assert!(!pin!(node.idle_instance()).enable());
        drop(first);
        assert!(pin!(node.idle_instance()).enable());
    }
}
