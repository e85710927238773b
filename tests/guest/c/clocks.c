/* Clocks: every clock id, the vdso against the system call, resolution,
 * monotonicity, sleeping, errors. */
#include "guest.h"
#include <sched.h>
#include <sys/time.h>
#include <sys/times.h>
#include <sys/timex.h>

static int64_t nanos(struct timespec t) { return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec; }

static int64_t by_call(clockid_t clock)
{
    struct timespec t;
    MUST(syscall(SYS_clock_gettime, clock, &t));
    return nanos(t);
}

static int64_t by_library(clockid_t clock)
{
    struct timespec t;
    MUST(clock_gettime(clock, &t));
    return nanos(t);
}

int main(void)
{
    static const struct { clockid_t id; const char *name; } clocks[] = {
        {CLOCK_REALTIME, "REALTIME"}, {CLOCK_MONOTONIC, "MONOTONIC"},
        {CLOCK_PROCESS_CPUTIME_ID, "PROCESS_CPUTIME"}, {CLOCK_THREAD_CPUTIME_ID, "THREAD_CPUTIME"},
        {CLOCK_MONOTONIC_RAW, "MONOTONIC_RAW"}, {CLOCK_REALTIME_COARSE, "REALTIME_COARSE"},
        {CLOCK_MONOTONIC_COARSE, "MONOTONIC_COARSE"}, {CLOCK_BOOTTIME, "BOOTTIME"},
        {CLOCK_TAI, "TAI"},
    };
    struct timespec t, before, after;

    PART("every clock");
    for (size_t i = 0; i < sizeof clocks / sizeof *clocks; i++) {
        struct timespec resolution;
        int read = clock_gettime(clocks[i].id, &t), res = clock_getres(clocks[i].id, &resolution);
        bool coarse = strstr(clocks[i].name, "COARSE") != NULL;
        say("%s: read %d fraction %s resolution %d %s\n", clocks[i].name, read,
            t.tv_nsec >= 0 && t.tv_nsec < 1000000000 ? "valid" : "invalid", res,
            coarse ? (resolution.tv_nsec >= 1000000 && resolution.tv_nsec <= 10000000 ? "a tick" : "wrong")
                   : (resolution.tv_sec == 0 && resolution.tv_nsec == 1 ? "1 ns" : "wrong"));
        bool ordered = true;
        for (int n = 0; n < 1000; n++) {
            int64_t a = by_library(clocks[i].id), b = by_library(clocks[i].id);
            ordered &= a <= b;
        }
        say("%s: never goes back: %s\n", clocks[i].name, ordered ? "yes" : "no");
    }

    PART("vdso and system call agree");
    static const int both[] = {CLOCK_REALTIME, CLOCK_MONOTONIC, CLOCK_BOOTTIME, CLOCK_MONOTONIC_COARSE};
    for (size_t i = 0; i < 4; i++) {
        bool ordered = true, near = false;
        for (int n = 0; n < 200; n++) {
            int64_t a = by_call(both[i]), b = by_library(both[i]), c = by_call(both[i]);
            ordered &= a <= b && b <= c;
            near |= c - a < 1000000;
        }
        say("%d: in order %s, near %s\n", both[i], ordered ? "yes" : "no", near ? "yes" : "no");
    }
    int64_t realtime = by_library(CLOCK_REALTIME);
    struct timeval tv;
    struct timezone zone = {5, 5};
    TRY(gettimeofday(&tv, &zone));
    int64_t by_tv = (int64_t)tv.tv_sec * 1000000000 + (int64_t)tv.tv_usec * 1000;
    IS(by_tv + 1000 >= realtime && by_tv - realtime < 1000000000);
    say("zone %d %d\n", zone.tz_minuteswest, zone.tz_dsttime);
    time_t now = time(NULL), stored;
    IS(now - tv.tv_sec <= 1 && now - tv.tv_sec >= -1);
    IS(syscall(SYS_time, &stored) - now <= 1 && stored - now <= 1);
    IS(realtime > 1600000000LL * 1000000000);
    unsigned cpu = 12345, node = 12345;
    TRY(syscall(SYS_getcpu, &cpu, &node, NULL));
    IS(cpu < 4096 && node < 64);
    IS(sched_getcpu() >= 0);
    IS(by_library(CLOCK_BOOTTIME) >= by_library(CLOCK_MONOTONIC) - 1000000);

    PART("processor time");
    int64_t cpu_before = by_library(CLOCK_PROCESS_CPUTIME_ID);
    volatile unsigned spin = 0;
    while (by_library(CLOCK_PROCESS_CPUTIME_ID) - cpu_before < 20000000)
        spin++;
    say("it advances\n");
    int64_t thread = by_library(CLOCK_THREAD_CPUTIME_ID), process = by_library(CLOCK_PROCESS_CPUTIME_ID);
    IS(thread <= process + 1000000);
    struct tms usage;
    IS(times(&usage) != -1 && usage.tms_utime + usage.tms_stime >= 1);
    IS(clock() > 0);
    cpu_before = by_library(CLOCK_PROCESS_CPUTIME_ID);
    t = (struct timespec){.tv_nsec = 50000000};
    nanosleep(&t, NULL);
    IS(by_library(CLOCK_PROCESS_CPUTIME_ID) - cpu_before < 40000000);
    clockid_t own;
    CODE(clock_getcpuclockid(0, &own));
    TRY(clock_gettime(own, &t));

    PART("sleeping");
    clock_gettime(CLOCK_MONOTONIC, &before);
    t = (struct timespec){.tv_nsec = 30000000};
    TRY(nanosleep(&t, NULL));
    clock_gettime(CLOCK_MONOTONIC, &after);
    IS(nanos(after) - nanos(before) >= 30000000);
    t = before;
    CODE(clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL)); /* past */
    clock_gettime(CLOCK_MONOTONIC, &t);
    int64_t target = nanos(t) + 20000000;
    t = (struct timespec){target / 1000000000, target % 1000000000};
    CODE(clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL));
    IS(by_library(CLOCK_MONOTONIC) >= target);
    target = by_library(CLOCK_REALTIME) + 20000000;
    t = (struct timespec){target / 1000000000, target % 1000000000};
    CODE(clock_nanosleep(CLOCK_REALTIME, TIMER_ABSTIME, &t, NULL));
    IS(by_library(CLOCK_REALTIME) >= target);
    t = (struct timespec){.tv_nsec = 1};
    CODE(clock_nanosleep(CLOCK_BOOTTIME, 0, &t, NULL));
    t = (struct timespec){.tv_nsec = 1000000000};
    TRY(nanosleep(&t, NULL));
    t = (struct timespec){.tv_sec = -1};
    TRY(nanosleep(&t, NULL));
    t = (struct timespec){.tv_nsec = -1};
    CODE(clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL));
    t = (struct timespec){0};
    TRY(nanosleep(&t, NULL));
    CODE(clock_nanosleep(77, 0, &t, NULL));
    CODE(clock_nanosleep(CLOCK_THREAD_CPUTIME_ID, 0, &t, NULL));

    PART("errors");
    TRY(clock_gettime(77, &t));
    TRY(syscall(SYS_clock_gettime, -1, &t));
    TRY(clock_getres(77, &t));
    TRY(clock_getres(CLOCK_MONOTONIC, NULL));
    t = (struct timespec){.tv_nsec = -1};
    TRY(clock_settime(CLOCK_MONOTONIC, &t));
    struct timex timex = {0};
    IS(adjtimex(&timex) >= 0 && timex.tick > 0 && timex.time.tv_sec > 0);
    IS(clock_adjtime(CLOCK_REALTIME, &timex) >= 0);
    TRY(adjtime(NULL, &timex.time));
    TRY(adjtimex((struct timex *)8));
    TRY(clock_adjtime(CLOCK_MONOTONIC, &timex));
    TRY(clock_adjtime(77, &timex));
    return 0;
}
