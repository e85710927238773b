//! Tenants at their quotas, over the real gateway with instances that are threads.

mod common;

use common::{Guest, Node, PATIENCE, Response, Threads, Wire, eventually};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use thaw_home::config::Quotas;
use thaw_node::asleep::AsleepSpace;

/// Instances that serve one request after the other.
const KEPT: &str = "isolation = \"instance\"";

fn set(node: &Node, quotas: &str) {
    node.shared.tenants().set(Quotas::parse("tenants.toml".as_ref(), quotas).unwrap());
}

/// The keys of a function of this domain.
fn of(domain: &str, keys: &str, limits: &str) -> String {
    format!("{keys}\n[sharing]\ndomain = \"{domain}\"\n[limits]\n{limits}")
}

/// A program whose answers wait for a signal.
fn gated(open: &Arc<AtomicBool>) -> impl Fn(&mut Guest) + Send + Sync + use<> {
    let open = open.clone();
    move |guest| {
        while guest.request().is_some() {
            let until = Instant::now() + PATIENCE;
            while !open.load(Ordering::SeqCst) && Instant::now() < until {
                thread::sleep(Duration::from_millis(2));
            }
            guest.answer("x");
        }
    }
}

fn answering(guest: &mut Guest) {
    while guest.request().is_some() {
        guest.answer("x");
    }
}

/// Sends a request of the operator's whose answer, which is read later, says what went wrong.
fn ask(node: &Node, host: &str) -> Wire {
    let mut wire = node.operator();
    wire.send(format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n"));
    wire
}

fn reason(response: &Response) -> String {
    let body: serde_json::Value = serde_json::from_slice(&response.body).unwrap();
    body["reason"].as_str().unwrap().to_owned()
}

fn taken(node: &Node, domain: &str) -> u32 {
    let all = node.shared.tenants().all();
    let tenant = all.iter().find(|tenant| tenant.name().label() == domain).unwrap();
    tenant.room().taken().instances
}

#[test]
fn a_tenant_at_its_bound_waits_for_itself_and_the_others_are_served_at_once() {
    let node = Node::new(100);
    set(&node, "[domain.full]\ninstances = 2");
    let open = Arc::new(AtomicBool::new(false));
    let limits = "queue = \"60s\"";
    // Two functions of one tenant, which have the two places together.
    let (_, one) = node.serve("one", &of("full", "", limits), gated(&open));
    let (_, two) = node.serve("two", &of("full", "", limits), gated(&open));
    node.serve("other", &of("free", "", limits), answering);
    node.serve("without", "", answering);
    let busy = [ask(&node, "one"), ask(&node, "two")];
    eventually(|| taken(&node, "full") == 2);
    let waiting: Vec<Wire> = (0..20).map(|_| ask(&node, "two")).collect();
    eventually(|| {
        let all = node.shared.tenants().all();
        all.iter().any(|tenant| tenant.room().waiting() == 20)
    });
    for name in ["other", "without"] {
        assert_eq!(node.connect().get(name, "/").status, 200);
    }
    let launched = one.launched.load(Ordering::SeqCst) + two.launched.load(Ordering::SeqCst);
    assert_eq!(launched, 2, "more instances than there may be");
    open.store(true, Ordering::SeqCst);
    for mut wire in busy.into_iter().chain(waiting) {
        assert_eq!(wire.response().unwrap().status, 200);
    }
    eventually(|| taken(&node, "full") == 0);
}

#[test]
fn a_tenant_that_waits_takes_no_room_from_others() {
    let node = Node::new(2);
    set(&node, "[domain.full]\ninstances = 1");
    let open = Arc::new(AtomicBool::new(false));
    node.serve("full", &of("full", "", "queue = \"60s\""), gated(&open));
    node.serve("other", &of("free", "", "queue = \"10s\""), answering);
    let mut busy = ask(&node, "full");
    eventually(|| taken(&node, "full") == 1);
    let waiting: Vec<Wire> = (0..10).map(|_| ask(&node, "full")).collect();
    eventually(|| node.shared.tenants().all().iter().any(|tenant| tenant.room().waiting() == 10));
    for _ in 0..20 {
        assert_eq!(node.connect().get("other", "/").status, 200);
    }
    open.store(true, Ordering::SeqCst);
    assert_eq!(busy.response().unwrap().status, 200);
    for mut wire in waiting {
        assert_eq!(wire.response().unwrap().status, 200);
    }
}

#[test]
fn who_waits_for_too_long_hears_which_quota_is_reached() {
    let node = Node::new(100);
    set(&node, "[domain.a]\ninstances = 1\n[domain.b]\nmemory = \"100MiB\"");
    let open = Arc::new(AtomicBool::new(false));
    let limits = "queue = \"100ms\"\nmemory = \"60MiB\"";
    for domain in ["a", "b"] {
        node.serve(domain, &of(domain, "", limits), gated(&open));
    }
    let busy = ["a", "b"].map(|name| ask(&node, name));
    eventually(|| taken(&node, "a") == 1 && taken(&node, "b") == 1);
    for (name, expected) in [("a", "is 1 instance"), ("b", "is 100MiB of memory")] {
        let refused = node.operator().get(name, "/");
        assert_eq!((refused.status, refused.error().as_str()), (503, "quota_reached"));
        let reason = reason(&refused);
        assert!(reason.contains(&format!("domain `{name}` {expected}")), "{reason}");
        assert!(refused.head.contains("Retry-After: 1\r\n"), "{}", refused.head);
    }
    open.store(true, Ordering::SeqCst);
    for mut wire in busy {
        assert_eq!(wire.response().unwrap().status, 200);
    }
    // An instance ends after its answer has come.
    eventually(|| taken(&node, "b") == 0);
    assert_eq!(node.connect().get("b", "/").status, 200);
}

#[test]
fn an_instance_that_never_fits_is_refused_at_once() {
    let node = Node::new(100);
    set(&node, "[default]\nmemory = \"100MiB\"\n[domain.none]\ninstances = 0");
    let limits = "queue = \"60s\"\nmemory = \"101MiB\"";
    node.serve("large", &of("a", "", limits), answering);
    node.serve("never", &of("none", "", "queue = \"60s\"\nmemory = \"8MiB\""), answering);
    for (name, expected) in [("large", "may use 101MiB"), ("never", "is 0 instances")] {
        let begun = Instant::now();
        let refused = node.operator().get(name, "/");
        assert_eq!((refused.status, refused.error().as_str()), (503, "quota_reached"));
        assert!(reason(&refused).contains(expected), "{}", reason(&refused));
        assert!(begun.elapsed() < PATIENCE, "it has waited for nothing");
    }
}

#[test]
fn a_tenant_at_its_bound_ends_its_own_idle_instance_and_nobody_elses() {
    let node = Node::new(100);
    set(&node, "[domain.full]\ninstances = 1");
    let limits = "queue = \"15s\"\nkeep_alive = \"60s\"";
    node.serve("f", &of("full", KEPT, limits), answering);
    node.serve("g", &of("full", KEPT, limits), answering);
    // Has been idle for longer.
    node.serve("other", &of("free", KEPT, limits), answering);
    assert_eq!(node.connect().get("other", "/").status, 200);
    for name in ["f", "g", "f", "g"] {
        assert_eq!(node.connect().get(name, "/").status, 200);
        let instances = node.services.instances();
        assert!(instances.iter().any(|instance| instance.function.as_str() == "other"));
    }
    eventually(|| node.services.instances().len() == 2);
}

/// A node whose tenant may have one instance, of a function that sleeps or of another one; with the
/// launcher of the first, and the directory of those that sleep.
fn sleeper_and_other() -> (Node, Arc<Threads>, tempfile::TempDir) {
    let node = Node::new(100);
    let directory = tempfile::tempdir().unwrap();
    node.shared.sleep_in(AsleepSpace::at(directory.path().to_owned()));
    set(&node, "[domain.full]\ninstances = 1");
    let limits = "queue = \"30s\"\nkeep_alive = \"60s\"";
    let sleeps = format!("{limits}\nsleep_after = \"50s\"");
    let (_, threads) = node.serve("sleeper", &of("full", KEPT, &sleeps), answering);
    node.serve("other", &of("full", KEPT, limits), answering);
    (node, threads, directory)
}

#[test]
fn an_instance_that_never_comes_to_rest_keeps_nobody_elses_room() {
    let (node, _threads, _directory) = sleeper_and_other();
    assert_eq!(node.connect().get("sleeper", "/").status, 200);
    assert_eq!(node.connect().get("other", "/").status, 200);
    let instances = node.services.instances();
    assert!(instances.iter().all(|instance| instance.function.as_str() == "other"));
}

/// It has answered before the node heard that it is booted, as on a busy machine.
#[test]
fn an_instance_that_is_booted_after_its_answer_makes_room() {
    let (node, threads, _directory) = sleeper_and_other();
    threads.boots_in_silence.store(true, Ordering::SeqCst);
    assert_eq!(node.connect().get("sleeper", "/").status, 200);
    let mut other = ask(&node, "other");
    eventually(|| node.shared.tenants().all().iter().any(|tenant| tenant.room().waiting() == 1));
    threads.report_boots();
    assert_eq!(other.response().unwrap().status, 200);
}

/// Whoever waits for its room goes on waiting, and does not look for it again and again.
#[test]
fn an_instance_that_is_about_to_end_is_idle_to_nobody() {
    let node = Node::new(100);
    set(&node, "[domain.full]\ninstances = 1");
    let open = Arc::new(AtomicBool::new(false));
    let (service, _) = node.serve("f", &of("full", KEPT, "keep_alive = \"60s\""), gated(&open));
    node.serve("g", &of("full", KEPT, "queue = \"200ms\""), answering);
    let mut first = ask(&node, "f");
    eventually(|| node.services.instances().iter().any(|instance| instance.connections == 1));
    service.retire(node.services.instances()[0].id);
    open.store(true, Ordering::SeqCst);
    assert_eq!(first.response().unwrap().status, 200);
    eventually(|| node.services.instances()[0].connections == 0);
    assert_eq!(node.connect().get("g", "/").status, 503);
}

#[test]
fn who_waits_hears_of_an_instance_of_the_tenant_that_becomes_idle() {
    let node = Node::new(100);
    set(&node, "[domain.full]\ninstances = 1");
    let open = Arc::new(AtomicBool::new(false));
    // Nobody looks again before the time is over, and then the request is refused.
    let limits = "queue = \"50s\"\nkeep_alive = \"1h\"";
    for name in ["f", "g"] {
        node.serve(name, &of("full", KEPT, limits), gated(&open));
    }
    for (busy, waits) in [("f", "g"), ("g", "f")] {
        open.store(false, Ordering::SeqCst);
        let mut first = ask(&node, busy);
        eventually(|| node.services.instances().iter().any(|instance| instance.connections == 1));
        let mut second = ask(&node, waits);
        eventually(|| {
            node.shared.tenants().all().iter().any(|tenant| tenant.room().waiting() == 1)
        });
        open.store(true, Ordering::SeqCst);
        assert_eq!(first.response().unwrap().status, 200);
        assert_eq!(second.response().unwrap().status, 200);
    }
}

#[test]
fn a_busy_tenant_does_not_starve_a_large_function_of_its_own() {
    let node = Node::new(100);
    set(&node, "[domain.a]\nmemory = \"32MiB\"");
    let small = of("a", "", "queue = \"60s\"\nmemory = \"8MiB\"");
    node.serve("small", &small, |guest| {
        guest.request();
        thread::sleep(Duration::from_millis(5));
        guest.answer("x");
    });
    node.serve("large", &of("a", "", "queue = \"20s\"\nmemory = \"32MiB\""), answering);
    let done = Arc::new(AtomicBool::new(false));
    let floods: Vec<_> = (0..12)
        .map(|_| {
            let (address, done) = (node.address, done.clone());
            thread::spawn(move || {
                while !done.load(Ordering::SeqCst) {
                    assert_eq!(Wire::connect(address).get("small", "/").status, 200);
                }
            })
        })
        .collect();
    for _ in 0..3 {
        assert_eq!(node.connect().get("large", "/").status, 200);
    }
    done.store(true, Ordering::SeqCst);
    floods.into_iter().for_each(|flood| flood.join().unwrap());
    eventually(|| taken(&node, "a") == 0);
}

#[test]
fn quotas_change_while_requests_wait() {
    let node = Node::new(100);
    set(&node, "[domain.a]\ninstances = 0");
    let open = Arc::new(AtomicBool::new(false));
    node.serve("f", &of("a", "", "queue = \"60s\""), gated(&open));
    assert_eq!(node.connect().get("f", "/").status, 503);
    set(&node, "[domain.a]\ninstances = 1");
    let mut first = ask(&node, "f");
    eventually(|| taken(&node, "a") == 1);
    let mut second = ask(&node, "f");
    eventually(|| node.shared.tenants().all().iter().any(|tenant| tenant.room().waiting() == 1));
    set(&node, "[domain.a]\ninstances = 2");
    eventually(|| taken(&node, "a") == 2);
    open.store(true, Ordering::SeqCst);
    assert_eq!(first.response().unwrap().status, 200);
    assert_eq!(second.response().unwrap().status, 200);
}

#[test]
fn a_quota_that_is_lowered_ends_as_many_idle_instances_as_it_takes() {
    let node = Node::new(100);
    let open = Arc::new(AtomicBool::new(false));
    let limits = "queue = \"60s\"\nkeep_alive = \"60s\"\nmemory = \"10MiB\"";
    let (service, _) = node.serve("f", &of("a", KEPT, limits), gated(&open));
    let asked: Vec<Wire> = (0..5).map(|_| ask(&node, "f")).collect();
    eventually(|| taken(&node, "a") == 5);
    open.store(true, Ordering::SeqCst);
    for mut wire in asked {
        assert_eq!(wire.response().unwrap().status, 200);
    }
    eventually(|| node.services.instances().iter().all(|instance| instance.connections == 0));
    set(&node, "[domain.a]\nmemory = \"35MiB\"");
    node.services.shrink_to_quotas();
    eventually(|| taken(&node, "a") == 3);
    assert_eq!(service.instance_count(), 3);
    // What is left serves, and what there is no room for is not made.
    assert_eq!(node.connect().get("f", "/").status, 200);
    assert_eq!(service.instance_count(), 3);
}

#[test]
fn clients_that_go_away_leave_the_line() {
    let node = Node::new(100);
    set(&node, "[domain.a]\ninstances = 1");
    let open = Arc::new(AtomicBool::new(false));
    node.serve("f", &of("a", "", "queue = \"100ms\""), gated(&open));
    let mut busy = ask(&node, "f");
    eventually(|| taken(&node, "a") == 1);
    let waiting: Vec<Wire> = (0..50).map(|_| ask(&node, "f")).collect();
    for mut wire in waiting {
        assert_eq!(wire.response().unwrap().status, 503);
    }
    let all = node.shared.tenants().all();
    assert!(all.iter().all(|tenant| tenant.room().waiting() == 0));
    open.store(true, Ordering::SeqCst);
    assert_eq!(busy.response().unwrap().status, 200);
    eventually(|| taken(&node, "a") == 0);
    assert_eq!(node.connect().get("f", "/").status, 200);
}

#[test]
fn a_tenant_without_cpu_time_is_refused_until_its_period_turns() {
    let node = Node::new(100);
    let keys = of("a", KEPT, "queue = \"60s\"\nkeep_alive = \"60s\"");
    node.serve("f", &keys, answering);
    node.serve("other", "", answering);
    let mut kept = node.operator();
    assert_eq!(kept.get("f", "/").status, 200);
    set(&node, "[domain.a]\ncpu_time = \"0s per 1h\"");
    // Neither a new client, nor one whose instance is there.
    for refused in [node.operator().get("f", "/"), kept.get("f", "/")] {
        assert_eq!((refused.status, refused.error().as_str()), (503, "quota_reached"));
        let reason = reason(&refused);
        assert!(reason.contains("CPU time of domain `a` is spent, 0s per 1h"), "{reason}");
        let retry = common::field(&refused.head, "retry-after").unwrap();
        assert!((3500..=3600).contains(&retry.parse::<u64>().unwrap()), "{retry}");
    }
    assert_eq!(node.connect().get("other", "/").status, 200);
    set(&node, "");
    assert_eq!(node.connect().get("f", "/").status, 200);
}
