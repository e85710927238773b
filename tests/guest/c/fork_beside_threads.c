/* The first fork of a program whose threads compute: all of them rest for a moment,
 * and nobody waits for ever. */
#include "guest.h"

#include <pthread.h>
#include <sys/wait.h>

static volatile int stop;

static void *computes(void *counter)
{
    while (!stop)
        ++*(volatile unsigned long *)counter;
    return NULL;
}

int main(void)
{
    pthread_t threads[4];
    unsigned long counters[4][64] = {0};

    for (int i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, computes, counters[i]);
    usleep(3000);
    pid_t child = MUST(fork());
    if (!child)
        _exit(7);
    int status;
    MUST(waitpid(child, &status, 0));
    say("status %x\n", status);
    stop = 1;
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    say("joined\n");
}
