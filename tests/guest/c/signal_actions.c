/* sigaction(2) and its flags, masks, pending signals, sigsuspend(2), siginfo of
 * signals that are sent, dispositions, errors. */
#include "guest.h"
#include <sys/wait.h>

static volatile sig_atomic_t count[65];
static volatile int depth, deepest, left;

static void plain(int signal) { count[signal]++; }

static void detailed(int signal, siginfo_t *info, void *context)
{
    (void)context;
    say("%s: si_signo %d si_code %d sender %s value %d\n", sigabbrev_np(signal), info->si_signo,
        info->si_code, info->si_pid == getpid() && info->si_uid == getuid() ? "self" : "other",
        info->si_code == SI_QUEUE ? info->si_value.sival_int : 0);
}

static void nesting(int signal)
{
    depth++;
    if (depth > deepest)
        deepest = depth;
    if (left-- > 0)
        raise(signal);
    depth--;
}

static void masks(int signal)
{
    (void)signal;
    sigset_t now;
    sigprocmask(SIG_SETMASK, NULL, &now);
    say("in the handler: USR1 %d USR2 %d HUP %d\n", sigismember(&now, SIGUSR1),
        sigismember(&now, SIGUSR2), sigismember(&now, SIGHUP));
}

static void raises_usr2(int signal)
{
    say("USR1 handler begins\n");
    raise(SIGUSR2);
    say("USR1 handler ends\n");
    (void)signal;
}

static void says_usr2(int signal)
{
    (void)signal;
    say("USR2 handler\n");
}

static int install(int signal, void (*handler)(int), int flags, int masked)
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = flags};
    sigemptyset(&action.sa_mask);
    if (masked)
        sigaddset(&action.sa_mask, masked);
    return sigaction(signal, &action, NULL);
}

static void pending(void)
{
    sigset_t set;
    MUST(sigpending(&set));
    say("pending:");
    for (int i = 1; i < 65; i++)
        if (sigismember(&set, i) == 1)
            say(" %d", i);
    say("\n");
}

int main(void)
{
    sigset_t set, old;
    struct sigaction action, was;

    PART("delivery");
    TRY(install(SIGUSR1, plain, 0, 0));
    TRY(raise(SIGUSR1));
    TRY(kill(getpid(), SIGUSR1));
    TRY(kill(0, 0));
    TRY(syscall(SYS_tgkill, getpid(), gettid(), SIGUSR1));
    TRY(syscall(SYS_tkill, gettid(), SIGUSR1));
    say("count %d\n", count[SIGUSR1]);
    TRY(kill(getpid(), 0));
    TRY(kill(getpid(), 65));
    TRY(kill(getpid(), -1));
    TRY(kill(0x7ffffff0, SIGUSR1));
    TRY(syscall(SYS_tgkill, getpid(), 0x7ffffff0, SIGUSR1));
    TRY(syscall(SYS_tgkill, -1, gettid(), SIGUSR1));

    PART("siginfo");
    memset(&action, 0, sizeof action);
    action.sa_sigaction = detailed;
    action.sa_flags = SA_SIGINFO;
    MUST(sigaction(SIGUSR2, &action, NULL));
    MUST(sigaction(SIGRTMIN + 1, &action, NULL));
    kill(getpid(), SIGUSR2);
    raise(SIGUSR2);
    union sigval value = {.sival_int = 4711};
    TRY(sigqueue(getpid(), SIGUSR2, value));
    TRY(sigqueue(getpid(), SIGRTMIN + 1, value));

    PART("blocking");
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigaddset(&set, SIGRTMIN + 1);
    sigaddset(&set, SIGKILL);
    TRY(sigprocmask(SIG_BLOCK, &set, &old));
    sigprocmask(SIG_SETMASK, NULL, &set);
    say("KILL can be blocked: %d\n", sigismember(&set, SIGKILL));
    count[SIGUSR1] = 0;
    raise(SIGUSR1);
    raise(SIGUSR1);
    value.sival_int = 1;
    sigqueue(getpid(), SIGRTMIN + 1, value);
    value.sival_int = 2;
    sigqueue(getpid(), SIGRTMIN + 1, value);
    pending();
    say("count %d\n", count[SIGUSR1]);
    TRY(sigprocmask(SIG_SETMASK, &old, NULL));
    say("count %d\n", count[SIGUSR1]);
    pending();
    TRY(sigprocmask(77, &set, NULL));
    TRY(syscall(SYS_rt_sigprocmask, SIG_BLOCK, &set, NULL, 4));
    TRY(syscall(SYS_rt_sigprocmask, SIG_BLOCK, 8, NULL, 8));

    PART("order of delivery");
    install(SIGUSR1, plain, 0, 0);
    MUST(sigaction(SIGHUP, &action, NULL));
    MUST(sigaction(SIGTERM, &action, NULL));
    sigfillset(&set);
    sigprocmask(SIG_SETMASK, &set, &old);
    raise(SIGRTMIN + 1);
    raise(SIGTERM);
    raise(SIGHUP);
    sigprocmask(SIG_SETMASK, &old, NULL);

    PART("masks in handlers");
    install(SIGUSR1, masks, 0, SIGUSR2);
    raise(SIGUSR1);
    install(SIGUSR1, masks, SA_NODEFER, 0);
    raise(SIGUSR1);
    sigprocmask(SIG_SETMASK, NULL, &set);
    say("afterwards: USR1 %d USR2 %d\n", sigismember(&set, SIGUSR1), sigismember(&set, SIGUSR2));
    install(SIGUSR1, raises_usr2, 0, 0);
    install(SIGUSR2, says_usr2, 0, 0);
    raise(SIGUSR1); /* nested */
    install(SIGUSR1, raises_usr2, 0, SIGUSR2);
    raise(SIGUSR1); /* after it */
    install(SIGUSR1, nesting, SA_NODEFER, 0);
    left = 3;
    raise(SIGUSR1);
    say("deepest %d\n", deepest);
    deepest = 0;
    install(SIGUSR1, nesting, 0, 0);
    left = 3;
    raise(SIGUSR1);
    say("deepest %d\n", deepest);

    PART("one time");
    count[SIGUSR1] = 0;
    install(SIGUSR1, plain, SA_RESETHAND, 0);
    raise(SIGUSR1);
    sigaction(SIGUSR1, NULL, &was);
    IS(was.sa_handler == SIG_DFL);
    say("count %d\n", count[SIGUSR1]);

    PART("ignoring");
    install(SIGUSR1, SIG_IGN, 0, 0);
    TRY(raise(SIGUSR1));
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigprocmask(SIG_BLOCK, &set, NULL);
    raise(SIGUSR1);
    install(SIGUSR1, plain, 0, 0);
    pending(); /* was ignored when sent and blocked: Linux keeps it */
    install(SIGUSR1, SIG_IGN, 0, 0);
    pending(); /* ignoring discards it */
    sigprocmask(SIG_UNBLOCK, &set, NULL);
    TRY(raise(SIGCHLD));
    TRY(raise(SIGWINCH));
    TRY(raise(SIGURG));
    TRY(raise(SIGCONT));

    PART("sigaction itself");
    install(SIGUSR1, plain, SA_RESTART | SA_NODEFER, SIGHUP);
    TRY(sigaction(SIGUSR1, NULL, &was));
    IS(was.sa_handler == plain && sigismember(&was.sa_mask, SIGHUP) == 1);
    IS((was.sa_flags & (SA_RESTART | SA_NODEFER | SA_SIGINFO)) == (SA_RESTART | SA_NODEFER));
    TRY(install(SIGKILL, plain, 0, 0));
    TRY(install(SIGSTOP, SIG_IGN, 0, 0));
    TRY(sigaction(SIGKILL, NULL, &was));
    TRY(install(65, plain, 0, 0));
    TRY(install(0, plain, 0, 0));
    TRY(syscall(SYS_rt_sigaction, SIGUSR1, NULL, NULL, 4));
    IS(signal(SIGUSR1, SIG_DFL) == plain);

    PART("waiting for signals");
    install(SIGUSR1, plain, 0, 0);
    count[SIGUSR1] = 0;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigprocmask(SIG_BLOCK, &set, NULL);
    raise(SIGUSR1);
    sigset_t none;
    sigemptyset(&none);
    TRY(sigsuspend(&none));
    say("count %d\n", count[SIGUSR1]);
    sigprocmask(SIG_SETMASK, NULL, &old);
    say("still blocked: %d\n", sigismember(&old, SIGUSR1));
    raise(SIGUSR1);
    siginfo_t info;
    TRY(sigwaitinfo(&set, &info));
    say("code %d\n", info.si_code == SI_TKILL);
    int got;
    raise(SIGUSR1);
    TRY(sigwait(&set, &got));
    say("got %d\n", got == SIGUSR1);
    struct timespec timeout = {.tv_nsec = 10000000};
    TRY(sigtimedwait(&set, &info, &timeout));
    timeout.tv_nsec = -1;
    TRY(sigtimedwait(&set, &info, &timeout));
    say("count %d\n", count[SIGUSR1]);
    alarm(1);
    install(SIGALRM, plain, 0, 0);
    TRY(pause());
    say("alarms %d\n", count[SIGALRM]);
    return 0;
}
