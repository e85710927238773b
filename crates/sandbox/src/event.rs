//! What a sandbox tells its host.

use thaw_abi::control::EntryPoint;

/// What [`crate::Sandbox::poll_event`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The sandbox reported something.
    Event(Event),
    /// The control socket is drained: poll it for readability (and for
    /// writability while [`crate::Sandbox::wants_write`]).
    Idle,
    /// The budget for broker requests of one call is used up: let other
    /// sandboxes have their turn, then call again without polling.
    Busy,
}

/// A report of a sandbox. Its contents come from the sandbox: never trust them
/// further than the type says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The boot is complete.
    Booted(BootTimes),
    /// All guest threads wait at the entry point; the sandbox does nothing
    /// until [`crate::Sandbox::resume`]. Pass it on to [`crate::freeze::freeze`].
    EntryPoint(EntryPoint),
    /// The guest has closed the connection with this number.
    ConnectionClosed {
        /// [`thaw_abi::control::Connection::id`].
        id: u64,
    },
    /// The first guest process has ended; [`Event::Hangup`] follows.
    Exit(GuestExit),
    /// The kernel could not start or thaw: one sentence, control characters
    /// removed, at most 1 KiB.
    Failed(String),
    /// The sandbox broke the protocol and has been killed; [`Event::Hangup`] follows.
    Violation(Violation),
    /// The sandbox's end of the control socket is closed: its process has
    /// ended. Always the last event; [`crate::Sandbox::wait`] has the status.
    Hangup,
}

/// When each phase of a boot ended, in nanoseconds of `CLOCK_MONOTONIC`; 0: not
/// reached when reported.
pub type BootTimes = thaw_abi::control::Booted;

/// How the first guest process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestExit {
    /// `exit` or `exit_group` with this code, 0 to 255.
    Code(u8),
    /// Ended by this signal, 1 to 64.
    Signal(u8),
}

/// How a sandbox broke the control protocol. It is killed for it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A message longer than a sandbox may send.
    #[error("the sandbox sent a message longer than {limit} bytes")]
    TooLong {
        /// Most bytes of a message from a sandbox.
        limit: usize,
    },
    /// The length in the header does not fit the packet or the kind.
    #[error("the sandbox sent a message of kind {kind} with a wrong length of {len} bytes")]
    Length {
        /// Kind in the header.
        kind: u32,
        /// Bytes of the packet.
        len: usize,
    },
    /// A kind that a sandbox never sends, or not in its present state.
    #[error("the sandbox sent a message of kind {kind}, which is not allowed now")]
    Kind {
        /// Kind in the header.
        kind: u32,
    },
    /// A message with a descriptor attached.
    #[error("the sandbox attached a descriptor to a message")]
    Descriptor,
    /// It asks, but does not read the answers.
    #[error("the sandbox does not read the replies to its requests")]
    RepliesUnread,
    /// A field has a value that its documentation excludes.
    #[error("the sandbox sent a message of kind {kind} with an impossible value")]
    Value {
        /// Kind in the header.
        kind: u32,
    },
}
