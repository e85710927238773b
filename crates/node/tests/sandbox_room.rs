//! Room for sandboxes: how many there may be, who makes room for them, and for whom they do not.

mod common;

use common::{Guest, Node, Wire, eventually};
use rustix::time::{ClockId, clock_gettime};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use thaw_home::config::Quotas;
use thaw_node::instance::{End, Report};
use thaw_node::sandboxes::registry::versions_of_sandboxes;
use thaw_node::sandboxes::{NewSandbox, SandboxInfo, Sandboxes};
use tokio::task::JoinSet;

/// A function whose idle instances stay for long.
const KEPT: &str = "isolation = \"instance\"\n[limits]\nkeep_alive = \"1h\"\nqueue = \"100ms\"\n";
/// The same with a bound.
const THREE: &str =
    "isolation = \"instance\"\n[limits]\nkeep_alive = \"1h\"\nqueue = \"100ms\"\ninstances = 3\n";

fn answering(guest: &mut Guest) {
    while guest.request().is_some() {
        guest.answer("x");
    }
}

/// A node, and its sandboxes in a directory.
struct Place {
    node: Node,
    sandboxes: Arc<Sandboxes>,
    _home: tempfile::TempDir,
}

impl Place {
    fn new(instances: usize) -> Self {
        let node = Node::new(instances);
        let home = tempfile::tempdir().unwrap();
        let sandboxes = Sandboxes::load(node.services.clone(), home.path()).unwrap();
        Self { node, sandboxes, _home: home }
    }

    fn set(&self, quotas: &str) {
        let quotas = Quotas::parse("tenants.toml".as_ref(), quotas).unwrap();
        self.node.shared.tenants().set(quotas);
    }

    fn create(&self, function: &str) -> Result<SandboxInfo, String> {
        let new = NewSandbox { function: function.to_owned(), ..NewSandbox::default() };
        let made = self.node.runtime.block_on(self.sandboxes.create(new));
        made.map_err(|error| error.to_string())
    }

    /// Makes so many at a time; those there are, and why others are not.
    fn create_at_once(&self, function: &str, count: usize) -> (Vec<SandboxInfo>, Vec<String>) {
        self.node.runtime.block_on(async {
            let mut making = JoinSet::new();
            for _ in 0..count {
                let sandboxes = self.sandboxes.clone();
                let new = NewSandbox { function: function.to_owned(), ..NewSandbox::default() };
                making.spawn(async move { sandboxes.create(new).await });
            }
            let (mut made, mut refused) = (Vec::new(), Vec::new());
            while let Some(one) = making.join_next().await {
                match one.unwrap() {
                    Ok(info) => made.push(info),
                    Err(why) => refused.push(why.to_string()),
                }
            }
            (made, refused)
        })
    }

    /// Has a function hold so many instances, each with a client; they are idle without them.
    fn occupy(&self, function: &str, count: usize) -> Vec<Wire> {
        let ask = |_| {
            let mut wire = self.node.connect();
            wire.send(format!("GET / HTTP/1.1\r\nHost: {function}\r\n\r\n"));
            wire
        };
        (0..count).map(ask).collect()
    }

    fn count(&self, function: &str) -> usize {
        let instances = self.node.services.instances();
        instances.iter().filter(|one| one.function.as_str() == function).count()
    }

    fn live(&self) -> usize {
        self.node.services.instances().len()
    }
}

/// Has `count` instances of a function, all idle.
fn idle(place: &Place, function: &str, open: &Arc<AtomicBool>, count: usize) {
    open.store(false, Ordering::SeqCst);
    let wires = place.occupy(function, count);
    eventually(|| place.count(function) == count);
    open.store(true, Ordering::SeqCst);
    for mut wire in wires {
        assert_eq!(wire.response().unwrap().status, 200);
    }
    let is_idle = || {
        let instances = place.node.services.instances();
        instances.iter().all(|one| one.connections == 0)
    };
    eventually(is_idle);
}

fn gated(open: &Arc<AtomicBool>) -> impl Fn(&mut Guest) + Send + Sync + use<> {
    let open = open.clone();
    move |guest| {
        while guest.request().is_some() {
            let until = Instant::now() + common::PATIENCE;
            while !open.load(Ordering::SeqCst) && Instant::now() < until {
                thread::sleep(Duration::from_millis(2));
            }
            guest.answer("x");
        }
    }
}

/// What bounds the instances of a node to three.
#[derive(Clone, Copy, Debug)]
enum Bound {
    Function,
    Tenant,
    Memory,
    Node,
}

const BOUNDS: [Bound; 4] = [Bound::Function, Bound::Tenant, Bound::Memory, Bound::Node];

impl Bound {
    fn place(self) -> Place {
        let place = Place::new(if matches!(self, Self::Node) { 3 } else { 100 });
        match self {
            Self::Tenant => place.set("[shared]\ninstances = 3"),
            Self::Memory => place.set("[shared]\nmemory = \"768MiB\""),
            Self::Function | Self::Node => {}
        }
        place
    }

    fn keys(self) -> &'static str {
        if matches!(self, Self::Function) { THREE } else { KEPT }
    }

    /// What a refusal names.
    fn says(self) -> &'static str {
        match self {
            Self::Function => "`box` may have 3 instances",
            Self::Tenant => "is 3 instances",
            Self::Memory => "is 768MiB of memory",
            Self::Node => "this node runs as many instances as it may",
        }
    }
}

#[test]
fn sandboxes_that_are_made_at_once_are_as_many_as_there_may_be() {
    for bound in BOUNDS {
        let place = bound.place();
        place.node.serve("box", bound.keys(), answering);
        let (made, refused) = place.create_at_once("box", 12);
        assert_eq!((made.len(), refused.len(), place.live()), (3, 9, 3), "{bound:?}");
        for why in &refused {
            assert!(why.contains(bound.says()) && why.contains("end some"), "{bound:?}: {why}");
        }
        // One that is told to end makes room, which the next one waits for.
        place.sandboxes.kill(&made[0].name).unwrap();
        place.create("box").unwrap();
        place.create("box").unwrap_err();
        let names: Vec<_> = place.sandboxes.list().into_iter().map(|one| one.name).collect();
        assert!(made[1..].iter().all(|one| names.contains(&one.name)), "{bound:?}");
    }
}

#[test]
fn idle_instances_make_room_for_sandboxes_and_busy_ones_do_not() {
    for bound in BOUNDS {
        let place = bound.place();
        let open = Arc::new(AtomicBool::new(true));
        // At the bound of a function only its own can.
        let idle_one = if matches!(bound, Bound::Function) { "box" } else { "idle" };
        place.node.serve(idle_one, bound.keys(), gated(&open));
        if idle_one != "box" {
            place.node.serve("box", bound.keys(), answering);
        }
        idle(&place, idle_one, &open, 3);
        // One is busy from now on.
        open.store(false, Ordering::SeqCst);
        let mut busy = place.occupy(idle_one, 1);
        let is_busy = || place.node.services.instances().iter().any(|one| one.connections == 1);
        eventually(is_busy);
        let (made, refused) = place.create_at_once("box", 6);
        assert_eq!((made.len(), refused.len()), (2, 4), "{bound:?} {refused:?}");
        assert!(refused.iter().all(|why| why.contains(bound.says())), "{bound:?} {refused:?}");
        eventually(|| place.live() == 3);
        open.store(true, Ordering::SeqCst);
        assert_eq!(busy[0].response().unwrap().status, 200, "{bound:?}");
        // It is idle now, and makes room for the third.
        drop(busy);
        eventually(|| place.create("box").is_ok());
        assert_eq!(place.sandboxes.list().len(), 3, "{bound:?}");
    }
}

#[test]
fn an_instance_that_ends_too_late_is_not_relied_on() {
    for bound in BOUNDS {
        let place = bound.place();
        place.node.shared.rely_on_coming_room_for(Duration::from_millis(100));
        let open = Arc::new(AtomicBool::new(true));
        let idle_one = if matches!(bound, Bound::Function) { "box" } else { "idle" };
        let (service, _) = place.node.serve(idle_one, bound.keys(), gated(&open));
        if idle_one != "box" {
            place.node.serve("box", bound.keys(), answering);
        }
        idle(&place, idle_one, &open, 3);
        // Nobody tells it that it ends.
        let late = place.node.services.instances()[0].id;
        service.retire(late);
        place.create("box").unwrap_or_else(|why| panic!("{bound:?}: {why}"));
        assert!(place.node.services.instances().iter().any(|one| one.id == late), "{bound:?}");
    }
}

#[test]
fn who_waits_beside_sandboxes_hears_of_a_busy_instance_that_begins_to_end() {
    const TWO: &str = "isolation = \"instance\"\n[limits]\nqueue = \"1h\"\ninstances = 2\n";
    let place = Place::new(100);
    let open = Arc::new(AtomicBool::new(false));
    let (service, _) = place.node.serve("box", TWO, gated(&open));
    let sandbox = place.create("box").unwrap().instance;
    let busy = place.occupy("box", 1);
    let find = || {
        let instances = place.node.services.instances();
        instances.iter().find(|one| one.id != sandbox && one.connections == 1).map(|one| one.id)
    };
    eventually(|| find().is_some());
    let waiting = place.occupy("box", 1);
    // It waits by then, or there is nothing to hear.
    thread::sleep(Duration::from_millis(200));
    assert_eq!(place.count("box"), 2);
    service.retire(find().unwrap());
    eventually(|| place.count("box") == 3);
    open.store(true, Ordering::SeqCst);
    for mut wire in busy.into_iter().chain(waiting) {
        assert_eq!(wire.response().unwrap().status, 200);
    }
}

#[test]
fn nothing_idle_ends_in_vain() {
    let place = Bound::Function.place();
    let open = Arc::new(AtomicBool::new(true));
    let (service, _) = place.node.serve("box", THREE, gated(&open));
    idle(&place, "box", &open, 2);
    // More than there may be are not tried.
    let copies = std::num::NonZeroU32::new(4).unwrap();
    let launcher = service.launcher();
    let restored =
        place.node.runtime.block_on(service.restore((launcher, Vec::new()), copies, Vec::new()));
    assert!(restored.unwrap_err().contains("may have 3 instances and has 2"));
    assert_eq!(place.count("box"), 2);
    let two = std::num::NonZeroU32::new(2).unwrap();
    let restored = place.node.runtime.block_on(service.restore(
        (service.launcher(), Vec::new()),
        two,
        Vec::new(),
    ));
    assert_eq!(restored.unwrap().ids.len(), 2);
    eventually(|| place.count("box") == 3);
}

#[test]
fn sandboxes_end_for_no_request() {
    for bound in BOUNDS {
        let place = bound.place();
        place.node.serve("box", bound.keys(), answering);
        let (made, _) = place.create_at_once("box", 3);
        let refused = place.node.operator().get("box", "/");
        assert_eq!(refused.status, 503, "{bound:?}");
        assert_eq!((place.sandboxes.list().len(), place.live()), (3, 3), "{bound:?}");
        place.sandboxes.kill(&made[0].name).unwrap();
        eventually(|| place.node.operator().get("box", "/").status == 200);
        assert_eq!(place.sandboxes.list().len(), 2, "{bound:?}");
    }
}

#[test]
fn a_name_is_given_once() {
    let place = Place::new(100);
    let (_, launcher) = place.node.serve("box", KEPT, answering);
    let made: Vec<_> = place.node.runtime.block_on(async {
        let mut making = JoinSet::new();
        for _ in 0..8 {
            let sandboxes = place.sandboxes.clone();
            let new = NewSandbox {
                name: "one".to_owned(),
                function: "box".to_owned(),
                ..NewSandbox::default()
            };
            making.spawn(async move { sandboxes.create(new).await });
        }
        making.join_all().await
    });
    assert_eq!(made.iter().filter(|one| one.is_ok()).count(), 1);
    // None is booted that could not have its name.
    eventually(|| place.live() == 1);
    assert!(launcher.launched.load(Ordering::SeqCst) >= 1);
}

#[test]
fn only_so_many_wait_for_copies_of_an_instance() {
    /// One has it rest, and so many wait for that (`NEXT_MAX`).
    const WAITING: usize = 1 + 16;
    let place = Place::new(100);
    let (service, _) = place.node.serve("box", KEPT, answering);
    let made = place.create("box").unwrap();
    place.node.runtime.block_on(async {
        let mut copies = JoinSet::new();
        // Its instance never comes to rest.
        for _ in 0..WAITING + 3 {
            let service = service.clone();
            let one = std::num::NonZeroU32::MIN;
            copies.spawn(async move { service.fork(made.instance, one).await });
        }
        for _ in 0..3 {
            let refused = copies.join_next().await.unwrap().unwrap().unwrap_err();
            assert!(refused.contains("16 others wait for copies of it"), "{refused}");
        }
        assert!(copies.try_join_next().is_none());
        assert_eq!(copies.len(), WAITING);
        // All hear of its end.
        place.sandboxes.kill(&made.name).unwrap();
        while let Some(refused) = copies.join_next().await {
            let refused = refused.unwrap().unwrap_err();
            assert!(refused.contains("has ended"), "{refused}");
        }
    });
    eventually(|| place.live() == 0);
}

#[test]
fn sandboxes_that_have_ended_are_forgotten() {
    let place = Place::new(100);
    let (_, launcher) = place.node.serve("box", KEPT, answering);
    let watching = place.node.runtime.spawn(place.sandboxes.clone().watch());
    let (made, _) = place.create_at_once("box", 3);
    let known = || versions_of_sandboxes(place._home.path()).len();
    assert_eq!(known(), 3, "whoever has one finds it noted");
    // One ends by itself.
    for reports in launcher.reports.lock().unwrap().iter().take(1) {
        let exited = thaw_sandbox::GuestExit::Code(0);
        reports.send(Report::Gone(End::Exited(exited))).unwrap();
    }
    eventually(|| place.sandboxes.list().len() == 2);
    eventually(|| known() == 2);
    // All of a function that is gone.
    place.node.services.remove("box");
    eventually(|| known() == 0);
    assert!(place.sandboxes.find(&made[0].name).is_err());
    watching.abort();
}

/// Processor time of this process.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// `cargo test -p thaw-node --test sandbox_room -- --ignored --nocapture looking` says what it takes.
#[test]
#[ignore = "it measures"]
fn looking_at_many_sandboxes() {
    let place = Place::new(10_000);
    for number in 0..200 {
        let name = format!("function-{number}");
        let limits = "isolation = \"instance\"\n[limits]\ninstances = 5000\n";
        place.node.serve(&name, limits, answering);
    }
    for number in 0..2_000 {
        place.create(&format!("function-{}", number % 200)).unwrap();
    }
    let began = Instant::now();
    for _ in 0..10 {
        assert_eq!(place.sandboxes.list().len(), 2_000);
    }
    println!("a list of 2000 sandboxes of 200 functions takes {:?}", began.elapsed() / 10);
    // What the daemon does for them while nothing happens.
    let before = processor_time();
    let began = Instant::now();
    let watching = place.node.runtime.spawn(place.sandboxes.clone().watch());
    thread::sleep(Duration::from_secs(5));
    let (used, time) = (processor_time() - before, began.elapsed());
    watching.abort();
    println!("to watch them takes {used:?} of processor time in {time:?}");
    // As requests do, on a worker.
    let _entered = place.node.runtime.enter();
    let began = Instant::now();
    for one in place.sandboxes.list().into_iter().take(100) {
        place.sandboxes.kill(&one.name).unwrap();
    }
    println!("to end one of them takes {:?}", began.elapsed() / 100);
}
