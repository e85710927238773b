/* Interrupted system calls: EINTR without and restart with SA_RESTART, partial
 * results, timers that interrupt (signal(7)). */
#include "guest.h"
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/time.h>

static volatile sig_atomic_t alarms;
static int feed = -1;

static void on_alarm(int signal)
{
    (void)signal;
    alarms++;
    if (feed >= 0 && alarms >= 2)
        (void)!write(feed, "data", 4);
}

static void every(int first_ms, int then_ms)
{
    struct itimerval timer = {
        .it_value = {.tv_usec = first_ms * 1000}, .it_interval = {.tv_usec = then_ms * 1000}};
    MUST(setitimer(ITIMER_REAL, &timer, NULL));
}

static void install(int flags)
{
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = flags};
    MUST(sigaction(SIGALRM, &action, NULL));
    alarms = 0;
}

int main(void)
{
    int ends[2], pair[2];
    char data[100];

    MUST(pipe(ends));
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));

    PART("without SA_RESTART");
    install(0);
    every(20, 0);
    TRY(read(ends[0], data, 100));
    every(20, 0);
    TRY(recv(pair[0], data, 100, 0));
    every(20, 0);
    struct timespec duration = {.tv_sec = 3}, left = {0};
    TRY(nanosleep(&duration, &left));
    IS(left.tv_sec == 2 && left.tv_nsec > 0);
    every(20, 0);
    TRY(clock_nanosleep(CLOCK_MONOTONIC, 0, &duration, &left));
    every(20, 0);
    TRY(usleep(900000));
    int ep = MUST(epoll_create1(0));
    struct epoll_event event;
    every(20, 0);
    TRY(epoll_wait(ep, &event, 1, 5000));
    say("alarms %d\n", alarms);

    PART("with SA_RESTART");
    install(SA_RESTART);
    feed = ends[1];
    every(20, 20);
    TRY(read(ends[0], data, 100));
    every(0, 0);
    IS(alarms >= 2);
    install(SA_RESTART);
    feed = pair[1];
    every(20, 20);
    TRY(recv(pair[0], data, 100, 0));
    every(0, 0);
    IS(alarms >= 2);
    feed = -1;
    install(SA_RESTART);
    every(20, 0);
    TRY(nanosleep(&duration, &left)); /* never restarted after a handler */
    every(20, 0);
    TRY(epoll_wait(ep, &event, 1, 5000));
    every(20, 0);
    TRY(poll(NULL, 0, 5000));

    PART("ignored signals do not interrupt");
    signal(SIGALRM, SIG_IGN);
    every(10, 10);
    duration.tv_sec = 0, duration.tv_nsec = 60000000;
    TRY(nanosleep(&duration, NULL));
    every(0, 0);

    PART("blocked signals do not interrupt");
    install(0);
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGALRM);
    sigprocmask(SIG_BLOCK, &set, NULL);
    every(10, 0);
    TRY(nanosleep(&duration, NULL));
    say("alarms %d\n", alarms);
    sigprocmask(SIG_UNBLOCK, &set, NULL);
    say("alarms %d\n", alarms);

    PART("a busy program is interrupted");
    install(0);
    every(20, 0);
    while (!alarms)
        ;
    say("alarms %d\n", alarms);
    PART("a partial write");
    signal(SIGPIPE, SIG_IGN);
    MUST(fcntl(ends[1], F_SETPIPE_SZ, 4096));
    install(0);
    static char block[20000];
    every(30, 0);
    long wrote = write(ends[1], block, sizeof block);
    say("wrote %ld\n", wrote);
    every(30, 0);
    TRY(write(ends[1], block, 1));
    return 0;
}
