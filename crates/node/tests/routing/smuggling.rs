//! Requests that could be read in several ways, and what is left out of those that cannot.

use crate::SHARED;
use crate::common::{Node, Seen, field};
use std::net::Shutdown;
use std::sync::{Arc, Mutex};

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
