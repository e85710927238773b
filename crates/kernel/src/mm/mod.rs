//! Memory: the kernel's heap, the page allocator, address spaces.

pub mod absent;
pub mod arena;
pub mod backing;
pub mod code;
pub mod elf_symbols;
pub mod file_parts;
pub mod force;
pub mod heap;
pub mod host_mapping;
pub mod image;
pub mod lazy;
pub mod limits;
pub mod pages;
pub mod populate;
pub mod program_break;
pub mod provenance;
pub mod remap;
pub mod shared;
pub mod shm;
pub mod space;
pub mod swap;
pub mod vma;

pub use space::{AddressSpace, MapRequest};
