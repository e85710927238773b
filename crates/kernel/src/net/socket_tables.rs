//! The tables of sockets in `/proc/net` (proc(5)): `tcp`, `udp`, `udplite`, those of IPv6, and `unix`.
//!
//! A table is written while it is read, and no more of it than somebody reads: there may be very many
//! sockets ([`super::sockets`]).

use alloc::string::String;
use alloc::sync::Arc;
use core::fmt::{self, Write};
use core::net::{IpAddr, Ipv4Addr};

use super::address::{AF_INET6, AF_UNIX, Endpoint, SocketAddress, UnixName};
use super::socket::Protocol;
use super::sockets::{ConnectionState, Found, Listed, Walk};
use super::tcp::IPPROTO_TCP;
use crate::errno::{Errno, Result};
use crate::fs::file::{File, OpenFlags, Stat};
use crate::fs::inode::{Attributes, FileType, FilesystemId, Inode, Statfs};
use crate::fs::pseudo::Place;
use crate::io::Sink;
use crate::sync::KernelCell;

/// How much of a table is written at once, in bytes: some hundred sockets.
const PIECE: usize = 64 << 10;

/// Which sockets a table has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// `AF_*`.
    pub family: u16,
    /// `IPPROTO_*`; 0 for Unix sockets.
    pub protocol: u32,
}

const HEADING: &str = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";
const HEADING_6: &str = "  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";
const HEADING_UNIX: &str = "Num       RefCount Protocol Flags    Type St Inode Path\n";
/// What begins the table of raw sockets, of which there are none.
pub const HEADING_RAW: &str = HEADING;

impl Kind {
    fn has(self, socket: &dyn Protocol) -> bool {
        let common = socket.common();
        (common.family, common.protocol) == (self.family, self.protocol)
    }

    fn heading(self) -> &'static str {
        match self.family {
            AF_UNIX => HEADING_UNIX,
            AF_INET6 => HEADING_6,
            _ => HEADING,
        }
    }

    /// Writes the row of a socket, the one with this number in the table.
    fn write_row(self, text: &mut String, number: usize, found: &Found) {
        // Writing to a string cannot fail.
        let _ = match self.family {
            AF_UNIX => write_unix(text, found),
            _ => self.write_inet(text, number, found),
        };
    }

    fn write_inet(self, text: &mut String, number: usize, found: &Found) -> fmt::Result {
        let Found { listed, uid, ino, .. } = found;
        let Listed { state, receive_queue, send_queue, .. } = *listed;
        let is_listening = state == ConnectionState::Listen;
        let nowhere = Endpoint::wildcard(self.family);
        let local = match found.socket.local_address() {
            SocketAddress::V4(local) | SocketAddress::V6(local) => local,
            _ => nowhere,
        };
        write!(text, "{number:4}: ")?;
        self.write_endpoint(text, local)?;
        text.push(' ');
        self.write_endpoint(text, listed.remote.unwrap_or(nowhere))?;
        let send_queue = if is_listening { 0 } else { send_queue };
        write!(text, " {:02X} {send_queue:08X}:{receive_queue:08X} ", state as u8)?;
        write!(text, "00:00000000 00000000 {uid:5}        0 {ino} ")?;
        text.push_str(match (self.protocol, is_listening) {
            (IPPROTO_TCP, true) => "1 0000000000000000 100 0 0 10 0\n",
            (IPPROTO_TCP, false) => "1 0000000000000000 20 0 0 10 -1\n",
            _ => "2 0000000000000000 0\n",
        });
        Ok(())
    }

    /// Address and port as the tables have them: words of the address in network byte order, read as
    /// numbers. A socket of IPv6 has addresses of IPv4 as mapped ones.
    fn write_endpoint(self, text: &mut String, at: Endpoint) -> fmt::Result {
        let mut write_words = |bytes: &[u8]| {
            let mut words = bytes.chunks_exact(4).map(|word| [word[0], word[1], word[2], word[3]]);
            words.try_for_each(|word| write!(text, "{:08X}", u32::from_ne_bytes(word)))
        };
        match at.ip {
            IpAddr::V4(ip) if self.family == AF_INET6 => {
                write_words(&ip.to_ipv6_mapped().octets())?;
            }
            IpAddr::V4(ip) => write_words(&ip.octets())?,
            IpAddr::V6(ip) if self.family == AF_INET6 => write_words(&ip.octets())?,
            IpAddr::V6(_) => write_words(&Ipv4Addr::UNSPECIFIED.octets())?,
        }
        write!(text, ":{:04X}", at.port)
    }
}

/// A row of `/proc/net/unix`.
fn write_unix(text: &mut String, found: &Found) -> fmt::Result {
    /// `__SO_ACCEPTCON`: it listens.
    const LISTENS: u32 = 0x10000;
    // SS_UNCONNECTED, SS_CONNECTED; of one that nobody has yet SS_CONNECTING (linux/net.h).
    let state = match (found.listed.state, found.ino) {
        (ConnectionState::Established, 0) => 2,
        (ConnectionState::Established, _) => 3,
        _ => 1,
    };
    let flags = if found.listed.state == ConnectionState::Listen { LISTENS } else { 0 };
    let kind = found.socket.common().kind as u8;
    write!(text, "0000000000000000: 00000002 00000000 {flags:08X} ")?;
    write!(text, "{kind:04X} {state:02X} {:5}", found.ino)?;
    match found.socket.local_address() {
        SocketAddress::Unix(UnixName::Path(path)) => {
            write!(text, " {}", String::from_utf8_lossy(&path))?;
        }
        SocketAddress::Unix(UnixName::Abstract(name)) => {
            // As Linux shows it: NUL bytes as `@`.
            let name = String::from_utf8_lossy(&name).replace('\0', "@");
            write!(text, " @{name}")?;
        }
        _ => {}
    }
    text.push('\n');
    Ok(())
}

/// A table, as a file.
pub struct SocketTable {
    place: Place,
    kind: Kind,
}

impl SocketTable {
    /// The table of these sockets.
    pub fn new(place: Place, kind: Kind) -> Arc<Self> {
        Arc::new(Self { place, kind })
    }
}

impl Inode for SocketTable {
    fn attributes(&self) -> Attributes {
        self.place.attributes(FileType::Regular, 0o444)
    }
    fn file_type(&self) -> FileType {
        FileType::Regular
    }
    fn open(self: Arc<Self>, flags: OpenFlags) -> Result<Arc<dyn File>> {
        if flags.can_write() {
            return Err(Errno::EACCES);
        }
        Ok(Arc::new(SocketTableFile { table: self, reader: KernelCell::new(None) }))
    }
    fn filesystem(&self) -> FilesystemId {
        self.place.filesystem
    }
    fn statfs(&self) -> Statfs {
        self.place.statfs()
    }
}

/// An open table. It begins anew whenever somebody reads at the beginning.
struct SocketTableFile {
    table: Arc<SocketTable>,
    /// `None` while somebody reads.
    reader: KernelCell<Option<Reader>>,
}

/// How far a table has been read.
struct Reader {
    walk: Walk,
    rows: usize,
    /// Where in the file `text` begins.
    start: u64,
    /// What has been written and may be read still.
    text: String,
}

impl Reader {
    fn new(kind: Kind) -> Self {
        let text = String::from(kind.heading());
        Self { walk: Walk::default(), rows: 0, start: 0, text }
    }

    fn end(&self) -> u64 {
        self.start + self.text.len() as u64
    }

    /// Writes the next piece; whether there was more.
    fn write_more(&mut self, kind: Kind) -> bool {
        self.start = self.end();
        self.text.clear();
        while self.text.len() < PIECE {
            let Some(found) = self.walk.next(|socket| kind.has(socket)) else { break };
            kind.write_row(&mut self.text, self.rows, &found);
            self.rows += 1;
        }
        !self.text.is_empty()
    }
}

impl File for SocketTableFile {
    fn read(&self, sink: &mut Sink<'_>, offset: u64) -> Result<usize> {
        let kind = self.table.kind;
        // Others may read while sockets are looked for: they begin anew.
        let known = self.reader.borrow_mut().take();
        let known = known.filter(|reader| offset > 0 && reader.start <= offset);
        let mut reader = known.unwrap_or_else(|| Reader::new(kind));
        while reader.end() <= offset && reader.write_more(kind) {}
        let skip = (offset - reader.start.min(offset)) as usize;
        let outcome = sink.put(reader.text.as_bytes().get(skip..).unwrap_or(&[]));
        *self.reader.borrow_mut() = Some(reader);
        outcome
    }

    fn seekable(&self) -> bool {
        true
    }

    fn stat(&self) -> Result<Stat> {
        Ok(self.table.attributes().to_stat())
    }

    fn description(&self) -> String {
        String::from("generated")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::fd_table;
    use crate::net::address::AF_INET;
    use crate::net::socket::{Blocking, Socket, SocketType};
    use crate::state::kernel;
    use crate::testing::Sandbox;

    const TCP: Kind = Kind { family: AF_INET, protocol: IPPROTO_TCP };
    const TCP_6: Kind = Kind { family: AF_INET6, protocol: IPPROTO_TCP };
    const UNIX: Kind = Kind { family: AF_UNIX, protocol: 0 };

    fn read(kind: Kind, at_once: usize) -> String {
        let place = Place { filesystem: FilesystemId(0), magic: 0, ino: 1, owner: (0, 0) };
        let file = SocketTable::new(place, kind).open(OpenFlags::empty()).unwrap();
        let (mut text, mut buffer) = (Vec::new(), vec![0; at_once]);
        loop {
            let count = file.read(&mut Sink::kernel(&mut buffer), text.len() as u64).unwrap();
            text.extend_from_slice(&buffer[..count]);
            if count == 0 {
                return String::from_utf8(text).unwrap();
            }
        }
    }

    fn install(protocol: Arc<dyn Protocol>) -> Arc<dyn Protocol> {
        fd_table::install_new(Socket::new(protocol.clone()), OpenFlags::empty()).unwrap();
        protocol
    }

    fn tcp(family: u16) -> Arc<dyn Protocol> {
        install(kernel().net.tcp.socket(family, &kernel().net.inodes))
    }

    fn at(ip: &str, port: u16) -> Endpoint {
        Endpoint { ip: ip.parse().unwrap(), port }
    }

    #[test]
    fn connections_have_both_ends_and_their_states() {
        let _sandbox = Sandbox::new();
        let listener = tcp(AF_INET6);
        listener.bind(&SocketAddress::V6(at("::", 8080))).unwrap();
        listener.listen(5).unwrap();
        let client = tcp(AF_INET);
        client.connect(&SocketAddress::V4(at("127.0.0.1", 8080)), Blocking::Yes).unwrap();
        let SocketAddress::V4(own) = client.local_address() else { panic!() };
        let (four, six) = (read(TCP, 4096), read(TCP_6, 4096));
        let row = format!(
            "   0: 0100007F:{:04X} 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1000        \
             0 {} 1 0000000000000000 20 0 0 10 -1",
            own.port,
            client.common().ino
        );
        assert_eq!(four.lines().skip(1).collect::<Vec<_>>(), [row]);
        let rows: Vec<&str> = six.lines().skip(1).collect();
        let any = "0".repeat(32);
        assert!(
            rows[0].starts_with(&format!("   0: {any}:1F90 {any}:0000 0A 00000000:00000001 ")),
            "{six}"
        );
        let mapped = "0000000000000000FFFF00000100007F";
        let waiting = format!("   1: {mapped}:1F90 {mapped}:{:04X} 01 ", own.port);
        assert!(rows[1].starts_with(&waiting) && rows[1].contains("     0        0 0 1 "), "{six}");
        assert_eq!(rows.len(), 2);
        install(listener.accept().unwrap());
        assert!(!read(TCP_6, 4096).contains("     0        0 0 1 "), "it has been accepted");
    }

    #[test]
    fn each_is_listed_once_whoever_has_it() {
        let _sandbox = Sandbox::new();
        let (first, second) = kernel().net.unix.pair(SocketType::Stream, &kernel().net.inodes);
        let (first, _) = (install(first), install(second));
        let table = crate::task::current_process().files.borrow_mut().clone();
        let again = table.borrow_mut().get(0).unwrap();
        fd_table::install(again, OpenFlags::empty()).unwrap();
        let text = read(UNIX, 64);
        assert_eq!(text.lines().count(), 3, "{text}");
        let row = format!(
            "0000000000000000: 00000002 00000000 00000000 0001 03 {:5}",
            first.common().ino
        );
        assert!(text.lines().any(|line| line == row), "{text}");
    }

    #[test]
    fn a_long_table_comes_in_pieces_and_begins_anew() {
        let _sandbox = Sandbox::new();
        let many: Vec<_> = (0..1000).map(|_| tcp(AF_INET)).collect();
        for socket in &many {
            socket.bind(&SocketAddress::V4(at("127.0.0.1", 0))).unwrap();
            socket.listen(1).unwrap();
        }
        let text = read(TCP, 1 << 20);
        assert!(text.len() > PIECE && text.lines().count() == 1001);
        assert_eq!(read(TCP, 999), text);
    }
}
