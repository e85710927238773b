//! Ports of this host: free ones, and those that processes listen on.

use crate::binary::build_directory;
use crate::processes::descriptors;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

/// A port of the loopback that is free for TCP and for UDP now. It is none of those that the host
/// gives to whoever asks for any, nor one that another test is told soon: until somebody binds it,
/// nobody else does.
pub fn free_port() -> u16 {
    static TOLD: AtomicU32 = AtomicU32::new(0);
    static OWN: Mutex<Vec<File>> = Mutex::new(Vec::new());
    let ports = chosen_ports();
    let count = u32::from(ports.end - ports.start);
    // Test processes have numbers that follow each other, and take few ports.
    let first = std::process::id() % count * 61;
    let attempt = |_| {
        let place = (first + TOLD.fetch_add(1, Ordering::Relaxed)) % count;
        let port = ports.start + place as u16;
        TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok()?;
        UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).ok()?;
        OWN.lock().unwrap_or_else(PoisonError::into_inner).extend(claim(port)?);
        Some(port)
    };
    (0..count).find_map(attempt).expect("a free port")
}

/// Tells test programs that run beside this one that it has a port, as long as the file is open. `None`:
/// another one has it. Where there can be no file, nobody is told.
fn claim(port: u16) -> Option<Option<File>> {
    let directory = build_directory().join("ports");
    let file = fs::create_dir_all(&directory)
        .and_then(|()| File::create(directory.join(port.to_string())));
    match file {
        Ok(file) => file.try_lock().is_ok().then_some(Some(file)),
        Err(_) => Some(None),
    }
}

/// Ports that sockets get whose program has chosen them: those below the ones that the host gives
/// (`ip_local_port_range` in ip(7)), unless it gives nearly all.
fn chosen_ports() -> Range<u16> {
    let text = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let given = text.split_whitespace().next().and_then(|first| first.parse().ok());
    let end = given.filter(|first| *first > 16_000).unwrap_or(32_000).min(32_000);
    end - 12_000..end
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
    }

    #[test]
    fn a_port_is_told_once() {
        let ports = [free_port(), free_port()];
        assert_ne!(ports[0], ports[1]);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, ports[0]));
        assert!(listener.is_ok(), "{listener:?}");
    }
}
