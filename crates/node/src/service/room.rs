//! Room for instances that no client waits for: sandboxes, copies, what is made of checkpoints, and those
//! that wake for the control plane.
//!
//! Whoever boots one claims a place of the function first, and then takes room of its tenant and of the
//! node. A claim counts as an instance at once, so that several at a time never have more than there may
//! be. Where there is no room, idle instances of functions make some, by the rules that hold for
//! requests; sandboxes never do. It is waited for as long as something that ends, or falls asleep, gives
//! room back. Where that takes longer than a moment, another idle instance ends. If nothing gives room
//! back, or that takes too long, the new one is refused.

use super::coming::Coming;
use super::{Service, Slot, Slots};
use crate::instance::Place;
use crate::tenants::Lease;
use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

/// How long it is waited at most for instances that make room.
const ROOM_PATIENCE: Duration = Duration::from_secs(10);
/// How long until it is looked again whether something is still about to make room.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Instances of a function that are being made, and are none of its live ones yet.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// For clients.
    for_clients: usize,
    /// For nobody's request: only these keep a client from an instance.
    beside_clients: usize,
}

impl Claims {
    pub fn len(&self) -> usize {
        self.for_clients + self.beside_clients
    }

    fn of(&mut self, kind: Claimant) -> &mut usize {
        match kind {
            Claimant::Client => &mut self.for_clients,
            Claimant::Other => &mut self.beside_clients,
        }
    }
}

/// For whom a place is claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Claimant {
    Client,
    Other,
}

/// A place of a function for an instance that is being made. It counts as one of its instances until
/// this is dropped, or the instance is there.
pub(super) struct Claim {
    service: Option<Arc<Service>>,
    kind: Claimant,
}

impl Claim {
    /// Counts one more.
    fn take(service: &Arc<Service>, slots: &mut Slots, kind: Claimant) -> Self {
        *slots.claims.of(kind) += 1;
        Self { service: Some(service.clone()), kind }
    }

    /// The instance is among the live ones from now on, as long as `slots` are held: it is never
    /// counted twice.
    pub fn becomes_instance(mut self, slots: &mut Slots) {
        if self.service.take().is_some() {
            *slots.claims.of(self.kind) -= 1;
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let Some(service) = self.service.take() else { return };
        *service.slots().claims.of(self.kind) -= 1;
        service.freed.notify_waiters();
    }
}

/// A place of an instance that is being made, within all limits.
pub(super) struct Claimed {
    pub claim: Claim,
    pub place: Place,
}

/// Whether a function has room.
enum Room {
    Claimed(Vec<Claim>),
    /// Instances are about to make some.
    Soon,
    /// It has so many instances that give up nothing.
    None(usize),
}

impl Slots {
    /// How many instances there are, those included that are asleep, and those that are being made.
    fn count(&self) -> usize {
        self.all.len() + self.asleep.len() + self.claims.len()
    }

    /// Whether a client may have one more where `most` may be. Those that end do not count: a client waits
    /// for no instance that gives it nothing. Where each connection has an instance of its own
    /// (`are_exclusive`), the permits bound those of clients, and none of them is looked at.
    fn has_room_for_client(&self, most: usize, are_exclusive: bool) -> bool {
        let has_others = self.held.len() + self.claims.beside_clients > 0;
        if self.count() < most || are_exclusive && !has_others {
            return true;
        }
        let are_ending = self.values().filter(|slot| !slot.state.takes_connections()).count();
        self.count() - are_ending < most
    }

    /// Idle instances that may end for others, those first that have been idle longest.
    fn spare(&self, spared: Option<u64>) -> Vec<u64> {
        let may_end = |(id, slot): &(&u64, &Slot)| {
            slot.is_idle_and_up() && !self.held.contains(id) && Some(**id) != spared
        };
        let idle = self.iter().filter(may_end);
        let idle: BTreeSet<_> =
            idle.filter_map(|(id, slot)| Some((slot.idle_since?, *id))).collect();
        idle.into_iter().map(|(_, id)| id).collect()
    }
}

impl Slot {
    fn is_idle_and_up(&self) -> bool {
        self.connections == 0 && self.state.is_idle()
    }
}

impl Service {
    /// A place for an instance that is booted for a client; `None`: there are as many as there may be,
    /// those included that are being made.
    pub(super) fn claim_for_client(self: &Arc<Self>) -> Option<Claim> {
        let are_exclusive = self.config.limits.concurrency.get() == 1;
        let mut slots = self.slots();
        let has_room = slots.has_room_for_client(self.instances_max(), are_exclusive);
        has_room.then(|| Claim::take(self, &mut slots, Claimant::Client))
    }

    fn instances_max(&self) -> usize {
        self.config.limits.instances.get() as usize
    }

    /// Room for more instances of `memory` bytes, within all limits. `spared` does not end for that.
    ///
    /// # Errors
    /// There is none, and nobody makes some: one sentence for the operator.
    pub(super) async fn places_for(
        self: &Arc<Self>,
        count: NonZeroU32,
        memory: u64,
        spared: Option<u64>,
    ) -> Result<Vec<Claimed>, String> {
        let deadline = Instant::now() + ROOM_PATIENCE;
        let claims = self.claim(count.get() as usize, spared, deadline).await?;
        let mut places = Vec::with_capacity(claims.len());
        for claim in claims {
            let place = self.place_beside_clients(memory, spared, deadline).await?;
            places.push(Claimed { claim, place });
        }
        Ok(places)
    }

    /// Room of tenant and node for an instance that the function counts already.
    ///
    /// # Errors
    /// The same.
    pub(super) async fn place_to_wake(self: &Arc<Self>, memory: u64) -> Result<Place, String> {
        self.place_beside_clients(memory, None, Instant::now() + ROOM_PATIENCE).await
    }

    async fn place_beside_clients(
        self: &Arc<Self>,
        memory: u64,
        spared: Option<u64>,
        deadline: Instant,
    ) -> Result<Place, String> {
        let lease = self.room_of_tenant(memory, spared, deadline).await?;
        let capacity = self.room_of_node(spared, deadline).await?;
        Ok(Place { _capacity: capacity, lease })
    }

    /// Claims so many places of the function, all of them or none.
    async fn claim(
        self: &Arc<Self>,
        count: usize,
        spared: Option<u64>,
        deadline: Instant,
    ) -> Result<Vec<Claim>, String> {
        let mut coming = self.coming();
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            // From now on every place that is free counts.
            freed.as_mut().enable();
            let live = match self.claim_now(count, spared, &mut coming) {
                Room::Claimed(claims) => return Ok(claims),
                Room::None(live) => live,
                Room::Soon => tokio::select! {
                    () = freed => continue,
                    () = coming.in_vain() => continue,
                    () = sleep_until(deadline) => self.slots().count(),
                },
            };
            let most = self.instances_max();
            return Err(format!(
                "`{}` may have {most} instances and has {live}, of which too few are idle; end some, or \
                 raise `instances` in [limits] of its thaw.toml",
                self.name()
            ));
        }
    }

    /// What is relied on from now on: on instances that end already, first of all.
    fn coming(&self) -> Coming {
        let mut coming = Coming::default();
        coming.begin(self.shared.coming_patience());
        coming
    }

    /// Claims them if there is room, or has as many idle instances end as that takes, beside those that
    /// end already while these are relied on. None ends where there can be no room.
    fn claim_now(self: &Arc<Self>, count: usize, spared: Option<u64>, coming: &mut Coming) -> Room {
        let mut slots = self.slots();
        let missing = (slots.count() + count).saturating_sub(self.instances_max());
        if missing == 0 {
            let claim = |_| Claim::take(self, &mut slots, Claimant::Other);
            return Room::Claimed((0..count).map(claim).collect());
        }
        let are_ending = slots.values().filter(|slot| !slot.state.takes_connections()).count();
        // One that is put to sleep is one of those that there may be still.
        let sleep = self.config.limits.sleep_after.is_some();
        let spare = if sleep { Vec::new() } else { slots.spare(spared) };
        if spare.len() + are_ending < missing {
            return Room::None(slots.count());
        }
        // These end already, and take their time.
        slots.hurry(missing);
        let relied_on = if coming.is_awaited() { are_ending } else { 0 };
        if relied_on == 0 {
            coming.begin(self.shared.coming_patience());
        }
        for id in spare.into_iter().take(missing.saturating_sub(relied_on)) {
            if let Some(slot) = slots.get_mut(&id) {
                slot.end_for_others();
                tracing::debug!(function = %self.name(), instance = id, "ended an idle instance to make room");
            }
        }
        Room::Soon
    }

    /// Takes room of the tenant.
    async fn room_of_tenant(
        &self,
        memory: u64,
        spared: Option<u64>,
        deadline: Instant,
    ) -> Result<Lease, String> {
        let room = self.tenant.room();
        if let Some(lease) = room.try_enter(memory) {
            return Ok(lease);
        }
        let full = || match room.unmet(memory) {
            Some(unmet) => format!(
                "there is no room for one more instance, and none is idle: {}; end some, or have the \
                 operator raise it (`thaw tenants`)",
                self.tenant.explain(unmet, memory)
            ),
            None => format!("others of {} wait for room before; try again", self.tenant.name()),
        };
        if let Some(unmet) = room.never_fits(memory) {
            let why = self.tenant.explain(unmet, memory);
            return Err(format!("{why}; have the operator raise it (`thaw tenants`)"));
        }
        let mut turn = room.queue(memory);
        let mut coming = self.coming();
        loop {
            if let Some(lease) = turn.try_lease() {
                return Ok(lease);
            }
            if !(coming.is_awaited() && self.services.is_room_coming_to(&self.tenant)) {
                if !self.services.make_room_beside_clients_of(&self.tenant, spared) {
                    // It may have come a moment ago.
                    return turn.try_lease().ok_or_else(full);
                }
                coming.begin(self.shared.coming_patience());
            }
            tokio::select! {
                lease = turn.lease() => return Ok(lease),
                () = sleep(LOOK_AGAIN) => {}
            }
            if Instant::now() >= deadline {
                return turn.try_lease().ok_or_else(full);
            }
        }
    }

    /// Takes room of the node.
    async fn room_of_node(
        &self,
        spared: Option<u64>,
        deadline: Instant,
    ) -> Result<OwnedSemaphorePermit, String> {
        if let Ok(capacity) = self.shared.capacity().try_acquire_owned() {
            return Ok(capacity);
        }
        let full = || {
            "this node runs as many instances as it may, and none of them is idle; end some, or see \
             `thaw serve --max-instances`"
                .to_owned()
        };
        let _waiting = self.shared.wait_for_room();
        // It keeps its turn however often it is looked.
        let room = self.shared.capacity().acquire_owned();
        tokio::pin!(room);
        let mut coming = self.coming();
        loop {
            let is_relied_on = coming.is_awaited() && self.services.is_room_coming();
            let is_coming = is_relied_on || self.services.make_room_beside_clients(spared);
            if !is_relied_on {
                coming.begin(self.shared.coming_patience());
            }
            let patience = if is_coming { LOOK_AGAIN } else { Duration::ZERO };
            match timeout_at(Instant::now() + patience, room.as_mut()).await {
                Ok(capacity) => return Ok(capacity.expect("the semaphore is never closed")),
                Err(_) if !is_coming || Instant::now() >= deadline => return Err(full()),
                Err(_) => {}
            }
        }
    }

    /// Ends an instance to make room for one that no client waits for, or puts it to sleep, as
    /// [`Service::evict`] does: only one that is idle, and never one that is being booted.
    pub(crate) fn evict_if_up(&self, id: u64) -> bool {
        let is_up = self.slots().get(&id).is_some_and(Slot::is_idle_and_up);
        is_up && self.evict(id)
    }
}

#[cfg(test)]
mod tests;
