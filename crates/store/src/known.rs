//! Files of the host whose content is known from an earlier import, so that it need not be read
//! again to be named.
//!
//! ```text
//! header, then one entry of 96 bytes for each file, the last used first
//! ```
//!
//! A file is known by its device, inode, size and times. Nobody can change the content and keep the
//! time of the last change of the inode, with exceptions, which are left out:
//!
//! | exception | rule |
//! | --- | --- |
//! | it changes again within the clock's granularity (as in git's index) | both times are two seconds past when it is read |
//! | memory that is mapped for writing, whose times are set once | its owner is root, and nobody else may write to it |
//! | a file system of a user's own, which may say what it likes | the file system has a block device |
//! | a device number that another file system gets later | the same |
//!
//! Since nothing is opened, the file is one that everybody may read. The table lies in the store,
//! which nobody but its owner can write to. It holds no contents: an entry names a blob that is
//! there, or the file is read.

use std::collections::HashMap;
use std::fs;
use std::io::ErrorKind;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytemuck::{Pod, Zeroable};
use rustix::fs::{FileType, Stat, major};

use crate::blob::{Blob, Domain};
use crate::error::{Result, StoreError};
use crate::id::BlobHash;
use crate::session::Session;
use crate::stage::{Existing, RECORD_MODE};
use crate::store::Store;

const MAGIC: [u8; 8] = *b"THAWKNF\0";
const VERSION: u32 = 1;
/// Most files: those of some twenty languages, 6 MiB.
const KNOWN_MAX: usize = 1 << 16;
/// How long ago a file must have changed: longer than any file system's clock takes to tick.
const SETTLED: Duration = Duration::from_secs(2);

/// Start of the table.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    version: u32,
    count: u32,
    /// BLAKE3 of the entries.
    checksum: [u8; 32],
}

/// What tells a file from others, and from itself after a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
    size: u64,
    modified_s: i64,
    changed_s: i64,
    modified_ns: u32,
    changed_ns: u32,
    /// The domain that its content is named in, [`Domain::short_name`].
    domain: [u8; 16],
}

impl Identity {
    /// That of a file; `None`: its content may change unseen, or is not everybody's to read.
    pub fn of(stat: &Stat, domain: &Domain) -> Option<Self> {
        let is_regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        let is_roots = stat.st_uid == 0 && stat.st_mode & 0o022 == 0 && stat.st_mode & 0o004 != 0;
        let has_block_device = major(stat.st_dev) != 0;
        (is_regular && is_roots && has_block_device && stat.st_size > 0).then(|| Self {
            device: stat.st_dev,
            inode: stat.st_ino,
            size: stat.st_size as u64,
            modified_s: stat.st_mtime,
            changed_s: stat.st_ctime,
            modified_ns: stat.st_mtime_nsec as u32,
            changed_ns: stat.st_ctime_nsec as u32,
            domain: domain.short_name(),
        })
    }

    /// Whether a change from `now` on gives it other times.
    fn is_settled(&self, now: SystemTime) -> bool {
        let Some(latest) = now.checked_sub(SETTLED) else { return false };
        let Ok(latest) = latest.duration_since(UNIX_EPOCH) else { return false };
        let latest = latest.as_secs() as i64;
        self.modified_s < latest && self.changed_s < latest
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
struct Entry {
    identity: Identity,
    hash: [u8; 32],
}

/// The table, as a session has it.
#[derive(Debug, Default)]
pub(crate) struct KnownFiles {
    known: HashMap<Identity, BlobHash>,
    /// As in the file.
    order: Vec<Entry>,
    /// What this session has read.
    new: Vec<Entry>,
    /// Whether the file was read.
    is_read: bool,
}

impl KnownFiles {
    fn read(store: &Store) -> Self {
        // One that is damaged is written anew.
        let order = fs::read(store.layout.known_files()).map(|bytes| parse(&bytes));
        let order = order.unwrap_or_default();
        let known = order.iter().map(|entry| (entry.identity, BlobHash(entry.hash))).collect();
        Self { known, order, new: Vec::new(), is_read: true }
    }

    /// The bytes of the table with what is new in front.
    fn bytes(&self) -> Vec<u8> {
        let of_new: std::collections::HashSet<_> =
            self.new.iter().map(|entry| entry.identity).collect();
        let old = self.order.iter().filter(|entry| !of_new.contains(&entry.identity));
        let all: Vec<Entry> = self.new.iter().chain(old).take(KNOWN_MAX).copied().collect();
        let entries: &[u8] = bytemuck::cast_slice(&all);
        let header = Header {
            magic: MAGIC,
            version: VERSION,
            count: all.len() as u32,
            checksum: *blake3::hash(entries).as_bytes(),
        };
        [bytemuck::bytes_of(&header), entries].concat()
    }
}

/// The entries of a table; none if it is damaged.
fn parse(bytes: &[u8]) -> Vec<Entry> {
    let Some((head, entries)) = bytes.split_at_checked(size_of::<Header>()) else {
        return Vec::new();
    };
    let header: Header = bytemuck::pod_read_unaligned(head);
    let count = header.count as usize;
    let is_whole = header.magic == MAGIC
        && header.version == VERSION
        && count <= KNOWN_MAX
        && entries.len() == count * size_of::<Entry>()
        && *blake3::hash(entries).as_bytes() == header.checksum;
    match is_whole {
        true => {
            entries.chunks_exact(size_of::<Entry>()).map(bytemuck::pod_read_unaligned).collect()
        }
        false => Vec::new(),
    }
}

impl Session {
    /// The content of a file that was imported before and has not changed since, if it is in the
    /// store.
    pub(crate) fn known_blob(&mut self, identity: &Identity) -> Result<Option<Blob>> {
        if !self.known.is_read {
            let _acting = self.layout.act()?;
            self.known = KnownFiles::read(&self.store);
        }
        let Some(&hash) = self.known.known.get(identity) else { return Ok(None) };
        let blob = Blob { hash, size: identity.size };
        Ok(self.has(blob)?.then_some(blob))
    }

    /// Remembers the content of a file, which was read since `began`.
    pub(crate) fn know(&mut self, identity: Identity, blob: Blob, began: SystemTime) {
        let is_of_it = identity.is_settled(began) && identity.size == blob.size;
        if is_of_it && self.known.new.len() < KNOWN_MAX {
            self.known.new.push(Entry { identity, hash: blob.hash.0 });
            self.known.known.insert(identity, blob.hash);
        }
    }

    /// Writes the table, if this session has read files.
    ///
    /// # Errors
    /// The disk is full, or the host's.
    pub(crate) fn write_known_files(&mut self) -> Result<()> {
        if self.known.new.is_empty() {
            return Ok(());
        }
        // What others have written meanwhile.
        let new = std::mem::take(&mut self.known.new);
        self.known = KnownFiles { new, ..KnownFiles::read(&self.store) };
        let to = self.layout.known_files();
        let bytes = self.known.bytes();
        self.write_record_as(&to, &[&bytes], Existing::Replace, RECORD_MODE)?;
        self.known = KnownFiles::default();
        Ok(())
    }
}

impl Store {
    /// Forgets which files of the host it knows: all are read again at the next import.
    ///
    /// # Errors
    /// The table cannot be removed.
    pub fn forget_known_files(&self) -> Result<()> {
        let _acting = self.layout.act()?;
        let path = self.layout.known_files();
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(StoreError::io("remove", &path, error))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(number: u64) -> Entry {
        let identity = Identity { inode: number, size: 5, ..Identity::zeroed() };
        Entry { identity, hash: [number as u8; 32] }
    }

    #[test]
    fn format_tripwire() {
        assert_eq!((size_of::<Header>(), size_of::<Entry>(), VERSION), (48, 96, 1));
    }

    #[test]
    fn a_table_is_read_as_it_was_written_or_not_at_all() {
        let order = vec![entry(1), entry(2)];
        let table = KnownFiles { order, new: vec![entry(3), entry(2)], ..KnownFiles::default() };
        let bytes = table.bytes();
        assert_eq!(parse(&bytes), [entry(3), entry(2), entry(1)]);
        for at in 0..bytes.len() {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1;
            assert_eq!(parse(&flipped), []);
            assert_eq!(parse(&bytes[..at]), []);
        }
    }

    #[test]
    fn the_table_is_bounded_and_those_not_used_for_longest_go() {
        let order = (0..KNOWN_MAX as u64).map(entry).collect();
        let table = KnownFiles { order, new: vec![entry(1 << 40)], ..KnownFiles::default() };
        let read = parse(&table.bytes());
        assert_eq!((read.len(), read[0]), (KNOWN_MAX, entry(1 << 40)));
        assert_eq!(read[KNOWN_MAX - 1], entry(KNOWN_MAX as u64 - 2));
    }

    #[test]
    fn only_what_changed_a_while_ago_is_known() {
        let now = UNIX_EPOCH + Duration::from_secs(1000);
        let at = |modified_s, changed_s| Identity { modified_s, changed_s, ..Identity::zeroed() };
        assert!(at(990, 997).is_settled(now));
        for (modified, changed) in [(990, 998), (998, 990), (990, 999), (990, 2000), (2000, 990)] {
            assert!(!at(modified, changed).is_settled(now), "{modified} {changed}");
        }
    }

    #[test]
    fn only_files_that_nobody_can_change_unseen_are_known() {
        let domain = Domain::shared();
        let mut stat = rustix::fs::stat("/bin/sh").unwrap();
        stat.st_dev = rustix::fs::makedev(8, 1);
        (stat.st_uid, stat.st_mode, stat.st_size) = (0, 0o100755, 9);
        assert!(Identity::of(&stat, &domain).is_some());
        let other = Domain::own(&crate::id::Name::new("other").unwrap());
        assert_ne!(Identity::of(&stat, &domain), Identity::of(&stat, &other));
        let changes: [fn(&mut Stat); 7] = [
            |stat| stat.st_uid = 1000,
            |stat| stat.st_mode = 0o100775,
            |stat| stat.st_mode = 0o100757,
            |stat| stat.st_mode = 0o100750,
            |stat| stat.st_mode = 0o040755,
            |stat| stat.st_size = 0,
            |stat| stat.st_dev = rustix::fs::makedev(0, 45),
        ];
        for change in changes {
            let mut changed = stat;
            change(&mut changed);
            assert_eq!(Identity::of(&changed, &domain), None);
        }
    }
}
