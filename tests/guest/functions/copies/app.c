/* Shows what must differ between copies of one image, and what must not; and that
 * System V objects made before the freeze are every copy's own. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/ipc.h>
#include <sys/msg.h>
#include <sys/random.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static atomic_int ticks;
static int semaphores, queue;
static int *shared;

/* A thread that is asleep when the program is frozen. */
static void *tick(void *unused)
{
    for (;;) {
        usleep(10000);
        atomic_fetch_add(&ticks, 1);
    }
    return unused;
}

/* One that waits for a semaphore, and counts in shared memory. */
static void *wait_for_requests(void *unused)
{
    struct sembuf take = {0, -1, 0}, done = {1, 1, 0};
    while (semop(semaphores, &take, 1) == 0) {
        (*shared)++;
        semop(semaphores, &done, 1);
    }
    return unused;
}

static const char *hex(const unsigned char *bytes, char *text)
{
    for (int i = 0; i < 16; i++)
        sprintf(text + 2 * i, "%02x", bytes[i]);
    return text;
}

static const char *line(const char *path, char *text)
{
    FILE *file = fopen(path, "r");
    if (!file || !fgets(text, 128, file))
        exit(1);
    fclose(file);
    text[strcspn(text, "\n")] = '\0';
    return text;
}

static int identity(char *to, size_t room)
{
    unsigned char drawn[16], own[16];
    char texts[6][128];
    struct timespec now;
    struct {
        long type;
        char text[16];
    } message;

    if (getrandom(drawn, sizeof drawn, 0) != sizeof drawn)
        exit(1);
    arc4random_buf(own, sizeof own);
    gethostname(texts[5], sizeof texts[5]);
    int before = atomic_load(&ticks);
    usleep(100000);
    clock_gettime(CLOCK_REALTIME, &now);

    struct sembuf ask[] = {{0, 1, 0}}, answered[] = {{1, -1, 0}};
    if (semop(semaphores, ask, 1) || semop(semaphores, answered, 1) ||
        msgrcv(queue, &message, sizeof message.text, 0, IPC_NOWAIT) < 0)
        exit(1);
    return snprintf(to, room,
                    "{\"unique\": {\"getrandom\": \"%s\", \"arc4random\": \"%s\", \"auxv\": \"%s\","
                    " \"uuid\": \"%s\", \"boot_id\": \"%s\"}, \"hostname\": \"%s\", \"pid\": %d,"
                    " \"time\": %ld.%03ld, \"ticked\": %d, \"greeting\": \"%s\", \"limit\": \"%s\","
                    " \"system_v\": \"%d requests, %s, %ld attached\"}",
                    hex(drawn, texts[0]), hex(own, texts[1]),
                    hex((unsigned char *)getauxval(AT_RANDOM), texts[2]),
                    line("/proc/sys/kernel/random/uuid", texts[3]),
                    line("/proc/sys/kernel/random/boot_id", (char[128]){0}), texts[5], getpid(),
                    (long)now.tv_sec, now.tv_nsec / 1000000, atomic_load(&ticks) - before,
                    getenv("GREETING"), line("/sys/fs/cgroup/memory.max", (char[128]){0}), *shared,
                    message.text, (long)semctl(semaphores, 1, GETVAL) + 1);
}

static void serve(int client)
{
    char head[4096], body[2048], response[4096];
    size_t have = 0;
    while (have < sizeof head - 1) {
        ssize_t got = read(client, head + have, sizeof head - 1 - have);
        if (got <= 0)
            return;
        have += (size_t)got;
        head[have] = '\0';
        if (strstr(head, "\r\n\r\n"))
            break;
    }
    int len = identity(body, sizeof body);
    int all = snprintf(response, sizeof response,
                       "HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", len,
                       body);
    if (write(client, response, (size_t)all) != all)
        exit(1);
}

int main(void)
{
    struct {
        long type;
        char text[16];
    } message = {1, "a message"};
    pthread_t thread;

    semaphores = semget(IPC_PRIVATE, 2, 0600);
    queue = msgget(IPC_PRIVATE, 0600);
    int memory = shmget(IPC_PRIVATE, 4096, 0600);
    shared = shmat(memory, NULL, 0);
    if (semaphores < 0 || queue < 0 || shared == (void *)-1 || shmctl(memory, IPC_RMID, NULL) ||
        msgsnd(queue, &message, sizeof message.text, 0))
        return 1;
    *shared = 100;
    pthread_create(&thread, NULL, tick, NULL);
    pthread_create(&thread, NULL, wait_for_requests, NULL);

    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(8080)};
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 16))
        return 1;
    for (;;) {
        int client = accept(listener, NULL, NULL);
        if (client < 0)
            return 1;
        serve(client);
        close(client);
    }
}
