//! The routines that touch guest memory, and files that may not be there. A fault in one of them is not
//! a bug: the handler ([`super::fault`]) knows them by their addresses, and goes on behind what faulted.
#![allow(unsafe_code)]

/// usize NAME(dst: rdi, src: rsi, len: rdx) -> bytes not copied.
/// A fault between NAME_begin and NAME_end resumes at NAME_fault; `rep movsb`
/// keeps the bytes left in rcx.
macro_rules! copy_routine {
    ($name:literal) => {
        core::arch::global_asm!(
            concat!(".globl ", $name, "_begin, ", $name, "_end, ", $name, "_fault, ", $name),
            concat!($name, ":"),
            "mov rcx, rdx",
            concat!($name, "_begin:"),
            "cmp rcx, 32",
            "ja 2f",
            "1: test rcx, rcx",
            concat!("jz ", $name, "_fault"),
            "mov al, [rsi]",
            "mov [rdi], al",
            "inc rsi",
            "inc rdi",
            "dec rcx",
            "jmp 1b",
            "2: rep movsb",
            concat!($name, "_end:"),
            concat!($name, "_fault:"),
            "mov rax, rcx",
            "ret",
        );
    };
}

copy_routine!("thaw_copy");
copy_routine!("thaw_copy_present");

core::arch::global_asm!(
    // u64 thaw_compare_exchange(word: rdi, expected: esi, new: edx) -> the old
    // value, or all ones after a fault.
    ".globl thaw_compare_exchange, thaw_exchange_begin, thaw_exchange_end, thaw_exchange_fault",
    "thaw_compare_exchange:",
    "mov eax, esi",
    "thaw_exchange_begin:",
    "lock cmpxchg dword ptr [rdi], edx",
    "thaw_exchange_end:",
    "ret",
    "thaw_exchange_fault:",
    "mov rax, -1",
    "ret",
);

core::arch::global_asm!(
    // u64 thaw_store(word: rdi, value: rsi) -> 0, or all ones after a fault.
    ".globl thaw_store, thaw_store_begin, thaw_store_end, thaw_store_fault",
    "thaw_store:",
    "xor eax, eax",
    "thaw_store_begin:",
    "mov [rdi], rsi",
    "thaw_store_end:",
    "ret",
    "thaw_store_fault:",
    "mov rax, -1",
    "ret",
    // u64 thaw_load(word: rdi, to: rsi) -> 0, or all ones after a fault.
    ".globl thaw_load, thaw_load_begin, thaw_load_end, thaw_load_fault",
    "thaw_load:",
    "xor eax, eax",
    "thaw_load_begin:",
    "mov rdx, [rdi]",
    "thaw_load_end:",
    "mov [rsi], rdx",
    "ret",
    "thaw_load_fault:",
    "mov rax, -1",
    "ret",
);

unsafe extern "C" {
    pub(super) fn thaw_store(word: *mut u64, value: u64) -> u64;
    static thaw_store_begin: u8;
    static thaw_store_end: u8;
    static thaw_store_fault: u8;
    pub(super) fn thaw_load(word: *const u64, to: *mut u64) -> u64;
    static thaw_load_begin: u8;
    static thaw_load_end: u8;
    static thaw_load_fault: u8;
    pub(super) fn thaw_compare_exchange(word: *mut u32, expected: u32, new: u32) -> u64;
    static thaw_exchange_begin: u8;
    static thaw_exchange_end: u8;
    static thaw_exchange_fault: u8;
    pub(super) fn thaw_copy(to: *mut u8, from: *const u8, len: usize) -> usize;
    static thaw_copy_begin: u8;
    static thaw_copy_end: u8;
    static thaw_copy_fault: u8;
    pub(super) fn thaw_copy_present(to: *mut u8, from: *const u8, len: usize) -> usize;
    static thaw_copy_present_begin: u8;
    static thaw_copy_present_end: u8;
    static thaw_copy_present_fault: u8;
}

/// What becomes of a fault in a routine that touches guest memory.
pub(super) struct FaultExit {
    /// Where the routine goes on if the fault stays.
    pub resume_at: u64,
    /// Whether a page of a file may be mapped so that it does not.
    pub may_page_in: bool,
}

/// If `rip` lies in a routine that touches guest memory: what becomes of a fault
/// there.
pub(super) fn fault_exit(rip: u64) -> Option<FaultExit> {
    let routines = [
        (&raw const thaw_copy_begin, &raw const thaw_copy_end, &raw const thaw_copy_fault, true),
        (
            &raw const thaw_exchange_begin,
            &raw const thaw_exchange_end,
            &raw const thaw_exchange_fault,
            true,
        ),
        (
            &raw const thaw_copy_present_begin,
            &raw const thaw_copy_present_end,
            &raw const thaw_copy_present_fault,
            false,
        ),
        (
            &raw const thaw_store_begin,
            &raw const thaw_store_end,
            &raw const thaw_store_fault,
            false,
        ),
        (&raw const thaw_load_begin, &raw const thaw_load_end, &raw const thaw_load_fault, false),
    ];
    routines
        .into_iter()
        .find(|&(begin, end, ..)| (begin as u64..end as u64).contains(&rip))
        .map(|(_, _, resume, may_page_in)| FaultExit { resume_at: resume as u64, may_page_in })
}
