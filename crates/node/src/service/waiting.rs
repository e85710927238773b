//! Waiting for room: of the function, of its tenant and of the node, one after the other. Meanwhile an
//! instance may get a free place, which ends the wait.

use super::Service;
use super::coming::Coming;
use super::place::{Found, PlaceError};
use super::reuse::Reuse;
use super::room::Claim;
use crate::instance::Delivery;
use crate::tenants::{Lease, Refused, Unmet};
use std::future::ready;
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, sleep_until, timeout_at};

/// How waiting has ended.
pub(super) enum Waited<T> {
    /// An instance serves the connection.
    Found(Found),
    /// There is room for one more.
    Room(Delivery, T),
}

impl Service {
    /// Waits until the function may have one more instance, or one that it has gets a free place.
    /// Without a claim there is one that is asleep and can be woken. One at a time looks whenever something
    /// is freed, in the order in which they came: however many wait, what is freed wakes one of them.
    pub(super) async fn wait_for_claim(
        self: &Arc<Self>,
        mut delivery: Delivery,
        reuse: Reuse,
        deadline: Instant,
    ) -> Result<Waited<Option<Claim>>, PlaceError> {
        let none = || {
            self.no_capacity(format!(
                "it may have {} instances, which are sandboxes, busy, or wait for room themselves",
                self.config.limits.instances
            ))
        };
        let turn = timeout_at(deadline, self.claiming.acquire()).await.map_err(|_| none())?;
        let _turn = turn.expect("the semaphore is never closed");
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            // From now on every place that is free counts.
            freed.as_mut().enable();
            delivery = match self.reuse(delivery, reuse) {
                Ok(found) => return Ok(Waited::Found(found)),
                Err(delivery) => delivery,
            };
            // That one counts already.
            if self.can_wake_one() {
                return Ok(Waited::Room(delivery, None));
            }
            if let Some(claim) = self.claim_for_client() {
                return Ok(Waited::Room(delivery, Some(claim)));
            }
            timeout_at(deadline, freed).await.map_err(|_| none())?;
        }
    }

    /// Room of what is kept ready, unless more is needed: it has none for decrypted memory.
    fn spare_room(&self, memory: u64) -> Option<Lease> {
        if memory > self.memory() { None } else { self.launcher.spare_room() }
    }

    /// Waits until the tenant may have one more instance, or one that it has gets a free
    /// place. Ends what the tenant has and nobody uses; holds nothing that others wait for.
    pub(super) async fn wait_for_tenant(
        self: &Arc<Self>,
        mut delivery: Delivery,
        reuse: Reuse,
        deadline: Instant,
    ) -> Result<Waited<Lease>, PlaceError> {
        let (room, mut memory) = (self.tenant.room(), self.memory_to_begin());
        if let Some(lease) = room.try_enter(memory) {
            return Ok(Waited::Room(delivery, lease));
        }
        delivery = match self.reuse(delivery, reuse) {
            Ok(found) => return Ok(Waited::Found(found)),
            Err(delivery) => delivery,
        };
        if let Some(unmet) = room.never_fits(memory) {
            let reason = self.tenant.explain(unmet, memory);
            return Err(self.quota_reached(unmet.into(), reason, self.config.limits.queue.0));
        }
        let mut turn = room.queue(memory);
        let (mut may_make_room, mut coming) = (true, Coming::default());
        loop {
            let changed = self.changed.notified();
            let stirred = room.stirred();
            delivery = match self.reuse(delivery, reuse) {
                Ok(found) => return Ok(Waited::Found(found)),
                Err(delivery) => delivery,
            };
            let needed = self.memory_to_begin();
            if needed < memory {
                // Another request wakes the instance that was to be decrypted for this one.
                (memory, turn) = (needed, room.queue(needed));
            }
            if let Some(lease) = turn.try_lease().or_else(|| self.spare_room(memory)) {
                return Ok(Waited::Room(delivery, lease));
            }
            let is_coming = coming.is_awaited() && self.services.is_room_coming_to(&self.tenant);
            if may_make_room && !is_coming && self.services.make_room_of(&self.tenant) {
                coming.begin(self.shared.coming_patience());
            }
            tokio::select! {
                lease = turn.lease() => return Ok(Waited::Room(delivery, lease)),
                () = changed => may_make_room = false,
                () = stirred => may_make_room = true,
                () = coming.in_vain() => may_make_room = true,
                () = sleep_until(deadline) => {
                    return Err(self.quota_used_up(room.unmet(memory), memory));
                }
            }
        }
    }

    /// All that the tenant may have is busy. If no bound says so, somebody else of it waits
    /// for more memory, and comes first.
    fn quota_used_up(&self, unmet: Option<Unmet>, memory: u64) -> PlaceError {
        let reason = match unmet {
            Some(unmet) => {
                format!("{}, and all of it is in use", self.tenant.explain(unmet, memory))
            }
            None => format!("others of {} wait for memory before", self.tenant.name()),
        };
        let why = unmet.map_or(Refused::Memory, Refused::from);
        self.quota_reached(why, reason, self.config.limits.queue.0)
    }

    /// Waits until the node may run one more instance, or one of the function gets a free
    /// place.
    pub(super) async fn wait_for_node(
        self: &Arc<Self>,
        mut delivery: Delivery,
        reuse: Reuse,
        deadline: Instant,
    ) -> Result<Waited<OwnedSemaphorePermit>, PlaceError> {
        let _waiting = self.shared.wait_for_room();
        // It keeps its turn however often something changes meanwhile.
        let room = self.shared.capacity().acquire_owned();
        tokio::pin!(room);
        let mut coming = Coming::default();
        loop {
            let changed = self.changed.notified();
            let idle = self.shared.idle_instance();
            delivery = match self.reuse(delivery, reuse) {
                Ok(found) => return Ok(Waited::Found(found)),
                Err(delivery) => delivery,
            };
            // Before it is looked for room: what has just come is room, and not about to come any more.
            let is_coming = coming.is_awaited() && self.services.is_room_coming();
            tokio::select! {
                biased;
                capacity = &mut room => {
                    let capacity = capacity.expect("the semaphore is never closed");
                    return Ok(Waited::Room(delivery, capacity));
                }
                () = ready(()) => {}
            }
            // Somebody else's idle instance may hold what is wanted here.
            if !is_coming && self.services.make_room() {
                coming.begin(self.shared.coming_patience());
            }
            tokio::select! {
                // No idle instance is wanted where there is room.
                biased;
                capacity = &mut room => {
                    let capacity = capacity.expect("the semaphore is never closed");
                    return Ok(Waited::Room(delivery, capacity));
                }
                () = changed => {}
                () = idle => {}
                () = coming.in_vain() => {}
                () = sleep_until(deadline) => {
                    return Err(self.no_capacity(
                        "this node runs as many instances as it may".to_owned(),
                    ));
                }
            }
        }
    }
}
