//! The network interfaces and routes that a program sees: loopback, and with
//! outgoing connections an Ethernet card that is none (netdevice(7)).

use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use thaw_abi::network;

use super::outside::Reach;
use crate::net::{namespace, outside};
use crate::state::kernel;

/// `ARPHRD_ETHER`.
const ARPHRD_ETHER: u16 = 1;
/// `ARPHRD_LOOPBACK`.
const ARPHRD_LOOPBACK: u16 = 772;

/// `RT_SCOPE_UNIVERSE`, `RT_SCOPE_LINK` and `RT_SCOPE_HOST` (rtnetlink(7)).
pub const SCOPE_UNIVERSE: u8 = 0;
/// See [`SCOPE_UNIVERSE`].
pub const SCOPE_LINK: u8 = 253;
/// See [`SCOPE_UNIVERSE`].
pub const SCOPE_HOST: u8 = 254;

/// An interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its number, from 1.
    pub index: u32,
    /// Its name.
    pub name: &'static str,
    /// `ARPHRD_*`.
    pub kind: u16,
    /// `IFF_*`.
    pub flags: u32,
    /// Largest packet, in bytes.
    pub mtu: u32,
    /// Hardware address.
    pub hardware: [u8; 6],
    /// Hardware address of all on the link.
    pub hardware_broadcast: [u8; 6],
    /// `IF_OPER_*` (linux/if.h).
    pub state: u8,
    /// Its addresses.
    pub addresses: Vec<InterfaceAddress>,
}

impl Interface {
    /// Its first address of the family of `to`.
    pub fn address_for(&self, to: IpAddr) -> Option<IpAddr> {
        let mut own = self.addresses.iter().map(|address| address.ip);
        own.find(|ip| ip.is_ipv4() == to.is_ipv4())
    }
}

/// An address of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// The address.
    pub ip: IpAddr,
    /// Bits of its network part.
    pub prefix_len: u8,
    /// The address of all in the network, if there is one.
    pub broadcast: Option<Ipv4Addr>,
    /// `RT_SCOPE_*`.
    pub scope: u8,
}

impl InterfaceAddress {
    /// The network mask of an IPv4 address.
    pub fn mask(&self) -> Ipv4Addr {
        Ipv4Addr::from(u32::MAX.checked_shl(32 - u32::from(self.prefix_len)).unwrap_or(0))
    }
}

/// Where packets go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Where to; the unspecified address with no bits is everywhere.
    pub destination: IpAddr,
    /// Bits of the destination that count.
    pub prefix_len: u8,
    /// Over whom.
    pub gateway: Option<IpAddr>,
    /// Number of the interface.
    pub interface: u32,
    /// From which address.
    pub source: Option<IpAddr>,
    /// To the sandbox itself: in the table of local routes.
    pub local: bool,
    /// `RT_SCOPE_*`.
    pub scope: u8,
}

impl Route {
    /// Whether packets to `ip` take it.
    pub fn leads_to(&self, ip: IpAddr) -> bool {
        let shift = |bits: u32| bits - u32::from(self.prefix_len).min(bits);
        match (self.destination, ip) {
            (IpAddr::V4(own), IpAddr::V4(ip)) => {
                let differ = u32::from(own) ^ u32::from(ip);
                differ.checked_shr(shift(32)).unwrap_or(0) == 0
            }
            (IpAddr::V6(own), IpAddr::V6(ip)) => {
                let differ = u128::from(own) ^ u128::from(ip);
                differ.checked_shr(shift(128)).unwrap_or(0) == 0
            }
            _ => false,
        }
    }
}

/// `IFF_UP | IFF_LOOPBACK | IFF_RUNNING | IFF_LOWER_UP`.
const LOOPBACK_FLAGS: u32 = 0x1_0049;
/// `IFF_UP | IFF_BROADCAST | IFF_RUNNING | IFF_MULTICAST | IFF_LOWER_UP`.
const ETHERNET_FLAGS: u32 = 0x1_1043;
/// Number of the loopback interface.
pub const LOOPBACK: u32 = 1;
/// Number of the other one.
const ETHERNET: u32 = 2;

const OWN: Ipv4Addr = {
    let [a, b, c, d] = network::OWN_ADDRESS;
    Ipv4Addr::new(a, b, c, d)
};

/// All interfaces, by number.
pub fn all() -> Vec<Interface> {
    let scope = namespace::own().scope.clone();
    if !scope.is_of_sandbox() {
        return alone(scope.is_up());
    }
    made_for(outside::reach(), kernel().fs.boot_id())
}

/// Those of a namespace other than the first one.
fn alone(is_up: bool) -> Vec<Interface> {
    const IFF_LOOPBACK: u32 = 8;
    const IF_OPER_DOWN: u8 = 2;
    let mut all = made_for(Reach::default(), [0; 16]);
    if !is_up {
        for loopback in &mut all {
            loopback.flags = IFF_LOOPBACK;
            loopback.state = IF_OPER_DOWN;
            loopback.addresses.clear();
        }
    }
    all
}

fn made_for(reach: Reach, boot_id: [u8; 16]) -> Vec<Interface> {
    let address =
        |ip, prefix_len, broadcast, scope| InterfaceAddress { ip, prefix_len, broadcast, scope };
    let mut interfaces = alloc::vec![Interface {
        index: LOOPBACK,
        name: "lo",
        kind: ARPHRD_LOOPBACK,
        flags: LOOPBACK_FLAGS,
        mtu: 65536,
        hardware: [0; 6],
        hardware_broadcast: [0; 6],
        // IF_OPER_UNKNOWN
        state: 0,
        addresses: alloc::vec![
            address(Ipv4Addr::LOCALHOST.into(), 8, None, SCOPE_HOST),
            address(Ipv6Addr::LOCALHOST.into(), 128, None, SCOPE_HOST),
        ],
    }];
    if !reach.v4 {
        return interfaces;
    }
    let prefix_len = network::PREFIX_LEN;
    let mut addresses =
        alloc::vec![address(OWN.into(), prefix_len, Some(broadcast()), SCOPE_UNIVERSE)];
    if reach.v6 {
        let ip = Ipv6Addr::from(network::OWN_ADDRESS_V6);
        addresses.push(address(ip.into(), network::PREFIX_LEN_V6, None, SCOPE_UNIVERSE));
    }
    let [a, b, c, d, e, ..] = boot_id;
    interfaces.push(Interface {
        index: ETHERNET,
        name: "eth0",
        kind: ARPHRD_ETHER,
        flags: ETHERNET_FLAGS,
        mtu: 1500,
        // Locally administered, and another one in each copy of an image: unique
        // identifiers are made of it.
        hardware: [2, a, b, c, d, e],
        hardware_broadcast: [0xff; 6],
        // IF_OPER_UP
        state: 6,
        addresses,
    });
    interfaces
}

/// Whether an address is that of all in the network of an interface.
pub fn is_broadcast(ip: Ipv4Addr) -> bool {
    ip == broadcast() && outside::reach().v4
}

/// The address of all in the network of the Ethernet card.
fn broadcast() -> Ipv4Addr {
    Ipv4Addr::from(u32::from(OWN) | u32::MAX >> network::PREFIX_LEN)
}

/// All routes, the longest prefixes first.
pub fn routes() -> Vec<Route> {
    routes_of(&all())
}

fn routes_of(interfaces: &[Interface]) -> Vec<Route> {
    let mut routes = Vec::new();
    for interface in interfaces {
        for address in &interface.addresses {
            let full = if address.ip.is_ipv4() { 32 } else { 128 };
            let route = |destination, prefix_len, local, scope| Route {
                destination,
                prefix_len,
                gateway: None,
                interface: interface.index,
                source: Some(address.ip).filter(|ip| ip.is_ipv4()),
                local,
                scope,
            };
            routes.push(route(address.ip, full, true, SCOPE_HOST));
            if full == address.prefix_len {
                continue;
            }
            let network = network_of(address.ip, address.prefix_len);
            let local = interface.index == LOOPBACK;
            let scope = if local { SCOPE_HOST } else { SCOPE_LINK };
            routes.push(route(network, address.prefix_len, local, scope));
            if local {
                continue;
            }
            let (anywhere, gateway) = match address.ip {
                IpAddr::V4(_) => (
                    IpAddr::V4(Ipv4Addr::UNSPECIFIED),
                    IpAddr::V4(Ipv4Addr::from(network::HOST_ADDRESS)),
                ),
                IpAddr::V6(_) => (
                    IpAddr::V6(Ipv6Addr::UNSPECIFIED),
                    IpAddr::V6(Ipv6Addr::from(network::HOST_ADDRESS_V6)),
                ),
            };
            let default = route(anywhere, 0, false, SCOPE_UNIVERSE);
            routes.push(Route { gateway: Some(gateway), source: None, ..default });
        }
    }
    narrowest_first(routes)
}

/// Routes by the length of their prefix, otherwise in their order. There are few: the code of a stable
/// sort would take more of the kernel's page (docs/decisions/0009).
fn narrowest_first(routes: Vec<Route>) -> Vec<Route> {
    let mut ordered: Vec<Route> = Vec::new();
    for route in routes {
        let wider = ordered.iter().position(|known| known.prefix_len < route.prefix_len);
        ordered.insert(wider.unwrap_or(ordered.len()), route);
    }
    ordered
}

fn network_of(ip: IpAddr, prefix_len: u8) -> IpAddr {
    let prefix_len = u32::from(prefix_len);
    match ip {
        IpAddr::V4(ip) => {
            let mask = u32::MAX.checked_shl(32 - prefix_len).unwrap_or(0);
            IpAddr::V4(Ipv4Addr::from(u32::from(ip) & mask))
        }
        IpAddr::V6(ip) => {
            let mask = u128::MAX.checked_shl(128 - prefix_len).unwrap_or(0);
            IpAddr::V6(Ipv6Addr::from(u128::from(ip) & mask))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_way_out_only_with_outgoing_connections() {
        let alone = made_for(Reach::default(), [7; 16]);
        assert_eq!(alone.len(), 1);
        assert!(routes_of(&alone).iter().all(|route| route.interface == LOOPBACK));
        let both = made_for(Reach { v4: true, v6: true }, [7; 16]);
        assert_eq!(both[1].hardware, [2, 7, 7, 7, 7, 7]);
        let broadcast = Some("10.0.2.255".parse().unwrap());
        assert_eq!(both[1].addresses[0].broadcast, broadcast);
        assert_eq!(both[1].addresses[0].mask().to_string(), "255.255.255.0");
        assert_eq!(both[1].addresses.len(), 2);
    }

    #[test]
    fn the_longest_prefix_wins() {
        let routes = routes_of(&made_for(Reach { v4: true, v6: true }, [0; 16]));
        let to = |ip: &str| {
            let ip = ip.parse().unwrap();
            *routes.iter().find(|route| route.leads_to(ip)).unwrap()
        };
        assert_eq!(to("127.3.2.1").interface, LOOPBACK);
        assert!(to("10.0.2.15").local);
        assert_eq!((to("10.0.2.9").gateway, to("10.0.2.9").scope), (None, SCOPE_LINK));
        assert_eq!(to("192.0.2.1").gateway, Some("10.0.2.2".parse().unwrap()));
        assert_eq!(to("2001:db8::1").prefix_len, 0);
        assert_eq!(to("::1").interface, LOOPBACK);
    }
}
