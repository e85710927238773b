//! The outgoing connections of a sandbox, written down where the next daemon finds them: in a
//! memory file that the monitor keeps with the sandbox. They count for it and its tenant then
//! as before.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, memfd_create};

use super::budget::OPEN_MAX;

/// Bytes of an entry: the inode number of a socket.
const ENTRY: usize = size_of::<u64>();
/// Most entries. Those of closed sockets go when there would be more.
const ENTRIES_MAX: usize = 2 * OPEN_MAX;

/// Inode numbers of sockets. Some may have been closed since.
#[derive(Debug)]
pub struct Ledger {
    file: File,
    entries: usize,
}

impl Ledger {
    /// One with these sockets.
    pub fn create(inodes: &[u64]) -> io::Result<Self> {
        let file = File::from(memfd_create("thaw-connections", MemfdFlags::CLOEXEC)?);
        let mut ledger = Self { file, entries: 0 };
        ledger.replace(inodes)?;
        Ok(ledger)
    }

    /// One that an earlier daemon has made, and what stands in it.
    pub fn open(file: OwnedFd) -> io::Result<(Self, Vec<u64>)> {
        let file = File::from(file);
        let mut bytes = Vec::new();
        let start = FromStart { file: &file, offset: 0 };
        start.take((ENTRIES_MAX * ENTRY) as u64).read_to_end(&mut bytes)?;
        let entries = bytes.chunks_exact(ENTRY);
        let inodes: Vec<u64> =
            entries.map(|entry| u64::from_ne_bytes(entry.try_into().expect("its size"))).collect();
        Ok((Self { file, entries: inodes.len() }, inodes))
    }

    /// Another descriptor of it, for the monitor.
    pub fn for_successor(&self) -> io::Result<OwnedFd> {
        Ok(self.file.try_clone()?.into())
    }

    /// Writes a socket down. `open` are all sockets that there are, this one included.
    pub fn note(&mut self, inode: u64, open: impl FnOnce() -> Vec<u64>) -> io::Result<()> {
        if self.entries >= ENTRIES_MAX {
            return self.replace(&open());
        }
        let offset = (self.entries * ENTRY) as u64;
        self.file.write_all_at(&inode.to_ne_bytes(), offset)?;
        self.entries += 1;
        Ok(())
    }

    /// A daemon that is killed meanwhile leaves entries of closed sockets too many, and none
    /// too few: what is open stands in front.
    fn replace(&mut self, inodes: &[u64]) -> io::Result<()> {
        let bytes: Vec<u8> = inodes.iter().flat_map(|inode| inode.to_ne_bytes()).collect();
        self.file.write_all_at(&bytes, 0)?;
        self.file.set_len(bytes.len() as u64)?;
        self.entries = inodes.len();
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

    #[test]
    fn the_next_daemon_reads_what_was_noted_and_goes_on() {
        let mut first = Ledger::create(&[1, 2]).unwrap();
        first.note(3, || unreachable!("there is room")).unwrap();
        let (mut second, inodes) = Ledger::open(first.for_successor().unwrap()).unwrap();
        assert_eq!(inodes, [1, 2, 3]);
        second.note(4, || unreachable!("there is room")).unwrap();
        let (_, inodes) = Ledger::open(second.for_successor().unwrap()).unwrap();
        assert_eq!(inodes, [1, 2, 3, 4]);
    }

    #[test]
    fn closed_sockets_go_when_there_are_many() {
        let mut ledger = Ledger::create(&[]).unwrap();
        for inode in 0..ENTRIES_MAX as u64 {
            ledger.note(inode, || unreachable!("there is room")).unwrap();
        }
        ledger.note(99, || vec![98, 99]).unwrap();
        ledger.note(100, || unreachable!("there is room")).unwrap();
        let (_, inodes) = Ledger::open(ledger.for_successor().unwrap()).unwrap();
        assert_eq!(inodes, [98, 99, 100]);
        // No file makes the next daemon read more, nor a piece of an entry.
        ledger.file.set_len((10 * ENTRIES_MAX * ENTRY) as u64).unwrap();
        let (_, inodes) = Ledger::open(ledger.for_successor().unwrap()).unwrap();
        assert_eq!(inodes.len(), ENTRIES_MAX);
        ledger.file.set_len(ENTRY as u64 + 3).unwrap();
        assert_eq!(Ledger::open(ledger.for_successor().unwrap()).unwrap().1, [98]);
    }
}
