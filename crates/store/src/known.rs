//! Files of the host whose content is known from an earlier import, so that it need not be read
//! again to be named.
//!
//! ```text
//! header, then one entry of 104 bytes for each file, the last used first
//! ```
//!
//! A file is known by its file system, device, inode, size and times. Nobody can change the content and keep the
//! time of the last change of the inode, with exceptions, which are left out:
//!
//! | exception | rule |
//! | --- | --- |
//! | it changes again within the clock's granularity (as in git's index) | both times are two seconds past when it is read |
//! | memory that is mapped for writing, whose times are set once | its owner is root, and nobody else may write to it |
//! | a file system of a user's own, which may say what it likes | the file system has a block device |
//! | one that a program has made as a whole, with times as it likes (SquashFS, ISO 9660; `mkfs -d` in a file) | its kind is ext4, XFS or F2FS, and it lies in no loop device |
//! | a device number that another file system gets later, as those of device mapper are | the file system's id names it (statfs(2), `f_fsid`: of ext4 and F2FS its UUID; that of XFS is its device number) |
//!
//! Since nothing is opened, the file is one that everybody may read. The table lies in the store,
//! which nobody but its owner can write to. It holds no contents: an entry names a blob that is
//! there, or the file is read.

use std::collections::HashMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytemuck::{Pod, Zeroable};
use rustix::fd::AsFd;
use rustix::fs::{FileType, Stat, fstat, fstatfs, fstatvfs, major, minor};

use crate::blob::{Blob, Domain};
use crate::error::{Result, StoreError};
use crate::id::BlobHash;
use crate::session::Session;
use crate::stage::{Existing, RECORD_MODE, publish};
use crate::store::Store;

const MAGIC: [u8; 8] = *b"THAWKNF\0";
const VERSION: u32 = 2;
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
    /// The id of its file system.
    file_system: u64,
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
    /// That of a file in this file system; `None`: its content may change unseen, or is not
    /// everybody's to read.
    fn of(stat: &Stat, domain: &Domain, file_system: &FileSystem) -> Option<Self> {
        let is_regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        let is_roots = stat.st_uid == 0 && stat.st_mode & 0o022 == 0 && stat.st_mode & 0o004 != 0;
        let is_known = is_regular && is_roots && stat.st_size > 0;
        (is_known && file_system.is_trusted(stat.st_dev)).then(|| Self {
            file_system: file_system.id,
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

/// Where a block device comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DeviceKind {
    /// Hardware has it, or what the kernel takes for it.
    Physical,
    /// Software makes it, and gives its number to another one later.
    Virtual,
    /// A file, perhaps of a file system that somebody has made as a whole.
    Loop,
}

impl DeviceKind {
    /// That of a device, from where it lies in sysfs (Documentation/admin-guide/sysfs-rules.rst). One
    /// of which nothing is known is as bad as any.
    fn of(device: u64) -> Self {
        let link = format!("/sys/dev/block/{}:{}", major(device), minor(device));
        fs::canonicalize(link).map_or(Self::Loop, |path| Self::at(&path))
    }

    fn at(path: &Path) -> Self {
        let Ok(name) = path.strip_prefix("/sys/devices/virtual/block") else {
            return Self::Physical;
        };
        let is_loop = name.to_str().is_none_or(|name| name.starts_with("loop"));
        if is_loop { Self::Loop } else { Self::Virtual }
    }
}

/// A file system that a file lies in.
#[derive(Clone, Copy, Debug)]
struct FileSystem {
    /// `f_type` of statfs(2).
    kind: u64,
    /// `f_fsid` of statfs(2).
    id: u64,
    device: DeviceKind,
}

/// `f_type` of ext2, ext3 and ext4, of XFS and of F2FS (linux/magic.h).
const EXT4: u64 = 0xef53;
const XFS: u64 = 0x5846_5342;
const F2FS: u64 = 0xf2f5_2010;

impl FileSystem {
    /// That of an open file or directory of this device.
    fn of(device: u64, open: impl AsFd) -> Option<Self> {
        let (kind, id) = (fstatfs(&open).ok()?.f_type as u64, fstatvfs(&open).ok()?.f_fsid);
        Some(Self { kind, id, device: DeviceKind::of(device) })
    }

    /// Whether a file of this device is known again by what stat(2) and `id` say.
    fn is_trusted(&self, device: u64) -> bool {
        // The kernel gives nobody else that number: `new_encode_dev` in linux/kdev_t.h.
        let is_named = self.id != 0 && self.id != device;
        let is_reused = self.device != DeviceKind::Physical;
        major(device) != 0
            && [EXT4, XFS, F2FS].contains(&self.kind)
            && self.device != DeviceKind::Loop
            && (is_named || !is_reused)
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
    /// The file systems that were met, by device.
    file_systems: HashMap<u64, Option<FileSystem>>,
}

impl KnownFiles {
    fn read(store: &Store) -> Self {
        // One that is damaged is written anew.
        let order = fs::read(store.layout.known_files()).map(|bytes| parse(&bytes));
        let order = order.unwrap_or_default();
        let known = order.iter().map(|entry| (entry.identity, BlobHash(entry.hash))).collect();
        Self { known, order, is_read: true, ..Self::default() }
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
    /// What tells a file from others whose attributes are these, and which lies in the file system
    /// of `beside`; `None`: nothing does.
    pub(crate) fn identity(
        &mut self,
        stat: &Stat,
        beside: impl AsFd,
        domain: &Domain,
    ) -> Option<Identity> {
        // Of no device: before anybody is asked.
        if major(stat.st_dev) == 0 {
            return None;
        }
        let device = stat.st_dev;
        // Another one may be mounted on the file itself.
        if !self.known.file_systems.contains_key(&device) && fstat(&beside).ok()?.st_dev != device {
            return None;
        }
        // No other file system gets its number while this one is being read.
        let of = &mut self.known.file_systems;
        let of = of.entry(device).or_insert_with(|| FileSystem::of(device, &beside));
        Identity::of(stat, domain, of.as_ref()?)
    }

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
        // Nothing is lost with it, and half of it is none: nobody waits until it is on disk.
        let staged = self.stage.write_file(&[&bytes], RECORD_MODE)?;
        publish(&staged, &to, Existing::Replace)?;
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
        assert_eq!((size_of::<Header>(), size_of::<Entry>(), VERSION), (48, 104, 2));
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
        let root = FileSystem { kind: EXT4, id: 7, device: DeviceKind::Physical };
        let of = |stat: &Stat, domain: &Domain| Identity::of(stat, domain, &root);
        assert!(of(&stat, &domain).is_some());
        let other = Domain::own(&crate::id::Name::new("other").unwrap());
        assert_ne!(of(&stat, &domain), of(&stat, &other));
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
            assert_eq!(of(&changed, &domain), None);
        }
    }

    #[test]
    fn file_systems_are_told_apart_or_not_trusted() {
        use DeviceKind::{Loop, Physical, Virtual};
        const SQUASHFS: u64 = 0x7371_7368;
        let (disk, mapped) = (rustix::fs::makedev(8, 1), rustix::fs::makedev(253, 300));
        let is_trusted =
            |kind, id, device, number| FileSystem { kind, id, device }.is_trusted(number);
        assert!(is_trusted(EXT4, 99, Physical, disk));
        assert!(is_trusted(XFS, disk, Physical, disk), "nobody else gets the number of a disk");
        assert!(is_trusted(EXT4, 99, Virtual, mapped));
        assert!(!is_trusted(XFS, mapped, Virtual, mapped), "its id is the device's number");
        assert!(!is_trusted(EXT4, 0, Virtual, mapped));
        assert!(!is_trusted(EXT4, 99, Loop, mapped));
        assert!(!is_trusted(SQUASHFS, 99, Physical, disk));
        // The same device, inode, size and times.
        let domain = Domain::shared();
        let mut stat = rustix::fs::stat("/bin/sh").unwrap();
        (stat.st_dev, stat.st_uid, stat.st_mode, stat.st_size) = (mapped, 0, 0o100755, 9);
        let of = |id| Identity::of(&stat, &domain, &FileSystem { kind: EXT4, id, device: Virtual });
        assert!(of(1).is_some());
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
    }

    #[test]
    fn devices_that_software_makes_are_told_by_their_place() {
        let at = |path: &str| DeviceKind::at(Path::new(path));
        assert_eq!(
            at("/sys/devices/pci0000:00/0000:00:02.0/virtio1/block/vda/vda1"),
            DeviceKind::Physical
        );
        assert_eq!(at("/sys/devices/virtual/block/dm-0"), DeviceKind::Virtual);
        assert_eq!(at("/sys/devices/virtual/block/loop3/loop3p1"), DeviceKind::Loop);
        assert_eq!(DeviceKind::of(rustix::fs::makedev(4000, 7)), DeviceKind::Loop, "there is none");
    }
}
