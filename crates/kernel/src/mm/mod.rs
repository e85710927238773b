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
