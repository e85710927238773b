//! Messages between a daemon and its monitor. Both ends are this same executable, but the
//! monitor does not trust the daemon: it reads packets of one fixed size, and takes no
//! path and no process id from them.

use std::io::{self, IoSlice};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use bytemuck::{Pod, Zeroable};
use serde::{Deserialize, Serialize};

use crate::egress::Transport;
use crate::limits::{GroupName, Missing, Place};
use crate::message;

/// Version of all that a monitor and its daemon, and the helpers that the monitor starts for
/// it, say to each other: these packets, the notes of what is kept, and the packets of zygote
/// parents, state helpers, rewinders and resolver processes. The monitor starts those from its own
/// executable, which may be of another version of Thaw than the daemon. Change it with any of
/// them.
///
/// A monitor that has executed itself anew serves the daemon which it had with packets of the
/// version of that one, whose helpers it starts from the program that it was before. The daemon after
/// that has this version, and takes over what those before it have had kept: both understand all
/// versions from [`OLDEST_VERSION`] on.
pub const VERSION: u32 = 6;
/// The least version of which packets, notes and zygote parents are understood: two before
/// [`VERSION`], but none before control groups of version 2 were held by one of their monitor's.
pub const OLDEST_VERSION: u32 = 6;

/// Daemon → monitor: start a zygote parent. Attached: its control socket and the kernel.
pub const REQUEST_PARENT: u32 = 1;
/// Daemon → monitor: make the control groups with the number [`Request::number`]. The
/// answer brings the files that move a process into them, one for each place.
pub const REQUEST_GROUP: u32 = 2;
/// Daemon → monitor: remove these groups as soon as they are empty. Not answered.
pub const REQUEST_REMOVE_GROUP: u32 = 3;
/// Daemon → monitor: bind a port below 1024. The answer brings the socket.
pub const REQUEST_BIND: u32 = 4;
/// Daemon → monitor: start a state helper. Attached: its socket and the pid namespace of
/// the sandboxes; [`Request::number`] is its user and group id in their user namespace.
pub const REQUEST_STATE_HELPER: u32 = 5;
/// Daemon → monitor: start a resolver process. Attached: its socket.
pub const REQUEST_RESOLVER: u32 = 6;
/// Daemon → monitor: keep these descriptors for the daemon that comes after this one, until
/// [`REQUEST_FORGET`]. [`Request::number`] is their key, [`Request::port`] a [`KeptKind`],
/// [`Request::address`] begins with the number of the control groups that are to stay with
/// them, or 0. A note of at most [`NOTE_MAX`] bytes follows, which the monitor does not read.
pub const REQUEST_KEEP: u32 = 7;
/// Daemon → monitor: forget what has this key. Not answered.
pub const REQUEST_FORGET: u32 = 8;
/// Daemon → monitor: show me what is kept under the first key behind [`Request::number`]. The
/// answer is a [`KeptAnswer`], its note, and the descriptors; `ENOENT` if there is no more.
pub const REQUEST_NEXT_KEPT: u32 = 9;

/// Daemon → monitor: start a fetcher, which talks to a registry in the daemon's place. Attached:
/// its socket, over which the daemon says what is to be fetched. The monitor does not read that.
pub const REQUEST_FETCHER: u32 = 10;

/// Daemon → monitor: this daemon ends in order, and leaves to the next one what it has had kept.
/// It is no crash that this is its last request.
pub const REQUEST_LEAVE: u32 = 11;

/// Daemon → monitor: this daemon serves its clients. Not answered. Only a daemon that its monitor has
/// started says so, and is of the same version: one that was started apart from its monitor tells its
/// service manager itself.
pub const REQUEST_SERVING: u32 = 12;

/// Most bytes of a note.
pub const NOTE_MAX: usize = 1024;
/// Most descriptors that are kept under one key.
pub const KEPT_DESCRIPTORS_MAX: usize = 6;
/// Descriptors of a [`KeptKind::Parent`]: its control socket, and its pidfd.
pub const PARENT_DESCRIPTORS: usize = 2;
/// Which of them is the pidfd. By it the monitor knows which of its children stays.
pub const PARENT_PIDFD: usize = 1;

/// What is kept for the next daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum KeptKind {
    /// A sandbox.
    Sandbox = 0,
    /// A zygote parent: a child of the monitor, which does not end with its daemon.
    Parent = 1,
    /// A connection that a sandbox has.
    Connection = 2,
}

impl KeptKind {
    pub fn from_number(number: u32) -> Option<Self> {
        [Self::Sandbox, Self::Parent, Self::Connection].get(number as usize).copied()
    }
}

/// Descriptors that the monitor keeps for the next daemon.
#[derive(Debug)]
pub struct Kept {
    pub kind: KeptKind,
    /// The control groups that are kept, too. Number 0: none.
    pub group: GroupName,
    /// For the next daemon.
    pub note: Vec<u8>,
    pub descriptors: Vec<OwnedFd>,
}

/// A packet from the daemon.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Request {
    /// `REQUEST_*`.
    pub kind: u32,
    /// Of [`REQUEST_BIND`]: the port.
    pub port: u16,
    /// Of [`REQUEST_BIND`]: 0 for TCP, 1 for UDP.
    pub transport: u16,
    /// Number of a group, or an id.
    pub number: u64,
    /// Of [`REQUEST_BIND`]: an IPv6 address, or an IPv4 one as IPv6 maps it.
    pub address: [u8; 16],
}

impl Request {
    pub fn new(kind: u32, number: u64) -> Self {
        Self { kind, number, ..Self::zeroed() }
    }

    pub fn bind(address: SocketAddr, transport: Transport) -> Self {
        let ip = match address.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        Self {
            kind: REQUEST_BIND,
            port: address.port(),
            transport: u16::from(transport == Transport::Udp),
            number: 0,
            address: ip.octets(),
        }
    }

    pub fn keep(key: u64, kind: KeptKind, group: u64) -> Self {
        let mut request = Self { port: kind as u16, ..Self::new(REQUEST_KEEP, key) };
        request.address[..size_of::<u64>()].copy_from_slice(&group.to_ne_bytes());
        request
    }

    /// The group of a [`Request::keep`].
    pub fn group_to_keep(&self) -> u64 {
        u64::from_ne_bytes(*self.address.first_chunk().expect("16 bytes"))
    }

    /// What a [`Request::bind`] asks for.
    pub fn address_to_bind(&self) -> (SocketAddr, Transport) {
        let ip = Ipv6Addr::from(self.address);
        let ip = ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4);
        let transport = if self.transport == 0 { Transport::Tcp } else { Transport::Udp };
        (SocketAddr::new(ip, self.port), transport)
    }
}

/// The monitor's answer.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Answer {
    /// 0, or why it was not done.
    pub errno: i32,
    /// Zero.
    pub reserved: u32,
    /// Of [`REQUEST_GROUP`]: what was made.
    pub group: GroupName,
}

impl Answer {
    /// It was done, or why it was not.
    pub fn new(errno: i32) -> Self {
        Self { errno, ..Self::zeroed() }
    }
}

/// The monitor's answer to [`REQUEST_NEXT_KEPT`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct KeptAnswer {
    /// 0, or `ENOENT`.
    pub errno: i32,
    /// A [`KeptKind`].
    pub kind: u32,
    /// Its key.
    pub key: u64,
    /// See [`Kept::group`].
    pub group: GroupName,
}

/// Receives a request, with its note if it has one; `None` when the other end is closed.
///
/// # Errors
/// The host's, or it is no request.
pub fn receive_request(
    socket: impl AsFd,
    descriptors: &mut Vec<OwnedFd>,
) -> io::Result<Option<(Request, Vec<u8>)>> {
    const HEAD: usize = size_of::<Request>();
    let mut buffer = [0; HEAD + NOTE_MAX];
    let packet = message::receive(socket, &mut buffer, Some(descriptors))?;
    if packet.len == 0 {
        return Ok(None);
    }
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let (head, note) = buffer[..packet.len].split_at_checked(HEAD).ok_or_else(invalid)?;
    let request: Request = bytemuck::pod_read_unaligned(head);
    if packet.truncated || !note.is_empty() && request.kind != REQUEST_KEEP {
        return Err(invalid());
    }
    Ok(Some((request, note.to_vec())))
}

/// Sends what is kept under `key`, with these control groups, or that there is no more.
///
/// # Errors
/// The host's.
pub fn send_kept(socket: impl AsFd, kept: Option<(u64, &Kept, GroupName)>) -> io::Result<()> {
    let Some((key, kept, group)) = kept else {
        let answer = KeptAnswer { errno: libc::ENOENT, ..KeptAnswer::zeroed() };
        return message::send(socket, &[IoSlice::new(bytemuck::bytes_of(&answer))], &[]);
    };
    let answer = KeptAnswer { errno: 0, kind: kept.kind as u32, key, group };
    let parts = [IoSlice::new(bytemuck::bytes_of(&answer)), IoSlice::new(&kept.note)];
    let descriptors: Vec<_> = kept.descriptors.iter().map(AsFd::as_fd).collect();
    message::send(socket, &parts, &descriptors)
}

/// Receives what [`send_kept`] sends.
///
/// # Errors
/// The host's, or the monitor has ended.
pub fn receive_kept(socket: impl AsFd) -> io::Result<Option<(u64, Kept)>> {
    const HEAD: usize = size_of::<KeptAnswer>();
    let mut buffer = [0; HEAD + NOTE_MAX];
    let mut descriptors = Vec::new();
    let packet = message::receive(socket, &mut buffer, Some(&mut descriptors))?;
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let (head, note) = buffer[..packet.len].split_at_checked(HEAD).ok_or_else(invalid)?;
    let answer: KeptAnswer = bytemuck::pod_read_unaligned(head);
    if answer.errno != 0 {
        return Ok(None);
    }
    let kind = KeptKind::from_number(answer.kind).ok_or_else(invalid)?;
    let kept = Kept { kind, group: answer.group, note: note.to_vec(), descriptors };
    Ok(Some((answer.key, kept)))
}

/// What a daemon starts with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Grant {
    /// How many sandboxes of the daemon's can have a user id of their own. In the user
    /// namespace, these ids are 1 and those that follow. 0: all have the id 0 there, which
    /// is the daemon's outside.
    pub ids: u32,
    /// Upper half of the numbers of its groups: how many daemons of this monitor were
    /// before it. Those may have left groups that are not removed yet.
    pub(crate) life: u32,
    /// Where the control groups are.
    pub(crate) places: Vec<Place>,
    /// Controllers that this host lacks.
    pub(crate) missing: Vec<Missing>,
}

impl Grant {
    /// How many daemons of this monitor were before this one.
    pub fn life(&self) -> u32 {
        self.life
    }

    /// The directories in which the groups of sandboxes are made, one of each tree.
    pub fn group_directories(&self) -> impl Iterator<Item = &Path> {
        self.places.iter().map(Place::above_sandboxes)
    }

    /// Whether this is the directory of a sandbox's group.
    pub fn is_of_sandbox(&self, directory: &Path) -> bool {
        self.places.iter().any(|place| place.is_of_sandbox(directory))
    }
}

/// Most bytes of a [`send_start`].
const START_MAX: usize = 64 << 10;

/// Monitor → daemon, once and first: what it starts with. Here the reader trusts the
/// writer.
///
/// # Errors
/// The host's, or the text is too long.
pub fn send_start(
    socket: impl AsFd,
    text: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    if text.len() > START_MAX {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    message::send(socket, &[IoSlice::new(text)], descriptors)
}

/// Receives what [`send_start`] sends.
///
/// # Errors
/// The host's, or the monitor has ended.
pub fn receive_start(socket: impl AsFd) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut text = vec![0; START_MAX];
    let mut descriptors = Vec::new();
    let packet = message::receive(socket, &mut text, Some(&mut descriptors))?;
    if packet.len == 0 {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
    }
    text.truncate(packet.len);
    Ok((text, descriptors))
}

/// A pair of sockets for a monitor and its daemon.
///
/// # Errors
/// The host's.
pub fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    message::control_pair()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_sandboxes_are_known_by_their_names() {
        use crate::limits::Version;
        let place = |version, directory: &str| Place {
            version,
            directory: directory.into(),
            controllers: Vec::new(),
        };
        let places =
            vec![place(Version::V1, "/pids/thaw-7-1-0"), place(Version::V2, "/unit/thaw-7-1-0")];
        let grant = Grant { ids: 0, life: 0, places, missing: Vec::new() };
        assert!(grant.group_directories().eq(["/pids", "/unit/thaw-7-1-0"].map(Path::new)));
        for (directory, expected) in [
            ("/pids/thaw-7-1-0.12", true),
            ("/pids/thaw-7-1-0/12", false),
            ("/pids/thaw-7-1-0", false),
            ("/unit/thaw-7-1-0/12", true),
            ("/unit/thaw-7-1-0/zygote-parents", false),
            ("/unit/thaw-7-1-0/", false),
            ("/unit/thaw-7-1-0.12", false),
            ("/unit/thaw-host", false),
        ] {
            assert_eq!(grant.is_of_sandbox(Path::new(directory)), expected, "{directory}");
        }
    }

    #[test]
    fn addresses_arrive_as_they_were_sent() {
        for text in ["127.0.0.1:80", "[::]:443", "0.0.0.0:1", "[2001:db8::7]:53"] {
            let address: SocketAddr = text.parse().unwrap();
            for transport in [Transport::Tcp, Transport::Udp] {
                assert_eq!(
                    Request::bind(address, transport).address_to_bind(),
                    (address, transport)
                );
            }
        }
    }
}
