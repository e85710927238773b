//! The outgoing connections of a sandbox, written down where the next daemon finds them: in a
//! memory file that the monitor keeps with the sandbox. They count for it and its tenant then
//! as before, and so do the bytes of those that have ended, if the sandbox stays.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use bytemuck::{Pod, Zeroable, bytes_of, cast_slice, pod_read_unaligned};
use rustix::fs::{MemfdFlags, memfd_create};

use super::budget::OPEN_MAX;
use super::sock_diag::SocketId;
use super::traffic::EgressBytes;

/// The first number of a file that has bytes in it. Files of older daemons are numbers of inodes,
/// which have 32 bits.
const WITH_BYTES: u64 = u64::from_ne_bytes(*b"thawbyt1");
/// Most entries.
const ENTRIES_MAX: usize = 2 * OPEN_MAX;
/// So many entries, or twice as many as there were sockets open the last time, have room. Those of
/// closed sockets go when there would be more.
const ENTRIES_MIN: usize = 512;

/// What stands before the entries.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Head {
    version: u64,
    /// What connections that have ended have carried, of a sandbox that stays.
    sent: u64,
    received: u64,
    reserved: u64,
}

/// A socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Entry {
    /// Its inode number.
    pub inode: u64,
    /// How the host is asked for its bytes; zeros if they are not counted.
    id: SocketId,
    reserved: u32,
}

impl Entry {
    pub fn new(inode: u64, id: Option<SocketId>) -> Self {
        Self { inode, id: id.unwrap_or_else(SocketId::zeroed), reserved: 0 }
    }

    /// How the host is asked for its bytes, if they are counted.
    pub fn id(&self) -> Option<SocketId> {
        (self.id != SocketId::zeroed()).then_some(self.id)
    }
}

const HEAD: usize = size_of::<Head>();
const ENTRY: usize = size_of::<Entry>();

/// Sockets, some of which may have been closed since, and what those have carried that have ended.
#[derive(Debug)]
pub struct Ledger {
    file: File,
    entries: usize,
    room: usize,
}

/// How many entries a file gets in which there are so many.
fn room_for(entries: usize) -> usize {
    (2 * entries).clamp(ENTRIES_MIN, ENTRIES_MAX)
}

/// What stands in one.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Written {
    pub ended: EgressBytes,
    pub sockets: Vec<Entry>,
}

impl Ledger {
    /// One with this in it.
    pub fn create(written: &Written) -> io::Result<Self> {
        let file = File::from(memfd_create("thaw-connections", MemfdFlags::CLOEXEC)?);
        Self::write(file, written)
    }

    fn write(file: File, written: &Written) -> io::Result<Self> {
        let mut ledger = Self { file, entries: 0, room: 0 };
        ledger.note_ended(written.ended)?;
        ledger.replace(&written.sockets)?;
        Ok(ledger)
    }

    /// One that an earlier daemon has made, and what stands in it.
    pub fn open(file: OwnedFd) -> io::Result<(Self, Written)> {
        let file = File::from(file);
        let mut bytes = Vec::new();
        let start = FromStart { file: &file, offset: 0 };
        start.take((HEAD + ENTRIES_MAX * ENTRY) as u64).read_to_end(&mut bytes)?;
        match bytes.split_at_checked(HEAD).map(|(head, rest)| (pod_read_unaligned(head), rest)) {
            Some((Head { version: WITH_BYTES, sent, received, .. }, rest)) => {
                let sockets: Vec<Entry> =
                    rest.chunks_exact(ENTRY).map(pod_read_unaligned).collect();
                let entries = sockets.len();
                let ledger = Self { file, entries, room: room_for(entries) };
                Ok((ledger, Written { ended: EgressBytes { sent, received }, sockets }))
            }
            _ => Self::open_older(file, &bytes),
        }
    }

    /// The same of a daemon that has counted no bytes. It becomes one like others.
    fn open_older(file: File, bytes: &[u8]) -> io::Result<(Self, Written)> {
        let inodes = bytes.chunks_exact(size_of::<u64>()).take(ENTRIES_MAX);
        let sockets = inodes.map(|inode| Entry::new(pod_read_unaligned(inode), None)).collect();
        let written = Written { ended: EgressBytes::default(), sockets };
        Ok((Self::write(file, &written)?, written))
    }

    /// Another descriptor of it, for the monitor.
    pub fn for_successor(&self) -> io::Result<OwnedFd> {
        Ok(self.file.try_clone()?.into())
    }

    /// Writes a socket down. `open` are all sockets that there are, this one included.
    pub fn note(&mut self, socket: Entry, open: impl FnOnce() -> Vec<Entry>) -> io::Result<()> {
        if self.entries >= self.room {
            return self.replace(&open());
        }
        let offset = (HEAD + self.entries * ENTRY) as u64;
        self.file.write_all_at(bytes_of(&socket), offset)?;
        self.entries += 1;
        Ok(())
    }

    /// Writes down what all connections have carried that have ended.
    pub fn note_ended(&self, ended: EgressBytes) -> io::Result<()> {
        let EgressBytes { sent, received } = ended;
        let head = Head { version: WITH_BYTES, sent, received, reserved: 0 };
        self.file.write_all_at(bytes_of(&head), 0)
    }

    /// A daemon that is killed meanwhile leaves entries of closed sockets too many, and none
    /// too few: what is open stands in front.
    fn replace(&mut self, sockets: &[Entry]) -> io::Result<()> {
        self.file.write_all_at(cast_slice(sockets), HEAD as u64)?;
        self.file.set_len((HEAD + size_of_val(sockets)) as u64)?;
        (self.entries, self.room) = (sockets.len(), room_for(sockets.len()));
        Ok(())
    }
}

/// Reads a file from its start, wherever others that have it stand.
struct FromStart<'a> {
    file: &'a File,
    offset: u64,
}

impl Read for FromStart<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(buffer, self.offset)?;
        self.offset += read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    fn sockets(inodes: impl IntoIterator<Item = u64>) -> Vec<Entry> {
        inodes.into_iter().map(|inode| Entry::new(inode, None)).collect()
    }

    fn ledger(inodes: impl IntoIterator<Item = u64>) -> Ledger {
        let sockets = sockets(inodes);
        Ledger::create(&Written { sockets, ..Written::default() }).unwrap()
    }

    fn no_need() -> Vec<Entry> {
        unreachable!("there is room")
    }

    fn read(ledger: &Ledger) -> Written {
        Ledger::open(ledger.for_successor().unwrap()).unwrap().1
    }

    #[test]
    fn the_next_daemon_reads_what_was_noted_and_goes_on() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let id = SocketId::of(TcpStream::connect(address).unwrap(), address).unwrap();
        let mut first = ledger([1, 2]);
        first.note(Entry::new(3, Some(id)), no_need).unwrap();
        first.note_ended(EgressBytes { sent: 7, received: 8 }).unwrap();
        let (mut second, written) = Ledger::open(first.for_successor().unwrap()).unwrap();
        assert_eq!(written.ended, EgressBytes { sent: 7, received: 8 });
        assert_eq!(written.sockets[..2], sockets([1, 2]));
        assert_eq!((written.sockets[2].inode, written.sockets[2].id()), (3, Some(id)));
        second.note(Entry::new(4, None), no_need).unwrap();
        second.note_ended(EgressBytes { sent: 9, received: 9 }).unwrap();
        let third = read(&second);
        let inodes: Vec<u64> = third.sockets.iter().map(|socket| socket.inode).collect();
        assert_eq!((inodes, third.ended.sent), (vec![1, 2, 3, 4], 9));
    }

    #[test]
    fn closed_sockets_go_when_there_are_many() {
        let mut ledger = ledger([]);
        for socket in sockets(0..ENTRIES_MIN as u64) {
            ledger.note(socket, no_need).unwrap();
        }
        ledger.note(Entry::new(99, None), || sockets([98, 99])).unwrap();
        ledger.note(Entry::new(100, None), no_need).unwrap();
        assert_eq!(read(&ledger).sockets, sockets([98, 99, 100]));
        // Where many are open, it is not written anew for each.
        let open = sockets(0..OPEN_MAX as u64);
        ledger.replace(&open).unwrap();
        for socket in &open {
            ledger.note(*socket, no_need).unwrap();
        }
        ledger.note(Entry::new(98, None), || sockets([98])).unwrap();
        // No file makes the next daemon read more, nor a piece of an entry.
        ledger.file.set_len((HEAD + 10 * ENTRIES_MAX * ENTRY) as u64).unwrap();
        assert_eq!(read(&ledger).sockets.len(), ENTRIES_MAX);
        ledger.file.set_len((HEAD + ENTRY) as u64 + 3).unwrap();
        assert_eq!(read(&ledger).sockets, sockets([98]));
    }

    #[test]
    fn files_of_daemons_that_counted_no_bytes_are_read_and_go_on_as_others() {
        for inodes in [&[][..], &[5], &[5, 6, 7, 8, 9]] {
            let older = File::from(memfd_create("older", MemfdFlags::CLOEXEC).unwrap());
            older.write_all_at(cast_slice(inodes), 0).unwrap();
            let (mut ledger, written) = Ledger::open(older.into()).unwrap();
            assert_eq!(written.sockets, sockets(inodes.iter().copied()));
            ledger.note(Entry::new(10, None), no_need).unwrap();
            let next = read(&ledger).sockets;
            assert_eq!(next, sockets(inodes.iter().copied().chain([10])));
        }
    }
}
