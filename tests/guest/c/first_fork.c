/* The first fork of a program whose threads map memory and make system calls for the first time: what
 * the child has of both is of one moment. */
#include "guest.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>

enum { SITES = 128, SIZE = 16, CALLS = 6, PAGES = 16, PAGE = 4096 };

/* getpid and getppid in turn, each at a site of its own. */
extern char sites[];
asm(".text\n.balign 16\n"
    "sites:\n"
    ".rept 64\n"
    "mov $39, %eax\nsyscall\nret\n.balign 16\n"
    "mov $110, %eax\nsyscall\nret\n.balign 16\n"
    ".endr\n");

static volatile int stop, reached;

static long call(int site)
{
    return ((long (*)(void))(sites + site * SIZE))();
}

static void *calls(void *unused)
{
    (void)unused;
    for (int site = 0; site < SITES; site++) {
        reached = site;
        for (int time = 0; time < CALLS; time++)
            call(site);
    }
    return NULL;
}

static void *maps(void *unused)
{
    (void)unused;
    while (!stop) {
        char *pages = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        for (int page = 0; page < PAGES; page++)
            pages[page * PAGE] = 1;
        munmap(pages, PAGES * PAGE);
    }
    return NULL;
}

/* Whether all memory is there that is said to be. */
static void touch_all(void)
{
    char line[512];
    FILE *file = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, file)) {
        unsigned long start, end;
        char readable;
        if (sscanf(line, "%lx-%lx %c", &start, &end, &readable) != 3 || readable != 'r' || strstr(line, "[v"))
            continue;
        for (; start < end; start += PAGE)
            *(volatile char *)start;
    }
    fclose(file);
}

static int child(pid_t parent)
{
    touch_all();
    for (int site = 0; site < SITES; site++)
        for (int time = 0; time < CALLS; time++)
            if (call(site) != (site % 2 ? parent : getpid()))
                return 1;
    return 0;
}

int main(void)
{
    pthread_t caller, mappers[2];
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int wanted = now.tv_nsec / 1000 % SITES;

    for (int i = 0; i < 2; i++)
        pthread_create(&mappers[i], NULL, maps, NULL);
    pthread_create(&caller, NULL, calls, NULL);
    while (reached < wanted)
        ;
    pid_t parent = getpid(), forked = MUST(fork());
    if (!forked)
        _exit(child(parent));
    int status;
    MUST(waitpid(forked, &status, 0));
    say("status %x\n", status);
    stop = 1;
    for (int i = 0; i < 2; i++)
        pthread_join(mappers[i], NULL);
    pthread_join(caller, NULL);
    say("joined\n");
}
