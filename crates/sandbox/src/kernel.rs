//! The Thaw kernel that this library carries.

use std::sync::{Arc, OnceLock};

use object::LittleEndian;
use object::elf::{self, FileHeader64};
use object::read::elf::{FileHeader, ProgramHeader};
use thaw_abi::image::NOTE_OWNER;
use thaw_abi::protocol::{NOTE_PROTOCOL, PROTOCOL_OLDEST, PROTOCOL_VERSION};

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
    /// It is another one than was asked for.
    #[error("the kernel is another one than its name says; build the function anew")]
    NotThatBuild,
    /// It does not say how it talks to its host, or does so as this program does not.
    #[error(
        "the kernel build {} speaks version {} of the control protocol, and this version of Thaw \
         versions {PROTOCOL_OLDEST} to {PROTOCOL_VERSION}; use a version of Thaw between the two, \
         or build anew",
        short(build),
        version.map_or_else(|| "0".to_owned(), |version| version.to_string())
    )]
    Protocol {
        /// Its build id.
        build: [u8; 32],
        /// What it speaks; `None`: it does not say.
        version: Option<u32>,
    },
}

/// The beginning of a build id, for people.
fn short(build: &[u8; 32]) -> String {
    blake3::Hash::from_bytes(*build).to_hex()[..12].to_owned()
}

/// A kernel ELF and its build id.
#[derive(Clone, Debug)]
pub struct Kernel {
    elf: Elf,
    build_id: [u8; 32],
}

/// Bytes that are shared by all copies of a [`Kernel`].
#[derive(Clone)]
enum Elf {
    Embedded(&'static [u8]),
    Read(Arc<[u8]>),
}

impl std::fmt::Debug for Elf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Embedded(_) => "Embedded",
            Self::Read(_) => "Read",
        })
    }
}

impl Kernel {
    /// The kernel that this library carries.
    pub fn embedded() -> Result<Self, KernelError> {
        check(KERNEL_ELF)?;
        Ok(Self { elf: Elf::Embedded(KERNEL_ELF), build_id: kernel_build_id() })
    }

    /// A kernel from the bytes of an ELF file; for tests and kernel development.
    pub fn from_elf(elf: Vec<u8>) -> Result<Self, KernelError> {
        check(&elf)?;
        let build_id = *blake3::hash(&elf).as_bytes();
        Ok(Self { elf: Elf::Read(elf.into()), build_id })
    }

    /// The kernel of an older image, from a store: that build, which this library can talk to.
    ///
    /// # Errors
    /// The bytes are not that kernel's, or it speaks another version of the control protocol.
    pub fn of_build(elf: Vec<u8>, build: [u8; 32]) -> Result<Self, KernelError> {
        let whole = Self::from_elf(elf)?;
        if whole.build_id != build {
            return Err(KernelError::NotThatBuild);
        }
        whole.check_protocol()?;
        // Nobody asks for its symbols.
        Ok(Self { elf: Elf::Read(whole.loaded().into()), build_id: build })
    }

    /// The version of the control protocol that it speaks; `None`: it does not say.
    pub fn protocol(&self) -> Option<u32> {
        let header = FileHeader64::<LittleEndian>::parse(self.elf()).ok()?;
        let segments = header.program_headers(LittleEndian, self.elf()).ok()?;
        let notes =
            segments.iter().filter_map(|segment| segment.notes(LittleEndian, self.elf()).ok()?);
        for mut notes in notes {
            while let Ok(Some(note)) = notes.next() {
                if note.n_type(LittleEndian).0 == NOTE_PROTOCOL
                    && note.name_bytes().strip_prefix(NOTE_OWNER.as_slice()) == Some(&[])
                {
                    return note.desc().try_into().map(u32::from_le_bytes).ok();
                }
            }
        }
        None
    }

    fn check_protocol(&self) -> Result<(), KernelError> {
        let version = self.protocol();
        match version {
            Some(PROTOCOL_OLDEST..=PROTOCOL_VERSION) => Ok(()),
            _ => Err(KernelError::Protocol { build: self.build_id, version }),
        }
    }

    /// The bytes of the ELF file.
    pub fn elf(&self) -> &[u8] {
        match &self.elf {
            Elf::Embedded(bytes) => bytes,
            Elf::Read(bytes) => bytes,
        }
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
        let elf = self.elf();
        &elf[..end.map_or(elf.len(), |end| elf.len().min(end as usize))]
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

#[cfg(test)]
mod tests {
    use super::*;

    fn position(bytes: &[u8], wanted: &[u8]) -> usize {
        bytes.windows(wanted.len()).position(|window| window == wanted).unwrap()
    }

    /// The embedded kernel with another version of the protocol.
    fn speaking(version: u32) -> Vec<u8> {
        let mut elf = KERNEL_ELF.to_vec();
        let note = bytemuck::bytes_of(&thaw_abi::protocol::ProtocolNote::OWN);
        let at = position(&elf, note) + note.len();
        elf[at - 4..at].copy_from_slice(&version.to_le_bytes());
        elf
    }

    #[test]
    fn a_kernel_of_this_source_says_what_it_speaks() {
        let kernel = Kernel::embedded().unwrap();
        assert_eq!(kernel.protocol(), Some(PROTOCOL_VERSION));
        let stored = Kernel::of_build(KERNEL_ELF.to_vec(), kernel.build_id()).unwrap();
        assert_eq!(stored.build_id(), kernel.build_id());
        assert_eq!(stored.loaded(), kernel.loaded());
        // It says so without its symbols, too.
        assert_eq!(stored.protocol(), Some(PROTOCOL_VERSION));
    }

    #[test]
    fn a_kernel_that_speaks_otherwise_is_refused() {
        for version in [PROTOCOL_OLDEST - 1, PROTOCOL_VERSION + 1, u32::MAX] {
            let elf = speaking(version);
            let build = *blake3::hash(&elf).as_bytes();
            let refused = Kernel::of_build(elf, build).unwrap_err();
            assert_eq!(refused, KernelError::Protocol { build, version: Some(version) });
            assert!(refused.to_string().contains(&format!("version {version} of")), "{refused}");
        }
    }

    #[test]
    fn a_kernel_that_does_not_say_what_it_speaks_is_refused() {
        let mut elf = KERNEL_ELF.to_vec();
        let note = bytemuck::bytes_of(&thaw_abi::protocol::ProtocolNote::OWN);
        let at = position(&elf, note);
        // Another owner's note of that type.
        elf[at + 12] = b'X';
        let build = *blake3::hash(&elf).as_bytes();
        let refused = Kernel::of_build(elf, build).unwrap_err();
        assert_eq!(refused, KernelError::Protocol { build, version: None });
    }

    #[test]
    fn a_kernel_of_another_name_is_refused() {
        let refused = Kernel::of_build(KERNEL_ELF.to_vec(), [7; 32]).unwrap_err();
        assert_eq!(refused, KernelError::NotThatBuild);
        let refused = Kernel::of_build(b"no kernel".to_vec(), [7; 32]).unwrap_err();
        assert_eq!(refused, KernelError::NotAnExecutable);
    }
}
