//! Answers of hostile and broken instances.

use crate::SHARED;
use crate::common::{Guest, Node, eventually};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use thaw_node::health::Requests;
use thaw_sandbox::GuestExit;

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
        // At once: what came when the next request is under way could be its answer.
        let answer =
            |body: &str| format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        guest.send(answer("mine") + &answer("for the next"));
        guest.request();
    });
    let mut client = node.connect();
    for _ in 0..5 {
        assert_eq!(client.get("f", "/").text(), "mine");
    }
    assert_eq!(threads.connections.load(Ordering::SeqCst), 5);
}

/// They come when the next request is under way, and the instance has not read it. It may
/// have closed the connection with them.
#[test]
fn bytes_that_overtake_a_request_are_not_its_answer() {
    let node = Node::new(10);
    for (name, closes) in [("f", false), ("g", true)] {
        let is_over = Arc::new(AtomicBool::new(false));
        let over = is_over.clone();
        let asked = Arc::new(AtomicU32::new(0));
        let counted = asked.clone();
        let (_, threads) = node.serve(name, SHARED, move |guest| {
            guest.request();
            counted.fetch_add(1, Ordering::SeqCst);
            guest.answer("mine");
            if guest.has_more() {
                guest.answer("for the next");
            }
            if !closes {
                eventually(|| over.load(Ordering::SeqCst));
                // What was sent anew elsewhere is not to be done twice.
                assert!(guest.request().is_none());
            }
            counted.fetch_add(100, Ordering::SeqCst);
        });
        let mut client = node.connect();
        for _ in 0..3 {
            assert_eq!(client.get(name, "/").text(), "mine");
        }
        is_over.store(true, Ordering::SeqCst);
        assert_eq!(threads.connections.load(Ordering::SeqCst), 3);
        drop(client);
        eventually(|| asked.load(Ordering::SeqCst) >= 203);
    }
}

/// Also one whose body fails after its head said that all is well.
#[test]
fn each_request_counts_once_by_how_its_answer_ends() {
    let node = Node::new(10);
    let (service, _) = node.serve("f", SHARED, |guest| {
        while let Some(request) = guest.request() {
            let answer = |status: &str, rest: &str| format!("HTTP/1.1 {status}\r\n{rest}");
            match request.head.split(' ').nth(1).unwrap() {
                "/fails" => guest.send(answer("500 No", "Content-Length: 2\r\n\r\nno")),
                "/empty" => guest.send(answer("204 Fine", "\r\n")),
                "/chunked" => {
                    let body = "Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n";
                    guest.send(answer("200 OK", body));
                }
                path @ ("/cut" | "/cutfailure") => {
                    let status = if path == "/cut" { "200 OK" } else { "503 No" };
                    guest.send(answer(status, "Content-Length: 9\r\n\r\nhalf"));
                    return guest.exit(GuestExit::Code(1));
                }
                _ => guest.answer("served"),
            }
        }
    });
    let expect = |all: u64, failed: u64| {
        eventually(|| service.requests() == Requests { all, failed });
    };
    for (number, path) in ["/", "/empty", "/chunked"].into_iter().enumerate() {
        node.connect().get("f", path);
        expect(number as u64 + 1, 0);
    }
    node.connect().get("f", "/fails");
    expect(4, 1);
    for (number, path) in ["/cut", "/cutfailure"].into_iter().enumerate() {
        let mut client = node.connect();
        client.send(format!("GET {path} HTTP/1.1\r\nHost: f\r\n\r\n"));
        assert!(client.rest().ends_with(b"half"));
        expect(5 + number as u64, 2 + number as u64);
    }
    // Neither of them counts again when its instance is gone.
    eventually(|| service.instance_count() == 0);
    expect(6, 3);
}
