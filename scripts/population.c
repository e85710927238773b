/* Compares ways to get private copies of 450 scattered pages of a resident file,
 * for docs/decisions/0004:
 *   gcc -O2 -o /tmp/population scripts/population.c && (cd /tmp && ./population) */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
#define LENGTH (10UL << 20)
#define PAGES 450
#define RUNS 1501
#define PIDFD_SELF (-10000)
#define POPULATE_READ 22
#define POPULATE_WRITE 23

static const char *const ways[] = {
    "touch each page",        "madvise each run",       "one process_madvise",
    "preadv, anonymous",      "preadv, private file",   "populate-read 10 MiB",
    "populate-write 1024 pages",
};

static int file;
static struct iovec pages[PAGES];

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static long go(int way, char *base)
{
    long result = 0;
    switch (way) {
    case 0:
        for (int i = 0; i < PAGES; i++)
            *(volatile char *)pages[i].iov_base = 1;
        return 0;
    case 1:
        for (int i = 0; i < PAGES; i++)
            result |= madvise(pages[i].iov_base, PAGE, POPULATE_WRITE);
        return result;
    case 2:
        return syscall(SYS_process_madvise, PIDFD_SELF, pages, PAGES, POPULATE_WRITE, 0) < 0;
    case 3:
    case 4:
        return preadv(file, pages, PAGES, 0) != (long)(PAGES * PAGE);
    case 5:
        return madvise(base, LENGTH, POPULATE_READ);
    default:
        return madvise(base, 1024 * PAGE, POPULATE_WRITE);
    }
}

/* In a child, so that every run begins without pages. */
static double run(int way)
{
    int ends[2];
    double time = -1;
    if (pipe(ends) < 0)
        exit(1);
    if (fork() == 0) {
        int flags = MAP_PRIVATE | (way == 3 ? MAP_ANONYMOUS : 0);
        char *base = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, flags, way == 3 ? -1 : file, 0);
        srand(1);
        for (int i = 0, page = 0; i < PAGES; page++)
            if (rand() % 5 == 0)
                pages[i++] = (struct iovec){base + page % 2560 * PAGE, PAGE};
        double begin = now();
        if (go(way, base) == 0)
            time = now() - begin;
        _exit(write(ends[1], &time, sizeof time) != sizeof time);
    }
    if (read(ends[0], &time, sizeof time) != sizeof time)
        exit(1);
    close(ends[0]);
    close(ends[1]);
    wait(NULL);
    return time;
}

static int order(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(void)
{
    static char content[LENGTH];
    static double times[RUNS];
    file = open("population.data", O_RDWR | O_CREAT | O_TRUNC, 0600);
    memset(content, 7, sizeof content);
    if (file < 0 || write(file, content, sizeof content) != (long)sizeof content)
        return 1;
    unlink("population.data");
    for (int way = 0; way < 7; way++) {
        for (int i = 0; i < RUNS; i++)
            times[i] = run(way);
        qsort(times, RUNS, sizeof *times, order);
        if (times[0] < 0)
            printf("%-26s not on this kernel\n", ways[way]);
        else
            printf("%-26s %7.0f us\n", ways[way], times[RUNS / 2]);
    }
    return 0;
}
