//! The traits of `machine` can be implemented outside of the crate: they name nothing that only
//! the platform of host processes can make.
#![allow(unsafe_code)]

mod nowhere;

use std::sync::atomic::AtomicU64;

use nowhere::{NoSites, Nowhere, Registers};
use thaw_platform::machine::{Clocks, Platform, SystemCallSites, ThreadState};
use thaw_platform::registers::TrapFrame;
use thaw_platform::thread::KernelStack;

/// What the kernel does with a platform that it does not know.
fn uptime_ns<P: Platform>() -> u64 {
    P::monotonic_ns()
}

#[test]
fn a_platform_has_its_own_clocks() {
    assert_eq!(uptime_ns::<Nowhere>(), 1_000_000_002);
    assert_eq!(Nowhere::realtime_ns(), 2);
}

#[test]
fn a_platform_without_patching_leaves_every_address_as_it_is() {
    let sites = NoSites.copy();
    assert_eq!((sites.relocated(7), sites.as_seen(8), sites.restart_address(9)), (7, 8, 7));
    assert_eq!(sites.mapped_range().1, 0);
}

#[test]
fn a_thread_state_is_made_of_what_is_public() {
    static MEMORY: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
    // SAFETY: nothing uses the stack but by its address.
    let stack = unsafe { KernelStack::in_memory(MEMORY.as_ptr() as *mut u8, |_| ()) };
    let state = Registers::new(stack, TrapFrame::at(0x1000, 0x2000));
    state.needs_attention();
    assert!(state.is_attention_needed() && state.frame().rip() == 0x1000);
}
