//! Connections to instances that the gateway keeps for several requests.

use super::{Service, Slots};
use crate::instance::{ConnectionTable, LetGo};
use crate::upstream::Upstream;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// How long an instance of one request may go on after its answer, unless it closes its
/// connection before.
const ENDING: Duration = Duration::from_secs(2);
/// Connections that an instance may keep although the gateway has ended them, besides as
/// many as it serves at a time.
const LINGERING_MAX: usize = 64;

impl Service {
    /// A connection to an instance on which a request can be sent at once.
    pub(crate) fn idle_upstream(self: &Arc<Self>) -> Option<Upstream> {
        if self.is_single_use()
            || self.shared.is_ending()
            || self.tenant.cpu().spent_for().is_some()
        {
            return None;
        }
        let permit = self.permits.clone().try_acquire_owned().ok()?;
        self.take_upstream(permit).ok()
    }

    /// A request was answered, and its connection can carry another.
    pub(crate) fn give_back(&self, mut upstream: Upstream) {
        if upstream.is_stream() {
            // The instance's slot has the connection, too.
            return self.end_stream(upstream.instance, upstream.connection);
        }
        upstream.rest();
        let Some(table) = self.table_of(upstream.instance) else { return };
        table.note_served();
        // Otherwise the guest has closed it, and the supervisor has freed its place.
        let Some(permit) = table.vacate(upstream.connection) else { return };
        let mut slots = self.slots();
        let Slots { all, perhaps_free, .. } = &mut *slots;
        let id = upstream.instance;
        let Some(slot) = all.get_mut(&id) else { return };
        let is_idle = slot.disconnected();
        let refused = if slot.state.takes_connections() {
            perhaps_free.insert(id);
            slot.upstreams.push(upstream);
            None
        } else {
            Some(upstream)
        };
        drop(slots);
        drop(refused);
        self.place_freed(id, is_idle);
        drop(permit);
    }

    /// A request is over that was one of several on its connection.
    pub(crate) fn end_stream(&self, instance: u64, connection: u64) {
        let Some(table) = self.table_of(instance) else { return };
        table.note_served();
        // Otherwise the guest has closed it, and the supervisor has freed its places.
        if let Some(permit) = table.vacate(connection) {
            self.disconnected(instance);
            drop(permit);
        }
        self.end_if_it_closes_nothing(instance, &table);
        // An instance that is about to end sees that nothing more comes.
        let unused = self.slots().get_mut(&instance).and_then(|slot| {
            let is_last = slot.connections == 0 && !slot.state.takes_connections();
            slot.shared.take_if(|_| is_last)
        });
        drop(unused);
    }

    /// The gateway has ended its side of a connection to an instance.
    pub(crate) fn let_go(&self, instance: u64, connection: u64, why: LetGo) {
        let Some(table) = self.table_of(instance) else { return };
        match why {
            LetGo::Abandoned => {
                // The instance may still be at work for the client that has gone.
                let until = Instant::now() + self.config.limits.timeout.0;
                table.let_go(connection, why, until);
            }
            LetGo::Answered if self.is_single_use() => {
                table.let_go(connection, why, Instant::now() + ENDING);
            }
            LetGo::Answered => {
                table.note_served();
                if let Some(permit) = table.vacate(connection) {
                    self.disconnected(instance);
                    drop(permit);
                }
                self.end_if_it_closes_nothing(instance, &table);
            }
        }
    }

    /// Ends an instance that keeps connections which the gateway has ended.
    fn end_if_it_closes_nothing(&self, instance: u64, table: &ConnectionTable) {
        let most = self.config.limits.concurrency.get() as usize + LINGERING_MAX;
        if table.count() > most {
            tracing::warn!(function = %self.name(), instance, "ending an instance that closes none of its connections");
            self.kill(instance);
        }
    }

    /// The guest has closed a connection that was kept.
    pub(crate) fn forget_upstream(&self, instance: u64, connection: u64) {
        let mut slots = self.slots();
        let Some(slot) = slots.get_mut(&instance) else { return };
        let found = slot.upstreams.iter().position(|upstream| upstream.connection == connection);
        let closed = found.map(|index| slot.upstreams.swap_remove(index));
        let shared = slot.shared.take_if(|shared| shared.connection() == Some(connection));
        drop(slots);
        drop((closed, shared));
    }
}
