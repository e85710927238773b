/* How threads and their processes end: exit of the main thread only,
 * exit_group(2) while others block in every kind of call, execve(2) from a
 * thread, signals that kill, fork(2) while others run. */
#include "guest.h"
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/wait.h>

static void *blocks(void *argument)
{
    int ends[2];
    char byte;
    MUST(pipe(ends));
    switch ((long)argument) {
    case 0: read(ends[0], &byte, 1); break;
    case 1: {
        static int word;
        syscall(SYS_futex, &word, 0, 0, NULL, NULL, 0);
        break;
    }
    case 2: sleep(1000); break;
    case 3: {
        struct epoll_event event;
        epoll_wait(epoll_create1(0), &event, 1, -1);
        break;
    }
    case 4: poll(NULL, 0, -1); break;
    case 5: pause(); break;
    case 6: {
        int pair[2];
        MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
        recv(pair[0], &byte, 1, 0);
        break;
    }
    case 7: select(0, NULL, NULL, NULL, NULL); break;
    case 8: {
        sigset_t set;
        sigemptyset(&set);
        sigaddset(&set, SIGUSR2);
        sigwaitinfo(&set, NULL);
        break;
    }
    case 9:
        for (;;)
            ;
    case 10:
        for (;;)
            sched_yield();
    }
    say("not reached\n");
    return NULL;
}

static void report(const char *what, int status)
{
    if (WIFEXITED(status))
        say("%s: exit %d\n", what, WEXITSTATUS(status));
    else if (WIFSIGNALED(status))
        say("%s: %s\n", what, sigabbrev_np(WTERMSIG(status)));
    else
        say("%s: status %x\n", what, status);
}

static void start_blocked(void)
{
    pthread_t thread;
    for (long kind = 0; kind <= 10; kind++)
        pthread_create(&thread, NULL, blocks, (void *)kind);
    usleep(3000);
}

static void *exits_group(void *argument) { exit((int)(long)argument); }
static void *executes(void *argument)
{
    char *arguments[] = {"sh", "-c", argument, NULL};
    execv("/bin/sh", arguments);
    return NULL;
}
static void *kills(void *argument)
{
    kill(getpid(), (int)(long)argument);
    pause();
    return NULL;
}
static void *faults(void *argument)
{
    *(volatile int *)argument = 1;
    return NULL;
}
static void *later(void *argument)
{
    usleep(5000);
    say("the last thread ends\n");
    return argument;
}
static void *forks(void *argument)
{
    pid_t child = fork();
    if (!child) {
        say("threads of a child: only one, tid is pid: %d\n", gettid() == getpid());
        _exit(21);
    }
    int status;
    waitpid(child, &status, 0);
    report("forked by a thread", status);
    return argument;
}

static void in_child(const char *what, void *(*work)(void *), void *argument, int from_main)
{
    pid_t child = MUST(fork());
    if (!child) {
        start_blocked();
        pthread_t thread;
        if (from_main)
            work(argument);
        pthread_create(&thread, NULL, work, argument);
        for (;;)
            pause();
    }
    int status;
    MUST(waitpid(child, &status, 0));
    report(what, status);
}

int main(void)
{
    int status;
    PART("exit_group while others block");
    in_child("by the main thread", exits_group, (void *)3, 1);
    in_child("by another thread", exits_group, (void *)4, 0);

    PART("signals while others block");
    in_child("SIGTERM by main", kills, (void *)SIGTERM, 1);
    in_child("SIGKILL by another", kills, (void *)SIGKILL, 0);
    in_child("a fault of another", faults, (void *)8, 0);

    PART("execve while others block");
    in_child("by the main thread", executes, "exit 5", 1);
    in_child("by another thread", executes, "exit 6", 0);
    pid_t child = MUST(fork());
    if (!child) {
        char script[100];
        snprintf(script, sizeof script, "test $$ = %d && exit 7", getpid());
        pthread_t thread;
        pthread_create(&thread, NULL, executes, script);
        pthread_join(thread, NULL);
        _exit(1);
    }
    waitpid(child, &status, 0);
    report("the process id stays", status);

    PART("execve that fails from a thread");
    child = MUST(fork());
    if (!child) {
        start_blocked();
        TRY(execl("/nowhere", "x", NULL));
        _exit(8);
    }
    waitpid(child, &status, 0);
    report("goes on", status);

    PART("the main thread ends first");
    child = MUST(fork());
    if (!child) {
        pthread_t thread;
        pthread_create(&thread, NULL, later, NULL);
        syscall(SYS_exit, 9);
    }
    waitpid(child, &status, 0);
    report("status of the main thread", status);
    child = MUST(fork());
    if (!child) {
        pthread_t thread;
        pthread_create(&thread, NULL, exits_group, (void *)10);
        pthread_exit(NULL);
    }
    waitpid(child, &status, 0);
    report("exit_group counts more", status);
    child = MUST(fork());
    if (!child) {
        pthread_t thread;
        pthread_create(&thread, NULL, blocks, (void *)5);
        pthread_exit(NULL);
    }
    usleep(5000);
    TRY(waitpid(child, &status, WNOHANG));
    TRY(kill(child, 0));
    TRY(syscall(SYS_tgkill, child, child, 0));
    TRY(kill(child, SIGUSR1));
    waitpid(child, &status, 0);
    report("killed without a main thread", status);

    PART("fork in threads");
    pthread_t threads[4];
    pthread_create(&threads[0], NULL, forks, NULL);
    pthread_join(threads[0], NULL);
    child = MUST(fork());
    if (!child) {
        start_blocked();
        pid_t grandchild = MUST(fork());
        if (!grandchild)
            _exit(22);
        waitpid(grandchild, &status, 0);
        report("forked while others run", status);
        _exit(0);
    }
    waitpid(child, &status, 0);
    report("the one with threads", status);

    PART("many forks by many threads");
    child = MUST(fork());
    if (!child) {
        int good = 0;
        for (int round = 0; round < 5; round++) {
            pid_t pids[8];
            for (int i = 0; i < 8; i++)
                if ((pids[i] = MUST(fork())) == 0)
                    _exit(i);
            for (int i = 0; i < 8; i++) {
                waitpid(pids[i], &status, 0);
                good += WIFEXITED(status) && WEXITSTATUS(status) == i;
            }
        }
        say("good %d\n", good);
        _exit(0);
    }
    waitpid(child, &status, 0);
    report("all", status);
    TRY(wait(&status));
    return 0;
}
