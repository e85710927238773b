//! A booted sandbox.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::process::ExitStatus;
use std::time::Duration;

use thaw_abi::control::{Connection, WindowSize};

use crate::event::{Event, Progress};

/// A booted sandbox. Dropping it kills it.
///
/// Its descriptor ([`AsFd`]) is the control socket: when it is readable, call
/// [`Sandbox::poll_event`] until [`Progress::Idle`].
pub struct Sandbox {}

impl fmt::Debug for Sandbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sandbox").field("pid", &self.pid()).finish()
    }
}

impl Sandbox {
    /// Reads messages of the sandbox, serves its broker requests, and returns
    /// the first event. Never blocks on the sandbox. After [`Event::Hangup`],
    /// it always returns [`Progress::Idle`].
    pub fn poll_event(&mut self) -> Progress {
        todo!()
    }

    /// Whether replies wait for room: poll the control socket for writability, too.
    pub fn wants_write(&self) -> bool {
        todo!()
    }

    /// Blocks until the next event; `None` when `timeout` passes first.
    pub fn wait_event(&mut self, timeout: Option<Duration>) -> io::Result<Option<Event>> {
        let _ = timeout;
        todo!()
    }

    /// Hands a connected, non-blocking socket to the guest's listening socket.
    pub fn send_connection(
        &mut self,
        connection: &Connection,
        socket: BorrowedFd<'_>,
    ) -> io::Result<()> {
        let _ = (connection, socket);
        todo!()
    }

    /// Sends a signal, 1 to 64, to the first guest process.
    pub fn send_signal(&mut self, number: u32) -> io::Result<()> {
        let _ = number;
        todo!()
    }

    /// Tells the guest that its terminal has another size.
    pub fn send_window_size(&mut self, window: WindowSize) -> io::Result<()> {
        let _ = window;
        todo!()
    }

    /// Asks the sandbox to come to rest and report [`Event::EntryPoint`].
    pub fn request_freeze(&mut self) -> io::Result<()> {
        todo!()
    }

    /// Lets the sandbox go on after [`Event::EntryPoint`].
    pub fn resume(&mut self) -> io::Result<()> {
        todo!()
    }

    /// Ends the sandbox at once. Harmless if it has ended already.
    pub fn kill(&self) -> io::Result<()> {
        todo!()
    }

    /// Process id as seen by the caller's `/proc`.
    pub fn pid(&self) -> u32 {
        todo!()
    }

    /// A descriptor that becomes readable when the process has ended.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        todo!()
    }

    /// Read end of the sandbox's console, non-blocking, where the kernel writes
    /// traces and panics; `None` if the pool's console is shared.
    pub fn console(&self) -> Option<BorrowedFd<'_>> {
        todo!()
    }

    /// How the host process ended, if it has.
    pub fn try_wait(&self) -> Option<ExitStatus> {
        todo!()
    }

    /// Blocks until the host process has ended. The guest's own exit code is in
    /// [`Event::Exit`]; this one tells of kills, crashes and limits.
    pub fn wait(&self) -> ExitStatus {
        todo!()
    }
}

impl AsFd for Sandbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        todo!()
    }
}

impl AsRawFd for Sandbox {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}
