//! The `%fs` segment: thread-local storage of the guest.
#![allow(unsafe_code)]

/// Base of `%fs` of the running thread.
pub fn fs_base() -> u64 {
    let base: u64;
    // SAFETY: FSGSBASE is a requirement, checked by `thaw doctor`.
    unsafe {
        core::arch::asm!("rdfsbase {}", out(reg) base, options(nostack, preserves_flags, nomem))
    };
    base
}

/// Sets the base of `%fs` of the running thread.
pub fn set_fs_base(base: u64) {
    // SAFETY: as above; the kernel itself does not use `%fs`. Callers pass
    // canonical addresses.
    unsafe { core::arch::asm!("wrfsbase {}", in(reg) base, options(nostack, preserves_flags)) };
}
