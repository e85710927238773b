//! Ports of this host: free ones, and those that processes listen on.

use crate::processes::descriptors;
use std::collections::BTreeSet;
use std::fs;
use std::net::{Ipv4Addr, TcpListener, UdpSocket};

/// A port of the loopback that is free for TCP and for UDP now. The host gives ports in no
/// order, so that nobody else gets this one soon.
pub fn free_port() -> u16 {
    let attempt = |_| {
        let tcp = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).ok()?;
        let port = tcp.local_addr().ok()?.port();
        UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).ok().map(|_| port)
    };
    (0..100).find_map(attempt).expect("a free port")
}

/// A port below 1024 that is free for TCP now; takes root.
pub fn free_privileged_port() -> u16 {
    let first = 600 + (std::process::id() % 400) as u16;
    let mut candidates = (first..1024).chain(512..first);
    candidates
        .find(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok())
        .expect("a free port below 1024")
}

/// The ports on which processes listen for TCP, in the network of the first one.
pub fn listening_ports(pids: &[u32]) -> BTreeSet<u16> {
    let open: BTreeSet<String> = pids
        .iter()
        .flat_map(|pid| descriptors(*pid).into_values())
        .map(|descriptor| descriptor.target)
        .collect();
    let tables = ["tcp", "tcp6"].map(|table| {
        fs::read_to_string(format!("/proc/{}/net/{table}", pids[0])).unwrap_or_default()
    });
    let lines = tables.iter().flat_map(|table| table.lines().skip(1));
    // proc_pid_net(5): the local address, the state (0A: listening), the inode of the socket.
    let listening = lines.filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_ours = open.contains(&format!("socket:[{}]", fields.get(9)?));
        let (_, port) = fields.get(1)?.rsplit_once(':')?;
        (is_ours && *fields.get(3)? == "0A").then(|| u16::from_str_radix(port, 16).ok())?
    });
    listening.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_of_this_process_is_found() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let own = [std::process::id()];
        assert!(listening_ports(&own).contains(&port));
        drop(listener);
        assert!(!listening_ports(&own).contains(&port));
        assert!(TcpListener::bind((Ipv4Addr::LOCALHOST, free_port())).is_ok());
    }
}
