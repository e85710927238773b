/* poll(2), ppoll(2), select(2), pselect(2). */
#include "guest.h"
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/time.h>

static volatile sig_atomic_t alarms;
static void on_alarm(int signal) { (void)signal; alarms++; }

static double since(struct timespec before)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)(now.tv_sec - before.tv_sec) + (double)(now.tv_nsec - before.tv_nsec) / 1e9;
}

int main(void)
{
    char *scratch = enter_scratch();
    int ends[2];
    char data[10];
    struct timespec before;

    MUST(pipe(ends));
    int file = MUST(open("f", O_CREAT | O_RDWR, 0644));
    int null = MUST(open("/dev/null", O_RDWR)), dir = MUST(open(".", O_RDONLY));

    PART("poll");
    struct pollfd p[6] = {
        {.fd = ends[0], .events = POLLIN}, {.fd = ends[1], .events = POLLOUT},
        {.fd = file, .events = POLLIN | POLLOUT}, {.fd = 99, .events = POLLIN},
        {.fd = -1, .events = POLLIN}, {.fd = null, .events = POLLIN | POLLOUT},
    };
    TRY(poll(p, 6, 0));
    for (int i = 0; i < 6; i++)
        say("revents[%d] %x\n", i, p[i].revents);
    MUST(write(ends[1], "x", 1));
    TRY(poll(p, 1, -1));
    struct pollfd d = {.fd = dir, .events = POLLIN | POLLOUT};
    TRY(poll(&d, 1, 0));
    say("directory %x\n", d.revents);
    TRY(poll(NULL, 0, 0));
    TRY(poll((struct pollfd *)8, 1, 0));
    TRY(poll(NULL, 100000000, 0));
    MUST(read(ends[0], data, 1));
    clock_gettime(CLOCK_MONOTONIC, &before);
    TRY(poll(p, 1, 25));
    IS(since(before) >= 0.024);
    p[0].revents = 77;
    TRY(poll(p, 1, 0));
    say("revents %d\n", p[0].revents);

    PART("ppoll");
    struct timespec timeout = {.tv_nsec = 20000000};
    TRY(ppoll(p, 1, &timeout, NULL));
    say("timeout is unchanged: %ld\n", timeout.tv_nsec);
    timeout.tv_nsec = -1;
    TRY(ppoll(p, 1, &timeout, NULL));
    timeout.tv_nsec = 1000000000;
    TRY(ppoll(p, 1, &timeout, NULL));
    struct sigaction action = {.sa_handler = on_alarm};
    sigset_t blocked, none;
    sigemptyset(&none);
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGALRM);
    MUST(sigaction(SIGALRM, &action, NULL));
    MUST(sigprocmask(SIG_BLOCK, &blocked, NULL));
    raise(SIGALRM);
    timeout.tv_sec = 5, timeout.tv_nsec = 0;
    TRY(poll(p, 1, 5));
    say("alarms %d\n", alarms);
    TRY(ppoll(p, 1, &timeout, &none));
    say("alarms %d\n", alarms);
    sigset_t now;
    MUST(sigprocmask(SIG_SETMASK, NULL, &now));
    IS(sigismember(&now, SIGALRM) == 1);

    PART("select");
    fd_set in, out, error;
    struct timeval tv = {.tv_usec = 10000};
    FD_ZERO(&in);
    FD_ZERO(&out);
    FD_ZERO(&error);
    FD_SET(ends[0], &in);
    FD_SET(file, &in);
    FD_SET(ends[1], &out);
    FD_SET(file, &error);
    TRY(select(file + 1, &in, &out, &error, &tv));
    say("in %d %d out %d error %d\n", FD_ISSET(ends[0], &in) != 0, FD_ISSET(file, &in) != 0,
        FD_ISSET(ends[1], &out) != 0, FD_ISSET(file, &error) != 0);
    FD_ZERO(&in);
    FD_SET(ends[0], &in);
    tv.tv_usec = 20000;
    clock_gettime(CLOCK_MONOTONIC, &before);
    TRY(select(ends[0] + 1, &in, NULL, NULL, &tv));
    IS(since(before) >= 0.019);
    say("left %ld, in %d\n", (long)tv.tv_sec, FD_ISSET(ends[0], &in) != 0);
    /* Below 64: the smallest table of a process, beyond which Linux does not look. */
    FD_SET(60, &in);
    TRY(select(61, &in, NULL, NULL, &tv));
    TRY(select(-1, &in, NULL, NULL, &tv));
    tv.tv_sec = -1;
    TRY(select(0, NULL, NULL, NULL, &tv));
    tv.tv_sec = 0, tv.tv_usec = 5000;
    TRY(select(0, NULL, NULL, NULL, &tv));
    TRY(select(4, (fd_set *)8, NULL, NULL, &tv));
    MUST(write(ends[1], "x", 1));
    FD_ZERO(&in);
    FD_SET(ends[0], &in);
    TRY(select(ends[0] + 1, &in, NULL, NULL, NULL));
    FD_ZERO(&in);
    FD_SET(ends[0], &in);
    TRY(select(ends[0], &in, NULL, NULL, &(struct timeval){0})); /* below nfds only */

    PART("pselect");
    raise(SIGALRM);
    FD_ZERO(&in);
    MUST(read(ends[0], data, 1));
    FD_SET(ends[0], &in);
    TRY(pselect(ends[0] + 1, &in, NULL, NULL, &timeout, &none));
    say("alarms %d\n", alarms);
    timeout.tv_sec = 0, timeout.tv_nsec = 1000000;
    TRY(pselect(0, NULL, NULL, NULL, &timeout, &none));

    PART("interrupted waiting");
    sigprocmask(SIG_UNBLOCK, &blocked, NULL);
    struct itimerval timer = {.it_value.tv_usec = 20000};
    MUST(setitimer(ITIMER_REAL, &timer, NULL));
    TRY(poll(p, 1, 5000));
    say("alarms %d\n", alarms);
    action.sa_flags = SA_RESTART; /* does not apply to poll and select */
    MUST(sigaction(SIGALRM, &action, NULL));
    MUST(setitimer(ITIMER_REAL, &timer, NULL));
    TRY(poll(p, 1, 5000));
    MUST(setitimer(ITIMER_REAL, &timer, NULL));
    tv.tv_sec = 5;
    FD_ZERO(&in);
    FD_SET(ends[0], &in);
    TRY(select(ends[0] + 1, &in, NULL, NULL, &tv));
    say("alarms %d\n", alarms);
    leave_scratch(scratch);
    return 0;
}
