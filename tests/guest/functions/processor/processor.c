/* A server that says what it sees of the processor: when it was started, in a thread, in another
   process, and now. It also keeps vector registers in use, in threads and behind a signal handler
   that has not returned when the program is frozen. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <cpuid.h>
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

struct view {
    unsigned highest, leaf_1_ecx, leaf_1_edx, leaf_7_ebx, leaf_7_ecx, leaf_7_edx, extended_ecx;
    unsigned components, area, hypervisor, hwcap, frequency;
    int avx2, avx512f;
    char flags[4096];
};

/* From the kernel: the C library changes what getauxval(3) says. */
static unsigned hwcap(void)
{
    unsigned long entry[2] = { 0, 0 };
    FILE *auxv = fopen("/proc/self/auxv", "r");
    while (auxv && fread(entry, sizeof entry, 1, auxv) == 1 && entry[0] && entry[0] != AT_HWCAP)
        ;
    if (auxv)
        fclose(auxv);
    return entry[0] == AT_HWCAP ? entry[1] : 0;
}

static void look(struct view *view)
{
    unsigned eax, ebx, ecx, edx;
    memset(view, 0, sizeof *view);
    __cpuid(0, view->highest, ebx, ecx, edx);
    __cpuid(1, eax, ebx, view->leaf_1_ecx, view->leaf_1_edx);
    __cpuid_count(7, 0, eax, view->leaf_7_ebx, view->leaf_7_ecx, view->leaf_7_edx);
    __cpuid_count(0xd, 0, view->components, view->area, ecx, edx);
    __cpuid(0x40000000, eax, view->hypervisor, ecx, edx);
    __cpuid(0x80000001, eax, ebx, view->extended_ecx, edx);
    __cpuid(0x16, view->frequency, ebx, ecx, edx);
    view->hwcap = hwcap();
    view->avx2 = __builtin_cpu_supports("avx2") != 0;
    view->avx512f = __builtin_cpu_supports("avx512f") != 0;
    FILE *info = fopen("/proc/cpuinfo", "r");
    char line[sizeof view->flags];
    while (info && fgets(line, sizeof line, info))
        if (!strncmp(line, "flags", 5)) {
            line[strcspn(line, "\n")] = 0;
            snprintf(view->flags, sizeof view->flags, "%s", strchr(line, ':') + 2);
            break;
        }
    if (info)
        fclose(info);
}

static struct view at_start, in_thread, in_child;

static void *look_in_thread(void *unused)
{
    look(&in_thread);
    return unused;
}

static void look_in_child(void)
{
    int ends[2];
    if (pipe(ends))
        exit(1);
    if (fork() == 0) {
        static struct view own;
        look(&own);
        _exit(write(ends[1], &own, sizeof own) != sizeof own);
    }
    size_t got = 0;
    while (got < sizeof in_child) {
        ssize_t more = read(ends[0], (char *)&in_child + got, sizeof in_child - got);
        if (more <= 0)
            exit(2);
        got += more;
    }
    wait(NULL);
}

/* Vector registers of threads that take turns. */
static volatile int wrong;

__attribute__((target("avx2"))) static void *keep_vectors(void *number)
{
    long own = (long)number;
    for (int round = 0; round < 50; round++) {
        long low, high;
        /* The host call in between lets the other thread run. */
        __asm__ volatile("vmovq %3, %%xmm14\n\tvpbroadcastq %%xmm14, %%ymm14\n\t"
                         "mov %4, %%eax\n\tsyscall\n\t"
                         "vextracti128 $1, %%ymm14, %%xmm13\n\tvmovq %%xmm13, %1\n\tvmovq %%xmm14, %0"
                         : "=&r"(low), "=&r"(high), "+m"(wrong)
                         : "r"(own), "i"(SYS_sched_yield)
                         : "rax", "rcx", "r11", "xmm13", "xmm14", "memory");
        if (low != own || high != own)
            wrong = 1;
    }
    return NULL;
}

static int vectors_are_kept(void)
{
    pthread_t threads[3];
    wrong = 0;
    for (long number = 0; number < 3; number++)
        pthread_create(&threads[number], NULL, keep_vectors, (void *)(0x1111111111111111 * (number + 1)));
    for (int number = 0; number < 3; number++)
        pthread_join(threads[number], NULL);
    return !wrong;
}

/* A handler that waits until somebody asks. */
static int wakes[2], answers[2];

static void wait_in_handler(int signal)
{
    char byte;
    (void)signal;
    if (read(wakes[0], &byte, 1) != 1)
        _exit(3);
}

static void *sit_in_handler(void *unused)
{
    for (;;) {
        long pattern = 0x0123456789abcdef, after, call = SYS_tgkill;
        __asm__ volatile("movq %2, %%xmm12\n\tsyscall\n\tmovq %%xmm12, %0"
                         : "=&r"(after), "+a"(call)
                         : "r"(pattern), "D"(getpid()), "S"(gettid()), "d"(SIGUSR1)
                         : "rcx", "r11", "xmm12", "memory");
        char answer = after == pattern;
        if (write(answers[1], &answer, 1) != 1)
            _exit(4);
    }
    return unused;
}

static int handler_returns_well(void)
{
    char answer = 0;
    return write(wakes[1], "x", 1) == 1 && read(answers[0], &answer, 1) == 1 && answer;
}

/* Other general protection faults are the program's. */
static sigjmp_buf back;

static void fault(int signal)
{
    (void)signal;
    siglongjmp(back, 1);
}

static int faults_come(void)
{
    struct sigaction action = { .sa_handler = fault }, old;
    sigaction(SIGSEGV, &action, &old);
    int came = sigsetjmp(back, 1);
    if (!came)
        *(volatile char *)0xdead000000000000 = 0;
    sigaction(SIGSEGV, &old, NULL);
    return came;
}

static int describe(char *to, size_t room, const char *name, const struct view *view)
{
    return snprintf(to, room,
                    "\"%s\": {\"highest\": %u, \"leaf_1_ecx\": %u, \"leaf_1_edx\": %u, \"leaf_7_ebx\": %u, "
                    "\"leaf_7_ecx\": %u, \"leaf_7_edx\": %u, \"extended_ecx\": %u, \"components\": %u, "
                    "\"area\": %u, \"hypervisor\": %u, \"frequency\": %u, \"hwcap\": %u, \"avx2\": %d, "
                    "\"avx512f\": %d, \"flags\": \"%s\"}, ",
                    name, view->highest, view->leaf_1_ecx, view->leaf_1_edx, view->leaf_7_ebx,
                    view->leaf_7_ecx, view->leaf_7_edx, view->extended_ecx, view->components, view->area,
                    view->hypervisor, view->frequency, view->hwcap, view->avx2, view->avx512f, view->flags);
}

static void answer(int client)
{
    static char request[4096], body[65536], head[256];
    static struct view now;
    if (read(client, request, sizeof request) <= 0)
        return;
    look(&now);
    int vectors = __get_cpuid_max(0, NULL) >= 7 && now.leaf_7_ebx >> 5 & 1 ? vectors_are_kept() : -1;
    size_t used = snprintf(body, sizeof body, "{");
    used += describe(body + used, sizeof body - used, "start", &at_start);
    used += describe(body + used, sizeof body - used, "thread", &in_thread);
    used += describe(body + used, sizeof body - used, "child", &in_child);
    used += describe(body + used, sizeof body - used, "now", &now);
    used += snprintf(body + used, sizeof body - used, "\"vectors\": %d, \"handler\": %d, \"faults\": %d}",
                     vectors, handler_returns_well(), faults_come());
    int len = snprintf(head, sizeof head,
                       "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n"
                       "Connection: close\r\n\r\n", used);
    if (write(client, head, len) != len || write(client, body, used) != (ssize_t)used)
        _exit(5);
}

int main(void)
{
    pthread_t thread;
    struct sigaction action = { .sa_handler = wait_in_handler };
    look(&at_start);
    pthread_create(&thread, NULL, look_in_thread, NULL);
    pthread_join(thread, NULL);
    look_in_child();
    if (at_start.leaf_7_ebx >> 5 & 1 && !vectors_are_kept())
        return 6;
    if (!faults_come() || pipe(wakes) || pipe(answers) || sigaction(SIGUSR1, &action, NULL))
        return 7;
    pthread_create(&thread, NULL, sit_in_handler, NULL);

    int listener = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(8080) };
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 16))
        return 8;
    for (;;) {
        int client = accept(listener, NULL, NULL);
        if (client >= 0) {
            answer(client);
            close(client);
        }
    }
}
