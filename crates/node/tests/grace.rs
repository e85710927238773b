//! Instances that end for the room of others: their stop signal, and how long others wait for them.

mod common;

use common::{Guest, Node, Wire, eventually};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use thaw_node::config::Quotas;
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
    let instances = node.shared.instances();
    instances.iter().filter(|one| one.function.as_str() == function).count()
}

fn ask(node: &Node, host: &str) -> Wire {
    let mut wire = node.connect();
    wire.send(format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n"));
    wire
}

/// Serves a function that has so many instances, all idle.
fn idle(node: &Node, name: &str, limits: &str, count_wanted: usize) -> Arc<common::Threads> {
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
    let wires: Vec<_> = (0..count_wanted).map(|_| ask(node, name)).collect();
    eventually(|| count(node, name) == count_wanted);
    open.store(true, Ordering::SeqCst);
    for mut wire in wires {
        assert_eq!(wire.response().unwrap().status, 200);
    }
    eventually(|| node.shared.instances().iter().all(|one| one.connections == 0));
    threads
}

fn signals(threads: &common::Threads) -> Vec<String> {
    threads.signals.lock().unwrap().iter().map(|(_, signal)| signal.clone()).collect()
}

#[test]
fn an_instance_that_ends_for_others_gets_its_stop_signal() {
    let node = Node::new(2);
    let threads = idle(&node, "f", "keep_alive = \"1h\"\nstop_signal = \"SIGINT\"", 2);
    node.serve("g", &keys(""), answering);
    assert_eq!(node.connect().get("g", "/").status, 200);
    assert_eq!(signals(&threads), ["SIGINT"]);
    assert_eq!((count(&node, "f"), count(&node, "g")), (1, 1));
}

#[test]
fn one_that_has_no_grace_gets_no_signal() {
    let node = Node::new(1);
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
    let node = Node::new(3);
    let threads = idle(&node, "f", "keep_alive = \"1h\"", 2);
    threads.ignores_signals.store(true, Ordering::SeqCst);
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
    let node = Node::new(1);
    let threads = idle(&node, "f", "keep_alive = \"50ms\"", 1);
    threads.ignores_signals.store(true, Ordering::SeqCst);
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
        let node = Node::new(100);
        let quotas = Quotas::parse("tenants.toml".as_ref(), &format!("[shared]\n{quota}"));
        node.shared.tenants().set(quotas.unwrap());
        let threads = idle(&node, "f", "keep_alive = \"1h\"", 2);
        threads.ignores_signals.store(true, Ordering::SeqCst);
        node.serve("g", &keys(""), answering);
        assert_eq!(node.connect().get("g", "/").status, 200);
        assert_eq!(signals(&threads), ["SIGTERM"], "{quota}");
        assert_eq!((count(&node, "f"), count(&node, "g")), (1, 1), "{quota}");
    }
}

#[test]
fn sandboxes_wait_for_the_grace_of_idle_instances_no_longer() {
    for (function, instances) in [("box", 100), ("f", 1)] {
        let node = Node::new(instances);
        let threads = idle(&node, function, "keep_alive = \"50ms\"\ninstances = 1", 1);
        threads.ignores_signals.store(true, Ordering::SeqCst);
        if function != "box" {
            node.serve("box", &keys(""), answering);
        }
        eventually(|| signals(&threads).len() == 1);
        let home = tempfile::tempdir().unwrap();
        let sandboxes = Sandboxes::load(node.shared.clone(), home.path()).unwrap();
        let new = NewSandbox { function: "box".to_owned(), ..NewSandbox::default() };
        // It waits for 10 s at most.
        node.runtime.block_on(sandboxes.create(new)).unwrap();
        assert_eq!((signals(&threads).len(), node.shared.instances().len()), (1, 1));
    }
}

#[test]
fn an_instance_of_a_replaced_version_gets_its_signal_when_it_has_answered() {
    let node = Node::new(10);
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
