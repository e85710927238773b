/* wait4(2), waitid(2), SIGCHLD and what it tells, reaping, reparenting. */
#include "guest.h"
#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#ifndef P_PIDFD
#define P_PIDFD 3
#endif

static void show(const char *what, long result, int status)
{
    say("%s: %s", what, result < 0 ? error_name(errno) : result ? "a child" : "none");
    if (result > 0 && WIFEXITED(status))
        say(", exit %d", WEXITSTATUS(status));
    if (result > 0 && WIFSIGNALED(status))
        say(", killed by %s", sigabbrev_np(WTERMSIG(status)));
    if (result > 0 && WIFSTOPPED(status))
        say(", stopped by %s", sigabbrev_np(WSTOPSIG(status)));
    if (result > 0 && WIFCONTINUED(status))
        say(", continued");
    say("\n");
}

static void show_info(const char *what, long result, siginfo_t *info, pid_t child)
{
    if (result < 0)
        say("%s: %s\n", what, error_name(errno));
    else
        say("%s: signo %d code %d status %d pid %s\n", what, info->si_signo, info->si_code,
            info->si_status, info->si_pid == child ? "right" : info->si_pid ? "wrong" : "0");
}

/* Calls first: what it stores in `status` is shown. */
#define SHOW(what, call)                                                                           \
    do {                                                                                           \
        errno = 0;                                                                                 \
        long shown_ = (call);                                                                      \
        show(what, shown_, status);                                                                \
    } while (0)
#define SHOW_INFO(what, call, child)                                                               \
    do {                                                                                           \
        errno = 0;                                                                                 \
        long shown_ = (call);                                                                      \
        show_info(what, shown_, &info, child);                                                     \
    } while (0)

static pid_t sleeper(void)
{
    pid_t child = MUST(fork());
    if (!child)
        for (;;)
            pause();
    return child;
}

static pid_t exits(int code)
{
    pid_t child = MUST(fork());
    if (!child)
        _exit(code);
    return child;
}

static volatile sig_atomic_t heard;
static volatile int codes[16], statuses[16];
static void hears(int signal, siginfo_t *info, void *context)
{
    (void)signal, (void)context;
    codes[heard % 16] = info->si_code;
    statuses[heard % 16] = info->si_status;
    heard++;
}

static void *waits_in_thread(void *argument)
{
    int status;
    long pid = waitpid(-1, &status, 0);
    *(int *)argument = pid > 0 ? WEXITSTATUS(status) : -errno;
    return NULL;
}

static void until_heard(int count)
{
    for (int i = 0; heard < count && i < 2000; i++)
        usleep(1000);
}

/* How often SIGCHLD is heard of a child that stops (perhaps), goes on and ends. */
static int count_sigchld(int flags, void (*handler)(int, siginfo_t *, void *), int stop)
{
    struct sigaction action = {.sa_flags = flags | SA_RESTART | (handler ? SA_SIGINFO : 0)};
    if (handler)
        action.sa_sigaction = handler;
    else
        action.sa_handler = SIG_IGN;
    heard = 0;
    sigaction(SIGCHLD, &action, NULL);
    pid_t child = sleeper();
    int status, hears_stop = stop && !(flags & SA_NOCLDSTOP);
    if (stop) {
        kill(child, SIGSTOP);
        MUST(waitpid(child, &status, WUNTRACED));
        until_heard(hears_stop);
        kill(child, SIGCONT);
        MUST(waitpid(child, &status, WCONTINUED));
        until_heard(2 * hears_stop);
    }
    kill(child, SIGKILL);
    SHOW("wait", waitpid(child, &status, 0));
    until_heard(2 * hears_stop + (handler != NULL));
    usleep(2000);
    return heard;
}

int main(void)
{
    int status;
    siginfo_t info;
    struct rusage usage;

    PART("errors");
    TRY(wait(&status));
    TRY(waitpid(-1, &status, WNOHANG));
    TRY(waitpid(getpid(), &status, 0));
    TRY(waitpid(1 << 22, &status, 0));
    TRY(waitpid(-12345678, &status, 0));
    TRY(syscall(SYS_wait4, INT_MIN, &status, 0, NULL));
    TRY(waitpid(-1, &status, 0x100));
    TRY(waitid(P_ALL, 0, &info, WNOHANG));
    TRY(waitid(P_ALL, 0, &info, WEXITED | 0x100));
    TRY(waitid(P_ALL, 0, &info, WEXITED));
    TRY(waitid(99, 0, &info, WEXITED));
    TRY(waitid(P_PID, 0, &info, WEXITED));
    TRY(waitid(P_PID, (id_t)-1, &info, WEXITED));
    TRY(waitid(P_PGID, (id_t)-1, &info, WEXITED));
    TRY(waitid(P_PIDFD, 99, &info, WEXITED));
    TRY(waitid(P_PIDFD, 0, &info, WEXITED));

    PART("exit codes and signals");
    for (int i = 0; i < 3; i++) {
        pid_t child = exits((int[]){0, 255, 256 + 7}[i]);
        SHOW("wait", waitpid(child, &status, 0));
    }
    pid_t child = sleeper();
    SHOW("not yet", waitpid(child, &status, WNOHANG));
    MUST(kill(child, SIGTERM));
    SHOW("then", wait4(child, &status, 0, &usage));
    IS(usage.ru_utime.tv_sec == 0);
    SHOW("again", waitpid(child, &status, 0));
    TRY(kill(child, 0));
    child = exits(3);
    TRY(waitpid(child, (int *)8, 0));
    SHOW("it is gone", waitpid(child, &status, 0));

    PART("a zombie");
    child = exits(4);
    SHOW_INFO("left", waitid(P_PID, (id_t)child, &info, WEXITED | WNOWAIT), child);
    TRY(kill(child, 0));
    TRY(kill(child, SIGKILL));
    TRY(getpgid(child) == getpgrp());
    TRY(setpgid(child, child));
    SHOW_INFO("only stopped", waitid(P_PID, (id_t)child, &info, WSTOPPED | WNOHANG), child);
    SHOW_INFO("taken", waitid(P_PID, (id_t)child, &info, WEXITED), child);
    SHOW_INFO("gone", waitid(P_PID, (id_t)child, &info, WEXITED), child);
    child = sleeper();
    memset(&info, 0xff, sizeof info);
    TRY(waitid(P_ALL, 0, &info, WEXITED | WNOHANG));
    say("signo %d pid %d\n", info.si_signo, info.si_pid);

    PART("stopped and continued");
    MUST(kill(child, SIGSTOP));
    SHOW("untraced", waitpid(child, &status, WUNTRACED));
    SHOW("once", waitpid(child, &status, WUNTRACED | WNOHANG));
    MUST(kill(child, SIGCONT));
    SHOW("continued", waitpid(child, &status, WCONTINUED));
    SHOW("once", waitpid(child, &status, WCONTINUED | WNOHANG));
    /* Orphaned groups do not stop by it; this process' may be one. */
    MUST(setpgid(child, child));
    MUST(kill(child, SIGTSTP));
    SHOW_INFO("left", waitid(P_PID, (id_t)child, &info, WSTOPPED | WNOWAIT), child);
    SHOW_INFO("stopped", waitid(P_PID, (id_t)child, &info, WSTOPPED), child);
    MUST(kill(child, SIGCONT));
    SHOW_INFO("continued", waitid(P_PID, (id_t)child, &info, WCONTINUED), child);
    MUST(kill(child, SIGSTOP));
    MUST(waitpid(child, &status, WUNTRACED));
    MUST(kill(child, SIGTERM));
    SHOW("stopped, so not yet", waitpid(child, &status, WNOHANG));
    MUST(kill(child, SIGCONT));
    SHOW_INFO("killed", waitid(P_PID, (id_t)child, &info, WEXITED), child);
    child = sleeper();
    MUST(kill(child, SIGSTOP));
    MUST(waitpid(child, &status, WUNTRACED));
    MUST(kill(child, SIGKILL));
    SHOW("SIGKILL ends stopped ones", waitpid(child, &status, 0));

    PART("process groups and pidfds");
    child = sleeper();
    TRY(setpgid(child, child));
    pid_t member = sleeper();
    TRY(setpgid(member, child));
    SHOW("own group", waitpid(0, &status, WNOHANG));
    MUST(kill(-child, SIGUSR1));
    SHOW_INFO("P_PGID", waitid(P_PGID, (id_t)child, &info, WEXITED | WNOWAIT), info.si_pid);
    SHOW("-pgid", waitpid(-child, &status, 0));
    SHOW("-pgid", waitpid(-child, &status, 0));
    SHOW("-pgid", waitpid(-child, &status, 0));
    child = sleeper();
    int pidfd = (int)MUST(syscall(SYS_pidfd_open, child, 0));
    TRY(syscall(SYS_pidfd_open, child, 1));
    TRY(syscall(SYS_pidfd_open, 1 << 22, 0));
    TRY(syscall(SYS_pidfd_open, 0, 0));
    struct pollfd fds = {pidfd, POLLIN, 0};
    TRY(poll(&fds, 1, 0));
    TRY(syscall(SYS_pidfd_send_signal, pidfd, 0, NULL, 0));
    TRY(syscall(SYS_pidfd_send_signal, pidfd, 99, NULL, 0));
    TRY(syscall(SYS_pidfd_send_signal, 0, 0, NULL, 0));
    char directory[32];
    snprintf(directory, sizeof directory, "/proc/%d", child);
    int of_process = MUST(open(directory, O_RDONLY | O_DIRECTORY));
    TRY(syscall(SYS_pidfd_send_signal, of_process, 0, NULL, 0));
    TRY(syscall(SYS_pidfd_send_signal, of_process, SIGINT, NULL, 0));
    TRY(poll(&fds, 1, -1));
    SHOW_INFO("P_PIDFD", waitid(P_PIDFD, (id_t)pidfd, &info, WEXITED), child);
    SHOW_INFO("P_PIDFD", waitid(P_PIDFD, (id_t)pidfd, &info, WEXITED), child);
    TRY(syscall(SYS_pidfd_send_signal, pidfd, 0, NULL, 0));
    TRY(syscall(SYS_pidfd_send_signal, of_process, 0, NULL, 0));
    int elsewhere = MUST(open("/proc", O_RDONLY | O_DIRECTORY));
    TRY(syscall(SYS_pidfd_send_signal, elsewhere, 0, NULL, 0));
    close(elsewhere);
    close(of_process);
    close(pidfd);

    PART("SIGCHLD");
    struct sigaction action = {.sa_sigaction = hears, .sa_flags = SA_SIGINFO};
    sigaction(SIGCHLD, &action, NULL);
    child = exits(5);
    while (!heard)
        usleep(100);
    waitpid(child, &status, 0);
    child = sleeper();
    for (int i = 0; i < 3; i++) {
        kill(child, (int[]){SIGSTOP, SIGCONT, SIGSEGV}[i]);
        while (heard < 2 + i)
            usleep(100);
    }
    waitpid(child, &status, 0);
    for (int i = 0; i < heard; i++)
        say("code %d status %d\n", codes[i], statuses[i]);
    say("heard of %d\n", count_sigchld(0, hears, 1));
    say("heard of %d with SA_NOCLDSTOP\n", count_sigchld(SA_NOCLDSTOP, hears, 1));
    say("heard of %d with SA_NOCLDWAIT\n", count_sigchld(SA_NOCLDWAIT, hears, 0));
    say("heard of %d with SIG_IGN\n",
        count_sigchld(0, NULL, 0));
    child = exits(1);
    TRY(wait(&status));
    signal(SIGCHLD, SIG_DFL);

    PART("two threads wait");
    pthread_t threads[2];
    int seen[2];
    pid_t children[2] = {sleeper(), 0};
    children[1] = MUST(fork());
    if (!children[1]) {
        usleep(10000);
        kill(children[0], SIGKILL);
        _exit(0);
    }
    for (int i = 0; i < 2; i++)
        pthread_create(&threads[i], NULL, waits_in_thread, &seen[i]);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    say("seen %d %d\n", seen[0], seen[1]);

    PART("reparenting");
    MUST(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0));
    int is = 0, ends[2];
    MUST(prctl(PR_GET_CHILD_SUBREAPER, &is, 0, 0, 0));
    say("subreaper %d\n", is);
    MUST(pipe(ends));
    pid_t parent = getpid();
    child = MUST(fork());
    if (!child) {
        int reaper = 1;
        prctl(PR_GET_CHILD_SUBREAPER, &reaper, 0, 0, 0);
        say("inherited %d\n", reaper);
        if (MUST(fork()) == 0) {
            char byte;
            close(ends[1]);
            read(ends[0], &byte, 1);
            _exit(getppid() == parent ? 41 : 42);
        }
        _exit(40);
    }
    close(ends[0]);
    SHOW("child", waitpid(child, &status, 0));
    close(ends[1]);
    SHOW("grandchild", wait(&status));
    TRY(wait(&status));

    PART("PR_SET_PDEATHSIG");
    TRY(prctl(PR_SET_PDEATHSIG, 65));
    MUST(pipe(ends));
    child = MUST(fork());
    if (!child) {
        if (MUST(fork()) == 0) {
            MUST(prctl(PR_SET_PDEATHSIG, SIGUSR2));
            int signal = 0;
            MUST(prctl(PR_GET_PDEATHSIG, &signal));
            say("set to %d\n", signal);
            write(ends[1], "x", 1);
            for (;;)
                pause();
        }
        char byte;
        read(ends[0], &byte, 1);
        _exit(0);
    }
    SHOW("child", waitpid(child, &status, 0));
    SHOW("grandchild", wait(&status));

    PART("time of children");
    struct rusage before, after;
    getrusage(RUSAGE_CHILDREN, &before);
    child = MUST(fork());
    if (!child) {
        struct timespec t;
        do
            clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
        while (t.tv_nsec < 60000000);
        _exit(0);
    }
    wait4(child, &status, 0, &usage);
    getrusage(RUSAGE_CHILDREN, &after);
    long used = (after.ru_utime.tv_sec - before.ru_utime.tv_sec) * 1000000 + after.ru_utime.tv_usec -
                before.ru_utime.tv_usec + (after.ru_stime.tv_sec - before.ru_stime.tv_sec) * 1000000 +
                after.ru_stime.tv_usec - before.ru_stime.tv_usec;
    IS(used >= 50000);
    IS(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec >= 50000);

    PART("memory of children");
    enum { SIZE = 50 << 20 };
    IS(after.ru_maxrss < SIZE >> 10);
    child = MUST(fork());
    if (!child) {
        char *memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memset(memory, 1, SIZE);
        _exit(0);
    }
    wait4(child, &status, 0, &usage);
    getrusage(RUSAGE_CHILDREN, &after);
    IS(usage.ru_maxrss >= SIZE >> 10);
    IS(after.ru_maxrss == usage.ru_maxrss);
    child = MUST(fork());
    if (!child)
        _exit(0);
    wait4(child, &status, 0, &usage);
    getrusage(RUSAGE_CHILDREN, &after);
    IS(usage.ru_maxrss > 0 && usage.ru_maxrss < SIZE >> 10);
    IS(after.ru_maxrss >= SIZE >> 10);
    return 0;
}
