//! Making an instance one of the service's: one that was just launched, or that an earlier daemon has
//! booted.

use super::room::Claimed;
use super::supervisor::Supervisor;
use super::{Service, Slot};
use crate::boots::BootKind;
use crate::instance::{
    Change, Client, ConnectionTable, Delivery, Done, Inherited, InstanceNote, InstanceState,
    JoinedOrphan, LaunchError, Launched, Place, Placed,
};
use crate::tenants::Lease;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};
use thaw_sandbox::Orphan;
use tokio::sync::mpsc;

impl Service {
    /// Makes a launched instance, booted with a client's connection in it, one of the
    /// service's.
    pub(super) fn adopt(
        self: &Arc<Self>,
        launched: Launched,
        first: Delivery,
        Claimed { claim, place }: Claimed,
    ) -> Placed {
        let id = self.shared.next_instance();
        let placed = Placed { instance: id, waited: launched.kind == BootKind::Ready };
        let (commands, receiver) = mpsc::unbounded_channel();
        let instance = &launched.instance;
        let table = Arc::new(ConnectionTable::new(instance.connector(), commands, &self.config));
        let slot = Slot {
            state: InstanceState::Booting,
            connections: 1,
            table: table.clone(),
            pid: instance.pid(),
            started: std::time::Instant::now(),
            served: 0,
            idle_since: None,
            upstreams: Vec::new(),
            shared: None,
            was_full: false,
            ending: place.lease.ending(),
            is_unwanted: false,
            is_lost: false,
        };
        let client = first.client.clone();
        table.adopt(first, placed);
        let supervisor =
            Supervisor::new(id, self.clone(), launched, receiver, table, &client, place);
        let mut slots = self.slots();
        slots.insert(id, slot);
        // Whoever gives the first request up finds the instance.
        if let Some(slot) = slots.get_mut(&id) {
            slot.shared = self.share(&client, id);
        }
        slots.perhaps_free.insert(id);
        claim.becomes_instance(&mut slots);
        drop(slots);
        if self.config.limits.concurrency.get() > 1 {
            self.places_came();
        }
        self.connected.booted.inc();
        tokio::spawn(supervisor.run());
        placed
    }

    /// Takes over an instance that an earlier daemon has booted from the same image, with the
    /// connections that it has. `attend` says who is told what becomes of one that was handed over,
    /// and `join` copies the bytes of another.
    ///
    /// # Errors
    /// There is no room for it, or it has ended; it is ended then.
    pub(crate) fn take_over(
        self: &Arc<Self>,
        note: &InstanceNote,
        lease: Lease,
        orphan: Orphan,
        connections: Vec<Inherited>,
        (attend, join): (impl Fn(Arc<Client>) -> Done, impl Fn(JoinedOrphan)),
    ) -> Result<(), LaunchError> {
        let no = |what: &str| LaunchError::Failed(what.to_owned());
        let is_sandbox = self.slots().held.contains(&note.id);
        if self.is_single_use() && !is_sandbox && connections.is_empty() {
            return Err(no("its only connection ended with its daemon"));
        }
        let capacity = self.shared.capacity().try_acquire_owned();
        let capacity = capacity.map_err(|_| no("this node runs as many instances as it may"))?;
        let permit = |_: &Inherited| self.permits.clone().try_acquire_owned().ok();
        let permits: Option<Vec<_>> = connections.iter().map(permit).collect();
        let permits = permits.ok_or_else(|| no("its function serves as many as it may"))?;
        // It was restored from a checkpoint of other files.
        if note.origin.index.is_some_and(|index| self.launcher.index() != Some(index)) {
            return Err(no("its files are not those of its function"));
        }
        let function = self.launcher.egress();
        let own =
            self.shared.egress().of(note.id, function.as_deref()).map_err(LaunchError::Failed)?;
        let limits = self.limits_of(note.id);
        let volumes = self.shared.own_volumes().all_of(note.id);
        let launcher = self.with_own_volumes(self.launcher.clone(), note.id, volumes);
        let launcher = launcher.map_err(LaunchError::Failed)?;
        let instance = launcher.take_over(orphan, note.origin.image, own.as_ref(), limits)?;
        // Its daemon was killed when it had just woken, and its files were left.
        self.end_asleep(note.id);
        self.shared.end_left(note.id);

        let id = note.id;
        let placed = Placed { instance: id, waited: false };
        let (commands, receiver) = mpsc::unbounded_channel();
        let connector = instance.connector();
        let table = ConnectionTable::new(connector.clone(), commands, &self.config);
        let left = self.shared.take_left_execs(id).map(|left| self.left_execs(&left));
        let goes_on = left.is_some() || connector.can_have_execs_go_on();
        let execs = left.unwrap_or_default();
        let table = Arc::new(table.with_execs(execs.clone()));
        let watched = table.clone();
        let booted = UNIX_EPOCH.checked_add(Duration::from_millis(note.booted_ms));
        let age = booted.and_then(|booted| booted.elapsed().ok()).unwrap_or_default();
        let now = std::time::Instant::now();
        let count = u32::try_from(connections.len()).unwrap_or(u32::MAX);
        let loaded = InstanceState::Booting.after(Change::Booted { connections: count });
        let slot = Slot {
            state: loaded,
            connections: count,
            table: table.clone(),
            pid: instance.pid(),
            started: now.checked_sub(age).unwrap_or(now),
            served: 0,
            idle_since: (count == 0).then_some(now),
            upstreams: Vec::new(),
            shared: None,
            was_full: false,
            ending: lease.ending(),
            is_unwanted: false,
            is_lost: false,
        };
        let mut joined = Vec::new();
        for (inherited, permit) in connections.into_iter().zip(permits) {
            match inherited {
                Inherited::HandedOver(client, kept) => {
                    let done = attend(client.clone());
                    table.inherit(Delivery { client, permit, done }, placed, kept);
                }
                Inherited::Joined(orphan) => {
                    table.inherit_joined(&orphan, permit, placed);
                    joined.push(orphan);
                }
            }
        }
        let place = Place { _capacity: capacity, lease };
        let supervisor = Supervisor::adopted(id, self.clone(), instance, receiver, table, place);
        let mut slots = self.slots();
        slots.insert(id, slot);
        slots.perhaps_free.insert(id);
        if is_sandbox {
            // Its file was ended above, and with it that it is one.
            slots.hold(id);
        }
        drop(slots);
        if goes_on {
            // Nothing waits in vain, also if there was a daemon in between that was killed.
            match execs.new_streams() {
                Ok(streams) => execs.wake(connector.clone(), Some(streams)),
                Err(error) => {
                    tracing::warn!(function = %self.name(), instance = id, "processes of a sandbox have no streams: {error}; raise the limit of open files");
                    execs.go_on_without(&*connector);
                }
            }
            self.end_with(id, execs.all());
            watched.watch();
        }
        tokio::spawn(supervisor.run());
        joined.into_iter().for_each(join);
        Ok(())
    }
}
