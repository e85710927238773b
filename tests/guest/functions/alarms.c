/* A server that sets timers of every kind for in four seconds when it is asked for "/set", and otherwise tells which
 * have expired: those of clocks that go on while a sandbox is frozen have, in a copy that is thawed later. */
#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define SECONDS 4
#define TIMERS 5

static int timers[TIMERS];
static volatile sig_atomic_t signals;
static volatile int *slept;

static void count(int signal)
{
    (void)signal;
    signals++;
}

static int begin(int clock, int flags, struct timespec at, long interval_ms)
{
    struct itimerspec spec = {.it_value = at, .it_interval = {.tv_nsec = interval_ms * 1000000}};
    int timer = timerfd_create(clock, TFD_NONBLOCK);
    if (timerfd_settime(timer, flags, &spec, NULL) < 0)
        perror("timerfd_settime");
    return timer;
}

static void set(void)
{
    struct timespec at, later, span = {.tv_sec = SECONDS};
    struct itimerspec spec = {0};
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
    timer_t timer;

    clock_gettime(CLOCK_REALTIME, &at);
    at.tv_sec += SECONDS;
    later = at;
    later.tv_sec += 3600;
    timers[0] = begin(CLOCK_REALTIME, TFD_TIMER_ABSTIME, at, 0);
    timers[1] = begin(CLOCK_REALTIME, TFD_TIMER_ABSTIME | TFD_TIMER_CANCEL_ON_SET, later, 0);
    timers[2] = begin(CLOCK_BOOTTIME, 0, span, 0);
    timers[3] = begin(CLOCK_REALTIME, 0, span, 100);
    timers[4] = begin(CLOCK_MONOTONIC, 0, span, 100);
    spec.it_value = at;
    if (timer_create(CLOCK_REALTIME, &event, &timer) < 0 ||
        timer_settime(timer, TIMER_ABSTIME, &spec, NULL) < 0)
        perror("timer_create");
    if (fork() == 0) {
        while (clock_nanosleep(CLOCK_REALTIME, TIMER_ABSTIME, &at, NULL) == EINTR)
            ;
        *slept = 1;
        _exit(0);
    }
}

static int tell(char *to, size_t size)
{
    int at = snprintf(to, size, "{\"timers\": [");
    for (int i = 0; i < TIMERS; i++) {
        uint64_t expiries = 0;
        const char *said = "";
        if (read(timers[i], &expiries, sizeof expiries) < 0)
            said = errno == ECANCELED ? "cancelled" : errno == EAGAIN ? "no" : "failed";
        else
            said = expiries == 1 ? "once" : "often";
        at += snprintf(to + at, size - (size_t)at, "%s\"%s\"", i ? ", " : "", said);
    }
    for (int i = 0; i < 150 && !*slept; i++)
        usleep(10000);
    return at + snprintf(to + at, size - (size_t)at, "], \"signals\": %d, \"slept\": %d}", (int)signals, *slept);
}

int main(void)
{
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(8080)};

    signal(SIGUSR1, count);
    slept = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) < 0 || listen(listener, 16) < 0)
        return 1;
    for (;;) {
        char head[4096] = "", body[512] = "{}", answer[1024];
        int client = accept(listener, NULL, NULL), len = 2;
        if (client < 0)
            continue;
        if (read(client, head, sizeof head - 1) > 0) {
            if (strncmp(head, "GET /set ", 9) == 0)
                set();
            else
                len = tell(body, sizeof body);
            len = snprintf(answer, sizeof answer,
                           "HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", len, body);
            if (write(client, answer, (size_t)len) < 0)
                perror("write");
        }
        close(client);
    }
}
