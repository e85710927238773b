//! Liveness probes: which instances are asked, and which of them end.

mod common;

use common::{Guest, Node, Threads, eventually};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;
use thaw_node::instance::{HibernatedInstance, InstanceState, Report};
use thaw_node::service::Service;

const LIVENESS: &str = "isolation = \"instance\"\n\
    [liveness]\npath = \"/healthz\"\nperiod = \"1s\"\ntimeout = \"1s\"\n";

/// What the program of a test says to a probe.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Answer {
    Well,
    Unwell,
    Never,
}

/// A function that answers the probe of this number, from 1 on, in a way of its own; and how many
/// it has had.
fn serve(
    node: &Node,
    keys: &str,
    answer: impl Fn(usize) -> Answer + Send + Sync + 'static,
) -> (Arc<Service>, Arc<Threads>, Arc<AtomicUsize>) {
    let probes = Arc::new(AtomicUsize::new(0));
    let counted = probes.clone();
    let (service, threads) = node.serve("f", keys, move |guest| {
        while let Some(seen) = guest.request() {
            if !seen.head.starts_with("GET /healthz ") {
                guest.answer(guest.instance.to_string());
                continue;
            }
            assert!(seen.head.contains("\r\nHost: f\r\n"), "{}", seen.head);
            match answer(counted.fetch_add(1, Ordering::SeqCst) + 1) {
                Answer::Well => guest.answer("well"),
                Answer::Unwell => guest.send("HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"),
                Answer::Never => wait_for_the_end(guest),
            }
        }
    });
    (service, threads, probes)
}

/// The node lets go of a probe that takes too long.
fn wait_for_the_end(guest: &mut Guest) {
    while guest.has_more() {}
}

fn counted(node: &Node, name: &str) -> bool {
    node.shared.metrics().text(&[], 0).contains(name)
}

#[test]
fn an_instance_that_is_well_stays_and_is_not_used_by_probes() {
    let node = Node::new(4);
    let (service, threads, probes) = serve(&node, LIVENESS, |_| Answer::Well);
    assert_eq!(node.connect().get("f", "/").text(), "1");
    eventually(|| probes.load(Ordering::SeqCst) >= 4);
    let instances = service.instances();
    assert_eq!(instances.len(), 1);
    assert_eq!((instances[0].state, instances[0].served), (InstanceState::Idle, 1));
    assert!(threads.remarks.lock().unwrap().is_empty());
    let text = node.shared.metrics().text(&[], 0);
    assert!(!text.contains("thaw_liveness_failures_total{"), "{text}");
    assert!(text.contains("thaw_responses_total{function=\"f\",code=\"200\"} 1"), "{text}");
    assert_eq!(node.connect().get("f", "/").text(), "1");
}

#[test]
fn probes_do_not_keep_an_instance_that_is_idle() {
    let node = Node::new(4);
    let keys = format!("{LIVENESS}[limits]\nkeep_alive = \"3s\"\n");
    let (service, _, probes) = serve(&node, &keys, |_| Answer::Well);
    node.connect().get("f", "/");
    eventually(|| service.instances().is_empty());
    assert!(probes.load(Ordering::SeqCst) > 0);
}

#[test]
fn an_instance_that_says_it_is_unwell_ends_and_another_one_answers() {
    let node = Node::new(4);
    let (service, threads, probes) = serve(&node, LIVENESS, |_| Answer::Unwell);
    assert_eq!(node.connect().get("f", "/").text(), "1");
    eventually(|| service.instances().is_empty());
    let why = "ended because it failed 3 liveness probes in a row: status 500";
    assert_eq!(*threads.remarks.lock().unwrap(), [why]);
    assert_eq!(probes.load(Ordering::SeqCst), 3);
    eventually(|| counted(&node, "thaw_liveness_failures_total{function=\"f\"} 3"));
    eventually(|| counted(&node, "thaw_liveness_ends_total{function=\"f\"} 1"));
    eventually(|| counted(&node, "thaw_instances_ended_total{function=\"f\",expected=\"yes\"} 1"));
    assert_eq!(node.connect().get("f", "/").text(), "2");
}

#[test]
fn an_instance_that_does_not_answer_ends() {
    let node = Node::new(4);
    let keys =
        format!("{}failures = 2\n", LIVENESS.replace("timeout = \"1s\"", "timeout = \"200ms\""));
    let (service, threads, _) = serve(&node, &keys, |_| Answer::Never);
    node.connect().get("f", "/");
    eventually(|| service.instances().is_empty());
    let why = "ended because it failed 2 liveness probes in a row: no answer within 0.2 s";
    assert_eq!(*threads.remarks.lock().unwrap(), [why]);
}

#[test]
fn a_success_in_between_is_a_new_beginning() {
    let node = Node::new(4);
    let keys = format!("{LIVENESS}failures = 2\n");
    let answer = |number| if number % 2 == 0 { Answer::Well } else { Answer::Unwell };
    let (service, threads, probes) = serve(&node, &keys, answer);
    node.connect().get("f", "/");
    eventually(|| probes.load(Ordering::SeqCst) >= 6);
    assert_eq!(service.instances().len(), 1);
    assert!(threads.remarks.lock().unwrap().is_empty());
    assert!(counted(&node, "thaw_liveness_failures_total{function=\"f\"} 3"));
}

#[test]
fn a_hibernated_instance_is_not_asked() {
    let node = Node::new(4);
    let (service, threads, probes) = serve(&node, LIVENESS, |_| Answer::Well);
    node.connect().get("f", "/");
    let has = |state| service.instances().iter().any(|instance| instance.state == state);
    eventually(|| has(InstanceState::Idle));
    let hibernated = HibernatedInstance { stored: 1, ranges: 0, write_ms: 1.0 };
    threads.reports.lock().unwrap()[0].send(Report::Hibernated(hibernated)).unwrap();
    eventually(|| has(InstanceState::Hibernated));
    let before = probes.load(Ordering::SeqCst);
    thread::sleep(Duration::from_millis(3500));
    // The instance may hear only now of one that was on its way; three would have come since.
    assert!(probes.load(Ordering::SeqCst) <= before + 1);
    assert!(has(InstanceState::Hibernated));
}

#[test]
fn an_instance_that_is_busy_is_not_asked_and_an_idle_connection_ends_for_a_probe() {
    let node = Node::new(4);
    let attended = Arc::new(AtomicU32::new(0));
    let turn = Arc::new(std::sync::Mutex::new(()));
    let counter = attended.clone();
    // It attends to one connection after the other, to its end.
    let (service, threads) = node.serve("f", LIVENESS, move |guest| {
        let _turn = turn.lock().unwrap();
        while let Some(seen) = guest.request() {
            match seen.head.split(' ').nth(1) {
                Some("/healthz") => drop(counter.fetch_add(1, Ordering::SeqCst)),
                Some("/long") => thread::sleep(Duration::from_millis(4500)),
                _ => {}
            }
            guest.answer("done");
            if seen.head.starts_with("GET /healthz ") {
                return;
            }
        }
    });
    node.connect().get("f", "/long");
    assert_eq!(attended.load(Ordering::SeqCst), 0);
    // The gateway has kept its connection, on which the program waits for the next request.
    eventually(|| attended.load(Ordering::SeqCst) >= 3);
    assert_eq!(node.connect().get("f", "/").text(), "done");
    assert_eq!(service.instances().len(), 1);
    assert!(threads.remarks.lock().unwrap().is_empty());
    assert!(!counted(&node, "thaw_liveness_failures_total{"));
}
