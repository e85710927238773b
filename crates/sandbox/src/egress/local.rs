//! What of this host a connection would reach: its own addresses, and the ports of
//! Thaw itself.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, sendto, socket_with,
};

use super::policy::{OnHost, Permit};
use super::rule::Transport;

/// How a port of this process may be reached by its sandboxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PortGuard {
    /// Where a rule has written out the address and exactly this port: a gateway,
    /// through which functions call each other.
    IfWrittenOut,
    /// Never: an administrator's interface.
    Never,
}

/// A port that the sandboxes of this process do not reach by accident, or at all,
/// on any address of this host. It is guarded until this is dropped.
#[derive(Debug)]
pub struct GuardedPort {
    transport: Transport,
    port: u16,
    guard: PortGuard,
}

/// How often each port is guarded, and how.
static GUARDED: Mutex<BTreeMap<(Transport, u16, PortGuard), usize>> = Mutex::new(BTreeMap::new());

fn guarded() -> MutexGuard<'static, BTreeMap<(Transport, u16, PortGuard), usize>> {
    GUARDED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl GuardedPort {
    /// Guards a port of this process from its sandboxes.
    pub fn new(transport: Transport, port: u16, guard: PortGuard) -> Self {
        *guarded().entry((transport, port, guard)).or_default() += 1;
        Self { transport, port, guard }
    }

    fn key(&self) -> (Transport, u16, PortGuard) {
        (self.transport, self.port, self.guard)
    }
}

impl Drop for GuardedPort {
    fn drop(&mut self) {
        let mut guarded = guarded();
        if let Some(count) = guarded.get_mut(&self.key()) {
            *count -= 1;
            if *count == 0 {
                guarded.remove(&self.key());
            }
        }
    }
}

/// The strictest guard of a port.
fn guard_of(transport: Transport, port: u16) -> Option<PortGuard> {
    let all = (transport, port, PortGuard::IfWrittenOut)..=(transport, port, PortGuard::Never);
    guarded().range(all).next_back().map(|(&(_, _, guard), _)| guard)
}

/// Whether a connection that a rule permits is permitted in view of what it would
/// reach on this host now. To be asked when it is connected: addresses come and go.
pub fn is_permitted(permit: &Permit, transport: Transport) -> bool {
    if !is_own(permit.address.ip()) {
        return true;
    }
    match guard_of(transport, permit.address.port()) {
        Some(PortGuard::Never) => false,
        Some(PortGuard::IfWrittenOut) => permit.on_host == OnHost::WrittenOut,
        None => permit.on_host > OnHost::Nothing,
    }
}

/// Whether the host delivers packets for this address to itself (or to a whole
/// network, by broadcast), by any interface or local route. An address counts as
/// its own if the host cannot say.
fn is_own(ip: IpAddr) -> bool {
    if ip.is_loopback() || ip.is_unspecified() {
        return true;
    }
    match route_kind(ip) {
        Ok(kind) => kind != RTN_UNICAST,
        // There is no way there at all, as connecting will say.
        Err(Errno::NETUNREACH | Errno::HOSTUNREACH) => false,
        // No netlink sockets, say: a service may be forbidden to have any.
        Err(_) => can_be_bound(ip),
    }
}

/// A bind(2) succeeds with the host's own addresses, and with all where
/// `ip_nonlocal_bind` is set: then too much is forbidden, never too little.
fn can_be_bound(ip: IpAddr) -> bool {
    let attempt = || -> Result<(), Errno> {
        let family = if ip.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        bind(&socket, &SocketAddr::new(ip, 0))
    };
    // EADDRNOTAVAIL is the answer for a foreign address (ip(7)).
    attempt() != Err(Errno::ADDRNOTAVAIL)
}

// linux/rtnetlink.h and linux/netlink.h.
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const RTA_DST: u16 = 1;
const RTN_UNICAST: u8 = 1;
/// `struct nlmsghdr`.
const HEADER: usize = 16;
/// `struct rtmsg`.
const ROUTE: usize = 12;
/// Where `rtm_type` is in an answer.
const ROUTE_KIND: usize = HEADER + 7;

/// The kind of route (`RTN_*`, rtnetlink(7)) that packets for `ip` take.
fn route_kind(ip: IpAddr) -> Result<u8, Errno> {
    let flags = SocketFlags::CLOEXEC;
    let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
    // No protocol is number 0, NETLINK_ROUTE.
    let socket = socket_with(family, kind, flags, None)?;
    let request = route_request(ip);
    sendto(&socket, &request, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    let mut answer = [0; 1024];
    // The host kernel answers before sendto(2) returns.
    let (len, _) = recv(&socket, &mut answer, RecvFlags::DONTWAIT)?;
    route_answer(&answer[..len])
}

fn route_request(ip: IpAddr) -> Vec<u8> {
    let (family, address) = match ip {
        IpAddr::V4(ip) => (AddressFamily::INET, ip.octets().to_vec()),
        IpAddr::V6(ip) => (AddressFamily::INET6, ip.octets().to_vec()),
    };
    let attribute = 4 + address.len();
    let len = HEADER + ROUTE + attribute;
    let mut request = Vec::with_capacity(len);
    request.extend((len as u32).to_ne_bytes());
    request.extend(RTM_GETROUTE.to_ne_bytes());
    request.extend(NLM_F_REQUEST.to_ne_bytes());
    // Sequence and sender: one question, one answer.
    request.extend([0; 8]);
    // Of a route only the family and the bits of the destination are asked for.
    request.extend([family.as_raw() as u8, (address.len() * 8) as u8]);
    request.extend([0; ROUTE - 2]);
    request.extend((attribute as u16).to_ne_bytes());
    request.extend(RTA_DST.to_ne_bytes());
    request.extend(address);
    request
}

fn route_answer(answer: &[u8]) -> Result<u8, Errno> {
    let kind = answer.get(4..6).map(|bytes| u16::from_ne_bytes([bytes[0], bytes[1]]));
    match kind {
        Some(RTM_NEWROUTE) => answer.get(ROUTE_KIND).copied().ok_or(Errno::IO),
        Some(NLMSG_ERROR) => {
            let bytes = answer.get(HEADER..HEADER + 4).ok_or(Errno::IO)?;
            let error = i32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            Err(Errno::from_raw_os_error(-error))
        }
        _ => Err(Errno::IO),
    }
}

#[cfg(test)]
mod tests {
    use super::super::policy::AfterThaw;
    use super::*;

    fn permit(address: &str, on_host: OnHost) -> Permit {
        Permit { address: address.parse().unwrap(), after_thaw: AfterThaw::Reset, on_host }
    }

    /// Addresses of this machine, as another source says: the kernel's table of
    /// local routes, whose leaves it marks `host LOCAL`.
    fn own_addresses() -> Vec<IpAddr> {
        let table = std::fs::read_to_string("/proc/net/fib_trie").unwrap();
        let mut last: Option<IpAddr> = None;
        let mut found = Vec::new();
        for line in table.lines() {
            if let Some(ip) = line.trim().strip_prefix("|-- ") {
                last = ip.parse().ok();
            } else if line.contains("host LOCAL") {
                found.extend(last);
            }
        }
        found
    }

    #[test]
    fn the_hosts_own_addresses_are_known_by_either_way() {
        let own = own_addresses();
        assert!(own.contains(&IpAddr::from([127, 0, 0, 1])), "{own:?}");
        for ip in own {
            assert!(is_own(ip) && can_be_bound(ip), "{ip}");
        }
        assert!(is_own("::1".parse().unwrap()) && is_own("127.9.9.9".parse().unwrap()));
        for foreign in ["192.0.2.1", "8.8.8.8", "2001:db8::1"] {
            let ip = foreign.parse().unwrap();
            assert!(!is_own(ip) && !can_be_bound(ip), "{foreign}");
        }
    }

    #[test]
    fn what_the_host_kernel_answers_is_checked() {
        assert_eq!(route_answer(&[]), Err(Errno::IO));
        assert_eq!(route_answer(&[0; 100]), Err(Errno::IO));
        let mut error = vec![0; HEADER + 4];
        error[4..6].copy_from_slice(&NLMSG_ERROR.to_ne_bytes());
        assert_eq!(route_answer(&error[..HEADER + 2]), Err(Errno::IO));
        error[HEADER..].copy_from_slice(&(-libc::ENETUNREACH).to_ne_bytes());
        assert_eq!(route_answer(&error), Err(Errno::NETUNREACH));
        let mut route = vec![0; HEADER + ROUTE];
        route[4..6].copy_from_slice(&RTM_NEWROUTE.to_ne_bytes());
        route[ROUTE_KIND] = 2;
        assert_eq!(route_answer(&route), Ok(2));
        assert_eq!(route_answer(&route[..ROUTE_KIND]), Err(Errno::IO));
    }

    #[test]
    fn the_host_is_reached_as_far_as_a_rule_says_and_a_guard_lets() {
        let port = 1;
        let on_loopback = |on_host| is_permitted(&permit("127.0.0.1:1", on_host), Transport::Tcp);
        assert!(!on_loopback(OnHost::Nothing));
        assert!(on_loopback(OnHost::Servers) && on_loopback(OnHost::WrittenOut));
        let gateway = GuardedPort::new(Transport::Tcp, port, PortGuard::IfWrittenOut);
        assert!(!on_loopback(OnHost::Servers) && on_loopback(OnHost::WrittenOut));
        let admin = GuardedPort::new(Transport::Tcp, port, PortGuard::Never);
        assert!(!on_loopback(OnHost::WrittenOut));
        let again = GuardedPort::new(Transport::Tcp, port, PortGuard::Never);
        drop(admin);
        assert!(!on_loopback(OnHost::WrittenOut), "it is guarded twice");
        drop((again, gateway));
        assert!(on_loopback(OnHost::Servers));
        // Guards are for this host only, and for one protocol.
        let _admin = GuardedPort::new(Transport::Udp, port, PortGuard::Never);
        assert!(on_loopback(OnHost::Servers));
        assert!(is_permitted(&permit("192.0.2.1:1", OnHost::Nothing), Transport::Udp));
    }
}
