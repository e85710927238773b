/* System calls made by instructions of every form: what a program sees of them
 * must not depend on how they get into the kernel. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>

/* The number comes from a register, the check follows: compare_after marks it. */
long compare(long number, long a, long b, long c);
extern char compare_after[];
/* The same, and a jump leads to the check. */
long joined(long number, long a, long b, long c, long skip);
/* Two instructions behind. */
long two(long number, long a, long b, long c);
/* Nothing that could move. */
long bare(long number, long a, long b, long c);

#define ARGUMENTS "mov %rdi, %rax; mov %rsi, %rdi; mov %rdx, %rsi; mov %rcx, %rdx\n"
asm(".text\n"
    "compare: " ARGUMENTS
    "lea 0(%rax), %rax\n"
    "syscall\n"
    "compare_after: cmp $-4096, %rax\n"
    "ja 1f\n"
    "ret\n"
    "1: mov $-1, %rax\n"
    "ret\n"
    "joined: " ARGUMENTS
    "test %r8, %r8\n"
    "jnz 2f\n"
    "lea 0(%rax), %rax\n"
    "syscall\n"
    "2: cmp $-4096, %rax\n"
    "ja 3f\n"
    "ret\n"
    "3: mov $-2, %rax\n"
    "ret\n"
    "two: " ARGUMENTS
    "lea 0(%rax), %rax\n"
    "syscall\n"
    "mov %eax, %r9d\n"
    "cmp $-4096, %eax\n"
    "mov %r9d, %eax\n"
    "ret\n"
    "bare: " ARGUMENTS
    "lea 0(%rax), %rax\n"
    "syscall\n"
    "ret\n");

static int ends[2];
static volatile int seen;
static volatile long offset;

static void handler(int signal, siginfo_t *info, void *context)
{
    ucontext_t *interrupted = context;
    (void)info;
    seen = signal;
    offset = interrupted->uc_mcontext.gregs[REG_RIP] - (greg_t)compare_after;
}

static void *later(void *argument)
{
    usleep(50000);
    pthread_kill(*(pthread_t *)argument, SIGUSR1);
    usleep(50000);
    if (write(ends[1], "x", 1) != 1)
        abort();
    return NULL;
}

static void interrupted_read(int flags)
{
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | flags};
    pthread_t self = pthread_self(), other;
    char byte = 0;
    long got;

    sigaction(SIGUSR1, &action, NULL);
    seen = 0;
    pthread_create(&other, NULL, later, &self);
    got = compare(SYS_read, ends[0], (long)&byte, 1);
    pthread_join(other, NULL);
    printf("read %ld, signal %d, interrupted %ld bytes from the check\n", got, seen, offset);
    if (got != 1)
        got = compare(SYS_read, ends[0], (long)&byte, 1);
    printf("then %ld %c\n", got, byte);
}

static void cleanup(void *argument)
{
    puts(argument);
}

static void *cancelled(void *argument)
{
    char byte;
    pthread_cleanup_push(cleanup, "cleaned up");
    pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, NULL);
    compare(SYS_read, ends[0], (long)&byte, 1);
    pthread_cleanup_pop(0);
    return argument;
}

int main(void)
{
    int i, same = 0;
    long pid = getpid();
    pthread_t thread;
    void *result;

    if (pipe(ends) != 0)
        return 1;
    for (i = 0; i < 100; i++) {
        same += compare(SYS_getpid, 0, 0, 0) == pid;
        same += joined(SYS_getpid, 0, 0, 0, 0) == pid;
        same += joined(7, 0, 0, 0, 1) == 7;
        same += joined(-1, 0, 0, 0, 1) == -2;
        same += two(SYS_getpid, 0, 0, 0) == pid;
        same += bare(SYS_getpid, 0, 0, 0) == pid;
        same += compare(SYS_close, -1, 0, 0) == -1;
        same += joined(SYS_close, -1, 0, 0, 0) == -2;
        same += two(SYS_close, -1, 0, 0) == (unsigned)-EBADF;
        same += bare(SYS_close, -1, 0, 0) == -EBADF;
    }
    printf("%d of 1000\n", same);
    interrupted_read(0);
    interrupted_read(SA_RESTART);
    pthread_create(&thread, NULL, cancelled, NULL);
    usleep(50000);
    pthread_cancel(thread);
    pthread_join(thread, &result);
    puts(result == PTHREAD_CANCELED ? "cancelled" : "not cancelled");
    return 0;
}
