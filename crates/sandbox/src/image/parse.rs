//! Parsing and verifying an image file. Every number in it may be wrong.

use std::fs::File;
use std::os::unix::fs::FileExt;

use bytemuck::{AnyBitPattern, Zeroable};
use thaw_abi::PAGE_SIZE;
use thaw_abi::image::{
    ANCESTOR_FIRST, Ancestor, DEPTH_MAX, IMAGE_VERSION, IMAGE_VERSION_DIFFERENTIAL, ImageHeader,
    MAPPING_EAGER, MAPPING_KERNEL, MAPPING_SHARED, MAPPING_SPACE_SHIFT, MAX_SPACES, Mapping,
    NOTE_ABOUT, NOTE_ANCESTORS, NOTE_BLOBS, NOTE_HEADER, NOTE_MAPPINGS, NOTE_OWNER, SOURCE_BLOB,
    SOURCE_IMAGE, SOURCE_ZERO, ancestor_depth,
};

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
pub(crate) struct Parsed {
    pub header: ImageHeader,
    pub mappings: Vec<Mapping>,
    /// Where they lie in the file.
    pub mappings_at: u64,
    pub blobs: Vec<u32>,
    pub about: String,
    /// By rising depth.
    pub ancestors: Vec<Ancestor>,
}

/// Bytes of a file.
pub(super) fn len_of(file: &File) -> Result<u64, ImageError> {
    Ok(file.metadata().map_err(Read)?.len())
}

/// Whether all bytes of a file are compared with its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bytes {
    /// They are.
    Checked,
    /// Somebody has done so before.
    Known,
}

/// Reads an image file of `found` bytes.
pub(crate) fn parse(file: &File, found: u64, bytes_are: Bytes) -> Result<Parsed, ImageError> {
    let (notes_offset, bytes) = read_notes(file, found)?;
    let notes = notes(&bytes).ok_or(Damaged("its notes do not fit their lengths"))?;
    let own = |kind| notes.iter().find(|note| note.owner == NOTE_OWNER && note.kind == kind);

    let Some(note) = own(NOTE_HEADER) else {
        return Err(NotAnImage("it is the core dump of an ordinary program"));
    };
    // The version comes first in every version.
    let version = note.description.get(..4).ok_or(Damaged("its header is too short"))?;
    let version = u32::from_le_bytes([version[0], version[1], version[2], version[3]]);
    if !matches!(version, IMAGE_VERSION | IMAGE_VERSION_DIFFERENTIAL) {
        return Err(ImageError::Version { found: version });
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
    let is_checked = bytes_are == Bytes::Checked;
    if is_checked && checksum(file, found, checksum_offset).map_err(Read)? != header.checksum {
        return Err(Damaged(WRONG_CHECKSUM));
    }

    let ancestors: Vec<Ancestor> = own(NOTE_ANCESTORS).map_or(Ok(Vec::new()), array)?;
    check_ancestors(&header, &ancestors)?;
    let note = own(NOTE_MAPPINGS).ok_or(Damaged("a note is missing"))?;
    let mappings_at = notes_offset + note.offset as u64;
    let mappings: Vec<Mapping> = array(note)?;
    check_mappings(&mappings, found, &ancestors)?;
    let blobs: Vec<u32> = array(own(NOTE_BLOBS).ok_or(Damaged("a note is missing"))?)?;
    if blobs.iter().any(|&blob| blob >= ANCESTOR_FIRST) {
        return Err(Damaged("its I/O cache names no blob"));
    }
    let about = own(NOTE_ABOUT).map_or(&[][..], |note| note.description);
    let about = String::from_utf8_lossy(about).into_owned();
    Ok(Parsed { header, mappings, mappings_at, blobs, about, ancestors })
}

/// Checks that the ancestors of an image can be some: all of them above it in its chain, each
/// once. So no image is among its own.
fn check_ancestors(header: &ImageHeader, ancestors: &[Ancestor]) -> Result<(), ImageError> {
    let expected = if header.depth > 0 { IMAGE_VERSION_DIFFERENTIAL } else { IMAGE_VERSION };
    if header.version != expected || header.depth > DEPTH_MAX {
        return Err(Damaged("its depth is impossible"));
    }
    let mut least = 0;
    for ancestor in ancestors {
        if ancestor.depth < least || ancestor.depth >= header.depth {
            return Err(Damaged("its ancestors are not above it, or not sorted"));
        }
        if ancestor.reserved != 0 || ancestor.file_len > i64::MAX as u64 {
            return Err(Damaged("an ancestor is impossible"));
        }
        least = ancestor.depth + 1;
    }
    Ok(())
}

/// Where the bytes of a blob, or of an ancestor, end.
fn end_of_blob(number: u32, ancestors: &[Ancestor]) -> Option<u64> {
    match ancestor_depth(number) {
        Some(depth) => {
            let known = ancestors.iter().find(|ancestor| ancestor.depth == depth);
            known.map(|ancestor| ancestor.file_len)
        }
        None => (number < ANCESTOR_FIRST).then_some(i64::MAX as u64),
    }
}

/// Where the header of an image lies in its file.
fn header_at(file: &File) -> Result<u64, ImageError> {
    let (notes_offset, bytes) = read_notes(file, len_of(file)?)?;
    let notes = notes(&bytes).ok_or(Damaged("its notes do not fit their lengths"))?;
    let is_header = |note: &&Note<'_>| note.owner == NOTE_OWNER && note.kind == NOTE_HEADER;
    let note = notes.iter().find(is_header).ok_or(NotAnImage("it has no header"))?;
    Ok(notes_offset + note.offset as u64)
}

/// Makes the checksum of an image fit its bytes.
///
/// # Errors
/// It has no header, or cannot be read or written.
pub(crate) fn mend_checksum(file: &File) -> Result<(), ImageError> {
    let at = header_at(file)? + std::mem::offset_of!(ImageHeader, checksum) as u64;
    let sum = checksum(file, len_of(file)?, at).map_err(Read)?;
    file.write_all_at(&sum, at).map_err(Read)
}

/// Says of an image that it was frozen over another index.
///
/// # Errors
/// It has no header, or cannot be read or written.
pub(super) fn write_index(file: &File, index: &[u8; 32]) -> Result<(), ImageError> {
    let at = header_at(file)? + std::mem::offset_of!(ImageHeader, index) as u64;
    file.write_all_at(index, at).map_err(Read)?;
    mend_checksum(file)
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
fn check_mappings(
    mappings: &[Mapping],
    file_len: u64,
    ancestors: &[Ancestor],
) -> Result<(), ImageError> {
    let is_of_several = mappings.iter().any(|mapping| mapping.space() > 0);
    if mappings.len() > most_mappings(is_of_several, !ancestors.is_empty()) {
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
                let limit = end_of_blob(mapping.blob, ancestors);
                source_end.is_some_and(|end| limit.is_some_and(|limit| end <= limit))
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
    use bytemuck::Zeroable;
    use thaw_abi::image::ancestor_number;
    use thaw_abi::layout::{HEAP_BASE, KERNEL_BASE};
    use thaw_abi::rootfs::NO_BLOB;

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
        check_mappings(&[GOOD, blob, kernel], 0x3000, &[]).unwrap();
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
            check_mappings(&mappings, 0x3000, &[]).expect_err("a bad mapping");
        }
    }

    fn ancestor(depth: u32, file_len: u64) -> Ancestor {
        Ancestor { depth, file_len, ..Ancestor::zeroed() }
    }

    #[test]
    fn mappings_of_ancestors_lie_in_their_files() {
        let of = |depth, offset| {
            let blob = ancestor_number(depth);
            Mapping { source: SOURCE_BLOB, blob, offset, ..GOOD }
        };
        let ancestors = [ancestor(0, 0x5000), ancestor(2, 0x4000)];
        for good in [of(0, 0x3000), of(2, 0x2000)] {
            check_mappings(&[good], 0x3000, &ancestors).unwrap();
        }
        for bad in [of(0, 0x4000), of(2, 0x3000), of(0, !0xfff), of(1, 0), of(3, 0), of(64, 0)] {
            check_mappings(&[bad], 0x3000, &ancestors).expect_err("a bad mapping");
        }
    }

    #[test]
    fn an_image_has_so_many_mappings_at_most() {
        let of_root = Mapping { source: SOURCE_BLOB, blob: ancestor_number(0), offset: 0, ..GOOD };
        let several = |count: u64, first: Mapping| -> Vec<Mapping> {
            let at = |number| Mapping { start: GOOD.start + number * 0x2000, ..first };
            (0..count).map(at).collect()
        };
        let root = [ancestor(0, 0x5000)];
        for (first, ancestors, most) in [(GOOD, &[][..], 3000), (of_root, &root[..], 16_000)] {
            check_mappings(&several(most, first), 0x3000, ancestors).unwrap();
            let refused = check_mappings(&several(most + 1, first), 0x3000, ancestors);
            assert!(matches!(refused, Err(Damaged("it has too many mappings"))), "{refused:?}");
        }
    }

    #[test]
    fn ancestors_are_above_their_image() {
        let header = |depth| ImageHeader {
            version: if depth > 0 { IMAGE_VERSION_DIFFERENTIAL } else { IMAGE_VERSION },
            depth,
            ..ImageHeader::zeroed()
        };
        let good = [ancestor(0, 1), ancestor(1, 1), ancestor(4, 1)];
        check_ancestors(&header(0), &[]).unwrap();
        check_ancestors(&header(DEPTH_MAX), &good).unwrap();
        for (header, ancestors) in [
            (header(0), &good[..1]),
            // It would be its own.
            (header(4), &good[..]),
            (header(DEPTH_MAX + 1), &good[..]),
            (ImageHeader { version: IMAGE_VERSION, ..header(5) }, &good[..]),
            (ImageHeader { version: IMAGE_VERSION_DIFFERENTIAL, ..header(0) }, &[]),
            (header(5), &[ancestor(1, 1), ancestor(1, 1)]),
            (header(5), &[ancestor(2, 1), ancestor(1, 1)]),
            (header(5), &[ancestor(u32::MAX, 1)]),
            (header(5), &[ancestor(1, u64::MAX)]),
            (header(5), &[Ancestor { reserved: 1, ..ancestor(1, 1) }]),
        ] {
            check_ancestors(&header, ancestors).expect_err("impossible ancestors");
        }
    }
}
