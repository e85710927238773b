//! ioctl(2) of sockets on interfaces (netdevice(7)).

use core::net::{IpAddr, Ipv4Addr};

use super::interfaces::{Interface, InterfaceAddress, all};
use super::namespace;
use crate::errno::{Errno, Result};
use crate::platform::user::UserAddress;

const SIOCGIFNAME: u32 = 0x8910;
const SIOCGIFCONF: u32 = 0x8912;
const SIOCGIFFLAGS: u32 = 0x8913;
const SIOCSIFFLAGS: u32 = 0x8914;
const SIOCGIFADDR: u32 = 0x8915;
const SIOCGIFDSTADDR: u32 = 0x8917;
const SIOCGIFBRDADDR: u32 = 0x8919;
const SIOCGIFNETMASK: u32 = 0x891b;
const SIOCGIFMETRIC: u32 = 0x891d;
const SIOCGIFMTU: u32 = 0x8921;
const SIOCGIFHWADDR: u32 = 0x8927;
const SIOCGIFINDEX: u32 = 0x8933;
const SIOCGIFTXQLEN: u32 = 0x8942;
const SIOCETHTOOL: u32 = 0x8946;
/// The other calls that change an interface.
const CHANGES: &[u32] =
    &[0x8916, 0x8918, 0x891a, 0x891c, 0x891e, 0x8922, 0x8923, 0x8924, 0x8931, 0x8932, 0x8943];

/// Bytes of `struct ifreq`: a name and 24 bytes of something.
const IFREQ_SIZE: usize = 40;
const NAME_SIZE: usize = 16;

fn inet(ip: Ipv4Addr) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[0] = 2;
    bytes[4..8].copy_from_slice(&ip.octets());
    bytes
}

fn hardware(kind: u16, address: [u8; 6]) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..2].copy_from_slice(&kind.to_ne_bytes());
    bytes[2..8].copy_from_slice(&address);
    bytes
}

fn name_field(interface: &Interface) -> [u8; NAME_SIZE] {
    let mut name = [0; NAME_SIZE];
    name[..interface.name.len()].copy_from_slice(interface.name.as_bytes());
    name
}

/// The IPv4 address of an interface, which each has one of.
fn v4(interface: &Interface) -> Option<(Ipv4Addr, InterfaceAddress)> {
    interface.addresses.iter().find_map(|address| match address.ip {
        IpAddr::V4(ip) => Some((ip, *address)),
        IpAddr::V6(_) => None,
    })
}

fn configuration(argument: UserAddress) -> Result<u64> {
    // struct ifconf: int length, then a pointer at offset 8.
    // A negative length is no room; without a pointer, it says nothing.
    let room = usize::try_from(argument.read::<i32>()?).unwrap_or(0);
    let at = UserAddress(argument.offset(8).read::<u64>()?);
    let mut len = 0;
    for interface in all() {
        let Some((ip, _)) = v4(&interface) else { continue };
        if !at.is_null() {
            if room - len < IFREQ_SIZE {
                break;
            }
            let mut entry = [0; IFREQ_SIZE];
            entry[..NAME_SIZE].copy_from_slice(&name_field(&interface));
            entry[NAME_SIZE..NAME_SIZE + 16].copy_from_slice(&inet(ip));
            at.offset(len as u64).write_bytes(&entry)?;
        }
        len += IFREQ_SIZE;
    }
    argument.write(&(len as i32)).map(|()| 0)
}

fn find(argument: UserAddress) -> Result<Interface> {
    let name = argument.read::<[u8; NAME_SIZE]>()?;
    let end = name.iter().position(|&byte| byte == 0).unwrap_or(NAME_SIZE - 1);
    // An alias, such as eth0:1, is the interface.
    let name = name[..end].split(|&byte| byte == b':').next().unwrap_or(&[]);
    all().into_iter().find(|interface| interface.name.as_bytes() == name).ok_or(Errno::ENODEV)
}

/// ioctl(2) of a socket on interfaces.
pub fn ioctl(request: u32, argument: UserAddress) -> Result<u64> {
    let value = argument.offset(NAME_SIZE as u64);
    match request {
        SIOCGIFCONF => return configuration(argument),
        SIOCGIFNAME => {
            let index = value.read::<u32>()?;
            let found = all().into_iter().find(|interface| interface.index == index);
            argument.write_bytes(&name_field(&found.ok_or(Errno::ENODEV)?))?;
        }
        SIOCGIFFLAGS | SIOCGIFADDR | SIOCGIFDSTADDR | SIOCGIFBRDADDR | SIOCGIFNETMASK
        | SIOCGIFMETRIC | SIOCGIFMTU | SIOCGIFHWADDR | SIOCGIFINDEX | SIOCGIFTXQLEN => {
            let interface = find(argument)?;
            let own = || v4(&interface).ok_or(Errno::EADDRNOTAVAIL);
            match request {
                // The flags beyond 16 bits are for netlink only.
                SIOCGIFFLAGS => value.write(&(interface.flags as u16))?,
                SIOCGIFADDR | SIOCGIFDSTADDR => value.write_bytes(&inet(own()?.0))?,
                SIOCGIFBRDADDR => {
                    let broadcast = own()?.1.broadcast.unwrap_or(Ipv4Addr::UNSPECIFIED);
                    value.write_bytes(&inet(broadcast))?;
                }
                SIOCGIFNETMASK => value.write_bytes(&inet(own()?.1.mask()))?,
                SIOCGIFMETRIC => value.write(&0i32)?,
                SIOCGIFMTU => value.write(&interface.mtu)?,
                SIOCGIFINDEX => value.write(&interface.index)?,
                SIOCGIFTXQLEN => value.write(&1000i32)?,
                _ => value.write_bytes(&hardware(interface.kind, interface.hardware))?,
            }
        }
        SIOCSIFFLAGS => {
            const IFF_UP: u16 = 1;
            find(argument)?;
            namespace::set_loopback_up(value.read::<u16>()? & IFF_UP != 0)?;
        }
        request if CHANGES.contains(&request) => return Err(Errno::EPERM),
        // No interface has a driver that would know its speed.
        SIOCETHTOOL => return Err(find(argument).err().unwrap_or(Errno::EOPNOTSUPP)),
        _ => return Err(Errno::ENOTTY),
    }
    Ok(0)
}
