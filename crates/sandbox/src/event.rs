//! What a sandbox tells its host.

use std::fmt;

use bytemuck::AnyBitPattern;
use thaw_abi::control::{
    ACTIVITY_NAMES_MAX, Activity, Awake as AwakeMessage, ConnectionClosed, DENIALS_AT_ONCE_MAX,
    DENIED_NAME_MAX, DeniedWay, Described, EntryPoint, Exit, LACK_FILE_ROOM, LACK_MEMORY,
    LACK_NAME_MAX, LACK_PROGRAM, Lack as LackMessage, Losses, MSG_ACTIVITY, MSG_AWAKE, MSG_BIND,
    MSG_BOOTED, MSG_CONNECTION_CLOSED, MSG_DENIED, MSG_DESCRIBED, MSG_ENTRY_POINT, MSG_EXIT,
    MSG_FAILED, MSG_HIBERNATED, MSG_LACKS, MSG_LOSES, MSG_OOM_KILLED, MSG_OPEN_BLOB,
    MSG_OPEN_SOCKET, MSG_READY, MSG_RESTING, MSG_TERMINAL_GET, MSG_TERMINAL_SET, MSG_UNSEAL,
    MSG_WAKE_SOCKET, MSG_WRITTEN, MessageHeader, OomKilled, Resting, WRITTEN_MAX,
    WRITTEN_PATHS_MAX, Written,
};
use thaw_abi::remote::{MSG_EXEC_STARTED, MSG_EXECS_WAITING};

use crate::broker::{Question, Request, socket_address};
use crate::egress::{Denied, EgressEvents, Transport};
use crate::hibernate::Awake;
use crate::remote::{self, RemoteEvent};
use crate::text::printable;

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
    /// A held copy or a template is prepared. Never of other sandboxes.
    Prepared,
    /// The boot is complete.
    Booted(BootTimes),
    /// All guest threads wait at the entry point; the sandbox does nothing
    /// until [`crate::Sandbox::resume`]. Pass it on to [`crate::freeze::freeze`].
    EntryPoint(EntryPoint),
    /// All guest threads wait, as [`crate::Sandbox::request_rest`] has asked. Pass it on to
    /// [`crate::Sandbox::hibernator`].
    Resting(Resting),
    /// It has given up its memory.
    Hibernated,
    /// It wakes, and needs the content of its encrypted swap file
    /// ([`SwapFile::gate`](crate::SwapFile)).
    Unseal,
    /// It was at rest or hibernated, and goes on.
    Awake(Awake),
    /// What the program does, as [`crate::Sandbox::request_description`] has asked. A sandbox may
    /// say what it likes.
    Described(Described),
    /// What it has done since it was asked before, which comes just before that. A sandbox may say
    /// what it likes.
    Activity(ProgramActivity),
    /// Which connections copies of what is frozen next will find reset. A sandbox may say what it
    /// likes.
    Losses(Losses),
    /// What the program has written that lives and dies with a copy. A sandbox may say what it
    /// likes.
    Written(WrittenFiles),
    /// What it has denied its program by itself, since it has no way out at all. A sandbox may say
    /// what it likes.
    Denied(EgressEvents),
    /// What its program has asked for and does not have. A sandbox may say what it likes.
    Lacks(Lack),
    /// It has ended a process, since its memory was used up
    /// ([`crate::Sandbox::enable_oom_killer`]).
    OomKilled(KilledProcess),
    /// The guest has closed the connection with this number.
    ConnectionClosed {
        /// [`thaw_abi::control::Connection::id`].
        id: u64,
    },
    /// Something has become of a process that was started from outside.
    Remote(RemoteEvent),
    /// The first guest process has ended; [`Event::Hangup`] follows.
    Exit(GuestExit),
    /// The kernel could not start or thaw: one sentence, control characters
    /// removed, at most 1 KiB. If it is the program that cannot be started, [`Event::Exit`]
    /// follows with the code that a shell gives such a program.
    Failed(String),
    /// The sandbox broke the protocol and has been killed; [`Event::Hangup`] follows.
    Violation(Violation),
    /// The sandbox's end of the control socket is closed, or it was killed for
    /// a violation: its process has ended or is about to. Always the last
    /// event; [`crate::Sandbox::wait`] has the status.
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

impl GuestExit {
    /// From what a sandbox says; `None`: no process ends like that.
    pub(crate) fn checked(code: u32, signal: u32) -> Option<Self> {
        match (u8::try_from(code), u8::try_from(signal)) {
            (Ok(code), Ok(0)) => Some(Self::Code(code)),
            (_, Ok(signal @ 1..=64)) => Some(Self::Signal(signal)),
            _ => None,
        }
    }
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
    /// The process that serves files of the host to it has ended, which a sandbox that has
    /// taken it over can bring about.
    #[error(
        "the process that serves files of this host to it has ended; `dmesg` says if the host \
         ran out of memory"
    )]
    FilesUnserved,
    /// A field has a value that its documentation excludes.
    #[error("the sandbox sent a message of kind {kind} with an impossible value")]
    Value {
        /// Kind in the header.
        kind: u32,
    },
}

/// A message from a sandbox, checked.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Incoming<'a> {
    /// For the caller.
    Event(Event),
    /// The answer to a question of the library.
    OomKilled(OomKilled),
    /// For the broker.
    Request(Request<'a>),
}

/// Files that a program has written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenFiles {
    /// How many.
    pub numbers: Written,
    /// The first paths, made fit for people; directories end with a slash.
    pub paths: Vec<String>,
}

impl WrittenFiles {
    fn parse(body: &[u8]) -> Option<Self> {
        let (numbers, tail) = body.split_at_checked(size_of::<Written>())?;
        if tail.len() > WRITTEN_MAX {
            return None;
        }
        let paths = tail.split(|&byte| byte == 0).filter(|path| !path.is_empty());
        let paths = paths.take(WRITTEN_PATHS_MAX).map(printable).collect();
        Some(Self { numbers: bytemuck::pod_read_unaligned(numbers), paths })
    }
}

/// What a sandbox that has no way out at all has denied its program.
fn denials(body: &[u8]) -> Option<EgressEvents> {
    let (way, name) = body.split_at_checked(size_of::<DeniedWay>())?;
    let way: DeniedWay = bytemuck::pod_read_unaligned(way);
    let first = match socket_address(&way.to) {
        Some(to) if name.is_empty() => Denied::Address(to, Transport::Tcp),
        None if way.to.family == 0 && (1..=DENIED_NAME_MAX).contains(&name.len()) => {
            Denied::Name(String::from_utf8_lossy(name).into_owned())
        }
        _ => return None,
    };
    let (denied, recent) = (way.count.into(), vec![first]);
    (1..=DENIALS_AT_ONCE_MAX).contains(&way.count).then(|| EgressEvents {
        denied,
        recent,
        ..EgressEvents::default()
    })
}

/// Something that a program has asked for and does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lack {
    /// A program that does not exist, by its path or by a name that was looked for in several
    /// directories; made fit for people.
    Program(String),
    /// So many bytes of memory at once, which are more than the sandbox may have at all.
    Memory(u64),
    /// Room for more files beside those that take so many bytes.
    FileRoom(u64),
}

impl Lack {
    fn parse(body: &[u8]) -> Option<Self> {
        let (lack, name) = body.split_at_checked(size_of::<LackMessage>())?;
        let LackMessage { kind, bytes, .. } = bytemuck::pod_read_unaligned(lack);
        match (kind, name.len()) {
            (LACK_PROGRAM, 1..=LACK_NAME_MAX) if bytes == 0 => Some(Self::Program(printable(name))),
            (LACK_MEMORY, 0) => Some(Self::Memory(bytes)),
            (LACK_FILE_ROOM, 0) => Some(Self::FileRoom(bytes)),
            _ => None,
        }
    }
}

/// A process that was ended, since the memory of its sandbox was used up. A sandbox may say what it
/// likes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KilledProcess {
    /// Its id in the sandbox.
    pub pid: u32,
    /// Its name, made fit for people.
    pub name: String,
    /// Bytes of memory that were its own.
    pub resident: u64,
}

impl fmt::Display for KilledProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, name, resident } = self;
        let mebibytes = resident.div_ceil(1 << 20);
        write!(
            f,
            "process {pid} ({name}), with {mebibytes}MiB of its own, was killed, since the sandbox had used \
             up its memory"
        )
    }
}

impl KilledProcess {
    pub(crate) fn of(killed: &OomKilled) -> Self {
        let name = killed.name.split(|&byte| byte == 0).next().unwrap_or_default();
        let resident = u64::from(killed.resident_kib) << 10;
        Self { pid: killed.pid, name: printable(name), resident }
    }
}

/// What a program does while its entry point is waited for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProgramActivity {
    /// Numbers.
    pub numbers: Activity,
    /// The names of the system calls that its busy thread makes most, made fit for people.
    pub names: String,
}

impl ProgramActivity {
    fn parse(body: &[u8]) -> Option<Self> {
        let (numbers, names) = body.split_at_checked(size_of::<Activity>())?;
        let is_short = names.len() <= ACTIVITY_NAMES_MAX;
        is_short.then(|| Self {
            numbers: bytemuck::pod_read_unaligned(numbers),
            names: printable(names),
        })
    }
}

/// Checks a packet from a sandbox. Every byte of it is hostile.
pub(crate) fn parse(packet: &[u8]) -> Result<Incoming<'_>, Violation> {
    let len = packet.len();
    let Some((header, body)) = packet.split_at_checked(size_of::<MessageHeader>()) else {
        return Err(Violation::Length { kind: 0, len });
    };
    let header: MessageHeader = bytemuck::pod_read_unaligned(header);
    let kind = header.kind;
    let wrong_length = Violation::Length { kind, len };
    let wrong_value = Violation::Value { kind };
    if header.len as usize != body.len() {
        return Err(wrong_length);
    }
    let event = match kind {
        MSG_READY if body.is_empty() => Event::Prepared,
        MSG_BOOTED => Event::Booted(whole(body).ok_or(wrong_length)?),
        MSG_ENTRY_POINT => Event::EntryPoint(whole(body).ok_or(wrong_length)?),
        MSG_RESTING => Event::Resting(whole(body).ok_or(wrong_length)?),
        MSG_HIBERNATED if body.is_empty() => Event::Hibernated,
        MSG_UNSEAL if body.is_empty() => Event::Unseal,
        MSG_AWAKE => {
            let message: AwakeMessage = whole(body).ok_or(wrong_length)?;
            Event::Awake(Awake::of(&message).ok_or(wrong_value)?)
        }
        MSG_OOM_KILLED => return Ok(Incoming::OomKilled(whole(body).ok_or(wrong_length)?)),
        MSG_DESCRIBED => Event::Described(whole(body).ok_or(wrong_length)?),
        MSG_ACTIVITY => Event::Activity(ProgramActivity::parse(body).ok_or(wrong_length)?),
        MSG_LOSES => Event::Losses(whole(body).ok_or(wrong_length)?),
        MSG_DENIED => Event::Denied(denials(body).ok_or(wrong_value)?),
        MSG_LACKS => Event::Lacks(Lack::parse(body).ok_or(wrong_value)?),
        MSG_WRITTEN => Event::Written(WrittenFiles::parse(body).ok_or(wrong_length)?),
        MSG_CONNECTION_CLOSED => {
            let ConnectionClosed { id } = whole(body).ok_or(wrong_length)?;
            Event::ConnectionClosed { id }
        }
        MSG_EXIT => {
            let exit: Exit = whole(body).ok_or(wrong_length)?;
            Event::Exit(GuestExit::checked(exit.code, exit.signal).ok_or(wrong_value)?)
        }
        MSG_EXEC_STARTED..=MSG_EXECS_WAITING => Event::Remote(remote::parse(kind, body)?),
        MSG_FAILED => Event::Failed(printable(body)),
        MSG_OPEN_BLOB..=MSG_WAKE_SOCKET
        | MSG_OPEN_SOCKET
        | MSG_BIND
        | MSG_TERMINAL_GET..=MSG_TERMINAL_SET => {
            let question = Question::parse(kind, body).ok_or(wrong_value)?;
            return Ok(Incoming::Request(Request { sequence: header.sequence, question }));
        }
        _ => return Err(Violation::Kind { kind }),
    };
    Ok(Incoming::Event(event))
}

/// A body that is exactly one `T`.
fn whole<T: AnyBitPattern>(body: &[u8]) -> Option<T> {
    bytemuck::try_pod_read_unaligned(body).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message;

    fn packet(kind: u32, body: &[u8]) -> Vec<u8> {
        let mut bytes = bytemuck::bytes_of(&message::header(kind, body.len(), 7)).to_vec();
        bytes.extend_from_slice(body);
        bytes
    }

    #[test]
    fn denials_are_of_an_address_or_a_name() {
        let denied = |family, count, name: &[u8]| {
            let mut way = DeniedWay { count, ..bytemuck::Zeroable::zeroed() };
            (way.to.family, way.to.port, way.to.bytes[0]) = (family, 80, 192);
            let body = [bytemuck::bytes_of(&way), name].concat();
            match parse(&packet(MSG_DENIED, &body)) {
                Ok(Incoming::Event(Event::Denied(events))) => {
                    Some(format!("{} {}", events.denied, events.recent[0]))
                }
                Err(Violation::Value { kind: MSG_DENIED }) => None,
                other => panic!("{other:?}"),
            }
        };
        let inet = libc::AF_INET as u16;
        assert_eq!(denied(inet, 1, b"").as_deref(), Some("1 192.0.0.0:80"));
        assert_eq!(denied(0, 64, b"a\n.example").as_deref(), Some("64 a\\n.example"));
        for nonsense in [(inet, 0, ""), (inet, 65, ""), (inet, 1, "a"), (0, 1, ""), (7, 1, "")] {
            let (family, count, name) = nonsense;
            assert_eq!(denied(family, count, name.as_bytes()), None, "{nonsense:?}");
        }
        assert_eq!(denied(0, 1, &[b'a'; DENIED_NAME_MAX + 1]), None);
    }

    #[test]
    fn what_a_program_lacks_is_short_and_printable() {
        let lacks = |kind, bytes, name: &[u8]| {
            let lack = LackMessage { kind, reserved: 0, bytes };
            match parse(&packet(MSG_LACKS, &[bytemuck::bytes_of(&lack), name].concat())) {
                Ok(Incoming::Event(Event::Lacks(lack))) => Some(lack),
                Err(Violation::Value { kind: MSG_LACKS }) => None,
                other => panic!("{other:?}"),
            }
        };
        let program = Lack::Program("/bin/a\\x1b[2J\\x0a".to_owned());
        assert_eq!(lacks(LACK_PROGRAM, 0, b"/bin/a\x1b[2J\n"), Some(program));
        assert_eq!(lacks(LACK_MEMORY, u64::MAX, b""), Some(Lack::Memory(u64::MAX)));
        assert_eq!(lacks(LACK_FILE_ROOM, 7, b""), Some(Lack::FileRoom(7)));
        let long = [b'a'; LACK_NAME_MAX + 1];
        for (kind, bytes, name) in [
            (LACK_PROGRAM, 0, &b""[..]),
            (LACK_PROGRAM, 1, b"a"),
            (LACK_PROGRAM, 0, &long),
            (LACK_MEMORY, 1, b"a"),
            (LACK_FILE_ROOM, 1, b"a"),
            (0, 0, b""),
            (4, 0, b""),
        ] {
            assert_eq!(lacks(kind, bytes, name), None, "{kind} {bytes} {name:?}");
        }
        assert_eq!(parse(&packet(MSG_LACKS, b"short")), Err(Violation::Value { kind: MSG_LACKS }));
    }

    #[test]
    fn events_are_understood() {
        let exit = packet(MSG_EXIT, bytemuck::bytes_of(&Exit { code: 3, signal: 0 }));
        assert_eq!(parse(&exit), Ok(Incoming::Event(Event::Exit(GuestExit::Code(3)))));
        let exit = packet(MSG_EXIT, bytemuck::bytes_of(&Exit { code: 0, signal: 11 }));
        assert_eq!(parse(&exit), Ok(Incoming::Event(Event::Exit(GuestExit::Signal(11)))));
        let failed = packet(MSG_FAILED, b"no such\x1b[31m file\n");
        let text = "no such\\x1b[31m file\\x0a".to_owned();
        assert_eq!(parse(&failed), Ok(Incoming::Event(Event::Failed(text))));
    }

    #[test]
    fn what_a_program_calls_is_short_and_printable() {
        let numbers = Activity { calls: 7, ..Activity::default() };
        let packet =
            |names: &[u8]| packet(MSG_ACTIVITY, &[bytemuck::bytes_of(&numbers), names].concat());
        let names = "read, \\x1b[2J".to_owned();
        let activity = ProgramActivity { numbers, names };
        assert_eq!(
            parse(&packet(b"read, \x1b[2J")),
            Ok(Incoming::Event(Event::Activity(activity)))
        );
        assert!(parse(&packet(&[b'x'; ACTIVITY_NAMES_MAX + 1])).is_err());
    }

    #[test]
    fn paths_that_were_written_are_few_and_printable() {
        let numbers = Written { files: 20, ..Written::default() };
        let written =
            |tail: &[u8]| packet(MSG_WRITTEN, &[bytemuck::bytes_of(&numbers), tail].concat());
        let paths = ["/a\\x1b[2J", "/b/"].map(str::to_owned).to_vec();
        let event = Event::Written(WrittenFiles { numbers, paths });
        assert_eq!(parse(&written(b"/a\x1b[2J\0/b/\0")), Ok(Incoming::Event(event)));
        match parse(&written(&b"/x\0".repeat(100))) {
            Ok(Incoming::Event(Event::Written(many))) => {
                assert_eq!(many.paths.len(), WRITTEN_PATHS_MAX);
            }
            other => panic!("{other:?}"),
        }
        assert!(parse(&written(&[b'x'; WRITTEN_MAX + 1])).is_err());
        assert!(parse(&packet(MSG_WRITTEN, b"short")).is_err());
    }

    #[test]
    fn wrong_messages_are_violations() {
        let value = |kind| Err(Violation::Value { kind });
        let exit = |code, signal| packet(MSG_EXIT, bytemuck::bytes_of(&Exit { code, signal }));
        assert_eq!(parse(&exit(256, 0)), value(MSG_EXIT));
        assert_eq!(parse(&exit(0, 65)), value(MSG_EXIT));
        assert_eq!(parse(&packet(1, b"")), Err(Violation::Kind { kind: 1 }));
        assert_eq!(parse(&packet(MSG_READY, b"x")), Err(Violation::Kind { kind: MSG_READY }));
        let awake = |cause, was_hibernated| {
            let body = AwakeMessage { cause, was_hibernated, ..bytemuck::Zeroable::zeroed() };
            packet(MSG_AWAKE, bytemuck::bytes_of(&body))
        };
        assert!(parse(&awake(1, 1)).is_ok());
        for (cause, was_hibernated) in [(0, 1), (5, 0), (u32::MAX, 0), (1, 2)] {
            assert_eq!(parse(&awake(cause, was_hibernated)), value(MSG_AWAKE));
        }
        let long = packet(MSG_HIBERNATED, b"x");
        assert_eq!(parse(&long), Err(Violation::Kind { kind: MSG_HIBERNATED }));
        assert!(matches!(parse(b""), Err(Violation::Length { .. })));
        assert!(matches!(parse(&packet(MSG_BOOTED, b"short")), Err(Violation::Length { .. })));
        let mut lying = packet(MSG_BOOTED, &[0; 32]);
        lying[4] = 31;
        assert!(matches!(parse(&lying), Err(Violation::Length { .. })));
    }

    /// No packet whatever makes the parser panic.
    #[test]
    fn arbitrary_packets_are_survived() {
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        for _ in 0..200_000 {
            let len = (next() % 80) as usize;
            let mut bytes: Vec<u8> = (0..len).map(|_| next() as u8).collect();
            if len >= 16 && next() % 4 != 0 {
                let kinds = [
                    95, 102, 103, 104, 105, 106, 120, 121, 122, 142, 180, 181, 182, 183, 184, 185,
                    201, 202, 203, 204, 205, 221, 231, 241, 242,
                ];
                let kind: u32 = kinds[(next() % kinds.len() as u64) as usize];
                bytes[..4].copy_from_slice(&kind.to_le_bytes());
                bytes[4..8].copy_from_slice(&(len as u32 - 16).to_le_bytes());
            }
            let _ = parse(&bytes);
        }
    }
}
