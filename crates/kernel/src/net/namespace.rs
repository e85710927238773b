//! Network namespaces (network_namespaces(7)). The first one is the sandbox's own network, to which the
//! host hands connections in. All others have nothing but a loopback interface.

use alloc::sync::Arc;

use super::Network;
use super::netlink::NetlinkNetwork;
use super::tcp::TcpNetwork;
use super::udp::{IPPROTO_UDP, IPPROTO_UDPLITE, UdpNetwork};
use super::unix::UnixNetwork;
use crate::errno::{Errno, Result};
use crate::state::kernel;
use crate::sync::KernelCell;
use crate::task::namespace::{Common, Kind};
use crate::task::thread::running;
use crate::task::user_namespace::UserNamespace;
use crate::task::{Capabilities, current_process};

/// How far the sockets of a namespace reach.
#[derive(Clone, Default)]
pub struct Scope(Option<Arc<Loopback>>);

/// The interface of a namespace other than the first one.
struct Loopback {
    is_up: KernelCell<bool>,
}

/// Whether an address is one of the loopback interface, or none in particular.
fn is_of_loopback(ip: core::net::IpAddr) -> bool {
    ip.is_loopback() || ip.is_unspecified()
}

impl Scope {
    /// That of the sandbox's own network.
    pub const SANDBOX: Self = Self(None);

    /// Whether it is the sandbox's own network.
    pub fn is_of_sandbox(&self) -> bool {
        self.0.is_none()
    }

    /// Whether its loopback interface is up.
    pub fn is_up(&self) -> bool {
        self.0.as_ref().is_none_or(|loopback| loopback.is_up.get())
    }

    /// Takes the loopback interface up or down, which that of the sandbox is not taken: `EPERM`.
    fn set_up(&self, is_up: bool) -> Result<()> {
        let loopback = self.0.as_ref().ok_or(Errno::EPERM)?;
        loopback.is_up.set(is_up);
        Ok(())
    }

    /// `ENETUNREACH` if no way leads to an address.
    pub fn check_destination(&self, ip: core::net::IpAddr) -> Result<()> {
        let is_reached = self.is_of_sandbox() || self.is_up() && is_of_loopback(ip);
        if is_reached { Ok(()) } else { Err(Errno::ENETUNREACH) }
    }

    /// `EADDRNOTAVAIL` if no socket can have an address. As on Linux, one can have that of an interface
    /// that was never up.
    pub fn check_source(&self, ip: core::net::IpAddr) -> Result<()> {
        let is_own = self.is_of_sandbox() || is_of_loopback(ip) || ip.is_multicast();
        if is_own { Ok(()) } else { Err(Errno::EADDRNOTAVAIL) }
    }
}

/// Sockets that find each other.
pub struct NetNamespace {
    /// Number and owner.
    pub common: Common,
    /// Where they reach.
    pub scope: Scope,
    /// TCP.
    pub tcp: Arc<TcpNetwork>,
    /// UDP.
    pub udp: Arc<UdpNetwork>,
    /// UDP-Lite.
    pub udp_lite: Arc<UdpNetwork>,
    /// Unix sockets.
    pub unix: Arc<UnixNetwork>,
    /// Netlink.
    pub netlink: Arc<NetlinkNetwork>,
}

impl NetNamespace {
    /// The first one.
    pub fn first(network: &Network) -> Self {
        Self {
            common: Common::first(Kind::Net),
            scope: Scope::SANDBOX,
            tcp: network.tcp.clone(),
            udp: network.udp.clone(),
            udp_lite: network.udp_lite.clone(),
            unix: network.unix.clone(),
            netlink: network.netlink.clone(),
        }
    }

    /// Another one, whose loopback interface is down; `ENOSPC`.
    pub fn create(owner: &UserNamespace) -> Result<Self> {
        let common = Common::new(Kind::Net, owner)?;
        let scope = Scope(Some(Arc::new(Loopback { is_up: KernelCell::new(false) })));
        let unix = Arc::new(kernel().net.unix.within(common.ino()));
        Ok(Self {
            common,
            tcp: Arc::new(TcpNetwork::within(scope.clone())),
            udp: Arc::new(UdpNetwork::within(IPPROTO_UDP, scope.clone())),
            udp_lite: Arc::new(UdpNetwork::within(IPPROTO_UDPLITE, scope.clone())),
            scope,
            unix,
            netlink: Arc::new(NetlinkNetwork::new()),
        })
    }
}

/// That of the running process, or the first one if none runs.
pub fn own() -> Arc<NetNamespace> {
    match running() {
        Some(thread) => thread.process.namespaces().net.clone(),
        None => kernel().namespaces.net.clone(),
    }
}

/// Takes the loopback interface of the caller's namespace up or down; `EPERM`.
pub fn set_loopback_up(is_up: bool) -> Result<()> {
    let namespace = own();
    check_may_change(&namespace)?;
    namespace.scope.set_up(is_up)
}

/// `EPERM` unless the caller may change the interfaces of a namespace.
pub fn check_may_change(namespace: &NetNamespace) -> Result<()> {
    let owner = namespace.common.owner();
    current_process().credentials.borrow_mut().require_in(owner, Capabilities::NET_ADMIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_leads_out_of_a_namespace() {
        let scope = Scope(Some(Arc::new(Loopback { is_up: KernelCell::new(false) })));
        let local = [127, 0, 0, 1].into();
        let other = [192, 0, 2, 1].into();
        assert_eq!(scope.check_destination(local), Err(Errno::ENETUNREACH));
        scope.set_up(true).unwrap();
        assert_eq!((scope.check_destination(local), scope.check_source(local)), (Ok(()), Ok(())));
        assert_eq!(scope.check_destination(other), Err(Errno::ENETUNREACH));
        assert_eq!(scope.check_source(other), Err(Errno::EADDRNOTAVAIL));
        assert_eq!(Scope::SANDBOX.set_up(false), Err(Errno::EPERM));
    }
}
