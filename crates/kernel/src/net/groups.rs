//! Multicast groups and broadcast, within the sandbox: what is sent to many never leaves it (ip(7),
//! ipv6(7)).
//!
//! A socket joins a group on an interface. A datagram to the group goes out over one interface, and all
//! sockets at its port hear it if somebody has joined the group there, as far as their own memberships
//! allow. Without a way to the outside there is only the loopback interface, and it has the routes to
//! all groups.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::interfaces::{self, Interface, LOOPBACK};
use crate::errno::{Errno, Result};
use crate::state::kernel;
use crate::sync::KernelCell;

/// `net.ipv4.igmp_max_memberships`, for IPv6, too.
const MEMBERSHIPS_MAX: usize = 20;
/// `net.ipv4.igmp_max_msf`: most sources that a membership names.
const SOURCES_MAX: usize = 10;

/// Stands for the interface of a membership that names none: which one leads to a group changes when a
/// sandbox is woken with another network.
const UNNAMED: u32 = 0;

/// To whom a datagram goes that goes to many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// The members of a group.
    Group,
    /// All.
    Everybody,
}

/// The audience of an address, if it is not that of a single machine.
pub fn audience(ip: IpAddr) -> Option<Audience> {
    const LOOPBACK_BROADCAST: Ipv4Addr = Ipv4Addr::new(127, 255, 255, 255);
    match ip {
        ip if ip.is_multicast() => Some(Audience::Group),
        IpAddr::V4(Ipv4Addr::BROADCAST | LOOPBACK_BROADCAST) => Some(Audience::Everybody),
        IpAddr::V4(ip) if interfaces::is_broadcast(ip) => Some(Audience::Everybody),
        _ => None,
    }
}

/// Whether every interface is in a group: all hosts, all nodes.
fn is_of_all(group: IpAddr) -> bool {
    const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    const ALL_NODES_OF_INTERFACE: Ipv6Addr = Ipv6Addr::new(0xff01, 0, 0, 0, 0, 0, 0, 1);
    match group {
        IpAddr::V4(group) => group == Ipv4Addr::new(224, 0, 0, 1),
        IpAddr::V6(group) => group == ALL_NODES || group == ALL_NODES_OF_INTERFACE,
    }
}

/// How many sockets are in which groups, on each interface. Saved.
#[derive(Default)]
pub struct Joined {
    users: KernelCell<BTreeMap<(u32, IpAddr), u32>>,
}

impl Joined {
    fn add(&self, interface: u32, group: IpAddr) {
        *self.users.borrow_mut().entry((interface, group)).or_default() += 1;
    }

    fn remove(&self, interface: u32, group: IpAddr) {
        let mut users = self.users.borrow_mut();
        match users.get_mut(&(interface, group)) {
            Some(count) if *count > 1 => *count -= 1,
            _ => {
                users.remove(&(interface, group));
            }
        }
    }

    /// Whether an interface listens to a group.
    pub fn contains(&self, interface: u32, group: IpAddr) -> bool {
        let users = self.users.borrow_mut();
        let is_joined = |interface| users.contains_key(&(interface, group));
        is_of_all(group) || is_joined(interface) || is_joined(UNNAMED)
    }

    /// The groups of an interface that somebody has joined, with the number of sockets.
    pub fn of(&self, interface: u32) -> Vec<(IpAddr, u32)> {
        let users = self.users.borrow_mut();
        let mut found = BTreeMap::new();
        for ((_, group), count) in
            users.iter().filter(|((known, group), _)| resolved(*known, *group) == interface)
        {
            *found.entry(*group).or_default() += *count;
        }
        found.into_iter().collect()
    }
}

fn joined() -> &'static Joined {
    &kernel().net.groups
}

/// Which senders a member hears (`MCAST_INCLUDE` and `MCAST_EXCLUDE`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listening {
    /// Those of the list only.
    To,
    /// All but those of the list.
    NotTo,
}

struct Membership {
    group: IpAddr,
    /// Its number, or [`UNNAMED`].
    interface: u32,
    /// The address that named the interface.
    named: Ipv4Addr,
    listening: Listening,
    sources: Vec<IpAddr>,
}

impl Membership {
    fn hears(&self, source: IpAddr) -> bool {
        self.sources.contains(&source) == (self.listening == Listening::To)
    }
}

/// How a program names an interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Naming {
    /// By its number; 0: not.
    pub index: u32,
    /// By its address; the wildcard: not.
    pub address: Option<Ipv4Addr>,
}

/// What a socket has of groups.
#[derive(Default)]
pub struct Groups {
    memberships: Vec<Membership>,
    /// Over which interface datagrams of IPv4 to groups go, and from which address.
    outgoing: Naming,
    /// The same of IPv6: number of the interface; 0: none was chosen.
    outgoing_v6: u32,
}

impl Groups {
    /// `IP_ADD_MEMBERSHIP` and its relatives: joins `group`; `EADDRINUSE` if the socket has done so.
    pub fn join(&mut self, group: IpAddr, naming: Naming) -> Result<()> {
        self.add(group, naming, Listening::NotTo)
    }

    fn add(&mut self, group: IpAddr, naming: Naming, listening: Listening) -> Result<()> {
        if !group.is_multicast() {
            return Err(Errno::EINVAL);
        }
        let interface = number_of(naming).ok_or(Errno::ENODEV)?;
        if self.position(group, interface).is_some() {
            return Err(Errno::EADDRINUSE);
        }
        if self.memberships.len() >= MEMBERSHIPS_MAX {
            return Err(Errno::ENOBUFS);
        }
        let named = naming.address.unwrap_or(Ipv4Addr::UNSPECIFIED);
        let sources = Vec::new();
        self.memberships.push(Membership { group, interface, named, listening, sources });
        joined().add(interface, group);
        Ok(())
    }

    /// `IP_DROP_MEMBERSHIP` and its relatives; `EADDRNOTAVAIL` if the socket is not in the group.
    pub fn leave(&mut self, group: IpAddr, naming: Naming) -> Result<()> {
        let is_meant =
            |known: &Membership| known.group == group && naming.address == Some(known.named);
        let found = match number_of(naming) {
            Some(interface) => self.position(group, interface),
            None => self.memberships.iter().position(is_meant),
        };
        self.remove(found.ok_or(Errno::EADDRNOTAVAIL)?);
        Ok(())
    }

    fn remove(&mut self, index: usize) {
        let removed = self.memberships.remove(index);
        joined().remove(removed.interface, removed.group);
    }

    /// Leaves all groups: the socket is closed.
    pub fn leave_all(&mut self) {
        while !self.memberships.is_empty() {
            self.remove(0);
        }
    }

    fn position(&self, group: IpAddr, interface: u32) -> Option<usize> {
        let at = |is_there: &dyn Fn(u32) -> bool| {
            let is_it = |known: &Membership| known.group == group && is_there(known.interface);
            self.memberships.iter().position(is_it)
        };
        let wanted = resolved(interface, group);
        at(&|known| known == interface).or_else(|| at(&|known| resolved(known, group) == wanted))
    }

    /// `IP_ADD_SOURCE_MEMBERSHIP` and its relatives: joins the group to hear one sender, or hears it, too.
    pub fn join_source(&mut self, group: IpAddr, source: IpAddr, naming: Naming) -> Result<()> {
        match self.add(group, naming, Listening::To) {
            Ok(()) | Err(Errno::EADDRINUSE) => {}
            outcome => return outcome,
        }
        self.add_source(group, source, naming, Listening::To)
    }

    /// `IP_BLOCK_SOURCE` and its relatives: a sender is heard no more.
    pub fn block(&mut self, group: IpAddr, source: IpAddr, naming: Naming) -> Result<()> {
        self.add_source(group, source, naming, Listening::NotTo)
    }

    /// `IP_UNBLOCK_SOURCE` and its relatives.
    pub fn unblock(&mut self, group: IpAddr, source: IpAddr, naming: Naming) -> Result<()> {
        self.remove_source(group, source, naming, Listening::NotTo)
    }

    /// `IP_DROP_SOURCE_MEMBERSHIP` and its relatives: who hears nobody has left the group.
    pub fn leave_source(&mut self, group: IpAddr, source: IpAddr, naming: Naming) -> Result<()> {
        self.remove_source(group, source, naming, Listening::To)
    }

    fn membership(&mut self, group: IpAddr, naming: Naming) -> Result<usize> {
        if !group.is_multicast() {
            return Err(Errno::EINVAL);
        }
        let interface = number_of(naming).ok_or(Errno::ENODEV)?;
        self.position(group, interface).ok_or(Errno::EINVAL)
    }

    fn add_source(
        &mut self,
        group: IpAddr,
        source: IpAddr,
        naming: Naming,
        listening: Listening,
    ) -> Result<()> {
        let index = self.membership(group, naming)?;
        let membership = &mut self.memberships[index];
        if membership.listening != listening && !membership.sources.is_empty() {
            return Err(Errno::EINVAL);
        }
        if membership.sources.contains(&source) {
            return Err(Errno::EADDRNOTAVAIL);
        }
        if membership.sources.len() >= SOURCES_MAX {
            return Err(Errno::ENOBUFS);
        }
        membership.listening = listening;
        membership.sources.push(source);
        Ok(())
    }

    fn remove_source(
        &mut self,
        group: IpAddr,
        source: IpAddr,
        naming: Naming,
        listening: Listening,
    ) -> Result<()> {
        let index = self.membership(group, naming)?;
        let membership = &mut self.memberships[index];
        if membership.listening != listening {
            return Err(Errno::EINVAL);
        }
        let known = membership.sources.iter().position(|known| *known == source);
        membership.sources.remove(known.ok_or(Errno::EADDRNOTAVAIL)?);
        if membership.sources.is_empty() && listening == Listening::To {
            self.remove(index);
        }
        Ok(())
    }

    /// `IP_MULTICAST_IF`; `EADDRNOTAVAIL` if there is no such interface.
    pub fn send_over(&mut self, naming: Naming) -> Result<()> {
        let is_none = naming.index == 0 && naming.address.is_none();
        if !is_none && known(naming).is_none() {
            return Err(Errno::EADDRNOTAVAIL);
        }
        self.outgoing = naming;
        Ok(())
    }

    /// `IPV6_MULTICAST_IF`; `ENODEV` if there is no such interface.
    pub fn send_v6_over(&mut self, index: u32) -> Result<()> {
        if index != 0 && known(Naming { index, address: None }).is_none() {
            return Err(Errno::ENODEV);
        }
        self.outgoing_v6 = index;
        Ok(())
    }

    /// What `IP_MULTICAST_IF` reads as.
    pub fn outgoing_address(&self) -> Ipv4Addr {
        self.outgoing.address.unwrap_or(Ipv4Addr::UNSPECIFIED)
    }

    /// What `IPV6_MULTICAST_IF` reads as.
    pub fn outgoing_v6(&self) -> u32 {
        self.outgoing_v6
    }

    /// The interface over which a datagram to `to` goes, and the address that it comes from, on a
    /// socket with the address `own`.
    pub fn way_out(&self, to: IpAddr, own: IpAddr) -> Option<(u32, IpAddr)> {
        let is_group = to.is_multicast();
        let chosen = match to {
            IpAddr::V4(_) if is_group => self.outgoing,
            IpAddr::V6(_) => Naming { index: self.outgoing_v6, address: None },
            IpAddr::V4(_) => Naming::default(),
        };
        let own = Some(own).filter(|own| !own.is_unspecified() && audience(*own).is_none());
        let interface = match own {
            Some(IpAddr::V4(own)) if chosen == Naming::default() => {
                known(Naming { index: 0, address: Some(own) }).or_else(|| named(chosen, to))?
            }
            _ => named(chosen, to)?,
        };
        let chosen_address = chosen.address.filter(|_| to.is_ipv4()).map(IpAddr::V4);
        let source = own.filter(|own| own.is_ipv4() == to.is_ipv4()).or(chosen_address);
        Some((interface.index, source.or_else(|| interface.address_for(to))?))
    }

    /// Whether a datagram to a group that has come over an interface is this socket's; `hears_all`:
    /// `IP_MULTICAST_ALL` or its relative.
    pub fn hears(&self, group: IpAddr, source: IpAddr, interface: u32, hears_all: bool) -> bool {
        let of = |interface| {
            let is_it = |known: &&Membership| known.group == group && known.interface == interface;
            self.memberships.iter().find(is_it)
        };
        of(interface).or_else(|| of(UNNAMED)).map_or(hears_all, |found| found.hears(source))
    }
}

/// The number of the interface that is named, or [`UNNAMED`]; `None`: there is no such interface.
fn number_of(naming: Naming) -> Option<u32> {
    match naming {
        Naming { index: 0, address: None } => Some(UNNAMED),
        _ => known(naming).map(|interface| interface.index),
    }
}

/// The interface with this number, or for [`UNNAMED`] the one that leads to a group now.
fn resolved(interface: u32, group: IpAddr) -> u32 {
    match interface {
        UNNAMED => named(Naming::default(), group).map_or(LOOPBACK, |found| found.index),
        interface => interface,
    }
}

/// The interface that is named, or, if none is, the one that leads to a group.
fn named(naming: Naming, group: IpAddr) -> Option<Interface> {
    if naming.index != 0 || naming.address.is_some() {
        return known(naming);
    }
    let mut all = interfaces::all();
    let leading = all.iter().position(|interface| {
        interface.index != LOOPBACK && interface.address_for(group).is_some()
    });
    Some(all.swap_remove(leading.unwrap_or(0)))
}

fn known(naming: Naming) -> Option<Interface> {
    let is_it = |interface: &Interface| match naming.address {
        _ if naming.index != 0 => interface.index == naming.index,
        Some(address) if address.is_loopback() => interface.index == LOOPBACK,
        Some(address) => interface.addresses.iter().any(|own| own.ip == IpAddr::V4(address)),
        None => false,
    };
    interfaces::all().into_iter().find(is_it)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Sandbox;

    const GROUP: IpAddr = IpAddr::V4(Ipv4Addr::new(239, 1, 2, 3));
    const A: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 1));
    const B: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

    fn by_address(a: u8) -> Naming {
        Naming { index: 0, address: Some(Ipv4Addr::new(a, 0, 0, 1)) }
    }

    #[test]
    fn a_group_is_joined_once_and_left_once() {
        let _sandbox = Sandbox::new();
        let mut groups = Groups::default();
        assert_eq!(groups.join(GROUP, by_address(127)), Ok(()));
        assert_eq!(groups.join(GROUP, Naming { index: 1, address: None }), Err(Errno::EADDRINUSE));
        assert_eq!(groups.join(GROUP, by_address(9)), Err(Errno::ENODEV));
        assert_eq!(groups.join(A, by_address(127)), Err(Errno::EINVAL));
        assert!(joined().contains(LOOPBACK, GROUP));
        assert_eq!(groups.leave(GROUP, by_address(9)), Err(Errno::EADDRNOTAVAIL));
        assert_eq!(groups.leave(GROUP, Naming::default()), Ok(()));
        assert!(!joined().contains(LOOPBACK, GROUP));
    }

    #[test]
    fn who_names_no_interface_hears_what_comes_over_any() {
        let _sandbox = Sandbox::new();
        let (mut named, mut unnamed) = (Groups::default(), Groups::default());
        named.join(GROUP, by_address(127)).unwrap();
        assert!(!joined().contains(LOOPBACK + 1, GROUP));
        unnamed.join(GROUP, Naming::default()).unwrap();
        assert!(joined().contains(LOOPBACK + 1, GROUP));
        assert!(unnamed.hears(GROUP, A, LOOPBACK + 1, false));
        assert!(!named.hears(GROUP, A, LOOPBACK + 1, false));
        assert_eq!(unnamed.join(GROUP, by_address(127)), Err(Errno::EADDRINUSE));
        assert_eq!(joined().of(LOOPBACK), [(GROUP, 2)]);
        assert_eq!(unnamed.leave(GROUP, by_address(127)), Ok(()));
        assert_eq!(joined().of(LOOPBACK), [(GROUP, 1)]);
    }

    #[test]
    fn memberships_have_a_bound_and_end_with_the_socket() {
        let _sandbox = Sandbox::new();
        let mut groups = Groups::default();
        let group = |number| IpAddr::V4(Ipv4Addr::new(239, 0, 0, number));
        for number in 0..20 {
            groups.join(group(number), Naming::default()).unwrap();
        }
        assert_eq!(groups.join(group(20), Naming::default()), Err(Errno::ENOBUFS));
        groups.leave_all();
        assert!(joined().of(LOOPBACK).is_empty());
    }

    #[test]
    fn sources_are_heard_or_not() {
        let _sandbox = Sandbox::new();
        let (mut groups, naming) = (Groups::default(), by_address(127));
        assert!(groups.hears(GROUP, A, LOOPBACK, true) && !groups.hears(GROUP, A, LOOPBACK, false));
        groups.join_source(GROUP, A, naming).unwrap();
        assert!(groups.hears(GROUP, A, LOOPBACK, true) && !groups.hears(GROUP, B, LOOPBACK, true));
        assert_eq!(groups.join_source(GROUP, A, naming), Err(Errno::EADDRNOTAVAIL));
        assert_eq!(groups.block(GROUP, B, naming), Err(Errno::EINVAL));
        assert_eq!(groups.leave_source(GROUP, B, naming), Err(Errno::EADDRNOTAVAIL));
        groups.leave_source(GROUP, A, naming).unwrap();
        assert_eq!(groups.block(GROUP, B, naming), Err(Errno::EINVAL));
        groups.join(GROUP, naming).unwrap();
        groups.block(GROUP, B, naming).unwrap();
        assert!(groups.hears(GROUP, A, LOOPBACK, false) && !groups.hears(GROUP, B, LOOPBACK, true));
        groups.unblock(GROUP, B, naming).unwrap();
        assert!(groups.hears(GROUP, B, LOOPBACK, false));
    }

    #[test]
    fn the_way_out_is_chosen_or_that_of_the_own_address() {
        let _sandbox = Sandbox::new();
        let mut groups = Groups::default();
        let any = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        assert_eq!(groups.way_out(GROUP, any), Some((LOOPBACK, A)));
        assert_eq!(groups.way_out(GROUP, B), Some((LOOPBACK, B)));
        assert_eq!(groups.send_over(by_address(9)), Err(Errno::EADDRNOTAVAIL));
        groups.send_over(Naming { index: 0, address: Some(Ipv4Addr::new(127, 0, 0, 2)) }).unwrap();
        assert_eq!(groups.way_out(GROUP, any), Some((LOOPBACK, B)));
        assert_eq!(groups.send_v6_over(7), Err(Errno::ENODEV));
        let (group, any) = ("ff02::7".parse().unwrap(), IpAddr::V6(Ipv6Addr::UNSPECIFIED));
        let own = IpAddr::V6(Ipv6Addr::LOCALHOST);
        assert_eq!(groups.way_out(group, any), Some((LOOPBACK, own)));
    }

    #[test]
    fn an_audience_is_told_by_the_address() {
        let _sandbox = Sandbox::new();
        let of = |ip: &str| audience(ip.parse().unwrap());
        assert_eq!(
            (of("224.0.0.251"), of("ff02::fb")),
            (Some(Audience::Group), Some(Audience::Group))
        );
        assert_eq!(of("255.255.255.255"), Some(Audience::Everybody));
        assert_eq!(of("127.255.255.255"), Some(Audience::Everybody));
        assert_eq!((of("127.0.0.1"), of("10.0.2.15"), of("::1")), (None, None, None));
    }
}
