/* System calls of a program that has its processor check alignment (AC) or trap
 * after every instruction (TF): the kernel runs without either, and the program
 * finds its flags as they were. */
#include "guest.h"

#define ALIGNMENT_CHECK 0x40000UL
#define TRAP 0x100UL

static volatile int traps;

static void count_trap(int signal)
{
    (void)signal;
    traps++;
}

/* Sets a flag, makes a system call by the one instruction below, and clears the
 * flag; `*after` is what the flags were behind the call. */
static long call_with(unsigned long flag, long number, long a, long b, long c, unsigned long *after)
{
    long result;
    unsigned long flags;
    __asm__ volatile("pushfq\n"
                     "orq %3, (%%rsp)\n"
                     "popfq\n"
                     "syscall\n"
                     "pushfq\n"
                     "movq (%%rsp), %1\n"
                     "andq $~0x40100, (%%rsp)\n"
                     "popfq\n"
                     : "=a"(result), "=&r"(flags)
                     : "0"(number), "r"(flag), "D"(a), "S"(b), "d"(c)
                     : "rcx", "r11", "memory", "cc");
    *after = flags;
    return result;
}

static void check(const char *name, unsigned long flag)
{
    int pipe_ends[2];
    char text[64];
    unsigned long after;
    PART(name);
    MUST(pipe(pipe_ends));
    /* The first call of a site takes another way into the kernel than the others. */
    for (int i = 0; i < 5; i++) {
        traps = 0;
        long result = call_with(flag, SYS_getpid, 0, 0, 0, &after);
        say("getpid: %s, flag %s, traps %s\n", result == getpid() ? "right" : "wrong",
            after & flag ? "set" : "clear", traps ? "some" : "none");
        /* At addresses that are not aligned, in the program and below the kernel. */
        result = call_with(flag, SYS_write, pipe_ends[1], (long)"odd text" + 1, 7, &after);
        say("write: %ld, flag %s\n", result, after & flag ? "set" : "clear");
        result = call_with(flag, SYS_read, pipe_ends[0], (long)text + 3, 7, &after);
        say("read: %ld %.7s, flag %s\n", result, text + 3, after & flag ? "set" : "clear");
        result = call_with(flag, SYS_openat, AT_FDCWD, (long)"/../.././nowhere/x" , 0, &after);
        say("openat: %s\n", error_name((int)-result));
        result = call_with(flag, SYS_sched_yield, 0, 0, 0, &after);
        say("sched_yield: %ld\n", result);
    }
    close(pipe_ends[0]);
    close(pipe_ends[1]);
}

/* A signal that comes while the flag is set, in kernel and in program. */
static void wait_with(unsigned long flag)
{
    struct timespec time = {0, 3000000};
    unsigned long after;
    signal(SIGALRM, count_trap);
    traps = 0;
    alarm(1);
    long result = 0;
    while (!traps && result == 0)
        result = call_with(flag, SYS_nanosleep, (long)&time, 0, 0, &after);
    say("a signal came: %s\n", traps ? "yes" : "no");
}

int main(void)
{
    signal(SIGTRAP, count_trap);
    check("no flag", 0);
    check("alignment checks", ALIGNMENT_CHECK);
    wait_with(ALIGNMENT_CHECK);
    check("traps", TRAP);
    return 0;
}
