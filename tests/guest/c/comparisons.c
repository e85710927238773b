/* kcmp(2): what two processes share. */
#include "guest.h"
#include <linux/kcmp.h>
#include <sched.h>
#include <sys/wait.h>

static long compare(pid_t a, pid_t b, int kind, unsigned long x, unsigned long y)
{
    return syscall(SYS_kcmp, a, b, kind, x, y);
}

static void show(const char *name, pid_t other)
{
    pid_t own = getpid();
    say("%s: memory %s, files %s, directories %s, handlers %s\n", name,
        compare(own, other, KCMP_VM, 0, 0) ? "differs" : "same",
        compare(own, other, KCMP_FILES, 0, 0) ? "differs" : "same",
        compare(own, other, KCMP_FS, 0, 0) ? "differs" : "same",
        compare(own, other, KCMP_SIGHAND, 0, 0) ? "differs" : "same");
}

static void end(pid_t child)
{
    kill(child, SIGKILL);
    MUST(waitpid(child, NULL, __WALL));
}

int main(void)
{
    pid_t own = getpid();
    show("itself", own);
    int fd = MUST(open("/", O_RDONLY)), copy = MUST(dup(fd)), other = MUST(open("/", O_RDONLY));
    TRY(compare(own, own, KCMP_FILE, fd, copy));
    long first = compare(own, own, KCMP_FILE, fd, other), second = compare(own, own, KCMP_FILE, other, fd);
    IS(first > 0 && second > 0 && first + second == 3);
    TRY(compare(own, own, KCMP_FILE, fd, 99));
    TRY(compare(own, own, 99, 0, 0));
    TRY(compare(own, 999999, KCMP_VM, 0, 0));
    TRY(compare(own, -1, KCMP_VM, 0, 0));
    pid_t child = MUST(fork());
    if (!child)
        for (;;)
            pause();
    show("child", child);
    TRY(compare(own, child, KCMP_FILE, fd, fd));
    end(child);
    child = (pid_t)MUST(syscall(SYS_clone, CLONE_FILES | CLONE_FS | SIGCHLD, 0, 0, 0, 0));
    if (!child)
        for (;;)
            pause();
    show("child that shares", child);
    /* Another user may not look. */
    pid_t stranger = MUST(fork());
    if (!stranger) {
        MUST(setgid(65534));
        MUST(setuid(65534));
        TRY(compare(getpid(), child, KCMP_VM, 0, 0));
        TRY(compare(getpid(), getpid(), KCMP_VM, 0, 0));
        _exit(0);
    }
    MUST(waitpid(stranger, NULL, 0));
    end(child);
    return 0;
}
