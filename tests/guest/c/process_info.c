/* Who and where a process is: ids, groups, uname(2), sysinfo(2), limits,
 * priorities, affinity, prctl(2), getrandom(2), personality(2). */
#include "guest.h"
#include <grp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>
#include <sys/utsname.h>
#include <sys/wait.h>

/* Where the stack, the heap and a mapping of a program are that is executed. */
static void places(unsigned long *at)
{
    int ends[2];
    MUST(pipe(ends));
    pid_t pid = MUST(fork());
    if (pid == 0) {
        MUST(dup2(ends[1], 1));
        execl("/proc/self/exe", "process_info", "places", NULL);
        _exit(9);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    char line[200] = "";
    MUST(read(ends[0], line, sizeof line - 1));
    at[0] = at[1] = at[2] = 0;
    sscanf(line, "%lx %lx %lx", &at[0], &at[1], &at[2]);
    close(ends[0]);
    close(ends[1]);
}

static int same_places(void)
{
    unsigned long one[3], other[3];
    places(one);
    places(other);
    return one[0] != 0 && memcmp(one, other, sizeof one) == 0;
}

static void personalities(void)
{
    PART("personality");
    say("random: %d\n", !same_places());
    TRY(personality(ADDR_NO_RANDOMIZE));
    TRY(personality(0xffffffff));
    say("%d\n", same_places());
    int file = MUST(open("/proc/self/personality", O_RDONLY));
    char line[20] = "";
    MUST(read(file, line, sizeof line - 1));
    say("%s", line);
    close(file);
    TRY(personality(0));
    TRY(personality(0xffffffff));
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "places") == 0) {
        void *mapping = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        printf("%lx %lx %lx\n", (unsigned long)&mapping, (unsigned long)sbrk(0), (unsigned long)mapping);
        return 0;
    }
    PART("ids");
    IS(getpid() > 0 && getpid() == gettid());
    IS(syscall(SYS_getpid) == getpid());
    IS(getppid() >= 0);
    IS(getuid() == geteuid() && getgid() == getegid());
    uid_t r, e, s;
    TRY(getresuid(&r, &e, &s));
    IS(r == e && e == s && r == getuid());
    TRY(getresgid(&r, &e, &s));
    TRY(setuid(getuid()));
    TRY(setgid(getgid()));
    TRY(setresuid(-1, -1, -1));
    TRY(setreuid(-1, -1));
    IS(getpgrp() >= 0 && getsid(0) >= 0);
    IS(getpgid(0) == getpgrp());
    TRY(getpgid(-5));
    TRY(getpgid(0x7ffffff0));
    TRY(getsid(0x7ffffff0));
    gid_t groups[256];
    IS(getgroups(256, groups) >= 0);
    TRY(getgroups(-1, groups));
    TRY(wait(NULL));
    TRY(waitpid(-1, NULL, WNOHANG));
    TRY(waitpid(-1, NULL, 0x40000));

    PART("uname");
    struct utsname name;
    TRY(uname(&name));
    say("%s %s\n", name.sysname, name.machine);
    IS(name.nodename[0] && name.release[0] >= '4' && name.version[0]);
    char host[65];
    TRY(gethostname(host, sizeof host));
    IS(!strcmp(host, name.nodename));
    TRY(syscall(SYS_uname, 8));

    PART("sysinfo");
    struct sysinfo info;
    TRY(sysinfo(&info));
    IS(info.totalram > 0 && info.freeram <= info.totalram && info.mem_unit > 0);
    IS(info.procs >= 1 && info.uptime >= 0);
    TRY(sysinfo((struct sysinfo *)8));
    IS(sysconf(_SC_NPROCESSORS_ONLN) >= 1);
    IS(sysconf(_SC_PHYS_PAGES) > 0);
    IS(sysconf(_SC_PAGESIZE) == 4096);
    IS(sysconf(_SC_CLK_TCK) == 100);
    IS(sysconf(_SC_OPEN_MAX) > 0);

    PART("limits");
    struct rlimit limit, again;
    static const int which[] = {RLIMIT_AS, RLIMIT_CORE, RLIMIT_CPU, RLIMIT_DATA, RLIMIT_FSIZE,
        RLIMIT_LOCKS, RLIMIT_MEMLOCK, RLIMIT_MSGQUEUE, RLIMIT_NICE, RLIMIT_NOFILE, RLIMIT_NPROC,
        RLIMIT_RSS, RLIMIT_RTPRIO, RLIMIT_RTTIME, RLIMIT_SIGPENDING, RLIMIT_STACK};
    for (size_t i = 0; i < sizeof which / sizeof *which; i++)
        if (getrlimit(which[i], &limit) < 0 || limit.rlim_cur > limit.rlim_max)
            say("limit %d is wrong\n", which[i]);
    TRY(getrlimit(77, &limit));
    TRY(getrlimit(RLIMIT_NOFILE, (struct rlimit *)8));
    MUST(getrlimit(RLIMIT_STACK, &limit));
    IS(limit.rlim_cur >= 1 << 20);
    MUST(getrlimit(RLIMIT_CORE, &limit));
    limit.rlim_cur = 0;
    TRY(setrlimit(RLIMIT_CORE, &limit));
    TRY(prlimit(0, RLIMIT_CORE, NULL, &again));
    IS(again.rlim_cur == 0);
    limit.rlim_cur = 10, limit.rlim_max = 5;
    TRY(setrlimit(RLIMIT_CORE, &limit));
    TRY(prlimit(0x7ffffff0, RLIMIT_CORE, NULL, &again));
    if (geteuid() == 0) {
        pid_t parent = getpid(), child = MUST(fork());
        if (!child) {
            MUST(setresgid(65534, 65534, 65534));
            MUST(setresuid(65534, 65534, 65534));
            TRY(prlimit(0, RLIMIT_CORE, NULL, &again));
            TRY(prlimit(parent, RLIMIT_CORE, NULL, &again));
            _exit(0);
        }
        MUST(waitpid(child, NULL, 0));
    } else {
        say("not root\n");
    }
    struct rusage usage;
    TRY(getrusage(RUSAGE_SELF, &usage));
    IS(usage.ru_maxrss > 0 && usage.ru_utime.tv_sec >= 0);
    TRY(getrusage(RUSAGE_CHILDREN, &usage));
    TRY(getrusage(RUSAGE_THREAD, &usage));
    TRY(getrusage(77, &usage));

    PART("scheduling");
    cpu_set_t set;
    TRY(sched_getaffinity(0, sizeof set, &set));
    IS(CPU_COUNT(&set) >= 1);
    TRY(sched_setaffinity(0, sizeof set, &set));
    TRY(sched_getaffinity(0, 1, &set));
    TRY(sched_getaffinity(0x7ffffff0, sizeof set, &set));
    TRY(sched_yield());
    TRY(sched_getscheduler(0));
    struct sched_param param;
    TRY(sched_getparam(0, &param));
    TRY(sched_get_priority_max(SCHED_FIFO));
    TRY(sched_get_priority_min(SCHED_OTHER));
    TRY(sched_get_priority_max(77));
    errno = 0;
    TRY(getpriority(PRIO_PROCESS, 0));

    PART("prctl");
    char comm[16] = "";
    TRY(prctl(PR_SET_NAME, "a-name-that-is-too-long"));
    TRY(prctl(PR_GET_NAME, comm));
    say("%s\n", comm);
    TRY(prctl(PR_GET_DUMPABLE));
    TRY(prctl(PR_SET_DUMPABLE, 0));
    TRY(prctl(PR_GET_DUMPABLE));
    TRY(prctl(PR_SET_DUMPABLE, 7));
    int signal_number = 77;
    TRY(prctl(PR_GET_PDEATHSIG, &signal_number));
    say("%d\n", signal_number);
    TRY(prctl(PR_SET_PDEATHSIG, 100));
    TRY(prctl(99999));
    TRY(prctl(PR_GET_NAME, 8));

    personalities();
    PART("arch_prctl");
    unsigned long base;
    TRY(syscall(SYS_arch_prctl, 0x1003, &base)); /* ARCH_GET_FS */
    unsigned long by_self;
    __asm__("mov %%fs:0, %0" : "=r"(by_self));
    IS(base == by_self);
    TRY(syscall(SYS_arch_prctl, 0x1002, 1UL << 63)); /* ARCH_SET_FS */
    TRY(syscall(SYS_arch_prctl, 0x7777, 0));
    unsigned long gs = 1;
    TRY(syscall(SYS_arch_prctl, 0x1004, &gs)); /* ARCH_GET_GS */
    say("gs %lu\n", gs);

    PART("random");
    unsigned char a[32] = {0}, b[32] = {0};
    TRY(getrandom(a, sizeof a, 0));
    TRY(getrandom(b, sizeof b, GRND_NONBLOCK));
    IS(memcmp(a, b, sizeof a) != 0);
    TRY(getrandom(a, 4, GRND_RANDOM));
    TRY(getrandom(a, 4, 0x80));
    TRY(getrandom((void *)8, 4, 0));
    TRY(getrandom(a, 0, 0));
    static unsigned char big[100000];
    TRY(getrandom(big, sizeof big, 0));
    int histogram[256] = {0}, worst = 0;
    for (size_t i = 0; i < sizeof big; i++)
        histogram[big[i]]++;
    for (int i = 0; i < 256; i++)
        if (abs(histogram[i] - 390) > worst)
            worst = abs(histogram[i] - 390);
    IS(worst < 150);
    TRY(getentropy(a, 32));
    TRY(getentropy(a, 300));

    PART("unknown calls");
    TRY(syscall(9999));
    TRY(syscall(-1));
    TRY(syscall(400));
    return 0;
}
