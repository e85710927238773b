/* mremap(2), brk(2), madvise(2), mincore(2), mlock(2). */
#include "guest.h"
#include <sys/mman.h>

#define PAGE 4096UL
#define RW (PROT_READ | PROT_WRITE)
#define ANON (MAP_PRIVATE | MAP_ANONYMOUS)

int main(void)
{
    char *scratch = enter_scratch();

    PART("mremap");
    char *area = mmap(NULL, 16 * PAGE, PROT_NONE, ANON, -1, 0);
    char *p = mmap(area, 4 * PAGE, RW, ANON | MAP_FIXED, -1, 0);
    munmap(area + 4 * PAGE, 4 * PAGE);
    for (int i = 0; i < 4; i++)
        p[(size_t)i * PAGE] = (char)('a' + i);
    IS(mremap(p, 4 * PAGE, 2 * PAGE, 0) == p);
    unsigned char resident[4];
    errno = 0;
    IS(mincore(p + 2 * PAGE, PAGE, resident) == -1 && errno == ENOMEM);
    IS(mremap(p, 2 * PAGE, 2 * PAGE, 0) == p);
    IS(mremap(p, PAGE + 1, PAGE + 2, MREMAP_MAYMOVE) == p); /* the same pages */
    IS(mremap(p, 2 * PAGE, 6 * PAGE, 0) == p); /* room behind it */
    IS(p[0] == 'a' && p[PAGE] == 'b' && p[2 * PAGE] == 0 && p[5 * PAGE] == 0);
    errno = 0;
    IS(mremap(p, 6 * PAGE, 12 * PAGE, 0) == MAP_FAILED && errno == ENOMEM);
    char *moved = mremap(p, 6 * PAGE, 12 * PAGE, MREMAP_MAYMOVE);
    IS(moved != MAP_FAILED && moved != p);
    IS(moved[0] == 'a' && moved[PAGE] == 'b' && moved[11 * PAGE] == 0);
    errno = 0;
    IS(mincore(p, PAGE, resident) == -1 && errno == ENOMEM);
    char *fixed = mremap(moved, 12 * PAGE, 3 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, area);
    IS(fixed == area && fixed[PAGE] == 'b');
    errno = 0;
    IS(mremap(fixed, 3 * PAGE, 3 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, area + PAGE) == MAP_FAILED &&
       errno == EINVAL);
    TRY(mremap(fixed + 1, PAGE, PAGE, 0));
    TRY(mremap(fixed, PAGE, 0, 0));
    TRY(mremap(fixed, PAGE, 2 * PAGE, MREMAP_FIXED, area));
    TRY(mremap(fixed, PAGE, PAGE, 128));
    TRY(mremap((void *)(1UL << 40), PAGE, 2 * PAGE, MREMAP_MAYMOVE));
    fixed[2 * PAGE] = 'z';
    char *big = mremap(fixed, 3 * PAGE, 8UL << 20, MREMAP_MAYMOVE);
    IS(big != MAP_FAILED && big[2 * PAGE] == 'z');
    memset(big, 'B', 8UL << 20);
    IS(mremap(big, 8UL << 20, PAGE, 0) == big && big[0] == 'B');
    /* Larger than any address space; the error has changed over time. */
    IS(mremap(big, PAGE, -(size_t)PAGE, MREMAP_MAYMOVE) == MAP_FAILED);
    IS(mremap(big, PAGE, (size_t)1 << 63, 0) == MAP_FAILED);
    int fd = MUST(open("f", O_RDWR | O_CREAT, 0644));
    MUST(ftruncate(fd, 4 * PAGE));
    MUST(pwrite(fd, "third", 5, 2 * PAGE));
    char *file = mmap(NULL, PAGE, RW, MAP_SHARED, fd, 0);
    file = mremap(file, PAGE, 4 * PAGE, MREMAP_MAYMOVE);
    say("%.5s\n", file + 2 * PAGE);

    PART("brk");
    char *start = sbrk(0);
    IS(sbrk(10000) == start);
    memset(start, 5, 10000);
    IS(sbrk(0) == start + 10000);
    IS(sbrk(-10000) == start + 10000);
    IS(sbrk(0) == start);
    sbrk(20000);
    bool clean = true;
    char *page = (char *)(((uintptr_t)start + PAGE - 1) & ~(PAGE - 1));
    for (size_t i = 0; i < 2 * PAGE; i++)
        clean &= page[i] == 0;
    IS(clean);
    sbrk(-20000);
    IS((char *)syscall(SYS_brk, 0) == start);
    IS((char *)syscall(SYS_brk, 4096) == start); /* refused: unchanged */
    IS(sbrk(1L << 46) == (void *)-1 && errno == ENOMEM);

    PART("madvise");
    p = mmap(NULL, 8 * PAGE, RW, ANON, -1, 0);
    memset(p, 9, 8 * PAGE);
    TRY(madvise(p + 2 * PAGE, 2 * PAGE, MADV_DONTNEED));
    IS(p[PAGE] == 9 && p[2 * PAGE] == 0 && p[4 * PAGE - 1] == 0 && p[4 * PAGE] == 9);
    TRY(madvise(p, PAGE, MADV_NORMAL));
    TRY(madvise(p, PAGE, MADV_WILLNEED));
    TRY(madvise(p, PAGE, MADV_SEQUENTIAL));
    TRY(madvise(p, PAGE, MADV_DONTFORK));
    TRY(madvise(p, PAGE, MADV_DOFORK));
    TRY(madvise(p, PAGE, MADV_DONTDUMP));
    TRY(madvise(p, PAGE, MADV_WIPEONFORK));
    TRY(madvise(p, PAGE, MADV_KEEPONFORK));
    long advice = madvise(p, PAGE, MADV_FREE);
    IS(advice == 0 && (p[0] == 9 || p[0] == 0));
    TRY(madvise(p, PAGE, 12345));
    TRY(madvise(p + 1, PAGE, MADV_DONTNEED));
    TRY(madvise(p, 0, MADV_DONTNEED));
    munmap(p + 7 * PAGE, PAGE);
    TRY(madvise(p + 6 * PAGE, 2 * PAGE, MADV_DONTNEED));
    IS(p[6 * PAGE] == 0);
    TRY(mprotect(p, PAGE, PROT_READ));
    TRY(madvise(p, PAGE, MADV_DONTNEED));
    IS(p[0] == 0);
    file[0] = 'F';
    TRY(madvise(file, PAGE, MADV_DONTNEED));
    say("%c\n", file[0]);
    char *private = mmap(NULL, PAGE, RW, MAP_PRIVATE, fd, 0);
    private[0] = 'P';
    TRY(madvise(private, PAGE, MADV_DONTNEED));
    say("%c\n", private[0]);
    TRY(madvise(private, PAGE, MADV_WIPEONFORK));

    PART("madvise where the program has no memory");
    /* In a sandbox these are the kernel's: text, heap, page store, index, what a boot has. */
    static const uintptr_t foreign[] = {
        0x7e0000000000, 0x7e1000000000, 0x7e2000000000, 0x7e8000000000, 0x7e9000000000,
    };
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++) {
        TRY(madvise((void *)foreign[i], PAGE, MADV_POPULATE_READ));
        TRY(madvise((void *)foreign[i], PAGE, MADV_POPULATE_WRITE));
        TRY(madvise((void *)foreign[i], PAGE, MADV_DONTNEED));
        TRY(madvise((void *)foreign[i], PAGE, MADV_FREE));
    }

    PART("mincore");
    unsigned char map[8];
    p = mmap(NULL, 4 * PAGE, RW, ANON, -1, 0);
    p[0] = 1;
    TRY(mincore(p, 4 * PAGE, map));
    IS(map[0] & 1);
    TRY(mincore(p + 1, PAGE, map));
    TRY(mincore(p, PAGE, (void *)8));

    PART("mlock");
    TRY(mlock(p, PAGE));
    TRY(munlock(p, PAGE));
    TRY(mlock((void *)(1UL << 40), PAGE));
    TRY(munlockall());
    TRY(mlockall(0));
    leave_scratch(scratch);
    return 0;
}
