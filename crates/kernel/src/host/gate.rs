//! Gates: pipes by which the host says that something is there that a sandbox waits for.

use crate::errno::{Errno, Result};
use crate::platform::machine::{Clocks, HostFd, HostFiles, Machine, PollFd};

/// Something can be read (poll(2)).
const POLLIN: i16 = 1;

/// The reading end of a pipe, in which a byte lies when what is waited for is there. Nobody reads
/// it, so that several host processes can wait for the same. It is closed at its end.
pub struct Gate(HostFd);

impl Gate {
    /// The gate with this descriptor.
    pub fn new(reading_end: HostFd) -> Self {
        Self(reading_end)
    }

    /// Waits until it is open, so many nanoseconds at most. Uses no saved memory.
    ///
    /// # Errors
    /// `EPIPE`: the host has closed its end, and nothing will come. `ETIMEDOUT`: it does not answer.
    pub fn wait(&self, patience_ns: Option<u64>) -> Result<()> {
        let until = patience_ns.map(|patience| Machine::monotonic_ns().saturating_add(patience));
        loop {
            let left = until.map(|until| until.saturating_sub(Machine::monotonic_ns()));
            let mut awaited = [PollFd { fd: self.0.0, events: POLLIN, revents: 0 }];
            match Machine::poll(&mut awaited, left) {
                Ok(0) if left == Some(0) => return Err(Errno::ETIMEDOUT),
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) if awaited[0].revents & POLLIN != 0 => return Ok(()),
                Ok(_) => return Err(Errno::EPIPE),
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for Gate {
    /// Closes it for all host processes, which share their descriptors.
    fn drop(&mut self) {
        Machine::close(self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::IntoRawFd;

    #[test]
    fn a_gate_is_open_for_all_who_wait_once_there_is_a_byte() {
        let _sandbox = crate::testing::Sandbox::new();
        let (told, mut tell) = std::io::pipe().unwrap();
        let gate = Gate::new(HostFd::new(told.into_raw_fd()));
        assert_eq!(gate.wait(Some(1)), Err(Errno::ETIMEDOUT));
        tell.write_all(&[1]).unwrap();
        drop(tell);
        for _ in 0..2 {
            gate.wait(None).unwrap();
        }
    }

    #[test]
    fn a_gate_that_is_closed_without_a_byte_stays_shut() {
        let _sandbox = crate::testing::Sandbox::new();
        let (told, tell) = std::io::pipe().unwrap();
        drop(tell);
        let gate = Gate::new(HostFd::new(told.into_raw_fd()));
        assert_eq!(gate.wait(None), Err(Errno::EPIPE));
    }
}
