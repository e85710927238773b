/* Corners of many calls that the Linux Test Project looks at: which error comes first, what stays,
 * what goes along. */
#define _GNU_SOURCE
#include "guest.h"
#include <netinet/in.h>
#include <netinet/udp.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <sys/wait.h>

static const char *outcome(long result)
{
    return result < 0 ? error_name(errno) : "ok";
}

/* A saved id follows the effective one only where setreuid(2) says so. */
static void saved_ids(void)
{
    PART("saved ids");
    if (geteuid() != 0) {
        return;
    }
    pid_t child = fork();
    if (child == 0) {
        uid_t r, e, s;
        gid_t gr, ge, gs;
        setresuid(0, 0, 0);
        setreuid((uid_t)-1, 1000);
        getresuid(&r, &e, &s);
        say("effective 1000: %u %u %u\n", r, e, s);
        setreuid((uid_t)-1, 0);
        getresuid(&r, &e, &s);
        say("effective 0 again: %u %u %u\n", r, e, s);
        setresgid(5, 6, 7);
        setregid((gid_t)-1, (gid_t)-1);
        getresgid(&gr, &ge, &gs);
        say("groups unchanged: %u %u %u\n", gr, ge, gs);
        setregid((gid_t)-1, 5);
        getresgid(&gr, &ge, &gs);
        say("effective group is the real one: %u %u %u\n", gr, ge, gs);
        _exit(0);
    }
    waitpid(child, NULL, 0);
}

static volatile int got_value;

static void handler(int signal, siginfo_t *info, void *context)
{
    (void)signal;
    (void)context;
    got_value = info->si_value.sival_int;
}

static int tid_of_thread;
static int runs[2], go_on[2];

static void *wait_in_thread(void *unused)
{
    char byte;
    tid_of_thread = gettid();
    write(runs[1], "x", 1);
    while (read(go_on[0], &byte, 1) != 1) {
    }
    return unused;
}

static void signals(void)
{
    PART("signals");
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | (int)SA_RESETHAND};
    sigaction(SIGUSR1, &action, NULL);
    raise(SIGUSR1);
    sigaction(SIGUSR1, NULL, &action);
    say("after SA_RESETHAND: default %d, flags kept %d\n", action.sa_handler == SIG_DFL,
        (action.sa_flags & SA_SIGINFO) != 0);

    action = (struct sigaction){.sa_sigaction = handler, .sa_flags = SA_SIGINFO};
    sigaction(SIGUSR2, &action, NULL);
    pipe(runs);
    pipe(go_on);
    pthread_t thread;
    pthread_create(&thread, NULL, wait_in_thread, NULL);
    char byte;
    read(runs[0], &byte, 1);
    siginfo_t info = {.si_signo = SIGUSR2, .si_code = SI_QUEUE, .si_value.sival_int = 777};
    say("sigqueue to a thread's id: %s", outcome(syscall(SYS_rt_sigqueueinfo, tid_of_thread, SIGUSR2, &info)));
    while (got_value == 0) {
        usleep(1000);
    }
    say(", value %d\n", got_value);
    say("kill of a thread's id: %s\n", outcome(kill(tid_of_thread, 0)));
    write(go_on[1], "e", 1);
    pthread_join(thread, NULL);

    pid_t child = fork();
    if (child == 0) {
        sigset_t set;
        sigemptyset(&set);
        sigaddset(&set, SIGRTMIN);
        sigaddset(&set, SIGUSR1);
        sigprocmask(SIG_BLOCK, &set, NULL);
        struct rlimit limit = {0, 0};
        setrlimit(RLIMIT_SIGPENDING, &limit);
        say("no room: tgkill %s", outcome(syscall(SYS_tgkill, getpid(), gettid(), SIGRTMIN)));
        say(", sigqueue %s", outcome(sigqueue(getpid(), SIGRTMIN, (union sigval){.sival_int = 1})));
        say(", standard %s", outcome(syscall(SYS_tgkill, getpid(), gettid(), SIGUSR1)));
        say(", kill %s\n", outcome(kill(getpid(), SIGRTMIN)));
        sigset_t pending;
        sigpending(&pending);
        say("pending: %d %d\n", sigismember(&pending, SIGRTMIN), sigismember(&pending, SIGUSR1));
        _exit(0);
    }
    waitpid(child, NULL, 0);
}

/* A timer whose signal does nothing must not keep anybody busy, however short its period. */
static void short_periods(void)
{
    PART("short periods");
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCONT);
    sigprocmask(SIG_BLOCK, &set, NULL);
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGCONT};
    timer_t timer;
    timer_create(CLOCK_REALTIME, &event, &timer);
    struct itimerspec each = {.it_interval = {0, 1}, .it_value = {0, 1000000}};
    timer_settime(timer, 0, &each, NULL);
    usleep(2000);
    sigprocmask(SIG_UNBLOCK, &set, NULL);
    say("goes on, some were missed: %d\n", timer_getoverrun(timer) > 0);
    timer_delete(timer);
}

static volatile int faults, calls;

static void on_fault(int signal)
{
    (void)signal;
    faults++;
}

static void on_call(int signal)
{
    (void)signal;
    calls++;
}

/* The stack of a handler cannot be written to: SIGSEGV, which has a handler on another one. */
static void frames(void)
{
    PART("frames of handlers");
    char *memory = mmap(NULL, 65536, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    stack_t stack = {.ss_sp = memory, .ss_size = 65536};
    sigaltstack(&stack, NULL);
    struct sigaction action = {.sa_handler = on_fault};
    sigaction(SIGSEGV, &action, NULL);
    action = (struct sigaction){.sa_handler = on_call, .sa_flags = SA_ONSTACK};
    sigaction(SIGHUP, &action, NULL);
    raise(SIGHUP);
    say("no room: %d calls, %d faults\n", calls, faults);
    mprotect(memory, 65536, PROT_READ | PROT_WRITE);
    raise(SIGHUP);
    say("room: %d calls, %d faults\n", calls, faults);
    stack.ss_flags = SS_DISABLE;
    sigaltstack(&stack, NULL);
    signal(SIGSEGV, SIG_DFL);
}

static char order[3];

static void note_order(int signal)
{
    if (signal == SIGUSR1) {
        raise(SIGUSR2);
    }
    order[strlen(order)] = signal == SIGUSR1 ? '1' : '2';
}

/* The mask of sigsuspend(2) holds until the handler has returned. */
static void temporary_masks(void)
{
    PART("temporary masks");
    pid_t child = fork();
    if (child == 0) {
        struct sigaction action = {.sa_handler = note_order};
        sigaction(SIGUSR1, &action, NULL);
        sigaction(SIGUSR2, &action, NULL);
        sigset_t set;
        sigemptyset(&set);
        sigaddset(&set, SIGUSR1);
        sigprocmask(SIG_SETMASK, &set, NULL);
        raise(SIGUSR1);
        sigemptyset(&set);
        sigaddset(&set, SIGUSR2);
        sigsuspend(&set);
        say("handlers in order: %s\n", order);
        _exit(0);
    }
    waitpid(child, NULL, 0);
}

static void files(void)
{
    PART("files");
    int ends[2];
    pipe(ends);
    char byte = 'x';
    struct iovec vector = {&byte, 1};
    say("pwritev2 at a place of a pipe: %s\n", outcome(pwritev2(ends[0], &vector, 1, 0, 0)));
    say("pread of the end to write: %s\n", outcome(pread(ends[1], &byte, 1, 0)));
    int zero = open("/dev/zero", O_RDWR);
    say("fsync of a device: %s, fdatasync of a pipe: %s\n", outcome(fsync(zero)), outcome(fdatasync(ends[1])));
    say("sync_file_range: %s", outcome(sync_file_range(zero, 0, 1, SYNC_FILE_RANGE_WRITE)));
    say(", readahead: %s\n", outcome(readahead(zero, 0, 1)));
    int path = open("/", O_PATH);
    say("accept: %s\n", outcome(accept(path, NULL, NULL)));
    close(zero);
    char *arguments[] = {"true", NULL};
    pid_t child = fork();
    if (child == 0) {
        syscall(SYS_execveat, -1, "/bin/true", arguments, NULL, 0);
        _exit(1);
    }
    int status;
    waitpid(child, &status, 0);
    say("execveat of an absolute path: %d\n", WEXITSTATUS(status));
}

static void fd_line(int fd, const char *name)
{
    char file[64], line[256];
    snprintf(file, sizeof file, "/proc/self/fdinfo/%d", fd);
    FILE *lines = fopen(file, "r");
    while (lines && fgets(line, sizeof line, lines)) {
        if (strncmp(line, name, strlen(name)) == 0) {
            say("%s", line);
        }
    }
    if (lines) {
        fclose(lines);
    }
}

static void descriptions(void)
{
    PART("fdinfo");
    int event = eventfd(255, 0);
    fd_line(event, "eventfd-count");
    int watch = inotify_init1(0);
    inotify_add_watch(watch, "/", IN_MODIFY | IN_ONESHOT);
    int wd = 0;
    unsigned mask = 0;
    char file[64], line[256];
    snprintf(file, sizeof file, "/proc/self/fdinfo/%d", watch);
    FILE *lines = fopen(file, "r");
    while (fgets(line, sizeof line, lines)) {
        sscanf(line, "inotify wd:%d ino:%*x sdev:%*x mask:%x", &wd, &mask);
    }
    fclose(lines);
    say("watch %d, mask %x\n", wd, mask);
    int set = epoll_create1(0);
    struct epoll_event interest = {.events = EPOLLIN | EPOLLET, .data.u64 = 0x1234};
    epoll_ctl(set, EPOLL_CTL_ADD, event, &interest);
    snprintf(file, sizeof file, "/proc/self/fdinfo/%d", set);
    lines = fopen(file, "r");
    int fd = 0;
    unsigned long long data = 0;
    while (fgets(line, sizeof line, lines)) {
        sscanf(line, "tfd: %d events: %x data: %llx", &fd, &mask, &data);
    }
    fclose(lines);
    say("interest in the eventfd %d, events %x, data %llx\n", fd == event, mask, data);
    int timer = timerfd_create(CLOCK_BOOTTIME, 0);
    fd_line(timer, "clockid");
    fd_line(timer, "ticks");
    pid_t child = fork();
    if (child == 0) {
        pause();
    }
    int pidfd = (int)syscall(SYS_pidfd_open, child, 0);
    int pid = 0;
    snprintf(file, sizeof file, "/proc/self/fdinfo/%d", pidfd);
    lines = fopen(file, "r");
    while (fgets(line, sizeof line, lines)) {
        sscanf(line, "Pid: %d", &pid);
    }
    fclose(lines);
    say("pidfd names its process: %d\n", pid == child);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    fd_line(pidfd, "Pid");
}

static void datagrams(void)
{
    PART("datagrams in parts");
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    int to = socket(AF_INET, SOCK_DGRAM, 0), from = socket(AF_INET, SOCK_DGRAM, 0);
    bind(to, (struct sockaddr *)&address, len);
    getsockname(to, (struct sockaddr *)&address, &len);
    connect(from, (struct sockaddr *)&address, len);
    char got[100];
    send(from, "one ", 4, MSG_MORE);
    say("before the rest: %s\n", outcome(recv(to, got, sizeof got, MSG_DONTWAIT)));
    send(from, "two", 3, 0);
    say("whole: %.7s, %zd bytes\n", got, recv(to, got, sizeof got, 0));
    int on = 1, off = 0;
    setsockopt(from, IPPROTO_UDP, UDP_CORK, &on, sizeof on);
    send(from, "a", 1, 0);
    send(from, "bc", 2, 0);
    say("corked: %s\n", outcome(recv(to, got, sizeof got, MSG_DONTWAIT)));
    setsockopt(from, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    say("another option: %s\n", outcome(recv(to, got, sizeof got, MSG_DONTWAIT)));
    setsockopt(from, IPPROTO_UDP, UDP_CORK, &off, sizeof off);
    say("uncorked: %zd bytes\n", recv(to, got, sizeof got, 0));
    int fresh = socket(AF_INET, SOCK_DGRAM, 0);
    struct sockaddr_in own = {0};
    sendto(fresh, "ab", 2, MSG_MORE, (struct sockaddr *)&address, sizeof address);
    len = sizeof own;
    getsockname(fresh, (struct sockaddr *)&own, &len);
    say("bound by the first part: %d", own.sin_port != 0);
    say(", the rest without an address: %s", outcome(send(fresh, "cd", 2, 0)));
    say(", %zd bytes\n", recv(to, got, sizeof got, 0));
    static char much[65508];
    send(from, "lost", 4, MSG_MORE);
    say("too much: %s\n", outcome(send(from, much, 65506, 0)));
    send(from, "x", 1, 0);
    say("after that: %zd byte\n", recv(to, got, sizeof got, 0));

    struct iovec vector = {got, sizeof got};
    struct msghdr message = {.msg_name = &address, .msg_namelen = (socklen_t)-1, .msg_iov = &vector, .msg_iovlen = 1};
    say("a negative length: recvmsg %s", outcome(recvmsg(to, &message, MSG_DONTWAIT)));
    send(from, "x", 1, 0);
    len = (socklen_t)-1;
    say(", recvfrom %s\n", outcome(recvfrom(to, got, sizeof got, 0, (struct sockaddr *)&address, &len)));
    say("raw of no protocol: %s\n", outcome(socket(AF_INET, SOCK_RAW, 0)));
}

static void memory(void)
{
    PART("memory");
    char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    mlock(page, 4096);
    say("locked: msync %s, MADV_DONTNEED %s\n", outcome(msync(page, 4096, MS_INVALIDATE)),
        outcome(madvise(page, 4096, MADV_DONTNEED)));
    munlock(page, 4096);
    char *own = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mlock(own, 4096);
    *own = 7;
    say("MADV_FREE of locked memory: %s", outcome(madvise(own, 4096, MADV_FREE)));
    say(", byte %d", *own);
    say("; MADV_DONTNEED_LOCKED: %s", outcome(madvise(own, 4096, 24)));
    say(", byte %d\n", *own);
    say("MADV_FREE of what is shared: %s\n", outcome(madvise(page, 4096, MADV_FREE)));
    say("mmap of nothing with a bad descriptor: %s\n", outcome((long)mmap(NULL, 0, PROT_READ, MAP_SHARED, 999, 0)));
}

static void attributes(void)
{
    PART("attributes");
    int before = personality(ADDR_NO_RANDOMIZE | STICKY_TIMEOUTS);
    say("personality: %x, then %x\n", before & ~ADDR_NO_RANDOMIZE, personality(0xffffffff));
    personality(0);
    say("slack: %d", prctl(PR_GET_TIMERSLACK));
    prctl(PR_SET_TIMERSLACK, 70000);
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_TIMERSLACK, 1);
        int own = prctl(PR_GET_TIMERSLACK);
        prctl(PR_SET_TIMERSLACK, 0);
        say(", of a child %d, its default %d", own, prctl(PR_GET_TIMERSLACK));
        fflush(stdout);
        _exit(0);
    }
    waitpid(child, NULL, 0);
    prctl(PR_SET_TIMERSLACK, 0);
    say(", default again %d\n", prctl(PR_GET_TIMERSLACK));
    struct timespec none = {0, 0};
    say("sleep by CPU time of a thread: %s\n",
        outcome(syscall(SYS_clock_nanosleep, CLOCK_THREAD_CPUTIME_ID, 0, &none, NULL)));
    say("set the monotonic clock: %s", outcome(clock_settime(CLOCK_MONOTONIC, &none)));
    none.tv_nsec = -1;
    say(", an invalid time: %s\n", outcome(clock_settime(CLOCK_REALTIME, &none)));
    say("an unknown command of reboot: %s\n", outcome(syscall(SYS_reboot, 0xfee1dead, 672274793, 5, 0)));
}

int main(void)
{
    saved_ids();
    signals();
    short_periods();
    frames();
    temporary_masks();
    files();
    descriptions();
    datagrams();
    memory();
    attributes();
    return 0;
}
