/* Does to its memory what its clients say, one command a connection, and tells what it holds.
 * tests: crates/node/tests/differential.rs */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096
#define PAGES 1024
/* Static, so that it is of the file's data and zeros behind it; and two anonymous areas. */
static unsigned char own[PAGES * PAGE] __attribute__((aligned(PAGE)));
static unsigned char *areas[3] = {own};

static unsigned long hash(const unsigned char *bytes, unsigned long len) {
    unsigned long sum = 14695981039346656037ul;
    for (unsigned long i = 0; i < len; i++) sum = (sum ^ bytes[i]) * 1099511628211ul;
    return sum;
}

/* To the newest child, and from it. */
static int asks = -1, answers = -1;

/* A child that stays, with memory of its own, and tells a hash of it whenever it is asked. */
static int make_child(unsigned char *at, int byte, unsigned long len) {
    int down[2], up[2];
    char nothing;
    if (pipe(down) || pipe(up)) return -1;
    if (fork() == 0) {
        memset(at, byte, len);
        if (write(up[1], "", 1) != 1) _exit(1);
        while (read(down[0], &nothing, 1) == 1) {
            unsigned long sum = hash(at, len);
            if (write(up[1], &sum, sizeof sum) != sizeof sum) _exit(1);
        }
        for (;;) pause();
    }
    asks = down[1], answers = up[0];
    return read(answers, &nothing, 1) == 1 ? 0 : -1;
}

/* Whether the newest child has what it wrote. */
static int ask_child(int byte, unsigned long len) {
    static unsigned char expected[PAGES * PAGE];
    unsigned long sum;
    memset(expected, byte, len);
    if (write(asks, "", 1) != 1 || read(answers, &sum, sizeof sum) != sizeof sum) return -1;
    return sum != hash(expected, len);
}

static void *map(unsigned long len) {
    void *at = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) exit(3);
    return at;
}

/* `area page count byte`: what a command works on. */
static int act(const char *command) {
    unsigned area, page, count, byte;
    if (sscanf(command + 1, "%u %u %u %u", &area, &page, &count, &byte) != 4) return -1;
    if (area > 2 || page + count > PAGES) return -1;
    unsigned char *at = areas[area] + page * PAGE;
    unsigned long len = (unsigned long)count * PAGE;
    switch (*command) {
    case 'w': memset(at, byte, len); return 0;
    case 'd': return madvise(at, len, MADV_DONTNEED);
    case 'p': return mprotect(at, len, byte ? PROT_READ | PROT_WRITE : PROT_READ);
    case 'm': {
        /* Moves the area away, and a piece of it to where another piece was. */
        unsigned char *to = mremap(areas[area], sizeof own, sizeof own, MREMAP_MAYMOVE | MREMAP_FIXED,
                                   map(sizeof own));
        if (to == MAP_FAILED) return -1;
        areas[area] = to;
        return mremap(to + page * PAGE, len, len, MREMAP_MAYMOVE | MREMAP_FIXED,
                      to + (page + count) * PAGE) == MAP_FAILED
                   ? -1
                   : mmap(to + page * PAGE, len, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED;
    }
    case 'n': {
        unsigned char *fresh = map(sizeof own);
        memset(fresh + page * PAGE, byte, len);
        areas[area] = fresh;
        return 0;
    }
    case 's':
        /* A few bytes in each `count`-th page. */
        for (; page < PAGES; page += count) memset(areas[area] + page * PAGE + 5, byte, 3);
        return 0;
    case 'f': return make_child(at, byte, len);
    case 'c': return ask_child(byte, len);
    case 'h': return 0;
    }
    return -1;
}

int main(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(8080)};
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (void *)&address, sizeof address) || listen(listener, 8)) return 1;
    for (int area = 1; area < 3; area++) areas[area] = map(sizeof own);
    for (int page = 0; page < PAGES; page += 2) {
        memset(areas[1] + page * PAGE, page / 2 % 255 + 1, PAGE);
        memset(own + page * PAGE, page / 2 % 254 + 2, PAGE);
    }
    for (;;) {
        char command[64] = {0}, answer[200];
        int client = accept(listener, NULL, NULL);
        if (client < 0) continue;
        if (read(client, command, sizeof command - 1) > 0) {
            int result = act(command);
            unsigned long sums[3];
            for (int area = 0; area < 3; area++) sums[area] = hash(areas[area], sizeof own);
            int len = sprintf(answer, "%d %lx %lx %lx", result, sums[0], sums[1], sums[2]);
            if (write(client, answer, len) != len) return 2;
        }
        /* A child may have it, too. */
        shutdown(client, SHUT_RDWR);
        close(client);
    }
}
