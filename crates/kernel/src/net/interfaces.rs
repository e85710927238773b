//! The network interfaces that a program sees: loopback (netdevice(7)).

use crate::errno::{Errno, Result};
use crate::platform::user::UserAddress;

const SIOCGIFNAME: u32 = 0x8910;
const SIOCGIFCONF: u32 = 0x8912;
const SIOCGIFFLAGS: u32 = 0x8913;
const SIOCGIFADDR: u32 = 0x8915;
const SIOCGIFNETMASK: u32 = 0x891b;
const SIOCGIFMTU: u32 = 0x8921;
const SIOCGIFHWADDR: u32 = 0x8927;
const SIOCGIFINDEX: u32 = 0x8933;

const LOOPBACK_INDEX: i32 = 1;
const LOOPBACK_NAME: &[u8; 16] = b"lo\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
/// `IFF_UP | IFF_LOOPBACK | IFF_RUNNING`.
const LOOPBACK_FLAGS: i16 = 0x49;
const LOOPBACK_MTU: i32 = 65536;
const ARPHRD_LOOPBACK: u16 = 772;

/// `struct ifreq`: a name and 24 bytes of something.
const IFREQ_SIZE: usize = 40;

fn inet(address: [u8; 4]) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[0] = 2;
    bytes[4..8].copy_from_slice(&address);
    bytes
}

/// ioctl(2) of a socket on interfaces.
pub fn ioctl(request: u32, argument: UserAddress) -> Result<u64> {
    let value = argument.offset(16);
    match request {
        SIOCGIFCONF => {
            // struct ifconf: int length, then a pointer at offset 8.
            let room = argument.read::<i32>()?;
            let at = UserAddress(argument.offset(8).read::<u64>()?);
            if at.is_null() {
                argument.write(&(IFREQ_SIZE as i32))?;
            } else if room >= IFREQ_SIZE as i32 {
                let mut entry = [0; IFREQ_SIZE];
                entry[..16].copy_from_slice(LOOPBACK_NAME);
                entry[16..32].copy_from_slice(&inet([127, 0, 0, 1]));
                at.write_bytes(&entry)?;
                argument.write(&(IFREQ_SIZE as i32))?;
            } else {
                argument.write(&0i32)?;
            }
        }
        SIOCGIFNAME => {
            if value.read::<i32>()? != LOOPBACK_INDEX {
                return Err(Errno::ENODEV);
            }
            argument.write_bytes(LOOPBACK_NAME)?;
        }
        SIOCGIFFLAGS | SIOCGIFADDR | SIOCGIFNETMASK | SIOCGIFMTU | SIOCGIFHWADDR | SIOCGIFINDEX => {
            let name = argument.read::<[u8; 16]>()?;
            if !name.starts_with(b"lo\0") {
                return Err(Errno::ENODEV);
            }
            match request {
                SIOCGIFFLAGS => value.write(&LOOPBACK_FLAGS)?,
                SIOCGIFADDR => value.write_bytes(&inet([127, 0, 0, 1]))?,
                SIOCGIFNETMASK => value.write_bytes(&inet([255, 0, 0, 0]))?,
                SIOCGIFMTU => value.write(&LOOPBACK_MTU)?,
                SIOCGIFINDEX => value.write(&LOOPBACK_INDEX)?,
                _ => {
                    let mut hardware = [0; 16];
                    hardware[..2].copy_from_slice(&ARPHRD_LOOPBACK.to_ne_bytes());
                    value.write_bytes(&hardware)?;
                }
            }
        }
        _ => return Err(Errno::ENOTTY),
    }
    Ok(0)
}
