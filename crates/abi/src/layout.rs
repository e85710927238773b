//! Where things lie in the address space of a sandbox.
//!
//! Every address is fixed, so a frozen image is mapped back without touching a
//! pointer. The guest owns everything from [`GUEST_MIN`] to [`GUEST_MAX`]; the
//! kernel owns the rest.

/// First byte of the gate: the jump table and the trampolines of patched
/// system call sites. It lies in the low 2 GiB so that a 32-bit absolute
/// displacement reaches it, and every slot address has the form `0x0001_xxxx`:
/// its two upper bytes, left where a `syscall` instruction was, then decode as
/// `add %eax,(%rax)`, which faults for any system call number in `%rax`.
pub const GATE_BASE: u64 = 0x1_0000;
/// Bytes of the jump table (8-byte slots) at the start of the gate.
pub const GATE_TABLE_SIZE: u64 = 0x1_0000;
/// First byte of the trampolines.
pub const GATE_CODE_BASE: u64 = GATE_BASE + GATE_TABLE_SIZE;
/// Bytes of trampolines.
pub const GATE_CODE_SIZE: u64 = 0x8_0000;
/// End of the gate.
pub const GATE_END: u64 = GATE_CODE_BASE + GATE_CODE_SIZE;

/// Lowest address the guest may map.
pub const GUEST_MIN: u64 = 0x10_0000;
/// End of the guest's part of the address space.
pub const GUEST_MAX: u64 = 0x7dff_ffff_f000;

/// Where the kernel ELF is linked: text, rodata, data, bss.
pub const KERNEL_BASE: u64 = 0x7e00_0000_0000;
/// Upper bound of the kernel ELF.
pub const KERNEL_END: u64 = 0x7e00_1000_0000;

/// The kernel's heap: all small kernel objects. Saved in images.
pub const HEAP_BASE: u64 = 0x7e10_0000_0000;
/// Largest size of the kernel's heap, in bytes.
pub const HEAP_MAX: u64 = 1 << 36;
/// Bytes at the start of the heap that a copy holds in memory of its own from the
/// beginning and fills by reading: what nearly every copy writes lies there.
pub const HEAP_FRONT: u64 = 0x2_c000;

/// The bitmap page allocator's 4 MiB blocks: upper-layer files, pipes and
/// socket buffers. Saved in images.
pub const PAGES_BASE: u64 = 0x7e20_0000_0000;
/// Largest size of the page area, in bytes.
pub const PAGES_MAX: u64 = 1 << 38;

/// Offset of the heap in the file that holds the arena once several host
/// processes share it.
pub const ARENA_HEAP: u64 = 0;
/// Offset of the page area in that file.
pub const ARENA_PAGES: u64 = ARENA_HEAP + HEAP_MAX;
/// Offset of the kernel's own variables.
pub const ARENA_VARIABLES: u64 = ARENA_PAGES + PAGES_MAX;
/// Offset of the secrets.
pub const ARENA_SECRETS: u64 = ARENA_VARIABLES + (1 << 23);
/// Offset of the table of open blobs.
pub const ARENA_BLOBS: u64 = ARENA_VARIABLES + (1 << 24);
/// Offset of the table of host processes.
pub const ARENA_HOST_PROCESSES: u64 = ARENA_BLOBS + (1 << 28);
/// Offset of the shared anonymous memory of guest processes.
pub const ARENA_SHM: u64 = ARENA_HOST_PROCESSES + (1 << 28);
/// Bytes of the file; only what is touched takes memory.
pub const ARENA_FILE_SIZE: u64 = ARENA_SHM + SHM_MAX;

/// Where memory is put together before it is moved to its place.
pub const WINDOW_BASE: u64 = 0x7ea0_0000_0000;
/// End of the window.
pub const WINDOW_END: u64 = 0x7f00_0000_0000;

/// Shared anonymous memory of guest processes, by the offsets that name it.
/// Saved in images, and in use once several host processes share the arena.
pub const SHM_BASE: u64 = 0x7e60_0000_0000;
/// Largest size of all shared anonymous memory, in bytes.
pub const SHM_MAX: u64 = 1 << 37;

/// The per-boot area: vCPU blocks, signal stacks, idle stacks, message
/// buffers. Never in an image.
pub const BOOT_BASE: u64 = 0x7e80_0000_0000;
/// Largest size of the per-boot area, in bytes.
pub const BOOT_MAX: u64 = 1 << 32;

/// The rootfs index, mapped read-only.
pub const INDEX_BASE: u64 = 0x7e90_0000_0000;
/// Largest rootfs index that can be mapped, in bytes.
pub const INDEX_MAX: u64 = 1 << 32;

/// The mappings of an image that has more of them than fit a boot command, from
/// the image itself; only while it is thawed.
pub const MAPPINGS_BASE: u64 = 0x7e98_0000_0000;
/// Most bytes of such mappings, with the rest of their first and last page.
pub const MAPPINGS_MAX: u64 = 1 << 24;

/// What tells how long files of volumes are ([`crate::bind::LengthsPage`]), by the number of the
/// mount, in every host process for itself. Never in an image.
pub const LENGTHS_BASE: u64 = 0x7e9a_0000_0000;
/// The same of [`crate::bind::EndsPage`].
pub const ENDS_BASE: u64 = 0x7e9b_0000_0000;
/// Mounts that have a place there.
pub const LENGTHS_MOUNTS: usize = 64;

/// Parts of files of volumes that the kernel reads and writes, a mapping for each, in every host
/// process for itself. Never in an image.
pub const VOLUMES_BASE: u64 = 0x7e9c_0000_0000;
/// Bytes of one such part.
pub const VOLUME_PART: u64 = 1 << 28;
/// Most of them at a time.
pub const VOLUME_PARTS: usize = 64;

/// End of everything that Thaw maps. The host's own stack and vdso lie above:
/// Linux puts them within the last terabyte of the address space.
pub const LAYOUT_END: u64 = 0x7f00_0000_0000;

/// Host descriptor of the control socket in every sandbox process.
pub const CONTROL_FD: i32 = 3;
/// Host descriptor to which the kernel writes traces and panics.
pub const CONSOLE_FD: i32 = 4;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bind::{EndsPage, LengthsPage};

    /// Images contain absolute addresses: moving an area makes every stored
    /// image unusable, so it must come with a new image version.
    #[test]
    fn layout_is_part_of_the_image_format() {
        assert_eq!(crate::image::IMAGE_VERSION, 1);
        assert_eq!(GATE_BASE, 0x1_0000);
        assert_eq!(GATE_CODE_BASE, 0x2_0000);
        assert_eq!(GUEST_MIN, 0x10_0000);
        assert_eq!(GUEST_MAX, 0x7dff_ffff_f000);
        assert_eq!(KERNEL_BASE, 0x7e00_0000_0000);
        assert_eq!(HEAP_BASE, 0x7e10_0000_0000);
        assert_eq!(HEAP_FRONT, 0x2_c000);
        assert_eq!(PAGES_BASE, 0x7e20_0000_0000);
        assert_eq!(BOOT_BASE, 0x7e80_0000_0000);
        assert_eq!(INDEX_BASE, 0x7e90_0000_0000);
    }

    #[test]
    fn areas_do_not_overlap() {
        let areas = [
            (GATE_BASE, GATE_END),
            (GUEST_MIN, GUEST_MAX),
            (KERNEL_BASE, KERNEL_END),
            (HEAP_BASE, HEAP_BASE + HEAP_MAX),
            (PAGES_BASE, PAGES_BASE + PAGES_MAX),
            (SHM_BASE, SHM_BASE + SHM_MAX),
            (BOOT_BASE, BOOT_BASE + BOOT_MAX),
            (INDEX_BASE, INDEX_BASE + INDEX_MAX),
            (MAPPINGS_BASE, MAPPINGS_BASE + MAPPINGS_MAX),
            (LENGTHS_BASE, LENGTHS_BASE + (LENGTHS_MOUNTS * size_of::<LengthsPage>()) as u64),
            (ENDS_BASE, ENDS_BASE + (LENGTHS_MOUNTS * size_of::<EndsPage>()) as u64),
            (VOLUMES_BASE, VOLUMES_BASE + VOLUME_PART * VOLUME_PARTS as u64),
            (WINDOW_BASE, WINDOW_END),
            (LAYOUT_END, 1 << 47),
        ];
        for pair in areas.windows(2) {
            assert!(pair[0].0 < pair[0].1, "{pair:x?}");
            assert!(pair[0].1 <= pair[1].0, "{pair:x?}");
        }
    }
}
