//! What kinds of addresses there are, as far as egress is concerned.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use thaw_abi::network::{HOST_ADDRESS, OWN_ADDRESS, OWN_ADDRESS_V6, RESOLVER_ADDRESS};

/// Who answers at an address, as far as the address itself tells. The later, the
/// more a rule must say before it leads there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reach {
    /// Anybody on the Internet. The networks for documentation (RFC 5737, RFC 3849)
    /// count as such: nobody answers there.
    Public,
    /// Somebody in a network that is not the Internet: RFC 1918, RFC 4193 and what
    /// the registries of special addresses (RFC 6890) reserve besides.
    Private,
    /// Somebody on the host's own link.
    LinkLocal,
    /// The metadata service of a cloud, which trusts whoever is on the host and
    /// hands out its credentials.
    Metadata,
    /// Nobody that a rule can mean: the host itself, which has a name of its own,
    /// addresses that are none, and those that stand for something else in a sandbox.
    Nowhere,
}

/// The host's loopback address.
pub const HOST_LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Metadata services outside link-local addresses, and the best known of those
/// inside: AWS, Azure, Google Cloud and others, AWS ECS and EKS, Alibaba, Oracle,
/// Tencent.
const METADATA_V4: [Ipv4Addr; 8] = [
    Ipv4Addr::new(169, 254, 169, 254),
    Ipv4Addr::new(169, 254, 170, 2),
    Ipv4Addr::new(169, 254, 170, 23),
    Ipv4Addr::new(168, 63, 129, 16),
    Ipv4Addr::new(100, 100, 100, 200),
    Ipv4Addr::new(192, 0, 0, 192),
    Ipv4Addr::new(169, 254, 0, 23),
    Ipv4Addr::new(169, 254, 10, 10),
];

/// The same for IPv6: AWS, AWS EKS, Google Cloud, Scaleway.
const METADATA_V6: [Ipv6Addr; 4] = [
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254),
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x23),
    Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254),
    Ipv6Addr::new(0xfd00, 0x42, 0, 0, 0, 0, 0, 0x42),
];

/// Who answers at `ip`. An IPv6 address that stands for an IPv4 address, by a
/// translator or through a tunnel, is at least what that address is.
pub fn reach(ip: IpAddr) -> Reach {
    match ip.to_canonical() {
        IpAddr::V4(ip) => reach_v4(ip),
        IpAddr::V6(ip) => {
            let embedded = embedded(ip).map(reach_v4).max();
            embedded.map_or(reach_v6(ip), |embedded| embedded.max(reach_v6(ip)))
        }
    }
}

fn reach_v4(ip: Ipv4Addr) -> Reach {
    let [a, b, c, _] = ip.octets();
    let stands_for_others = [OWN_ADDRESS, HOST_ADDRESS, RESOLVER_ADDRESS].contains(&ip.octets());
    // 0.0.0.0/8 is "this network", which Linux takes for the host.
    if ip.is_loopback() || ip.is_multicast() || ip.is_broadcast() || a == 0 || stands_for_others {
        return Reach::Nowhere;
    }
    if METADATA_V4.contains(&ip) {
        return Reach::Metadata;
    }
    if ip.is_link_local() {
        return Reach::LinkLocal;
    }
    let is_private = ip.is_private()
        // Behind a carrier's translator (RFC 6598).
        || (a == 100 && (64..128).contains(&b))
        // Protocol assignments (RFC 6890), benchmarks (RFC 2544), reserved (RFC 1112).
        || (a, b, c) == (192, 0, 0)
        || (a == 198 && (b == 18 || b == 19))
        || a >= 240;
    if is_private { Reach::Private } else { Reach::Public }
}

fn reach_v6(ip: Ipv6Addr) -> Reach {
    let segments = ip.segments();
    // Not ::a.b.c.d either, an obsolete way to write an IPv4 address.
    if ip.is_multicast() || ip.octets() == OWN_ADDRESS_V6 || segments[..6] == [0; 6] {
        return Reach::Nowhere;
    }
    if METADATA_V6.contains(&ip) {
        return Reach::Metadata;
    }
    if ip.is_unicast_link_local() {
        return Reach::LinkLocal;
    }
    let is_private = ip.is_unique_local()
        // Site-local addresses (RFC 3879), which some still have.
        || segments[0] & 0xffc0 == 0xfec0
        // A translator of the local network (RFC 8215): wherever that leads.
        || segments[..3] == [0x64, 0xff9b, 1]
        // Discard-only (RFC 6666), and benchmarks (RFC 5180).
        || segments[..4] == [0x100, 0, 0, 0]
        || segments[..3] == [0x2001, 2, 0];
    // Outside of what is assigned to the Internet (2000::/3), except its translator.
    let is_assigned = segments[0] & 0xe000 == 0x2000 || is_translated(ip);
    if is_private || !is_assigned { Reach::Private } else { Reach::Public }
}

/// The IPv4 addresses that an address stands for, besides its own.
pub fn stand_ins(ip: IpAddr) -> impl Iterator<Item = IpAddr> {
    let v6 = match ip {
        IpAddr::V4(_) => None,
        IpAddr::V6(ip) => Some(ip),
    };
    v6.into_iter().flat_map(embedded).map(IpAddr::V4)
}

/// Whether a translator to IPv4 (RFC 6052) answers for it.
fn is_translated(ip: Ipv6Addr) -> bool {
    ip.segments()[..6] == [0x64, 0xff9b, 0, 0, 0, 0]
}

/// The IPv4 addresses that packets to an IPv6 address may end up at.
fn embedded(ip: Ipv6Addr) -> impl Iterator<Item = Ipv4Addr> {
    let s = ip.segments();
    let join = |high: u16, low: u16| Ipv4Addr::from(u32::from(high) << 16 | u32::from(low));
    // IPv4-translated (RFC 2765).
    let translated = is_translated(ip) || s[..6] == [0, 0, 0, 0, 0xffff, 0];
    let six_to_four = s[0] == 0x2002;
    // Teredo (RFC 4380): the server, and the client with all bits inverted.
    let teredo = s[..2] == [0x2001, 0];
    // ISATAP (RFC 5214), in any network.
    let isatap = s[4] & !0x200 == 0 && s[5] == 0x5efe;
    [
        translated.then(|| join(s[6], s[7])),
        six_to_four.then(|| join(s[1], s[2])),
        teredo.then(|| join(s[2], s[3])),
        teredo.then(|| join(!s[6], !s[7])),
        isatap.then(|| join(s[6], s[7])),
    ]
    .into_iter()
    .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(texts: &[&str]) -> Vec<Reach> {
        texts.iter().map(|text| reach(text.parse().unwrap())).collect()
    }

    fn assert_all(texts: &[&str], expected: Reach) {
        for (text, found) in texts.iter().zip(all(texts)) {
            assert_eq!(found, expected, "{text}");
        }
    }

    #[test]
    fn each_address_has_its_kind() {
        assert_all(
            &["1.1.1.1", "192.0.2.1", "198.17.0.1", "100.63.0.1", "100.128.0.1"],
            Reach::Public,
        );
        assert_all(&["2606:4700::1", "2001:db8::1", "2001:4860::8888"], Reach::Public);
        assert_all(
            &[
                "10.1.2.3",
                "172.16.0.1",
                "172.31.255.255",
                "192.168.1.1",
                "100.64.0.1",
                "100.127.0.1",
                "192.0.0.1",
                "198.18.0.1",
                "198.19.0.1",
                "240.0.0.1",
                "fd00::1",
                "fc00::1",
                "fec0::1",
                "64:ff9b:1::808:808",
                "100::1",
                "2001:2::1",
                "4000::1",
                "8000::1",
            ],
            Reach::Private,
        );
        assert_all(&["169.254.1.1", "fe80::1"], Reach::LinkLocal);
        assert_all(
            &[
                "169.254.169.254",
                "168.63.129.16",
                "100.100.100.200",
                "192.0.0.192",
                "fd00:ec2::254",
                "fd20:ce::254",
            ],
            Reach::Metadata,
        );
        assert_all(
            &["127.0.0.1", "0.0.0.0", "0.1.2.3", "224.0.0.1", "255.255.255.255", "10.0.2.2"],
            Reach::Nowhere,
        );
        assert_all(&["::1", "::", "::7f00:1", "ff02::1", "fd00:7468:6177::15"], Reach::Nowhere);
    }

    #[test]
    fn an_ipv4_address_keeps_its_kind_in_ipv6_clothes() {
        // Mapped, translated twice, 6to4, Teredo (server, client), ISATAP.
        assert_all(
            &[
                "::ffff:10.0.0.1",
                "::ffff:0:10.0.0.1",
                "64:ff9b::10.0.0.1",
                "2002:a00:1::1",
                "2001:0:a00:1:0:0:f7f7:f7f7",
                "2001:0:808:808:0:0:f5ff:fffe",
                "2606:4700::5efe:10.0.0.1",
                "2606:4700::200:5efe:10.0.0.1",
            ],
            Reach::Private,
        );
        assert_all(
            &["::ffff:169.254.169.254", "64:ff9b::169.254.169.254", "2002:a9fe:a9fe::"],
            Reach::Metadata,
        );
        assert_all(&["64:ff9b::127.0.0.1", "2002:7f00:1::", "::ffff:127.0.0.1"], Reach::Nowhere);
        assert_all(&["64:ff9b::8.8.8.8", "2002:808:808::1", "::ffff:8.8.8.8"], Reach::Public);
    }
}
