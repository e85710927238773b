//! Finding an instance for a connection.

use super::asleep::Beginning;
use super::room::{Claim, Claimed};
use super::{Service, Slot};
use crate::boots::BootKind;
use crate::instance::{
    Change, Client, ConnectionTable, Delivery, Done, Inherited, InstanceNote, InstanceState,
    JoinedOrphan, LaunchError, Launched, NotNow, Place, Placed, Supervisor,
};
use crate::tenants::{Lease, Refused, Unmet};
use crate::upstream::{Shared, Upstream};
use std::future::pending;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};
use thaw_sandbox::Orphan;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::{Instant, sleep_until, timeout_at};

/// How long a boot waits for an instance that comes back, before it begins elsewhere.
const COMING_BACK_PATIENCE: Duration = Duration::from_millis(50);

/// Most requests of a version that wait until its image is unpacked.
pub(super) const WAITING_FOR_IMAGE_MAX: usize = 256;

/// Whether a connection could be placed at once.
pub enum Placement {
    /// An instance has it.
    Placed(Placed),
    /// It is not needed: there is one to an instance already. Nobody is told of its end.
    Idle(Upstream),
    /// It has to wait: for capacity, or for a zygote. Nobody is told of its end.
    Later,
    /// No instance could be booted. Nobody is told of its end.
    Failed(LaunchError),
}

/// What serves a connection.
pub(crate) enum Found {
    /// An instance has it.
    Placed(Placed),
    /// It is not needed: there is one to an instance already. Nobody is told of its end.
    Idle(Upstream),
}

/// Why no instance serves a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PlaceError {
    /// The instance has ended, or could not be booted; with the reason.
    InstanceDied(String),
    /// A part of the function could not be fetched; with the reason.
    NotFetched(String),
    /// An instance that is asleep cannot be booted; with the reason.
    CannotWake(String),
    /// Every instance is busy and no more may be started.
    NoCapacity {
        /// Which limit is reached.
        reason: String,
        /// When to try again.
        retry_after: Duration,
    },
    /// The function's tenant has used up a quota.
    QuotaReached {
        /// Which quota is reached.
        reason: String,
        /// When to try again.
        retry_after: Duration,
    },
    /// Instances of the function have crashed too often.
    BackingOff {
        /// When to try again.
        retry_after: Duration,
    },
    /// The node is going down.
    Draining,
}

/// How waiting has ended.
enum Waited<T> {
    /// An instance serves the connection.
    Found(Found),
    /// There is room for one more.
    Room(Delivery, T),
}

/// Whether another connection will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reuse {
    /// A request can go on any connection of the gateway's.
    Any,
    /// It has to be this one.
    None,
}

/// What makes room for somebody who waits. To end takes time, in which nothing else is to end for the
/// same one.
#[derive(Debug, Default)]
struct Coming {
    /// Until when it is waited for.
    until: Option<Instant>,
}

impl Coming {
    /// Something is about to make room, on which whoever waits relies for so long.
    fn begin(&mut self, patience: Duration) {
        self.until = Some(Instant::now() + patience);
    }

    fn is_awaited(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() < until)
    }

    /// Resolves when it has been waited for in vain; never if there is nothing.
    async fn in_vain(&mut self) {
        match self.until {
            Some(until) => sleep_until(until).await,
            None => pending().await,
        }
        self.until = None;
    }
}

/// A live instance with a free place, and how it is reached.
enum Free {
    Upstream(Upstream),
    Place { instance: u64, table: Arc<ConnectionTable>, crowded_out: Option<Upstream> },
}

impl Service {
    /// The fast path: gives the connection to an instance if that takes no
    /// waiting at all; `done` is told what became of it. Does no disk access and takes
    /// short locks.
    pub(crate) fn place_now(
        self: &Arc<Self>,
        client: &Arc<Client>,
        reuse: Reuse,
        done: Done,
    ) -> Placement {
        if self.shared.is_ending()
            || self.backs_off().is_some()
            || self.tenant.cpu().spent_for().is_some()
        {
            return Placement::Later;
        }
        let Ok(permit) = self.permits.clone().try_acquire_owned() else { return Placement::Later };
        let delivery = Delivery { client: client.clone(), permit, done };
        let delivery = match self.reuse(delivery, reuse) {
            Ok(Found::Placed(placed)) => return Placement::Placed(placed),
            Ok(Found::Idle(upstream)) => return Placement::Idle(upstream),
            Err(delivery) => delivery,
        };
        if !self.is_single_use() && self.asleep_count() > 0 {
            // To wake one takes reading its file.
            return Placement::Later;
        }
        let Ok(capacity) = self.shared.capacity().try_acquire_owned() else {
            return Placement::Later;
        };
        if !self.launcher.is_ready() {
            return Placement::Later;
        }
        let Some(claim) = self.claim_for_client() else { return Placement::Later };
        let Some(lease) = self.lease_now() else { return Placement::Later };
        let place = Claimed { claim, place: Place { _capacity: capacity, lease } };
        match self.launcher.launch_now(Some(client)) {
            Ok(launched) => Placement::Placed(self.adopt(launched, delivery, place)),
            Err(NotNow::WouldWait) => Placement::Later,
            Err(NotNow::Failed(error)) => Placement::Failed(error),
        }
    }

    /// The slow path: waits for capacity as long as the function allows; `done` is told
    /// what became of the connection.
    ///
    /// # Errors
    /// Why no instance has it.
    pub(crate) async fn place(
        self: &Arc<Self>,
        client: &Arc<Client>,
        reuse: Reuse,
        done: Done,
    ) -> Result<Found, PlaceError> {
        let deadline = Instant::now() + self.config.limits.queue.0;
        if self.shared.is_ending() {
            return Err(PlaceError::Draining);
        }
        if let Some(retry_after) = self.backs_off() {
            return Err(PlaceError::BackingOff { retry_after });
        }
        self.solvent()?;
        let Some(permit) = self.wait_for_place(deadline).await else {
            return Err(self.no_capacity(format!(
                "all {} instances are busy, {} connections each",
                self.config.limits.instances, self.config.limits.concurrency
            )));
        };
        let mut delivery = Delivery { client: client.clone(), permit, done };
        loop {
            self.wait_for_waking(deadline).await;
            let claim = match self.wait_for_claim(delivery, reuse, deadline).await? {
                Waited::Found(found) => return Ok(found),
                Waited::Room(unplaced, claim) => {
                    delivery = unplaced;
                    claim
                }
            };
            let lease = match self.wait_for_tenant(delivery, reuse, deadline).await? {
                Waited::Found(found) => return Ok(found),
                Waited::Room(unplaced, lease) => {
                    delivery = unplaced;
                    lease
                }
            };
            let capacity = match self.wait_for_node(delivery, reuse, deadline).await? {
                Waited::Found(found) => return Ok(found),
                Waited::Room(unplaced, capacity) => {
                    delivery = unplaced;
                    capacity
                }
            };
            // It may have been spent meanwhile.
            self.solvent()?;
            let mut place = Place { _capacity: capacity, lease };
            match (self.beginning(), claim) {
                (Beginning::Image, Some(claim)) => {
                    place.lease.shrink_to(self.memory());
                    self.wait_for_image().await?;
                    let placed = self.boot(delivery, Claimed { claim, place }).await;
                    return placed
                        .map(Found::Placed)
                        .map_err(|error| PlaceError::InstanceDied(error.to_string()));
                }
                // The one that was to be woken for it was woken for another one.
                (Beginning::Image, None) => drop(place),
                // Another one than that for which there is room: one was woken meanwhile.
                (Beginning::File(waking), _)
                    if place.lease.memory() < self.memory_to_wake(waking.asleep())
                        && Instant::now() < deadline =>
                {
                    drop((waking, place));
                    tokio::task::yield_now().await;
                }
                (Beginning::File(waking), claim) => {
                    // It counts already.
                    drop(claim);
                    return self.wake_up(waking, Some(delivery), place).await.map(Found::Placed);
                }
                (Beginning::Later, _) if tokio::time::Instant::now() >= deadline => {
                    return Err(self.no_capacity(
                        "instances that were asleep take too long to wake".to_owned(),
                    ));
                }
                // Whoever wakes them has to have a turn.
                (Beginning::Later, _) => tokio::task::yield_now().await,
            }
        }
    }

    /// Waits until an image is open that is packed. It is not waited for in a thread, and by a
    /// bounded number.
    async fn wait_for_image(&self) -> Result<(), PlaceError> {
        let Some(opening) = self.launcher.clone().opening() else { return Ok(()) };
        let Ok(_waiting) = self.waiting_for_image.try_acquire() else {
            return Err(self.no_capacity(format!(
                "{WAITING_FOR_IMAGE_MAX} requests wait until its image is unpacked"
            )));
        };
        opening.await.map_err(|error| PlaceError::InstanceDied(error.to_string()))
    }

    /// Boots an instance, in one that comes back if that does not take too long.
    async fn boot(
        self: &Arc<Self>,
        delivery: Delivery,
        place: Claimed,
    ) -> Result<Placed, LaunchError> {
        let patience = Instant::now() + COMING_BACK_PATIENCE;
        loop {
            let coming_back = self.launcher.coming_back();
            match self.launcher.launch_now(Some(&delivery.client)) {
                Ok(launched) => return Ok(self.adopt(launched, delivery, place)),
                Err(NotNow::Failed(error)) => return Err(error),
                Err(NotNow::WouldWait) => {}
            }
            let Some(coming_back) = coming_back else { break };
            if timeout_at(patience, coming_back).await.is_err() {
                break;
            }
        }
        // Making a zygote blocks. It goes on if the client goes away, and its place stays taken.
        let service = self.clone();
        let boot = move || {
            let launched = service.launcher.launch(Some(&delivery.client))?;
            Ok(service.adopt(launched, delivery, place))
        };
        tokio::task::spawn_blocking(boot).await.expect("a launcher does not panic")
    }

    /// Waits until the function may have one more instance, or one that it has gets a free place.
    /// Without a claim there is one that is asleep and can be woken. Only sandboxes can be in the way:
    /// instances of clients are bounded by their connections.
    async fn wait_for_claim(
        self: &Arc<Self>,
        mut delivery: Delivery,
        reuse: Reuse,
        deadline: Instant,
    ) -> Result<Waited<Option<Claim>>, PlaceError> {
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            // From now on every place that is free counts.
            freed.as_mut().enable();
            // That one counts already.
            if self.can_wake_one() {
                return Ok(Waited::Room(delivery, None));
            }
            if let Some(claim) = self.claim_for_client() {
                return Ok(Waited::Room(delivery, Some(claim)));
            }
            delivery = match self.reuse(delivery, reuse) {
                Ok(found) => return Ok(Waited::Found(found)),
                Err(delivery) => delivery,
            };
            if timeout_at(deadline, freed).await.is_err() {
                return Err(self.no_capacity(format!(
                    "it may have {} instances, which are sandboxes or busy",
                    self.config.limits.instances
                )));
            }
        }
    }

    /// Bytes of memory that an instance may use.
    pub(super) fn memory(&self) -> u64 {
        self.config.limits.memory.bytes()
    }

    /// Room of the tenant for one more instance, if that takes no waiting.
    fn lease_now(&self) -> Option<Lease> {
        let room = self.tenant.room();
        room.try_enter(self.memory()).or_else(|| self.launcher.spare_room())
    }

    /// Room of what is kept ready, unless more is needed: it has none for decrypted memory.
    fn spare_room(&self, memory: u64) -> Option<Lease> {
        if memory > self.memory() { None } else { self.launcher.spare_room() }
    }

    /// Refuses requests of a tenant that has spent its CPU time.
    fn solvent(&self) -> Result<(), PlaceError> {
        let Some(retry_after) = self.tenant.cpu().spent_for() else { return Ok(()) };
        let tenant = self.tenant.name();
        let quota = self.tenant.quota().cpu_time;
        let quota = quota.map_or(String::new(), |quota| format!(", {quota}"));
        let reason = format!("the CPU time of {tenant} is spent{quota}");
        Err(self.quota_reached(Refused::CpuTime, reason, retry_after))
    }

    /// Waits until the tenant may have one more instance, or one that it has gets a free
    /// place. Ends what the tenant has and nobody uses; holds nothing that others wait for.
    async fn wait_for_tenant(
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
            let is_coming = coming.is_awaited() && self.shared.is_room_coming_to(&self.tenant);
            if may_make_room && !is_coming && self.shared.make_room_of(&self.tenant) {
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
    async fn wait_for_node(
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
            if let Ok(capacity) = self.shared.capacity().try_acquire_owned() {
                return Ok(Waited::Room(delivery, capacity));
            }
            // Somebody else's idle instance may hold what is wanted here.
            if !coming.is_awaited() && self.shared.make_room() {
                coming.begin(self.shared.coming_patience());
            }
            tokio::select! {
                capacity = &mut room => {
                    let capacity = capacity.expect("the semaphore is never closed");
                    return Ok(Waited::Room(delivery, capacity));
                }
                () = changed => {}
                // Others hear of it who have nothing to wait for.
                () = idle, if !coming.is_awaited() => {}
                () = coming.in_vain() => {}
                () = sleep_until(deadline) => {
                    return Err(self.no_capacity(
                        "this node runs as many instances as it may".to_owned(),
                    ));
                }
            }
        }
    }

    /// Gives the connection to a live instance with a free place: the one that
    /// was used last, so that the others can end.
    fn reuse(self: &Arc<Self>, mut delivery: Delivery, reuse: Reuse) -> Result<Found, Delivery> {
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
    pub(crate) async fn place_at(
        &self,
        id: u64,
        client: &Arc<Client>,
        done: Done,
    ) -> Result<(), String> {
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

    /// Makes a launched instance, booted with a client's connection in it, one of the
    /// service's.
    fn adopt(
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
        let no = |what: &str| LaunchError(what.to_owned());
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
        let own = self.shared.egress().of(note.id, function.as_deref()).map_err(LaunchError)?;
        let limits = self.limits_of(note.id);
        let volumes = self.shared.own_volumes().all_of(note.id);
        let launcher = self.with_own_volumes(self.launcher.clone(), note.id, volumes);
        let launcher = launcher.map_err(LaunchError)?;
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
                Ok(streams) => execs.wake(&connector, Some(streams)),
                Err(error) => {
                    tracing::warn!(function = %self.name(), instance = id, "processes of a sandbox have no streams: {error}; raise the limit of open files");
                    execs.go_on_without(&connector);
                }
            }
            self.end_with(id, execs.all());
            watched.watch();
        }
        tokio::spawn(supervisor.run());
        joined.into_iter().for_each(join);
        Ok(())
    }

    fn quota_reached(&self, why: Refused, reason: String, retry_after: Duration) -> PlaceError {
        self.tenant.note_refused(why);
        PlaceError::QuotaReached { reason, retry_after }
    }

    fn no_capacity(&self, reason: String) -> PlaceError {
        PlaceError::NoCapacity {
            reason,
            retry_after: self.config.limits.queue.0.max(Duration::from_secs(1)),
        }
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
