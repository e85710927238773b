/* Processes that do nothing but read clocks, each another one, and a server that tells how often each has, and
 * how many have ended or seen a clock go backwards. */
#define _GNU_SOURCE
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const clockid_t clocks[] = {CLOCK_MONOTONIC, CLOCK_REALTIME, CLOCK_BOOTTIME,
                                   CLOCK_MONOTONIC_COARSE, CLOCK_MONOTONIC, CLOCK_REALTIME};
#define PROCESSES (sizeof clocks / sizeof *clocks)

static volatile unsigned long *counts;

static void read_clock(unsigned number)
{
    struct timespec now, last = {0};
    for (;;) {
        clock_gettime(clocks[number], &now);
        if (now.tv_sec < last.tv_sec || (now.tv_sec == last.tv_sec && now.tv_nsec < last.tv_nsec))
            _exit(1);
        last = now;
        counts[number]++;
    }
}

static int tell(char *to, size_t size)
{
    static int ended;
    int at = 0;
    while (waitpid(-1, NULL, WNOHANG) > 0)
        ended++;
    at += snprintf(to, size, "{\"ended\": %d, \"counts\": [", ended);
    for (unsigned i = 0; i < PROCESSES; i++)
        at += snprintf(to + at, size - (size_t)at, "%s%lu", i ? ", " : "", counts[i]);
    return at + snprintf(to + at, size - (size_t)at, "]}");
}

int main(void)
{
    int listener = socket(AF_INET, SOCK_STREAM, 0), has_begun = 0;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(8080)};

    counts = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) < 0 || listen(listener, 16) < 0)
        return 1;
    for (;;) {
        char head[4096], body[512], answer[1024];
        int client = accept(listener, NULL, NULL);
        if (client < 0)
            continue;
        /* The first one who asks has them begin: the program is frozen before that. */
        for (unsigned i = 0; i < PROCESSES && !has_begun; i++)
            if (fork() == 0)
                read_clock(i);
        has_begun = 1;
        if (read(client, head, sizeof head) > 0) {
            int len = tell(body, sizeof body);
            len = snprintf(answer, sizeof answer,
                           "HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", len, body);
            if (write(client, answer, (size_t)len) < 0)
                perror("write");
        }
        close(client);
    }
}
