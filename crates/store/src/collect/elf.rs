//! What an ELF file says about what it needs.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use object::elf;
use object::read::elf::{Dyn, FileHeader, ProgramHeader};
use object::{Endianness, ReadCache, ReadRef};
use rustix::fs::OFlags;

use super::CollectError;

/// The parts of an ELF file that decide what must be loaded with it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ElfInfo {
    /// `PT_INTERP`: the dynamic loader, for executables.
    pub interpreter: Option<Vec<u8>>,
    /// `DT_NEEDED`: names of libraries.
    pub needed: Vec<Vec<u8>>,
    /// `DT_RPATH`, not split nor expanded.
    pub rpath: Option<Vec<u8>>,
    /// `DT_RUNPATH`, not split nor expanded.
    pub runpath: Option<Vec<u8>>,
}

/// What the first bytes of a file say about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FileHead {
    /// An ELF file for this machine.
    Elf,
    /// An ELF file for another machine or of another class.
    ForeignElf,
    /// A script; the rest of the `#!` line.
    Script(Vec<u8>),
    /// Anything else.
    Other,
}

/// Looks at the first bytes of a file.
pub(super) fn file_head(path: &Path) -> Result<FileHead, CollectError> {
    let io = |source| CollectError::Io { path: path.to_owned(), source };
    let mut head = Vec::with_capacity(256);
    // The kernel reads 256 bytes too (`BINPRM_BUF_SIZE`).
    open(path).map_err(io)?.take(256).read_to_end(&mut head).map_err(io)?;
    if let Some(line) = head.strip_prefix(b"#!") {
        let end = line.iter().position(|&byte| byte == b'\n').unwrap_or(line.len());
        return Ok(FileHead::Script(line[..end].to_vec()));
    }
    if !head.starts_with(&elf::ELFMAG) {
        return Ok(FileHead::Other);
    }
    // e_ident[EI_CLASS], e_ident[EI_DATA], then e_machine at offset 18.
    let machine = elf::EM_X86_64.0.to_le_bytes();
    let ours = head.get(4) == Some(&elf::ELFCLASS64.0)
        && head.get(5) == Some(&elf::ELFDATA2LSB.0)
        && head.get(18..20) == Some(&machine[..]);
    Ok(if ours { FileHead::Elf } else { FileHead::ForeignElf })
}

/// Opens a file for reading. Whoever owns it may put a FIFO in its place, for whose
/// writer nobody waits.
fn open(path: &Path) -> io::Result<File> {
    let nonblocking = OFlags::NONBLOCK | OFlags::NOCTTY;
    File::options().read(true).custom_flags(nonblocking.bits() as i32).open(path)
}

/// Reads what an ELF file for this machine needs.
pub(super) fn read_elf(path: &Path) -> Result<ElfInfo, CollectError> {
    let file = open(path).map_err(|source| CollectError::Io { path: path.to_owned(), source })?;
    parse(&ReadCache::new(file))
        .map_err(|error| CollectError::BadElf { path: path.to_owned(), why: error.to_string() })
}

fn parse<'data, R: ReadRef<'data>>(data: R) -> object::read::Result<ElfInfo> {
    let header = elf::FileHeader64::<Endianness>::parse(data)?;
    let endian = header.endian()?;
    let segments = header.program_headers(endian, data)?;
    let mut info = ElfInfo::default();
    for segment in segments {
        if let Some(interpreter) = segment.interpreter(endian, data)? {
            info.interpreter = Some(interpreter.to_vec());
        }
    }
    let mut table = None;
    for segment in segments {
        table = table.or(segment.dynamic(endian, data)?);
    }
    let Some(table) = table else { return Ok(info) };
    // The string table is given by address; find the segment that it lies in.
    let value =
        |tag| table.iter().find(|entry| entry.d_tag(endian) == tag).map(|e| e.d_val(endian));
    let (Some(address), Some(size)) = (value(elf::DT_STRTAB), value(elf::DT_STRSZ)) else {
        return Ok(info);
    };
    // Only the table: the segment around it is most of the file.
    let strings = segments.iter().find_map(|segment| {
        let begins = segment.p_vaddr(endian);
        let within = address.checked_sub(begins)?;
        let is_inside = within.checked_add(size)? <= segment.p_filesz(endian);
        let is_loaded = segment.p_type(endian) == elf::PT_LOAD;
        let at = segment.p_offset(endian).checked_add(within)?;
        (is_loaded && is_inside).then(|| data.read_bytes_at(at, size).ok()).flatten()
    });
    let Some(strings) = strings else { return Ok(info) };
    let string = |offset: u64| -> Vec<u8> {
        let rest = strings.get(offset as usize..).unwrap_or(&[]);
        rest.split(|&byte| byte == 0).next().unwrap_or(&[]).to_vec()
    };
    for entry in table {
        let text = || string(entry.d_val(endian));
        match entry.d_tag(endian) {
            elf::DT_NULL => break,
            elf::DT_NEEDED => info.needed.push(text()),
            elf::DT_RPATH => info.rpath = Some(text()),
            elf::DT_RUNPATH => info.runpath = Some(text()),
            _ => {}
        }
    }
    Ok(info)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_its_own_executable() {
        let own = std::env::current_exe().unwrap();
        assert_eq!(file_head(&own).unwrap(), FileHead::Elf);
        let info = read_elf(&own).unwrap();
        assert!(info.interpreter.is_some_and(|path| path.starts_with(b"/")));
        assert!(info.needed.iter().any(|name| name.starts_with(b"libc.")), "{:?}", info.needed);
    }

    #[test]
    fn damaged_files_are_errors() {
        let own = std::env::current_exe().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("cut");
        std::fs::write(&path, &std::fs::read(own).unwrap()[..100]).unwrap();
        assert!(matches!(read_elf(&path), Err(CollectError::BadElf { .. })));
    }

    #[test]
    fn heads_are_told_apart() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let mut foreign = b"\x7fELF\x01\x01\x01".to_vec();
        foreign.resize(64, 0);
        for (content, expected) in [
            (&b"#!/bin/sh -e\necho"[..], FileHead::Script(b"/bin/sh -e".to_vec())),
            (b"", FileHead::Other),
            (b"text", FileHead::Other),
            (&foreign, FileHead::ForeignElf),
        ] {
            std::fs::write(&path, content).unwrap();
            assert_eq!(file_head(&path).unwrap(), expected);
        }
    }
}
