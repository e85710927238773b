/* The ways into the kernel: system call instructions in many shapes, each
 * executed often (so that a site is seen, rewritten and used again), with every
 * register, the flags, the red zone and the vector registers checked. */
#include "guest.h"
#include <sys/mman.h>


extern long door_mov_eax(void), door_mov_rax(void), door_register(long), door_xor(void),
    door_far(void), door_shared(long), door_mid(long), door_two(void), door_or(void);

/* Each shape as a function of its own; getppid is 110, read is 0. */
__asm__(".text\n"
        "door_mov_eax: mov $110, %eax\n syscall\n ret\n"
        "door_mov_rax: mov $110, %rax\n syscall\n ret\n" /* as Go emits it */
        "door_register: mov %edi, %eax\n syscall\n ret\n"
        "door_xor: mov $-1, %edi\n xor %esi, %esi\n xor %edx, %edx\n xor %eax, %eax\n syscall\n ret\n"
        "door_far: mov $110, %eax\n xor %edi, %edi\n xor %esi, %esi\n nop\n syscall\n ret\n"
        /* a jump to the instruction itself, with another number in rax */
        "door_shared: mov %rdi, %rax\n test %rdi, %rdi\n jns 1f\n mov $110, %eax\n 1: syscall\n ret\n"
        /* a number at a site, then a jump to its syscall instruction only */
        "door_mid: cmp $0, %rdi\n jl 2f\n mov %rdi, %rax\n jmp 3f\n 2: mov $110, %eax\n 3: syscall\n ret\n"
        "door_two: mov $110, %eax\n syscall\n mov $110, %eax\n syscall\n ret\n"
        "door_or: or $-1, %rax\n xor $-111, %rax\n syscall\n ret\n");

/* Fills all registers, calls, and reports which of them have changed. */
static uint64_t changed(long number, long *result)
{
    uint64_t before[12], after[12], difference = 0;
    long got;
    for (int i = 0; i < 12; i++)
        before[i] = 0x1111111111111111u * (uint64_t)(i + 1);
    __asm__ volatile(
        "push %%rbp\n push %%rbx\n push %%r12\n push %%r13\n push %%r14\n push %%r15\n"
        "push %2\n push %3\n"
        "mov %1, %%rax\n mov 8(%%rsp), %%r11\n"
        "mov 0(%%r11), %%rbx\n mov 8(%%r11), %%rdx\n mov 16(%%r11), %%rsi\n mov 24(%%r11), %%rdi\n"
        "mov 32(%%r11), %%rbp\n mov 40(%%r11), %%r8\n mov 48(%%r11), %%r9\n mov 56(%%r11), %%r10\n"
        "mov 64(%%r11), %%r12\n mov 72(%%r11), %%r13\n mov 80(%%r11), %%r14\n mov 88(%%r11), %%r15\n"
        "syscall\n"
        "mov 0(%%rsp), %%r11\n"
        "mov %%rbx, 0(%%r11)\n mov %%rdx, 8(%%r11)\n mov %%rsi, 16(%%r11)\n mov %%rdi, 24(%%r11)\n"
        "mov %%rbp, 32(%%r11)\n mov %%r8, 40(%%r11)\n mov %%r9, 48(%%r11)\n mov %%r10, 56(%%r11)\n"
        "mov %%r12, 64(%%r11)\n mov %%r13, 72(%%r11)\n mov %%r14, 80(%%r11)\n mov %%r15, 88(%%r11)\n"
        "add $16, %%rsp\n"
        "pop %%r15\n pop %%r14\n pop %%r13\n pop %%r12\n pop %%rbx\n pop %%rbp\n"
        : "=&a"(got)
        : "c"(number), "S"(before), "D"(after)
        : "rdx", "r8", "r9", "r10", "r11", "memory", "cc");
    *result = got;
    for (int i = 0; i < 12; i++)
        if (before[i] != after[i])
            difference |= 1u << i;
    return difference;
}

/* A leaf function that keeps a value in the red zone across a system call. */
static bool red_zone_survives(void)
{
    long kept;
    __asm__ volatile("movq $0x5a5a, -8(%%rsp)\n movq $0x6b6b, -128(%%rsp)\n movq $0x7c7c, -64(%%rsp)\n"
                     "mov $110, %%eax\n syscall\n"
                     "movq -8(%%rsp), %0\n xorq -128(%%rsp), %0\n xorq -64(%%rsp), %0"
                     : "=&r"(kept)::"rax", "rcx", "r11", "memory");
    return kept == (0x5a5a ^ 0x6b6b ^ 0x7c7c);
}

static bool flags_survive(void)
{
    uint64_t set, clear;
    __asm__ volatile("stc\n mov $110, %%eax\n syscall\n pushf\n pop %0\n"
                     "clc\n mov $110, %%eax\n syscall\n pushf\n pop %1"
                     : "=&r"(set), "=&r"(clear)::"rax", "rcx", "r11", "memory", "cc");
    return (set & 1) == 1 && (clear & 1) == 0;
}

static bool direction_flag_survives(void)
{
    uint64_t flags;
    __asm__ volatile("std\n mov $110, %%eax\n syscall\n pushf\n pop %0\n cld"
                     : "=&r"(flags)::"rax", "rcx", "r11", "memory", "cc");
    return flags >> 10 & 1;
}

static bool vectors_survive(void)
{
    uint64_t in[32], out[32];
    for (int i = 0; i < 32; i++)
        in[i] = 0x0102030405060708u * (uint64_t)(i + 1);
#define LOAD(n) "movdqu " #n "*16(%0), %%xmm" #n "\n"
#define STORE(n) "movdqu %%xmm" #n ", " #n "*16(%1)\n"
#define EACH(f) f(0) f(1) f(2) f(3) f(4) f(5) f(6) f(7) f(8) f(9) f(10) f(11) f(12) f(13) f(14) f(15)
    __asm__ volatile(EACH(LOAD) "mov $110, %%eax\n syscall\n" EACH(STORE)::"r"(in), "r"(out)
                     : "rax", "rcx", "r11", "memory", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5",
                       "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
    return !memcmp(in, out, sizeof in);
}

__attribute__((target("avx"))) static bool wide_vectors_survive(void)
{
    uint64_t in[4] = {1, 2, 0xaaaa5555aaaa5555, 0x123456789abcdef0}, low[4], high[4];
    __asm__ volatile("vmovdqu (%0), %%ymm5\n vmovdqu (%0), %%ymm15\n mov $110, %%eax\n syscall\n"
                     "vmovdqu %%ymm5, (%1)\n vmovdqu %%ymm15, (%2)\n vzeroupper" ::"r"(in), "r"(low), "r"(high)
                     : "rax", "rcx", "r11", "memory", "xmm5", "xmm15");
    return !memcmp(in, low, sizeof in) && !memcmp(in, high, sizeof in);
}

static bool mxcsr_survives(void)
{
    unsigned strange = 0x7fc0, kept = 0, usual = 0x1f80;
    unsigned short control = 0x0e7f, kept_control = 0, usual_control = 0x037f;
    __asm__ volatile("ldmxcsr %2\n fldcw %3\n mov $110, %%eax\n syscall\n stmxcsr %0\n fstcw %1\n ldmxcsr %4\n fldcw %5"
                     : "=m"(kept), "=m"(kept_control)
                     : "m"(strange), "m"(control), "m"(usual), "m"(usual_control)
                     : "rax", "rcx", "r11", "memory");
    return kept == strange && kept_control == control;
}

int main(void)
{
    long parent = getppid();

    PART("shapes, called often");
    int wrong[9] = {0};
    for (int i = 0; i < 1000; i++) {
        wrong[0] += door_mov_eax() != parent;
        wrong[1] += door_mov_rax() != parent;
        wrong[2] += door_register(110) != parent;
        wrong[3] += door_xor() != -EBADF;
        wrong[4] += door_far() != parent;
        wrong[5] += door_shared(i % 3 ? -1 : 39) != (i % 3 ? parent : getpid());
        wrong[6] += door_mid(i % 2 ? -1 : 39) != (i % 2 ? parent : getpid());
        wrong[7] += door_two() != parent;
        wrong[8] += door_or() != parent;
    }
    for (int i = 0; i < 9; i++)
        say("shape %d wrong %d\n", i, wrong[i]);
    say("unknown number at a shared site %d %d\n", door_shared(999) == -ENOSYS, door_register(-5) == -ENOSYS);

    PART("what survives");
    for (int i = 0; i < 3; i++) {
        long result;
        say("registers changed: %lx", (unsigned long)changed(110, &result));
        say(", result %s\n", result == parent ? "right" : "wrong");
    }
    bool good = true;
    for (int i = 0; i < 100; i++)
        good &= red_zone_survives();
    say("red zone %d\n", good);
    good = true;
    for (int i = 0; i < 100; i++)
        good &= flags_survive();
    say("flags %d\n", good);
    good = true;
    for (int i = 0; i < 100; i++)
        good &= direction_flag_survives();
    say("direction flag %d\n", good);
    good = true;
    for (int i = 0; i < 100; i++)
        good &= vectors_survive();
    say("vectors %d\n", good);
    good = true;
    if (__builtin_cpu_supports("avx"))
        for (int i = 0; i < 100; i++)
            good &= wide_vectors_survive();
    say("wide vectors %d\n", good);
    good = true;
    for (int i = 0; i < 100; i++)
        good &= mxcsr_survives();
    say("floating point control %d\n", good);
    good = true;

    PART("code that is made and changed at run time");
    unsigned char *code = mmap(NULL, 8192, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    static const unsigned char getppid_code[] = {0xb8, 110, 0, 0, 0, 0x0f, 0x05, 0xc3};
    static const unsigned char getpid_code[] = {0xb8, 39, 0, 0, 0, 0x0f, 0x05, 0xc3};
    good = true;
    for (int i = 0; i < 50; i++) {
        memcpy(code, i % 2 ? getppid_code : getpid_code, 8);
        for (int n = 0; n < 3; n++)
            good &= ((long (*)(void))code)() == (i % 2 ? parent : getpid());
    }
    say("rewritten code %d\n", good);
    memcpy(code + 4096 - 6, getppid_code, 8); /* the site straddles two pages */
    for (int n = 0; n < 10; n++)
        good &= ((long (*)(void))(code + 4096 - 6))() == parent;
    say("straddling code %d\n", good);
    memcpy(code, getppid_code, 8);
    MUST(mprotect(code, 4096, PROT_READ | PROT_EXEC));
    for (int n = 0; n < 10; n++)
        good &= ((long (*)(void))code)() == parent;
    say("read-only code %d\n", good);
    MUST(mprotect(code, 4096, PROT_EXEC));
    for (int n = 0; n < 10; n++)
        good &= ((long (*)(void))code)() == parent;
    say("execute-only code %d\n", good);


    return 0;
}
