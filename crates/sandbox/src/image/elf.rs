//! The ELF structures of a core file (elf(5), linux/elfcore.h, linux/elf.h).

use bytemuck::{Pod, Zeroable};

/// First bytes of an x86-64 ELF file: class 64, little endian, version 1, System V.
pub const IDENT: [u8; 16] = *b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0";
pub const ET_CORE: u16 = 4;
pub const EM_X86_64: u16 = 62;
pub const PT_LOAD: u32 = 1;
pub const PT_NOTE: u32 = 4;

/// Owner of the notes that debuggers read.
pub const CORE_OWNER: &[u8; 5] = b"CORE\0";
pub const NT_PRSTATUS: u32 = 1;
pub const NT_PRPSINFO: u32 = 3;
pub const NT_AUXV: u32 = 6;
pub const NT_FILE: u32 = 0x4649_4c45;

/// `Elf64_Ehdr`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct FileHeader {
    pub ident: [u8; 16],
    pub kind: u16,
    pub machine: u16,
    pub version: u32,
    pub entry: u64,
    pub phoff: u64,
    pub shoff: u64,
    pub flags: u32,
    pub ehsize: u16,
    pub phentsize: u16,
    pub phnum: u16,
    pub shentsize: u16,
    pub shnum: u16,
    pub shstrndx: u16,
}

/// `Elf64_Phdr`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct ProgramHeader {
    pub kind: u32,
    pub flags: u32,
    pub offset: u64,
    pub vaddr: u64,
    pub paddr: u64,
    pub filesz: u64,
    pub memsz: u64,
    pub align: u64,
}

/// `Elf64_Nhdr`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct NoteHeader {
    pub namesz: u32,
    pub descsz: u32,
    pub kind: u32,
}

/// `struct elf_prstatus`: a thread.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct ThreadStatus {
    pub signal_info: [u32; 3],
    pub current_signal: u16,
    pub padding: u16,
    pub pending_signals: u64,
    pub held_signals: u64,
    pub pid: u32,
    pub parent: u32,
    pub group: u32,
    pub session: u32,
    pub times: [u64; 8],
    pub registers: [u64; 27],
    pub fpu_valid: u32,
    pub end_padding: u32,
}

/// `struct elf_prpsinfo`: a process.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct ProcessInfo {
    pub state: u8,
    pub state_name: u8,
    pub zombie: u8,
    pub nice: u8,
    pub padding: u32,
    pub flags: u64,
    pub uid: u32,
    pub gid: u32,
    pub pid: u32,
    pub parent: u32,
    pub group: u32,
    pub session: u32,
    pub name: [u8; 16],
    pub arguments: [u8; 80],
}

/// Bytes that notes are padded to.
const NOTE_ALIGN: usize = 4;

/// Appends a note. `owner` ends with its terminator.
pub fn push_note(notes: &mut Vec<u8>, owner: &[u8], kind: u32, description: &[u8]) {
    let header = NoteHeader { namesz: owner.len() as u32, descsz: description.len() as u32, kind };
    notes.extend_from_slice(bytemuck::bytes_of(&header));
    for part in [owner, description] {
        notes.extend_from_slice(part);
        notes.resize(notes.len().next_multiple_of(NOTE_ALIGN), 0);
    }
}

/// A note as found in a file.
#[derive(Clone, Copy, Debug)]
pub struct Note<'a> {
    pub owner: &'a [u8],
    pub kind: u32,
    pub description: &'a [u8],
    /// Offset of the description in the notes.
    pub offset: usize,
}

/// Reads notes; `None` when they do not fit their lengths.
pub fn notes(bytes: &[u8]) -> Option<Vec<Note<'_>>> {
    let mut found = Vec::new();
    let mut at = 0_usize;
    while at < bytes.len() {
        let end = at.checked_add(size_of::<NoteHeader>())?;
        let header: NoteHeader = bytemuck::pod_read_unaligned(bytes.get(at..end)?);
        let owner_end = end.checked_add(header.namesz as usize)?;
        let owner = bytes.get(end..owner_end)?;
        let offset = owner_end.checked_next_multiple_of(NOTE_ALIGN)?;
        let description_end = offset.checked_add(header.descsz as usize)?;
        let description = bytes.get(offset..description_end)?;
        found.push(Note { owner, kind: header.kind, description, offset });
        at = description_end.checked_next_multiple_of(NOTE_ALIGN)?;
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What debuggers expect; the sizes are those of the C structures.
    #[test]
    fn format_tripwire() {
        assert_eq!(size_of::<FileHeader>(), 64);
        assert_eq!(size_of::<ProgramHeader>(), 56);
        assert_eq!(size_of::<NoteHeader>(), 12);
        assert_eq!(size_of::<ThreadStatus>(), 336);
        assert_eq!(std::mem::offset_of!(ThreadStatus, pid), 32);
        assert_eq!(std::mem::offset_of!(ThreadStatus, registers), 112);
        assert_eq!(size_of::<ProcessInfo>(), 136);
        assert_eq!(std::mem::offset_of!(ProcessInfo, pid), 24);
        assert_eq!(std::mem::offset_of!(ProcessInfo, name), 40);
    }

    #[test]
    fn notes_are_read_back() {
        let mut bytes = Vec::new();
        push_note(&mut bytes, b"THAW\0", 7, b"12345");
        push_note(&mut bytes, b"CORE\0", 8, b"");
        let found = notes(&bytes).unwrap();
        assert_eq!((found[0].owner, found[0].kind), (&b"THAW\0"[..], 7));
        assert_eq!(found[0].description, b"12345");
        assert_eq!(&bytes[found[0].offset..][..5], b"12345");
        assert_eq!((found[1].owner, found[1].kind), (&b"CORE\0"[..], 8));
        for len in 1..bytes.len() {
            if len != 28 {
                assert!(notes(&bytes[..len]).is_none_or(|found| found.len() < 2), "{len}");
            }
        }
    }
}
