/* Ends as its arguments say: "code N", "signal N", "group N", "abort", "segv",
 * "fpe", "ill", "trap", "bus", "pipe". */
#include "guest.h"
#include <sys/mman.h>

int main(int argc, char **argv)
{
    const char *how = argc > 1 ? argv[1] : "code";
    int number = argc > 2 ? atoi(argv[2]) : 0;

    say("leaving by %s %d\n", how, number);
    if (!strcmp(how, "code"))
        exit(number);
    if (!strcmp(how, "group"))
        syscall(SYS_exit_group, number);
    if (!strcmp(how, "thread"))
        syscall(SYS_exit, number);
    if (!strcmp(how, "signal"))
        kill(getpid(), number);
    if (!strcmp(how, "abort"))
        abort();
    if (!strcmp(how, "segv"))
        *(volatile int *)16 = 1;
    if (!strcmp(how, "fpe"))
        __asm__ volatile("xorl %%eax, %%eax; cltd; idivl %%eax" ::: "eax", "edx");
    if (!strcmp(how, "ill"))
        __asm__ volatile("ud2");
    if (!strcmp(how, "trap"))
        __asm__ volatile("int3");
    if (!strcmp(how, "pipe")) {
        int ends[2];
        MUST(pipe(ends));
        close(ends[0]);
        (void)!write(ends[1], "x", 1);
    }
    if (!strcmp(how, "bus")) {
        char path[] = "/tmp/thaw-guest-bus-XXXXXX";
        int fd = (int)MUST(mkstemp(path));
        unlink(path);
        volatile char *page = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, fd, 0);
        say("%d\n", *page);
    }
    say("still here\n");
    return 98;
}
