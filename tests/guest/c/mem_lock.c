/* mlock(2), mlock2(2), mlockall(2), MAP_LOCKED and RLIMIT_MEMLOCK, as an ordinary
 * user and as the superuser. */
#include "guest.h"
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>

#define PAGE 4096
#define RW (PROT_READ | PROT_WRITE)
#define ANON (MAP_PRIVATE | MAP_ANONYMOUS)

static void limit_to(rlim_t bytes)
{
    struct rlimit limit = {bytes, bytes};
    MUST(setrlimit(RLIMIT_MEMLOCK, &limit));
    say("limit %lu\n", (unsigned long)bytes);
}

/* Pages that /proc says are locked. */
static int locked(void)
{
    char text[8192];
    int fd = (int)MUST(open("/proc/self/status", O_RDONLY));
    ssize_t len = MUST(read(fd, text, sizeof text - 1));
    close(fd);
    text[len] = 0;
    char *line = strstr(text, "VmLck:");
    return line ? atoi(line + 6) / 4 : -1;
}

static void map(const char *what, size_t len, int flags)
{
    void *p = mmap(NULL, len, RW, ANON | flags, -1, 0);
    const char *outcome = p == MAP_FAILED ? strerrorname_np(errno) : "mapped";
    say("%s: %s, locked %d\n", what, outcome, locked());
    if (p != MAP_FAILED)
        munmap(p, len);
}

static void ranges(void)
{
    PART("ranges");
    char *p = mmap(NULL, 16 * PAGE, RW, ANON, -1, 0);
    limit_to(8 * PAGE);
    TRY(mlock(p, 4 * PAGE));
    IS(locked() == 4);
    TRY(mlock(p + 5 * PAGE + 1, 4 * PAGE));
    TRY(mlock(p + 5 * PAGE + 1, 3 * PAGE));
    IS(locked() == 8);
    TRY(mlock(p, 8 * PAGE));
    TRY(mlock(p + 12 * PAGE, 1));
    TRY(mlock(p, 4 * PAGE));
    TRY(munlock(p + PAGE, PAGE));
    IS(locked() == 7);
    TRY(mlock2(p + 12 * PAGE, 1, MLOCK_ONFAULT));
    TRY(mlock2(p, 1, 8));
    IS(locked() == 8);
    TRY(munmap(p + 12 * PAGE, PAGE));
    IS(locked() == 7);
    TRY(munlock(p + 11 * PAGE, 3 * PAGE));
    TRY(mlock((void *)(1UL << 40), PAGE));
    TRY(mlock(p, -PAGE));
    pid_t child = MUST(fork());
    if (!child) {
        IS(locked() == 0);
        _exit(0);
    }
    waitpid(child, NULL, 0);
    TRY(munlock(p, 12 * PAGE));
    IS(locked() == 0);
}

static void new_memory(void)
{
    PART("new memory");
    map("within the limit", 8 * PAGE, MAP_LOCKED);
    map("beyond it", 9 * PAGE, MAP_LOCKED);
    char *p = mmap(NULL, 4 * PAGE, RW, ANON | MAP_LOCKED, -1, 0);
    IS(locked() == 4);
    IS(mremap(p, 4 * PAGE, 9 * PAGE, MREMAP_MAYMOVE) == MAP_FAILED && errno == EAGAIN);
    p = mremap(p, 4 * PAGE, 8 * PAGE, MREMAP_MAYMOVE);
    IS(p != MAP_FAILED && locked() == 8);
    munmap(p, 8 * PAGE);
    TRY(mlockall(MCL_CURRENT));
    TRY(mlockall(MCL_ONFAULT));
    TRY(mlockall(0));
    TRY(mlockall(16));
    TRY(mlockall(MCL_FUTURE));
    map("within the limit", 8 * PAGE, 0);
    map("beyond it", 9 * PAGE, 0);
    void *end = sbrk(0);
    IS(sbrk(64 * PAGE) == (void *)-1 && sbrk(0) == end);
    TRY(munlockall());
    map("beyond it", 9 * PAGE, 0);
}

static void nothing(void)
{
    PART("nothing may be locked");
    char *p = mmap(NULL, PAGE, RW, ANON, -1, 0);
    limit_to(PAGE - 1);
    TRY(mlock(p, 1));
    limit_to(0);
    TRY(mlock(p, 1));
    TRY(munlock(p, 1));
    TRY(mlockall(MCL_FUTURE));
    map("locked", PAGE, MAP_LOCKED);
    map("not locked", PAGE, 0);
}

int main(void)
{
    pid_t child = MUST(fork());
    if (!child) {
        if (geteuid() == 0)
            MUST(setresuid(65534, 65534, 65534));
        ranges();
        new_memory();
        nothing();
        _exit(0);
    }
    waitpid(child, NULL, 0);
    return 0;
}
