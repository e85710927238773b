//! What kinds of addresses there are, as far as egress is concerned.

use std::net::{IpAddr, Ipv4Addr};

use thaw_abi::network::{HOST_ADDRESS, OWN_ADDRESS, OWN_ADDRESS_V6, RESOLVER_ADDRESS};

/// Addresses that no rule allows: those of the host itself, which have a name of
/// their own, those that are none, and those that stand for something else in a
/// sandbox. `ip` is canonical: never an IPv4 address in IPv6 clothes.
pub fn is_nowhere(ip: IpAddr) -> bool {
    if ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() {
        return true;
    }
    match ip {
        IpAddr::V4(ip) => {
            let special = [OWN_ADDRESS, HOST_ADDRESS, RESOLVER_ADDRESS];
            // 0.0.0.0/8 is "this network", which Linux takes for the host.
            ip.is_broadcast() || ip.octets()[0] == 0 || special.contains(&ip.octets())
        }
        // Not ::a.b.c.d either, an obsolete way to write an IPv4 address.
        IpAddr::V6(ip) => ip.octets() == OWN_ADDRESS_V6 || ip.segments()[..6] == [0; 6],
    }
}

/// Whether a rule that does not write the address itself may lead to it. What
/// answers at link-local addresses (a cloud's metadata service, for one) trusts
/// whoever is on the host, so a name must not be enough, nor `*`.
pub fn is_public(ip: IpAddr) -> bool {
    !is_nowhere(ip) && !is_link_local(ip)
}

/// Whether the address has a meaning on the host's own link only.
pub fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// The host's loopback address.
pub const HOST_LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
