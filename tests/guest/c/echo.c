/* Copies standard input to standard output, and one line to standard error; with an
 * argument, beside a thread that computes. */
#include "guest.h"
#include <pthread.h>

static void *computes(void *argument)
{
    while (argument)
        __asm__ volatile("" : "+r"(argument));
    return 0;
}

int main(int argc, char **argv)
{
    pthread_t thread;
    if (argc > 1)
        pthread_create(&thread, 0, computes, argv);

    char data[4096];
    ssize_t got;
    size_t total = 0;

    while ((got = read(0, data, sizeof data)) > 0) {
        total += (size_t)got;
        for (ssize_t done = 0; done < got;)
            done += MUST(write(1, data + done, (size_t)(got - done)));
    }
    dprintf(2, "%zu bytes\n", total);
    return got < 0;
}
