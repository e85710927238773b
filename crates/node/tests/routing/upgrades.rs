//! Connections that change their protocol.

use crate::SHARED;
use crate::common::{Node, PATIENCE, eventually, field};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

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
            while guest.socket.read(&mut byte).unwrap_or(0) == 1 {
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

/// It reads slowly, too, so that the client's bytes wait in the gateway.
#[test]
fn an_instance_that_has_said_all_still_gets_all() {
    const LENGTH: usize = 8 << 20;
    let node = Node::new(10);
    let (tell, told) = mpsc::sync_channel(1);
    node.serve("f", "", move |guest| {
        guest.request();
        guest.send("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n");
        guest.socket.get_ref().shutdown(Shutdown::Write).unwrap();
        thread::sleep(Duration::from_millis(300));
        let mut bytes = Vec::new();
        guest.socket.read_to_end(&mut bytes).unwrap();
        tell.send(bytes).unwrap();
    });
    let mut client = node.connect();
    client.send("GET / HTTP/1.1\r\nHost: f\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n");
    assert!(client.head().unwrap().starts_with("HTTP/1.1 101"));
    assert_eq!(client.stream.read(&mut [0]).unwrap(), 0);
    let bytes: Vec<u8> = (0..LENGTH).map(|at| (at / 7) as u8).collect();
    client.stream.write_all(&bytes).unwrap();
    client.stream.shutdown(Shutdown::Write).unwrap();
    let got = told.recv_timeout(PATIENCE).unwrap();
    assert!(got == bytes, "{} of {LENGTH}", got.len());
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
