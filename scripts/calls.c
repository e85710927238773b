/* Times a few system calls in a loop, for docs/performance.md:
 *   gcc -O2 -o /tmp/calls scripts/calls.c
 *   /tmp/calls; thaw run --rootfs / -- /tmp/calls */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

#define TIME(name, count, what)                                     \
    do {                                                            \
        for (int i = 0; i < 100; i++)                               \
            what;                                                   \
        double begin = now();                                       \
        for (int i = 0; i < (count); i++)                           \
            what;                                                   \
        printf("%-18s %8.1f ns\n", name, (now() - begin) / (count)); \
    } while (0)

int main(void)
{
    int zero = open("/dev/zero", O_RDONLY), null = open("/dev/null", O_WRONLY), ends[2];
    char byte = 0;
    struct stat attributes;
    struct timespec time;
    if (zero < 0 || null < 0 || pipe(ends) < 0)
        return 1;
    TIME("getppid", 1000000, getppid());
    TIME("syscall(getppid)", 1000000, syscall(SYS_getppid));
    TIME("clock_gettime", 1000000, clock_gettime(CLOCK_MONOTONIC, &time));
    TIME("read 1 byte", 1000000, if (read(zero, &byte, 1) != 1) return 1);
    TIME("write 1 byte", 1000000, if (write(null, &byte, 1) != 1) return 1);
    TIME("stat", 200000, stat("/usr/bin/env", &attributes));
    TIME("open+close", 200000, close(open("/usr/bin/env", O_RDONLY)));
    TIME("pipe write+read", 500000, if (write(ends[1], &byte, 1) + read(ends[0], &byte, 1) != 2) return 1);
    return 0;
}
