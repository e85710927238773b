/* Attributes of processes that runtimes set and read: nice values, scheduling
 * policies, kept capabilities, subreapers, and what children inherit of them;
 * programs executed from descriptors. */
#include "guest.h"
#include <linux/capability.h>
#include <linux/membarrier.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

static int wait_for(pid_t child)
{
    int status;
    MUST(waitpid(child, &status, 0));
    return status;
}

/* Takes CAP_SYS_RESOURCE from the process, if it has it. */
static void give_up_resources(void)
{
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];
    MUST(syscall(SYS_capget, &header, data));
    data[0].effective &= ~(1U << CAP_SYS_RESOURCE);
    MUST(syscall(SYS_capset, &header, data));
}

static int oom_score_adj(const char *path)
{
    char text[32] = "";
    int fd = MUST(open(path, O_RDONLY));
    MUST(read(fd, text, sizeof text - 1));
    MUST(close(fd));
    return atoi(text);
}

/* Writes to the file of this process; 0, or -1 with errno. */
static int set_oom_score_adj(const char *text)
{
    int fd = MUST(open("/proc/self/oom_score_adj", O_WRONLY));
    ssize_t written = write(fd, text, strlen(text));
    int error = errno;
    MUST(close(fd));
    errno = error;
    return written < 0 ? -1 : 0;
}

static void set_oom_score_adj_to(int value)
{
    char text[32];
    snprintf(text, sizeof text, "%d\n", value);
    TRY(set_oom_score_adj(text));
}

/* oom_score_adj: children inherit it, and it is lowered by the privileged only. */
static void out_of_memory(void)
{
    const char *own = "/proc/self/oom_score_adj";
    give_up_resources();
    int first = oom_score_adj(own), raised = (first + 1000) / 2;
    set_oom_score_adj_to(raised);
    IS(oom_score_adj(own) == raised);
    pid_t child = MUST(fork());
    if (!child) {
        IS(oom_score_adj(own) == raised);
        set_oom_score_adj_to(1000);
        set_oom_score_adj_to(first);
        set_oom_score_adj_to(raised);
        char shell[128];
        snprintf(shell, sizeof shell, "test $(cat /proc/$$/oom_score_adj) = %d && echo inherited", raised);
        execl("/bin/sh", "sh", "-c", shell, (char *)NULL);
        _exit(1);
    }
    say("status %x\n", wait_for(child));
    child = MUST(fork());
    if (!child) {
        set_oom_score_adj_to(1000);
        _exit(0);
    }
    siginfo_t info;
    MUST(waitid(P_PID, (id_t)child, &info, WEXITED | WNOWAIT));
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/oom_score_adj", child);
    say("of a child that has ended: %d\n", oom_score_adj(path));
    wait_for(child);
    IS(oom_score_adj(own) == raised);
    set_oom_score_adj_to(-1000);
    TRY(set_oom_score_adj("1001"));
    TRY(set_oom_score_adj("-1001"));
    TRY(set_oom_score_adj("much"));
    TRY(set_oom_score_adj(" 1000 \n"));
}

int main(void)
{
    PART("nice");
    errno = 0;
    int base = getpriority(PRIO_PROCESS, 0);
    TRY(setpriority(PRIO_PROCESS, 0, base + 3));
    say("raised by %d\n", getpriority(PRIO_PROCESS, 0) - base);
    pid_t child = MUST(fork());
    if (!child) {
        say("inherited %d\n", getpriority(PRIO_PROCESS, 0) - base);
        TRY(nice(2) == base + 5);
        _exit(0);
    }
    wait_for(child);
    say("still %d\n", getpriority(PRIO_PROCESS, 0) - base);
    TRY(setpriority(PRIO_PROCESS, 0, 100));
    say("capped at %d\n", getpriority(PRIO_PROCESS, getpid()));
    TRY(getpriority(PRIO_PROCESS, 1 << 22));
    TRY(getpriority(77, 0));
    TRY(setpriority(77, 0, 0));
    TRY(setpriority(PRIO_PROCESS, 1 << 22, 0));

    PART("scheduling");
    struct timespec slice;
    struct sched_param parameter = {0};
    TRY(sched_getscheduler(0));
    TRY(sched_getscheduler(-1));
    TRY(sched_getscheduler(1 << 22));
    TRY(sched_rr_get_interval(0, &slice));
    IS(slice.tv_sec == 0 && slice.tv_nsec >= 0);
    TRY(sched_rr_get_interval(-1, &slice));
    TRY(sched_getparam(0, &parameter));
    TRY(sched_get_priority_max(SCHED_FIFO));
    TRY(sched_get_priority_min(SCHED_RR));
    TRY(sched_get_priority_max(77));
    parameter.sched_priority = 5;
    TRY(sched_setscheduler(0, SCHED_OTHER, &parameter));
    TRY(sched_setscheduler(0, 77, &parameter));
    cpu_set_t set;
    IS(syscall(SYS_sched_getaffinity, 0, sizeof set, &set) >= 8);
    TRY(syscall(SYS_sched_getaffinity, 0, 7, &set));
    TRY(syscall(SYS_sched_getaffinity, -1, sizeof set, &set));
    CPU_ZERO(&set);
    TRY(sched_setaffinity(0, sizeof set, &set));

    PART("prctl");
    TRY(prctl(PR_GET_KEEPCAPS));
    TRY(prctl(PR_SET_KEEPCAPS, 2));
    TRY(prctl(PR_SET_KEEPCAPS, 1));
    TRY(prctl(PR_GET_KEEPCAPS));
    TRY(prctl(PR_SET_KEEPCAPS, 0));
    TRY(prctl(PR_SET_DUMPABLE, 0));
    TRY(prctl(PR_GET_DUMPABLE));
    TRY(prctl(PR_SET_DUMPABLE, 1));
    TRY(prctl(PR_SET_DUMPABLE, 3));
    TRY(prctl(0x7fffff, 0));
    TRY(prctl(PR_SET_NAME, "a name that is too long"));
    char name[16];
    TRY(prctl(PR_GET_NAME, name));
    say("%s\n", name);
    TRY(prctl(PR_GET_NAME, 8));

    PART("out of memory");
    child = MUST(fork());
    if (!child) {
        out_of_memory();
        _exit(0);
    }
    say("status %x\n", wait_for(child));

    PART("membarrier");
    IS(syscall(SYS_membarrier, MEMBARRIER_CMD_QUERY, 0, 0) > 0);
    TRY(syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0));
    TRY(syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0));
    TRY(syscall(SYS_membarrier, 1 << 30, 0, 0));

    PART("programs from descriptors");
    int fd = MUST(open("/bin/sh", O_RDONLY | O_CLOEXEC));
    char *const arguments[] = {"sh", "-c", "echo from a descriptor; exit 3", NULL};
    char *const environment[] = {NULL};
    child = MUST(fork());
    if (!child) {
        fexecve(fd, arguments, environment);
        _exit(1);
    }
    say("status %x\n", wait_for(child));
    TRY(syscall(SYS_execveat, fd, "", arguments, environment, 0));
    TRY(syscall(SYS_execveat, 99, "", arguments, environment, AT_EMPTY_PATH));
    TRY(syscall(SYS_execveat, AT_FDCWD, "/bin/sh", arguments, environment, 0x8000000));
    int passwd = MUST(open("/etc/passwd", O_RDONLY));
    TRY(syscall(SYS_execveat, passwd, "", arguments, environment, AT_EMPTY_PATH));
    int directory = MUST(open("/bin", O_RDONLY | O_DIRECTORY));
    TRY(syscall(SYS_execveat, directory, "", arguments, environment, AT_EMPTY_PATH));
    child = MUST(fork());
    if (!child) {
        syscall(SYS_execveat, directory, "sh", arguments, environment, 0);
        _exit(1);
    }
    say("status %x\n", wait_for(child));
    return 0;
}
