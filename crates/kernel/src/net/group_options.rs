//! Socket options about groups (`IP_ADD_MEMBERSHIP` and others in ip(7), ipv6(7)).

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::address::{Endpoint, SocketAddress};
use super::groups::Naming;
use super::option_table::{Of, applies};
use super::socket::Common;
use crate::args::UserPtr;
use crate::errno::{Errno, Result};
use crate::platform::user::UserAddress;

const SOL_IP: i32 = 0;
const SOL_IPV6: i32 = 41;

const IP_MULTICAST_IF: i32 = 32;
const IP_ADD_MEMBERSHIP: i32 = 35;
const IP_DROP_MEMBERSHIP: i32 = 36;
const IP_UNBLOCK_SOURCE: i32 = 37;
const IP_BLOCK_SOURCE: i32 = 38;
const IP_ADD_SOURCE_MEMBERSHIP: i32 = 39;
const IP_DROP_SOURCE_MEMBERSHIP: i32 = 40;
const IPV6_MULTICAST_IF: i32 = 17;
const IPV6_JOIN_GROUP: i32 = 20;
const IPV6_LEAVE_GROUP: i32 = 21;
const MCAST_JOIN_GROUP: i32 = 42;
const MCAST_BLOCK_SOURCE: i32 = 43;
const MCAST_UNBLOCK_SOURCE: i32 = 44;
const MCAST_LEAVE_GROUP: i32 = 45;
const MCAST_JOIN_SOURCE_GROUP: i32 = 46;
const MCAST_LEAVE_SOURCE_GROUP: i32 = 47;

/// Bytes of `struct sockaddr_storage`, of which two lie in `struct group_source_req` behind the number
/// of the interface.
const STORAGE: usize = 128;
const FIRST_STORAGE: u64 = 8;

/// setsockopt(2) for an option about groups; `None` if this is none.
pub fn set(
    common: &Common,
    level: i32,
    number: i32,
    at: UserAddress,
    len: usize,
) -> Option<Result<()>> {
    if !applies(Of::Udp, common) {
        return None;
    }
    match (level, number) {
        (SOL_IP, IP_MULTICAST_IF) => Some(send_over(common, at, len)),
        (SOL_IP, IP_ADD_MEMBERSHIP | IP_DROP_MEMBERSHIP) => Some(member(common, number, at, len)),
        (SOL_IP, IP_UNBLOCK_SOURCE..=IP_DROP_SOURCE_MEMBERSHIP) => {
            Some(source(common, number, at, len))
        }
        (SOL_IPV6, _) if !applies(Of::V6, common) => None,
        (SOL_IPV6, IPV6_MULTICAST_IF) => Some(send_v6_over(common, at, len)),
        (SOL_IPV6, IPV6_JOIN_GROUP | IPV6_LEAVE_GROUP) => Some(member_v6(common, number, at, len)),
        (SOL_IP | SOL_IPV6, MCAST_JOIN_GROUP | MCAST_LEAVE_GROUP) => {
            Some(any_member(common, (level, number), at, len))
        }
        (SOL_IP | SOL_IPV6, MCAST_BLOCK_SOURCE..=MCAST_LEAVE_SOURCE_GROUP) => {
            Some(any_source(common, (level, number), at, len))
        }
        _ => None,
    }
}

/// What getsockopt(2) shows of an option about groups, as it lies in memory; `None` if this is none.
pub fn get(common: &Common, level: i32, number: i32) -> Option<[u8; 4]> {
    let groups = common.groups.borrow_mut();
    match (level, number) {
        (SOL_IP, IP_MULTICAST_IF) if applies(Of::Udp, common) => {
            Some(groups.outgoing_address().octets())
        }
        (SOL_IPV6, IPV6_MULTICAST_IF) if applies(Of::Udp, common) && applies(Of::V6, common) => {
            Some(groups.outgoing_v6().to_ne_bytes())
        }
        _ => None,
    }
}

fn check_len(len: usize, least: usize) -> Result<()> {
    if len < least { Err(Errno::EINVAL) } else { Ok(()) }
}

fn naming(index: u32, address: [u8; 4]) -> Naming {
    let address = Ipv4Addr::from(address);
    Naming { index, address: Some(address).filter(|address| !address.is_unspecified()) }
}

/// Takes a `struct in_addr`, `struct ip_mreq` or `struct ip_mreqn`.
fn send_over(common: &Common, at: UserAddress, len: usize) -> Result<()> {
    check_len(len, 4)?;
    let naming = match len {
        12.. => {
            let [_, address, index]: [[u8; 4]; 3] = at.read()?;
            naming(u32::from_ne_bytes(index), address)
        }
        8.. => naming(0, at.read::<[[u8; 4]; 2]>()?[1]),
        _ => naming(0, at.read()?),
    };
    common.groups.borrow_mut().send_over(naming)
}

fn send_v6_over(common: &Common, at: UserAddress, len: usize) -> Result<()> {
    check_len(len, 4)?;
    let index = at.read()?;
    common.groups.borrow_mut().send_v6_over(index)
}

/// Takes a `struct ip_mreq` or `struct ip_mreqn`.
fn member(common: &Common, number: i32, at: UserAddress, len: usize) -> Result<()> {
    check_len(len, 8)?;
    let [group, address]: [[u8; 4]; 2] = at.read()?;
    let index = if len >= 12 { at.offset(8).read()? } else { 0 };
    let (group, naming) = (IpAddr::from(group), naming(index, address));
    let mut groups = common.groups.borrow_mut();
    match number {
        IP_ADD_MEMBERSHIP => groups.join(group, naming),
        _ => groups.leave(group, naming),
    }
}

/// Takes a `struct ip_mreq_source`.
fn source(common: &Common, number: i32, at: UserAddress, len: usize) -> Result<()> {
    if len != 12 {
        return Err(Errno::EINVAL);
    }
    let [group, address, source]: [[u8; 4]; 3] = at.read()?;
    let (group, source, naming) = (IpAddr::from(group), IpAddr::from(source), naming(0, address));
    let mut groups = common.groups.borrow_mut();
    match number {
        IP_ADD_SOURCE_MEMBERSHIP => groups.join_source(group, source, naming),
        IP_DROP_SOURCE_MEMBERSHIP => groups.leave_source(group, source, naming),
        IP_BLOCK_SOURCE => groups.block(group, source, naming),
        _ => groups.unblock(group, source, naming),
    }
}

/// Takes a `struct ipv6_mreq`.
fn member_v6(common: &Common, number: i32, at: UserAddress, len: usize) -> Result<()> {
    check_len(len, 20)?;
    let group = IpAddr::V6(Ipv6Addr::from(at.read::<[u8; 16]>()?));
    let naming = Naming { index: at.offset(16).read()?, address: None };
    let mut groups = common.groups.borrow_mut();
    match number {
        IPV6_JOIN_GROUP => groups.join(group, naming),
        _ => groups.leave(group, naming),
    }
}

/// The address in a `struct sockaddr_storage`, if it is one of the family of `level`.
fn stored(level: i32, at: UserAddress) -> Result<Option<IpAddr>> {
    let address = SocketAddress::from_user(UserPtr::new(at), STORAGE)?;
    Ok(match (level, address) {
        (SOL_IP, SocketAddress::V4(Endpoint { ip, .. })) => Some(ip),
        (SOL_IPV6, SocketAddress::V6(Endpoint { ip: ip @ IpAddr::V6(_), .. })) => Some(ip),
        _ => None,
    })
}

/// Takes a `struct group_req`.
fn any_member(
    common: &Common,
    (level, number): (i32, i32),
    at: UserAddress,
    len: usize,
) -> Result<()> {
    check_len(len, FIRST_STORAGE as usize + STORAGE)?;
    let naming = Naming { index: at.read()?, address: None };
    let group = stored(level, at.offset(FIRST_STORAGE))?.ok_or(Errno::EINVAL)?;
    let mut groups = common.groups.borrow_mut();
    match number {
        MCAST_JOIN_GROUP => groups.join(group, naming),
        _ => groups.leave(group, naming),
    }
}

/// Takes a `struct group_source_req`.
fn any_source(
    common: &Common,
    (level, number): (i32, i32),
    at: UserAddress,
    len: usize,
) -> Result<()> {
    check_len(len, FIRST_STORAGE as usize + 2 * STORAGE)?;
    let naming = Naming { index: at.read()?, address: None };
    let group = stored(level, at.offset(FIRST_STORAGE))?.ok_or(Errno::EADDRNOTAVAIL)?;
    let source_at = at.offset(FIRST_STORAGE + STORAGE as u64);
    let source = stored(level, source_at)?.ok_or(Errno::EADDRNOTAVAIL)?;
    let mut groups = common.groups.borrow_mut();
    match number {
        MCAST_JOIN_SOURCE_GROUP => groups.join_source(group, source, naming),
        MCAST_BLOCK_SOURCE => groups.block(group, source, naming),
        MCAST_UNBLOCK_SOURCE => groups.unblock(group, source, naming),
        _ => groups.leave_source(group, source, naming),
    }
}
