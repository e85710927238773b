/* Process groups, sessions, who may send signals to whom, job control. */
#include "guest.h"
#include <poll.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>

static int ends[2], gate[2];

/* A child that waits until the gate is closed, or for ever. */
static pid_t child_that(void (*work)(void))
{
    pid_t child = MUST(fork());
    if (!child) {
        close(gate[1]);
        if (work)
            work();
        MUST(write(ends[1], "r", 1));
        char byte;
        while (read(gate[0], &byte, 1) < 0)
            ;
        _exit(0);
    }
    char byte;
    MUST(read(ends[0], &byte, 1));
    return child;
}

static void finish(pid_t child)
{
    int status;
    kill(child, SIGKILL);
    MUST(waitpid(child, &status, 0));
}

static void new_group(void) { MUST(setpgid(0, 0)); }
static void new_session(void) { MUST(setsid()); }

static const char *ended(pid_t child)
{
    static char text[64];
    int status;
    MUST(waitpid(child, &status, WUNTRACED));
    if (WIFSTOPPED(status))
        snprintf(text, sizeof text, "stopped by %s", sigabbrev_np(WSTOPSIG(status)));
    else if (WIFSIGNALED(status))
        snprintf(text, sizeof text, "killed by %s", sigabbrev_np(WTERMSIG(status)));
    else
        snprintf(text, sizeof text, "exit %d", WEXITSTATUS(status));
    return text;
}

static void groups(void)
{
    PART("groups");
    pid_t a = child_that(new_group), b = child_that(NULL), c = child_that(new_session);
    IS(getpgid(a) == a);
    IS(getpgid(b) == getpgrp());
    IS(getpgid(c) == c);
    IS(getsid(a) == getsid(0));
    IS(getsid(c) == c);
    TRY(getpgid(1 << 22));
    TRY(getpgid(-1));
    TRY(getsid(1 << 22));
    TRY(setpgid(b, a));
    IS(getpgid(b) == a);
    TRY(setpgid(b, 0));
    IS(getpgid(b) == b);
    TRY(setpgid(b, getpgrp()) == 0);
    TRY(setpgid(b, -1));
    TRY(setpgid(b, 1 << 22));
    TRY(setpgid(b, c));
    TRY(setpgid(c, c));
    TRY(setpgid(c, a));
    TRY(setpgid(1 << 22, 0));
    TRY(setpgid(getppid(), getppid()));
    finish(a);
    finish(b);
    finish(c);
    pid_t executed = MUST(fork());
    if (!executed) {
        char *const arguments[] = {"sh", "-c", "echo x >&9; read line <&8", NULL};
        close(gate[1]);
        dup2(ends[1], 9);
        dup2(gate[0], 8);
        execv("/bin/sh", arguments);
    }
    char bytes[2];
    MUST(read(ends[0], bytes, 2));
    TRY(setpgid(executed, executed));
    finish(executed);

    PART("sessions");
    pid_t leader = MUST(fork());
    if (!leader) {
        TRY(setpgid(0, 0));
        TRY(setsid());
        pid_t member = MUST(fork());
        if (!member) {
            IS(setsid() == getpid());
            IS(getpgrp() == getpid() && getsid(0) == getpid());
            TRY(setsid());
            TRY(setpgid(0, 0));
            TRY(setpgid(0, getppid()));
            int fd = open("/dev/tty", O_RDWR);
            say("/dev/tty: %s\n", fd < 0 ? error_name(errno) : "open");
            _exit(0);
        }
        say("member %s\n", ended(member));
        _exit(0);
    }
    say("leader %s\n", ended(leader));
}

static void kills(void)
{
    PART("targets");
    TRY(kill(getpid(), 0));
    TRY(kill(0, 0));
    TRY(kill(1 << 22, 0));
    TRY(kill(-(1 << 22), 0));
    TRY(kill(INT_MIN, 0));
    TRY(kill(getpid(), 65));
    TRY(kill(getpid(), -1));
    TRY(syscall(SYS_tkill, -1, 0));
    TRY(syscall(SYS_tkill, 0, 0));
    TRY(syscall(SYS_tkill, 1 << 22, 0));
    TRY(syscall(SYS_tgkill, getpid(), 0, 0));
    TRY(syscall(SYS_tgkill, getpid(), gettid(), 65));
    TRY(syscall(SYS_tgkill, getpid() + 1, gettid(), 0));
    pid_t a = child_that(new_group), b = child_that(NULL);
    MUST(setpgid(b, a));
    TRY(kill(-a, SIGTERM));
    say("%s", ended(a));
    say(", %s\n", ended(b));
    TRY(kill(-a, 0));
    /* In a session of its own, where "everybody of the group" is known. */
    pid_t alone = MUST(fork());
    if (!alone) {
        MUST(setsid());
        pid_t first = child_that(NULL), second = child_that(NULL);
        signal(SIGHUP, SIG_IGN);
        TRY(kill(0, SIGHUP));
        say("%s", ended(first));
        say(", %s\n", ended(second));
        _exit(0);
    }
    say("%s\n", ended(alone));

    PART("permissions");
    if (geteuid() == 0) {
        pid_t target = child_that(NULL), stranger = MUST(fork());
        if (!stranger) {
            MUST(setresuid(12345, 12345, 12345));
            TRY(kill(target, 0) == -1 && errno == EPERM);
            TRY(kill(target, SIGTERM) == -1 && errno == EPERM);
            TRY(kill(target, SIGCONT));
            TRY(kill(getpid(), 0));
            _exit(0);
        }
        say("%s\n", ended(stranger));
        finish(target);
    } else {
        /* The same lines for whoever is not root. */
        say("kill(target, 0) == -1 && errno == EPERM = 1\nkill(target, SIGTERM) == -1 && errno == EPERM = 1\n"
            "kill(target, SIGCONT) = 0\nkill(getpid(), 0) = 0\nexit 0\n");
    }

    PART("queued values");
    sigset_t set, old;
    sigfillset(&set);
    sigprocmask(SIG_BLOCK, &set, &old);
    pid_t parent = getpid(), sender = MUST(fork());
    if (!sender) {
        union sigval value;
        for (int i = 0; i < 3; i++) {
            value.sival_int = i;
            TRY(sigqueue(parent, SIGRTMIN + 2 - i % 2, value));
            TRY(sigqueue(parent, SIGUSR1, value));
        }
        siginfo_t forged = {.si_code = SI_USER};
        TRY(syscall(SYS_rt_sigqueueinfo, parent, SIGUSR2, &forged));
        forged.si_code = SI_KERNEL;
        TRY(syscall(SYS_rt_sigqueueinfo, parent, SIGUSR2, &forged));
        forged.si_code = SI_TKILL;
        TRY(syscall(SYS_rt_sigqueueinfo, parent, SIGUSR2, &forged) == -1 && errno == EPERM);
        forged.si_code = SI_QUEUE;
        TRY(syscall(SYS_rt_sigqueueinfo, 1 << 22, SIGUSR2, &forged));
        TRY(syscall(SYS_rt_tgsigqueueinfo, parent, parent, SIGUSR2, &forged));
        TRY(syscall(SYS_rt_tgsigqueueinfo, parent, 0, SIGUSR2, &forged));
        _exit(0);
    }
    MUST(waitpid(sender, NULL, 0));
    siginfo_t info;
    struct timespec none = {0, 0};
    int signal_number;
    while ((signal_number = sigtimedwait(&set, &info, &none)) > 0) {
        if (signal_number >= SIGRTMIN)
            say("SIGRTMIN+%d", signal_number - SIGRTMIN);
        else
            say("%s", sigabbrev_np(signal_number));
        say(" code %d value %d from %s\n", info.si_code,
            info.si_code == SI_QUEUE ? info.si_value.sival_int : -1,
            info.si_pid == sender ? "the child" : "another");
    }
    TRY(sigtimedwait(&set, &info, &none));
    none.tv_nsec = -1;
    TRY(sigtimedwait(&set, &info, &none));

    PART("signalfd and a child");
    int fd = MUST(signalfd(-1, &set, SFD_NONBLOCK));
    struct signalfd_siginfo record;
    TRY(read(fd, &record, sizeof record));
    sender = MUST(fork());
    if (!sender) {
        TRY(read(fd, &record, sizeof record));
        kill(parent, SIGUSR2);
        raise(SIGUSR1);
        TRY(read(fd, &record, sizeof record));
        say("child reads %d from %s\n", record.ssi_signo, record.ssi_pid == (uint32_t)getpid() ? "itself" : "?");
        _exit(9);
    }
    MUST(waitpid(sender, NULL, 0));
    struct pollfd readable = {fd, POLLIN, 0};
    for (int i = 0; i < 2; i++) {
        MUST(poll(&readable, 1, -1));
        MUST(read(fd, &record, sizeof record));
        if (record.ssi_signo == SIGUSR2 && i == 0) {
            say("%d from %s\n", record.ssi_signo, record.ssi_pid == (uint32_t)sender ? "the child" : "?");
        } else {
            say("%d status %d code %d\n", record.ssi_signo, record.ssi_status, record.ssi_code);
        }
    }
    sigprocmask(SIG_SETMASK, &old, NULL);
}

static volatile sig_atomic_t continued;
static void on_continue(int signal) { continued += signal == SIGCONT; }
static void catch_continue(void) { signal(SIGCONT, on_continue); }
static void ignore_stop(void) { signal(SIGTSTP, SIG_IGN); }
static void block_stop(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTSTP);
    sigprocmask(SIG_BLOCK, &set, NULL);
}

static void job_control(void)
{
    PART("job control");
    int status;
    /* A group whose leader's parent is in the session, so that it is not orphaned. */
    pid_t child = child_that(new_group);
    static const int stops[] = {SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU};
    for (int i = 0; i < 4; i++) {
        kill(child, stops[i]);
        say("%s", ended(child));
        kill(child, SIGCONT);
        MUST(waitpid(child, &status, WCONTINUED));
        say(", continued %d\n", WIFCONTINUED(status));
    }
    kill(child, SIGSTOP);
    say("%s\n", ended(child));
    kill(child, SIGUSR1);
    usleep(2000);
    TRY(waitpid(child, &status, WNOHANG));
    kill(child, SIGCONT);
    say("%s\n", ended(child));
    child = child_that(ignore_stop);
    kill(child, SIGTSTP);
    usleep(2000);
    TRY(waitpid(child, &status, WNOHANG | WUNTRACED));
    finish(child);
    child = child_that(block_stop);
    kill(child, SIGTSTP);
    kill(child, SIGCONT);
    usleep(2000);
    TRY(waitpid(child, &status, WNOHANG | WUNTRACED));
    finish(child);

    PART("SIGCONT is handled after going on, threads stop too");
    child = MUST(fork());
    if (!child) {
        MUST(setpgid(0, 0));
        catch_continue();
        raise(SIGSTOP);
        _exit(continued);
    }
    say("%s\n", ended(child));
    kill(child, SIGCONT);
    say("%s\n", ended(child));

    PART("orphaned groups do not stop by the terminal's signals");
    child = MUST(fork());
    if (!child) {
        MUST(setsid());
        raise(SIGTSTP);
        raise(SIGTTIN);
        say("still here\n");
        _exit(0);
    }
    say("%s\n", ended(child));

    PART("a stopped group that becomes orphaned hears SIGHUP");
    MUST(prctl(PR_SET_CHILD_SUBREAPER, 1));
    child = MUST(fork());
    if (!child) {
        MUST(setsid());
        pid_t grandchild = MUST(fork());
        if (!grandchild) {
            MUST(setpgid(0, 0));
            raise(SIGSTOP);
            _exit(0);
        }
        MUST(waitpid(grandchild, &status, WUNTRACED));
        _exit(0);
    }
    say("child %s\n", ended(child));
    say("grandchild %s\n", ended(-1));
    TRY(wait(&status));

    PART("one that was orphaned before hears nothing");
    child = MUST(fork());
    if (!child) {
        MUST(setsid());
        pid_t stopped = MUST(fork());
        if (!stopped) {
            pause();
            _exit(0);
        }
        MUST(kill(stopped, SIGSTOP));
        MUST(waitpid(stopped, &status, WUNTRACED));
        pid_t other = MUST(fork());
        if (!other) {
            pid_t grandchild = MUST(fork());
            if (!grandchild)
                pause();
            MUST(kill(grandchild, SIGKILL));
            _exit(0);
        }
        say("other %s\n", ended(other));
        TRY(waitpid(stopped, &status, WCONTINUED | WNOHANG));
        MUST(kill(stopped, SIGKILL));
        say("stopped %s\n", ended(stopped));
        _exit(0);
    }
    say("child %s\n", ended(child));
    while (wait(&status) > 0)
        ;
}

int main(void)
{
    MUST(pipe(ends));
    MUST(pipe(gate));
    /* A session of its own, so that the tests are not part of the caller's. */
    pid_t child = MUST(fork());
    if (!child) {
        MUST(setsid());
        pid_t worker = MUST(fork());
        if (!worker) {
            groups();
            kills();
            job_control();
            _exit(0);
        }
        _exit(strcmp(ended(worker), "exit 0"));
    }
    say("%s\n", ended(child));
    return 0;
}
