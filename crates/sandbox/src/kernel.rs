//! The Thaw kernel that this library carries.

use std::borrow::Cow;
use std::sync::OnceLock;

use object::LittleEndian;
use object::elf::{self, FileHeader64};
use object::read::elf::{FileHeader, ProgramHeader};

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
        let headers = FileHeader64::<LittleEndian>::parse(self.elf())
            .and_then(|header| header.program_headers(LittleEndian, self.elf()));
        let end = headers
            .unwrap_or_default()
            .iter()
            .filter(|header| header.p_type(LittleEndian) == elf::PT_LOAD)
            .map(|header| header.file_range(LittleEndian))
            .map(|(offset, len)| offset.saturating_add(len))
            .max();
        &self.elf[..end.map_or(self.elf.len(), |end| self.elf.len().min(end as usize))]
    }

    /// BLAKE3 of the ELF file.
    pub fn build_id(&self) -> [u8; 32] {
        self.build_id
    }
}

fn check(bytes: &[u8]) -> Result<(), KernelError> {
    let is_executable = |header: &FileHeader64<LittleEndian>| {
        let (kind, machine) = (header.e_type(LittleEndian), header.e_machine(LittleEndian));
        header.is_supported() && kind == elf::ET_EXEC && machine == elf::EM_X86_64
    };
    match FileHeader64::parse(bytes) {
        Ok(header) if is_executable(header) => Ok(()),
        _ => Err(KernelError::NotAnExecutable),
    }
}
