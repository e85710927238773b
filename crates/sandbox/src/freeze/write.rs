//! Writing the image file.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use bytemuck::{Zeroable, bytes_of, cast_slice};
use thaw_abi::image::{
    Ancestor, IMAGE_VERSION, IMAGE_VERSION_DIFFERENTIAL, ImageHeader, Mapping, NOTE_ABOUT,
    NOTE_ANCESTORS, NOTE_BLOBS, NOTE_HEADER, NOTE_MAPPINGS, NOTE_OWNER, SOURCE_BLOB, SOURCE_IMAGE,
    ancestor_number,
};
use thaw_abi::{PAGE_SIZE, page_align_up};

use super::layout::{Layout, Segment};
use super::mate::{Mate, Part};
use super::report::Report;
use super::scan::{Scanner, ZEROS};
use super::{FreezeError, Order};
use crate::image::elf::{
    CORE_OWNER, EM_X86_64, ET_CORE, FileHeader, IDENT, NT_AUXV, NT_FILE, NT_PRPSINFO, NT_PRSTATUS,
    PT_LOAD, PT_NOTE, ProcessInfo, ProgramHeader, ThreadStatus, push_note,
};

/// Bytes copied at a time, and their alignment in the file. The page cache keeps what
/// is written at once in pages as large (folios), and maps large ones faster.
pub(super) const CHUNK: u64 = 2 << 20;
/// Pages of zeros between stored ones that become a hole; fewer are written.
const HOLE_PAGES: usize = 16;

/// What [`write`] did.
pub(crate) struct Written {
    pub file_len: u64,
    /// Bytes of memory in the file that are not holes.
    pub stored: u64,
    pub depth: u32,
    pub checksum: [u8; 32],
}

/// Writes the whole image.
pub(crate) fn write(
    image: &File,
    report: &Report,
    blobs: &[u32],
    mut layout: Layout,
    order: &Order<'_>,
    memory: &mut Scanner<'_>,
) -> Result<Written, FreezeError> {
    let failed = FreezeError::Write;
    let ancestors = ancestors_in_use(&layout.mappings, order.ancestors);
    // One that refers to no other is a root, whatever it was compared with.
    let parent = order.ancestors.last().filter(|_| !ancestors.is_empty());
    let depth = parent.map_or(0, |parent| parent.depth + 1);
    let header = ImageHeader {
        version: if depth > 0 { IMAGE_VERSION_DIFFERENTIAL } else { IMAGE_VERSION },
        depth,
        file_len: 0,
        kernel_build: order.request.kernel_build,
        index: order.request.index_hash,
        cpu_features: order.request.cpu_features,
        checksum: if order.is_in_memory() { order.request.identity } else { [0; 32] },
    };

    // The notes hold offsets that depend on the length of the notes, but not
    // the other way round: once to measure, once with the offsets in place.
    let headers = program_headers(&layout, 0, 0).len() as u64;
    let notes_offset = size_of::<FileHeader>() as u64 + headers * size_of::<ProgramHeader>() as u64;
    let parts = Parts { report, blobs, ancestors: &ancestors, order };
    let notes_len = notes(&parts, &layout, &header).0.len() as u64;
    let first = page_align_up(notes_offset + notes_len)
        .ok_or_else(|| failed(io::Error::from(io::ErrorKind::FileTooLarge)))?;
    layout.place(first);
    let file_len = first + layout.image_len;
    let header = ImageHeader { file_len, ..header };
    let (notes, header_offset) = notes(&parts, &layout, &header);
    let headers = program_headers(&layout, notes_offset, notes_len);

    let mut start = bytes_of(&file_header(headers.len())).to_vec();
    start.extend_from_slice(cast_slice(&headers));
    start.extend_from_slice(&notes);
    image.set_len(0).map_err(failed)?;
    image.set_len(file_len).map_err(failed)?;
    image.write_all_at(&start, 0).map_err(failed)?;
    let mut copying = Copying { image, segments: &layout.segments, mate: None, hasher: None };
    if order.is_in_memory() {
        copying.mate = memory.take_mate().map(Mate::new);
    } else {
        start.resize(first as usize, 0);
        copying.hasher.insert(blake3::Hasher::new()).update(&start);
    }
    let stored = copying.copy_memory(order, memory)?;
    memory.end_reading()?;

    let Some(hasher) = copying.hasher else {
        return Ok(Written { file_len, stored, depth, checksum: header.checksum });
    };
    // It is zero in the bytes that were hashed.
    let checksum_offset =
        notes_offset + (header_offset + std::mem::offset_of!(ImageHeader, checksum)) as u64;
    let checksum = *hasher.finalize().as_bytes();
    image.write_all_at(&checksum, checksum_offset).map_err(failed)?;
    Ok(Written { file_len, stored, depth, checksum })
}

/// The ancestors that mappings refer to.
fn ancestors_in_use(mappings: &[Mapping], ancestors: &[Ancestor]) -> Vec<Ancestor> {
    let used: BTreeSet<u32> = mappings
        .iter()
        .filter(|mapping| mapping.source == SOURCE_BLOB)
        .map(|mapping| mapping.blob)
        .collect();
    let is_used = |ancestor: &&Ancestor| used.contains(&ancestor_number(ancestor.depth));
    ancestors.iter().filter(is_used).copied().collect()
}

/// The chunks of an image that nobody copies yet.
struct Chunks {
    start: u64,
    end: u64,
}

impl Chunks {
    /// Those that hold segments which follow each other without a gap.
    fn of(segments: &[Segment]) -> Self {
        let start = segments.first().map_or(0, |first| first.offset);
        Self { start, end: segments.last().map_or(start, |last| last.offset + last.len()) }
    }

    fn len(&self) -> u64 {
        self.end - self.start
    }

    fn take_first(&mut self) -> Option<Range<u64>> {
        let chunk = self.start..(self.start + 1).next_multiple_of(CHUNK).min(self.end);
        self.start = chunk.end;
        (!chunk.is_empty()).then_some(chunk)
    }

    fn take_last(&mut self) -> Option<Range<u64>> {
        let start = self.end.saturating_sub(1) / CHUNK * CHUNK;
        let chunk = start.max(self.start)..self.end;
        self.end = chunk.start;
        (!chunk.is_empty()).then_some(chunk)
    }
}

/// Bytes of other address spaces than the first for which a thaw does not wait.
const POST_COPY_MIN: u64 = 4 << 20;

/// The copying of memory into an image.
struct Copying<'a> {
    image: &'a File,
    segments: &'a [Segment],
    mate: Option<Mate>,
    /// Of all bytes of the file so far, where nobody else copies.
    hasher: Option<blake3::Hasher>,
}

impl Copying<'_> {
    /// Copies the stored memory, which the segments cover without a gap; many pages of
    /// zeros in a row become holes.
    fn copy_memory(
        &mut self,
        order: &Order<'_>,
        memory: &mut Scanner<'_>,
    ) -> Result<u64, FreezeError> {
        let others = self.segments.partition_point(|segment| segment.space == 0);
        let (first, others) = self.segments.split_at(others);
        let (first, others) = (Chunks::of(first), Chunks::of(others));
        if !order.is_post_copy() || others.len() < POST_COPY_MIN {
            return self.copy(Chunks::of(self.segments), memory);
        }
        let stored = self.copy(first, memory)?;
        memory.end_first()?;
        Ok(stored + self.copy(others, memory)?)
    }

    /// Copies what lies in some chunks, from both ends if there is a mate; bytes that are no holes.
    fn copy(&mut self, mut chunks: Chunks, memory: &mut Scanner<'_>) -> Result<u64, FreezeError> {
        let mut buffer = Vec::with_capacity(CHUNK as usize);
        let mut stored = 0;
        while let Some(chunk) = chunks.take_first() {
            while let Some(mate) = &mut self.mate
                && mate.is_free()?
                && let Some(chunk) = chunks.take_last()
            {
                let parts: Vec<Part> = parts_of(self.segments, &chunk)
                    .map(|(space, part)| Part { process: memory.process(space), ..part })
                    .collect();
                mate.copy(chunk.start, chunk.end - chunk.start, &parts)?;
            }
            buffer.resize((chunk.end - chunk.start) as usize, 0);
            for (space, part) in parts_of(self.segments, &chunk) {
                let place = &mut buffer[part.at as usize..(part.at + part.len) as usize];
                memory.read(space, part.address, place).map_err(FreezeError::Memory)?;
            }
            stored += write_content(self.image, &buffer, chunk.start)?;
            if let Some(hasher) = &mut self.hasher {
                hasher.update(&buffer);
            }
        }
        Ok(stored + self.mate.as_mut().map_or(Ok(0), Mate::finish)?)
    }
}

/// What lies in a chunk, with the number of the address space that has it.
fn parts_of<'a>(
    segments: &'a [Segment],
    chunk: &Range<u64>,
) -> impl Iterator<Item = (u32, Part)> + use<'a> {
    let first = segments.partition_point(|segment| segment.offset + segment.len() <= chunk.start);
    let chunk = chunk.clone();
    segments[first..].iter().take_while(move |segment| segment.offset < chunk.end).map(
        move |segment| {
            let start = segment.offset.max(chunk.start);
            let end = (segment.offset + segment.len()).min(chunk.end);
            let address = segment.start + (start - segment.offset);
            let (at, len) = ((start - chunk.start) as u32, (end - start) as u32);
            (segment.space, Part { address, at, len, process: 0, reserved: 0 })
        },
    )
}

/// Writes a chunk of the image but for its holes; how many bytes.
pub(super) fn write_content(image: &File, chunk: &[u8], offset: u64) -> Result<u64, FreezeError> {
    let mut stored = 0;
    for pages in runs_with_content(chunk) {
        let at = offset + pages.start as u64;
        image.write_all_at(&chunk[pages.clone()], at).map_err(FreezeError::Write)?;
        stored += pages.len() as u64;
    }
    Ok(stored)
}

/// What is to be written: all pages but those of zeros that are many in a row, or at
/// an end.
fn runs_with_content(bytes: &[u8]) -> Vec<Range<usize>> {
    let page = PAGE_SIZE as usize;
    let mut runs: Vec<Range<usize>> = Vec::new();
    let with_content = (0..bytes.len()).step_by(page).filter(|&at| bytes[at..at + page] != ZEROS);
    for start in with_content {
        match runs.last_mut() {
            Some(run) if start - run.end < HOLE_PAGES * page => run.end = start + page,
            _ => runs.push(start..start + page),
        }
    }
    runs
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

/// What the notes tell, beside the layout and the header.
struct Parts<'a> {
    report: &'a Report,
    blobs: &'a [u32],
    ancestors: &'a [Ancestor],
    order: &'a Order<'a>,
}

/// All notes, and the offset in them of the image header.
fn notes(parts: &Parts<'_>, layout: &Layout, header: &ImageHeader) -> (Vec<u8>, usize) {
    let Parts { report, blobs, ancestors, order } = *parts;
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
        name: order.request.program,
        arguments: order.request.arguments,
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
    if !ancestors.is_empty() {
        push_note(&mut notes, NOTE_OWNER, NOTE_ANCESTORS, cast_slice(ancestors));
    }
    push_note(&mut notes, NOTE_OWNER, NOTE_ABOUT, order.about);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(offset: u64, pages: u64) -> Segment {
        let start = offset + (1 << 40);
        Segment { start, end: start + pages * PAGE_SIZE, offset, space: 3 }
    }

    #[test]
    fn every_byte_belongs_to_one_chunk_from_whichever_end() {
        let pages = CHUNK / PAGE_SIZE;
        for (first, count) in [(1, 3 * pages), (pages, 2 * pages), (2, 1), (pages - 1, 2)] {
            let segments = [segment(first * PAGE_SIZE, count)];
            for turns in [[true, true], [false, false], [true, false]] {
                let mut chunks = Chunks::of(&segments);
                let mut found = Vec::new();
                for from_front in turns.into_iter().cycle() {
                    let chunk = if from_front { chunks.take_first() } else { chunks.take_last() };
                    let Some(chunk) = chunk else { break };
                    assert_eq!(chunk.start / CHUNK, (chunk.end - 1) / CHUNK, "{chunk:?}");
                    found.push(chunk);
                }
                found.sort_by_key(|chunk| chunk.start);
                assert_eq!(found[0].start, first * PAGE_SIZE);
                assert_eq!(found.last().unwrap().end, (first + count) * PAGE_SIZE);
                assert!(found.windows(2).all(|pair| pair[0].end == pair[1].start), "{found:?}");
            }
        }
        assert!(Chunks::of(&[]).take_first().is_none() && Chunks::of(&[]).take_last().is_none());
    }

    #[test]
    fn a_chunk_has_the_parts_of_segments_that_lie_in_it() {
        let segments = [segment(0, 2), segment(2 * PAGE_SIZE, 4), segment(6 * PAGE_SIZE, 1)];
        let parts: Vec<_> = parts_of(&segments, &(PAGE_SIZE..4 * PAGE_SIZE)).collect();
        let page = PAGE_SIZE as u32;
        let part = |first: u64, at: u32, pages: u32| {
            let address = (1 << 40) + first * PAGE_SIZE;
            (3, Part { address, at, len: pages * page, process: 0, reserved: 0 })
        };
        assert_eq!(parts, [part(1, 0, 1), part(2, page, 2)]);
    }

    #[test]
    fn protections_become_segment_flags() {
        assert_eq!(program_flags(1), 4);
        assert_eq!(program_flags(3), 6);
        assert_eq!(program_flags(5), 5);
        assert_eq!(program_flags(0), 0);
    }

    #[test]
    fn long_runs_of_zeros_are_not_written() {
        let page = PAGE_SIZE as usize;
        let mut bytes = vec![0; 40 * page];
        for content in [page + 5, 2 * page, 5 * page + page - 1, 22 * page] {
            bytes[content] = 1;
        }
        let runs: Vec<Range<usize>> = runs_with_content(&bytes)
            .into_iter()
            .map(|run| run.start / page..run.end / page)
            .collect();
        assert_eq!(runs, [1..6, 22..23]);
        assert_eq!(runs_with_content(&bytes[6 * page..22 * page]), []);
    }
}
