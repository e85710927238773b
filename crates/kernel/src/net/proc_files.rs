//! `/proc/net` as far as it speaks of interfaces, routes, and sockets that are bound (proc(5)).

use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::IpAddr;

use super::address::Endpoint;
use super::interfaces::{Interface, all, routes};
use super::socket::Protocol;
use super::udp::UdpNetwork;
use crate::errno::Result;
use crate::state::kernel;

/// `/proc/net/dev`. Nothing is counted: packets do not exist here.
pub fn dev() -> Result<Vec<u8>> {
    let mut text = String::from(
        "Inter-|   Receive                                                |  Transmit\n \
         face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs \
         drop fifo colls host_process compressed\n",
    );
    for interface in all() {
        text += &format!("{:>6}: ", interface.name);
        text += "      0       0    0    0    0     0          0         0        0       0    0    \
                 0    0     0       0          0\n";
    }
    Ok(text.into_bytes())
}

/// `/proc/net/route`: the IPv4 routes that lead somewhere.
pub fn route() -> Result<Vec<u8>> {
    let mut text = String::from(
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n",
    );
    // As the kernel has them in memory: in network byte order, read as a number.
    let hex = |ip: Option<IpAddr>| match ip {
        Some(IpAddr::V4(ip)) => format!("{:08X}", u32::from_ne_bytes(ip.octets())),
        _ => String::from("00000000"),
    };
    for found in routes().iter().filter(|found| !found.local && found.destination.is_ipv4()) {
        // RTF_UP, RTF_GATEWAY.
        let flags = if found.gateway.is_some() { 3 } else { 1 };
        let mask = u32::MAX.checked_shl(32 - u32::from(found.prefix_len)).unwrap_or(0).to_be();
        text += &format!(
            "{}\t{}\t{}\t{flags:04X}\t0\t0\t0\t{mask:08X}\t0\t0\t0\n",
            name_of(&all(), found.interface),
            hex(Some(found.destination)),
            hex(found.gateway),
        );
    }
    Ok(text.into_bytes())
}

/// `/proc/net/if_inet6`: address, interface, prefix, scope, flags, name.
pub fn if_inet6() -> Result<Vec<u8>> {
    /// `IFA_F_PERMANENT`.
    const PERMANENT: u8 = 0x80;
    let mut text = String::new();
    for interface in all() {
        for address in &interface.addresses {
            let IpAddr::V6(ip) = address.ip else { continue };
            // IPV6_ADDR_LOOPBACK, or global.
            let scope = if ip.is_loopback() { 0x10 } else { 0 };
            text += &format!(
                "{:032x} {:02x} {:02x} {scope:02x} {PERMANENT:02x} {:>8}\n",
                u128::from(ip),
                interface.index,
                address.prefix_len,
                interface.name,
            );
        }
    }
    Ok(text.into_bytes())
}

/// `/proc/net/igmp`: every interface listens to 224.0.0.1, all hosts.
pub fn igmp() -> Result<Vec<u8>> {
    let mut text = String::from("Idx\tDevice    : Count Querier\tGroup    Users Timer\tReporter\n");
    for Interface { index, name, .. } in all() {
        text += &format!("{index}\t{name:<10}:     1      V3\n");
        text += "\t\t\t\t010000E0     1 0:00000000\t\t0\n";
    }
    Ok(text.into_bytes())
}

/// `/proc/net/igmp6`: every interface with IPv6 listens to ff02::1, all nodes.
pub fn igmp6() -> Result<Vec<u8>> {
    let mut text = String::new();
    for interface in all() {
        if interface.addresses.iter().any(|address| address.ip.is_ipv6()) {
            let (index, name) = (interface.index, interface.name);
            text += &format!("{index:<4} {name:<15} ff020000000000000000000000000001     1 ");
            text += "0000000C 0\n";
        }
    }
    Ok(text.into_bytes())
}

/// `TCP_ESTABLISHED`, `TCP_CLOSE` and `TCP_LISTEN`.
const ESTABLISHED: u8 = 1;
const CLOSE: u8 = 7;
const LISTEN: u8 = 10;

/// What begins a table of sockets of IPv4.
pub const HEADING: &str = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";
const HEADING_6: &str = "  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";

/// `/proc/net/tcp`: the sockets that listen. Connections are not listed.
pub fn tcp() -> Result<Vec<u8>> {
    Ok(table(false, tcp_rows()))
}

/// `/proc/net/tcp6`, likewise.
pub fn tcp6() -> Result<Vec<u8>> {
    Ok(table(true, tcp_rows()))
}

/// `/proc/net/udp`: the sockets that are bound.
pub fn udp() -> Result<Vec<u8>> {
    Ok(table(false, udp_rows(&kernel().net.udp)))
}

/// `/proc/net/udp6`, likewise.
pub fn udp6() -> Result<Vec<u8>> {
    Ok(table(true, udp_rows(&kernel().net.udp)))
}

/// A socket in a table.
struct Row {
    local: Endpoint,
    remote: Option<Endpoint>,
    state: u8,
    ino: u64,
}

fn tcp_rows() -> Vec<Row> {
    let bound = kernel().net.tcp.ports.bound().into_iter();
    let listening = bound.filter(|(_, is_listening, _)| *is_listening);
    let row = |(local, _, socket): (_, _, Arc<super::tcp::TcpSocket>)| Row {
        local,
        remote: None,
        state: LISTEN,
        ino: socket.common().ino,
    };
    listening.map(row).collect()
}

fn udp_rows(network: &UdpNetwork) -> Vec<Row> {
    let row = |(local, _, socket): (_, _, Arc<super::udp::UdpSocket>)| {
        let remote = socket.connected_to();
        let state = if remote.is_some() { ESTABLISHED } else { CLOSE };
        Row { local, remote, state, ino: socket.common().ino }
    };
    network.ports.bound().into_iter().map(row).collect()
}

/// The rows of one family.
fn table(is_v6: bool, rows: Vec<Row>) -> Vec<u8> {
    let mut text = String::from(if is_v6 { HEADING_6 } else { HEADING });
    let of_family = rows.into_iter().filter(|row| row.local.ip.is_ipv6() == is_v6);
    for (number, Row { local, remote, state, ino }) in of_family.enumerate() {
        let remote = remote.filter(|remote| remote.ip.is_ipv6() == is_v6);
        let nowhere = format!("{}:0000", "0".repeat(if is_v6 { 32 } else { 8 }));
        let remote = remote.map_or(nowhere, hexadecimal);
        text += &format!(
            "{number:4}: {} {remote} {state:02X} 00000000:00000000 00:00000000 00000000     0        \
             0 {ino} 1 0000000000000000 100 0 0 10 0\n",
            hexadecimal(local),
        );
    }
    text.into_bytes()
}

/// Address and port as the tables have them: words of the address in network byte order, read as numbers.
fn hexadecimal(at: Endpoint) -> String {
    let words = |bytes: &[u8]| -> String {
        let words = bytes.chunks_exact(4).map(|word| [word[0], word[1], word[2], word[3]]);
        words.map(|word| format!("{:08X}", u32::from_ne_bytes(word))).collect()
    };
    let address = match at.ip {
        IpAddr::V4(ip) => words(&ip.octets()),
        IpAddr::V6(ip) => words(&ip.octets()),
    };
    format!("{address}:{:04X}", at.port)
}

fn name_of(interfaces: &[Interface], index: u32) -> &'static str {
    interfaces.iter().find(|interface| interface.index == index).map_or("", |found| found.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_stand_in_the_table_of_their_family() {
        let at = |ip: &str, port| Endpoint { ip: ip.parse().unwrap(), port };
        let rows = || {
            let row = |local, ino| Row { local, remote: None, state: LISTEN, ino };
            alloc::vec![row(at("127.0.0.1", 8080), 7), row(at("::1", 22), 8)]
        };
        let text = |is_v6| String::from_utf8(table(is_v6, rows())).unwrap();
        let (four, six) = (text(false), text(true));
        assert_eq!(
            four.lines().nth(1).unwrap(),
            "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        \
             0 7 1 0000000000000000 100 0 0 10 0"
        );
        assert!(six.contains("   0: 00000000000000000000000001000000:0016 "), "{six}");
        assert_eq!((four.lines().count(), six.lines().count()), (2, 2));
    }
}
