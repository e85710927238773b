//! The kernel as a freestanding program: entry point, panic handler, and the
//! memory routines that the compiler calls.
#![no_std]
#![no_main]
#![allow(unsafe_code)]

extern crate alloc;
extern crate thaw_kernel;

core::arch::global_asm!(
    ".globl _start",
    "_start:",
    "xor ebp, ebp",
    "mov rdi, rsp",
    "and rsp, -16",
    "call {start}",
    "ud2",
    start = sym thaw_kernel::boot::start,
);

/// By this a host knows whether it can talk to this build.
#[used]
#[unsafe(link_section = ".note.thaw")]
static PROTOCOL: thaw_abi::protocol::ProtocolNote = thaw_abi::protocol::ProtocolNote::OWN;

#[global_allocator]
static HEAP: thaw_kernel::mm::heap::KernelHeap = thaw_kernel::mm::heap::KernelHeap;

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    thaw_platform::panic::die(info)
}

// The precompiled `core` refers to these; with `panic = "abort"` nothing calls them.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}
#[unsafe(no_mangle)]
extern "C" fn _Unwind_Resume() -> ! {
    thaw_platform::panic::die_with("unwinding")
}

core::arch::global_asm!(
    ".globl memcpy, memmove, memset, memcmp, bcmp, strlen",
    "memcpy:",
    "mov rax, rdi",
    "mov rcx, rdx",
    "cmp rdx, 64",
    "ja 5f",
    // Short copies: `rep movsb` has a start-up cost of tens of cycles.
    "cmp rdx, 16",
    "jb 2f",
    "movups xmm0, [rsi]",
    "movups xmm1, [rsi + rdx - 16]",
    "cmp rdx, 32",
    "jbe 1f",
    "movups xmm2, [rsi + 16]",
    "movups xmm3, [rsi + rdx - 32]",
    "movups [rdi + 16], xmm2",
    "movups [rdi + rdx - 32], xmm3",
    "1: movups [rdi], xmm0",
    "movups [rdi + rdx - 16], xmm1",
    "ret",
    "2: cmp rdx, 8",
    "jb 3f",
    "mov r8, [rsi]",
    "mov r9, [rsi + rdx - 8]",
    "mov [rdi], r8",
    "mov [rdi + rdx - 8], r9",
    "ret",
    "3: test rdx, rdx",
    "jz 4f",
    "33: mov r8b, [rsi]",
    "mov [rdi], r8b",
    "inc rsi",
    "inc rdi",
    "dec rdx",
    "jnz 33b",
    "4: ret",
    "5: rep movsb",
    "ret",
    "memmove:",
    "mov rax, rdi",
    "sub rax, rsi",
    "cmp rax, rdx",
    "jae memcpy",
    // The ranges overlap with the destination behind: copy backwards.
    "mov rax, rdi",
    "mov rcx, rdx",
    "lea rdi, [rdi + rdx - 1]",
    "lea rsi, [rsi + rdx - 1]",
    "std",
    "rep movsb",
    "cld",
    "ret",
    "memset:",
    "mov r8, rdi",
    "mov rcx, rdx",
    "mov al, sil",
    "rep stosb",
    "mov rax, r8",
    "ret",
    "memcmp:",
    "bcmp:",
    "xor ecx, ecx",
    "6: cmp rcx, rdx",
    "je 7f",
    "movzx eax, byte ptr [rdi + rcx]",
    "movzx r8d, byte ptr [rsi + rcx]",
    "inc rcx",
    "sub eax, r8d",
    "jz 6b",
    "ret",
    "7: xor eax, eax",
    "ret",
    "strlen:",
    "xor eax, eax",
    "8: cmp byte ptr [rdi + rax], 0",
    "je 9f",
    "inc rax",
    "jmp 8b",
    "9: ret",
);
