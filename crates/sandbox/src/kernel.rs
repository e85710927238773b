//! The Thaw kernel that this library carries.

use std::borrow::Cow;
use std::sync::OnceLock;

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

    /// BLAKE3 of the ELF file.
    pub fn build_id(&self) -> [u8; 32] {
        self.build_id
    }
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
