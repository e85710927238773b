//! Instances that end for the room of others: their stop signal, and how long others wait for them.
//!
//! Whoever waits hears of everything that matters to it here: nobody looks again after a time.

mod common;

use common::{Guest, Node, Wire, eventually};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use thaw_home::config::Quotas;
use thaw_node::sandboxes::{NewSandbox, Sandboxes};

/// A grace that outlasts every test, and so does the wait of a request.
const LIMITS: &str = "[limits]\nqueue = \"55s\"\ngrace = \"60s\"\n";

fn answering(guest: &mut Guest) {
    while guest.request().is_some() {
        guest.answer("x");
    }
}

fn keys(limits: &str) -> String {
    format!("isolation = \"instance\"\n{LIMITS}{limits}\n")
}

fn count(node: &Node, function: &str) -> usize {
    let instances = node.services.instances();
    instances.iter().filter(|one| one.function.as_str() == function).count()
}

fn ask(node: &Node, host: &str) -> Wire {
    let mut wire = node.connect();
    wire.send(format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n"));
    wire
}

/// A node that runs at most so many instances.
fn node(instances: usize) -> Node {
    let node = Node::new(instances);
    // Longer than any request waits.
    node.shared.rely_on_coming_room_for(Duration::from_secs(3600));
    node
}

/// Serves a function that has so many instances, all idle.
fn idle(node: &Node, name: &str, limits: &str, count_wanted: usize) -> Arc<common::Threads> {
    idle_that(OnSignal::End, node, (name, limits), count_wanted)
}

/// The same with instances that ignore their stop signal.
fn stubborn(node: &Node, name: &str, limits: &str, count_wanted: usize) -> Arc<common::Threads> {
    idle_that(OnSignal::GoOn, node, (name, limits), count_wanted)
}

/// What instances do when they get their stop signal.
#[derive(PartialEq)]
enum OnSignal {
    End,
    GoOn,
}

fn idle_that(
    on_signal: OnSignal,
    node: &Node,
    (name, limits): (&str, &str),
    count_wanted: usize,
) -> Arc<common::Threads> {
    let open = Arc::new(AtomicBool::new(false));
    let opened = open.clone();
    let (_, threads) = node.serve(name, &keys(limits), move |guest| {
        while guest.request().is_some() {
            while !opened.load(Ordering::SeqCst) {
                thread::sleep(Duration::from_millis(2));
            }
            guest.answer("x");
        }
    });
    threads.ignores_signals.store(on_signal == OnSignal::GoOn, Ordering::SeqCst);
    let wires: Vec<_> = (0..count_wanted).map(|_| ask(node, name)).collect();
    eventually(|| count(node, name) == count_wanted);
    open.store(true, Ordering::SeqCst);
    for mut wire in wires {
        assert_eq!(wire.response().unwrap().status, 200);
    }
    eventually(|| node.services.instances().iter().all(|one| one.connections == 0));
    threads
}

fn signals(threads: &common::Threads) -> Vec<String> {
    threads.signals.lock().unwrap().iter().map(|(_, signal)| signal.clone()).collect()
}

#[test]
fn an_instance_that_ends_for_others_gets_its_stop_signal() {
    let node = node(2);
    let threads = idle(&node, "f", "keep_alive = \"1h\"\nstop_signal = \"SIGINT\"", 2);
    node.serve("g", &keys(""), answering);
    assert_eq!(node.connect().get("g", "/").status, 200);
    assert_eq!(signals(&threads), ["SIGINT"]);
    assert_eq!((count(&node, "f"), count(&node, "g")), (1, 1));
}

#[test]
fn one_that_has_no_grace_gets_no_signal() {
    let node = node(1);
    let keys = "isolation = \"instance\"\n[limits]\nkeep_alive = \"1h\"";
    let (_, threads) = node.serve("f", keys, answering);
    node.serve("g", keys, answering);
    for host in ["f", "g"] {
        assert_eq!(node.connect().get(host, "/").status, 200);
    }
    assert!(signals(&threads).is_empty());
    assert_eq!(count(&node, "f"), 0);
}

#[test]
fn nobody_waits_for_the_grace_of_a_program_that_ignores_its_signal_and_no_other_ends() {
    let node = node(3);
    let threads = stubborn(&node, "f", "keep_alive = \"1h\"", 2);
    // Instances become idle all the time, of which whoever waits hears.
    node.serve("g", &keys(""), answering);
    let done = Arc::new(AtomicBool::new(false));
    let (busy, until) = (node.connect(), done.clone());
    let stirring = thread::spawn(move || {
        let mut busy = busy;
        while !until.load(Ordering::SeqCst) {
            assert_eq!(busy.get("g", "/").status, 200);
        }
    });
    eventually(|| count(&node, "g") == 1);
    node.serve("h", &keys(""), answering);
    assert_eq!(node.connect().get("h", "/").status, 200);
    done.store(true, Ordering::SeqCst);
    stirring.join().unwrap();
    assert_eq!(signals(&threads), ["SIGTERM"]);
    assert_eq!((count(&node, "f"), count(&node, "h")), (1, 1));
}

#[test]
fn one_that_has_been_idle_for_too_long_ends_sooner_when_others_need_its_room() {
    let node = node(1);
    let threads = stubborn(&node, "f", "keep_alive = \"50ms\"", 1);
    eventually(|| signals(&threads).len() == 1);
    assert_eq!(count(&node, "f"), 1, "it has its grace");
    node.serve("g", &keys(""), answering);
    assert_eq!(node.connect().get("g", "/").status, 200);
    // It is not asked again.
    assert_eq!((signals(&threads).len(), count(&node, "f")), (1, 0));
}

#[test]
fn a_tenant_waits_for_the_grace_of_its_own_instances_no_longer() {
    for quota in ["instances = 2", "memory = \"512MiB\""] {
        let node = node(100);
        let quotas = Quotas::parse("tenants.toml".as_ref(), &format!("[shared]\n{quota}"));
        node.shared.tenants().set(quotas.unwrap());
        let threads = stubborn(&node, "f", "keep_alive = \"1h\"", 2);
        node.serve("g", &keys(""), answering);
        assert_eq!(node.connect().get("g", "/").status, 200);
        assert_eq!(signals(&threads), ["SIGTERM"], "{quota}");
        assert_eq!((count(&node, "f"), count(&node, "g")), (1, 1), "{quota}");
    }
}

#[test]
fn who_needs_the_room_of_two_in_their_grace_hurries_one_after_the_other() {
    let node = node(100);
    let quotas = Quotas::parse("tenants.toml".as_ref(), "[shared]\nmemory = \"512MiB\"");
    node.shared.tenants().set(quotas.unwrap());
    let threads = stubborn(&node, "f", "keep_alive = \"50ms\"", 2);
    eventually(|| signals(&threads).len() == 2);
    assert_eq!(count(&node, "f"), 2, "they have their grace");
    node.serve("g", &keys("memory = \"512MiB\""), answering);
    assert_eq!(node.connect().get("g", "/").status, 200);
    assert_eq!((signals(&threads).len(), count(&node, "f")), (2, 0));
}

#[test]
fn each_of_two_who_wait_hurries_another_one_in_its_grace() {
    let node = node(2);
    let threads = stubborn(&node, "f", "keep_alive = \"50ms\"", 2);
    eventually(|| signals(&threads).len() == 2);
    for name in ["g", "h"] {
        node.serve(name, &keys("keep_alive = \"1h\""), answering);
    }
    for mut wire in ["g", "h"].map(|name| ask(&node, name)) {
        assert_eq!(wire.response().unwrap().status, 200);
    }
    assert_eq!((count(&node, "f"), count(&node, "g"), count(&node, "h")), (0, 1, 1));
}

#[test]
fn sandboxes_wait_for_the_grace_of_idle_instances_no_longer() {
    for (function, instances) in [("box", 100), ("f", 1)] {
        let node = node(instances);
        let threads = stubborn(&node, function, "keep_alive = \"50ms\"\ninstances = 1", 1);
        if function != "box" {
            node.serve("box", &keys(""), answering);
        }
        eventually(|| signals(&threads).len() == 1);
        let home = tempfile::tempdir().unwrap();
        let sandboxes = Sandboxes::load(node.services.clone(), home.path()).unwrap();
        let new = NewSandbox { function: "box".to_owned(), ..NewSandbox::default() };
        // It waits for 10 s at most.
        node.runtime.block_on(sandboxes.create(new)).unwrap();
        assert_eq!((signals(&threads).len(), node.services.instances().len()), (1, 1));
    }
}

#[test]
fn an_instance_of_a_replaced_version_gets_its_signal_when_it_has_answered() {
    let node = node(10);
    let open = Arc::new(AtomicBool::new(false));
    let opened = open.clone();
    let (_, threads) = node.serve("f", &keys("keep_alive = \"1h\""), move |guest| {
        while guest.request().is_some() {
            while !opened.load(Ordering::SeqCst) {
                thread::sleep(Duration::from_millis(2));
            }
            guest.answer("x");
        }
    });
    let mut busy = ask(&node, "f");
    eventually(|| count(&node, "f") == 1);
    node.serve("f", &keys(""), answering);
    assert!(signals(&threads).is_empty());
    open.store(true, Ordering::SeqCst);
    assert_eq!(busy.response().unwrap().status, 200);
    eventually(|| signals(&threads) == ["SIGTERM"]);
}
