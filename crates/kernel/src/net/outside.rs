//! The outside: what the host connects for the sandbox, if it does.
//!
//! A socket that connects to an address outside asks the host for a connected
//! socket ([`thaw_abi::control::MSG_OPEN_SOCKET`]) and becomes a mere cover for
//! it. The addresses that a program sees as its own are those of
//! [`thaw_abi::network`].

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::sync::Weak;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use bytemuck::Zeroable;

use thaw_abi::control::{
    Address, DENIALS_AT_ONCE_MAX, DeniedWay, FLAG_EGRESS, FLAG_EGRESS_V6, FLAG_FREEZE_AT_ENTRY,
    FLAG_SAY_DENIALS, FLAG_SAY_LOSSES, Losses, MSG_DENIED, MSG_OPEN_SOCKET, OpenSocket,
    OpenedSocket, Reply, SOCKET_RECONNECTS, TRANSPORT_DATAGRAM, TRANSPORT_STREAM,
};
use thaw_abi::network;

use super::address::{AF_INET, AF_INET6, Endpoint};
use super::own_name;
use super::tcp::TcpSocket;
use super::udp::UdpSocket;
use crate::errno::{Errno, Result};
use crate::fs::Context;
use crate::host::broker;
use crate::host::control::{self, Kept};
use crate::platform::machine::{HostFd, HostFiles, Machine};
use crate::state::{ProcessFiles, kernel};
use crate::sync::KernelCell;
use crate::task::Credentials;
use crate::task::work::{self, Next, Work};

/// Which families of addresses the host connects to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    /// IPv4.
    pub v4: bool,
    /// IPv6.
    pub v6: bool,
}

impl Reach {
    /// What the boot command has said.
    pub fn from_flags(flags: u32) -> Self {
        let v4 = flags & FLAG_EGRESS != 0;
        Self { v4, v6: v4 && flags & FLAG_EGRESS_V6 != 0 }
    }

    /// The sandbox's own address in the family of `ip`, if it has one there.
    pub fn own_address(self, ip: IpAddr) -> Option<IpAddr> {
        match ip {
            IpAddr::V4(_) => self.v4.then_some(IpAddr::V4(Ipv4Addr::from(network::OWN_ADDRESS))),
            IpAddr::V6(_) => self.v6.then_some(IpAddr::V6(Ipv6Addr::from(network::OWN_ADDRESS_V6))),
        }
    }
}

/// What the host connects to for the sandbox.
pub fn reach() -> Reach {
    let kernel = kernel();
    Reach::from_flags(kernel.config.get().flags | kernel.net.outside.opened.get())
}

/// The sandbox has a way out from now on ([`thaw_abi::control::MSG_OUTGOING`]), and the files
/// that say where names are looked up, unless it has had them before.
pub fn open(flags: u32) {
    let outside = &kernel().net.outside;
    outside.opened.set(flags & (FLAG_EGRESS | FLAG_EGRESS_V6));
    if reach().v4 && !outside.has_files.get() {
        let files = ProcessFiles::new(kernel().fs.namespace.clone());
        work::start(b"network", Credentials::default(), files, Box::new(ProvideFiles));
    }
}

/// Writes `/etc/resolv.conf` and `/etc/hosts`, which may wait for the host.
struct ProvideFiles;

impl Work for ProvideFiles {
    fn run(self: Box<Self>) -> Next {
        let hostname = kernel().namespaces.uts.hostname.borrow_mut().clone();
        let provided = provide_files(&Context::current(), &hostname)
            // It may have got another name meanwhile.
            .and_then(|()| own_name::rename_in_hosts(&hostname));
        if let Err(error) = provided {
            crate::console!(
                "thaw kernel: /etc/resolv.conf and /etc/hosts cannot be made: {}",
                error.name()
            );
        }
        Next::End
    }
}

/// Puts the files that say where names are looked up into the sandbox, once.
pub fn provide_files(context: &Context, hostname: &[u8]) -> Result<()> {
    let has_files = &kernel().net.outside.has_files;
    if has_files.get() {
        return Ok(());
    }
    has_files.set(true);
    super::resolver_files::provide(context, hostname)
}

/// The sandbox's own address that packets to `to` come from. `ENETUNREACH` if
/// there is no way there.
pub fn source_address(to: IpAddr) -> Result<IpAddr> {
    reach().own_address(to).ok_or(Errno::ENETUNREACH)
}

/// Where names are looked up (RFC 1035).
pub const DNS_PORT: u16 = 53;
/// Most bytes of a name (RFC 1035, section 2.3.4).
const NAME_MAX: usize = 255;
/// Denials that are told one by one; of those after them, the host hears in numbers.
const DENIALS_TOLD: u32 = 16;
/// What was denied in this boot.
static DENIED: AtomicU32 = AtomicU32::new(0);

/// There is no way to `to`.
pub fn no_way_to(to: Endpoint) {
    deny(address(to), b"", || {
        crate::console!(
            "thaw: the connection to {} port {} was denied: no rule of [egress] in thaw.toml \
             allows it",
            to.ip,
            to.port
        );
    });
}

/// There is no way to look a name up.
pub fn no_way_to_look_up(name: Option<&str>) {
    let name = name.unwrap_or("a name");
    deny(Address::zeroed(), name.as_bytes(), || {
        crate::console!(
            "thaw: the look-up of {name} was denied: no rule of [egress] in thaw.toml allows \
             connections by name"
        );
    });
}

/// Whoever builds the function hears of the first denial, and the host of all of a live instance.
fn deny(to: Address, name: &[u8], say: impl FnOnce()) {
    let flags = kernel().config.get().flags;
    if flags & (FLAG_FREEZE_AT_ENTRY | FLAG_SAY_DENIALS) == 0 {
        return;
    }
    let before = DENIED.fetch_add(1, Relaxed);
    if flags & FLAG_FREEZE_AT_ENTRY != 0 && before == 0 {
        say();
    }
    let count = match before.checked_sub(DENIALS_TOLD) {
        None => 1,
        Some(more) if (more + 1).is_multiple_of(DENIALS_AT_ONCE_MAX) => DENIALS_AT_ONCE_MAX,
        Some(_) => return,
    };
    if flags & FLAG_SAY_DENIALS != 0 {
        let denied = DeniedWay { to, count, reserved: 0 };
        control::send(MSG_DENIED, 0, bytemuck::bytes_of(&denied), name);
    }
}

/// The name in the first question of a DNS message (RFC 1035, sections 4.1.1 and 4.1.2), if it is
/// one for people.
pub fn looked_up(message: &[u8]) -> Option<String> {
    const HEADER: usize = 12;
    const LABEL_MAX: u8 = 63;
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_".contains(byte);
    let mut rest = message.get(HEADER..)?;
    let mut name = String::new();
    loop {
        let (&len, after) = rest.split_first()?;
        if len == 0 {
            return (!name.is_empty()).then_some(name);
        }
        let (label, after) = after.split_at_checked(len.into())?;
        if len > LABEL_MAX || name.len() > NAME_MAX || !label.iter().all(is_plain) {
            return None;
        }
        if !name.is_empty() {
            name.push('.');
        }
        name.extend(label.iter().copied().map(char::from));
        rest = after;
    }
}

/// Whether `ip` is the sandbox's own address on its way out.
pub fn is_own(ip: IpAddr) -> bool {
    reach().own_address(ip) == Some(ip)
}

/// Sockets that wait for the host's answer, by the number of their request, and
/// those whose connections copies make again. Saved; what waits for an answer to
/// another boot hears of it after a thaw.
#[derive(Default)]
pub struct Outside {
    waiting: KernelCell<BTreeMap<u64, Waiting>>,
    reconnecting: KernelCell<Vec<Weak<TcpSocket>>>,
    /// Sockets whose connection the host has made in this boot, with [`FLAG_SAY_LOSSES`].
    made: KernelCell<Vec<Weak<TcpSocket>>>,
    /// Sockets of datagrams that were connected to a peer outside in this boot, with
    /// [`FLAG_SAY_LOSSES`].
    connected: KernelCell<Vec<Weak<UdpSocket>>>,
    /// `FLAG_EGRESS*` that the host has said while the sandbox ran.
    opened: KernelCell<u32>,
    /// The sandbox has been given the files that say where names are looked up.
    has_files: KernelCell<bool>,
}

/// A socket that waits for the host's answer.
struct Waiting {
    socket: Weak<TcpSocket>,
    /// What was asked.
    request: OpenSocket,
}

/// A socket that the host has made for a stream.
#[derive(Debug)]
pub struct Opened {
    /// Connected, or about to be.
    pub fd: HostFd,
    /// Whether the connection is to be made again after a thaw.
    pub reconnects: bool,
}

/// Notes a socket that lives, where somebody asks for losses.
fn note_once<T>(noted: &KernelCell<Vec<Weak<T>>>, socket: &Weak<T>) {
    if kernel().config.get().flags & FLAG_SAY_LOSSES == 0 {
        return;
    }
    let mut noted = noted.borrow_mut();
    noted.retain(|other| other.strong_count() > 0 && !other.ptr_eq(socket));
    noted.push(socket.clone());
}

impl Outside {
    /// Nobody waits.
    pub const fn new() -> Self {
        Self {
            waiting: KernelCell::new(BTreeMap::new()),
            reconnecting: KernelCell::new(Vec::new()),
            made: KernelCell::new(Vec::new()),
            connected: KernelCell::new(Vec::new()),
            opened: KernelCell::new(0),
            has_files: KernelCell::new(false),
        }
    }

    /// Notes that `socket` waits for the answer to request `sequence`.
    pub fn wait(&self, sequence: u64, socket: Weak<TcpSocket>, request: OpenSocket) {
        self.waiting.borrow_mut().insert(sequence, Waiting { socket, request });
    }

    /// Whoever was asked has ended: asks again for all that wait. Should there be two answers
    /// to a request, the first counts.
    pub fn ask_again(&self) {
        let waiting = self.waiting.borrow_mut();
        let requests: Vec<_> =
            waiting.iter().map(|(sequence, waiting)| (*sequence, waiting.request)).collect();
        drop(waiting);
        for (sequence, request) in requests {
            control::send(MSG_OPEN_SOCKET, sequence, bytemuck::bytes_of(&request), &[]);
        }
    }

    /// The host has answered a request.
    pub fn answered(&self, reply: &Kept) {
        let waiting = self.waiting.borrow_mut().remove(&reply.sequence);
        match waiting.and_then(|waiting| waiting.socket.upgrade()) {
            Some(socket) => socket.opened_outside(reply.sequence, opened(reply)),
            // It was closed meanwhile, or the answer comes a second time.
            None => reply.fds.iter().for_each(|&fd| Machine::close(HostFd::new(fd))),
        }
    }

    /// Notes that the host has made the connection of `socket`, where somebody asks for that.
    pub fn note_made(&self, socket: &Weak<TcpSocket>) {
        note_once(&self.made, socket);
    }

    /// Notes that `socket` sends datagrams to a peer outside, where somebody asks for that.
    pub fn note_connected(&self, socket: &Weak<UdpSocket>) {
        note_once(&self.connected, socket);
    }

    /// Which connections copies will find reset, after [`Outside::prepare_for_sleep`], and which
    /// sockets of datagrams will have another port.
    pub fn losses(&self) -> Option<Losses> {
        let streams = self.made.borrow_mut().clone();
        let streams = streams.iter().filter_map(Weak::upgrade);
        let streams: Vec<Endpoint> = streams.filter_map(|socket| socket.lost_peer()).collect();
        let datagrams = self.connected.borrow_mut().clone();
        let datagrams = datagrams.iter().filter_map(Weak::upgrade);
        let datagrams: Vec<Endpoint> = datagrams.filter_map(|socket| socket.lost_peer()).collect();
        let first = streams.first().or(datagrams.first())?;
        Some(Losses {
            connections: streams.len() as u32,
            datagrams: datagrams.len() as u32,
            peer: address(*first),
        })
    }

    /// Notes that copies make the connection of `socket` again.
    pub fn may_sleep(&self, socket: &Weak<TcpSocket>) {
        let mut reconnecting = self.reconnecting.borrow_mut();
        reconnecting.retain(|other| other.strong_count() > 0 && !other.ptr_eq(socket));
        reconnecting.push(socket.clone());
    }

    /// Before a freeze: which connections can be made again is settled now.
    pub fn prepare_for_sleep(&self) {
        let sockets = self.reconnecting.borrow_mut().clone();
        sockets.iter().filter_map(Weak::upgrade).for_each(|socket| socket.prepare_for_sleep());
    }

    /// After a thaw: connections that are made again fall asleep, and nobody is
    /// going to answer.
    pub fn reset(&self) {
        self.made.borrow_mut().clear();
        self.connected.borrow_mut().clear();
        self.reconnecting
            .borrow_mut()
            .retain(|socket| socket.upgrade().is_some_and(|socket| socket.fall_asleep()));
        let waiting = core::mem::take(&mut *self.waiting.borrow_mut());
        for (sequence, waiting) in waiting {
            if let Some(socket) = waiting.socket.upgrade() {
                socket.opened_outside(sequence, Err(Errno::ECONNRESET));
            }
        }
    }
}

/// Asks the host for a stream to `to`; `socket` hears of the answer. Returns the
/// number of the request.
pub fn ask_for_stream(to: Endpoint, socket: Weak<TcpSocket>) -> u64 {
    let body = request(to, TRANSPORT_STREAM);
    let sequence = broker::ask(MSG_OPEN_SOCKET, bytemuck::bytes_of(&body));
    kernel().net.outside.wait(sequence, socket, body);
    sequence
}

/// Has the host make a socket that sends datagrams to `to`.
pub fn open_datagrams(to: Endpoint) -> Result<HostFd> {
    let body = request(to, TRANSPORT_DATAGRAM);
    let mut reply = Vec::new();
    broker::request(MSG_OPEN_SOCKET, bytemuck::bytes_of(&body), &[], &mut reply)?
        .ok_or(Errno::EMFILE)
}

/// What an answer to a request for a stream says.
fn opened(reply: &Kept) -> Result<Opened> {
    let (answer, tail) = control::split::<Reply>(&reply.body)?;
    if answer.errno != 0 {
        return Err(Errno(answer.errno));
    }
    let (opened, _) = control::split::<OpenedSocket>(tail)?;
    // Without a descriptor: the sandbox has as many as it may have.
    let fd = reply.fds.first().map(|&fd| HostFd::new(fd)).ok_or(Errno::EMFILE)?;
    Ok(Opened { fd, reconnects: opened.flags & SOCKET_RECONNECTS != 0 })
}

fn request(to: Endpoint, transport: u32) -> OpenSocket {
    OpenSocket { to: address(to), transport, reserved: 0 }
}

fn address(endpoint: Endpoint) -> Address {
    let mut bytes = [0; 16];
    let family = match endpoint.ip {
        IpAddr::V4(ip) => {
            bytes[..4].copy_from_slice(&ip.octets());
            AF_INET
        }
        IpAddr::V6(ip) => {
            bytes = ip.octets();
            AF_INET6
        }
    };
    Address { bytes, family, port: endpoint.port, reserved: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_addresses_depend_on_what_the_host_reaches() {
        let v4 = "192.0.2.1".parse().unwrap();
        let v6 = "2001:db8::1".parse().unwrap();
        let reach = Reach::from_flags(FLAG_EGRESS);
        assert_eq!(reach.own_address(v4), Some("10.0.2.15".parse().unwrap()));
        assert_eq!(reach.own_address(v6), None);
        assert_eq!(Reach::from_flags(FLAG_EGRESS_V6), Reach::default());
        assert!(Reach::from_flags(FLAG_EGRESS | FLAG_EGRESS_V6).own_address(v6).is_some());
    }

    #[test]
    fn the_name_that_is_looked_up_is_found_and_harmless() {
        let asked = |question: &[u8]| looked_up(&[&[0; 12], question].concat());
        let question = b"\x07example\x03com\x00\x00\x01\x00\x01";
        assert_eq!(asked(question).as_deref(), Some("example.com"));
        // Too short, without a name, compressed, with a control character, too long.
        for wrong in [&b""[..], b"\x07exa", b"\x03com", b"\x00", b"\xc0\x0c", b"\x03a\x1bb\x00"] {
            assert_eq!(asked(wrong), None, "{wrong:?}");
        }
        assert_eq!(looked_up(&[0; 5]), None);
        let long = [&b"\x3f"[..], &[b'a'; 63]].concat().repeat(9);
        assert_eq!(asked(&[&long[..], b"\x00"].concat()), None);
    }
}
