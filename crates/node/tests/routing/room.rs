//! Whole connections, and room for clients.

use crate::common::{Node, PATIENCE, Wire, eventually};
use crate::{SHARED, echo_path, has_many_descriptors};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use thaw_home::config::FunctionConfig;
use thaw_node::instance::{Client, LaunchError, Launched, Launcher, Opening};
use thaw_node::node::NodeState;
use thaw_node::service::Service;

#[test]
fn a_function_may_have_whole_connections_at_its_own_address() {
    let node = Node::new(10);
    let keys = "listen = \"127.0.0.1:1\"\nentry = { connections = \"handover\" }\n\
                isolation = \"instance\"";
    let (_, threads) = node.serve("f", keys, |guest| {
        // Sockets of clients are non-blocking for everybody who has them.
        guest.socket.get_ref().set_nonblocking(false).unwrap();
        echo_path(guest);
    });
    let mut own = Wire::connect(node.listen_for("f"));
    for host in ["f", "other"] {
        assert_eq!(own.get(host, "/").text(), "1 /");
    }
    assert_eq!(threads.connections.load(Ordering::SeqCst), 1);
    // At the common address other functions can be meant.
    let mut shared = node.connect();
    assert_eq!(shared.get("other", "/").status, 404);
}

#[test]
fn a_draining_node_lets_go_of_idle_clients_and_finishes_what_it_answers() {
    let node = Node::new(10);
    node.serve("f", "", |guest| {
        guest.request();
        guest.send("HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nhalf");
        thread::sleep(Duration::from_millis(300));
        guest.send("half");
    });
    let mut idle = node.connect();
    assert_eq!(idle.get("f", "/").status, 200);
    let mut busy = node.connect();
    busy.send("GET / HTTP/1.1\r\nHost: f\r\n\r\n");
    assert!(busy.head().is_some());
    let services = node.services.clone();
    let drained = node.runtime.spawn(async move { services.drain(PATIENCE).await });
    let asked = Instant::now();
    assert_eq!(idle.rest(), b"");
    assert!(asked.elapsed() < PATIENCE);
    assert_eq!(busy.exactly(8).unwrap(), b"halfhalf");
    node.runtime.block_on(drained).unwrap();
    assert_eq!(busy.rest(), b"");
}

#[test]
fn the_oldest_of_too_many_silent_clients_make_room() {
    let node = Node::over(NodeState::with_clients(10, 8), PATIENCE * 2);
    node.serve("f", "", echo_path);
    let mut first = node.connect();
    first.send("GET / HTTP/1.1\r\nHo");
    let mut idle = node.connect();
    assert_eq!(idle.get("f", "/").status, 200);
    // A client is in the line of those that are waited for when its task first runs, which on a
    // busy machine may be after the tasks of others. So there are as many others as it takes.
    let mut silent = Vec::new();
    let mut flood_until_ended = |client: &Wire| {
        client.stream.set_nonblocking(true).unwrap();
        let has_ended = || match client.stream.peek(&mut [0]) {
            Ok(count) => count == 0,
            Err(error) => error.kind() != io::ErrorKind::WouldBlock,
        };
        let until = Instant::now() + PATIENCE;
        while !has_ended() {
            assert!(Instant::now() < until, "it never makes room");
            let mut another = node.connect();
            another.send("GET");
            silent.push(another);
            thread::sleep(Duration::from_millis(5));
        }
    };
    flood_until_ended(&first);
    flood_until_ended(&idle);
    assert!(silent.len() >= 3, "they ended though there was room");
    assert_eq!(node.connect().get("f", "/").status, 200);
    drop(silent);
}

#[test]
fn clients_beyond_what_there_is_room_for_wait_to_be_accepted() {
    let node = Node::over(NodeState::with_clients(10, 2), PATIENCE * 2);
    let (now, most) = (AtomicU32::new(0), Arc::new(AtomicU32::new(0)));
    let seen = most.clone();
    node.serve("f", "[limits]\ntimeout = \"20s\"", move |guest| {
        guest.request();
        seen.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        thread::sleep(Duration::from_millis(300));
        now.fetch_sub(1, Ordering::SeqCst);
        guest.answer("x");
    });
    let clients: Vec<_> = (0..6)
        .map(|_| {
            let address = node.address;
            thread::spawn(move || Wire::connect(address).get("f", "/").status)
        })
        .collect();
    for client in clients {
        assert_eq!(client.join().unwrap(), 200);
    }
    let most = most.load(Ordering::SeqCst);
    assert!(most <= 2, "{most} at once");
}

#[test]
fn who_waits_for_a_full_node_hears_of_an_instance_that_becomes_idle() {
    let node = Node::new(1);
    // Nobody looks again before the time is over, and then the request is refused.
    let limits = "[limits]\nqueue = \"50s\"\nkeep_alive = \"1h\"";
    let release = Arc::new(AtomicBool::new(false));
    let released = release.clone();
    for name in ["f", "g"] {
        let released = released.clone();
        node.serve(name, &format!("{SHARED}\n{limits}"), move |guest| {
            while guest.request().is_some() {
                while !released.load(Ordering::SeqCst) {
                    thread::sleep(Duration::from_millis(5));
                }
                guest.answer("x");
            }
        });
    }
    for (busy, waiting) in [("f", "g"), ("g", "f")] {
        release.store(false, Ordering::SeqCst);
        let mut first = node.connect();
        first.send(format!("GET / HTTP/1.1\r\nHost: {busy}\r\n\r\n"));
        eventually(|| node.services.instances().iter().any(|instance| instance.connections == 1));
        let mut second = node.connect();
        second.send(format!("GET / HTTP/1.1\r\nHost: {waiting}\r\n\r\n"));
        thread::sleep(Duration::from_millis(100));
        release.store(true, Ordering::SeqCst);
        assert_eq!(first.response().unwrap().status, 200);
        assert_eq!(second.response().unwrap().status, 200);
    }
}

/// A launcher whose image is unpacked for ever, and nobody boots it.
struct Unpacking;

impl Launcher for Unpacking {
    fn opening(self: Arc<Self>) -> Option<Opening> {
        Some(Box::pin(std::future::pending()))
    }

    fn launch(&self, _: Option<&Client>) -> Result<Launched, LaunchError> {
        panic!("a thread would wait for it");
    }

    fn is_ready(&self) -> bool {
        false
    }
}

#[test]
fn a_bounded_number_of_requests_waits_for_an_image_that_is_unpacked() {
    const MOST: usize = 256;
    let _alone = has_many_descriptors();
    let node = Node::new(2 * MOST);
    let text =
        "name = \"f\"\ncommand = [\"x\"]\nrootfs = \"./r\"\nport = 80\n[limits]\ninstances = 400\n";
    let config = FunctionConfig::parse("thaw.toml".as_ref(), text).unwrap();
    let service = Service::new(config, "image".into(), Arc::new(Unpacking), node.services.clone());
    node.services.install(service);
    let mut all: Vec<_> = (0..MOST + 1).map(|_| node.connect()).collect();
    for client in &mut all {
        client.send("GET / HTTP/1.1\r\nHost: f\r\n\r\n");
        client.stream.set_nonblocking(true).unwrap();
    }
    // One is refused, whichever comes last; the others wait.
    let has_answer = |client: &Wire| client.stream.peek(&mut [0]).is_ok_and(|count| count > 0);
    eventually(|| all.iter().any(has_answer));
    thread::sleep(Duration::from_millis(100));
    assert_eq!(all.iter().filter(|client| has_answer(client)).count(), 1);
    let refused = all.iter().position(has_answer).unwrap();
    let mut refused = all.swap_remove(refused);
    refused.stream.set_nonblocking(false).unwrap();
    assert!(refused.head().unwrap().starts_with("HTTP/1.1 503"));
}
