/* mmap(2) and munmap(2) of anonymous memory: placement, flags, errors, holes. */
#include "guest.h"
#include <sys/mman.h>

#define PAGE 4096UL
#define RW (PROT_READ | PROT_WRITE)
#define ANON (MAP_PRIVATE | MAP_ANONYMOUS)

static bool all(const char *at, size_t len, char value)
{
    for (size_t i = 0; i < len; i++)
        if (at[i] != value)
            return false;
    return true;
}

int main(void)
{
    PART("anonymous");
    char *p = mmap(NULL, 10 * PAGE, RW, ANON, -1, 0);
    IS(p != MAP_FAILED && ((uintptr_t)p & (PAGE - 1)) == 0);
    IS(all(p, 10 * PAGE, 0));
    memset(p, 7, 10 * PAGE);
    TRY(munmap(p + 3 * PAGE, 2 * PAGE));
    IS(all(p, 3 * PAGE, 7) && all(p + 5 * PAGE, 5 * PAGE, 7));
    char *q = mmap(p + 3 * PAGE, 2 * PAGE, RW, ANON | MAP_FIXED, -1, 0);
    IS(q == p + 3 * PAGE);
    IS(all(q, 2 * PAGE, 0));
    q = mmap(p + 4 * PAGE, PAGE, RW, ANON | MAP_FIXED, -1, 0);
    IS(q == p + 4 * PAGE && all(p + 5 * PAGE, PAGE, 7));
    TRY(munmap(p, 10 * PAGE));
    TRY(munmap(p, 10 * PAGE)); /* nothing there: no error */
    IS(mmap(NULL, 1, RW, ANON, -1, 0) != MAP_FAILED);

    PART("hints");
    p = mmap(NULL, 4 * PAGE, RW, ANON, -1, 0);
    munmap(p, 4 * PAGE);
    IS(mmap(p, 4 * PAGE, RW, ANON, -1, 0) == p);
    q = mmap(p, 4 * PAGE, RW, ANON, -1, 0); /* taken: elsewhere */
    IS(q != p && q != MAP_FAILED);
    q = mmap(p + 123, PAGE, RW, ANON, -1, 0);
    IS(q != MAP_FAILED && ((uintptr_t)q & (PAGE - 1)) == 0);
    q = mmap((void *)0x1234567000, PAGE, RW, ANON, -1, 0);
    IS(q == (void *)0x1234567000);
    q = mmap(NULL, PAGE, RW, ANON | MAP_32BIT, -1, 0);
    IS((uintptr_t)q < 1UL << 32);
    q = mmap((void *)0x50000000, PAGE, RW, ANON | MAP_32BIT, -1, 0);
    IS(q == (void *)0x50000000);
    q = mmap((void *)0x50000000, PAGE, RW, ANON | MAP_32BIT, -1, 0); /* taken: elsewhere */
    IS(q != (void *)0x50000000 && (uintptr_t)q < 1UL << 32);
    q = mmap((void *)0x1235567000, PAGE, RW, ANON | MAP_32BIT, -1, 0); /* too high */
    IS((uintptr_t)q < 1UL << 32);

    PART("MAP_FIXED_NOREPLACE");
    errno = 0;
    IS(mmap(p, PAGE, RW, ANON | MAP_FIXED_NOREPLACE, -1, 0) == MAP_FAILED && errno == EEXIST);
    munmap(p + PAGE, PAGE);
    IS(mmap(p + PAGE, PAGE, RW, ANON | MAP_FIXED_NOREPLACE, -1, 0) == p + PAGE);
    errno = 0;
    IS(mmap(p - PAGE, 3 * PAGE, RW, ANON | MAP_FIXED_NOREPLACE, -1, 0) == MAP_FAILED &&
       errno == EEXIST);

    PART("errors");
    TRY(mmap(NULL, 0, RW, ANON, -1, 0));
    TRY(mmap(NULL, PAGE, RW, MAP_ANONYMOUS, -1, 0));
    TRY(mmap(NULL, PAGE, RW, MAP_PRIVATE, -1, 0));
    TRY(mmap(NULL, PAGE, RW, MAP_PRIVATE, 77, 0));
    TRY(mmap(p + 1, PAGE, RW, ANON | MAP_FIXED, -1, 0));
    TRY(mmap(NULL, 1UL << 60, RW, ANON | MAP_NORESERVE, -1, 0));
    TRY(mmap(NULL, ~0UL, RW, ANON, -1, 0));
    TRY(mmap((void *)(1UL << 62), PAGE, RW, ANON | MAP_FIXED, -1, 0));
    TRY(munmap(p + 1, PAGE));
    TRY(munmap(p, 0));
    TRY(munmap((void *)(1UL << 63), PAGE));
    TRY(syscall(SYS_mmap, 0, PAGE, RW, ANON, -1, 1));
    int ends[2];
    MUST(pipe(ends));
    TRY(mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, ends[0], 0));
    int dir = MUST(open("/tmp", O_RDONLY));
    TRY(mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, dir, 0));

    PART("big reservations");
    size_t huge = 64UL << 30;
    p = mmap(NULL, huge, PROT_NONE, ANON | MAP_NORESERVE, -1, 0);
    IS(p != MAP_FAILED);
    TRY(mprotect(p + (32UL << 30), 16 * PAGE, RW));
    memset(p + (32UL << 30), 1, 16 * PAGE);
    IS(p[(32UL << 30) + 15 * PAGE] == 1);
    char *aligned = (char *)(((uintptr_t)p + (1UL << 30)) & ~((1UL << 30) - 1));
    TRY(munmap(p, (size_t)(aligned - p)));
    TRY(munmap(aligned + (40UL << 30), (size_t)(p + huge - aligned - (40UL << 30))));
    IS(p[(32UL << 30)] == 1);
    TRY(munmap(aligned, 40UL << 30));
    p = mmap(NULL, 1UL << 40, PROT_NONE, ANON | MAP_NORESERVE, -1, 0);
    IS(p != MAP_FAILED);
    TRY(munmap(p, 1UL << 40));

    PART("shared anonymous");
    p = mmap(NULL, 2 * PAGE, RW, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    IS(p != MAP_FAILED && all(p, 2 * PAGE, 0));
    strcpy(p, "shared");
    say("%s\n", p);
    TRY(munmap(p, 2 * PAGE));

    PART("many mappings");
    char *base = mmap(NULL, 2000 * PAGE, PROT_NONE, ANON, -1, 0);
    for (size_t i = 0; i < 1000; i++)
        MUST(mprotect(base + 2 * i * PAGE, PAGE, RW));
    for (size_t i = 0; i < 1000; i++)
        base[2 * i * PAGE] = (char)i;
    bool right = true;
    for (size_t i = 0; i < 1000; i++)
        right &= base[2 * i * PAGE] == (char)i;
    IS(right);
    TRY(munmap(base, 2000 * PAGE));
    for (int i = 0; i < 3000; i++) {
        p = mmap(NULL, (size_t)(1 + i % 7) * PAGE, RW, ANON, -1, 0);
        p[0] = 1;
        MUST(munmap(p, (size_t)(1 + i % 7) * PAGE));
    }
    say("3000 times mapped and unmapped\n");

    PART("stack growth");
    volatile char stack[1 << 20];
    for (long i = (long)sizeof stack - 1; i >= 0; i -= 1000)
        stack[i] = 1;
    IS(stack[sizeof stack - 1] == 1);
    p = mmap(NULL, 4 * PAGE, RW, ANON | MAP_STACK, -1, 0);
    IS(p != MAP_FAILED);
    p = mmap(NULL, 4 * PAGE, RW, ANON | MAP_POPULATE, -1, 0);
    IS(p != MAP_FAILED && all(p, 4 * PAGE, 0));
    return 0;
}
