/* CPUs, policies, priorities and nice values that threads ask for: kept for each
 * thread, inherited, given back, and refused as Linux refuses them. */
#include "guest.h"
#include <linux/types.h>
#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

/* <linux/sched/types.h> and <linux/sched.h> do not go with <sched.h>. */
struct sched_attr {
    __u32 size, sched_policy;
    __u64 sched_flags;
    __s32 sched_nice;
    __u32 sched_priority;
    __u64 sched_runtime, sched_deadline, sched_period;
    __u32 sched_util_min, sched_util_max;
};
#define SCHED_FLAG_RESET_ON_FORK 0x01
#define SCHED_FLAG_KEEP_POLICY 0x08
#define SCHED_FLAG_KEEP_PARAMS 0x10
#ifndef SCHED_DEADLINE
#define SCHED_DEADLINE 6
#endif

enum { NOBODY = 65534, NO_SUCH_ID = 1 << 22 };

static void finish(pid_t child)
{
    int status;
    MUST(waitpid(child, &status, 0));
    say("status %x\n", status);
}

static int cpus_of(pid_t tid)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    MUST(syscall(SYS_sched_getaffinity, tid, sizeof set, &set));
    return CPU_COUNT(&set);
}

static int scheduler(pid_t tid, int policy, int priority)
{
    struct sched_param parameter = {.sched_priority = priority};
    return (int)syscall(SYS_sched_setscheduler, tid, policy, &parameter);
}

static int parameter(pid_t tid, int priority)
{
    struct sched_param parameter = {.sched_priority = priority};
    return (int)syscall(SYS_sched_setparam, tid, &parameter);
}

static int priority_of(pid_t tid)
{
    struct sched_param parameter = {.sched_priority = -1};
    MUST(syscall(SYS_sched_getparam, tid, &parameter));
    return parameter.sched_priority;
}

static int set_attributes(unsigned size, int policy, int nice, unsigned priority, unsigned flags)
{
    struct sched_attr attributes = {.size = size, .sched_policy = (unsigned)policy,
                                    .sched_nice = nice, .sched_priority = priority,
                                    .sched_flags = flags};
    return (int)syscall(SYS_sched_setattr, 0, &attributes, 0);
}

static void show_attributes(void)
{
    struct sched_attr attributes;
    memset(&attributes, 0xff, sizeof attributes);
    MUST(syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0));
    say("policy %u flags %llx nice %d priority %u\n", attributes.sched_policy,
        (unsigned long long)attributes.sched_flags, attributes.sched_nice,
        attributes.sched_priority);
}

/* Field `index` of /proc/thread-self/stat, counted from 1 as in proc(5). */
static long stat_field(int index)
{
    char text[1024];
    int fd = (int)MUST(open("/proc/thread-self/stat", O_RDONLY));
    ssize_t got = MUST(read(fd, text, sizeof text - 1));
    close(fd);
    text[got] = '\0';
    char *at = strrchr(text, ')') + 2;
    for (int field = 3; field < index; field++)
        at = strchr(at, ' ') + 1;
    return strtol(at, NULL, 10);
}

static void show_allowed(void)
{
    char text[8192];
    int fd = (int)MUST(open("/proc/thread-self/status", O_RDONLY));
    ssize_t got = MUST(read(fd, text, sizeof text - 1));
    close(fd);
    text[got] = '\0';
    char *line = strstr(text, "Cpus_allowed_list:");
    say("%.*s\n", (int)strcspn(line, "\n"), line);
}

static int base;

static void *polite(void *leader)
{
    pid_t tid = gettid();
    say("a thread begins with %d more, policy %d\n", getpriority(PRIO_PROCESS, 0) - base,
        sched_getscheduler(0));
    TRY(setpriority(PRIO_PROCESS, 0, base + 9));
    TRY(scheduler(0, SCHED_BATCH, 0));
    say("own %d, of the leader %d\n", getpriority(PRIO_PROCESS, (id_t)tid) - base,
        getpriority(PRIO_PROCESS, (id_t)(long)leader) - base);
    say("own %d, of the leader %d\n", sched_getscheduler(tid),
        sched_getscheduler((pid_t)(long)leader));
    say("priority %ld nice %ld policy %ld\n", stat_field(18) - base, stat_field(19) - base,
        stat_field(41));
    return NULL;
}

static void affinity(void)
{
    PART("affinity");
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(0, &set);
    TRY(sched_setaffinity(0, sizeof set, &set));
    say("%d CPU\n", cpus_of(0));
    show_allowed();
    say("on CPU %d\n", sched_getcpu());
    pid_t child = MUST(fork());
    if (!child) {
        say("a child has %d, of its parent %d\n", cpus_of(0), cpus_of(getppid()));
        _exit(0);
    }
    finish(child);
    CPU_SET(1000, &set);
    TRY(sched_setaffinity(0, sizeof set, &set));
    say("%d CPU\n", cpus_of(0));
    CPU_CLR(0, &set);
    TRY(sched_setaffinity(0, sizeof set, &set));
    CPU_ZERO(&set);
    TRY(sched_setaffinity(0, sizeof set, &set));
    TRY(syscall(SYS_sched_setaffinity, 0, 0, &set));
    TRY(syscall(SYS_sched_setaffinity, 0, sizeof set, 8));
    CPU_SET(0, &set);
    TRY(syscall(SYS_sched_setaffinity, 0, 1, &set));
    TRY(sched_setaffinity(-1, sizeof set, &set));
    TRY(sched_setaffinity(NO_SUCH_ID, sizeof set, &set));
    TRY(syscall(SYS_sched_getaffinity, NO_SUCH_ID, sizeof set, &set));
    TRY(syscall(SYS_sched_getaffinity, 0, sizeof set, 8));
}

static void ordinary_policies(void)
{
    PART("policies");
    TRY(scheduler(0, SCHED_BATCH, 0));
    TRY(sched_getscheduler(0));
    pid_t child = MUST(fork());
    if (!child) {
        say("inherited %d\n", sched_getscheduler(0));
        _exit(0);
    }
    finish(child);
    TRY(scheduler(0, SCHED_BATCH | SCHED_RESET_ON_FORK, 0));
    IS(sched_getscheduler(0) == (SCHED_BATCH | SCHED_RESET_ON_FORK));
    child = MUST(fork());
    if (!child) {
        say("the flag is not inherited: %d\n", sched_getscheduler(0));
        _exit(0);
    }
    finish(child);
    TRY(parameter(0, 0));
    TRY(parameter(0, 1));
    TRY(parameter(0, -1));
    TRY(priority_of(0));
    TRY(scheduler(0, SCHED_OTHER, 1));
    TRY(scheduler(0, SCHED_FIFO, 0));
    TRY(scheduler(0, SCHED_FIFO, 100));
    TRY(scheduler(0, SCHED_RR, -1));
    TRY(scheduler(0, SCHED_DEADLINE, 0));
    TRY(scheduler(0, 4, 0));
    TRY(scheduler(0, -1, 0));
    TRY(scheduler(-1, SCHED_OTHER, 0));
    TRY(scheduler(NO_SUCH_ID, SCHED_OTHER, 0));
    TRY(parameter(-1, 0));
    TRY(parameter(NO_SUCH_ID, 0));
    TRY(syscall(SYS_sched_setscheduler, 0, SCHED_OTHER, NULL));
    TRY(syscall(SYS_sched_setscheduler, 0, SCHED_OTHER, 8));
    TRY(syscall(SYS_sched_setparam, 0, NULL));
    TRY(syscall(SYS_sched_setparam, 0, 8));
    TRY(syscall(SYS_sched_getparam, 0, NULL));
    TRY(syscall(SYS_sched_getparam, 0, 8));
    TRY(syscall(SYS_sched_getparam, -1, &child));
    TRY(sched_get_priority_max(SCHED_DEADLINE));
    TRY(sched_get_priority_min(SCHED_IDLE));
    TRY(sched_get_priority_min(4));
}

static void attributes(void)
{
    PART("attributes");
    const unsigned size = sizeof(struct sched_attr);
    TRY(set_attributes(size, SCHED_BATCH, base + 7, 0, SCHED_FLAG_RESET_ON_FORK));
    say("nice is %d\n", getpriority(PRIO_PROCESS, 0) - base);
    show_attributes();
    TRY(set_attributes(size, SCHED_IDLE, base + 8, 0, SCHED_FLAG_KEEP_POLICY));
    show_attributes();
    TRY(set_attributes(size, SCHED_OTHER, base, 0, SCHED_FLAG_KEEP_PARAMS | SCHED_FLAG_RESET_ON_FORK));
    show_attributes();
    TRY(set_attributes(48, SCHED_OTHER, base + 30, 0, SCHED_FLAG_RESET_ON_FORK));
    show_attributes();
    TRY(set_attributes(0, SCHED_OTHER, base + 9, 0, SCHED_FLAG_RESET_ON_FORK));
    TRY(set_attributes(47, SCHED_OTHER, 0, 0, 0));
    TRY(set_attributes(5000, SCHED_OTHER, 0, 0, 0));
    TRY(set_attributes(size, SCHED_OTHER, base + 9, 1, 0));
    TRY(set_attributes(size, SCHED_FIFO, 0, 0, 0));
    TRY(set_attributes(size, 4, 0, 0, 0));
    TRY(set_attributes(size, -1, 0, 0, 0));
    TRY(set_attributes(size, SCHED_OTHER, base + 9, 0, 0x1000));
    struct {
        struct sched_attr known;
        char more[32];
    } longer = {.known = {.size = sizeof longer, .sched_policy = SCHED_OTHER, .sched_nice = base + 9,
                          .sched_flags = SCHED_FLAG_RESET_ON_FORK}};
    TRY(syscall(SYS_sched_setattr, 0, &longer, 0));
    longer.more[20] = 1;
    TRY(syscall(SYS_sched_setattr, 0, &longer, 0));
    IS(longer.known.size >= size);
    TRY(syscall(SYS_sched_setattr, 0, NULL, 0));
    TRY(syscall(SYS_sched_setattr, 0, &longer, 1));
    TRY(syscall(SYS_sched_setattr, -1, &longer, 0));
    TRY(syscall(SYS_sched_getattr, 0, &longer, 47, 0));
    TRY(syscall(SYS_sched_getattr, 0, &longer, 5000, 0));
    TRY(syscall(SYS_sched_getattr, 0, NULL, 48, 0));
    TRY(syscall(SYS_sched_getattr, 0, &longer, 48, 1));
    TRY(syscall(SYS_sched_getattr, NO_SUCH_ID, &longer, 48, 0));
}

/* Real-time policies want a privilege, which the caller may have or not. */
static void real_time(void)
{
    PART("real-time policies");
    struct timespec slice;
    pid_t child = MUST(fork());
    if (!child) {
        int code = scheduler(0, SCHED_FIFO, 7);
        bool is_kept = sched_getscheduler(0) == SCHED_FIFO && priority_of(0) == 7 &&
                       stat_field(18) == -8 && stat_field(40) == 7;
        IS(code == 0 ? is_kept : errno == EPERM && sched_getscheduler(0) == SCHED_OTHER);
        code = scheduler(0, SCHED_RR | SCHED_RESET_ON_FORK, 3);
        IS(code == 0 ? sched_rr_get_interval(0, &slice) == 0 && slice.tv_nsec > 0 : errno == EPERM);
        child = MUST(fork());
        if (!child) {
            IS(sched_getscheduler(0) == SCHED_OTHER && priority_of(0) == 0);
            _exit(0);
        }
        finish(child);
        _exit(0);
    }
    finish(child);
}

static void without_privilege(void)
{
    PART("without privilege");
    pid_t other = MUST(fork());
    if (!other) {
        pause();
        _exit(0);
    }
    pid_t child = MUST(fork());
    if (!child) {
        if (geteuid() == 0)
            MUST(setresuid(NOBODY, NOBODY, NOBODY));
        TRY(scheduler(0, SCHED_FIFO, 1));
        TRY(scheduler(0, SCHED_RR, 99));
        TRY(scheduler(0, SCHED_IDLE, 0));
        TRY(scheduler(0, SCHED_OTHER, 0));
        TRY(scheduler(0, SCHED_IDLE | SCHED_RESET_ON_FORK, 0));
        TRY(scheduler(0, SCHED_IDLE, 0));
        TRY(setpriority(PRIO_PROCESS, 0, base + 10));
        TRY(setpriority(PRIO_PROCESS, 0, base + 9));
        TRY(setpriority(PRIO_PROCESS, 0, base + 10));
        _exit(0);
    }
    finish(child);
    if (geteuid() == 0) {
        child = MUST(fork());
        if (!child) {
            MUST(setresuid(NOBODY, NOBODY, NOBODY));
            cpu_set_t set;
            CPU_ZERO(&set);
            CPU_SET(0, &set);
            say("of another user: %d", sched_setaffinity(other, sizeof set, &set) == -1 && errno == EPERM);
            say(" %d", scheduler(other, SCHED_BATCH, 0) == -1 && errno == EPERM);
            say(" %d\n", setpriority(PRIO_PROCESS, (id_t)other, 19) == -1 && errno == EPERM);
            _exit(0);
        }
        finish(child);
    } else {
        say("of another user: 1 1 1\nstatus 0\n");
    }
    MUST(kill(other, SIGKILL));
    finish(other);
}

static long io_priority(void)
{
    return syscall(SYS_ioprio_get, 1, 0);
}

static void input_and_output(void)
{
    PART("input and output");
    enum { REAL_TIME = 1 << 13, BEST_EFFORT = 2 << 13, IDLE = 3 << 13 };
    MUST(syscall(SYS_ioprio_set, 1, 0, IDLE));
    say("%lx", io_priority());
    MUST(syscall(SYS_ioprio_set, 1, getpid(), BEST_EFFORT | 6));
    say(" %lx\n", io_priority());
    TRY(syscall(SYS_ioprio_set, 1, 0, 5 << 13));
    TRY(syscall(SYS_ioprio_set, 1, 0, 3));
    TRY(syscall(SYS_ioprio_set, 0, 0, IDLE));
    TRY(syscall(SYS_ioprio_set, 1, NO_SUCH_ID, IDLE));
    TRY(syscall(SYS_ioprio_get, 4, 0));
    pid_t child = MUST(fork());
    if (!child) {
        say("child %lx\n", io_priority());
        if (geteuid() == 0)
            MUST(setresuid(NOBODY, NOBODY, NOBODY));
        TRY(syscall(SYS_ioprio_set, 1, 0, REAL_TIME));
        TRY(syscall(SYS_ioprio_set, 1, 0, BEST_EFFORT));
        _exit(0);
    }
    finish(child);
}

int main(void)
{
    base = getpriority(PRIO_PROCESS, 0);
    affinity();

    PART("threads");
    pthread_t thread;
    if (pthread_create(&thread, NULL, polite, (void *)(long)getpid()) || pthread_join(thread, NULL))
        return 99;
    say("still %d, policy %d\n", getpriority(PRIO_PROCESS, 0) - base, sched_getscheduler(0));

    real_time();
    without_privilege();
    ordinary_policies();
    attributes();
    input_and_output();
    return 0;
}
