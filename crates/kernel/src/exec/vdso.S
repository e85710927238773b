// The guest's vdso (vdso(7)): clocks without a system call.
//
// Every function calls the kernel through the gate, whose slots lie at fixed
// addresses (abi/src/layout.rs, platform/gate.rs). The kernel's function runs on
// the guest's own stack, touches no guest memory and returns seconds in %rax and
// nanoseconds in %rdx; the results are stored here, so that a bad pointer faults
// in the guest. What programs ask most, CLOCK_REALTIME and CLOCK_MONOTONIC, goes to
// the host's vdso at once; the offset of a copy's monotonic clock is added here.

        .set    GATE, 0x10000
        .set    SLOT_SYSCALL, GATE
        .set    SLOT_CLOCK, GATE + 8
        // Addresses of the address of the host's clock_gettime(2), and of the
        // seconds and nanoseconds that are added to its monotonic clock.
        .set    SLOT_HOST_CLOCK, GATE + 16
        .set    SLOT_OFFSET, GATE + 24
        // CLOCK_REALTIME is 0.
        .set    CLOCK_MONOTONIC, 1
        .set    NS_PER_S, 1000000000
        .set    SYS_clock_gettime, 228

        .text
        .globl  __vdso_clock_gettime, clock_gettime
        .type   __vdso_clock_gettime, @function
        .type   clock_gettime, @function
__vdso_clock_gettime:
clock_gettime:
        .cfi_startproc
        cmp     $CLOCK_MONOTONIC, %edi
        ja      7f
        mov     SLOT_HOST_CLOCK, %rax
        jb      8f
        mov     SLOT_OFFSET, %rcx
        mov     (%rcx), %rdx
        or      8(%rcx), %rdx
        jnz     9f
8:      jmp     *(%rax)
9:      push    %rsi
        .cfi_adjust_cfa_offset 8
        call    *(%rax)
        pop     %rsi
        .cfi_adjust_cfa_offset -8
        mov     SLOT_OFFSET, %rax
        mov     (%rsi), %rcx
        mov     8(%rsi), %rdx
        add     (%rax), %rcx
        add     8(%rax), %rdx
        cmp     $NS_PER_S, %rdx
        jb      6f
        sub     $NS_PER_S, %rdx
        inc     %rcx
6:      mov     %rcx, (%rsi)
        mov     %rdx, 8(%rsi)
        xor     %eax, %eax
        ret
7:      push    %rsi
        .cfi_adjust_cfa_offset 8
        push    %rdi
        .cfi_adjust_cfa_offset 8
        sub     $8, %rsp
        .cfi_adjust_cfa_offset 8
        call    *SLOT_CLOCK
        add     $8, %rsp
        .cfi_adjust_cfa_offset -8
        pop     %rdi
        .cfi_adjust_cfa_offset -8
        pop     %rsi
        .cfi_adjust_cfa_offset -8
        test    %rax, %rax
        js      1f
        mov     %rax, (%rsi)
        mov     %rdx, 8(%rsi)
        xor     %eax, %eax
        ret
        // A clock that the vdso does not read: the system call.
1:      mov     $SYS_clock_gettime, %eax
        lea     2f(%rip), %rcx
        jmp     *SLOT_SYSCALL
2:      ret
        .cfi_endproc
        .size   __vdso_clock_gettime, . - __vdso_clock_gettime

        .globl  __vdso_gettimeofday, gettimeofday
        .type   __vdso_gettimeofday, @function
        .type   gettimeofday, @function
__vdso_gettimeofday:
gettimeofday:
        .cfi_startproc
        push    %rsi
        .cfi_adjust_cfa_offset 8
        push    %rdi
        .cfi_adjust_cfa_offset 8
        sub     $8, %rsp
        .cfi_adjust_cfa_offset 8
        xor     %edi, %edi
        call    *SLOT_CLOCK
        add     $8, %rsp
        .cfi_adjust_cfa_offset -8
        pop     %rdi
        .cfi_adjust_cfa_offset -8
        pop     %rsi
        .cfi_adjust_cfa_offset -8
        test    %rdi, %rdi
        jz      3f
        mov     %rax, (%rdi)
        mov     %rdx, %rax
        xor     %edx, %edx
        mov     $1000, %ecx
        div     %rcx
        mov     %rax, 8(%rdi)
3:      test    %rsi, %rsi
        jz      4f
        movq    $0, (%rsi)
4:      xor     %eax, %eax
        ret
        .cfi_endproc
        .size   __vdso_gettimeofday, . - __vdso_gettimeofday

        .globl  __vdso_time, time
        .type   __vdso_time, @function
        .type   time, @function
__vdso_time:
time:
        .cfi_startproc
        push    %rdi
        .cfi_adjust_cfa_offset 8
        xor     %edi, %edi
        call    *SLOT_CLOCK
        pop     %rdi
        .cfi_adjust_cfa_offset -8
        test    %rdi, %rdi
        jz      5f
        mov     %rax, (%rdi)
5:      ret
        .cfi_endproc
        .size   __vdso_time, . - __vdso_time

        .globl  __vdso_getcpu, getcpu
        .type   __vdso_getcpu, @function
        .type   getcpu, @function
__vdso_getcpu:
getcpu:
        .cfi_startproc
        mov     $309, %eax
        syscall
        ret
        .cfi_endproc
        .size   __vdso_getcpu, . - __vdso_getcpu

        .section .note.GNU-stack, "", @progbits
