/* Signals for a process whose threads take turns in blocking them: one that is free
 * takes what another one has blocked meanwhile. */
#include "guest.h"
#include <pthread.h>
#include <stdatomic.h>

static atomic_int taken;
static pthread_t main_thread;
static int ends[2];

/* In the main thread, with SIGUSR2 blocked: lasts until another one has taken that. */
static void on_first(int signal)
{
    (void)signal;
    while (!taken)
        continue;
}

static void on_second(int signal)
{
    (void)signal;
    taken = pthread_equal(pthread_self(), main_thread) ? 1 : 2;
}

static void *waits(void *argument)
{
    sigset_t first;
    sigemptyset(&first);
    sigaddset(&first, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &first, NULL);
    char byte;
    while (read(ends[0], &byte, 1) < 0)
        continue;
    return argument;
}

static void *sends(void *argument)
{
    sigset_t both;
    sigemptyset(&both);
    sigaddset(&both, SIGUSR1);
    sigaddset(&both, SIGUSR2);
    pthread_sigmask(SIG_BLOCK, &both, NULL);
    usleep(20000);
    kill(getpid(), SIGUSR1);
    kill(getpid(), SIGUSR2);
    return argument;
}

int main(void)
{
    main_thread = pthread_self();
    struct sigaction action = {.sa_handler = on_first};
    sigaddset(&action.sa_mask, SIGUSR2);
    sigaction(SIGUSR1, &action, NULL);
    action = (struct sigaction){.sa_handler = on_second};
    sigaction(SIGUSR2, &action, NULL);
    pipe(ends);
    pthread_t reader, sender;
    pthread_create(&reader, NULL, waits, NULL);
    pthread_create(&sender, NULL, sends, NULL);
    pause();
    say("taken by %s\n", taken == 1 ? "the main thread" : "another thread");
    pthread_join(sender, NULL);
    close(ends[1]);
    pthread_join(reader, NULL);
    return 0;
}
