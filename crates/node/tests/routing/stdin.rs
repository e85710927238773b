//! Functions that read standard input.

use crate::common::{Guest, Node, Response, Wire, eventually};
use crate::echo_path;
use std::net::Shutdown;
use std::sync::atomic::Ordering;
use thaw_sandbox::GuestExit;

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
