/* Locks among processes: waiting, ownership, deadlock, release at the end. */
#include "guest.h"
#include <sys/file.h>
#include <sys/time.h>
#include <sys/wait.h>

static int set(int fd, int command, short type, long start, long len)
{
    struct flock flock = {.l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = len};
    return fcntl(fd, command, &flock);
}

static int holder(int fd, pid_t child)
{
    struct flock flock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    MUST(fcntl(fd, F_GETLK, &flock));
    say("held: %s\n", flock.l_type == F_UNLCK ? "by nobody"
                      : flock.l_pid == child  ? "by the child"
                                              : "by somebody else");
    return flock.l_type;
}

static void finish(pid_t child)
{
    int status;
    MUST(waitpid(child, &status, 0));
    say("child: %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
}

static int to_child[2], to_parent[2];

static void tell(int fd) { MUST(write(fd, "x", 1)); }

static void hear(int fd)
{
    char byte;
    MUST(read(fd, &byte, 1));
}

static void on_alarm(int signal) { (void)signal; }

int main(void)
{
    char *scratch = enter_scratch();
    put_file("file", "0123456789");
    int fd = (int)MUST(open("file", O_RDWR));
    MUST(pipe(to_child));
    MUST(pipe(to_parent));

    PART("a child does not inherit record locks");
    TRY(set(fd, F_SETLK, F_WRLCK, 0, 5));
    pid_t child = fork();
    if (child == 0)
        _exit(set(fd, F_SETLK, F_WRLCK, 0, 1) < 0 && errno == EAGAIN ? 7 : 8);
    finish(child);
    TRY(set(fd, F_SETLK, F_UNLCK, 0, 0));

    PART("waiting, and release at the end of a process");
    child = fork();
    if (child == 0) {
        set(fd, F_SETLK, F_WRLCK, 0, 0);
        tell(to_parent[1]);
        hear(to_child[0]);
        usleep(50000);
        _exit(0);
    }
    hear(to_parent[0]);
    holder(fd, child);
    TRY(set(fd, F_SETLK, F_WRLCK, 3, 1));
    TRY(set(fd, F_SETLK, F_RDLCK, 3, 1));
    tell(to_child[1]);
    TRY(set(fd, F_SETLKW, F_WRLCK, 3, 1));
    finish(child);
    TRY(set(fd, F_SETLK, F_UNLCK, 0, 0));

    PART("a signal ends the wait");
    child = fork();
    if (child == 0) {
        set(fd, F_SETLK, F_WRLCK, 0, 0);
        tell(to_parent[1]);
        hear(to_child[0]);
        _exit(0);
    }
    hear(to_parent[0]);
    struct sigaction action = {.sa_handler = on_alarm};
    MUST(sigaction(SIGALRM, &action, NULL));
    struct timeval soon = {0, 50000};
    struct itimerval timer = {{0, 0}, soon};
    MUST(setitimer(ITIMER_REAL, &timer, NULL));
    TRY(set(fd, F_SETLKW, F_WRLCK, 0, 1));
    tell(to_child[1]);
    finish(child);

    PART("two that would wait for each other");
    TRY(set(fd, F_SETLK, F_WRLCK, 0, 1));
    child = fork();
    if (child == 0) {
        set(fd, F_SETLK, F_WRLCK, 1, 1);
        tell(to_parent[1]);
        _exit(set(fd, F_SETLKW, F_WRLCK, 0, 1) == 0 ? 0 : errno == EDEADLK ? 2 : 3);
    }
    hear(to_parent[0]);
    usleep(100000);
    TRY(set(fd, F_SETLKW, F_WRLCK, 1, 1));
    TRY(set(fd, F_SETLK, F_UNLCK, 0, 0));
    finish(child);
    holder(fd, 0);

    PART("descriptions are shared with children");
    TRY(flock(fd, LOCK_EX));
    child = fork();
    if (child == 0)
        _exit(flock(fd, LOCK_EX | LOCK_NB) == 0 ? 4 : 5);
    finish(child);
    int other = (int)MUST(open("file", O_RDWR));
    TRY(flock(other, LOCK_EX | LOCK_NB));
    child = fork();
    if (child == 0) {
        tell(to_parent[1]);
        hear(to_child[0]);
        usleep(50000);
        flock(fd, LOCK_UN);
        _exit(0);
    }
    hear(to_parent[0]);
    tell(to_child[1]);
    TRY(flock(other, LOCK_EX));
    finish(child);
    leave_scratch(scratch);
    return 0;
}
