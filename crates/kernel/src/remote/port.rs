//! Connections of the host to ports on which programs in the sandbox listen.

use thaw_abi::remote::Port;

use super::close;
use crate::errno::{Errno, Result};
use crate::io::IoSlice;
use crate::platform::machine::{HostFd, HostFiles, Machine};
use crate::state::kernel;

/// Gives the listener of a port a client, whose bytes come over the socket, and says on the socket
/// how that went.
pub fn connect(message: &Port, fds: &[i32]) {
    let &[fd] = fds else { return close(fds) };
    let fd = HostFd::new(fd);
    let outcome = deliver(message.port, fd);
    if let Err(error) = outcome {
        say(fd, error.0);
        let _ = Machine::shutdown(fd, 2);
        Machine::close(fd);
    }
}

fn deliver(port: u32, fd: HostFd) -> Result<()> {
    let port = u16::try_from(port).ok().filter(|&port| port != 0).ok_or(Errno::EINVAL)?;
    kernel().net.connect_from_host(port, fd, || say(fd, 0))
}

/// The first bytes on a fresh socket always find room.
fn say(fd: HostFd, errno: i32) {
    let _ = Machine::send(fd, IoSlice::from(&errno.to_ne_bytes()[..]));
}
