/* What runtimes read in /proc, /sys and /dev. */
#include "guest.h"
#include <ctype.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>

static char text[1 << 18];

static long slurp(const char *path)
{
    int fd = open(path, O_RDONLY);
    if (fd < 0) {
        say("%s: %s\n", path, error_name(errno));
        text[0] = '\0';
        return -1;
    }
    long total = 0, got;
    while ((got = read(fd, text + total, sizeof text - 1 - (size_t)total)) > 0)
        total += got;
    text[total] = '\0';
    close(fd);
    return total;
}

static bool has(const char *what) { return strstr(text, what) != NULL; }

static void *count_links(void *unused)
{
    struct stat st;
    TRY(stat("/proc/self/task", &st));
    say("links %lu\n", (unsigned long)st.st_nlink);
    return unused;
}

/* Ends after a while of computing, under a name of its own. */
static void compute_and_end(void)
{
    prctl(PR_SET_NAME, "gone.sh");
    struct timespec used;
    do
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    while (used.tv_sec == 0 && used.tv_nsec < 60000000);
    _exit(7);
}

static const char *of_process(int pid, const char *file)
{
    static char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", pid, file);
    return path;
}

/* The keys of a file with lines such as "Name:\tvalue". */
static void say_keys(void)
{
    static const char *left_out[] = {"Kthread", "Seccomp_filters", "Speculation", "x86_Thread", "untag_mask"};
    for (char *line = text; *line; line = strchr(line, '\n') + 1) {
        bool said = true;
        for (size_t i = 0; i < sizeof left_out / sizeof *left_out; i++)
            said &= strncmp(line, left_out[i], strlen(left_out[i])) != 0;
        if (said)
            say("%.*s ", (int)strcspn(line, ":"), line);
    }
    say("\n");
}

static void look_at_a_zombie(void)
{
    int pid = MUST(fork());
    if (pid == 0)
        compute_and_end();
    MUST(waitid(P_PID, pid, NULL, WEXITED | WNOWAIT));
    slurp(of_process(pid, "comm"));
    say("comm %s", text);
    slurp(of_process(pid, "status"));
    say_keys();
    IS(has("Name:\tgone.sh\n") && has("State:\tZ (zombie)\n") && has("Threads:\t1\n") && has("FDSize:\t0\n"));
    int uid = -1;
    IS(sscanf(strstr(text, "Uid:") ?: "", "Uid: %d", &uid) == 1 && uid == (int)getuid());
    IS(slurp(of_process(pid, "stat")) > 0);
    IS(!strncmp(strchr(text, '('), "(gone.sh) Z ", 12));
    IS(strstr(text, " 1792\n") != NULL); /* exit code 7 */
    char *at = strchr(text, ')') + 2;
    long user = -1, system = -1;
    sscanf(at, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %ld %ld", &user, &system);
    IS(user + system >= 5);
    IS(slurp(of_process(pid, "io")) > 0 && has("read_bytes: "));
    IS(slurp(of_process(pid, "limits")) > 0 && has("Max open files"));
    IS(slurp(of_process(pid, "cgroup")) > 0);
    slurp(of_process(pid, "statm"));
    say("statm %s", text);
    static const char *empty[] = {"cmdline", "maps", "smaps"};
    for (size_t i = 0; i < 3; i++)
        say("%s %ld\n", empty[i], slurp(of_process(pid, empty[i])));
    static const char *closed[] = {"auxv", "environ", "smaps_rollup", "mounts", "mountinfo"};
    for (size_t i = 0; i < 5; i++) {
        TRY(open(of_process(pid, closed[i]), O_RDONLY));
        TRY(access(of_process(pid, closed[i]), F_OK));
    }
    char link[64], task[32];
    TRY(readlink(of_process(pid, "exe"), link, sizeof link));
    TRY(readlink(of_process(pid, "cwd"), link, sizeof link));
    snprintf(task, sizeof task, "task/%d/stat", pid);
    TRY(access(of_process(pid, task), F_OK));
    cpu_set_t cpus;
    TRY(getpriority(PRIO_PROCESS, (id_t)pid));
    TRY(sched_getaffinity(pid, sizeof cpus, &cpus));
    TRY(sched_getscheduler(pid));
    IS(syscall(SYS_ioprio_get, 1, pid) >= 0);
    MUST(waitpid(pid, NULL, 0));
    TRY(access(of_process(pid, "stat"), F_OK));
    TRY(getpriority(PRIO_PROCESS, (id_t)pid));
}

/* What follows a name in /proc/stat, and the second and third word after it. */
static long counted(const char *name, int words)
{
    slurp("/proc/stat");
    long number[3] = {0};
    const char *at = strstr(text, name);
    if (at)
        sscanf(at + strlen(name), "%ld %ld %ld", &number[0], &number[1], &number[2]);
    return words == 1 ? number[0] : number[0] + number[1] + number[2];
}

static void look_at_counts(void)
{
    long busy = counted("cpu ", 3), forks = counted("processes ", 1), switches = counted("ctxt ", 1);
    int pid = MUST(fork());
    if (pid == 0)
        compute_and_end();
    MUST(waitpid(pid, NULL, 0));
    IS(counted("cpu ", 3) >= busy + 5);
    IS(counted("processes ", 1) > forks);
    IS(counted("ctxt ", 1) > switches);
    IS(counted("procs_running ", 1) >= 1);
    long first[3], second[3];
    slurp("/proc/stat");
    IS(sscanf(text, "cpu %ld %*d %ld %ld", &first[0], &first[1], &first[2]) == 3);
    slurp("/proc/stat");
    IS(sscanf(text, "cpu %ld %*d %ld %ld", &second[0], &second[1], &second[2]) == 3);
    IS(second[0] >= first[0]);
    double load[3];
    slurp("/proc/loadavg");
    IS(sscanf(text, "%lf %lf %lf", &load[0], &load[1], &load[2]) == 3);
}

int main(int argc, char **argv)
{
    char target[PATH_MAX];
    struct stat st, other;
    (void)argc;
    close_range(3, ~0U, 0); /* what a test runner may leave open */

    PART("/proc/self");
    ssize_t len = readlink("/proc/self", target, sizeof target - 1);
    target[len > 0 ? len : 0] = '\0';
    IS(atoi(target) == getpid());
    len = readlink("/proc/self/exe", target, sizeof target - 1);
    target[len > 0 ? len : 0] = '\0';
    IS(target[0] == '/' && !strcmp(strrchr(target, '/'), strrchr(argv[0], '/')));
    MUST(stat("/proc/self/exe", &st));
    MUST(stat(target, &other));
    IS(st.st_ino == other.st_ino && st.st_size == other.st_size);
    int exe = MUST(open("/proc/self/exe", O_RDONLY));
    char magic[4];
    TRY(read(exe, magic, 4));
    IS(!memcmp(magic, "\177ELF", 4));
    close(exe);
    len = readlink("/proc/self/cwd", target, sizeof target - 1);
    target[len > 0 ? len : 0] = '\0';
    char cwd[PATH_MAX];
    IS(!strcmp(target, getcwd(cwd, sizeof cwd)));
    len = readlink("/proc/self/root", target, sizeof target);
    IS(len == 1 && target[0] == '/');
    long size = slurp("/proc/self/cmdline");
    IS(size > 0 && !strcmp(text, argv[0]) && text[size - 1] == '\0');
    slurp("/proc/self/comm");
    say("comm %s", text);
    size = slurp("/proc/self/environ");
    IS(size >= 0);
    size = slurp("/proc/self/auxv");
    IS(size > 64 && size % 16 == 0);
    TRY(open("/proc/self/absent", O_RDONLY));
    TRY(open("/proc/self/comm/x", O_RDONLY));
    snprintf(target, sizeof target, "/proc/%d/stat", getpid());
    IS(slurp(target) > 0);
    TRY(open("/proc/2147483647/stat", O_RDONLY));

    PART("/proc/PID of a zombie");
    look_at_a_zombie();

    PART("/proc/self/task");
    pthread_t thread;
    count_links(NULL);
    pthread_create(&thread, NULL, count_links, NULL);
    pthread_join(thread, NULL);

    PART("/proc/self/stat, statm and status");
    slurp("/proc/self/stat");
    char *after = strrchr(text, ')');
    int fields = 2;
    for (char *c = after; *c; c++)
        fields += *c == ' ';
    IS(atoi(text) == getpid());
    say("fields %d state %c\n", fields, after[2]);
    IS(atoi(after + 4) == getppid());
    slurp("/proc/self/statm");
    long pages[7];
    IS(sscanf(text, "%ld %ld %ld %ld %ld %ld %ld", &pages[0], &pages[1], &pages[2], &pages[3],
              &pages[4], &pages[5], &pages[6]) == 7);
    IS(pages[0] >= pages[1] && pages[1] > 0);
    slurp("/proc/self/status");
    static const char *keys[] = {"Name:\t", "State:\t", "Tgid:\t", "Pid:\t", "PPid:\t", "Uid:\t",
        "Gid:\t", "VmSize:\t", "VmRSS:\t", "Threads:\t1\n", "SigBlk:\t0000000000000000\n",
        "SigIgn:\t", "SigCgt:\t", "Cpus_allowed:\t"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (!has(keys[i]))
            say("no %s\n", keys[i]);

    PART("/proc/self/maps");
    static char data_page[8192] __attribute__((aligned(4096)));
    char *map = mmap(NULL, 5 * 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mmap(map - 3 * 4096, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    MUST(mprotect(map + 4096, 4096, PROT_NONE));
    slurp("/proc/self/maps");
    unsigned long previous = 0;
    bool sorted = true, code = false, data = false, stack = false, hole = false, heap = true;
    char name[PATH_MAX];
    char *save = NULL;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        unsigned long start, end, offset, inode;
        unsigned major, minor;
        char rights[5];
        name[0] = '\0';
        if (sscanf(line, "%lx-%lx %4s %lx %x:%x %lu %[^\n]", &start, &end, rights, &offset, &major,
                   &minor, &inode, name) < 7) {
            say("unreadable line \"%s\"\n", line);
            continue;
        }
        sorted &= start >= previous && start < end;
        previous = end;
        unsigned long at = (unsigned long)main;
        if (at >= start && at < end)
            code = !strcmp(rights, "r-xp") && inode != 0 && strrchr(name, '/') &&
                   !strcmp(strrchr(name, '/'), strrchr(argv[0], '/'));
        at = (unsigned long)data_page;
        if (at >= start && at < end)
            data = !strcmp(rights, "rw-p");
        at = (unsigned long)&st;
        if (at >= start && at < end)
            stack = !strcmp(rights, "rw-p") && !strcmp(name, "[stack]");
        at = (unsigned long)(map + 4096);
        if (at >= start && at < end)
            hole = !strcmp(rights, "---p") && start == at && end == at + 4096;
    }
    (void)heap;
    IS(sorted);
    IS(code);
    IS(data);
    IS(stack);
    IS(hole);

    PART("/proc/self/fd and /dev/fd");
    int fd = MUST(open("/etc/passwd", O_RDONLY));
    snprintf(target, sizeof target, "/proc/self/fd/%d", fd);
    len = readlink(target, name, sizeof name - 1);
    name[len > 0 ? len : 0] = '\0';
    say("%s\n", name);
    int ends[2];
    MUST(pipe(ends));
    snprintf(target, sizeof target, "/proc/self/fd/%d", ends[0]);
    len = readlink(target, name, sizeof name - 1);
    name[len > 0 ? len : 0] = '\0';
    IS(!strncmp(name, "pipe:[", 6));
    MUST(write(ends[1], "again", 5));
    int again = TRY(open(target, O_RDONLY));
    char piece[8] = "";
    TRY(read(again, piece, 5));
    close(again);
    show_dir("/proc/self/fd");
    TRY(readlink("/proc/self/fd/99", name, sizeof name));
    snprintf(target, sizeof target, "/dev/fd/%d", fd);
    int copy = TRY(open(target, O_RDONLY));
    TRY(lseek(copy, 0, SEEK_CUR)); /* a description of its own */
    close(copy);
    TRY(access("/dev/stdin", F_OK));
    TRY(access("/dev/stdout", F_OK));
    slurp("/proc/self/fdinfo/0");
    IS(has("pos:\t") && has("flags:\t"));

    PART("/proc/stat counts");
    look_at_counts();

    PART("the system");
    slurp("/proc/meminfo");
    IS(has("MemTotal:") && has("MemFree:") && has("MemAvailable:") && has(" kB\n"));
    slurp("/proc/cpuinfo");
    IS(has("processor\t: 0\n") && has("model name\t: ") && has("flags\t\t: "));
    slurp("/proc/stat");
    IS(!strncmp(text, "cpu ", 4) && has("\ncpu0 ") && has("\nbtime "));
    slurp("/proc/uptime");
    double up, idle;
    IS(sscanf(text, "%lf %lf", &up, &idle) == 2 && up > 0);
    slurp("/proc/loadavg");
    IS(strchr(text, '/') != NULL);
    slurp("/proc/version");
    IS(!strncmp(text, "Linux version ", 14));
    slurp("/proc/filesystems");
    IS(has("proc\n"));
    slurp("/proc/mounts");
    IS(has(" / ") && has(" /proc proc "));
    slurp("/proc/sys/kernel/osrelease");
    IS(strlen(text) > 3);
    slurp("/proc/sys/kernel/hostname");
    IS(strlen(text) > 1);
    slurp("/proc/sys/kernel/pid_max");
    IS(atoi(text) > 1000);
    slurp("/proc/sys/vm/overcommit_memory");
    bool refuses = text[0] != '1';
    void *room = mmap(NULL, 1UL << 46, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    IS((room == MAP_FAILED) == refuses);
    slurp("/proc/sys/net/core/somaxconn");
    IS(atoi(text) > 0);
    char boot[64];
    slurp("/proc/sys/kernel/random/boot_id");
    say("boot_id has %zu characters\n", strlen(text));
    strncpy(boot, text, sizeof boot - 1);
    slurp("/proc/sys/kernel/random/boot_id");
    IS(!strncmp(boot, text, 36));
    slurp("/proc/sys/kernel/random/uuid");
    strncpy(boot, text, sizeof boot - 1);
    slurp("/proc/sys/kernel/random/uuid");
    IS(strlen(text) == 37 && strncmp(boot, text, 36) != 0);
    slurp("/proc/self/mountinfo");
    IS(has(" / "));
    slurp("/proc/self/cgroup");
    IS(text[0] != '\0');
    slurp("/sys/devices/system/cpu/online");
    IS(isdigit((unsigned char)text[0]));

    PART("/dev");
    static const struct { const char *path; unsigned major, minor; } devices[] = {
        {"/dev/null", 1, 3}, {"/dev/zero", 1, 5}, {"/dev/full", 1, 7},
        {"/dev/random", 1, 8}, {"/dev/urandom", 1, 9}};
    char block[64], second[64];
    for (size_t i = 0; i < 5; i++) {
        MUST(stat(devices[i].path, &st));
        say("%s: %s %d\n", devices[i].path, S_ISCHR(st.st_mode) ? "character" : "?",
            major(st.st_rdev) == devices[i].major && minor(st.st_rdev) == devices[i].minor);
        fd = MUST(open(devices[i].path, O_RDWR));
        memset(block, 7, sizeof block);
        TRY(read(fd, block, sizeof block));
        TRY(read(fd, second, sizeof second));
        if (i == 1 || i == 2)
            IS(block[0] == 0 && block[63] == 0);
        if (i >= 3)
            IS(memcmp(block, second, sizeof block) != 0);
        TRY(write(fd, "x", 1));
        TRY(lseek(fd, 5, SEEK_SET));
        close(fd);
    }
    fd = MUST(open("/dev/zero", O_RDWR));
    map = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    IS(map != MAP_FAILED && map[5000] == 0);
    map[5000] = 1;
    for (int device = 0; device < 4; device++) {
        fd = MUST(open((const char *[]){"/dev/null", "/dev/zero", "/dev/full", "/dev/urandom"}[device], O_RDWR));
        TRY(lseek(fd, 5, SEEK_SET));
        TRY(lseek(fd, -5, SEEK_CUR));
        TRY(lseek(fd, -(1L << 62), SEEK_END));
        TRY(lseek(fd, 0, 77));
        close(fd);
    }
    fd = MUST(open("/dev/null", O_WRONLY | O_TRUNC | O_CREAT, 0644));
    TRY(write(fd, "gone", 4));
    TRY(open("/dev/null/x", O_RDONLY));
    MUST(stat("/dev/shm", &st));
    IS(S_ISDIR(st.st_mode));
    fd = shm_open("/thaw-guest-shm", O_CREAT | O_RDWR, 0600);
    IS(fd >= 0);
    TRY(ftruncate(fd, 4096));
    map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    strcpy(map, "shared");
    TRY(pread(fd, piece, 6, 0));
    TRY(shm_unlink("/thaw-guest-shm"));
    return 0;
}
