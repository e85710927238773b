//! Host calls: the few system calls that the kernel makes itself.
//!
//! Every one of them goes through the single `syscall` instruction of
//! `thaw_hostcall`. The filter ([`super::filter`]) lets system calls through
//! only from there, and checks the arguments of each.
#![allow(unsafe_code)]

use crate::errno::{Errno, Result};

core::arch::global_asm!(
    // u64 thaw_hostcall: rax = number, rdi rsi rdx r10 r8 r9 = arguments.
    ".pushsection .text.thaw_hostcall, \"ax\", @progbits",
    ".globl thaw_hostcall, thaw_hostcall_return",
    ".type thaw_hostcall, @function",
    "thaw_hostcall:",
    "syscall",
    "thaw_hostcall_return:",
    "ret",
    ".popsection",
);

unsafe extern "C" {
    /// Address right behind the `syscall` instruction: what seccomp sees as
    /// the instruction pointer of a host call.
    pub(super) static thaw_hostcall_return: u8;
}

/// Makes a host call.
///
/// # Safety
/// As for the system call in question.
#[inline]
pub(super) unsafe fn hostcall(number: u64, args: [u64; 6]) -> Result<u64> {
    let result: u64;
    // SAFETY: the caller's promise; the routine clobbers what the kernel's
    // system call convention clobbers, and uses no stack beyond its return
    // address.
    unsafe {
        core::arch::asm!(
            "call thaw_hostcall",
            inlateout("rax") number => result,
            in("rdi") args[0], in("rsi") args[1], in("rdx") args[2],
            in("r10") args[3], in("r8") args[4], in("r9") args[5],
            lateout("rcx") _, lateout("r11") _,
        );
    }
    Errno::from_return(result)
}

/// Numbers of the host calls that the kernel makes (x86-64 ABI).
#[allow(missing_docs)]
pub(super) mod nr {
    pub const READ: u64 = 0;
    pub const WRITE: u64 = 1;
    pub const CLOSE: u64 = 3;
    pub const MMAP: u64 = 9;
    pub const MPROTECT: u64 = 10;
    pub const MUNMAP: u64 = 11;
    pub const RT_SIGACTION: u64 = 13;
    pub const RT_SIGPROCMASK: u64 = 14;
    pub const PREAD64: u64 = 17;
    pub const MREMAP: u64 = 25;
    pub const MADVISE: u64 = 28;
    pub const SENDTO: u64 = 44;
    pub const RECVFROM: u64 = 45;
    pub const RECVMSG: u64 = 47;
    pub const SHUTDOWN: u64 = 48;
    pub const SETITIMER: u64 = 38;
    pub const DUP2: u64 = 33;
    pub const CLONE: u64 = 56;
    pub const SETPGID: u64 = 109;
    pub const SETRESUID: u64 = 117;
    pub const SETRESGID: u64 = 119;
    pub const CAPSET: u64 = 126;
    pub const EXIT: u64 = 60;
    pub const FUTEX: u64 = 202;
    pub const CLOCK_GETTIME: u64 = 228;
    pub const TGKILL: u64 = 234;
    pub const ARCH_PRCTL: u64 = 158;
    pub const EXIT_GROUP: u64 = 231;
    pub const PPOLL: u64 = 271;
    pub const PROCESS_MADVISE: u64 = 440;
    pub const SIGALTSTACK: u64 = 131;
    pub const SECCOMP: u64 = 317;
}
