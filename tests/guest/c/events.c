/* eventfd(2): counter, semaphore mode, overflow, blocking flags, poll states. */
#include "guest.h"
#include <poll.h>
#include <sys/eventfd.h>

static void states(const char *what, int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLIN | POLLOUT};
    int got = poll(&p, 1, 0);
    say("%s: %d%s%s%s\n", what, got, p.revents & POLLIN ? " in" : "",
        p.revents & POLLOUT ? " out" : "", p.revents & POLLERR ? " err" : "");
}

static void put(int fd, uint64_t value)
{
    errno = 0;
    long got = write(fd, &value, 8);
    say("add %lx: %ld %s\n", (unsigned long)value, got, got < 0 ? error_name(errno) : "");
}

static void take(int fd)
{
    uint64_t value = 0;
    errno = 0;
    long got = read(fd, &value, 8);
    say("take: %ld %lx %s\n", got, (unsigned long)value, got < 0 ? error_name(errno) : "");
}

int main(void)
{
    char data[16] = {0};

    PART("counter");
    int fd = TRY(eventfd(5, EFD_NONBLOCK));
    states("five", fd);
    take(fd);
    states("zero", fd);
    take(fd);
    put(fd, 2);
    put(fd, 3);
    take(fd);
    put(fd, 0);
    take(fd);

    PART("limits");
    put(fd, ~0UL);
    put(fd, ~0UL - 1);
    states("full", fd);
    put(fd, 1);
    put(fd, 0);
    take(fd);
    put(fd, ~0UL - 2);
    put(fd, 1);
    put(fd, 1);
    take(fd);
    TRY(write(fd, data, 7));
    TRY(read(fd, data, 7));
    data[0] = 1;
    TRY(read(fd, data, 16));
    TRY(pread(fd, data, 8, 0));
    TRY(write(fd, (void *)8, 8));

    PART("semaphore");
    int semaphore = TRY(eventfd(3, EFD_SEMAPHORE | EFD_NONBLOCK | EFD_CLOEXEC));
    for (int i = 0; i < 4; i++)
        take(semaphore);
    TRY(fcntl(semaphore, F_GETFD));
    TRY(fcntl(semaphore, F_GETFL));

    PART("errors and the old call");
    TRY(eventfd(0, 12345));
    int old = TRY(syscall(SYS_eventfd, 1));
    take(old);
    int twin = TRY(dup(old));
    put(twin, 9);
    take(old);
    struct stat st;
    TRY(fstat(old, &st));
    return 0;
}
