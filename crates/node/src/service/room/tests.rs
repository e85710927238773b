//! What is counted while instances are made, and who gets the room that others make.

use super::*;
use crate::asleep::AsleepSpace;
use crate::boots::BootKind;
use crate::instance::{
    Client, Connector, Decrypted, End, FrozenInstance, Instance, LaunchError, Launched, Launcher,
    Report, WakeError, Way,
};
use crate::node::NodeState;
use crate::remote::RemoteChannel;
use crate::service::asleep::Waking;
use crate::service::{Reuse, Services};
use std::fs::File;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Condvar, Mutex};
use std::task::{Context, Poll};
use thaw_abi::control::EntryPoint;
use thaw_home::config::FunctionConfig;
use thaw_sandbox::{FreezeBase, RemoteMessage, ResourceLimits, Twin};
use thaw_store::{ImageId, IndexId};
use tokio::task::JoinHandle;

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
}

impl RemoteChannel for Idle {
    fn send_remote(&self, _: RemoteMessage, _: &[std::os::fd::BorrowedFd<'_>]) -> io::Result<()> {
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
    serve_on(&Services::new(NodeState::new(1)), "slow")
}

/// Serves a function on a node.
fn serve_on(services: &Arc<Services>, name: &str) -> (Arc<Service>, Arc<Boots>) {
    serve_with(services, name, "")
}

/// The same with further limits.
fn serve_with(services: &Arc<Services>, name: &str, limits: &str) -> (Arc<Service>, Arc<Boots>) {
    let text = format!(
        "name = \"{name}\"\ncommand = [\"x\"]\nrootfs = \"./r\"\nport = 80\n\
         isolation = \"instance\"\n[limits]\nqueue = \"1h\"\n{limits}"
    );
    let config = FunctionConfig::parse("thaw.toml".as_ref(), &text).unwrap();
    let launcher = Slow::default();
    let boots = launcher.0.clone();
    let service = Service::new(config, "image".into(), Arc::new(launcher), services.clone());
    services.install(service.clone());
    (service, boots)
}

/// Serves a function on a node, whose boots end.
fn serve_at_once(services: &Arc<Services>, name: &str) -> Arc<Service> {
    let (service, boots) = serve_on(services, name);
    boots.change(|(_, may_end)| *may_end = true);
    service
}

/// A request, which has an instance or waits for room; it holds the instance.
async fn ask(service: &Arc<Service>) -> JoinHandle<bool> {
    let (asked, (client, theirs)) = (service.clone(), client());
    let request = tokio::spawn(async move {
        let placed = asked.place(&client, Reuse::None, Box::new(|_, _| {})).await;
        // Nobody sees this client go.
        std::mem::forget(theirs);
        placed.is_ok()
    });
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    request
}

/// Has so many instances, each with a request; their numbers.
async fn occupy(service: &Arc<Service>, count: usize) -> Vec<u64> {
    for _ in 0..count {
        assert!(ask(service).await.await.unwrap());
    }
    let ids: Vec<_> = service.slots().keys().copied().collect();
    assert_eq!(ids.len(), count);
    ids.iter().for_each(|id| service.came_up(*id));
    ids
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
    let (service, boots) =
        serve_with(&Services::new(NodeState::new(8)), "slow", "concurrency = 4\ninstances = 2\n");
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

/// All is in one thread: nothing happens between the two.
#[tokio::test]
async fn an_idle_instance_stays_where_room_comes_together_with_it() {
    // Who waits hears of both in an order of chance.
    for _ in 0..20 {
        let services = Services::new(NodeState::new(2));
        let (busy, wanting) =
            (serve_at_once(&services, "busy"), serve_at_once(&services, "wanting"));
        let taken = services.shared().capacity().try_acquire_owned().unwrap();
        let ids = occupy(&busy, 1).await;
        let request = ask(&wanting).await;
        assert!(!request.is_finished());
        busy.disconnected(ids[0]);
        drop(taken);
        assert!(request.await.unwrap());
        assert!(busy.slots()[&ids[0]].state.takes_connections(), "it was ended for nothing");
    }
}

#[tokio::test]
async fn who_has_made_room_for_another_one_hears_of_more() {
    let services = Services::new(NodeState::new(2));
    services.shared().rely_on_coming_room_for(Duration::from_secs(3600));
    let (busy, wanting) = (serve_at_once(&services, "busy"), serve_at_once(&services, "wanting"));
    let ids = occupy(&busy, 2).await;
    let first = ask(&wanting).await;
    // The first one does not hear of this one, which the second one ends. The room is the first one's.
    busy.slots().get_mut(&ids[0]).unwrap().disconnected();
    let second = ask(&wanting).await;
    assert!(first.await.unwrap() && !second.is_finished());
    busy.disconnected(ids[1]);
    let placed = tokio::time::timeout(Duration::from_secs(60), second).await;
    assert!(placed.expect("it relies on room that is gone").unwrap());
}
