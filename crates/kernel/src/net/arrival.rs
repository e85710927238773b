//! What a receiver may ask to be told about a datagram (`IP_PKTINFO` and others
//! in ip(7), ipv6(7), `SO_TIMESTAMP` in socket(7)).

use core::net::{IpAddr, Ipv4Addr};

use super::address::AF_INET6;
use super::departure::Departure;
use super::interfaces;
use super::message::ControlWriter;
use super::option_table::Name;
use super::options::Options;
use super::socket::Common;
use crate::errno::Result;
use crate::time::clock;

const SOL_IP: i32 = 0;
const SOL_SOCKET: i32 = 1;
const SOL_IPV6: i32 = 41;

const TIMESTAMP: Name = (SOL_SOCKET, 29);
const TIMESTAMPNS: Name = (SOL_SOCKET, 35);
const PKTINFO: Name = (SOL_IP, 8);
const RECVTTL: Name = (SOL_IP, 12);
const RECVTOS: Name = (SOL_IP, 13);
const RECVPKTINFO: Name = (SOL_IPV6, 49);
const RECVHOPLIMIT: Name = (SOL_IPV6, 51);
const RECVTCLASS: Name = (SOL_IPV6, 66);
/// `IP_TTL`, `IPV6_UNICAST_HOPS`, `IP_TOS` and `IPV6_TCLASS` of a sender.
const TTL: Name = (SOL_IP, 2);
const HOPS: Name = (SOL_IPV6, 16);
/// `IP_MULTICAST_TTL` and `IPV6_MULTICAST_HOPS` of a sender.
const MULTICAST_TTL: Name = (SOL_IP, 33);
const MULTICAST_HOPS: Name = (SOL_IPV6, 18);
const TOS: Name = (SOL_IP, 1);
const TCLASS: Name = (SOL_IPV6, 67);

/// How a datagram came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// The address that it was sent to.
    to: IpAddr,
    /// Nanoseconds since the epoch; 0 if nobody has asked.
    time_ns: u64,
    /// `IP_TTL` or the hop limit.
    hops: u8,
    /// `IP_TOS` or the traffic class.
    class: u8,
    /// The interface that it came over; `None`: the one that leads to the address.
    interface: Option<u32>,
}

impl Arrival {
    /// Of a datagram that a socket sends to `to`, by its options as far as
    /// `departure` says nothing else.
    pub fn from_sender(
        to: IpAddr,
        departure: &Departure,
        sender: &Common,
        receiver: &Common,
    ) -> Self {
        let options = sender.options.borrow_mut();
        let value = |v4, v6, default| {
            let name = if to.is_ipv4() { v4 } else { v6 };
            options.value(name).map_or(default, |value| value as u8)
        };
        let hops = departure.hops.unwrap_or_else(|| match to.is_multicast() {
            true => value(MULTICAST_TTL, MULTICAST_HOPS, 1),
            false => value(TTL, HOPS, 64),
        });
        let class = departure.class.unwrap_or_else(|| value(TOS, TCLASS, 0));
        drop(options);
        let time_ns = time_for(&receiver.options.borrow_mut());
        Self { to, time_ns, hops, class, interface: None }
    }

    /// Of a datagram that the host has received at the sandbox's address `to`.
    pub fn from_outside(to: IpAddr, receiver: &Common) -> Self {
        let time_ns = time_for(&receiver.options.borrow_mut());
        Self { to, time_ns, hops: 64, class: 0, interface: None }
    }

    /// The same, over an interface with a number: of a datagram to many.
    pub fn over(self, interface: u32) -> Self {
        Self { interface: Some(interface), ..self }
    }

    /// Tells the receiver what it has asked for.
    pub fn put(&self, receiver: &Common, control: &mut ControlWriter) -> Result<()> {
        let wants = |name| receiver.options.borrow_mut().flag(name);
        let (seconds, ns) = (self.time_ns / 1_000_000_000, self.time_ns % 1_000_000_000);
        if self.time_ns != 0 && wants(TIMESTAMPNS) {
            control.put(SOL_SOCKET, 35, bytemuck::bytes_of(&[seconds, ns]))?;
        } else if self.time_ns != 0 && wants(TIMESTAMP) {
            control.put(SOL_SOCKET, 29, bytemuck::bytes_of(&[seconds, ns / 1000]))?;
        }
        let interface = self.interface.unwrap_or_else(|| interface_of(self.to));
        if let (IpAddr::V4(to), true) = (self.to, wants(PKTINFO)) {
            // struct in_pktinfo: interface, local address, address in the header.
            let mut info = [0; 12];
            info[..4].copy_from_slice(&interface.to_ne_bytes());
            info[4..8].copy_from_slice(&self.local_address(to).octets());
            info[8..].copy_from_slice(&to.octets());
            control.put(SOL_IP, 8, &info)?;
        }
        let (hops, class) = (i32::from(self.hops), i32::from(self.class));
        if self.to.is_ipv4() {
            if wants(RECVTTL) {
                control.put(SOL_IP, 2, &hops.to_ne_bytes())?;
            }
            if wants(RECVTOS) {
                control.put(SOL_IP, 1, &[self.class])?;
            }
        }
        if receiver.family != AF_INET6 {
            return Ok(());
        }
        if wants(RECVPKTINFO) {
            // struct in6_pktinfo: address, interface.
            let mut info = [0; 20];
            let ip = match self.to {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            info[..16].copy_from_slice(&ip.octets());
            info[16..].copy_from_slice(&interface.to_ne_bytes());
            control.put(SOL_IPV6, 50, &info)?;
        }
        if self.to.is_ipv6() {
            if wants(RECVHOPLIMIT) {
                control.put(SOL_IPV6, 52, &hops.to_ne_bytes())?;
            }
            if wants(RECVTCLASS) {
                control.put(SOL_IPV6, 67, &class.to_ne_bytes())?;
            }
        }
        Ok(())
    }
}

impl Arrival {
    /// The address of the sandbox that the datagram has come to.
    fn local_address(&self, to: Ipv4Addr) -> Ipv4Addr {
        let Some(index) = self.interface else { return to };
        let own = interfaces::all().into_iter().find(|interface| interface.index == index);
        match own.and_then(|interface| interface.address_for(self.to)) {
            Some(IpAddr::V4(own)) => own,
            _ => to,
        }
    }
}

fn interface_of(ip: IpAddr) -> u32 {
    interfaces::routes().iter().find(|route| route.leads_to(ip)).map_or(0, |route| route.interface)
}

/// The time, if it is wanted: asking for it is not free.
fn time_for(options: &Options) -> u64 {
    if options.flag(TIMESTAMP) || options.flag(TIMESTAMPNS) { clock::realtime_ns() } else { 0 }
}
