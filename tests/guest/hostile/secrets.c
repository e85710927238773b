/* A server that hides a client's secret wherever a program can, and looks for it in the next
 * request. `GET /hide?MASKED` hides, `/find?MASKED` counts what it finds, `/both?MASKED` does
 * both, `/state` shows what else a program can find out about itself, `/attack/NAME?MASKED`
 * leaves something behind of which its kernel does not know. The secret travels masked, and
 * is never put together while it is looked for, so that the search does not find itself.
 * Runs only in a sandbox, started by its test. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
#define LEN 32
#define MASK 0x55
#define COUNT(a) (sizeof(a) / sizeof *(a))

static char answer[8192];
static size_t answered;
static unsigned char masked[LEN];
static _Thread_local char of_thread[LEN + 1];
static char *host_call_address;

static void say(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int len = vsnprintf(answer + answered, sizeof answer - answered, format, arguments);
    va_end(arguments);
    if (len > 0 && answered + len < sizeof answer)
        answered += len;
}

/* A host call, made by the kernel's own instruction. */
static long host(long number, long a, long b, long c, long d, long e, long f)
{
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    /* The instruction is followed by a return. */
    __asm__ volatile("call *%[address]"
                     : "=a"(result)
                     : "0"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9),
                       [address] "r"(host_call_address)
                     : "rcx", "r11", "memory");
    return result;
}

static void unmask(char *into)
{
    for (int i = 0; i < LEN; i++)
        into[i] = masked[i] ^ MASK;
}

/* ------------------------------------------------------------ hiding */

static __attribute__((noinline)) void hide_on_stack(void)
{
    volatile char deep[65536];
    for (size_t at = 0; at + LEN <= sizeof deep; at += 4096)
        unmask((char *)deep + at);
}

static void hide_in_file(int fd, const char *secret)
{
    if (fd < 0 || write(fd, secret, LEN) != LEN)
        say("not hidden: %s\n", strerror(errno));
}

static void hide(void)
{
    char secret[LEN + 1] = {0};
    unmask(secret);
    strcpy(strdup("------------------------------------"), secret);
    strcpy(of_thread, secret);
    setenv("SECRET", secret, 1);
    prctl(PR_SET_NAME, secret);
    hide_in_file(open("/tmp/secret", O_CREAT | O_RDWR, 0600), secret);
    hide_in_file(memfd_create(secret, 0), secret);
    symlink(secret, "/tmp/link");
    int ends[2];
    if (!pipe(ends))
        hide_in_file(ends[1], secret);
    if (!socketpair(AF_UNIX, SOCK_STREAM, 0, ends))
        hide_in_file(ends[1], secret);
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    memcpy(name.sun_path + 1, secret, LEN);
    int bound = socket(AF_UNIX, SOCK_STREAM, 0);
    if (bind(bound, (void *)&name, sizeof name) || listen(bound, 1))
        say("not bound: %s\n", strerror(errno));
    char *shared = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    strcpy(shared, secret);
    char *segment = shmat(shmget(0x5ec3e7, PAGE, IPC_CREAT | 0600), NULL, 0);
    if (segment != (void *)-1)
        strcpy(segment, secret);
    char *closed = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    strcpy(closed + PAGE, secret);
    madvise(closed, 4 * PAGE, MADV_RANDOM);
    mprotect(closed + PAGE, PAGE, PROT_NONE);
    long word;
    memcpy(&word, secret, sizeof word);
    timer_t timer;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR2};
    event.sigev_value.sival_ptr = (void *)word;
    struct itimerspec later = {{1000, 0}, {1000 + (word & 0xff), 0}};
    if (timer_create(CLOCK_MONOTONIC, &event, &timer) || timer_settime(timer, 0, &later, NULL))
        say("no timer: %s\n", strerror(errno));
    struct itimerval soon = {{0, 1000}, {0, 1000}};
    sigset_t set;
    sigfillset(&set);
    sigprocmask(SIG_BLOCK, &set, NULL);
    setitimer(ITIMER_REAL, &soon, NULL);
    sigqueue(getpid(), SIGRTMIN + 3, event.sigev_value);
    struct rlimit limit = {100 + (word & 0xff), 4096};
    setrlimit(RLIMIT_NOFILE, &limit);
    umask(word & 0777);
    mkdir("/tmp/here", 0700);
    if (chdir("/tmp/here"))
        say("not there: %s\n", strerror(errno));
    setpriority(PRIO_PROCESS, 0, 5);
    hide_on_stack();
}

/* The last that a request does: the registers hold the secret when it ends. */
static void hide_in_registers(void)
{
    char secret[LEN];
    unmask(secret);
    __asm__ volatile("vmovdqu %0, %%ymm15\n vmovdqu %0, %%ymm9\n" : : "m"(secret) : "xmm15", "xmm9");
    explicit_bzero(secret, LEN);
}

/* ------------------------------------------------------------ looking */

static sigjmp_buf back;

static void fault(int signal)
{
    (void)signal;
    siglongjmp(back, 1);
}

static long found;

static void look_at(const unsigned char *memory, const char *where)
{
    for (size_t at = 0; at + 8 <= PAGE; at++) {
        int same = 0;
        /* The first eight bytes will do: the rest may be cut. */
        while (same < 8 && (memory[at + same] ^ MASK) == masked[same])
            same++;
        if (same == 8) {
            found++;
            if (answered < sizeof answer / 2)
                say("found at %p, %s\n", (void *)(memory + at), where);
        }
    }
}

static void look_through(uint64_t start, uint64_t end, const char *where)
{
    for (volatile uint64_t page = start; page < end; page += PAGE)
        if (!sigsetjmp(back, 1))
            look_at((const unsigned char *)page, where);
}

static void find(void)
{
    unsigned char registers[2][32];
    __asm__ volatile("vmovdqu %%ymm15, %0\n vmovdqu %%ymm9, %1\n"
                     : "=m"(registers[0]), "=m"(registers[1]));
    for (int i = 0; i < 2; i++)
        for (int half = 0; half < 32; half += 8)
            for (int from = 0; from < LEN; from += 8) {
                int same = 0;
                while (same < 8 && (registers[i][half + same] ^ MASK) == masked[from + same])
                    same++;
                if (same == 8) {
                    found++;
                    say("found in a register\n");
                }
            }
    memset(registers, 0, sizeof registers);
    static char stack[65536];
    stack_t own = {.ss_sp = stack, .ss_size = sizeof stack};
    sigaltstack(&own, NULL);
    struct sigaction action = {.sa_handler = fault, .sa_flags = SA_ONSTACK | SA_NODEFER};
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
    sigset_t faults;
    sigemptyset(&faults);
    sigaddset(&faults, SIGSEGV);
    sigaddset(&faults, SIGBUS);
    sigprocmask(SIG_UNBLOCK, &faults, NULL);
    /* What its kernel owns (crates/abi/src/layout.rs), from its start on. */
    static const struct {
        uint64_t start, len;
        const char *name;
    } areas[] = {
        {0x10000, 0x90000, "gate"},
        {0x7e0000000000, 16 << 20, "kernel"},
        {0x7e1000000000, 48 << 20, "heap"},
        {0x7e2000000000, 48 << 20, "pages"},
        {0x7e6000000000, 8 << 20, "shared memory"},
        {0x7e8000000000, 16 << 20, "boot area"},
        {0x7e9800000000, 1 << 20, "mappings"},
        {0x7ea000000000, 4 << 20, "window"},
        {0x7eb000000000, 1 << 20, "beside the window"},
    };
    for (size_t i = 0; i < COUNT(areas); i++)
        look_through(areas[i].start, areas[i].start + areas[i].len, areas[i].name);
    static char maps[65536];
    int fd = open("/proc/self/maps", O_RDONLY);
    size_t len = 0;
    for (ssize_t got; (got = read(fd, maps + len, sizeof maps - 1 - len)) > 0;)
        len += got;
    close(fd);
    for (char *line = maps; line && *line; line = strchr(line, '\n'), line = line ? line + 1 : line) {
        uint64_t start, end;
        char access[5];
        if (sscanf(line, "%lx-%lx %4s", &start, &end, access) == 3 && access[0] == 'r' && end - start < 64 << 20)
            look_through(start, end, "memory");
    }
    say("found %ld\n", found);
}

static void state(void)
{
    char text[512];
    say("cwd %s, umask %o, name ", getcwd(text, sizeof text), umask(0));
    prctl(PR_GET_NAME, text);
    say("%s, secret %s, priority %d\n", text, getenv("SECRET"), getpriority(PRIO_PROCESS, 0));
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    sigset_t blocked, pending;
    sigprocmask(SIG_BLOCK, NULL, &blocked);
    sigpending(&pending);
    say("files %lu, blocked %lx, pending %lx\n", limit.rlim_cur, *(long *)&blocked, *(long *)&pending);
    say("descriptors");
    for (int fd = 0; fd < 64; fd++)
        if (fcntl(fd, F_GETFD) >= 0)
            say(" %d", fd);
    say("\n/tmp");
    DIR *directory = opendir("/tmp");
    for (struct dirent *entry; directory && (entry = readdir(directory));)
        if (entry->d_name[0] != '.')
            say(" %s", entry->d_name);
    closedir(directory);
    struct itimerval timer;
    getitimer(ITIMER_REAL, &timer);
    say("\nsegment %d, timer %ld\n", shmget(0x5ec3e7, PAGE, 0), timer.it_value.tv_usec + timer.it_value.tv_sec);
    /* As the host has it. */
    struct itimerval none = {{0, 0}, {0, 0}}, before = {{0, 0}, {0, 0}};
    host(SYS_setitimer, ITIMER_REAL, (long)&none, (long)&before, 0, 0, 0);
    stack_t stack = {0};
    long asked = host(SYS_sigaltstack, 0, (long)&stack, 0, 0, 0, 0);
    say("host: timer %ld, signal stack %ld %p %d %lu\n", before.it_value.tv_sec + before.it_value.tv_usec + before.it_interval.tv_usec,
        asked, stack.ss_sp, stack.ss_flags, stack.ss_size);
}

/* ------------------------------------------------------------ behind the kernel's back */

static void serve(int client);

static void attack(const char *name)
{
    char secret[LEN];
    unmask(secret);
    const int writable = PROT_READ | PROT_WRITE, fixed = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    long result = -1;
    if (!strcmp(name, "mapping")) {
        result = host(SYS_mmap, 0x7ea000000000, 4 * PAGE, writable, fixed, -1, 0);
        if (result > 0)
            memcpy((char *)result + PAGE, secret, LEN);
        host(SYS_madvise, result, 4 * PAGE, MADV_SEQUENTIAL, 0, 0, 0);
    } else if (!strcmp(name, "window")) {
        result = host(SYS_mmap, 0x7eb000000000, PAGE, writable | PROT_EXEC, fixed, -1, 0);
        if (result > 0)
            memcpy((char *)result, secret, LEN);
    } else if (!strcmp(name, "gate")) {
        result = host(SYS_mprotect, 0x20000, PAGE, writable | PROT_EXEC, 0, 0, 0);
        if (!result)
            memcpy((char *)0x20000 + PAGE - LEN, secret, LEN);
    } else if (!strcmp(name, "protection")) {
        volatile char *page = (char *)((uintptr_t)serve & -PAGE);
        result = host(SYS_mprotect, (long)page, PAGE, writable | PROT_EXEC, 0, 0, 0);
        if (!result)
            *page = *page;
    } else if (!strcmp(name, "timer")) {
        struct itimerval soon = {{0, 500}, {0, 500}};
        result = host(SYS_setitimer, ITIMER_REAL, (long)&soon, 0, 0, 0, 0);
    } else if (!strcmp(name, "stack")) {
        stack_t stack = {.ss_sp = (void *)0x7eb000000000, .ss_size = 1 << 16};
        result = host(SYS_sigaltstack, (long)&stack, 0, 0, 0, 0, 0);
    } else if (!strcmp(name, "text")) {
        char *page = (char *)((uintptr_t)host_call_address & -PAGE);
        result = host(SYS_mprotect, (long)page, PAGE, writable | PROT_EXEC, 0, 0, 0);
        if (!result)
            *(volatile char *)page = *(volatile char *)page;
    } else if (!strcmp(name, "descriptor")) {
        for (int fd = 5; fd < 9; fd++)
            result = host(SYS_close, fd, 0, 0, 0, 0, 0);
    } else if (!strcmp(name, "process")) {
        result = host(SYS_clone, 0x400 | SIGCHLD, 0, 0, 0, 0, 0);
        while (!result)
            host(SYS_ppoll, 0, 0, 0, 0, 0, 0);
    } else if (!strcmp(name, "grandchild")) {
        /* Its parent makes a sibling, too, and ends. */
        result = host(SYS_clone, 0x400 | SIGCHLD, 0, 0, 0, 0, 0);
        if (!result) {
            host(SYS_clone, 0x400 | 0x8000 | SIGCHLD, 0, 0, 0, 0, 0);
            if (host(SYS_clone, 0x400 | SIGCHLD, 0, 0, 0, 0, 0))
                host(SYS_exit_group, 0, 0, 0, 0, 0, 0);
            for (;;)
                host(SYS_ppoll, 0, 0, 0, 0, 0, 0);
        }
    }
    explicit_bzero(secret, LEN);
    say("attacked by %s: %s\n", name, result >= 0 ? "done" : "refused");
}

static int hex(char digit)
{
    return digit <= '9' ? digit - '0' : digit - 'a' + 10;
}

static void serve(int client)
{
    static char request[4096];
    ssize_t len = read(client, request, sizeof request - 1);
    request[len > 0 ? len : 0] = 0;
    char *path = strchr(request, ' '), *end = path ? strchr(path + 1, ' ') : NULL;
    if (!end)
        return;
    *end = 0;
    char *query = strchr(++path, '?');
    if (query) {
        *query++ = 0;
        for (int i = 0; i < LEN && query[2 * i] && query[2 * i + 1]; i++)
            masked[i] = hex(query[2 * i]) << 4 | hex(query[2 * i + 1]);
    }
    bool hides = !strcmp(path, "/hide") || !strcmp(path, "/both");
    answered = 0;
    found = 0;
    if (!strcmp(path, "/find"))
        find();
    if (hides) {
        hide();
        hide_in_registers();
    }
    if (!strcmp(path, "/both"))
        find();
    if (!strcmp(path, "/state"))
        state();
    if (!strncmp(path, "/attack/", 8))
        attack(path + 8);
    if (!answered)
        say("done\n");
    char head[128];
    int head_len = snprintf(head, sizeof head, "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n", answered);
    if (write(client, head, head_len) != head_len || write(client, answer, answered) != (ssize_t)answered)
        return;
    if (hides)
        hide_in_registers();
}

int main(void)
{
    const char *address = getenv("THAW_TEST_HOSTCALL");
    if (!address)
        return 2;
    host_call_address = (char *)strtoul(address, NULL, 16);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in local = {.sin_family = AF_INET, .sin_port = htons(8080)};
    if (bind(listener, (void *)&local, sizeof local) || listen(listener, 16))
        return 3;
    for (;;) {
        int client = accept(listener, NULL, NULL);
        serve(client);
        close(client);
    }
}
