//! Memory: the kernel's heap, the page allocator, address spaces.

pub mod elf_symbols;
pub mod heap;
pub mod lock;
pub mod pages;
pub mod shared;
pub mod shm;
pub mod space;
pub mod syscalls;
pub mod vma;

pub use space::{AddressSpace, MapRequest};

/// The protection of file-backed, executable, private memory that covers a
/// range of code: the only kind in which system call sites are patched.
pub fn code_protection(start: u64, end: u64) -> Option<u32> {
    let process = crate::task::current_process();
    process.mm().protection_of_code(start, end)
}

/// Start and end of the mapping of code around an address.
pub fn code_range(address: u64) -> Option<(u64, u64)> {
    let process = crate::task::current_process();
    let vma = process.mm().find(address)?;
    Some((vma.start, vma.end))
}
