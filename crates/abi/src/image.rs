//! The snapshot image: an ELF core file (`ET_CORE`, x86-64) with Thaw notes.
//!
//! ```text
//! Elf64_Ehdr, Elf64_Phdr…          PT_NOTE first, then a PT_LOAD per stored or mapped range
//! notes                            "CORE": NT_PRSTATUS, NT_PRPSINFO, NT_AUXV, NT_FILE
//!                                  "THAW": NOTE_HEADER, NOTE_MAPPINGS, NOTE_BLOBS,
//!                                  NOTE_ANCESTORS
//! memory                           page-aligned; neighbours in memory are neighbours in the file;
//!                                  zero pages are holes
//! ```
//!
//! `readelf` and `gdb` read the first half of that; a boot reads the notes and
//! maps the memory.
//!
//! A *differential* image stores only how a copy of another image, its *parent*, differs from
//! that. The rest of its memory lies in its *ancestors*: the parent, the parent's parent and
//! so on to the *root*, which has none. The root has depth 0, each other image the depth of its
//! parent and one. So an image's number in the chain, its depth, is the same for all who
//! descend from it.

use bytemuck::{Pod, Zeroable};

/// Version of the image format and of the address-space layout.
pub const IMAGE_VERSION: u32 = 1;
/// Version of images that have ancestors, which older readers know nothing of.
pub const IMAGE_VERSION_DIFFERENTIAL: u32 = 2;
/// Owner name of Thaw's notes.
pub const NOTE_OWNER: &[u8; 5] = b"THAW\0";
/// Note type: an [`ImageHeader`]. Small numbers will not do: `gdb` looks at the
/// type only and not at the owner, and would take it for a thread's registers.
pub const NOTE_HEADER: u32 = 0x7468_0001;
/// Note type: an array of [`Mapping`], sorted by address.
pub const NOTE_MAPPINGS: u32 = 0x7468_0002;
/// Note type: an array of `u32` blob numbers, the image's I/O cache.
pub const NOTE_BLOBS: u32 = 0x7468_0003;
/// Note type: JSON about the function, for people; not read at boot.
pub const NOTE_ABOUT: u32 = 0x7468_0004;

/// Note type: an array of [`Ancestor`], those that mappings name, by rising depth; only in a
/// differential image.
pub const NOTE_ANCESTORS: u32 = 0x7468_0005;

/// Greatest depth of an image. A copy of such a one is stored whole.
pub const DEPTH_MAX: u32 = 64;
/// Number of the root among the blobs of a mapping: `ANCESTOR_FIRST + n` is the image file of
/// depth n. No rootfs index has so many blobs.
pub const ANCESTOR_FIRST: u32 = 0xffff_ff00;

/// The blob number of the ancestor of a depth.
pub const fn ancestor_number(depth: u32) -> u32 {
    ANCESTOR_FIRST + depth
}

/// The depth of the ancestor that a blob number names; `None`: it names a blob, or nothing.
pub fn ancestor_depth(number: u32) -> Option<u32> {
    number.checked_sub(ANCESTOR_FIRST).filter(|&depth| depth < DEPTH_MAX)
}

/// An image that another one refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Ancestor {
    /// Its depth, below that of the image that refers to it.
    pub depth: u32,
    /// Zero.
    pub reserved: u32,
    /// Bytes of its file.
    pub file_len: u64,
    /// Its checksum, as its header has it.
    pub checksum: [u8; 32],
    /// Its name, for whoever keeps images.
    pub name: [u8; 32],
}

/// What an image needs in order to be booted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ImageHeader {
    /// [`IMAGE_VERSION`], or [`IMAGE_VERSION_DIFFERENTIAL`] if it has a depth.
    pub version: u32,
    /// Images between this one and the root of its chain, that one included.
    pub depth: u32,
    /// Bytes of the whole file; a shorter file is truncated.
    pub file_len: u64,
    /// BLAKE3 of the kernel ELF that the image was frozen under. The image
    /// holds pointers into that kernel's text, so no other kernel can run it.
    pub kernel_build: [u8; 32],
    /// BLAKE3 of the rootfs index (of the file, header included).
    pub index: [u8; 32],
    /// CPU features that were visible to the frozen program, from `cpuid`:
    /// leaf 1 `ecx` and `edx`, leaf 7.0 `ebx`, `ecx` and `edx`, leaf
    /// 0xD.1 `eax`, `xcr0`, and the bytes of an `xsave` area.
    pub cpu_features: [u32; 8],
    /// BLAKE3 of the whole file with these 32 bytes zero.
    pub checksum: [u8; 32],
}

/// Where the bytes of a mapping come from: the image file itself.
pub const SOURCE_IMAGE: u32 = 0;
/// The bytes come from a blob of the rootfs, or from an ancestor of the image
/// ([`ancestor_number`]).
pub const SOURCE_BLOB: u32 = 1;
/// The bytes are zero.
pub const SOURCE_ZERO: u32 = 2;
/// The bytes come from the prefetch file of a boot command; never in an image.
pub const SOURCE_PREFETCH: u32 = 3;

/// The mapping is needed before the kernel can run: heap, pages, gate.
pub const MAPPING_KERNEL: u32 = 1 << 0;
/// Map now; without it, the kernel maps the range when it is first touched.
pub const MAPPING_EAGER: u32 = 1 << 1;
/// The guest mapped it `MAP_SHARED`.
pub const MAPPING_SHARED: u32 = 1 << 2;
/// The upper half of the flags is the number of the address space: 0 for that
/// of the first guest process and for what all share.
pub const MAPPING_SPACE_SHIFT: u32 = 16;
/// Most address spaces of an image.
pub const MAX_SPACES: u32 = 1024;

impl Mapping {
    /// Number of the address space.
    pub fn space(&self) -> u32 {
        self.flags >> MAPPING_SPACE_SHIFT
    }
}

/// One `mmap` call of a boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Mapping {
    /// First byte, page aligned.
    pub start: u64,
    /// Bytes, a multiple of the page size.
    pub len: u64,
    /// Offset in the image or the blob, page aligned.
    pub offset: u64,
    /// `SOURCE_*`.
    pub source: u32,
    /// Number of the blob, for [`SOURCE_BLOB`].
    pub blob: u32,
    /// Protection, `PROT_*` of mmap(2).
    pub prot: u32,
    /// `MAPPING_*`.
    pub flags: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_tripwire() {
        assert_eq!((IMAGE_VERSION, IMAGE_VERSION_DIFFERENTIAL), (1, 2));
        assert_eq!((ANCESTOR_FIRST, DEPTH_MAX, NOTE_ANCESTORS), (0xffff_ff00, 64, 0x7468_0005));
        assert_eq!(size_of::<Ancestor>(), 80);
        assert_eq!(size_of::<ImageHeader>(), 144);
        assert_eq!(core::mem::offset_of!(ImageHeader, checksum), 112);
        assert_eq!(size_of::<Mapping>(), 40);
        let notes = [NOTE_HEADER, NOTE_MAPPINGS, NOTE_BLOBS, NOTE_ABOUT];
        assert_eq!(notes, [0x7468_0001, 0x7468_0002, 0x7468_0003, 0x7468_0004]);
        let sources = [SOURCE_IMAGE, SOURCE_BLOB, SOURCE_ZERO, SOURCE_PREFETCH];
        assert_eq!(sources, [0, 1, 2, 3]);
        assert_eq!((MAPPING_KERNEL, MAPPING_EAGER, MAPPING_SHARED), (1, 2, 4));
    }

    #[test]
    fn numbers_of_ancestors_are_no_numbers_of_blobs() {
        assert_eq!(ancestor_depth(ancestor_number(0)), Some(0));
        assert_eq!(ancestor_depth(ancestor_number(DEPTH_MAX - 1)), Some(DEPTH_MAX - 1));
        for number in [0, ANCESTOR_FIRST - 1, ancestor_number(DEPTH_MAX), u32::MAX] {
            assert_eq!(ancestor_depth(number), None);
        }
    }
}
