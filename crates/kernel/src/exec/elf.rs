//! ELF objects: reading headers and mapping segments (elf(5), System V ABI).

use alloc::sync::Arc;
use alloc::vec::Vec;

use bytemuck::{Pod, Zeroable};
use thaw_abi::{page_align_down, page_align_up};

use super::read_exact;
use crate::errno::{Errno, Result};
use crate::fs::file::OpenFile;
use crate::mm::backing::FileBacking;
use crate::mm::elf_symbols::{PT_LOAD, ProgramHeader};
use crate::mm::space::{MapRequest, Placement};
use crate::mm::vma::VmaFlags;
use crate::platform::machine::{PROT_EXEC, PROT_READ, PROT_WRITE};
use crate::platform::user::UserAddress;
use crate::task::Process;

/// `Elf64_Ehdr`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct FileHeader {
    ident: [u8; 16],
    kind: u16,
    machine: u16,
    version: u32,
    entry: u64,
    program_headers: u64,
    section_headers: u64,
    flags: u32,
    header_size: u16,
    program_header_size: u16,
    program_header_count: u16,
    section_header_size: u16,
    section_header_count: u16,
    section_names: u16,
}

const ET_EXEC: u16 = 2;
const ET_DYN: u16 = 3;
const EM_X86_64: u16 = 62;
const PT_INTERP: u32 = 3;
const PT_GNU_STACK: u32 = 0x6474_e551;
/// Position-independent programs are loaded here, as Linux does
/// (`ELF_ET_DYN_BASE` is two thirds of the address space), minus randomness.
const PIE_BASE: u64 = 0x5555_5555_4000;

/// What the object is loaded as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The program itself.
    Program,
    /// Its dynamic linker.
    Interpreter,
}

/// A parsed object.
pub struct Object {
    header: FileHeader,
    segments: Vec<ProgramHeader>,
    /// Path of the dynamic linker.
    pub interpreter: Option<Vec<u8>>,
    /// Whether the stack may be executable.
    pub executable_stack: bool,
}

/// Where an object has been mapped.
pub struct Loaded {
    /// Difference between addresses in memory and in the object.
    pub base: u64,
    /// First instruction.
    pub entry: u64,
    /// Program headers in memory.
    pub program_headers: u64,
    /// Number of program headers.
    pub program_header_count: u64,
    /// End of the last segment.
    pub end: u64,
    /// Whether the stack is to be executable.
    pub executable_stack: bool,
}

impl Object {
    /// Reads and checks the headers of a file; `ENOEXEC` if it is not a program
    /// for this machine.
    pub fn read(file: &OpenFile) -> Result<Self> {
        let bytes = read_exact(file, 0, size_of::<FileHeader>())?;
        let header: FileHeader = bytemuck::pod_read_unaligned(&bytes);
        // 64-bit, little-endian.
        let usable = header.ident[..6] == [0x7f, b'E', b'L', b'F', 2, 1]
            && matches!(header.kind, ET_EXEC | ET_DYN)
            && header.machine == EM_X86_64
            && header.program_header_size as usize == size_of::<ProgramHeader>()
            && (1..=1024).contains(&header.program_header_count);
        if !usable {
            return Err(Errno::ENOEXEC);
        }
        let len = header.program_header_count as usize * size_of::<ProgramHeader>();
        let bytes = read_exact(file, header.program_headers, len)?;
        let segments: Vec<ProgramHeader> = bytes
            .chunks_exact(size_of::<ProgramHeader>())
            .map(bytemuck::pod_read_unaligned)
            .collect();
        let interpreter = match segments.iter().find(|segment| segment.kind == PT_INTERP) {
            Some(segment) if segment.file_size > 4096 || segment.file_size < 2 => {
                return Err(Errno::ENOEXEC);
            }
            Some(segment) => {
                let mut path = read_exact(file, segment.offset, segment.file_size as usize)?;
                if path.pop() != Some(0) {
                    return Err(Errno::ENOEXEC);
                }
                Some(path)
            }
            None => None,
        };
        let executable_stack = segments
            .iter()
            .find(|segment| segment.kind == PT_GNU_STACK)
            .is_some_and(|segment| segment.flags & 1 != 0);
        Ok(Self { header, segments, interpreter, executable_stack })
    }

    /// First and last address of the segments, page aligned.
    fn extent(&self) -> Result<(u64, u64)> {
        let loads = || self.segments.iter().filter(|segment| segment.kind == PT_LOAD);
        let start =
            loads().map(|segment| page_align_down(segment.address)).min().ok_or(Errno::ENOEXEC)?;
        let mut end = 0;
        for segment in loads() {
            let segment_end =
                segment.address.checked_add(segment.memory_size).and_then(page_align_up);
            end = end.max(segment_end.ok_or(Errno::ENOEXEC)?);
            if segment.file_size > segment.memory_size
                || segment.offset.checked_add(segment.file_size).is_none()
            {
                return Err(Errno::ENOEXEC);
            }
        }
        if end <= start { Err(Errno::ENOEXEC) } else { Ok((start, end)) }
    }

    /// Maps all segments.
    pub fn map(&self, process: &Process, file: &Arc<OpenFile>, role: Role) -> Result<Loaded> {
        let (start, end) = self.extent()?;
        let len = end - start;
        // Reserve the whole extent first, so that segments keep their distance.
        let placement = match (self.header.kind, role) {
            (ET_EXEC, _) => Placement::FixedNoReplace(start),
            (_, Role::Program) => {
                Placement::Hint(PIE_BASE + (process.random_bits(0xfff_ffff) << 12))
            }
            (_, Role::Interpreter) => Placement::Hint(0),
        };
        let reservation =
            MapRequest { placement, len, prot: 0, flags: VmaFlags::empty(), file: None, offset: 0 };
        let at = process.mm().map(reservation)?;
        let base = at.wrapping_sub(start);
        process.mm().unmap(at, len)?;

        let stat = file.file.stat()?;
        let backing = Arc::new(FileBacking {
            source: file.file.mmap_source()?,
            path: file.display_path().into(),
            device: stat.dev,
            inode: stat.ino,
            writable: false,
            holder: file.holder(),
        });
        for segment in self
            .segments
            .iter()
            .filter(|segment| segment.kind == PT_LOAD && segment.memory_size > 0)
        {
            map_segment(process, &backing, segment, base)?;
        }
        let program_headers = self
            .segments
            .iter()
            .find(|s| {
                s.kind == PT_LOAD
                    && s.offset <= self.header.program_headers
                    && self.header.program_headers < s.offset.saturating_add(s.file_size)
            })
            .map_or(0, |s| {
                base.wrapping_add(s.address).wrapping_add(self.header.program_headers - s.offset)
            });
        Ok(Loaded {
            base,
            entry: base.wrapping_add(self.header.entry),
            program_headers,
            program_header_count: self.header.program_header_count as u64,
            end: base.wrapping_add(end),
            executable_stack: self.executable_stack,
        })
    }
}

fn map_segment(
    process: &Process,
    backing: &Arc<FileBacking>,
    segment: &ProgramHeader,
    base: u64,
) -> Result<()> {
    let mut prot = 0;
    for (flag, bit) in [(4, PROT_READ), (2, PROT_WRITE), (1, PROT_EXEC)] {
        if segment.flags & flag != 0 {
            prot |= bit;
        }
    }
    let address = base.wrapping_add(segment.address);
    let start = page_align_down(address);
    let file_end = address + segment.file_size;
    let file_pages_end = page_align_up(file_end).ok_or(Errno::ENOEXEC)?;
    let end = page_align_up(address + segment.memory_size).ok_or(Errno::ENOEXEC)?;
    if segment.file_size > 0 {
        let offset = segment.offset.checked_sub(address - start).ok_or(Errno::ENOEXEC)?;
        if offset & 4095 != 0 {
            return Err(Errno::ENOEXEC);
        }
        process.mm().map(MapRequest {
            placement: Placement::Fixed(start),
            len: file_pages_end - start,
            prot,
            flags: VmaFlags::empty(),
            file: Some(backing.clone()),
            offset,
        })?;
        // The rest of the last page belongs to the program's zeroed data.
        if prot & PROT_WRITE != 0 && file_end < file_pages_end {
            UserAddress(file_end).write_zeros((file_pages_end - file_end) as usize)?;
        }
    }
    let zero_start = if segment.file_size > 0 { file_pages_end } else { start };
    if end > zero_start {
        process.mm().map(MapRequest {
            placement: Placement::Fixed(zero_start),
            len: end - zero_start,
            prot,
            flags: VmaFlags::empty(),
            file: None,
            offset: 0,
        })?;
    }
    Ok(())
}
