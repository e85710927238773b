//! A live template: a process that has mapped an image and forks copies of it.
//!
//! A template keeps the capabilities that give each copy a user id and a pid
//! namespace of its own, so it must not run or trust anything of the image: it
//! maps memory and never reads it. Only a copy does, after it has given up
//! everything (Catalyzer §4, sandbox fork; the one thread of a host process that
//! forks is the transient single thread, whatever the program has).

use thaw_abi::control::{Fork, MSG_FORK, MSG_READY};
use thaw_abi::layout::CONSOLE_FD;

use crate::errno::{Errno, Result};
use crate::host::control::{self, CONTROL};
use crate::platform::machine::{Forked, HostFd, HostFiles, Kinship, Machine, Processes};
use crate::platform::panic;

/// `CAP_SETGID`, `CAP_SETUID` and `CAP_SYS_ADMIN` (for pid namespaces).
const CAPABILITIES: u32 = 1 << 6 | 1 << 7 | 1 << 21;

/// Keeps the capabilities that forking copies takes, and no way to pass them on.
pub fn keep_capabilities() -> Result<()> {
    Machine::set_capabilities(CAPABILITIES)
}

/// Forks a copy for each request. Returns in the copies only, each confined like
/// any sandbox and with a control socket of its own.
pub fn serve() -> Result<()> {
    control::send(MSG_READY, 0, &[], &[]);
    loop {
        let message = control::receive_second_command();
        let (fork, _) = message.split::<Fork>()?;
        let (MSG_FORK, [socket, group @ .., console]) = (message.kind, message.fds()) else {
            return Err(Errno::EINVAL);
        };
        match Machine::fork(Kinship::Sandbox) {
            Ok(Forked::Child) => {
                if become_copy(fork, HostFd::new(*socket), group, HostFd::new(*console)).is_err() {
                    Machine::exit(panic::PANIC_EXIT_CODE)
                }
                return Ok(());
            }
            Ok(Forked::Parent { .. }) => {}
            // The host sees the end of the copy's control socket.
            Err(error) => crate::console!("thaw template: cannot fork a copy: {error:?}"),
        }
        message.fds().iter().for_each(|&fd| Machine::close(HostFd::new(fd)));
    }
}

/// Gives up the template's rights, groups, control socket and console. `groups` move the
/// thread that writes to them into the copy's own control groups.
fn become_copy(fork: &Fork, socket: HostFd, groups: &[i32], console: HostFd) -> Result<()> {
    for (own, number) in [(socket, CONTROL), (console, HostFd::new(CONSOLE_FD))] {
        Machine::duplicate_to(own, number)?;
        Machine::close(own);
    }
    for &group in groups {
        // The thread that writes is meant (cgroups(7)). It takes microseconds, but
        // later a guest could keep processes out of it.
        Machine::write(HostFd::new(group), b"0"[..].into())?;
        Machine::close(HostFd::new(group));
    }
    Machine::new_process_group()?;
    // Ends the capabilities, too (capabilities(7), "effect of user id changes"),
    // but not where all sandboxes share the template's id.
    Machine::set_ids(fork.id)?;
    Machine::set_capabilities(0)?;
    control::send(MSG_READY, 0, &[], &[]);
    Ok(())
}
