//! Processes and files inside a sandbox that runs, from outside ([`thaw_abi::remote`]).

use std::ffi::OsStr;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;

use bytemuck::{Pod, Zeroable, bytes_of, pod_read_unaligned};
use thaw_abi::control::{MESSAGE_MAX, MessageHeader, WindowSize};
use thaw_abi::remote::{
    EXEC_TERMINAL, Exec, ExecEnded, ExecFailed, ExecGoesOn, ExecSignal, ExecStarted, ExecWindow,
    Files, MSG_EXEC, MSG_EXEC_ENDED, MSG_EXEC_FAILED, MSG_EXEC_GOES_ON, MSG_EXEC_NOT_EXECUTABLE,
    MSG_EXEC_NOT_FOUND, MSG_EXEC_SIGNAL, MSG_EXEC_STARTED, MSG_EXEC_WINDOW, MSG_EXECS_GO_ON,
    MSG_EXECS_WAIT, MSG_EXECS_WAITING, MSG_FILES, MSG_PORT, Port,
};

use crate::event::{GuestExit, Violation};
use crate::message;
use crate::text::printable;

/// A process to be started in a sandbox that runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExecSpec {
    /// Arguments, the program first. It is looked up in `PATH` if it has no slash.
    pub argv: Vec<String>,
    /// Environment, each `NAME=value`, added to that of the sandbox's first process.
    pub env: Vec<String>,
    /// Working directory; empty: that of the first process.
    pub workdir: String,
    /// User, and perhaps `:` and a group, by name or number; empty: that of the first process.
    pub user: String,
    /// It has a terminal of this size.
    pub terminal: Option<WindowSize>,
}

/// To which processes a signal goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalTo {
    /// To the process.
    Process,
    /// To its process group.
    Group,
}

/// Something to be said to a sandbox that runs.
#[derive(Debug)]
pub struct RemoteMessage(Vec<u8>);

/// Why a process cannot even be asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExecError {
    /// There is nothing to run.
    #[error("no program is named; give one, such as `sh`")]
    NoProgram,
    /// A text has a NUL byte in it.
    #[error("{what} contains a NUL byte; remove it")]
    Nul {
        /// Which one.
        what: &'static str,
    },
    /// It is too much.
    #[error(
        "arguments and environment take {bytes} bytes, and at most {limit} are passed on; \
             write them to a file in the sandbox"
    )]
    TooLong {
        /// Bytes of the message.
        bytes: usize,
        /// Most bytes.
        limit: usize,
    },
}

impl RemoteMessage {
    /// Start a process, which messages name by `id`. Three connected, non-blocking stream sockets
    /// go with it, or one if it has a terminal.
    ///
    /// # Errors
    /// The process cannot be described.
    pub fn exec(id: u64, spec: &ExecSpec) -> Result<Self, ExecError> {
        if spec.argv.first().is_none_or(String::is_empty) {
            return Err(ExecError::NoProgram);
        }
        let body = Exec {
            id,
            flags: if spec.terminal.is_some() { EXEC_TERMINAL } else { 0 },
            argv_count: spec.argv.len() as u32,
            env_count: spec.env.len() as u32,
            reserved: 0,
            window: spec.terminal.unwrap_or_else(WindowSize::zeroed),
        };
        let mut strings = Vec::new();
        push(&mut strings, "the user", &spec.user)?;
        push(&mut strings, "the working directory", &spec.workdir)?;
        for argument in &spec.argv {
            push(&mut strings, "an argument", argument)?;
        }
        for variable in &spec.env {
            push(&mut strings, "an environment variable", variable)?;
        }
        Self::with_tail(MSG_EXEC, &body, &strings)
    }

    /// In a copy: a process that messages named by `earlier` goes on, and they name it by `id`. Sockets
    /// as for [`RemoteMessage::exec`] go with it.
    pub fn exec_goes_on(earlier: u64, id: u64) -> Self {
        Self(message::message(MSG_EXEC_GOES_ON, &ExecGoesOn { earlier, id }))
    }

    /// All processes that go on were named.
    pub fn execs_go_on() -> Self {
        Self(bytes_of(&message::header(MSG_EXECS_GO_ON, 0, 0)).to_vec())
    }

    /// Another daemon follows this one, and says which processes go on.
    pub fn execs_wait() -> Self {
        Self(bytes_of(&message::header(MSG_EXECS_WAIT, 0, 0)).to_vec())
    }

    /// Send a signal, 1 to 64, to a process.
    pub fn signal(id: u64, number: u32, to: SignalTo) -> Self {
        let group = u32::from(to == SignalTo::Group);
        Self(message::message(MSG_EXEC_SIGNAL, &ExecSignal { id, number, group }))
    }

    /// The window of a process' terminal has another size.
    pub fn window(id: u64, window: WindowSize) -> Self {
        Self(message::message(MSG_EXEC_WINDOW, &ExecWindow { id, window }))
    }

    /// Serve files to the other end of the stream socket that goes with it, as a user (as in
    /// [`ExecSpec::user`]).
    ///
    /// # Errors
    /// The user cannot be named.
    pub fn files(user: &str) -> Result<Self, ExecError> {
        let mut strings = Vec::new();
        push(&mut strings, "the user", user)?;
        Self::with_tail(MSG_FILES, &Files { reserved: 0 }, &strings)
    }

    /// Connect the stream socket that goes with it to a TCP port on which something listens.
    pub fn port(port: u16) -> Self {
        Self(message::message(MSG_PORT, &Port { port: port.into(), reserved: 0 }))
    }

    fn with_tail<T: Pod>(kind: u32, body: &T, tail: &[u8]) -> Result<Self, ExecError> {
        let len = size_of::<T>() + tail.len();
        let bytes = size_of::<MessageHeader>() + len;
        if bytes > MESSAGE_MAX {
            return Err(ExecError::TooLong { bytes, limit: MESSAGE_MAX });
        }
        let header = message::header(kind, len, 0);
        Ok(Self([bytes_of(&header), bytes_of(body), tail].concat()))
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

fn push(strings: &mut Vec<u8>, what: &'static str, text: &str) -> Result<(), ExecError> {
    let bytes = OsStr::new(text).as_bytes();
    if bytes.contains(&0) {
        return Err(ExecError::Nul { what });
    }
    strings.extend_from_slice(bytes);
    strings.push(0);
    Ok(())
}

impl crate::Connector {
    /// Says something about processes and files, with sockets that stay open here, too. A guest
    /// that computes and never waits does not look: see [`crate::Sandbox::ring_if_unread`].
    ///
    /// # Errors
    /// As [`crate::Connector::send_connection`].
    pub fn send_remote(
        &self,
        message: RemoteMessage,
        sockets: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        self.send_lent(message.into_bytes(), sockets)
    }
}

/// What a sandbox says of a process that was started from outside. The number is the host's own;
/// a sandbox may name any.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemoteEvent {
    /// It runs.
    Started {
        /// Its number.
        id: u64,
        /// Its process id in the sandbox.
        pid: u32,
    },
    /// It has ended.
    Ended {
        /// Its number.
        id: u64,
        /// How.
        exit: GuestExit,
    },
    /// Streams that end from now on wait for the next daemon ([`RemoteMessage::execs_wait`]).
    Waiting,
    /// It could not be started.
    Failed {
        /// Its number.
        id: u64,
        /// Why: one sentence, control characters removed, at most 1 KiB.
        reason: String,
        /// The exit code of a shell that is told to run it: 127 if there is no such program, 126
        /// if it cannot be executed; `None`: that is not why.
        code: Option<u8>,
    },
}

/// Checks a message about processes. Every byte of it is hostile.
pub(crate) fn parse(kind: u32, body: &[u8]) -> Result<RemoteEvent, Violation> {
    let wrong_length = Violation::Length { kind, len: body.len() };
    match kind {
        MSG_EXEC_STARTED => {
            let ExecStarted { id, pid, .. } = whole(body).ok_or(wrong_length)?;
            Ok(RemoteEvent::Started { id, pid })
        }
        MSG_EXEC_ENDED => {
            let ExecEnded { id, code, signal } = whole(body).ok_or(wrong_length)?;
            let exit = GuestExit::checked(code, signal).ok_or(Violation::Value { kind })?;
            Ok(RemoteEvent::Ended { id, exit })
        }
        MSG_EXEC_FAILED | MSG_EXEC_NOT_FOUND | MSG_EXEC_NOT_EXECUTABLE => {
            let (head, reason) =
                body.split_at_checked(size_of::<ExecFailed>()).ok_or(wrong_length)?;
            let ExecFailed { id } = pod_read_unaligned(head);
            let code = match kind {
                MSG_EXEC_NOT_FOUND => Some(127),
                MSG_EXEC_NOT_EXECUTABLE => Some(126),
                _ => None,
            };
            Ok(RemoteEvent::Failed { id, reason: printable(reason), code })
        }
        MSG_EXECS_WAITING if body.is_empty() => Ok(RemoteEvent::Waiting),
        MSG_EXECS_WAITING => Err(wrong_length),
        _ => Err(Violation::Kind { kind }),
    }
}

fn whole<T: Pod>(body: &[u8]) -> Option<T> {
    bytemuck::try_pod_read_unaligned(body).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(argv: &[&str]) -> ExecSpec {
        let argv = argv.iter().map(|&argument| argument.to_owned()).collect();
        ExecSpec { argv, user: "me".into(), env: vec!["A=1".into()], ..ExecSpec::default() }
    }

    #[test]
    fn the_message_is_as_documented() {
        let message = RemoteMessage::exec(7, &spec(&["ls", "-l"])).unwrap().into_bytes();
        let (header, rest) = message.split_at(size_of::<MessageHeader>());
        let header: MessageHeader = pod_read_unaligned(header);
        assert_eq!((header.kind, header.len as usize), (MSG_EXEC, rest.len()));
        let (body, tail) = rest.split_at(size_of::<Exec>());
        let body: Exec = pod_read_unaligned(body);
        assert_eq!((body.id, body.argv_count, body.env_count, body.flags), (7, 2, 1, 0));
        assert_eq!(tail, b"me\0\0ls\0-l\0A=1\0");
    }

    #[test]
    fn a_port_is_named_by_its_number() {
        let message = RemoteMessage::port(8080).into_bytes();
        let (header, body) = message.split_at(size_of::<MessageHeader>());
        assert_eq!(pod_read_unaligned::<MessageHeader>(header).kind, MSG_PORT);
        assert_eq!(pod_read_unaligned::<Port>(body), Port { port: 8080, reserved: 0 });
    }

    #[test]
    fn what_cannot_be_asked_for_is_refused() {
        let error = |spec: &ExecSpec| RemoteMessage::exec(1, spec).unwrap_err();
        assert_eq!(error(&spec(&[])), ExecError::NoProgram);
        assert_eq!(error(&spec(&[""])), ExecError::NoProgram);
        assert_eq!(error(&spec(&["a\0b"])), ExecError::Nul { what: "an argument" });
        let long = "x".repeat(MESSAGE_MAX);
        assert!(matches!(error(&spec(&[&long])), ExecError::TooLong { .. }));
        assert!(RemoteMessage::files("a\0").is_err());
    }

    #[test]
    fn wrong_messages_are_violations() {
        let ended =
            |code, signal| parse(MSG_EXEC_ENDED, bytes_of(&ExecEnded { id: 1, code, signal }));
        assert_eq!(ended(3, 0), Ok(RemoteEvent::Ended { id: 1, exit: GuestExit::Code(3) }));
        assert_eq!(ended(0, 9), Ok(RemoteEvent::Ended { id: 1, exit: GuestExit::Signal(9) }));
        let value = Err(Violation::Value { kind: MSG_EXEC_ENDED });
        for (code, signal) in [(256, 0), (0, 65), (u32::MAX, 0)] {
            assert_eq!(ended(code, signal), value);
        }
        for kind in [MSG_EXEC_STARTED, MSG_EXEC_ENDED, MSG_EXEC_FAILED] {
            assert!(matches!(parse(kind, b"short"), Err(Violation::Length { .. })));
        }
        let failed = [&7u64.to_ne_bytes()[..], b"no\x1b such"].concat();
        let reason = "no\\x1b such".to_owned();
        for (kind, code) in [
            (MSG_EXEC_FAILED, None),
            (MSG_EXEC_NOT_FOUND, Some(127)),
            (MSG_EXEC_NOT_EXECUTABLE, Some(126)),
        ] {
            let reason = reason.clone();
            assert_eq!(parse(kind, &failed), Ok(RemoteEvent::Failed { id: 7, reason, code }));
        }
    }
}
