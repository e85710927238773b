/* Interval timers, alarm(2), POSIX timers and timerfd, as far as one thread
 * uses them. */
#include "guest.h"
#include <poll.h>
#include <sys/time.h>

static volatile sig_atomic_t count[65];
static void plain(int signal) { count[signal]++; }

int main(void)
{
    struct itimerval timer, old;

    signal(SIGALRM, plain);
    signal(SIGVTALRM, plain);
    signal(SIGPROF, plain);

    PART("alarm");
    TRY(alarm(100));
    IS(alarm(50) >= 99);
    IS(alarm(0) >= 49);
    TRY(alarm(0));

    PART("ITIMER_REAL");
    timer = (struct itimerval){.it_value.tv_usec = 10000, .it_interval.tv_usec = 10000};
    TRY(setitimer(ITIMER_REAL, &timer, NULL));
    while (count[SIGALRM] < 3)
        pause();
    TRY(getitimer(ITIMER_REAL, &old));
    say("interval %ld, running %d\n", (long)old.it_interval.tv_usec,
        old.it_value.tv_usec > 0 && old.it_value.tv_usec <= 10000);
    timer = (struct itimerval){0};
    TRY(setitimer(ITIMER_REAL, &timer, &old));
    TRY(getitimer(ITIMER_REAL, &old));
    say("stopped %d\n", old.it_value.tv_sec == 0 && old.it_value.tv_usec == 0);

    PART("ITIMER_VIRTUAL and ITIMER_PROF");
    timer = (struct itimerval){.it_value.tv_usec = 20000};
    TRY(setitimer(ITIMER_VIRTUAL, &timer, NULL));
    while (!count[SIGVTALRM])
        ;
    say("SIGVTALRM %d\n", count[SIGVTALRM]);
    TRY(setitimer(ITIMER_PROF, &timer, NULL));
    while (!count[SIGPROF])
        ;
    say("SIGPROF %d\n", count[SIGPROF]);

    PART("errors");
    TRY(setitimer(77, &timer, NULL));
    TRY(getitimer(77, &old));
    timer.it_value.tv_usec = 1000000;
    TRY(setitimer(ITIMER_REAL, &timer, NULL));
    timer.it_value.tv_usec = -1;
    TRY(setitimer(ITIMER_REAL, &timer, NULL));
    TRY(syscall(SYS_setitimer, ITIMER_REAL, 8, NULL));
    return 0;
}
