//! Senders of datagrams.

use crate::common::{Node, PATIENCE, eventually};
use crate::{echo_path, has_many_descriptors};
use std::net::UdpSocket;
use std::thread;

#[test]
fn forged_senders_of_datagrams_take_few_descriptors() {
    let _alone = has_many_descriptors();
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
