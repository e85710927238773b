/* CPU time of processes and threads that share one processor of the host: together they have no more
 * of it than time passes (times(2), getrusage(2), clock_gettime(2), proc_pid_stat(5)). The test has
 * both runs begin on one processor only. */
#include "guest.h"
#include <pthread.h>
#include <sys/resource.h>
#include <sys/times.h>
#include <sys/wait.h>
#include <time.h>

enum { BUSY = 3, ROUND_MS = 400, MS = 1000000 };

static int64_t now_ns(clockid_t clock)
{
    struct timespec time;
    MUST(clock_gettime(clock, &time));
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void compute_until(int64_t end)
{
    volatile unsigned spun = 0;
    while (now_ns(CLOCK_MONOTONIC) < end)
        for (int i = 0; i < 10000; i++)
            spun++;
}

/* What is counted coarsely may be a few ticks more. */
static const char *within(int64_t cpu_ns, int64_t passed_ns)
{
    return cpu_ns <= 0 ? "nothing" : cpu_ns <= passed_ns + passed_ns / 5 + 40 * MS ? "yes" : "too much";
}

static int64_t usage_ns(int who)
{
    struct rusage usage;
    MUST(getrusage(who, &usage));
    return (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000000LL +
           (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1000LL;
}

/* Fields 14 and 15 of /proc/PID/stat, in ticks of 10 ms. */
static int64_t stat_ns(pid_t pid)
{
    char path[64], text[1024] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = MUST(open(path, O_RDONLY));
    MUST(read(fd, text, sizeof text - 1));
    MUST(close(fd));
    long long user = 0, system = 0;
    sscanf(strrchr(text, ')') + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lld %lld", &user, &system);
    return (user + system) * 10 * MS;
}

/* Processes that compute: each asks for its own time, and this one for that of all while they run. */
static void of_processes(void)
{
    pid_t children[BUSY];
    clockid_t clocks[BUSY];
    int64_t begun = now_ns(CLOCK_MONOTONIC), seen = 0, listed = 0, waited = 0;
    int tell[2];
    MUST(pipe(tell));
    for (int i = 0; i < BUSY; i++) {
        if (!(children[i] = (pid_t)MUST(fork()))) {
            compute_until(begun + ROUND_MS * MS);
            int64_t own[2] = {now_ns(CLOCK_PROCESS_CPUTIME_ID), usage_ns(RUSAGE_SELF)};
            MUST(write(tell[1], own, sizeof own));
            compute_until(begun + 2 * ROUND_MS * MS);
            _exit(0);
        }
        MUST(clock_getcpuclockid(children[i], &clocks[i]) == 0 ? 0 : -1);
    }
    int64_t own[2], sums[2] = {0};
    for (int i = 0; i < BUSY; i++) {
        MUST(read(tell[0], own, sizeof own));
        sums[0] += own[0];
        sums[1] += own[1];
    }
    int64_t passed = now_ns(CLOCK_MONOTONIC) - begun;
    say("their own clocks: %s, getrusage: %s\n", within(sums[0], passed), within(sums[1], passed));
    for (int i = 0; i < BUSY; i++) {
        seen += now_ns(clocks[i]);
        listed += stat_ns(children[i]);
    }
    passed = now_ns(CLOCK_MONOTONIC) - begun;
    say("seen from outside: %s, /proc: %s\n", within(seen, passed), within(listed, passed));
    for (int i = 0; i < BUSY; i++) {
        struct rusage usage;
        MUST(wait4(children[i], NULL, 0, &usage));
        waited += usage.ru_utime.tv_sec * 1000000000LL + usage.ru_utime.tv_usec * 1000LL;
    }
    passed = now_ns(CLOCK_MONOTONIC) - begun;
    struct tms times_of;
    times(&times_of);
    say("when waited for: %s, all children: %s, times: %s\n", within(waited, passed),
        within(usage_ns(RUSAGE_CHILDREN), passed),
        within((times_of.tms_cutime + times_of.tms_cstime) * 10 * MS, passed));
}

static int64_t end_ns;

static void *compute(void *cpu_ns)
{
    int64_t last = 0;
    while (now_ns(CLOCK_MONOTONIC) < end_ns) {
        int64_t now = now_ns(CLOCK_THREAD_CPUTIME_ID);
        if (now < last)
            say("the clock of a thread goes back\n");
        last = now;
        compute_until(now_ns(CLOCK_MONOTONIC) + 100000);
    }
    *(int64_t *)cpu_ns = now_ns(CLOCK_THREAD_CPUTIME_ID);
    return NULL;
}

static void of_threads(void)
{
    pthread_t threads[BUSY];
    int64_t cpu_ns[BUSY], sum = 0, begun = now_ns(CLOCK_MONOTONIC), before = now_ns(CLOCK_PROCESS_CPUTIME_ID);
    end_ns = begun + ROUND_MS * MS;
    for (int i = 0; i < BUSY; i++)
        pthread_create(&threads[i], NULL, compute, &cpu_ns[i]);
    for (int i = 0; i < BUSY; i++) {
        pthread_join(threads[i], NULL);
        sum += cpu_ns[i];
    }
    int64_t passed = now_ns(CLOCK_MONOTONIC) - begun, of_process = now_ns(CLOCK_PROCESS_CPUTIME_ID) - before;
    say("threads: %s, their process: %s\n", within(sum, passed), within(of_process, passed));
}

int main(void)
{
    of_processes();
    of_threads();
    return 0;
}
