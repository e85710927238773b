/* Counts in its own memory and, in lockstep, in a file of a volume that it has mapped shared. The
 * file has a second page and a hole, which say the same. Whoever asks is told both counts, and how
 * often the file was not as the memory says: that is so only if memory and file are not of one
 * moment. */
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#define SIZE (64 << 20)
/* The counter in the first page of the file, and one far behind it. */
#define FAR (48 << 20)

static volatile unsigned long memory, torn;
static volatile unsigned long *mapped, *mapped_far;

static void *count(void *unused)
{
    for (;;) {
        if (*mapped != memory || *mapped_far != memory)
            torn++;
        /* The one that is ahead is told from one that was lost. */
        memory++;
        *mapped = memory;
        *mapped_far = memory;
        for (volatile int i = 0; i < 1000; i++)
            ;
    }
    return unused;
}

static void begin(void)
{
    pthread_t thread;
    int file = open("/data/counters", O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (file < 0 || ftruncate(file, SIZE) < 0)
        exit(2);
    char *at = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (at == MAP_FAILED)
        exit(3);
    mapped = (unsigned long *)at;
    mapped_far = (unsigned long *)(at + FAR);
    if (pthread_create(&thread, NULL, count, NULL) != 0)
        exit(4);
}

int main(void)
{
    int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1, has_begun = 0;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(8080)};

    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) < 0 || listen(listener, 16) < 0)
        return 1;
    for (;;) {
        char head[4096], body[256], answer[512];
        int client = accept(listener, NULL, NULL);
        if (client < 0)
            continue;
        if (read(client, head, sizeof head) > 0) {
            /* The first one who asks has it begin: it is frozen before that. */
            if (!has_begun)
                begin();
            has_begun = 1;
            snprintf(body, sizeof body, "{\"memory\": %lu, \"mapped\": %lu, \"torn\": %lu}", memory,
                     *mapped, torn);
            int len = snprintf(answer, sizeof answer,
                               "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\nConnection: close\r\n\r\n%s",
                               strlen(body), body);
            if (write(client, answer, len) < 0)
                perror("write");
        }
        close(client);
    }
}
