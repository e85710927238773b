/* Synchronous signals: siginfo of SIGSEGV, SIGFPE, SIGILL, SIGTRAP, SIGBUS; the
 * ucontext that a handler may change; alternate stacks; leaving by siglongjmp;
 * vector registers across a handler. */
#include "guest.h"
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

static sigjmp_buf back;
static volatile int skip;
static volatile sig_atomic_t on_other_stack;
static char other_stack[65536];

static void report(int signal, siginfo_t *info, void *context)
{
    ucontext_t *u = context;
    greg_t *registers = u->uc_mcontext.gregs;
    say("%s code %d errno %d trap %lld", sigabbrev_np(signal), info->si_code, info->si_errno,
        (long long)registers[REG_TRAPNO]);
    if (signal == SIGFPE || signal == SIGILL)
        say(" address is rip: %d", info->si_addr == (void *)registers[REG_RIP]);
    if (signal == SIGSEGV && registers[REG_TRAPNO] == 14)
        say(" cr2 matches: %d error %llx", info->si_addr == (void *)registers[REG_CR2],
            (long long)registers[REG_ERR] & 0x17);
    say("\n");
    char here;
    on_other_stack = &here >= other_stack && &here < other_stack + sizeof other_stack;
    registers[REG_RIP] += skip;
}

static void jumps(int signal)
{
    (void)signal;
    siglongjmp(back, 5);
}

static void clobbers(int signal)
{
    (void)signal;
    __asm__ volatile("pcmpeqd %%xmm0, %%xmm0; pcmpeqd %%xmm7, %%xmm7; pcmpeqd %%xmm15, %%xmm15"
                     ::: "xmm0", "xmm7", "xmm15");
}

static void edits(int signal, siginfo_t *info, void *context)
{
    (void)signal, (void)info;
    ucontext_t *u = context;
    u->uc_mcontext.gregs[REG_RBX] = 0x1234;
    u->uc_mcontext.gregs[REG_R12] = 0x5678;
    u->uc_mcontext.fpregs->_xmm[3].element[0] = 77;
    sigaddset(&u->uc_sigmask, SIGHUP);
}

static void install(int signal, void (*handler)(int, siginfo_t *, void *), int flags)
{
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | flags};
    MUST(sigaction(signal, &action, NULL));
}

int main(void)
{
    install(SIGSEGV, report, 0);
    install(SIGFPE, report, 0);
    install(SIGILL, report, 0);
    install(SIGTRAP, report, 0);
    install(SIGBUS, report, 0);

    PART("skipping the instruction");
    skip = 2;
    __asm__ volatile("ud2" ::: "memory");
    say("after ud2\n");
    skip = 2;
    __asm__ volatile("xor %%ecx, %%ecx; xor %%edx, %%edx; mov $1, %%eax; div %%ecx" ::: "eax", "ecx", "edx");
    say("after div\n");
    skip = 0;
    __asm__ volatile("int3" ::: "memory");
    say("after int3\n");
    skip = 2;
    __asm__ volatile("movl (%0), %%eax" ::"D"(16L) : "eax", "memory");
    say("after a bad read\n");
    __asm__ volatile("movl %%eax, (%0)" ::"D"(16L) : "memory");
    say("after a bad write\n");
    __asm__ volatile("movl (%0), %%eax" ::"D"(0x1234567812345678L) : "eax", "memory");
    say("after a non-canonical address\n");
    skip = 1;
    __asm__ volatile("hlt" ::: "memory");
    say("after hlt\n");
    skip = 2;
    __asm__ volatile("int $0x99" ::: "memory");
    say("after int 0x99\n");
    skip = 0;
    __asm__ volatile("pushf; orl $0x100, (%%rsp); popf; nop; pushf; andl $~0x100, (%%rsp); popf"
                     ::: "memory", "cc");
    say("after single steps\n");

    PART("floating point");
    skip = 4;
    double zero = 0, one = 1;
    unsigned mxcsr = 0x1f80, strict = 0x1f80 & ~0x200u;
    __asm__ volatile("ldmxcsr %0" ::"m"(strict));
    __asm__ volatile("divsd %1, %0" : "+x"(one) : "x"(zero));
    __asm__ volatile("ldmxcsr %0" ::"m"(mxcsr));
    say("after divsd\n");

    PART("an alternate stack");
    stack_t stack = {.ss_sp = other_stack, .ss_size = sizeof other_stack}, was;
    TRY(sigaltstack(&stack, NULL));
    install(SIGILL, report, SA_ONSTACK);
    skip = 2;
    __asm__ volatile("ud2" ::: "memory");
    say("on it: %d\n", on_other_stack);
    install(SIGILL, report, 0);
    __asm__ volatile("ud2" ::: "memory");
    say("on it: %d\n", on_other_stack);
    TRY(sigaltstack(NULL, &was));
    IS(was.ss_sp == other_stack && was.ss_size == sizeof other_stack && was.ss_flags == 0);
    stack.ss_size = 100;
    TRY(sigaltstack(&stack, NULL));
    stack.ss_size = sizeof other_stack;
    stack.ss_flags = 77;
    TRY(sigaltstack(&stack, NULL));
    stack.ss_flags = SS_DISABLE;
    TRY(sigaltstack(&stack, NULL));
    TRY(sigaltstack(NULL, &was));
    say("flags %d\n", was.ss_flags);

    PART("leaving by siglongjmp");
    struct sigaction action = {.sa_handler = jumps};
    MUST(sigaction(SIGSEGV, &action, NULL));
    for (volatile int i = 0; i < 3; i++) {
        int got = sigsetjmp(back, 1);
        if (got == 0)
            *(volatile int *)8 = 1;
        say("came back with %d\n", got);
    }
    sigset_t now;
    sigprocmask(SIG_SETMASK, NULL, &now);
    say("SEGV blocked: %d\n", sigismember(&now, SIGSEGV));

    PART("registers across a handler");
    action.sa_handler = clobbers;
    MUST(sigaction(SIGUSR1, &action, NULL));
    uint64_t in[2] = {0x1122334455667788, 0x99aabbccddeeff00}, out[2], out15[2];
    long pid = getpid(), result;
    __asm__ volatile("movdqu %3, %%xmm7\n movdqu %3, %%xmm15\n syscall\n"
                     "movdqu %%xmm7, %1\n movdqu %%xmm15, %2"
                     : "=a"(result), "=m"(out), "=m"(out15)
                     : "m"(in), "0"(SYS_kill), "D"(pid), "S"(SIGUSR1)
                     : "rcx", "r11", "memory", "xmm0", "xmm7", "xmm15");
    say("kill %ld xmm7 kept %d xmm15 kept %d\n", result, !memcmp(in, out, 16), !memcmp(in, out15, 16));

    PART("a handler that edits the context");
    install(SIGUSR2, edits, 0);
    register long seen_rbx __asm__("r8");
    register long seen_r12 __asm__("r9");
    register long seen_xmm3 __asm__("r10");
    __asm__ volatile("push %%rbx; push %%r12; mov $1, %%ebx; mov $1, %%r12d; syscall;"
                     "mov %%rbx, %%r8; mov %%r12, %%r9; movd %%xmm3, %%r10d; pop %%r12; pop %%rbx"
                     : "=a"(result), "=r"(seen_rbx), "=r"(seen_r12), "=r"(seen_xmm3)
                     : "0"(SYS_kill), "D"(pid), "S"(SIGUSR2)
                     : "rcx", "r11", "xmm3", "memory");
    long values[3] = {seen_rbx, seen_r12, seen_xmm3};
    say("rbx %lx r12 %lx xmm3 %ld\n", values[0], values[1], values[2]);
    sigprocmask(SIG_SETMASK, NULL, &now);
    say("HUP blocked: %d\n", sigismember(&now, SIGHUP));

    PART("blocked faults kill, and the default action after SA_RESETHAND");
    action.sa_handler = jumps;
    action.sa_flags = SA_RESETHAND;
    MUST(sigaction(SIGSEGV, &action, NULL));
    if (sigsetjmp(back, 1) == 0)
        *(volatile int *)8 = 1;
    say("once\n");
    *(volatile int *)8 = 1;
    say("not reached\n");
    return 1;
}
