/* Interruptions of a process that computes and makes no system calls: by its timer,
 * and by children that end at the same time. None may be overlooked. */
#include "guest.h"
#include <sys/time.h>
#include <sys/wait.h>

#define TURNS 600

static volatile sig_atomic_t ended, ticks;

static void on_child(int signal)
{
    (void)signal;
    while (waitpid(-1, NULL, WNOHANG) > 0)
        ended++;
}

static void on_tick(int signal)
{
    (void)signal;
    ticks++;
}

static void handle(int signal, void (*handler)(int))
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
    sigaction(signal, &action, NULL);
}

static void fork_children(int count)
{
    for (int i = 0; i < count; i++)
        if (fork() == 0)
            _exit(0);
}

static void timer_and_a_child(void)
{
    struct itimerval interval = {{0, 200}, {0, 200}}, none = {0};
    setitimer(ITIMER_REAL, &interval, NULL);
    for (int turn = 0; turn < TURNS; turn++) {
        ended = 0;
        fork_children(1);
        while (ended < 1)
            continue;
        for (int before = ticks; ticks < before + 5;)
            continue;
    }
    setitimer(ITIMER_REAL, &none, NULL);
    say("children and ticks: all noticed\n");
}

static void children_at_once(void)
{
    enum { CHILDREN = 8 };
    for (int turn = 0; turn < TURNS / 6; turn++) {
        ended = 0;
        fork_children(CHILDREN);
        while (ended < CHILDREN)
            continue;
    }
    say("children at once: all noticed\n");
}

int main(void)
{
    handle(SIGCHLD, on_child);
    handle(SIGALRM, on_tick);
    timer_and_a_child();
    children_at_once();
    return 0;
}
