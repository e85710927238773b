//! `/run/secrets`: files whose content the host gives to each copy.
//!
//! The values lie in the per-boot area, which no image holds, and are copied from there to the
//! program that reads them, past the kernel's heap. What the program does with them is its own:
//! its memory is in each image that is made of it afterwards.

use alloc::string::String;
use alloc::sync::Arc;
use core::cell::Cell;
use core::ops::Range;

use thaw_abi::control::{SECRETS_DIRECTORY, SECRETS_MAX, Secret};

use crate::errno::{Errno, Result};
use crate::fs::SECRETS_FS;
use crate::fs::file::{File, OpenFlags, Stat};
use crate::fs::inode::{Attributes, FileType, FilesystemId, Inode, Statfs};
use crate::fs::pseudo::{Directory, Names, Place};
use crate::io::Sink;
use crate::platform::boot_area::SECRETS;
use crate::state::kernel;

/// `RAMFS_MAGIC` (statfs(2)).
const MAGIC: i64 = 0x8584_58f6;
/// Bytes of the length before the secrets.
const LENGTH: usize = size_of::<u32>();

const _: () = assert!(SECRETS_MAX.is_multiple_of(8));

/// Mounts the directory.
pub fn mount() -> Result<()> {
    let place = Place { filesystem: SECRETS_FS, magic: MAGIC, ino: 1, owner: (0, 0) };
    let at = SECRETS_DIRECTORY.as_bytes();
    kernel().fs.mount_view(at, ("ramfs", "secrets"), Directory::new(place, All))
}

/// Takes the secrets of this boot, as the host says them. `EINVAL` if there are too many.
pub fn set(said: &[u8]) -> Result<()> {
    if said.len() > SECRETS_MAX || LENGTH + said.len() > SECRETS.capacity() {
        return Err(Errno::EINVAL);
    }
    let cells = SECRETS.cells(LENGTH + said.len());
    let bytes = (said.len() as u32).to_ne_bytes();
    for (cell, &byte) in cells.iter().zip(bytes.iter().chain(said)) {
        cell.set(byte);
    }
    Ok(())
}

/// Bytes of the area that are in use.
fn cells() -> &'static [Cell<u8>] {
    let length = SECRETS.cells(LENGTH);
    let mut bytes = [0; LENGTH];
    bytes.iter_mut().zip(length).for_each(|(byte, cell)| *byte = cell.get());
    let len = (u32::from_ne_bytes(bytes) as usize).min(SECRETS.capacity() - LENGTH);
    &SECRETS.cells(LENGTH + len)[LENGTH..]
}

/// Where a secret's name and value lie in [`cells`].
struct Found {
    name: Range<usize>,
    value: Range<usize>,
}

/// The secret that begins at `at`.
fn found_at(at: usize) -> Option<Found> {
    let cells = cells();
    let head = cells.get(at..at.checked_add(size_of::<Secret>())?)?;
    let mut bytes = [0; size_of::<Secret>()];
    bytes.iter_mut().zip(head).for_each(|(byte, cell)| *byte = cell.get());
    let head: Secret = bytemuck::pod_read_unaligned(&bytes);
    let name = at + bytes.len();
    let value = name.checked_add(head.name_len as usize)?;
    let end = value.checked_add(head.value_len as usize)?;
    // Zeros at the end fill the message up.
    (end <= cells.len() && name < value).then_some(Found { name: name..value, value: value..end })
}

fn all() -> impl Iterator<Item = Found> {
    let mut at = 0;
    core::iter::from_fn(move || {
        let found = found_at(at)?;
        at = found.value.end;
        Some(found)
    })
}

impl Found {
    fn is_named(&self, name: &[u8]) -> bool {
        let cells = &cells()[self.name.clone()];
        cells.len() == name.len() && cells.iter().zip(name).all(|(cell, byte)| cell.get() == *byte)
    }
}

/// The value of a secret; `ESTALE`: it was there in an earlier boot.
fn value(name: &[u8]) -> Result<&'static [Cell<u8>]> {
    let found = all().find(|found| found.is_named(name)).ok_or(Errno::ESTALE)?;
    Ok(&cells()[found.value])
}

/// The names in the directory.
struct All;

impl Names for All {
    fn lookup(&self, name: &[u8], directory: &Place) -> Result<Option<Arc<dyn Inode>>> {
        if !all().any(|found| found.is_named(name)) {
            return Ok(None);
        }
        Ok(Some(Arc::new(SecretFile { place: directory.below(name), name: name.into() })))
    }

    fn list(&self, emit: &mut dyn FnMut(&[u8], FileType)) -> Result<()> {
        for found in all() {
            let name: alloc::vec::Vec<u8> = cells()[found.name].iter().map(Cell::get).collect();
            emit(&name, FileType::Regular);
        }
        Ok(())
    }
}

/// A secret.
struct SecretFile {
    place: Place,
    name: Arc<[u8]>,
}

impl Inode for SecretFile {
    fn attributes(&self) -> Attributes {
        let size = value(&self.name).map_or(0, |value| value.len() as u64);
        Attributes { size, ..self.place.attributes(FileType::Regular, 0o444) }
    }
    fn file_type(&self) -> FileType {
        FileType::Regular
    }
    fn open(self: Arc<Self>, flags: OpenFlags) -> Result<Arc<dyn File>> {
        if flags.can_write() {
            return Err(Errno::EROFS);
        }
        Ok(Arc::new(OpenSecret { inode: self }))
    }
    fn truncate(&self, _: u64) -> Result<()> {
        Err(Errno::EROFS)
    }
    fn filesystem(&self) -> FilesystemId {
        self.place.filesystem
    }
    fn statfs(&self) -> Statfs {
        self.place.statfs()
    }
}

/// An open secret. It has no copy of the value: each read takes it from where it lies, so that
/// another boot reads its own.
struct OpenSecret {
    inode: Arc<SecretFile>,
}

impl File for OpenSecret {
    fn read(&self, sink: &mut Sink<'_>, offset: u64) -> Result<usize> {
        let value = value(&self.inode.name)?;
        let rest = usize::try_from(offset).ok().and_then(|offset| value.get(offset..));
        // A byte at a time: what lies on a kernel's stack may be in an image.
        let mut read = 0;
        for cell in rest.unwrap_or(&[]) {
            match sink.put(&[cell.get()]) {
                Ok(1..) => read += 1,
                Ok(0) => break,
                Err(error) if read == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(read)
    }

    fn seekable(&self) -> bool {
        true
    }

    fn size(&self) -> u64 {
        self.inode.attributes().size
    }

    fn stat(&self) -> Result<Stat> {
        Ok(self.inode.attributes().to_stat())
    }

    fn description(&self) -> String {
        String::from("secret")
    }
}
