//! Writing the image file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use bytemuck::{Zeroable, bytes_of, cast_slice};
use thaw_abi::image::{
    IMAGE_VERSION, ImageHeader, NOTE_ABOUT, NOTE_BLOBS, NOTE_HEADER, NOTE_MAPPINGS, NOTE_OWNER,
    SOURCE_IMAGE,
};
use thaw_abi::{PAGE_SIZE, page_align_up};

use super::layout::Layout;
use super::report::Report;
use super::scan::Scanner;
use super::{FreezeError, FreezeSpec};
use crate::image::checksum;
use crate::image::cpu_features;
use crate::image::elf::{
    CORE_OWNER, EM_X86_64, ET_CORE, FileHeader, IDENT, NT_AUXV, NT_FILE, NT_PRPSINFO, NT_PRSTATUS,
    PT_LOAD, PT_NOTE, ProcessInfo, ProgramHeader, ThreadStatus, push_note,
};

/// Bytes copied at a time.
const CHUNK: u64 = 1 << 20;

/// What [`write`] did.
pub(crate) struct Written {
    pub file_len: u64,
    /// Bytes of memory in the file that are not holes.
    pub stored: u64,
    pub checksum: [u8; 32],
}

/// Writes the whole image.
pub(crate) fn write(
    image: &File,
    report: &Report,
    blobs: &[u32],
    mut layout: Layout,
    spec: &FreezeSpec,
    kernel_build: [u8; 32],
    memory: &Scanner<'_>,
) -> Result<Written, FreezeError> {
    let failed = FreezeError::Write;
    let header = ImageHeader {
        version: IMAGE_VERSION,
        flags: 0,
        file_len: 0,
        kernel_build,
        index: spec.index_hash,
        cpu_features: cpu_features(),
        checksum: [0; 32],
    };

    // The notes hold offsets that depend on the length of the notes, but not
    // the other way round: once to measure, once with the offsets in place.
    let headers = program_headers(&layout, 0, 0).len() as u64;
    let notes_offset = size_of::<FileHeader>() as u64 + headers * size_of::<ProgramHeader>() as u64;
    let notes_len = notes(report, blobs, &layout, spec, &header).0.len() as u64;
    let first = page_align_up(notes_offset + notes_len)
        .ok_or_else(|| failed(io::Error::from(io::ErrorKind::FileTooLarge)))?;
    layout.place(first);
    let file_len = first + layout.image_len;
    let header = ImageHeader { file_len, ..header };
    let (notes, header_offset) = notes(report, blobs, &layout, spec, &header);
    let headers = program_headers(&layout, notes_offset, notes_len);

    let mut start = bytes_of(&file_header(headers.len())).to_vec();
    start.extend_from_slice(cast_slice(&headers));
    start.extend_from_slice(&notes);
    image.set_len(0).map_err(failed)?;
    image.set_len(file_len).map_err(failed)?;
    image.write_all_at(&start, 0).map_err(failed)?;
    let stored = copy_memory(image, &layout, memory)?;

    let checksum_offset =
        notes_offset + (header_offset + std::mem::offset_of!(ImageHeader, checksum)) as u64;
    let checksum = checksum(image, file_len, checksum_offset).map_err(failed)?;
    image.write_all_at(&checksum, checksum_offset).map_err(failed)?;
    Ok(Written { file_len, stored, checksum })
}

/// Copies the stored memory; pages of zeros become holes.
fn copy_memory(image: &File, layout: &Layout, memory: &Scanner<'_>) -> Result<u64, FreezeError> {
    let mut buffer = vec![0; CHUNK as usize];
    let mut stored = 0;
    for segment in &layout.segments {
        let mut at = segment.start;
        while at < segment.end {
            let len = (segment.end - at).min(CHUNK) as usize;
            let offset = segment.offset + (at - segment.start);
            let buffer = &mut buffer[..len];
            memory.read(segment.space, at, buffer).map_err(FreezeError::Memory)?;
            for (page_offset, pages) in runs_with_content(buffer) {
                image.write_all_at(pages, offset + page_offset).map_err(FreezeError::Write)?;
                stored += pages.len() as u64;
            }
            at += len as u64;
        }
    }
    Ok(stored)
}

/// Runs of pages that are not all zero, with their offsets.
fn runs_with_content(bytes: &[u8]) -> impl Iterator<Item = (u64, &[u8])> {
    let page = PAGE_SIZE as usize;
    let mut at = 0;
    std::iter::from_fn(move || {
        let is_zero = |at: usize| bytes[at..at + page].iter().all(|&byte| byte == 0);
        while at < bytes.len() && is_zero(at) {
            at += page;
        }
        let start = at;
        while at < bytes.len() && !is_zero(at) {
            at += page;
        }
        (at > start).then(|| (start as u64, &bytes[start..at]))
    })
}

fn file_header(headers: usize) -> FileHeader {
    FileHeader {
        ident: IDENT,
        kind: ET_CORE,
        machine: EM_X86_64,
        version: 1,
        phoff: size_of::<FileHeader>() as u64,
        ehsize: size_of::<FileHeader>() as u16,
        phentsize: size_of::<ProgramHeader>() as u16,
        // `lay_out` bounds the mappings far below 65535.
        phnum: headers as u16,
        ..FileHeader::zeroed()
    }
}

/// The notes, and one segment per mapping. What is not in the image has no
/// bytes in the file: a debugger takes it from the program and its libraries.
fn program_headers(layout: &Layout, notes_offset: u64, notes_len: u64) -> Vec<ProgramHeader> {
    let mut headers = vec![ProgramHeader {
        kind: PT_NOTE,
        offset: notes_offset,
        filesz: notes_len,
        align: 4,
        ..ProgramHeader::zeroed()
    }];
    let mut next_offset = layout.segments.first().map_or(0, |segment| segment.offset);
    headers.extend(layout.mappings.iter().map(|mapping| {
        let stored = mapping.source == SOURCE_IMAGE;
        if stored {
            next_offset = mapping.offset;
        }
        let offset = next_offset;
        if stored {
            next_offset += mapping.len;
        }
        ProgramHeader {
            kind: PT_LOAD,
            flags: program_flags(mapping.prot),
            // Without bytes, too: gdb looks for an ELF header there, and would
            // find the image's own at 0 and read all notes once more.
            offset,
            vaddr: mapping.start,
            paddr: 0,
            filesz: if stored { mapping.len } else { 0 },
            memsz: mapping.len,
            align: PAGE_SIZE,
        }
    }));
    headers
}

/// `PROT_*` as `PF_*`: read and execute change places.
fn program_flags(prot: u32) -> u32 {
    (prot & 1) << 2 | prot & 2 | (prot & 4) >> 2
}

/// All notes, and the offset in them of the image header.
fn notes(
    report: &Report,
    blobs: &[u32],
    layout: &Layout,
    spec: &FreezeSpec,
    header: &ImageHeader,
) -> (Vec<u8>, usize) {
    let mut notes = Vec::new();
    let status = |thread: &thaw_abi::freeze::FrozenThread| ThreadStatus {
        pid: thread.tid,
        group: report.pid,
        registers: thread.registers,
        ..ThreadStatus::zeroed()
    };
    // Debuggers take the first thread as the current one, and expect the
    // process's notes behind it.
    let mut threads = report.threads.iter();
    if let Some(main) = threads.next() {
        push_note(&mut notes, CORE_OWNER, NT_PRSTATUS, bytes_of(&status(main)));
    }
    let process = ProcessInfo {
        state_name: b'S',
        pid: report.pid,
        group: report.pid,
        name: padded(&spec.program),
        arguments: padded(&spec.arguments),
        ..ProcessInfo::zeroed()
    };
    push_note(&mut notes, CORE_OWNER, NT_PRPSINFO, bytes_of(&process));
    push_note(&mut notes, CORE_OWNER, NT_AUXV, &report.auxv);
    push_note(&mut notes, CORE_OWNER, NT_FILE, &mapped_files(report));
    for thread in threads {
        push_note(&mut notes, CORE_OWNER, NT_PRSTATUS, bytes_of(&status(thread)));
    }

    push_note(&mut notes, NOTE_OWNER, NOTE_HEADER, bytes_of(header));
    let header_offset = notes.len() - size_of::<ImageHeader>();
    push_note(&mut notes, NOTE_OWNER, NOTE_MAPPINGS, cast_slice(&layout.mappings));
    push_note(&mut notes, NOTE_OWNER, NOTE_BLOBS, cast_slice(blobs));
    push_note(&mut notes, NOTE_OWNER, NOTE_ABOUT, spec.about.as_bytes());
    (notes, header_offset)
}

/// The description of `NT_FILE`: which parts of which files are mapped where.
fn mapped_files(report: &Report) -> Vec<u8> {
    let files: Vec<_> = report.regions.iter().filter(|region| !region.path.is_empty()).collect();
    let mut numbers = vec![files.len() as u64, PAGE_SIZE];
    let mut names = Vec::new();
    for region in files {
        let offset = region.blob.map_or(0, |(_, offset)| offset);
        numbers.extend([region.start, region.end(), offset / PAGE_SIZE]);
        // A name ends at its terminator; one inside it is the kernel's fault.
        names.extend(region.path.iter().filter(|&&byte| byte != 0));
        names.push(0);
    }
    let mut description: Vec<u8> = cast_slice(&numbers).to_vec();
    description.append(&mut names);
    description
}

/// As much of `text` as fits before a terminator.
fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    let len = text.len().min(N - 1);
    bytes[..len].copy_from_slice(&text.as_bytes()[..len]);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protections_become_segment_flags() {
        assert_eq!(program_flags(1), 4);
        assert_eq!(program_flags(3), 6);
        assert_eq!(program_flags(5), 5);
        assert_eq!(program_flags(0), 0);
    }

    #[test]
    fn only_pages_with_content_are_written() {
        let page = PAGE_SIZE as usize;
        let mut bytes = vec![0; 6 * page];
        bytes[page + 5] = 1;
        bytes[2 * page] = 1;
        bytes[5 * page + page - 1] = 1;
        let runs: Vec<(u64, usize)> = runs_with_content(&bytes)
            .map(|(offset, run)| (offset / PAGE_SIZE, run.len() / page))
            .collect();
        assert_eq!(runs, [(1, 2), (5, 1)]);
    }
}
