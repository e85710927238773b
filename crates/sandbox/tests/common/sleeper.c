/* A server that keeps state of every kind, and tells of it over connections that stay open.
 * Static, so that a directory with nothing else can be its root. One command is one line:
 *
 *   count      increments a counter in thread-local storage and one on the heap
 *   sum        a checksum of the heap, of shared memory, of memory that is wiped on fork and of
 *              a file in memory
 *   write      changes the heap, a page in eight
 *   touch      writes to each page of the heap what is there
 *   thread     another thread, which waits for it, answers
 *   timer      sets a timer that is due in six seconds
 *   clock      the monotonic clock, in milliseconds
 *   move       moves memory to where there were zeros, without looking at it
 *   moved      a checksum of that memory
 *   fork       has a child, and waits for its end
 *   workers    has two children that stay
 *   1 COMMAND  has the first of them answer, 2 COMMAND the second
 *   share      changes memory that all processes share, and the file, by a mapping of it
 *   end        ends the process that answers
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { HEAP = 24 << 20, PAGE = 4096 };

static unsigned char *heap, *shared, *wiped, *moving, *zeros, *mapped;
static int workers[3];
static int file, timer;
static int counter;
static __thread int own_counter;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wanted = PTHREAD_COND_INITIALIZER, done = PTHREAD_COND_INITIALIZER;
static int asked, answered;
static double number = 1.5;

static void *other(void *unused) {
    (void)unused;
    double mine = number;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (asked == answered)
            pthread_cond_wait(&wanted, &lock);
        /* The vector registers of a thread that waits are saved, too. */
        mine = mine * 2;
        number = mine;
        answered = asked;
        pthread_cond_broadcast(&done);
    }
    return 0;
}

static unsigned long sum_of(const unsigned char *from, size_t len) {
    unsigned long sum = 14695981039346656037UL;
    for (size_t at = 0; at < len; at++)
        sum = (sum ^ from[at]) * 1099511628211UL;
    return sum;
}

static long now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void answer(const char *command, char *to);

/* A process that answers one command after the other. */
static void work(int commands) {
    char command[128];
    ssize_t len;
    while ((len = read(commands, command, sizeof command - 1)) > 0) {
        char text[256] = "";
        command[len] = 0;
        answer(command, text);
        if (write(commands, text, strlen(text)) < 0)
            break;
    }
    _exit(0);
}

static void hire(void) {
    for (int number = 1; number <= 2; number++) {
        int ends[2];
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends))
            abort();
        pid_t child = fork();
        if (child == 0) {
            own_counter = 100 * number;
            work(ends[1]);
        }
        close(ends[1]);
        workers[number] = ends[0];
    }
}

static void answer(const char *command, char *to) {
    if ((command[0] == '1' || command[0] == '2') && command[1] == ' ') {
        int worker = workers[command[0] - '0'];
        ssize_t len = -1;
        if (write(worker, command + 2, strlen(command + 2)) > 0)
            len = read(worker, to, 255);
        if (len <= 0)
            sprintf(to, "none\n");
    } else if (!strcmp(command, "workers")) {
        hire();
        sprintf(to, "hired\n");
    } else if (!strcmp(command, "share")) {
        shared[PAGE]++;
        mapped[PAGE]++;
        sprintf(to, "shared\n");
    } else if (!strcmp(command, "end")) {
        _exit(0);
    } else if (!strcmp(command, "count")) {
        sprintf(to, "%d %d\n", ++counter, ++own_counter);
    } else if (!strcmp(command, "sum")) {
        unsigned char inside[3 * PAGE];
        if (pread(file, inside, sizeof inside, 0) != sizeof inside)
            abort();
        sprintf(to, "%lx %lx %lx %lx\n", sum_of(heap, HEAP), sum_of(shared, 4 * PAGE),
                sum_of(wiped, 2 * PAGE), sum_of(inside, sizeof inside));
    } else if (!strcmp(command, "write")) {
        for (size_t at = 0; at < HEAP; at += 8 * PAGE)
            heap[at] += 1;
        sprintf(to, "written\n");
    } else if (!strcmp(command, "touch")) {
        volatile unsigned char *same = heap;
        for (size_t at = 0; at < HEAP; at += PAGE)
            same[at] = same[at];
        sprintf(to, "touched\n");
    } else if (!strcmp(command, "thread")) {
        pthread_mutex_lock(&lock);
        asked++;
        pthread_cond_signal(&wanted);
        while (asked != answered)
            pthread_cond_wait(&done, &lock);
        pthread_mutex_unlock(&lock);
        sprintf(to, "%d %.1f\n", answered, number);
    } else if (!strcmp(command, "timer")) {
        /* A busy machine hibernates it before. */
        struct itimerspec soon = {.it_value = {.tv_sec = 6}};
        if (timerfd_settime(timer, 0, &soon, 0))
            abort();
        sprintf(to, "set\n");
    } else if (!strcmp(command, "clock")) {
        sprintf(to, "%ld\n", now_ms());
    } else if (!strcmp(command, "move")) {
        moving = mremap(moving, 8 * PAGE, 8 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, zeros);
        if (moving != zeros)
            abort();
        sprintf(to, "here\n");
    } else if (!strcmp(command, "moved")) {
        sprintf(to, "%lx\n", sum_of(moving, 8 * PAGE));
    } else if (!strcmp(command, "fork")) {
        pid_t child = fork();
        if (child == 0)
            _exit(0);
        /* Whoever ignores SIGCHLD waits for all (wait(2)). */
        if (workers[1] ? 0 : waitpid(child, 0, 0) != -1 || errno != ECHILD)
            abort();
        sprintf(to, "forked\n");
    } else {
        sprintf(to, "what is %s?\n", command);
    }
}

int main(void) {
    static long fired_at;
    heap = malloc(HEAP);
    for (size_t at = 0; at < HEAP; at++)
        heap[at] = at * 2654435761u >> 13;
    shared = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    wiped = mmap(0, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    moving = mmap(0, 8 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    zeros = mmap(0, 8 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(moving, 'm', 8 * PAGE);
    memset(shared, 's', 4 * PAGE);
    memset(wiped, 'w', 2 * PAGE);
    if (madvise(wiped, 2 * PAGE, MADV_WIPEONFORK))
        abort();
    file = memfd_create("file", 0);
    for (int page = 0; page < 3; page++) {
        char content[PAGE];
        memset(content, 'a' + page, PAGE);
        if (write(file, content, PAGE) != PAGE)
            abort();
    }
    mapped = mmap(0, 3 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped[0] != 'a')
        abort();
    signal(SIGCHLD, SIG_IGN);
    pthread_t thread;
    pthread_create(&thread, 0, other, 0);
    timer = timerfd_create(CLOCK_MONOTONIC, 0);
    int listener = socket(AF_INET, SOCK_STREAM, 0), epoll = epoll_create1(0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(8080)};
    if (bind(listener, (void *)&at, sizeof at) || listen(listener, 64))
        abort();
    for (int *fd = (int[]){listener, timer, -1}; *fd >= 0; fd++) {
        struct epoll_event event = {.events = EPOLLIN, .data.fd = *fd};
        epoll_ctl(epoll, EPOLL_CTL_ADD, *fd, &event);
    }
    for (;;) {
        struct epoll_event event;
        if (epoll_wait(epoll, &event, 1, -1) != 1)
            continue;
        int fd = event.data.fd;
        if (fd == listener) {
            int client = accept(listener, 0, 0);
            struct epoll_event of_client = {.events = EPOLLIN, .data.fd = client};
            epoll_ctl(epoll, EPOLL_CTL_ADD, client, &of_client);
        } else if (fd == timer) {
            uint64_t times;
            if (read(timer, &times, sizeof times) == sizeof times)
                fired_at = now_ms();
        } else {
            char command[128], text[256] = "";
            ssize_t len = read(fd, command, sizeof command - 1);
            if (len <= 0) {
                close(fd);
                continue;
            }
            command[len - 1] = 0;
            if (!strcmp(command, "fired"))
                sprintf(text, "%ld\n", fired_at ? now_ms() - fired_at : -1);
            else
                answer(command, text);
            if (write(fd, text, strlen(text)) < 0)
                close(fd);
        }
    }
}
