//! The network that a sandbox with outgoing connections sees.
//!
//! There is none: the host makes each socket and hands it in. These addresses
//! stand for what a program expects to find. They are those of the user-mode
//! networks of QEMU, VirtualBox and rootless containers.

/// The sandbox's own address.
pub const OWN_ADDRESS: [u8; 4] = [10, 0, 2, 15];
/// Bits of the network part of [`OWN_ADDRESS`].
pub const PREFIX_LEN: u8 = 24;
/// The gateway; a connection to it goes to the host's loopback, if allowed.
pub const HOST_ADDRESS: [u8; 4] = [10, 0, 2, 2];
/// The resolver; connections to its port 53 are answered by the host.
pub const RESOLVER_ADDRESS: [u8; 4] = [10, 0, 2, 3];
/// The resolver's port.
pub const RESOLVER_PORT: u16 = 53;
/// The address of names that a proxy on the host answers for.
pub const INTERCEPT_ADDRESS: [u8; 4] = [10, 0, 2, 4];
/// Name of [`HOST_ADDRESS`].
pub const HOST_NAME: &str = "host.thaw.internal";

/// The sandbox's own IPv6 address, if the host has IPv6.
pub const OWN_ADDRESS_V6: [u8; 16] =
    [0xfd, 0, 0x74, 0x68, 0x61, 0x77, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x15];
/// Bits of the network part of [`OWN_ADDRESS_V6`].
pub const PREFIX_LEN_V6: u8 = 64;
/// The gateway for IPv6.
pub const HOST_ADDRESS_V6: [u8; 16] =
    [0xfd, 0, 0x74, 0x68, 0x61, 0x77, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x02];
