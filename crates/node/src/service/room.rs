//! Room for instances that no client waits for: sandboxes, copies, what is made of checkpoints, and those
//! that wake for the control plane.
//!
//! Whoever boots one claims a place of the function first, and then takes room of its tenant and of the
//! node. A claim counts as an instance at once, so that several at a time never have more than there may
//! be. Where there is no room, idle instances of functions make some, by the rules that hold for
//! requests; sandboxes never do. It is waited for as long as something that ends, or falls asleep, gives
//! room back. If nothing does, or that takes too long, the new one is refused.

use super::{Service, Slot, Slots};
use crate::instance::Place;
use crate::tenants::Lease;
use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, sleep, timeout_at};

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
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            // From now on every place that is free counts.
            freed.as_mut().enable();
            let live = match self.claim_now(count, spared) {
                Room::Claimed(claims) => return Ok(claims),
                Room::None(live) => live,
                Room::Soon if timeout_at(deadline, freed).await.is_ok() => continue,
                Room::Soon => self.slots().count(),
            };
            let most = self.instances_max();
            return Err(format!(
                "`{}` may have {most} instances and has {live}, of which too few are idle; end some, or \
                 raise `instances` in [limits] of its thaw.toml",
                self.name()
            ));
        }
    }

    /// Claims them if there is room, or has as many idle instances end as that takes. None ends in
    /// vain.
    fn claim_now(self: &Arc<Self>, count: usize, spared: Option<u64>) -> Room {
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
        for id in spare.into_iter().take(missing.saturating_sub(are_ending)) {
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
        loop {
            if let Some(lease) = turn.try_lease() {
                return Ok(lease);
            }
            if !self.shared.make_room_beside_clients_of(&self.tenant, spared) {
                // It may have come a moment ago.
                return turn.try_lease().ok_or_else(full);
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
        loop {
            let is_coming = self.shared.make_room_beside_clients(spared);
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
mod tests {
    use super::*;
    use crate::asleep::AsleepSpace;
    use crate::boots::BootKind;
    use crate::config::FunctionConfig;
    use crate::instance::{
        Client, Connector, Decrypted, End, FrozenInstance, Instance, LaunchError, Launched,
        Launcher, Report, WakeError, Way,
    };
    use crate::node::NodeState;
    use crate::service::Reuse;
    use crate::service::asleep::Waking;
    use std::fs::File;
    use std::io;
    use std::os::unix::net::UnixStream;
    use std::sync::{Condvar, Mutex};
    use std::task::{Context, Poll};
    use thaw_abi::control::EntryPoint;
    use thaw_sandbox::{FreezeBase, RemoteMessage, ResourceLimits, Twin};
    use thaw_store::{ImageId, IndexId};

    /// How many boots have begun, and whether they may end.
    #[derive(Default)]
    struct Boots {
        state: Mutex<(usize, bool)>,
        changed: Condvar,
    }

    /// Boots that take as long as the test wants.
    #[derive(Clone, Default)]
    struct Slow(Arc<Boots>);

    impl Boots {
        fn wait_for(&self, is_so: impl Fn(&(usize, bool)) -> bool) {
            let state = self.state.lock().unwrap();
            drop(self.changed.wait_while(state, |state| !is_so(state)).unwrap());
        }

        async fn wait_for_the_first(self: &Arc<Self>) {
            let this = self.clone();
            let begun = move || this.wait_for(|(begun, _)| *begun == 1);
            tokio::task::spawn_blocking(begun).await.unwrap();
        }

        fn change(&self, change: impl FnOnce(&mut (usize, bool))) {
            change(&mut self.state.lock().unwrap());
            self.changed.notify_all();
        }
    }

    impl Launcher for Slow {
        fn launch(&self, _: Option<&Client>) -> Result<Launched, LaunchError> {
            self.0.change(|(begun, _)| *begun += 1);
            self.0.wait_for(|(_, may_end)| *may_end);
            let instance = Box::new(Idle(false));
            Ok(Launched { kind: BootKind::Warm, instance, zygote_ns: 0, execs: None })
        }

        fn is_ready(&self) -> bool {
            false
        }

        fn index(&self) -> Option<IndexId> {
            Some(IndexId([1; 32]))
        }

        fn waken(
            &self,
            _: File,
            _: ImageId,
            _: Option<&FreezeBase>,
            _: Vec<Arc<Client>>,
            _: Option<Decrypted>,
            _: ResourceLimits,
        ) -> Result<Arc<dyn Launcher>, WakeError> {
            Ok(Arc::new(self.clone()))
        }
    }

    /// An instance that does nothing until it is killed.
    struct Idle(bool);

    impl Connector for Idle {
        fn connect(&self, _: &Client) -> io::Result<()> {
            Ok(())
        }

        fn send_remote(
            &self,
            _: RemoteMessage,
            _: &[std::os::fd::BorrowedFd<'_>],
        ) -> io::Result<()> {
            Err(io::ErrorKind::Unsupported.into())
        }
    }

    impl Instance for Idle {
        fn pid(&self) -> u32 {
            1
        }

        fn connector(&self) -> Arc<dyn Connector> {
            Arc::new(Self(false))
        }

        fn ring_if_unread(&mut self) {}

        fn kill(&mut self) {
            self.0 = true;
        }

        /// Whoever kills it polls it again.
        fn poll_report(&mut self, _: &mut Context<'_>) -> Poll<Report> {
            match self.0 {
                true => Poll::Ready(Report::Gone(End::Killed(Some(9)))),
                false => Poll::Pending,
            }
        }

        fn request_rest(&mut self) -> io::Result<()> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn request_checkpoint(&mut self, _: Twin) -> io::Result<()> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn freeze(&mut self, _: EntryPoint) -> Result<FrozenInstance, String> {
            Err("it has no image".to_owned())
        }

        fn first_request_done(&mut self) {}
    }

    fn client() -> (Arc<Client>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let address = "127.0.0.1:1".parse().unwrap();
        let client = Client {
            id: 1,
            socket: ours.into(),
            peer: address,
            local: address,
            accepted_ns: 0,
            wants_head_only: false,
            way: Way::HandedOver,
            admitted: None,
            shared: std::sync::Weak::<()>::new(),
        };
        (Arc::new(client), theirs)
    }

    fn taken(service: &Service) -> (u32, usize, usize) {
        let instances = service.tenant.room().taken().instances;
        let free = service.shared.capacity().available_permits();
        (instances, free, service.slots().count())
    }

    async fn eventually(service: &Service, is_so: impl Fn() -> bool) {
        let until = Instant::now() + Duration::from_secs(60);
        while !is_so() {
            assert!(Instant::now() < until, "it never became true: {:?}", taken(service));
            tokio::task::yield_now().await;
        }
    }

    /// A service of a node for one instance, and its boots.
    fn served() -> (Arc<Service>, Arc<Boots>) {
        served_with(1, "")
    }

    /// A service with these limits, of a node for so many instances.
    fn served_with(instances: usize, limits: &str) -> (Arc<Service>, Arc<Boots>) {
        let node = NodeState::new(instances);
        let text = &format!(
            "name = \"slow\"\ncommand = [\"x\"]\nrootfs = \"./r\"\nport = 80\n\
             isolation = \"instance\"\n{limits}"
        );
        let config = FunctionConfig::parse("thaw.toml".as_ref(), text).unwrap();
        let launcher = Slow::default();
        let boots = launcher.0.clone();
        let service = Service::new(config, "image".into(), Arc::new(launcher), node.clone());
        node.install(service.clone());
        (service, boots)
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_boot_whose_client_has_gone_keeps_its_place() {
        let (service, boots) = served();
        let (client, theirs) = client();
        let asked = service.clone();
        let request = tokio::spawn(async move {
            asked.place(&client, Reuse::None, Box::new(|_, _| {})).await.is_ok()
        });
        boots.wait_for_the_first().await;
        // It is counted before it is there.
        assert_eq!((taken(&service), service.instance_count()), ((1, 0, 1), 0));
        request.abort();
        assert!(request.await.unwrap_err().is_cancelled());
        drop(theirs);
        assert_eq!((taken(&service), service.instance_count()), ((1, 0, 1), 0));
        boots.change(|(_, may_end)| *may_end = true);
        eventually(&service, || service.instance_count() == 1).await;
        assert_eq!(taken(&service), (1, 0, 1));
        service.kill_all();
        eventually(&service, || taken(&service) == (0, 1, 0)).await;
    }

    /// Those that come while the only instance is being made wait for its free places.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn clients_at_once_get_no_more_instances_than_there_may_be() {
        let (service, boots) = served_with(8, "[limits]\nconcurrency = 4\ninstances = 2\n");
        let mut sockets = Vec::new();
        let requests: Vec<_> = (0..8)
            .map(|_| {
                let (client, theirs) = client();
                sockets.push(theirs);
                let asked = service.clone();
                tokio::spawn(async move {
                    asked.place(&client, Reuse::None, Box::new(|_, _| {})).await.is_ok()
                })
            })
            .collect();
        eventually(&service, || service.permits.available_permits() == 0).await;
        boots.change(|(_, may_end)| *may_end = true);
        for request in requests {
            assert!(request.await.unwrap());
        }
        assert_eq!((boots.state.lock().unwrap().0, service.instance_count()), (2, 2));
        let connections: Vec<_> = service.slots().values().map(|slot| slot.connections).collect();
        assert_eq!(connections, [4, 4]);
        service.kill_all();
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_wake_whose_client_has_gone_keeps_its_place() {
        let directory = tempfile::tempdir().unwrap();
        let space = AsleepSpace::at(directory.path().to_owned());
        let (service, boots) = served();
        service.take_over_asleep(space.leave_one(7, service.name())).unwrap();
        assert_eq!(taken(&service), (0, 1, 1));
        let asked = service.clone();
        let wake = tokio::spawn(async move { asked.wake_if_asleep(Some(7)).await.is_ok() });
        boots.wait_for_the_first().await;
        wake.abort();
        assert!(wake.await.unwrap_err().is_cancelled());
        assert_eq!((taken(&service), service.asleep_count()), ((1, 0, 1), 1));
        // Nobody else boots it meanwhile.
        assert!(service.slots().asleep.begin_to_wake(Some(7)).is_none());
        boots.change(|(_, may_end)| *may_end = true);
        eventually(&service, || service.instance_count() == 1).await;
        assert_eq!((taken(&service), service.asleep_count()), ((1, 0, 1), 0));
        service.kill(7);
        eventually(&service, || taken(&service) == (0, 1, 0)).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn one_that_is_killed_while_it_wakes_ends() {
        let directory = tempfile::tempdir().unwrap();
        let space = AsleepSpace::at(directory.path().to_owned());
        let (service, boots) = served();
        service.hold(7);
        service.take_over_asleep(space.leave_one(7, service.name())).unwrap();
        let asked = service.clone();
        let wake = tokio::spawn(async move { asked.wake_if_asleep(Some(7)).await });
        boots.wait_for_the_first().await;
        service.kill(7);
        assert_eq!((service.asleep_count(), service.held_count()), (0, 0));
        // Its boot has a place until it is over.
        assert_eq!(taken(&service).0, 1);
        boots.change(|(_, may_end)| *may_end = true);
        wake.await.unwrap().unwrap_err();
        eventually(&service, || taken(&service) == (0, 1, 0)).await;
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        assert_eq!(service.shared.take_departures(), [7]);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn one_that_is_killed_while_it_waits_to_wake_is_not_booted() {
        let directory = tempfile::tempdir().unwrap();
        let space = AsleepSpace::at(directory.path().to_owned());
        let (service, boots) = served();
        service.take_over_asleep(space.leave_one(7, service.name())).unwrap();
        let asleep = service.slots().asleep.begin_to_wake(Some(7)).unwrap();
        let memory = service.memory_to_wake(&asleep);
        let waking = Waking::new(&service, asleep);
        let place = service.place_to_wake(memory).await.unwrap();
        service.kill(7);
        // Its rules and limits are forgotten by now.
        assert!(service.wake_up(waking, None, place).await.is_err());
        assert_eq!(boots.state.lock().unwrap().0, 0);
        assert_eq!(taken(&service), (0, 1, 0));
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn one_that_is_killed_while_it_waits_for_room_waits_no_longer() {
        let directory = tempfile::tempdir().unwrap();
        let space = AsleepSpace::at(directory.path().to_owned());
        let (service, boots) = served();
        service.take_over_asleep(space.leave_one(7, service.name())).unwrap();
        let place = service.place_to_wake(service.memory()).await.unwrap();
        // What is about to be free is waited for.
        place.lease.ending().announce(true);
        let asked = service.clone();
        let wake = tokio::spawn(async move { asked.wake_if_asleep(Some(7)).await });
        eventually(&service, || service.slots().asleep.is_waking(7)).await;
        service.kill(7);
        let why = wake.await.unwrap().unwrap_err();
        assert_eq!(why, "instance 7 was ended before it woke");
        assert_eq!(boots.state.lock().unwrap().0, 0);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn one_that_takes_no_client_just_after_it_woke_sleeps_on() {
        let directory = tempfile::tempdir().unwrap();
        let space = AsleepSpace::at(directory.path().to_owned());
        let (service, boots) = served();
        service.take_over_asleep(space.leave_one(7, service.name())).unwrap();
        boots.change(|(_, may_end)| *may_end = true);
        let asked = service.clone();
        let wake = tokio::spawn(async move { asked.wake_if_asleep(Some(7)).await });
        eventually(&service, || service.instance_count() == 1).await;
        service.end_unreachable(7, None);
        wake.await.unwrap().unwrap_err();
        eventually(&service, || taken(&service) == (0, 1, 1)).await;
        assert_eq!(service.asleep_count(), 1);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2);
    }
}
