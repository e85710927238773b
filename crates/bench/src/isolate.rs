//! A network of its own for native starts, so that the port that the program
//! wants is free.
#![allow(unsafe_code)]

use rustix::process::{getegid, geteuid};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Moves this process, which must have one thread, into a network namespace
/// where only the loopback interface exists. Without privileges it also enters
/// a user namespace.
pub(crate) fn enter_own_network() -> io::Result<()> {
    let (uid, gid) = (geteuid(), getegid());
    let mut flags = UnshareFlags::NEWNET;
    if !uid.is_root() {
        flags |= UnshareFlags::NEWUSER;
    }
    // SAFETY: no descriptor table or memory is shared or unshared by these flags.
    unsafe { unshare_unsafe(flags) }?;
    if flags.contains(UnshareFlags::NEWUSER) {
        std::fs::write("/proc/self/setgroups", "deny")?;
        std::fs::write("/proc/self/uid_map", format!("{0} {0} 1", uid.as_raw()))?;
        std::fs::write("/proc/self/gid_map", format!("{0} {0} 1", gid.as_raw()))?;
    }
    bring_up_loopback()
}

/// Moves this thread into a network namespace: what it connects from now on is there.
pub(crate) fn enter_network(namespace: &std::fs::File) -> io::Result<()> {
    let kind = Some(rustix::thread::LinkNameSpaceType::Network);
    Ok(rustix::thread::move_into_link_name_space(namespace.as_fd(), kind)?)
}

/// Sets `IFF_UP` on `lo` (netdevice(7)).
fn bring_up_loopback() -> io::Result<()> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
    // SAFETY: `ifreq` is plain data, for which zeros are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: the request is a valid `ifreq` that lives through the call.
    let result = unsafe {
        libc::ioctl(socket.as_fd().as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw const request)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
