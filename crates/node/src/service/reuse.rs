//! Free places of live instances, and the connections of the gateway that are kept for the next request.

use super::place::Found;
use super::{Service, Slot};
use crate::instance::{Change, Client, ConnectionTable, Delivery, Done, Placed};
use crate::upstream::{Shared, Upstream};
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout_at};

/// Whether another connection will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reuse {
    /// A request can go on any connection of the gateway's.
    Any,
    /// It has to be this one.
    None,
}

/// A live instance with a free place, and how it is reached.
enum Free {
    Upstream(Upstream),
    Place { instance: u64, table: Arc<ConnectionTable>, crowded_out: Option<Upstream> },
}

impl Service {
    /// Gives the connection to a live instance with a free place: the one that
    /// was used last, so that the others can end.
    pub(super) fn reuse(
        self: &Arc<Self>,
        mut delivery: Delivery,
        reuse: Reuse,
    ) -> Result<Found, Delivery> {
        if self.is_single_use() {
            return Err(delivery);
        }
        loop {
            match self.reserve(reuse, &delivery.client) {
                None => return Err(delivery),
                Some(Free::Upstream(upstream)) => match self.occupy(upstream, delivery.permit) {
                    Ok(upstream) => return Ok(Found::Idle(upstream)),
                    // The guest has just closed it.
                    Err(permit) => delivery.permit = permit,
                },
                Some(Free::Place { instance, table, crowded_out }) => {
                    // A server that attends to one connection after the other turns to
                    // the next when this one ends.
                    drop(crowded_out);
                    let placed = Placed { instance, waited: true };
                    let Err(refused) = table.hand_over(delivery, placed) else {
                        self.connected.reused.inc();
                        return Ok(Found::Placed(placed));
                    };
                    // It has just ended, or reads nothing any more.
                    self.end_unreachable(instance, refused.lives_on);
                    return Err(refused.delivery);
                }
            }
        }
    }

    /// Gives a connection to one particular instance, as soon as it has a free place; `done` is
    /// told what became of it.
    ///
    /// # Errors
    /// The instance stays busy, or has ended: one sentence for the operator.
    pub async fn place_at(&self, id: u64, client: &Arc<Client>, done: Done) -> Result<(), String> {
        if self.is_single_use() {
            return Err(format!(
                "instances of `{}` serve no second request; set isolation = \"instance\"",
                self.name()
            ));
        }
        let deadline = Instant::now() + self.config.limits.queue.0;
        let busy =
            |_| format!("instance {id} serves as many requests at a time as it may; try again");
        let permit = timeout_at(deadline, self.permits.clone().acquire_owned()).await;
        let permit = permit.map_err(busy)?.expect("the semaphore is never closed");
        let (table, crowded_out) = loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            // A place that gets free from now on is noticed.
            freed.as_mut().enable();
            if let Some(reserved) = self.reserve_at(id)? {
                break reserved;
            }
            timeout_at(deadline, freed).await.map_err(busy)?;
        };
        drop(crowded_out);
        let delivery = Delivery { client: client.clone(), permit, done };
        table.hand_over(delivery, Placed { instance: id, waited: true }).map_err(|refused| {
            self.end_unreachable(id, refused.lives_on);
            format!("instance {id} has just ended")
        })
    }

    /// A free place of this instance, counted as taken, and an idle connection that has to end.
    /// `None`: it has none.
    #[expect(clippy::type_complexity, reason = "it is taken apart at once")]
    fn reserve_at(
        &self,
        id: u64,
    ) -> Result<Option<(Arc<ConnectionTable>, Option<Upstream>)>, String> {
        let most = self.config.limits.concurrency.get();
        let mut slots = self.slots();
        let slot = slots.get_mut(&id).filter(|slot| slot.state.takes_connections());
        let slot =
            slot.ok_or_else(|| format!("`{}` has no instance {id}; see `thaw ps`", self.name()))?;
        if slot.connections >= most {
            return Ok(None);
        }
        slot.connect(most);
        let is_crowded = slot.connections as usize + slot.upstreams.len() > most as usize;
        let crowded_out = if is_crowded { slot.upstreams.pop() } else { None };
        Ok(Some((slot.table.clone(), crowded_out)))
    }

    /// A connection to an instance on which a request can be sent at once, if there is
    /// one.
    pub(super) fn take_upstream(
        self: &Arc<Self>,
        mut permit: OwnedSemaphorePermit,
    ) -> Result<Upstream, OwnedSemaphorePermit> {
        while let Some(upstream) = self.idle_upstream_of_a_slot() {
            match self.occupy(upstream, permit) {
                Ok(upstream) => return Ok(upstream),
                Err(refused) => permit = refused,
            }
        }
        Err(permit)
    }

    /// Gives a connection, whose place is counted as taken, its share of the capacity.
    fn occupy(
        self: &Arc<Self>,
        mut upstream: Upstream,
        permit: OwnedSemaphorePermit,
    ) -> Result<Upstream, OwnedSemaphorePermit> {
        let instance = upstream.instance;
        let occupied = match (upstream.is_alive(), self.table_of(instance)) {
            (true, Some(table)) => table.occupy(upstream.connection, permit),
            _ => Err(permit),
        };
        match occupied {
            Ok(()) => {
                self.connected.reused.inc();
                Ok(upstream)
            }
            Err(permit) => {
                self.forget_upstream(instance, upstream.connection);
                drop(upstream);
                self.disconnected(instance);
                Err(permit)
            }
        }
    }

    fn idle_upstream_of_a_slot(&self) -> Option<Upstream> {
        let most = self.config.limits.concurrency.get();
        let mut slots = self.slots();
        let (id, slot) = slots.take_free(most)?;
        let upstream = slot.take_upstream(id)?;
        slot.connect(most);
        Some(upstream)
    }

    /// A free place of a live instance, counted as taken: for `client`, or on a connection that is
    /// there.
    fn reserve(self: &Arc<Self>, reuse: Reuse, client: &Client) -> Option<Free> {
        let most = self.config.limits.concurrency.get();
        let mut slots = self.slots();
        let (instance, slot) = slots.take_free(most)?;
        slot.connect(most);
        if reuse == Reuse::Any
            && let Some(upstream) = slot.take_upstream(instance)
        {
            return Some(Free::Upstream(upstream));
        }
        let is_crowded = slot.connections as usize + slot.upstreams.len() > most as usize;
        let crowded_out = if is_crowded { slot.upstreams.pop() } else { None };
        // From now on the others use the new one.
        let before = self.share(client, instance).and_then(|shared| slot.shared.replace(shared));
        let place = Free::Place { instance, table: slot.table.clone(), crowded_out };
        drop(slots);
        drop(before);
        Some(place)
    }

    /// What others may use of a connection that an instance gets, beside the request that it was made
    /// for. If that is given up before it was begun, its place is freed.
    pub(super) fn share(self: &Arc<Self>, client: &Client, instance: u64) -> Option<Arc<Shared>> {
        let shared = client.shared.upgrade().filter(|_| !self.is_single_use())?;
        let shared = shared.downcast::<Shared>().ok()?;
        let (service, connection) = (Arc::downgrade(self), client.id);
        let release = move || {
            if let Some(service) = service.upgrade() {
                service.end_stream(instance, connection);
            }
        };
        shared.place(connection, release).then_some(shared)
    }

    /// What keeps an instance's connections.
    pub(crate) fn table_of(&self, instance: u64) -> Option<Arc<ConnectionTable>> {
        self.slots().get(&instance).map(|slot| slot.table.clone())
    }
}

impl Slot {
    /// A connection on which a request can be sent at once, or a part of one.
    fn take_upstream(&mut self, id: u64) -> Option<Upstream> {
        let stream = self.shared.as_ref().and_then(|shared| Upstream::of(shared, id));
        stream.or_else(|| self.upstreams.pop())
    }

    /// One connection more, of as many as it may have.
    fn connect(&mut self, most: u32) {
        self.connections += 1;
        self.was_full |= self.connections >= most;
        self.change(Change::Connections { connections: self.connections });
    }
}
