/* getrlimit(2): limits of memory, of CPU time and of processes, as far as calls meet them. */
#include "guest.h"
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>

enum { MIB = 1 << 20 };

static void limit(int resource, rlim_t soft, rlim_t hard)
{
    struct rlimit limit = {soft, hard};
    MUST(setrlimit(resource, &limit));
}

static void *map(size_t size, int prot, int flags)
{
    return mmap(NULL, size, prot, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
}

#define MAP(size, prot, flags)                                                                     \
    say("map %s: %s\n", #size ", " #prot ", " #flags,                                              \
        map(size, prot, flags) == MAP_FAILED ? error_name(errno) : "ok")

static void all(void)
{
    limit(RLIMIT_AS, 64 * MIB, RLIM_INFINITY);
    MAP(200 * MIB, PROT_READ | PROT_WRITE, 0);
    MAP(200 * MIB, PROT_NONE, MAP_NORESERVE);
    MAP(16 * MIB, PROT_READ, 0);
    char *have = map(16 * MIB, PROT_READ | PROT_WRITE, 0);
    IS(have != MAP_FAILED);
    /* What is replaced does not count. */
    IS(mmap(have, 16 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == have);
    IS(mremap(have, 16 * MIB, 64 * MIB, MREMAP_MAYMOVE) == MAP_FAILED && errno == ENOMEM);
    IS(sbrk(100 * MIB) == (void *)-1 && errno == ENOMEM);
    IS(sbrk(MIB) != (void *)-1);
    TRY(munmap(have, 16 * MIB));
    MAP(16 * MIB, PROT_READ, 0);
    /* Whoever has more than the limit gets nothing more, not even in the place of what there is. */
    limit(RLIMIT_AS, 16 * MIB, RLIM_INFINITY);
    have = map(4096, PROT_READ, 0);
    IS(have == MAP_FAILED && errno == ENOMEM);
    limit(RLIMIT_AS, RLIM_INFINITY, RLIM_INFINITY);
    MAP(200 * MIB, PROT_NONE, MAP_NORESERVE);
}

static void data(void)
{
    /* 0 is for brk(2) only, as valgrind sets it. */
    limit(RLIMIT_DATA, 0, RLIM_INFINITY);
    MAP(MIB, PROT_READ | PROT_WRITE, 0);
    IS(sbrk(100 * MIB) == (void *)-1 && errno == ENOMEM);
    limit(RLIMIT_DATA, 8 * MIB, RLIM_INFINITY);
    MAP(64 * MIB, PROT_READ | PROT_WRITE, 0);
    MAP(64 * MIB, PROT_READ, 0);
    IS(mmap(NULL, 64 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0) != MAP_FAILED);
    char *have = map(64 * MIB, PROT_READ, 0);
    TRY(mprotect(have, 64 * MIB, PROT_READ | PROT_WRITE));
    TRY(mprotect(have, MIB, PROT_READ | PROT_WRITE));
    IS(sbrk(100 * MIB) == (void *)-1 && errno == ENOMEM);
    IS(sbrk(MIB) != (void *)-1);
}

static volatile sig_atomic_t told;

static void tell(int signal)
{
    told += signal == SIGXCPU;
}

static void burn(void)
{
    for (;;)
        __asm__ volatile("" ::: "memory");
}

static void until_the_end(void)
{
    struct sigaction action = {.sa_handler = tell};
    MUST(sigaction(SIGXCPU, &action, NULL));
    limit(RLIMIT_CPU, 1, 2);
    while (!told)
        __asm__ volatile("" ::: "memory");
    IS(told == 1);
    burn();
}

/* The limit goes on in children, their time begins anew. */
static void inherited(void)
{
    limit(RLIMIT_CPU, 1, RLIM_INFINITY);
    int child = MUST(fork());
    if (!child)
        burn();
    int status;
    MUST(waitpid(child, &status, 0));
    say("grandchild: signal %d\n", WTERMSIG(status));
}

/* Root has no limit, so this is somebody else. Whoever has ended counts until somebody has waited. */
static void processes(void)
{
    if (!getuid())
        MUST(setuid(12345));
    struct rlimit limit;
    MUST(getrlimit(RLIMIT_NPROC, &limit));
    if (getuid() != 12345)
        return;
    limit.rlim_cur = 2;
    MUST(setrlimit(RLIMIT_NPROC, &limit));
    siginfo_t info;
    int first = fork();
    if (!first)
        _exit(0);
    IS(first > 0);
    MUST(waitid(P_PID, first, &info, WEXITED | WNOWAIT));
    int second = fork();
    if (!second)
        _exit(0);
    IS(second == -1 && errno == EAGAIN);
    MUST(waitpid(first, NULL, 0));
    int third = fork();
    if (!third)
        _exit(0);
    IS(third > 0);
    MUST(waitpid(third, NULL, 0));
}

static void in_child(const char *name, void (*does)(void))
{
    PART(name);
    int child = MUST(fork());
    if (!child) {
        does();
        _exit(0);
    }
    int status;
    MUST(waitpid(child, &status, 0));
    say("exit %d signal %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1,
        WIFSIGNALED(status) ? WTERMSIG(status) : 0);
}

int main(void)
{
    setvbuf(stdout, NULL, _IONBF, 0);
    in_child("all memory", all);
    in_child("memory that may be written", data);
    in_child("CPU time", until_the_end);
    in_child("CPU time of children", inherited);
    in_child("processes", processes);
    return 0;
}
