//! Who is bound to which port (ip(7), `SO_REUSEADDR` and `SO_REUSEPORT` in socket(7)).

use alloc::collections::BTreeMap;
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;
use core::net::IpAddr;

use super::address::Endpoint;
use crate::errno::{Errno, Result};
use crate::sync::KernelCell;

/// `net.ipv4.ip_local_port_range`.
pub const EPHEMERAL_FIRST: u16 = 32768;
/// See [`EPHEMERAL_FIRST`].
pub const EPHEMERAL_LAST: u16 = 60999;

/// What a socket says when it binds.
#[derive(Clone, Copy, Debug, Default)]
pub struct BindOptions {
    /// `SO_REUSEADDR`.
    pub reuse_address: bool,
    /// `SO_REUSEPORT`.
    pub reuse_port: bool,
    /// `IPV6_V6ONLY`.
    pub v6_only: bool,
    /// Datagram sockets with `SO_REUSEADDR` share a port even when in use.
    pub datagram: bool,
}

struct Entry<S> {
    ip: IpAddr,
    options: BindOptions,
    listening: bool,
    owner: Weak<S>,
}

impl<S> Entry<S> {
    /// Whether packets to `ip` reach this socket.
    fn accepts(&self, ip: IpAddr) -> bool {
        (self.ip.is_unspecified() || self.ip == ip) && self.accepts_family(ip)
    }

    /// Whether packets to some address of the family of `ip` reach this socket.
    fn accepts_family(&self, ip: IpAddr) -> bool {
        let is_dual = self.ip.is_ipv6() && self.ip.is_unspecified() && !self.options.v6_only;
        self.ip.is_ipv4() == ip.is_ipv4() || is_dual
    }
}

/// Whether some packet could go to both.
fn overlap(a: IpAddr, a_options: BindOptions, b: IpAddr, b_options: BindOptions) -> bool {
    let dual =
        |ip: IpAddr, options: BindOptions| ip.is_ipv6() && ip.is_unspecified() && !options.v6_only;
    if a.is_ipv4() != b.is_ipv4() && !dual(a, a_options) && !dual(b, b_options) {
        return false;
    }
    a.is_unspecified() || b.is_unspecified() || a == b
}

struct Ports<S> {
    by_port: BTreeMap<u16, Vec<Entry<S>>>,
    next_ephemeral: u16,
    /// Whose turn it is among sockets that share a port (`SO_REUSEPORT`).
    turn: usize,
}

/// The ports of one protocol.
pub struct PortTable<S> {
    ports: KernelCell<Ports<S>>,
}

impl<S> Default for PortTable<S> {
    fn default() -> Self {
        Self::new()
    }
}

impl<S> PortTable<S> {
    /// No port in use.
    pub const fn new() -> Self {
        Self {
            ports: KernelCell::new(Ports {
                by_port: BTreeMap::new(),
                next_ephemeral: EPHEMERAL_FIRST,
                turn: 0,
            }),
        }
    }

    /// Binds `owner` to `endpoint`, whose port may be 0 for any free one, and
    /// returns what it got. `EADDRINUSE` if another socket is in the way.
    pub fn bind(
        &self,
        owner: &Weak<S>,
        endpoint: Endpoint,
        options: BindOptions,
    ) -> Result<Endpoint> {
        let mut ports = self.ports.borrow_mut();
        let port = if endpoint.port == 0 { ports.free_port()? } else { endpoint.port };
        let entries = ports.by_port.entry(port).or_default();
        entries.retain(|entry| entry.owner.strong_count() > 0);
        for entry in
            entries.iter().filter(|entry| overlap(entry.ip, entry.options, endpoint.ip, options))
        {
            let addresses = entry.options.reuse_address && options.reuse_address;
            let shared = addresses && (options.datagram || !entry.listening)
                || entry.options.reuse_port && options.reuse_port;
            if !shared {
                return Err(Errno::EADDRINUSE);
            }
        }
        entries.push(Entry { ip: endpoint.ip, options, listening: false, owner: owner.clone() });
        Ok(endpoint.with_port(port))
    }

    /// Marks a bound socket as listening. `EADDRINUSE` if another one listens
    /// where it would.
    pub fn listen(&self, owner: &Weak<S>, port: u16) -> Result<()> {
        let mut ports = self.ports.borrow_mut();
        let Some(entries) = ports.by_port.get_mut(&port) else { return Err(Errno::EINVAL) };
        let Some(own) = entries.iter().position(|entry| entry.owner.ptr_eq(owner)) else {
            return Err(Errno::EINVAL);
        };
        let (ip, options) = (entries[own].ip, entries[own].options);
        let taken = entries.iter().enumerate().any(|(index, entry)| {
            index != own
                && entry.listening
                && entry.owner.strong_count() > 0
                && overlap(entry.ip, entry.options, ip, options)
                && !(entry.options.reuse_port && options.reuse_port)
        });
        if taken {
            return Err(Errno::EADDRINUSE);
        }
        entries[own].listening = true;
        Ok(())
    }

    /// Frees what `owner` has at `port`.
    pub fn release(&self, owner: &Weak<S>, port: u16) {
        let mut ports = self.ports.borrow_mut();
        if let Some(entries) = ports.by_port.get_mut(&port) {
            entries.retain(|entry| !entry.owner.ptr_eq(owner));
            if entries.is_empty() {
                ports.by_port.remove(&port);
            }
        }
    }

    /// The listening socket that a connection to `to` reaches; one bound to
    /// the very address goes before a wildcard. Those that share a port take turns.
    pub fn listener(&self, to: Endpoint) -> Option<Arc<S>> {
        self.find(to.port, |entry| {
            (entry.listening && entry.accepts(to.ip)).then_some((0, entry.ip == to.ip))
        })
    }

    /// The socket that a datagram to `to` reaches: the one of which `rank` says most, if it says
    /// something; then as [`PortTable::listener`].
    pub fn receiver(&self, to: Endpoint, rank: impl Fn(&S) -> Option<u8>) -> Option<Arc<S>> {
        self.find(to.port, |entry| {
            let owner = entry.owner.upgrade().filter(|_| entry.accepts(to.ip))?;
            Some((rank(&owner)?, entry.ip == to.ip))
        })
    }

    /// All sockets that a datagram to many reaches.
    pub fn receivers(&self, to: Endpoint) -> Vec<Arc<S>> {
        let ports = self.ports.borrow_mut();
        let entries = ports.by_port.get(&to.port).into_iter().flatten();
        let accepting = entries.filter(|entry| entry.accepts(to.ip));
        accepting.filter_map(|entry| entry.owner.upgrade()).collect()
    }

    /// Of the sockets at a port that have a rank, one with the highest: the first, or, if they share
    /// the port, the next in turn.
    fn find(&self, port: u16, rank: impl Fn(&Entry<S>) -> Option<(u8, bool)>) -> Option<Arc<S>> {
        let mut ports = self.ports.borrow_mut();
        let Ports { by_port, turn, .. } = &mut *ports;
        let entries = by_port.get(&port)?;
        let ranked = || {
            let there = entries.iter().filter(|entry| entry.owner.strong_count() > 0);
            there.filter_map(|entry| Some((rank(entry)?, entry)))
        };
        let (best, _) = ranked().max_by_key(|(rank, _)| *rank)?;
        let mut all = ranked().filter(|(rank, _)| *rank == best).map(|(_, entry)| entry);
        let first = all.next()?;
        let sharing = all.filter(|entry| entry.options.reuse_port && first.options.reuse_port);
        let count = sharing.clone().count() + 1;
        if count > 1 {
            *turn = turn.wrapping_add(1);
        }
        let next = core::iter::once(first).chain(sharing).nth(*turn % count)?;
        next.owner.upgrade()
    }

    /// A socket bound to `port`, whatever its address.
    pub fn bound_to(&self, port: u16) -> Option<Arc<S>> {
        let ports = self.ports.borrow_mut();
        ports.by_port.get(&port)?.iter().find_map(|entry| entry.owner.upgrade())
    }

    /// The ports on which somebody listens, in ascending order, each once.
    pub fn listened(&self) -> Vec<u16> {
        let ports = self.ports.borrow_mut();
        let listening = ports.by_port.iter().filter(|(_, entries)| {
            entries.iter().any(|entry| entry.listening && entry.owner.strong_count() > 0)
        });
        listening.map(|(port, _)| *port).collect()
    }

    /// The sockets that listen at `port`, for a question: it takes nobody's turn.
    pub fn listeners_at(&self, port: u16) -> Vec<Arc<S>> {
        let ports = self.ports.borrow_mut();
        let entries = ports.by_port.get(&port).into_iter().flatten();
        entries.filter(|entry| entry.listening).filter_map(|entry| entry.owner.upgrade()).collect()
    }

    /// A listening socket at the port of `to`, whatever its address, for a connection that does not come
    /// over the sandbox' own network: one of the connection's family, if there is one, otherwise one
    /// of the other. Those that share the port take turns.
    pub fn listener_at(&self, to: Endpoint) -> Option<Arc<S>> {
        self.find(to.port, |entry| {
            entry.listening.then(|| (entry.accepts_family(to.ip).into(), false))
        })
    }
}

impl<S> Ports<S> {
    fn free_port(&mut self) -> Result<u16> {
        for _ in EPHEMERAL_FIRST..=EPHEMERAL_LAST {
            let port = self.next_ephemeral;
            self.next_ephemeral = if port == EPHEMERAL_LAST { EPHEMERAL_FIRST } else { port + 1 };
            let used = self
                .by_port
                .get(&port)
                .is_some_and(|entries| entries.iter().any(|e| e.owner.strong_count() > 0));
            if !used {
                return Ok(port);
            }
        }
        Err(Errno::EADDRINUSE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr};

    const ANY4: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    const ANY6: IpAddr = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
    const LOCAL4: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    const LOCAL6: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);

    fn at(ip: IpAddr, port: u16) -> Endpoint {
        Endpoint { ip, port }
    }

    /// Binds two sockets and says how the second fared.
    fn second(a: IpAddr, a_options: BindOptions, b: IpAddr, b_options: BindOptions) -> Result<()> {
        let table = PortTable::new();
        let (x, y) = (Arc::new(1), Arc::new(2));
        table.bind(&Arc::downgrade(&x), at(a, 80), a_options)?;
        table.bind(&Arc::downgrade(&y), at(b, 80), b_options).map(drop)
    }

    #[test]
    fn overlapping_addresses_conflict() {
        let plain = BindOptions::default();
        let only = BindOptions { v6_only: true, ..plain };
        assert_eq!(second(ANY4, plain, LOCAL4, plain), Err(Errno::EADDRINUSE));
        assert_eq!(second(LOCAL4, plain, LOCAL4, plain), Err(Errno::EADDRINUSE));
        assert_eq!(second(LOCAL4, plain, Ipv4Addr::new(127, 0, 0, 2).into(), plain), Ok(()));
        assert_eq!(second(ANY4, plain, ANY6, plain), Err(Errno::EADDRINUSE));
        assert_eq!(second(ANY4, plain, ANY6, only), Ok(()));
        assert_eq!(second(LOCAL4, plain, LOCAL6, plain), Ok(()));
    }

    #[test]
    fn reuse_must_be_asked_for_by_both() {
        let plain = BindOptions::default();
        let address = BindOptions { reuse_address: true, ..plain };
        let port = BindOptions { reuse_port: true, ..plain };
        assert_eq!(second(ANY4, address, ANY4, plain), Err(Errno::EADDRINUSE));
        assert_eq!(second(ANY4, address, ANY4, address), Ok(()));
        assert_eq!(second(ANY4, port, ANY4, port), Ok(()));
        assert_eq!(second(ANY4, port, ANY4, address), Err(Errno::EADDRINUSE));
    }

    #[test]
    fn only_one_listens_unless_the_port_is_shared() {
        let table = PortTable::new();
        let reuse = BindOptions { reuse_address: true, ..BindOptions::default() };
        let sockets: Vec<_> = (0..3).map(Arc::new).collect();
        let weak: Vec<_> = sockets.iter().map(Arc::downgrade).collect();
        table.bind(&weak[0], at(ANY4, 80), reuse).unwrap();
        table.bind(&weak[1], at(ANY4, 80), reuse).unwrap();
        table.listen(&weak[0], 80).unwrap();
        assert_eq!(table.listen(&weak[1], 80), Err(Errno::EADDRINUSE));
        assert_eq!(table.bind(&weak[2], at(ANY4, 80), reuse), Err(Errno::EADDRINUSE));
        table.release(&weak[0], 80);
        assert_eq!(table.listen(&weak[1], 80), Ok(()));
    }

    #[test]
    fn connections_find_the_closest_listener() {
        let table = PortTable::new();
        let reuse = BindOptions { reuse_address: true, ..BindOptions::default() };
        let (any, local) = (Arc::new("any"), Arc::new("local"));
        table.bind(&Arc::downgrade(&any), at(ANY6, 80), reuse).unwrap();
        table.bind(&Arc::downgrade(&local), at(LOCAL4, 80), reuse).unwrap();
        table.listen(&Arc::downgrade(&any), 80).unwrap();
        assert_eq!(table.listener(at(LOCAL4, 80)).as_deref(), Some(&"any"));
        assert_eq!(table.receiver(at(LOCAL4, 80), |_| Some(0)).as_deref(), Some(&"local"));
        let rank = |name: &&str| (*name != "local").then_some(0);
        assert_eq!(table.receiver(at(LOCAL4, 80), rank).as_deref(), Some(&"any"));
        let rank = |name: &&str| Some(u8::from(*name == "any"));
        assert_eq!(table.receiver(at(LOCAL4, 80), rank).as_deref(), Some(&"any"));
        drop(any);
        assert_eq!(table.listener(at(LOCAL6, 80)), None);
    }

    #[test]
    fn sockets_that_share_a_port_take_turns() {
        let table = PortTable::new();
        let reuse = BindOptions { reuse_port: true, ..BindOptions::default() };
        let all = [1, 2, 3].map(Arc::new);
        for one in &all {
            table.bind(&Arc::downgrade(one), at(ANY4, 80), reuse).unwrap();
            table.listen(&Arc::downgrade(one), 80).unwrap();
        }
        let mut reached: Vec<i32> =
            (0..6).filter_map(|_| table.listener(at(LOCAL4, 80))).map(|one| *one).collect();
        reached.sort_unstable();
        assert_eq!(reached, [1, 1, 2, 2, 3, 3]);
        let elsewhere = at(Ipv4Addr::new(10, 0, 0, 1).into(), 80);
        let first = table.listener_at(elsewhere);
        assert_eq!(table.listeners_at(80), all);
        assert_ne!(first, table.listener_at(elsewhere), "a question takes nobody's turn");
    }

    #[test]
    fn connections_from_outside_find_a_listener_of_their_family() {
        let plain = BindOptions::default();
        let only = BindOptions { v6_only: true, ..plain };
        let outside = [
            at(Ipv4Addr::new(10, 0, 0, 1).into(), 80),
            at(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into(), 80),
        ];
        for (bound, expected) in [
            (&[(ANY6, only), (ANY4, plain)][..], [1, 0]),
            (&[(ANY4, plain), (ANY6, only)], [0, 1]),
            (&[(LOCAL6, plain), (LOCAL4, plain)], [1, 0]),
            // There is no other.
            (&[(ANY6, only)], [0, 0]),
            (&[(LOCAL4, plain)], [0, 0]),
            (&[(ANY6, plain)], [0, 0]),
        ] {
            let table = PortTable::new();
            let sockets: Vec<_> = (0..bound.len()).map(Arc::new).collect();
            for (socket, (ip, options)) in sockets.iter().zip(bound) {
                table.bind(&Arc::downgrade(socket), at(*ip, 80), *options).unwrap();
                table.listen(&Arc::downgrade(socket), 80).unwrap();
            }
            let found = outside.map(|to| table.listener_at(to).map(|socket| *socket));
            assert_eq!(found, expected.map(Some), "{bound:?}");
        }
    }

    #[test]
    fn those_of_a_family_take_turns_among_themselves() {
        let table = PortTable::new();
        let reuse = BindOptions { reuse_port: true, v6_only: true, ..BindOptions::default() };
        let all = [ANY6, ANY4, ANY6, ANY4].map(Arc::new);
        for one in &all {
            table.bind(&Arc::downgrade(one), at(**one, 80), reuse).unwrap();
            table.listen(&Arc::downgrade(one), 80).unwrap();
        }
        for ip in [LOCAL4, LOCAL6] {
            let reached = [0; 2].map(|_| table.listener_at(at(ip, 80)).unwrap());
            assert!(reached.iter().all(|one| one.is_ipv4() == ip.is_ipv4()), "{reached:?}");
            assert!(!Arc::ptr_eq(&reached[0], &reached[1]));
        }
    }

    #[test]
    fn dead_sockets_free_their_port_and_ephemeral_ports_differ() {
        let table = PortTable::new();
        let socket = Arc::new(());
        table.bind(&Arc::downgrade(&socket), at(ANY4, 80), BindOptions::default()).unwrap();
        drop(socket);
        let socket = Arc::new(());
        let weak = Arc::downgrade(&socket);
        table.bind(&weak, at(ANY4, 80), BindOptions::default()).unwrap();
        let first = table.bind(&weak, at(ANY4, 0), BindOptions::default()).unwrap();
        let second = table.bind(&weak, at(ANY4, 0), BindOptions::default()).unwrap();
        assert!(first.port >= EPHEMERAL_FIRST && first.port != second.port);
    }
}
