//! Bodies and answers that pass through the gateway.

use crate::common::Node;
use crate::{SHARED, echo_body, echo_path};
use std::thread;
use std::time::Duration;

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
