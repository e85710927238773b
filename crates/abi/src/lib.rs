#![doc = include_str!("../README.md")]
#![no_std]
#![forbid(unsafe_code)]

pub mod bind;
pub mod control;
pub mod cpu;
pub mod extended;
pub mod filter;
pub mod freeze;
pub mod image;
pub mod layout;
pub mod network;
pub mod protocol;
pub mod remote;
pub mod rootfs;

/// Size of a page of memory, in bytes.
pub const PAGE_SIZE: u64 = 4096;

/// Rounds `value` up to the next page boundary; `None` on overflow.
pub const fn page_align_up(value: u64) -> Option<u64> {
    match value.checked_add(PAGE_SIZE - 1) {
        Some(sum) => Some(sum & !(PAGE_SIZE - 1)),
        None => None,
    }
}

/// Rounds `value` down to a page boundary.
pub const fn page_align_down(value: u64) -> u64 {
    value & !(PAGE_SIZE - 1)
}
