//! Answers of hostile and broken instances.

use crate::SHARED;
use crate::common::{Guest, Node};
use std::sync::atomic::Ordering;

/// Answers that are none, by path.
fn hostile(guest: &mut Guest) {
    let Some(request) = guest.request() else { return };
    match request.head.split(' ').nth(1).unwrap() {
        "/garbage" => guest.send("I do not speak HTTP\r\n\r\n"),
        "/binary" => guest.send([0, 159, 146, 150].repeat(1000)),
        "/silent" => {}
        "/head" => guest.send(format!("HTTP/1.1 200 OK\r\nX: {}\r\n\r\n", "x".repeat(1 << 20))),
        "/fields" => guest.send(format!("HTTP/1.1 200 OK\r\n{}\r\n", "X: y\r\n".repeat(10_000))),
        "/interim" => {
            for _ in 0..100_000 {
                guest.send("HTTP/1.1 103 Early Hints\r\nX: y\r\n\r\n");
            }
        }
        "/length" => guest.send("HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"),
        "/lengths" => {
            guest.send("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab")
        }
        "/fold" => guest.send("HTTP/1.1 200 OK\r\nX: y\r\n z\r\nContent-Length: 0\r\n\r\n"),
        "/space" => guest.send("HTTP/1.1 200 OK\r\nX : y\r\nContent-Length: 0\r\n\r\n"),
        "/old" => guest.send("<html>HTTP/0.9</html>"),
        path => panic!("{path}"),
    }
}

#[test]
fn answers_that_are_none_are_502_and_the_connection_goes_on() {
    let node = Node::new(100);
    node.serve("f", "[limits]\ntimeout = \"10s\"", hostile);
    node.serve("g", &format!("{SHARED}\n[limits]\ntimeout = \"10s\""), hostile);
    let mut client = node.connect();
    for path in [
        "/garbage", "/binary", "/silent", "/head", "/fields", "/interim", "/length", "/lengths",
        "/fold", "/space", "/old",
    ] {
        for name in ["f", "g"] {
            let response = client.get(name, path);
            assert_eq!(response.status, 502, "{path}: {response:?}");
            assert_eq!(response.error(), "bad_gateway", "{path}");
        }
    }
}

#[test]
fn a_length_beside_chunks_does_not_split_an_answer() {
    let node = Node::new(10);
    node.serve("f", SHARED, |guest| {
        guest.request();
        guest.send("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n");
        guest.send("5\r\nhello\r\n0\r\n\r\n");
    });
    let mut client = node.connect();
    for _ in 0..2 {
        assert_eq!(client.get("f", "/").text(), "hello");
    }
}

#[test]
fn an_answer_that_breaks_off_ends_its_clients_connection() {
    let node = Node::new(10);
    for (name, isolation) in [("f", ""), ("g", SHARED)] {
        node.serve(name, isolation, |guest| {
            guest.request();
            guest.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf");
        });
        let mut client = node.connect();
        client.send(format!("GET / HTTP/1.1\r\nHost: {name}\r\n\r\n"));
        assert!(client.head().unwrap().starts_with("HTTP/1.1 200"));
        assert_eq!(client.rest(), b"half");
    }
}

#[test]
fn bytes_after_an_answer_are_nobody_elses_answer() {
    let node = Node::new(10);
    let (_, threads) = node.serve("f", SHARED, |guest| {
        guest.request();
        guest.answer("mine");
        guest.answer("for the next");
        guest.request();
    });
    let mut client = node.connect();
    for _ in 0..5 {
        assert_eq!(client.get("f", "/").text(), "mine");
    }
    assert_eq!(threads.connections.load(Ordering::SeqCst), 5);
}
