//! Connections on which the gateway routes every request, over instances that are
//! threads of the test.

mod common;

use common::{Guest, Node, PATIENCE, Response, Seen, Wire, eventually, field};
use std::collections::HashSet;
use std::net::{Shutdown, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use thaw_node::node::NodeState;
use thaw_sandbox::GuestExit;

const SHARED: &str = "isolation = \"instance\"";

/// Answers every request of a connection with the instance and the path.
fn echo_path(guest: &mut Guest) {
    while let Some(request) = guest.request() {
        let path = request.head.split(' ').nth(1).unwrap().to_owned();
        guest.answer(format!("{} {path}", guest.instance));
        if field(&request.head, "connection").is_some_and(|options| options.contains("close")) {
            return;
        }
    }
}

/// Answers requests with their bodies.
fn echo_body(guest: &mut Guest) {
    while let Some(request) = guest.request() {
        guest.answer(&request.body);
    }
}

#[test]
fn two_requests_of_a_connection_reach_the_functions_that_they_name() {
    for isolation in ["", SHARED] {
        let node = Node::new(10);
        for name in ["f", "g"] {
            node.serve(name, isolation, move |guest| {
                while let Some(request) = guest.request() {
                    guest.answer(format!("{name} saw {:?}", field(&request.head, "cookie")));
                }
            });
        }
        let mut client = node.connect();
        for name in ["f", "g", "f", "nobody", "g"] {
            client.send(format!("GET / HTTP/1.1\r\nHost: {name}\r\nCookie: of-{name}\r\n\r\n"));
            let response = client.response().expect("an answer");
            match name {
                "nobody" => assert_eq!(response.error(), "not_found"),
                _ => assert_eq!(response.text(), format!("{name} saw Some(\"of-{name}\")")),
            }
        }
    }
}

#[test]
fn pipelined_requests_are_answered_in_turn_by_those_they_name() {
    let node = Node::new(10);
    node.serve("f", "", |guest| {
        guest.request();
        thread::sleep(Duration::from_millis(50));
        guest.answer("slow f");
    });
    node.serve("g", SHARED, echo_path);
    let mut client = node.connect();
    client.send(
        "GET /1 HTTP/1.1\r\nHost: g\r\n\r\nPOST /2 HTTP/1.1\r\nHost: f\r\nContent-Length: 3\r\n\r\nabc\
         GET /3 HTTP/1.1\r\nHost: g\r\n\r\nGET /4 HTTP/1.1\r\nHost: g\r\nConnection: close\r\n\r\n",
    );
    let bodies: Vec<_> = (0..4).map(|_| client.response().unwrap().text()).collect();
    assert_eq!(bodies, ["1 /1", "slow f", "1 /3", "1 /4"]);
    assert_eq!(client.rest(), b"");
}

#[test]
fn every_request_of_a_connection_has_an_instance_of_its_own_by_default() {
    let node = Node::new(10);
    let (service, _) = node.serve("f", "", echo_path);
    let mut client = node.connect();
    let bodies: HashSet<_> = (0..5).map(|_| client.get("f", "/").text()).collect();
    assert_eq!(bodies.len(), 5, "{bodies:?}");
    eventually(|| service.instance_count() == 0);
}

#[test]
fn an_instance_that_was_booted_for_a_request_that_is_none_ends() {
    let node = Node::new(10);
    let (service, threads) = node.serve("f", "[limits]\ninstances = 1", echo_path);
    // The gateway reads further than it peeks.
    let mut client = node.connect();
    client.send("POST / HTTP/1.1\r\nHost: f\r\nTransfer-Encoding: gzip, chunked\r\n\r\n");
    assert_eq!(client.response().unwrap().status, 400);
    eventually(|| service.instance_count() == 0);
    assert_eq!(threads.launched.load(Ordering::SeqCst), 1);
    assert_eq!(node.connect().get("f", "/").text(), "2 /");
}

#[test]
fn an_instance_is_told_that_nothing_follows_and_ends_even_if_it_does_not_listen() {
    let node = Node::new(10);
    let heads: Arc<Mutex<Vec<String>>> = Arc::default();
    let seen = heads.clone();
    let (service, _) = node.serve("f", "", move |guest| {
        seen.lock().unwrap().push(guest.request().unwrap().head);
        guest.answer("x");
        thread::sleep(PATIENCE);
    });
    assert_eq!(node.connect().get("f", "/").text(), "x");
    assert_eq!(field(&heads.lock().unwrap()[0], "connection").as_deref(), Some("close"));
    eventually(|| service.instance_count() == 0);
}

#[test]
fn the_connection_to_an_instance_is_kept_for_the_next_request_whoever_makes_it() {
    let node = Node::new(10);
    let (service, threads) = node.serve("f", SHARED, echo_path);
    let mut clients = [node.connect(), node.connect()];
    for round in 0..10 {
        let path = format!("/{round}");
        assert_eq!(clients[round % 2].get("f", &path).text(), format!("1 {path}"));
        eventually(|| service.instances()[0].connections == 0);
    }
    assert_eq!(threads.connections.load(Ordering::SeqCst), 1);
    assert_eq!(service.instances()[0].served, 10);
}

#[test]
fn idle_connections_hold_no_place() {
    let node = Node::new(10);
    let limits = "[limits]\ninstances = 1\nqueue = \"5s\"\nkeep_alive = \"300ms\"";
    let (service, _) = node.serve("f", &format!("{SHARED}\n{limits}"), echo_path);
    let mut clients: Vec<_> = (0..8).map(|_| node.connect()).collect();
    for client in &mut clients {
        assert_eq!(client.get("f", "/").status, 200);
    }
    // Nor do they keep the instance, and they outlive it.
    eventually(|| service.instance_count() == 0);
    assert_eq!(clients[0].get("f", "/").text(), "2 /");
}

#[test]
fn a_server_of_one_connection_at_a_time_serves_both_ways() {
    let node = Node::new(10);
    let turn = Arc::new(Mutex::new(()));
    let keys = format!("{SHARED}\n[limits]\ninstances = 1\ntimeout = \"5s\"");
    let (service, _) = node.serve("f", &keys, move |guest| {
        let _turn = turn.lock().unwrap();
        echo_path(guest);
    });
    let mut client = node.connect();
    for _ in 0..5 {
        assert_eq!(client.get("f", "/a").text(), "1 /a");
        eventually(|| service.instances()[0].connections == 0);
        let mut other = node.connect();
        other.send("GET /b HTTP/1.1\r\nHost: f\r\nConnection: close\r\n\r\n");
        assert_eq!(other.response().unwrap().text(), "1 /b");
        other.rest();
        eventually(|| service.instances()[0].connections == 0);
    }
}

#[test]
fn a_connection_that_the_instance_has_closed_meanwhile_is_replaced() {
    let node = Node::new(10);
    // It says that the connection stays, and closes it.
    let (_, threads) = node.serve("f", SHARED, |guest| {
        let request = guest.request();
        guest.answer(request.unwrap().body);
    });
    let mut client = node.connect();
    for round in 0..20 {
        client.send("POST / HTTP/1.1\r\nHost: f\r\nContent-Length: 4\r\n\r\nbody");
        assert_eq!(client.response().unwrap().text(), "body", "{round}");
    }
    assert_eq!(threads.launched.load(Ordering::SeqCst), 1);
}

/// Requests that two servers could understand differently, and what an instance may see
/// of each: nothing, or this body.
const SMUGGLED: [(&str, Option<&str>); 26] = [
    // CL.TE, TE.CL and TE.TE: RFC 9112 §6.3.
    ("Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nX", Some("")),
    ("Transfer-Encoding: chunked\r\nContent-Length: 6\r\n\r\n3\r\nabc\r\n0\r\n\r\n", Some("abc")),
    ("Transfer-Encoding: xchunked\r\nContent-Length: 3\r\n\r\nabc", None),
    ("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n", None),
    ("Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", None),
    ("Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", None),
    ("Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", None),
    ("Transfer-Encoding: \"chunked\"\r\n\r\n0\r\n\r\n", None),
    ("Transfer-Encoding: chun\x0bked\r\n\r\n0\r\n\r\n", None),
    ("Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", None),
    (" Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", None),
    ("X: y\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", None),
    ("X: y\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", None),
    ("X: y\0\r\n\r\n", None),
    ("X\0: y\r\n\r\n", None),
    ("Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", None),
    ("Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", Some("abc")),
    ("Content-Length: 3, 3\r\n\r\nabc", None),
    ("Content-Length: +3\r\n\r\nabc", None),
    ("Content-Length: -3\r\n\r\nabc", None),
    ("Content-Length: 0x3\r\n\r\nabc", None),
    ("Content-Length: 18446744073709551619\r\n\r\nabc", None),
    // Sizes of chunks: RFC 9112 §7.1.
    ("Transfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n", None),
    ("Transfer-Encoding: chunked\r\n\r\n-3\r\nabc\r\n0\r\n\r\n", None),
    ("Transfer-Encoding: chunked\r\n\r\n10000000000000003\r\nabc\r\n0\r\n\r\n", None),
    ("Transfer-Encoding: chunked\r\n\r\n3\r\nabcX\r\n0\r\n\r\n", None),
];

#[test]
fn an_instance_sees_one_unambiguous_request_or_none() {
    for isolation in ["", SHARED] {
        let node = Node::new(100);
        let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
        let log = seen.clone();
        node.serve("f", isolation, move |guest| {
            // Ambiguous ones are a panic in here, and no answer.
            while let Some(request) = guest.request() {
                log.lock().unwrap().push(request);
                guest.answer("seen");
            }
        });
        for (fields, body) in SMUGGLED {
            seen.lock().unwrap().clear();
            let mut client = node.connect();
            client.send(format!("POST /first HTTP/1.1\r\nHost: f\r\n{fields}"));
            // If the end of the first request is mistaken, this is a part of its body, or
            // what was a part of its body is a request.
            client.send("GET /second HTTP/1.1\r\nHost: f\r\n\r\n");
            client.stream.shutdown(Shutdown::Write).unwrap();
            let answers = client.rest();
            let answers = String::from_utf8_lossy(&answers);
            let seen = seen.lock().unwrap().clone();
            let paths: Vec<_> =
                seen.iter().map(|seen| seen.head.split(' ').nth(1).unwrap()).collect();
            match body {
                Some(body) => {
                    assert_eq!(paths.first(), Some(&"/first"), "{fields:?}: {answers}");
                    assert_eq!(seen[0].body, body.as_bytes(), "{fields:?}");
                    assert!(paths.len() <= 2, "{fields:?}: {paths:?}");
                }
                None => {
                    assert!(seen.is_empty(), "{fields:?}: {seen:?}");
                    assert!(answers.starts_with("HTTP/1.1 400"), "{fields:?}: {answers}");
                    assert_eq!(
                        answers.matches("HTTP/1.1 400 ").count(),
                        1,
                        "{fields:?}: {answers}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_bare_line_feed_ends_a_line_for_everybody() {
    let node = Node::new(10);
    let (_, _) = node.serve("f", "", |guest| {
        let head = guest.request().unwrap().head;
        assert!(!head.replace("\r\n", "").contains(['\r', '\n']), "{head:?}");
        guest.answer(head);
    });
    let mut client = node.connect();
    client.send("GET / HTTP/1.1\nHost: f\nX: y\n\n");
    let response = client.response().unwrap();
    assert_eq!(field(&response.text(), "x").as_deref(), Some("y"));
}

#[test]
fn connect_is_refused_and_the_target_is_normalised() {
    let node = Node::new(10);
    node.serve("f", "", |guest| {
        let head = guest.request().unwrap().head;
        guest.answer(head);
    });
    let mut client = node.connect();
    client.send("CONNECT f:80 HTTP/1.1\r\nHost: f\r\n\r\n");
    assert_eq!(client.response().unwrap().status, 400);
    let mut client = node.connect();
    client.send("GET http://f.example/x?y HTTP/1.1\r\nHost: other\r\n\r\n");
    let text = client.response().unwrap().text();
    assert!(text.starts_with("GET /x?y HTTP/1.1\r\n"), "{text}");
    assert_eq!(field(&text, "host").as_deref(), Some("f.example"));
}

#[test]
fn fields_keep_their_letters_and_what_is_of_one_hop_stays_there() {
    let node = Node::new(10);
    node.serve("f", "", |guest| {
        let head = guest.request().unwrap().head;
        guest.send("HTTP/1.1 200 OK\r\nX-oDD: 1\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\n");
        guest.send(format!("Content-Length: {}\r\n\r\n{head}", head.len()));
    });
    let mut client = node.connect();
    client.send(
        "GET / HTTP/1.1\r\nHOST: f\r\nx-OWN: 1\r\nConnection: x-hop\r\nX-Hop: 1\r\n\
         Keep-Alive: 1\r\n\r\n",
    );
    let response = client.response().unwrap();
    assert!(response.head.contains("X-oDD: 1\r\n"), "{}", response.head);
    assert!(!response.head.contains("X-Hop"), "{}", response.head);
    let seen = response.text();
    assert!(seen.contains("x-OWN: 1\r\n") && seen.contains("HOST: f\r\n"), "{seen}");
    assert!(!seen.contains("X-Hop") && !seen.contains("Keep-Alive"), "{seen}");
}

#[test]
fn bodies_stream_in_both_directions() {
    let node = Node::new(10);
    // Answers each piece when it comes.
    node.serve("f", SHARED, |guest| {
        guest.head().unwrap();
        guest.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
        loop {
            let mut line = String::new();
            std::io::BufRead::read_line(&mut guest.socket, &mut line).unwrap();
            let len = usize::from_str_radix(line.trim_end(), 16).unwrap();
            let mut piece = vec![0; len + 2];
            std::io::Read::read_exact(&mut guest.socket, &mut piece).unwrap();
            guest.send(line);
            guest.send(piece);
            if len == 0 {
                return;
            }
        }
    });
    let mut client = node.connect();
    client.send("POST / HTTP/1.1\r\nHost: f\r\nTransfer-Encoding: chunked\r\n\r\n");
    assert!(client.head().unwrap().starts_with("HTTP/1.1 200"));
    for piece in ["first", "second"] {
        let chunk = format!("{:x}\r\n{piece}\r\n", piece.len());
        client.send(&chunk);
        assert_eq!(client.exactly(chunk.len()).unwrap(), chunk.as_bytes());
    }
    client.send("0\r\n\r\n");
    assert_eq!(client.exactly(5).unwrap(), b"0\r\n\r\n");
}

#[test]
fn large_bodies_pass_whole() {
    let node = Node::new(10);
    node.serve("f", SHARED, echo_body);
    let mut client = node.connect();
    let body: Vec<u8> = (0..5_000_000_u32).map(|i| (i % 251) as u8).collect();
    for _ in 0..2 {
        let mut writer = client.stream.try_clone().unwrap();
        let sent = body.clone();
        let writing = thread::spawn(move || {
            let len = sent.len();
            let head = format!("POST / HTTP/1.1\r\nHost: f\r\nContent-Length: {len}\r\n\r\n");
            std::io::Write::write_all(&mut writer, head.as_bytes()).unwrap();
            std::io::Write::write_all(&mut writer, &sent).unwrap();
        });
        let response = client.response().unwrap();
        writing.join().unwrap();
        assert!(response.body == body, "{} bytes came back", response.body.len());
    }
}

#[test]
fn the_body_is_asked_for_where_the_client_waits_to_be() {
    let node = Node::new(10);
    node.serve("f", "", echo_body);
    let mut client = node.connect();
    client.send("POST / HTTP/1.1\r\nHost: f\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n");
    assert!(client.head().unwrap().starts_with("HTTP/1.1 100"));
    client.send("body");
    assert_eq!(client.response().unwrap().text(), "body");
}

#[test]
fn answers_without_bodies_end_where_they_end() {
    let node = Node::new(10);
    node.serve("f", SHARED, |guest| {
        while let Some(request) = guest.request() {
            let target = request.head.split("HTTP").next().unwrap().trim().to_owned();
            match target.as_str() {
                "HEAD /" => guest.send("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"),
                "GET /204" => guest.send("HTTP/1.1 204 No Content\r\n\r\n"),
                "GET /304" => guest.send("HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n"),
                _ => guest.answer("last"),
            }
        }
    });
    let mut client = node.connect();
    for (target, status) in [("HEAD /", 200), ("GET /204", 204), ("GET /304", 304)] {
        client.send(format!("{target} HTTP/1.1\r\nHost: f\r\n\r\n"));
        let head = client.head().unwrap();
        assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{head}");
    }
    assert_eq!(client.get("f", "/").text(), "last");
}

#[test]
fn an_answer_that_ends_with_its_connection_is_whole() {
    let node = Node::new(10);
    for (name, isolation) in [("f", ""), ("g", SHARED)] {
        node.serve(name, isolation, |guest| {
            guest.request();
            guest.send("HTTP/1.0 200 OK\r\nX: y\r\n\r\nhello ");
            thread::sleep(Duration::from_millis(20));
            guest.send("there");
        });
        let mut client = node.connect();
        for _ in 0..3 {
            let response = client.get(name, "/");
            assert!(response.head.starts_with("HTTP/1.1 200 OK\r\n"), "{}", response.head);
            assert_eq!(response.text(), "hello there");
        }
    }
}

#[test]
fn clients_of_http_1_0_may_keep_their_connection() {
    let node = Node::new(10);
    node.serve("f", "", echo_path);
    let mut client = node.connect();
    for _ in 0..2 {
        client.send("GET /x HTTP/1.0\r\nHost: f\r\nConnection: keep-alive\r\n\r\n");
        assert!(client.response().unwrap().text().ends_with(" /x"));
    }
}

#[test]
fn a_connection_changes_its_protocol() {
    let node = Node::new(10);
    for (name, isolation) in [("f", ""), ("g", SHARED)] {
        let (service, _) = node.serve(name, isolation, |guest| {
            let head = guest.request().unwrap().head;
            assert_eq!(field(&head, "upgrade").as_deref(), Some("echo"), "{head}");
            guest.send(
                "HTTP/1.1 101 Switching Protocols\r\nUpgrade: echo\r\nConnection: Upgrade\r\n\r\n",
            );
            guest.send("hello");
            let mut byte = [0];
            while std::io::Read::read(&mut guest.socket, &mut byte).unwrap_or(0) == 1 {
                guest.send(byte);
            }
        });
        let mut client = node.connect();
        client.send(format!(
            "GET / HTTP/1.1\r\nHost: {name}\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\nearly"
        ));
        let head = client.head().unwrap();
        assert!(head.starts_with("HTTP/1.1 101"), "{head}");
        assert_eq!(field(&head, "upgrade").as_deref(), Some("echo"));
        assert_eq!(client.exactly(10).unwrap(), b"helloearly");
        client.send("\0\x01 any bytes");
        assert_eq!(client.exactly(12).unwrap(), b"\0\x01 any bytes");
        client.stream.shutdown(Shutdown::Both).unwrap();
        eventually(|| service.instances().iter().all(|instance| instance.connections == 0));
    }
}

#[test]
fn an_instance_may_refuse_to_change_the_protocol_and_may_not_change_it_unasked() {
    let node = Node::new(10);
    node.serve("f", "", |guest| {
        guest.request();
        guest.answer("no");
    });
    node.serve("g", "", |guest| {
        guest.request();
        guest.send("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n");
    });
    let mut client = node.connect();
    client.send("GET / HTTP/1.1\r\nHost: f\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n");
    assert_eq!(client.response().unwrap().text(), "no");
    let response = client.get("g", "/");
    assert_eq!((response.status, response.error().as_str()), (502, "bad_gateway"));
}

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

#[test]
fn an_instance_that_stops_in_its_answer_ends() {
    let node = Node::new(10);
    let keys = format!("{SHARED}\n[limits]\ntimeout = \"200ms\"");
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
    node.serve("f", "[limits]\ntimeout = \"400ms\"", |guest| {
        guest.request();
        guest.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n");
        for _ in 0..10 {
            thread::sleep(Duration::from_millis(100));
            guest.send("x");
        }
    });
    assert_eq!(node.connect().get("f", "/").text(), "xxxxxxxxxx");
}

#[test]
fn a_client_that_stops_in_its_request_is_408_and_pins_nothing() {
    let node = Node::new(10);
    let limits = "[limits]\ninstances = 1\ntimeout = \"200ms\"\nqueue = \"5s\"";
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
    let limits = "[limits]\ninstances = 1\ntimeout = \"300ms\"\nqueue = \"10s\"";
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
    let node = Node::over(NodeState::new(10), Duration::from_millis(200));
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
    let shared = node.shared.clone();
    let drained = node.runtime.spawn(async move { shared.drain(PATIENCE).await });
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
    let silent: Vec<_> = (0..20)
        .map(|_| {
            let mut client = node.connect();
            client.send("GET");
            client
        })
        .collect();
    assert_eq!(first.rest(), b"", "the oldest has ended");
    assert_eq!(idle.rest(), b"");
    assert_eq!(node.connect().get("f", "/").status, 200);
    drop(silent);
}

#[test]
fn clients_beyond_what_there_is_room_for_wait_to_be_accepted() {
    let node = Node::over(NodeState::with_clients(10, 2), PATIENCE * 2);
    let (_, threads) = node.serve("f", "[limits]\ntimeout = \"20s\"", |guest| {
        guest.request();
        thread::sleep(Duration::from_millis(300));
        guest.answer("x");
    });
    let clients: Vec<_> = (0..6)
        .map(|_| {
            let address = node.address;
            thread::spawn(move || Wire::connect(address).get("f", "/").status)
        })
        .collect();
    eventually(|| threads.launched.load(Ordering::SeqCst) == 2);
    for client in clients {
        assert_eq!(client.join().unwrap(), 200);
    }
}

#[test]
fn who_waits_for_a_full_node_hears_of_an_instance_that_becomes_idle() {
    let node = Node::new(1);
    let limits = "[limits]\nqueue = \"15s\"\nkeep_alive = \"60s\"";
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
        eventually(|| node.shared.instances().iter().any(|instance| instance.connections == 1));
        let mut second = node.connect();
        second.send(format!("GET / HTTP/1.1\r\nHost: {waiting}\r\n\r\n"));
        thread::sleep(Duration::from_millis(100));
        let begun = Instant::now();
        release.store(true, Ordering::SeqCst);
        assert_eq!(first.response().unwrap().status, 200);
        assert_eq!(second.response().unwrap().status, 200);
        assert!(begun.elapsed() < Duration::from_secs(10), "it was found by chance");
    }
}

#[test]
fn forged_senders_of_datagrams_take_few_descriptors() {
    let node = Node::new(100);
    let (service, _) = node.serve(
        "u",
        "listen = \"127.0.0.1:1\"\nentry = { kind = \"udp\" }\n[limits]\ninstances = 4\nqueue = \"60s\"",
        |_| thread::sleep(PATIENCE),
    );
    node.serve("f", "", echo_path);
    let address = node.receive_for("u");
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let own: Vec<_> = (0..400)
        .map(|_| {
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            socket.send_to(b"x", address).unwrap();
            socket
        })
        .collect();
    eventually(|| service.instance_count() == 4);
    assert_eq!(node.connect().get("f", "/").status, 200, "others are served");
    // Four flows have an instance, sixteen wait; each has a pair of sockets, and the
    // threads of the test two more.
    let refused = || {
        let text = node.shared.metrics().text(&[], 0);
        let line = text.lines().find(|line| {
            line.starts_with("thaw_refusals_total") && line.contains("function=\"u\"")
        });
        line.and_then(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).unwrap_or(0)
    };
    eventually(|| {
        // On a busy machine, the host drops those for which the socket has no room.
        own.iter().for_each(|socket| drop(socket.send_to(b"x", address)));
        refused() >= 300
    });
    let taken = descriptors().saturating_sub(own.len());
    assert!(taken < 400, "{taken} descriptors");
}

/// A program that reads its request from standard input.
fn filter(guest: &mut Guest) {
    let mut input = Vec::new();
    let _ = std::io::Read::read_to_end(&mut guest.socket, &mut input);
    let text = String::from_utf8_lossy(&input).into_owned();
    match text.strip_prefix("print ").and_then(|count| count.parse::<usize>().ok()) {
        Some(count) => guest.send(vec![b'x'; count]),
        None => guest.send(format!("{} read {text}", guest.instance)),
    }
    let _ = guest.socket.get_ref().shutdown(Shutdown::Both);
    guest.exit(GuestExit::Code(0));
}

const STDIN: &str = "entry = { kind = \"stdin\" }";

fn post(client: &mut Wire, host: &str, body: &str) -> Response {
    let length = body.len();
    client
        .send(format!("POST / HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n{body}"));
    client.response().expect("an answer")
}

#[test]
fn requests_for_standard_input_are_routed_one_by_one() {
    let node = Node::new(10);
    node.serve("s", STDIN, filter);
    node.serve("t", STDIN, filter);
    node.serve("f", "", echo_path);
    let mut client = node.connect();
    assert_eq!(post(&mut client, "s", "a").text(), "1 read a");
    assert_eq!(post(&mut client, "t", "b").text(), "1 read b");
    assert_eq!(client.get("f", "/").text(), "1 /");
    assert_eq!(post(&mut client, "s", "c").text(), "2 read c");
}

#[test]
fn a_client_that_stops_in_standard_input_is_408_and_ends_its_instance() {
    let node = Node::new(10);
    let (service, _) = node.serve("s", &format!("{STDIN}\n[limits]\ntimeout = \"200ms\""), filter);
    let mut client = node.connect();
    client.send("POST / HTTP/1.1\r\nHost: s\r\nContent-Length: 10\r\n\r\nhalf");
    let response = client.response().unwrap();
    assert_eq!((response.status, response.error().as_str()), (408, "body_too_slow"));
    eventually(|| service.instance_count() == 0);
}

#[test]
fn output_is_kept_within_a_budget_until_clients_read_it() {
    let node = Node::new(100);
    let (service, threads) =
        node.serve("s", &format!("{STDIN}\n[limits]\ntimeout = \"60s\""), filter);
    node.serve("t", STDIN, filter);
    let most = 16 << 20;
    assert_eq!(post(&mut node.connect(), "s", &format!("print {most}")).body.len(), most);
    let too_much = post(&mut node.connect(), "s", &format!("print {}", most + 1));
    assert_eq!(too_much.status, 502);
    // These do not read: half of the node's 256 MiB is the function's, which is less than
    // they ask for.
    let before = threads.launched.load(Ordering::SeqCst);
    let silent: Vec<_> = (0..16)
        .map(|_| {
            let mut client = node.connect();
            rustix::net::sockopt::set_socket_recv_buffer_size(&client.stream, 4096).unwrap();
            let body = format!("print {most}");
            client.send(format!(
                "POST / HTTP/1.1\r\nHost: s\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            ));
            client
        })
        .collect();
    let refused = || {
        let text = node.shared.metrics().text(&[], 0);
        let mut lines = text.lines();
        lines.any(|line| line.contains("function=\"s\"") && line.contains("error=\"no_capacity\""))
    };
    eventually(refused);
    eventually(|| threads.launched.load(Ordering::SeqCst) == before + 16);
    eventually(|| service.instance_count() == 0);
    assert_eq!(post(&mut node.connect(), "t", "b").status, 200, "others have their share");
    // What was kept for a client is free when it is gone.
    drop(silent);
    eventually(|| post(&mut node.connect(), "s", &format!("print {most}")).status == 200);
}
