//! `/proc/net` as far as it speaks of interfaces and routes (proc(5)).

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::interfaces::{Interface, all, routes};
use crate::errno::Result;
use crate::state::kernel;

/// `/proc/net/dev`. Nothing is counted: packets do not exist here.
pub fn dev() -> Result<Vec<u8>> {
    let mut text = String::from(
        "Inter-|   Receive                                                |  Transmit\n \
         face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs \
         drop fifo colls carrier compressed\n",
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

/// `/proc/net/igmp`: the groups of each interface. All listen to 224.0.0.1, all hosts.
pub fn igmp() -> Result<Vec<u8>> {
    let mut text = String::from("Idx\tDevice    : Count Querier\tGroup    Users Timer\tReporter\n");
    for Interface { index, name, .. } in all() {
        let mut groups = joined(index, IpAddr::is_ipv4);
        groups.push((Ipv4Addr::new(224, 0, 0, 1).into(), 1));
        text += &format!("{index}\t{name:<10}: {:>5}      V3\n", groups.len());
        for (group, users) in groups {
            let IpAddr::V4(group) = group else { continue };
            let group = u32::from_ne_bytes(group.octets());
            text += &format!("\t\t\t\t{group:08X} {users:>5} 0:00000000\t\t0\n");
        }
    }
    Ok(text.into_bytes())
}

/// `/proc/net/igmp6`: the groups of each interface with IPv6. All listen to ff02::1, all nodes.
pub fn igmp6() -> Result<Vec<u8>> {
    let mut text = String::new();
    for interface in all() {
        if !interface.addresses.iter().any(|address| address.ip.is_ipv6()) {
            continue;
        }
        let (index, name) = (interface.index, interface.name);
        let mut groups = joined(index, IpAddr::is_ipv6);
        groups.push((Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1).into(), 1));
        for (group, users) in groups {
            let IpAddr::V6(group) = group else { continue };
            let group = u128::from(group);
            text += &format!("{index:<4} {name:<15} {group:032x} {users:>5} 0000000C 0\n");
        }
    }
    Ok(text.into_bytes())
}

/// The groups of a family that sockets have joined on an interface, with the number of sockets.
fn joined(interface: u32, is_of_family: fn(&IpAddr) -> bool) -> Vec<(IpAddr, u32)> {
    let mut groups = kernel().net.groups.of(interface);
    groups.retain(|(group, _)| is_of_family(group));
    groups
}

fn name_of(interfaces: &[Interface], index: u32) -> &'static str {
    interfaces.iter().find(|interface| interface.index == index).map_or("", |found| found.name)
}
