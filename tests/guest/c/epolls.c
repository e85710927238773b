/* epoll(7): level and edge triggered, one shot, nesting, errors, timeouts. */
#include "guest.h"
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

static int ep;

static int add(int fd, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.u64 = (uint64_t)fd};
    return epoll_ctl(ep, EPOLL_CTL_ADD, fd, &event);
}

static int mod(int fd, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.u64 = (uint64_t)fd};
    return epoll_ctl(ep, EPOLL_CTL_MOD, fd, &event);
}

static int by_data(const void *a, const void *b)
{
    uint64_t x = ((struct epoll_event *)a)->data.u64, y = ((struct epoll_event *)b)->data.u64;
    return x < y ? -1 : x > y;
}

static void wait_for(const char *what, int which)
{
    struct epoll_event events[8];
    int got = epoll_wait(which, events, 8, 0);
    if (got > 0)
        qsort(events, (size_t)got, sizeof *events, by_data);
    say("%s: %d", what, got);
    for (int i = 0; i < got; i++)
        say(" [%lu:%x]", (unsigned long)events[i].data.u64, events[i].events);
    say("\n");
}

static double seconds(struct timespec a, struct timespec b)
{
    return (double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec) / 1e9;
}

int main(void)
{
    char *scratch = enter_scratch();
    int ends[2];
    char data[100];
    struct epoll_event event = {.events = EPOLLIN};

    PART("creation and errors");
    ep = TRY(epoll_create1(EPOLL_CLOEXEC));
    TRY(fcntl(ep, F_GETFD));
    TRY(close(epoll_create(1)));
    TRY(epoll_create(0));
    TRY(epoll_create1(77));
    MUST(pipe(ends));
    TRY(add(ends[0], EPOLLIN));
    TRY(add(ends[0], EPOLLIN));
    TRY(mod(ends[1], EPOLLIN));
    TRY(epoll_ctl(ep, EPOLL_CTL_DEL, ends[1], NULL));
    TRY(add(99, EPOLLIN));
    TRY(epoll_ctl(99, EPOLL_CTL_ADD, ends[1], &event));
    TRY(epoll_ctl(ends[0], EPOLL_CTL_ADD, ends[1], &event));
    TRY(add(ep, EPOLLIN));
    TRY(epoll_ctl(ep, 77, ends[0], &event));
    TRY(epoll_ctl(ep, EPOLL_CTL_ADD, ends[1], (struct epoll_event *)8));
    int file = MUST(open("file", O_CREAT | O_RDWR, 0644)), dir = MUST(open(".", O_RDONLY));
    TRY(add(file, EPOLLIN));
    TRY(add(dir, EPOLLIN));
    TRY(epoll_wait(ep, &event, 0, 0));
    TRY(epoll_wait(ep, &event, -1, 0));
    TRY(epoll_wait(ends[0], &event, 1, 0));
    TRY(epoll_wait(99, &event, 1, 0));
    MUST(write(ends[1], "x", 1));
    TRY(epoll_wait(ep, (struct epoll_event *)8, 1, 0));
    MUST(read(ends[0], data, 1));

    PART("level triggered");
    wait_for("nothing", ep);
    MUST(write(ends[1], "abc", 3));
    wait_for("data", ep);
    wait_for("still data", ep);
    MUST(read(ends[0], data, 2));
    wait_for("some left", ep);
    MUST(read(ends[0], data, 2));
    wait_for("none left", ep);
    TRY(add(ends[1], EPOLLOUT));
    wait_for("room", ep);
    TRY(mod(ends[1], 0));
    wait_for("asks for nothing", ep);
    TRY(epoll_ctl(ep, EPOLL_CTL_DEL, ends[1], NULL));

    PART("edge triggered");
    TRY(mod(ends[0], EPOLLIN | EPOLLET));
    MUST(write(ends[1], "abc", 3));
    wait_for("an edge", ep);
    wait_for("no new edge", ep);
    MUST(write(ends[1], "d", 1));
    wait_for("a new edge", ep);
    MUST(read(ends[0], data, 1));
    wait_for("after a partial read", ep);
    TRY(mod(ends[0], EPOLLIN | EPOLLET));
    wait_for("armed again by MOD", ep);
    MUST(read(ends[0], data, 100));

    PART("one shot");
    TRY(mod(ends[0], EPOLLIN | EPOLLONESHOT));
    MUST(write(ends[1], "abc", 3));
    wait_for("first", ep);
    MUST(write(ends[1], "abc", 3));
    wait_for("disarmed", ep);
    TRY(mod(ends[0], EPOLLIN | EPOLLONESHOT));
    wait_for("armed again", ep);
    TRY(mod(ends[0], EPOLLIN));
    MUST(read(ends[0], data, 100));

    PART("hang-up");
    int pair[2];
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    TRY(add(pair[0], EPOLLIN | EPOLLOUT | EPOLLRDHUP));
    wait_for("writable", ep);
    MUST(write(pair[1], "x", 1));
    wait_for("both", ep);
    MUST(shutdown(pair[1], SHUT_WR));
    wait_for("peer shut down", ep);
    MUST(close(pair[1]));
    wait_for("peer gone", ep);
    MUST(close(pair[0]));
    wait_for("closed: removed by itself", ep);

    PART("descriptors that are duplicated and closed");
    int counter = MUST(eventfd(1, 0));
    int twin = MUST(dup(counter));
    TRY(add(counter, EPOLLIN));
    TRY(add(twin, EPOLLIN));
    wait_for("both", ep);
    MUST(close(counter));
    wait_for("the description is still open", ep);
    MUST(close(twin));
    wait_for("gone", ep);

    PART("nesting");
    int inner = MUST(epoll_create1(0));
    counter = MUST(eventfd(0, 0));
    event.events = EPOLLIN;
    event.data.u64 = 1000;
    TRY(epoll_ctl(inner, EPOLL_CTL_ADD, counter, &event));
    TRY(add(inner, EPOLLIN));
    wait_for("outer, quiet", ep);
    uint64_t one = 1;
    MUST(write(counter, &one, 8));
    wait_for("outer", ep);
    wait_for("inner", inner);
    struct pollfd p = {.fd = ep, .events = POLLIN};
    TRY(poll(&p, 1, 0));
    TRY(epoll_ctl(inner, EPOLL_CTL_ADD, ep, &event)); /* a loop */
    MUST(read(counter, &one, 8));
    wait_for("outer, quiet again", ep);

    PART("fair order and maxevents");
    int counters[4];
    for (int i = 0; i < 4; i++) {
        counters[i] = MUST(eventfd(1, 0));
        MUST(add(counters[i], EPOLLIN));
    }
    struct epoll_event two[2];
    int seen[200] = {0};
    for (int round = 0; round < 2; round++) {
        int got = epoll_wait(ep, two, 2, 0);
        for (int i = 0; i < got; i++)
            seen[two[i].data.u64]++;
    }
    int distinct = 0;
    for (int i = 0; i < 4; i++)
        distinct += seen[counters[i]];
    say("two calls of two events saw %d descriptors\n", distinct);
    for (int i = 0; i < 4; i++)
        close(counters[i]);

    PART("timeouts");
    struct timespec before, after;
    clock_gettime(CLOCK_MONOTONIC, &before);
    TRY(epoll_wait(ep, two, 2, 30));
    clock_gettime(CLOCK_MONOTONIC, &after);
    IS(seconds(before, after) >= 0.029);
    TRY(epoll_pwait(ep, two, 2, 10, NULL));
    TRY(syscall(SYS_epoll_pwait, ep, two, 2, 0, &event, 3));
    struct timespec nanos = {.tv_nsec = 1000000};
    long got = syscall(SYS_epoll_pwait2, ep, two, 2, &nanos, NULL, 8);
    IS(got == 0 || errno == ENOSYS);
    leave_scratch(scratch);
    return 0;
}
