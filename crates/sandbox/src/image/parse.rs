//! Parsing and verifying an image file. Every number in it may be wrong.

use std::fs::File;
use std::os::unix::fs::FileExt;

use bytemuck::{AnyBitPattern, Zeroable};
use thaw_abi::PAGE_SIZE;
use thaw_abi::image::{
    IMAGE_VERSION, ImageHeader, MAPPING_EAGER, MAPPING_KERNEL, MAPPING_SHARED, MAPPING_SPACE_SHIFT,
    MAX_SPACES, Mapping, NOTE_ABOUT, NOTE_BLOBS, NOTE_HEADER, NOTE_MAPPINGS, NOTE_OWNER,
    SOURCE_BLOB, SOURCE_IMAGE, SOURCE_ZERO,
};
use thaw_abi::rootfs::NO_BLOB;

use super::ImageError::{Damaged, NotAnImage, Read, Truncated};
use super::elf::{EM_X86_64, ET_CORE, FileHeader, IDENT, Note, PT_NOTE, ProgramHeader, notes};
use super::{ImageError, checksum, most_mappings};
use crate::area::{Area, area_of};

/// Largest notes that are read, in bytes. Each mapped file, thread and mapping
/// takes some tens of bytes.
const NOTES_MAX: u64 = 64 << 20;

/// Why an image is refused whose bytes are not those that were written.
pub(crate) const WRONG_CHECKSUM: &str = "its checksum does not fit";

/// What an image says, verified.
#[derive(Debug)]
pub(super) struct Parsed {
    pub header: ImageHeader,
    pub mappings: Vec<Mapping>,
    /// Where they lie in the file.
    pub mappings_at: u64,
    pub blobs: Vec<u32>,
    pub about: String,
}

pub(super) fn parse(file: &File) -> Result<Parsed, ImageError> {
    let found = file.metadata().map_err(Read)?.len();
    let (notes_offset, bytes) = read_notes(file, found)?;
    let notes = notes(&bytes).ok_or(Damaged("its notes do not fit their lengths"))?;
    let own = |kind| notes.iter().find(|note| note.owner == NOTE_OWNER && note.kind == kind);

    let Some(note) = own(NOTE_HEADER) else {
        return Err(NotAnImage("it is the core dump of an ordinary program"));
    };
    // The version comes first in every version.
    let version = note.description.get(..4).ok_or(Damaged("its header is too short"))?;
    let version = u32::from_le_bytes([version[0], version[1], version[2], version[3]]);
    if version != IMAGE_VERSION {
        return Err(ImageError::Version { found: version, expected: IMAGE_VERSION });
    }
    let header: ImageHeader = bytemuck::try_pod_read_unaligned(note.description)
        .map_err(|_| Damaged("its header has a wrong length"))?;
    if header.file_len > found {
        return Err(Truncated { found, expected: header.file_len });
    }
    if header.file_len < found {
        return Err(Damaged("it is longer than it says"));
    }
    let checksum_offset =
        notes_offset + (note.offset + std::mem::offset_of!(ImageHeader, checksum)) as u64;
    if checksum(file, found, checksum_offset).map_err(Read)? != header.checksum {
        return Err(Damaged(WRONG_CHECKSUM));
    }

    let note = own(NOTE_MAPPINGS).ok_or(Damaged("a note is missing"))?;
    let mappings_at = notes_offset + note.offset as u64;
    let mappings: Vec<Mapping> = array(note)?;
    check_mappings(&mappings, found)?;
    let blobs: Vec<u32> = array(own(NOTE_BLOBS).ok_or(Damaged("a note is missing"))?)?;
    if blobs.contains(&NO_BLOB) {
        return Err(Damaged("its I/O cache names no blob"));
    }
    let about = own(NOTE_ABOUT).map_or(&[][..], |note| note.description);
    let about = String::from_utf8_lossy(about).into_owned();
    Ok(Parsed { header, mappings, mappings_at, blobs, about })
}

/// Makes the checksum of an image fit its bytes; `None` if it has no header.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn mend_checksum(file: &File) -> Option<()> {
    let len = file.metadata().ok()?.len();
    let (notes_offset, bytes) = read_notes(file, len).ok()?;
    let is_header = |note: &&Note<'_>| note.owner == NOTE_OWNER && note.kind == NOTE_HEADER;
    let offset = notes(&bytes)?.iter().find(is_header)?.offset;
    let at = notes_offset + (offset + std::mem::offset_of!(ImageHeader, checksum)) as u64;
    file.write_all_at(&checksum(file, len, at).ok()?, at).ok()
}

/// The notes of a core file, and where they lie in it.
fn read_notes(file: &File, file_len: u64) -> Result<(u64, Vec<u8>), ImageError> {
    let header: FileHeader = read(file, file_len, 0)?;
    if header.ident != IDENT {
        return Err(NotAnImage("it is not an ELF file"));
    }
    if header.kind != ET_CORE || header.machine != EM_X86_64 {
        return Err(NotAnImage("it is not an x86-64 core file"));
    }
    if header.phentsize as usize != size_of::<ProgramHeader>() || header.phnum == 0 {
        return Err(NotAnImage("it has no segments"));
    }
    let segment: ProgramHeader = read(file, file_len, header.phoff)?;
    if segment.kind != PT_NOTE {
        return Err(NotAnImage("its first segment holds no notes"));
    }
    if segment.filesz > NOTES_MAX {
        return Err(Damaged("its notes are too long"));
    }
    let end = segment.offset.checked_add(segment.filesz).ok_or(Damaged("its notes lie nowhere"))?;
    if end > file_len {
        return Err(Truncated { found: file_len, expected: end });
    }
    let mut bytes = vec![0; segment.filesz as usize];
    file.read_exact_at(&mut bytes, segment.offset).map_err(Read)?;
    Ok((segment.offset, bytes))
}

fn read<T: bytemuck::Pod + Zeroable>(file: &File, file_len: u64, at: u64) -> Result<T, ImageError> {
    let end = at.checked_add(size_of::<T>() as u64).ok_or(Damaged("a table lies nowhere"))?;
    if end > file_len {
        return Err(Truncated { found: file_len, expected: end });
    }
    let mut value = T::zeroed();
    file.read_exact_at(bytemuck::bytes_of_mut(&mut value), at).map_err(Read)?;
    Ok(value)
}

fn array<T: AnyBitPattern>(note: &Note<'_>) -> Result<Vec<T>, ImageError> {
    let items = note.description.chunks_exact(size_of::<T>());
    if !items.remainder().is_empty() {
        return Err(Damaged("a table has a wrong length"));
    }
    Ok(items.map(bytemuck::pod_read_unaligned).collect())
}

/// Checks that carrying out the mappings can only fill the saved parts of a
/// sandbox's address spaces, each at most once.
fn check_mappings(mappings: &[Mapping], file_len: u64) -> Result<(), ImageError> {
    let is_of_several = mappings.iter().any(|mapping| mapping.space() > 0);
    if mappings.len() > most_mappings(is_of_several) {
        return Err(Damaged("it has too many mappings"));
    }
    let mut end = (0, 0);
    for mapping in mappings {
        let area = area_of(mapping.start, mapping.len)
            .ok_or(Damaged("a mapping lies where none can be"))?;
        let space = mapping.space();
        if space < end.0 || space == end.0 && mapping.start < end.1 {
            return Err(Damaged("its mappings overlap or are not sorted"));
        }
        end = (space, mapping.start + mapping.len);
        if space >= MAX_SPACES {
            return Err(Damaged("it has too many address spaces"));
        }
        let known = MAPPING_KERNEL | MAPPING_EAGER | MAPPING_SHARED;
        let flags = mapping.flags & ((1 << MAPPING_SPACE_SHIFT) - 1);
        if flags & !known != 0 || mapping.prot & !7 != 0 {
            return Err(Damaged("a mapping has unknown flags"));
        }
        if (area == Area::Kernel) != (mapping.flags & MAPPING_KERNEL != 0) {
            return Err(Damaged("a mapping is marked as somebody else's"));
        }
        if !mapping.offset.is_multiple_of(PAGE_SIZE) {
            return Err(Damaged("a mapping has an unaligned offset"));
        }
        let source_end = mapping.offset.checked_add(mapping.len);
        let is_possible = match mapping.source {
            SOURCE_IMAGE => source_end.is_some_and(|end| end <= file_len),
            SOURCE_BLOB => {
                mapping.blob != NO_BLOB && source_end.is_some_and(|end| end <= i64::MAX as u64)
            }
            SOURCE_ZERO => true,
            _ => false,
        };
        if !is_possible {
            return Err(Damaged("a mapping has an impossible source"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_abi::layout::{HEAP_BASE, KERNEL_BASE};

    const GOOD: Mapping = Mapping {
        start: 0x40_0000,
        len: 0x2000,
        offset: 0x1000,
        source: SOURCE_IMAGE,
        blob: 0,
        prot: 5,
        flags: 0,
    };

    #[test]
    fn good_mappings_pass() {
        let kernel = Mapping { start: HEAP_BASE, flags: MAPPING_KERNEL, ..GOOD };
        let blob = Mapping { start: 0x50_0000, source: SOURCE_BLOB, offset: 1 << 40, ..GOOD };
        check_mappings(&[GOOD, blob, kernel], 0x3000).unwrap();
    }

    #[test]
    fn bad_mappings_do_not() {
        for mappings in [
            vec![GOOD, GOOD],
            vec![Mapping { start: 0x50_0000, ..GOOD }, GOOD],
            vec![Mapping { start: KERNEL_BASE, flags: MAPPING_KERNEL, ..GOOD }],
            vec![Mapping { start: HEAP_BASE, ..GOOD }],
            vec![Mapping { flags: MAPPING_KERNEL, ..GOOD }],
            vec![Mapping { flags: 8, ..GOOD }],
            vec![Mapping { prot: 8, ..GOOD }],
            vec![Mapping { offset: 0x2000, ..GOOD }],
            vec![Mapping { offset: 0x800, ..GOOD }],
            vec![Mapping { offset: !0xfff, ..GOOD }],
            vec![Mapping { source: 3, ..GOOD }],
            vec![Mapping { source: SOURCE_BLOB, blob: NO_BLOB, ..GOOD }],
            vec![Mapping { source: SOURCE_BLOB, offset: !0xfff, ..GOOD }],
            vec![Mapping { len: 0, ..GOOD }],
        ] {
            check_mappings(&mappings, 0x3000).expect_err("a bad mapping");
        }
    }
}
