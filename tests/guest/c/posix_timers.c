/* POSIX timers (timer_create(2)), timers of CPU time, and what fork(2) and
 * execve(2) do to them. */
#include "guest.h"
#include <pthread.h>
#include <sys/time.h>
#include <sys/wait.h>

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

/* The kernel's timers; the C library's ids are pointers for SIGEV_THREAD. */
typedef int kernel_timer;

static volatile sig_atomic_t count[65];
static volatile int last_code, last_value, last_tid;

static void counts(int signal, siginfo_t *info, void *context)
{
    (void)context;
    count[signal]++;
    last_code = info->si_code;
    last_value = info->si_value.sival_int;
    last_tid = gettid();
}

static long create(clockid_t clock, struct sigevent *event, kernel_timer *timer)
{
    return syscall(SYS_timer_create, clock, event, timer);
}

static struct itimerspec in_ms(long value, long interval)
{
    return (struct itimerspec){.it_value = {value / 1000, value % 1000 * 1000000},
                               .it_interval = {interval / 1000, interval % 1000 * 1000000}};
}

static long arm(kernel_timer timer, long value, long interval)
{
    struct itimerspec spec = in_ms(value, interval);
    return syscall(SYS_timer_settime, timer, 0, &spec, NULL);
}

static int64_t cpu_ns(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static volatile int stop_spinning;
static pid_t spinner_tid;
static clockid_t spinner_clock;
static pthread_barrier_t ready;

static void *spinner(void *argument)
{
    spinner_tid = gettid();
    pthread_getcpuclockid(pthread_self(), &spinner_clock);
    pthread_barrier_wait(&ready);
    while (!stop_spinning)
        ;
    return argument;
}

static volatile int called, called_value;
static void is_called(union sigval value)
{
    called_value = value.sival_int;
    __atomic_add_fetch(&called, 1, __ATOMIC_SEQ_CST);
}

int main(int argc, char **argv)
{
    kernel_timer timer, other;
    struct itimerspec spec, old;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1,
                             .sigev_value.sival_int = 77};
    if (argc > 1 && !strcmp(argv[1], "executed")) {
        /* When the timer of before would have ended it. */
        usleep(1200000);
        spec = in_ms(1, 0);
        TRY(syscall(SYS_timer_settime, 0, 0, &spec, NULL));
        struct itimerval left;
        MUST(getitimer(ITIMER_REAL, &left));
        IS(left.it_value.tv_sec > 90);
        return 3;
    }
    struct sigaction action = {.sa_sigaction = counts, .sa_flags = SA_SIGINFO};
    sigaction(SIGUSR1, &action, NULL);
    sigaction(SIGUSR2, &action, NULL);
    sigaction(SIGALRM, &action, NULL);
    sigaction(SIGRTMIN + 1, &action, NULL);
    sigaction(SIGVTALRM, &action, NULL);
    sigaction(SIGPROF, &action, NULL);

    PART("errors");
    TRY(create(1000, &event, &timer));
    TRY(create(CLOCK_MONOTONIC_RAW, &event, &timer));
    TRY(create(CLOCK_REALTIME_COARSE, &event, &timer));
    TRY(create(CLOCK_MONOTONIC, &event, (kernel_timer *)8));
    TRY(create(CLOCK_MONOTONIC, (struct sigevent *)8, &timer));
    event.sigev_signo = 65;
    TRY(create(CLOCK_MONOTONIC, &event, &timer));
    event.sigev_signo = 0;
    TRY(create(CLOCK_MONOTONIC, &event, &timer));
    event.sigev_notify = 99;
    TRY(create(CLOCK_MONOTONIC, &event, &timer));
    event = (struct sigevent){.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGUSR1};
    event.sigev_notify_thread_id = 1 << 22;
    TRY(create(CLOCK_MONOTONIC, &event, &timer));
    TRY(arm(12345, 1, 0));
    TRY(syscall(SYS_timer_gettime, 12345, &old));
    TRY(syscall(SYS_timer_getoverrun, 12345));
    TRY(syscall(SYS_timer_delete, 12345));

    PART("a signal once");
    event = (struct sigevent){.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1,
                              .sigev_value.sival_int = 77};
    TRY(create(CLOCK_MONOTONIC, &event, &timer));
    TRY(syscall(SYS_timer_gettime, timer, &old));
    say("unset %ld %ld\n", (long)old.it_value.tv_sec, old.it_value.tv_nsec);
    TRY(arm(timer, 10000, 0));
    TRY(syscall(SYS_timer_gettime, timer, &old));
    IS(old.it_value.tv_sec == 9 && old.it_interval.tv_sec == 0);
    spec = in_ms(5, 0);
    TRY(syscall(SYS_timer_settime, timer, 0, &spec, &old));
    IS(old.it_value.tv_sec == 9);
    while (!count[SIGUSR1])
        pause();
    say("code %d value %d\n", last_code == SI_TIMER, last_value);
    TRY(syscall(SYS_timer_gettime, timer, &old));
    say("over %ld %ld\n", (long)old.it_value.tv_sec, old.it_value.tv_nsec);
    spec.it_value.tv_nsec = 1000000000;
    TRY(syscall(SYS_timer_settime, timer, 0, &spec, NULL));
    TRY(syscall(SYS_timer_settime, timer, 0, NULL, NULL));
    TRY(syscall(SYS_timer_settime, timer, 0, 8, NULL));
    TRY(syscall(SYS_timer_delete, timer));
    TRY(syscall(SYS_timer_delete, timer));

    PART("without an event: SIGALRM and the id");
    TRY(create(CLOCK_REALTIME, NULL, &timer));
    TRY(arm(timer, 2, 0));
    while (!count[SIGALRM])
        pause();
    say("value is the id %d\n", last_value == timer);
    TRY(syscall(SYS_timer_delete, timer));

    PART("absolute times, of every clock");
    static const clockid_t clocks[] = {CLOCK_REALTIME, CLOCK_MONOTONIC, CLOCK_BOOTTIME, CLOCK_TAI};
    for (int i = 0; i < 4; i++) {
        struct timespec now;
        count[SIGUSR1] = 0;
        MUST(create(clocks[i], &event, &timer));
        clock_gettime(clocks[i], &now);
        spec = (struct itimerspec){.it_value = now};
        spec.it_value.tv_nsec += 3000000;
        if (spec.it_value.tv_nsec >= 1000000000) {
            spec.it_value.tv_sec++;
            spec.it_value.tv_nsec -= 1000000000;
        }
        MUST(syscall(SYS_timer_settime, timer, TIMER_ABSTIME, &spec, NULL));
        while (!count[SIGUSR1])
            pause();
        struct timespec then;
        clock_gettime(clocks[i], &then);
        long passed = (then.tv_sec - now.tv_sec) * 1000000000 + then.tv_nsec - now.tv_nsec;
        say("clock %d: not early %d\n", clocks[i], passed >= 3000000);
        /* What has passed fires at once. */
        MUST(syscall(SYS_timer_settime, timer, TIMER_ABSTIME, &spec, NULL));
        while (count[SIGUSR1] < 2)
            ;
        MUST(syscall(SYS_timer_delete, timer));
    }

    PART("periods and overruns");
    sigset_t set, rest;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigprocmask(SIG_BLOCK, &set, &rest);
    MUST(create(CLOCK_MONOTONIC, &event, &timer));
    TRY(arm(timer, 2, 2));
    usleep(30000);
    siginfo_t info;
    TRY(sigwaitinfo(&set, &info) == SIGUSR1);
    long overrun = MUST(syscall(SYS_timer_getoverrun, timer));
    IS(info.si_overrun >= 10);
    IS(info.si_overrun == overrun);
    IS(info.si_value.sival_int == 77);
    TRY(syscall(SYS_timer_gettime, timer, &old));
    IS(old.it_interval.tv_nsec == 2000000 && old.it_value.tv_nsec <= 2000000);
    TRY(sigwaitinfo(&set, &info) == SIGUSR1);
    TRY(arm(timer, 0, 0));
    usleep(5000);
    struct timespec none = {0, 0};
    sigtimedwait(&set, NULL, &none);
    TRY(sigtimedwait(&set, &info, &none));
    PART("two timers with one signal, both pending");
    event.sigev_value.sival_int = 78;
    MUST(create(CLOCK_MONOTONIC, &event, &other));
    MUST(arm(timer, 1, 0));
    MUST(arm(other, 3, 0));
    usleep(20000);
    for (int i = 0; i < 2; i++) {
        TRY(sigtimedwait(&set, &info, &none) == SIGUSR1);
        say("value %d\n", info.si_value.sival_int);
    }
    TRY(sigtimedwait(&set, &info, &none));
    MUST(syscall(SYS_timer_delete, timer));
    MUST(syscall(SYS_timer_delete, other));
    sigprocmask(SIG_SETMASK, &rest, NULL);

    PART("an ignored signal does not stop a period");
    count[SIGUSR2] = 0;
    event.sigev_signo = SIGUSR2;
    signal(SIGUSR2, SIG_IGN);
    MUST(create(CLOCK_MONOTONIC, &event, &timer));
    MUST(arm(timer, 1, 1));
    usleep(10000);
    sigaction(SIGUSR2, &action, NULL);
    while (count[SIGUSR2] < 3)
        pause();
    MUST(syscall(SYS_timer_delete, timer));

    PART("SIGEV_NONE");
    event = (struct sigevent){.sigev_notify = SIGEV_NONE};
    TRY(create(CLOCK_MONOTONIC, &event, &timer));
    TRY(arm(timer, 5, 1000000));
    usleep(10000);
    TRY(syscall(SYS_timer_gettime, timer, &old));
    IS(old.it_value.tv_sec >= 900);
    TRY(arm(timer, 2, 0));
    usleep(5000);
    TRY(syscall(SYS_timer_gettime, timer, &old));
    say("over %ld %ld\n", (long)old.it_value.tv_sec, old.it_value.tv_nsec);
    MUST(syscall(SYS_timer_delete, timer));

    PART("SIGEV_THREAD_ID and CPU time of a thread");
    pthread_t thread;
    pthread_barrier_init(&ready, NULL, 2);
    pthread_create(&thread, NULL, spinner, NULL);
    pthread_barrier_wait(&ready);
    event = (struct sigevent){.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGRTMIN + 1};
    event.sigev_notify_thread_id = spinner_tid;
    TRY(create(CLOCK_MONOTONIC, &event, &timer));
    TRY(arm(timer, 3, 3));
    while (count[SIGRTMIN + 1] < 5)
        usleep(1000);
    IS(last_tid == spinner_tid);
    TRY(syscall(SYS_timer_delete, timer));
    count[SIGRTMIN + 1] = 0;
    TRY(create(spinner_clock, &event, &timer));
    int64_t before = cpu_ns(spinner_clock);
    TRY(arm(timer, 20, 0));
    while (!count[SIGRTMIN + 1])
        usleep(1000);
    IS(cpu_ns(spinner_clock) - before >= 20000000);
    TRY(syscall(SYS_timer_delete, timer));
    stop_spinning = 1;
    pthread_join(thread, NULL);

    PART("CPU time of the process");
    event = (struct sigevent){.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN + 1};
    count[SIGRTMIN + 1] = 0;
    TRY(create(CLOCK_PROCESS_CPUTIME_ID, &event, &timer));
    before = cpu_ns(CLOCK_PROCESS_CPUTIME_ID);
    TRY(arm(timer, 20, 20));
    usleep(60000);
    say("while asleep %d\n", count[SIGRTMIN + 1]);
    while (count[SIGRTMIN + 1] < 3)
        ;
    IS(cpu_ns(CLOCK_PROCESS_CPUTIME_ID) - before >= 60000000);
    TRY(syscall(SYS_timer_delete, timer));
    static const int which[] = {ITIMER_VIRTUAL, ITIMER_PROF};
    static const int signals[] = {SIGVTALRM, SIGPROF};
    for (int i = 0; i < 2; i++) {
        struct itimerval value = {.it_value.tv_usec = 20000};
        MUST(setitimer(which[i], &value, NULL));
        before = cpu_ns(CLOCK_PROCESS_CPUTIME_ID);
        usleep(60000);
        say("while asleep %d\n", count[signals[i]]);
        while (!count[signals[i]])
            ;
        say("while awake %d\n", count[signals[i]]);
    }

    PART("SIGEV_THREAD, by the library");
    timer_t by_thread;
    event = (struct sigevent){.sigev_notify = SIGEV_THREAD, .sigev_value.sival_int = 5,
                              .sigev_notify_function = is_called};
    TRY(timer_create(CLOCK_MONOTONIC, &event, &by_thread));
    spec = in_ms(2, 2);
    TRY(timer_settime(by_thread, 0, &spec, NULL));
    while (called < 3)
        usleep(1000);
    say("value %d\n", called_value);
    TRY(timer_delete(by_thread));

    PART("fork and execve");
    count[SIGUSR1] = 0;
    event = (struct sigevent){.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
    MUST(create(CLOCK_MONOTONIC, &event, &timer));
    MUST(arm(timer, 10, 10));
    struct itimerval long_one = {.it_value.tv_sec = 100};
    setitimer(ITIMER_REAL, &long_one, NULL);
    pid_t child = MUST(fork());
    if (!child) {
        count[SIGUSR1] = 0;
        usleep(30000);
        say("in the child %d\n", count[SIGUSR1]);
        TRY(syscall(SYS_timer_delete, timer));
        struct itimerval left;
        MUST(getitimer(ITIMER_REAL, &left));
        IS(left.it_value.tv_sec == 0);
        _exit(0);
    }
    int status;
    while (waitpid(child, &status, 0) != child)
        ;
    child = MUST(fork());
    if (!child) {
        setitimer(ITIMER_REAL, &long_one, NULL);
        signal(SIGUSR1, SIG_DFL);
        MUST(create(CLOCK_MONOTONIC, &event, &timer));
        /* Longer than a busy machine takes from here to the end of execve(2). */
        MUST(arm(timer, 1000, 1000));
        execl("/proc/self/exe", "posix_timers", "executed", NULL);
        _exit(1);
    }
    while (waitpid(child, &status, 0) != child)
        ;
    say("status %x\n", status);
    return 0;
}
