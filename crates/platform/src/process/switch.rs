//! Switching kernel stacks.
#![allow(unsafe_code)]

core::arch::global_asm!(
    // thaw_switch(rdi: *mut u64 where to save this stack pointer, rsi: the other one)
    ".globl thaw_switch",
    "thaw_switch:",
    "push rbp",
    "push rbx",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "mov [rdi], rsp",
    "mov rsp, rsi",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbx",
    "pop rbp",
    "ret",
);

unsafe extern "C" {
    /// Saves the running context in `*save` and goes on with `next`, which an
    /// earlier switch saved or [`prepare`] made.
    ///
    /// # Safety
    /// `next` must be such a stack pointer, used once.
    pub fn thaw_switch(save: *mut u64, next: u64);
}

/// Makes a context that begins at `entry` with the stack pointer `top`.
///
/// # Safety
/// The 56 bytes below `top` must be writable and unused.
pub unsafe fn prepare(top: u64, entry: u64) -> u64 {
    let saved = (top - 56) as *mut u64;
    for i in 0..6 {
        // SAFETY: the caller's promise.
        unsafe { saved.add(i).write(0) };
    }
    // SAFETY: as above; this is the return address.
    unsafe { saved.add(6).write(entry) };
    saved as u64
}
