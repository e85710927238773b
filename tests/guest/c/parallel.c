/* Threads that compute at the same time, on as many virtual CPUs as there are. */
#include "guest.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define THREADS 3

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static void in_threads(void *(*work)(void *), const char *what)
{
    pthread_t threads[THREADS];
    for (long i = 0; i < THREADS; i++)
        pthread_create(&threads[i], 0, work, (void *)i);
    bool good = true;
    for (int i = 0; i < THREADS; i++) {
        void *outcome;
        pthread_join(threads[i], &outcome);
        good &= outcome != 0;
    }
    say("%s: %s\n", what, good ? "good" : "bad");
}

/* Registers that the kernel saves only when threads change: each thread has its
 * own rounding modes (of SSE and of the x87), and its own number on the x87 stack. */
static void *keeps_registers(void *argument)
{
    long number = (long)argument;
    uint32_t mode = 0x1f80 | (number & 3) << 13;
    uint16_t control = 0x37f & ~(3 << 8), expected = control | (number & 3) << 10;
    __asm__ volatile("ldmxcsr %0; fldcw %1; fildl %2" : : "m"(mode), "m"(expected), "m"(number));
    bool good = true;
    for (double end = seconds() + 0.06; seconds() < end && good;) {
        for (volatile int i = 0; i < 20000; i++)
            continue;
        uint32_t mode_now, number_now;
        uint16_t control_now;
        __asm__ volatile("stmxcsr %0; fnstcw %1; fistl %2"
                         : "=m"(mode_now), "=m"(control_now), "=m"(number_now));
        good = (mode_now & 0x6000) == (mode & 0x6000) && control_now == expected
            && number_now == (uint32_t)number;
    }
    __asm__ volatile("fninit");
    return (void *)good;
}

static atomic_int ended;

/* Computes on its stack while the process forks. */
static void *keeps_stack(void *argument)
{
    uint64_t words[64], turns = 0;
    for (int i = 0; i < 64; i++)
        words[i] = (uintptr_t)argument + i;
    while (!ended) {
        for (int i = 0; i < 64; i++)
            words[i]++;
        turns++;
        if (turns % 1000 == 0)
            getppid();
    }
    bool good = true;
    for (int i = 0; i < 64; i++)
        good &= words[i] == (uintptr_t)argument + i + turns;
    return (void *)good;
}

static void forks_while_threads_compute(void)
{
    pthread_t threads[THREADS];
    for (long i = 0; i < THREADS; i++)
        pthread_create(&threads[i], 0, keeps_stack, (void *)i);
    usleep(20000);
    int codes = 0;
    for (int i = 0; i < 5; i++) {
        int status = 0;
        pid_t child = fork();
        if (child == 0)
            _exit(i);
        waitpid(child, &status, 0);
        codes += WEXITSTATUS(status);
    }
    ended = 1;
    bool good = true;
    for (int i = 0; i < THREADS; i++) {
        void *outcome;
        pthread_join(threads[i], &outcome);
        good &= outcome != 0;
    }
    say("forks: %d, %s\n", codes, good ? "good" : "bad");
}

static int file;
static _Atomic uint64_t *shared;

static void *counts_in_a_file(void *argument)
{
    (void)argument;
    for (int i = 0; i < 300000; i++)
        atomic_fetch_add(shared, 1);
    return (void *)1;
}

/* A page of a file that threads write to by a shared mapping, and this one by calls. */
static void shared_file(void)
{
    char name[] = "/tmp/parallel-XXXXXX";
    file = mkstemp(name);
    ftruncate(file, 4096);
    shared = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], 0, counts_in_a_file, 0);
    bool rises = true;
    uint64_t last = 0, count = 0;
    for (int i = 0; i < 3000; i++) {
        pread(file, &count, sizeof count, 0);
        rises &= count >= last;
        last = count;
        pwrite(file, &i, sizeof i, 128);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], 0);
    pread(file, &count, sizeof count, 0);
    say("counted in a file: %llu, %s\n", (unsigned long long)count, rises ? "rising" : "lost");
    munmap((void *)shared, 4096);
    unlink(name);
}

static void *spins(void *argument)
{
    (void)argument;
    while (!ended)
        continue;
    return 0;
}

/* Its clock goes on for others to see, though it never enters the kernel. */
static void clock_of_a_running_thread(void)
{
    ended = 0;
    pthread_t thread;
    pthread_create(&thread, 0, spins, 0);
    clockid_t clock;
    pthread_getcpuclockid(thread, &clock);
    struct timespec before, now;
    clock_gettime(clock, &before);
    do {
        usleep(1000);
        clock_gettime(clock, &now);
    } while (now.tv_sec == before.tv_sec && now.tv_nsec < before.tv_nsec + 20000000);
    say("the clock of a running thread goes on\n");
    ended = 1;
    pthread_join(thread, 0);
}

/* Somebody writes to a pipe from outside of this process while a thread computes. */
static void waits_beside_a_computing_thread(void)
{
    ended = 0;
    pthread_t thread;
    pthread_create(&thread, 0, spins, 0);
    int ends[2];
    pipe(ends);
    pid_t child = fork();
    if (child == 0) {
        usleep(20000);
        _exit(write(ends[1], "x", 1) != 1);
    }
    char byte = 0;
    read(ends[0], &byte, 1);
    waitpid(child, 0, 0);
    say("read %c beside a computing thread\n", byte);
    ended = 1;
    pthread_join(thread, 0);
}

static char *replaced;

static void *reads_what_is_replaced(void *unused)
{
    (void)unused;
    unsigned long sum = 0;
    while (!ended)
        for (int page = 0; page < 4; page++)
            sum += *(volatile char *)(replaced + page * 4096);
    return (void *)(sum + 1);
}

/* MAP_FIXED takes the place of a mapping at once: who reads it meanwhile finds the old memory or the new. */
static void replaces_what_a_thread_reads(void)
{
    ended = 0;
    replaced = mmap(0, 16384, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    pthread_t thread;
    pthread_create(&thread, 0, reads_what_is_replaced, 0);
    usleep(20000);
    int program = open("/proc/self/exe", O_RDONLY), failed = 0;
    for (int i = 0; i < 20000; i++) {
        int flags = MAP_PRIVATE | MAP_FIXED | (i % 2 ? MAP_ANONYMOUS : 0);
        failed += mmap(replaced, 16384, PROT_READ, flags, i % 2 ? -1 : program, 0) != replaced;
    }
    ended = 1;
    pthread_join(thread, 0);
    say("replaced beside a thread that reads: %d failed\n", failed);
    close(program);
}

#define SITES 256

/* A loop whose second instruction begins in one page and ends in the next, and in that
 * next page system calls, eight bytes each. */
void straddles(long turns);
extern char call_sites[];
__asm__(".text\n"
        ".balign 4096\n"
        ".skip 4086, 0x90\n"
        "straddles:\n"
        "1: dec %rdi\n"
        "movabs $0x1122334455667788, %rax\n"
        "jnz 1b\n"
        "ret\n"
        "call_sites:\n"
        ".rept 256\n"
        "mov $39, %eax\n"
        "syscall\n"
        "ret\n"
        ".endr\n");

static void *straddles_pages(void *argument)
{
    while (!ended)
        straddles(10000);
    return argument;
}

/* Code in which the kernel may rewrite the calls while another processor executes it. */
static void calls_in_code_that_others_execute(void)
{
    ended = 0;
    pthread_t thread;
    pthread_create(&thread, 0, straddles_pages, 0);
    for (double end = seconds() + 0.03; seconds() < end;)
        continue;
    long pid = getpid();
    int same = 0;
    for (int i = 0; i < SITES; i++)
        for (int turn = 0; turn < 6; turn++)
            same += ((long (*)(void))(call_sites + 8 * i))() == pid;
    ended = 1;
    pthread_join(thread, 0);
    say("%d of %d calls in code that others execute\n", same, SITES * 6);
}

int main(void)
{
    in_threads(keeps_registers, "registers");
    shared_file();
    calls_in_code_that_others_execute();
    clock_of_a_running_thread();
    replaces_what_a_thread_reads();
    forks_while_threads_compute();
    waits_beside_a_computing_thread();
    in_threads(keeps_registers, "registers");
    return 0;
}
