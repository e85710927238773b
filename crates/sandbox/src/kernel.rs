//! The Thaw kernel that this library carries.

use std::borrow::Cow;
use std::sync::OnceLock;

use bytemuck::pod_read_unaligned;

use crate::image::elf::{FileHeader, PT_LOAD, ProgramHeader};

/// The kernel ELF that was built together with this library.
pub static KERNEL_ELF: &[u8] = include_bytes!(env!("THAW_KERNEL_ELF_PATH"));

/// BLAKE3 of [`KERNEL_ELF`]: what images frozen under it carry as their build id.
pub fn kernel_build_id() -> [u8; 32] {
    static ID: OnceLock<[u8; 32]> = OnceLock::new();
    *ID.get_or_init(|| *blake3::hash(KERNEL_ELF).as_bytes())
}

/// Why bytes cannot serve as a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// The bytes are not a static x86-64 executable.
    #[error(
        "the kernel is not a static x86-64 ELF executable; rebuild it with `cargo build -p thaw-kernel`"
    )]
    NotAnExecutable,
}

/// A kernel ELF and its build id.
#[derive(Clone, Debug)]
pub struct Kernel {
    elf: Cow<'static, [u8]>,
    build_id: [u8; 32],
}

impl Kernel {
    /// The kernel that this library carries.
    pub fn embedded() -> Result<Self, KernelError> {
        check(KERNEL_ELF)?;
        Ok(Self { elf: Cow::Borrowed(KERNEL_ELF), build_id: kernel_build_id() })
    }

    /// A kernel from the bytes of an ELF file; for tests and kernel development.
    pub fn from_elf(elf: Vec<u8>) -> Result<Self, KernelError> {
        check(&elf)?;
        let build_id = *blake3::hash(&elf).as_bytes();
        Ok(Self { elf: Cow::Owned(elf), build_id })
    }

    /// The bytes of the ELF file.
    pub fn elf(&self) -> &[u8] {
        &self.elf
    }

    /// The beginning of the ELF file: what is loaded to run it, without symbols and
    /// debugging information.
    pub fn loaded(&self) -> &[u8] {
        let end = program_headers(&self.elf)
            .filter(|header| header.kind == PT_LOAD)
            .map(|header| header.offset.saturating_add(header.filesz))
            .max();
        &self.elf[..end.map_or(self.elf.len(), |end| self.elf.len().min(end as usize))]
    }

    /// BLAKE3 of the ELF file.
    pub fn build_id(&self) -> [u8; 32] {
        self.build_id
    }
}

fn program_headers(elf: &[u8]) -> impl Iterator<Item = ProgramHeader> {
    let header = elf.get(..size_of::<FileHeader>()).map(pod_read_unaligned::<FileHeader>);
    let (offset, count) = header.map_or((0, 0), |h| (h.phoff as usize, usize::from(h.phnum)));
    elf.get(offset..)
        .unwrap_or_default()
        .chunks_exact(size_of::<ProgramHeader>())
        .take(count)
        .map(pod_read_unaligned)
}

fn check(elf: &[u8]) -> Result<(), KernelError> {
    const ET_EXEC: u16 = 2;
    const EM_X86_64: u16 = 62;
    let half = |at: usize| elf.get(at..at + 2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    let is_executable = elf.starts_with(b"\x7fELF\x02\x01")
        && half(16) == Some(ET_EXEC)
        && half(18) == Some(EM_X86_64);
    if is_executable { Ok(()) } else { Err(KernelError::NotAnExecutable) }
}
