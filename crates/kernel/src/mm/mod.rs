//! Memory: the kernel's heap, the page allocator, address spaces.

/// The memory of a guest process.
pub struct AddressSpace {}
