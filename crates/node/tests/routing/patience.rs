//! Instances and clients that are slow, or stop.

use crate::common::{Node, PATIENCE, eventually};
use crate::{SHARED, echo_body, echo_path};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use thaw_node::node::NodeState;

#[test]
fn an_instance_that_stops_in_its_answer_ends() {
    let node = Node::new(10);
    let keys = format!("{SHARED}\n[limits]\ntimeout = \"3s\"");
    let (service, _) = node.serve("f", &keys, |guest| {
        guest.request();
        guest.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf");
        thread::sleep(PATIENCE);
    });
    let mut client = node.connect();
    client.send("GET / HTTP/1.1\r\nHost: f\r\n\r\n");
    assert!(client.head().unwrap().starts_with("HTTP/1.1 200"));
    assert_eq!(client.rest(), b"half");
    eventually(|| service.instance_count() == 0);
}

#[test]
fn an_answer_that_goes_on_slowly_is_not_late() {
    let node = Node::new(10);
    // Each piece has much more time than it takes, and all together take longer than that.
    node.serve("f", "[limits]\ntimeout = \"10s\"", |guest| {
        guest.request();
        guest.send("HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n");
        for _ in 0..12 {
            thread::sleep(Duration::from_secs(1));
            guest.send("x");
        }
    });
    assert_eq!(node.connect().get("f", "/").text(), "x".repeat(12));
}

#[test]
fn a_client_that_stops_in_its_request_is_408_and_pins_nothing() {
    let node = Node::new(10);
    let limits = "[limits]\ninstances = 1\ntimeout = \"3s\"\nqueue = \"10s\"";
    for (name, isolation) in [("f", ""), ("g", SHARED)] {
        let (service, _) = node.serve(name, &format!("{isolation}\n{limits}"), echo_body);
        let mut client = node.connect();
        client.send(format!("POST / HTTP/1.1\r\nHost: {name}\r\nContent-Length: 10\r\n\r\nhalf"));
        let response = client.response().unwrap();
        assert_eq!((response.status, response.error().as_str()), (408, "body_too_slow"));
        assert_eq!(client.rest(), b"");
        assert_eq!(node.connect().get(name, "/").status, 200);
        eventually(|| service.instances().iter().all(|instance| instance.connections == 0));
    }
}

#[test]
fn a_client_that_does_not_read_pins_nothing() {
    let node = Node::new(10);
    let limits = "[limits]\ninstances = 1\ntimeout = \"3s\"\nqueue = \"10s\"";
    for (name, isolation) in [("f", ""), ("g", SHARED)] {
        let stopped = Arc::new(AtomicBool::new(false));
        let seen = stopped.clone();
        node.serve(name, &format!("{isolation}\n{limits}"), move |guest| {
            while let Some(request) = guest.request() {
                if request.head.contains("/small") {
                    guest.answer("small");
                    continue;
                }
                let piece = vec![b'x'; 1 << 20];
                guest.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", 1_u64 << 40));
                use std::io::Write;
                while guest.socket.get_mut().write_all(&piece).is_ok() {}
                seen.store(true, Ordering::SeqCst);
                return;
            }
        });
        let mut client = node.connect();
        client.send(format!("GET / HTTP/1.1\r\nHost: {name}\r\n\r\n"));
        eventually(|| stopped.load(Ordering::SeqCst));
        assert_eq!(node.connect().get(name, "/small").text(), "small");
    }
}

#[test]
fn a_function_that_never_answers_is_504_and_its_instance_ends() {
    let node = Node::new(10);
    let keys = format!("{SHARED}\n[limits]\ntimeout = \"200ms\"");
    let (service, _) = node.serve("f", &keys, |_| thread::sleep(PATIENCE));
    let mut client = node.connect();
    let response = client.get("f", "/");
    assert_eq!((response.status, response.error().as_str()), (504, "timeout"));
    eventually(|| service.instance_count() == 0);
    assert_eq!(client.get("f", "/").status, 504, "the connection goes on");
}

#[test]
fn heads_that_stop_end_their_connection() {
    let node = Node::over(NodeState::new(10), Duration::from_secs(2));
    node.serve("f", "", echo_path);
    let mut client = node.connect();
    assert_eq!(client.get("f", "/").status, 200);
    client.send("GET / HTTP/1.1\r\nHo");
    assert_eq!(client.rest(), b"");
}

#[test]
fn later_heads_are_as_small_as_the_first() {
    let node = Node::new(10);
    node.serve("f", "", echo_path);
    for (head, status) in [
        (format!("GET / HTTP/1.1\r\nHost: f\r\nX: {}\r\n\r\n", "x".repeat(17 << 10)), 431),
        (format!("GET / HTTP/1.1\r\nHost: f\r\n{}\r\n", "x: y\r\n".repeat(200)), 431),
        ("GET / HTTP/1.1\r\nHost: f\r\nHost: g\r\n\r\n".to_owned(), 400),
        ("GET / HTTP/1.1\r\n\r\n".to_owned(), 400),
        ("nonsense\r\n\r\n".to_owned(), 400),
    ] {
        let mut client = node.connect();
        assert_eq!(client.get("f", "/").status, 200);
        client.send(&head);
        let answer = client.head().unwrap_or_default();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{answer} for {head:.40}");
    }
}
