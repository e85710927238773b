/* futex(2) as it is: every operation, time-outs, errors, and futexes that
 * processes share. */
#include "guest.h"
#include <linux/futex.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/wait.h>

static uint32_t words[8];

#define FUTEX(...) syscall(SYS_futex, __VA_ARGS__)

struct waiter {
    pthread_t thread;
    uint32_t *word, bitset;
    int private, result;
};

static void *waits(void *argument)
{
    struct waiter *waiter = argument;
    long result = FUTEX(waiter->word, FUTEX_WAIT_BITSET | waiter->private, 0, NULL, NULL,
                        waiter->bitset);
    waiter->result = result ? errno : 0;
    return NULL;
}

/* How many wait: a requeue to the same place counts them. */
static long waiting(uint32_t *word)
{
    return FUTEX(word, FUTEX_CMP_REQUEUE_PRIVATE, 0, 1000, word, 0);
}

static void start(struct waiter *waiters, int count, uint32_t *word)
{
    for (int i = 0; i < count; i++) {
        waiters[i] = (struct waiter){.word = word, .bitset = 1u << i, .private = FUTEX_PRIVATE_FLAG,
                                     .result = -1};
        pthread_create(&waiters[i].thread, NULL, waits, &waiters[i]);
        while (waiting(word) != i + 1)
            usleep(500);
    }
}

static void finish(struct waiter *waiters, int count)
{
    for (int i = 0; i < count; i++)
        pthread_join(waiters[i].thread, NULL);
}

static struct timespec in_ms(clockid_t clock, long ms)
{
    struct timespec t;
    clock_gettime(clock, &t);
    t.tv_nsec += ms * 1000000;
    t.tv_sec += t.tv_nsec / 1000000000;
    t.tv_nsec %= 1000000000;
    return t;
}

static void nothing(int signal) { (void)signal; }

static void processes(const char *what, uint32_t *shared)
{
    say("-- between processes: %s\n", what);
    pid_t child = MUST(fork());
    if (!child) {
        for (uint32_t i = 0; i < 200; i++) {
            while (__atomic_load_n(&shared[0], __ATOMIC_SEQ_CST) == i)
                FUTEX(&shared[0], FUTEX_WAIT, i, NULL, NULL, 0);
            __atomic_store_n(&shared[1], i + 1, __ATOMIC_SEQ_CST);
            FUTEX(&shared[1], FUTEX_WAKE, 1, NULL, NULL, 0);
        }
        _exit(0);
    }
    for (uint32_t i = 0; i < 200; i++) {
        __atomic_store_n(&shared[0], i + 1, __ATOMIC_SEQ_CST);
        FUTEX(&shared[0], FUTEX_WAKE, 1, NULL, NULL, 0);
        while (__atomic_load_n(&shared[1], __ATOMIC_SEQ_CST) == i)
            FUTEX(&shared[1], FUTEX_WAIT, i, NULL, NULL, 0);
    }
    int status;
    MUST(waitpid(child, &status, 0));
    say("ping-pong ended with %d at %u %u\n", status, shared[0], shared[1]);
}

static volatile pid_t owner_tid;
static volatile int may_give_up;
static void *owns(void *argument)
{
    TRY(FUTEX(argument, FUTEX_LOCK_PI_PRIVATE, 0, NULL, NULL, 0));
    owner_tid = gettid();
    while (!may_give_up)
        usleep(1000);
    usleep(20000);
    TRY(FUTEX(argument, FUTEX_UNLOCK_PI_PRIVATE, 0, NULL, NULL, 0));
    return NULL;
}

/* A robust list with one lock, which its thread holds. */
struct held {
    struct robust_list_head head;
    struct robust_list entry;
    uint32_t word;
};

/* A child takes a lock, and executes another program. */
static void leaves_by_executing(void)
{
    PART("a holder executes another program");
    struct held *held = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t child = MUST(fork());
    if (!child) {
        held->head.list.next = &held->entry;
        held->entry.next = &held->head.list;
        held->head.futex_offset = offsetof(struct held, word) - offsetof(struct held, entry);
        held->word = (uint32_t)gettid();
        MUST(syscall(SYS_set_robust_list, &held->head, sizeof held->head));
        execl("/proc/self/exe", "futexes", "executed", NULL);
        _exit(1);
    }
    int status;
    MUST(waitpid(child, &status, 0));
    say("ended %d, the lock: %x\n", status, held->word & ~FUTEX_TID_MASK);
    IS((held->word & FUTEX_TID_MASK) == 0);
}

int main(int argc, char **argv)
{
    (void)argv;
    if (argc > 1)
        return 0;
    struct waiter w[4];
    struct timespec t;

    PART("values, alignment, addresses");
    TRY(FUTEX(&words[0], FUTEX_WAIT, 1, NULL, NULL, 0));
    TRY(FUTEX(&words[0], FUTEX_WAIT_PRIVATE, 1, NULL, NULL, 0));
    TRY(FUTEX((char *)&words[0] + 1, FUTEX_WAIT, 0, NULL, NULL, 0));
    TRY(FUTEX((char *)&words[0] + 2, FUTEX_WAKE, 1, NULL, NULL, 0));
    TRY(FUTEX(NULL, FUTEX_WAIT, 0, NULL, NULL, 0));
    TRY(FUTEX(8, FUTEX_WAIT_PRIVATE, 0, NULL, NULL, 0));
    TRY(FUTEX(8, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0));
    TRY(FUTEX(8, FUTEX_WAKE, 1, NULL, NULL, 0));
    TRY(FUTEX(&words[0], FUTEX_WAKE, 1, NULL, NULL, 0));
    TRY(FUTEX(&words[0], 77, 1, NULL, NULL, 0));
    TRY(FUTEX(&words[0], FUTEX_WAIT_BITSET, 0, NULL, NULL, 0));
    TRY(FUTEX(&words[0], FUTEX_WAKE_BITSET, 1, NULL, NULL, 0));
    TRY(FUTEX(&words[0], FUTEX_WAKE | FUTEX_CLOCK_REALTIME, 1, NULL, NULL, 0));
    TRY(FUTEX(&words[0], FUTEX_FD, 1, NULL, NULL, 0));

    PART("time-outs");
    t = (struct timespec){0, 5000000};
    TRY(FUTEX(&words[0], FUTEX_WAIT, 0, &t, NULL, 0));
    t = (struct timespec){0, 1000000000};
    TRY(FUTEX(&words[0], FUTEX_WAIT, 0, &t, NULL, 0));
    t = (struct timespec){-1, 0};
    TRY(FUTEX(&words[0], FUTEX_WAIT, 0, &t, NULL, 0));
    TRY(FUTEX(&words[0], FUTEX_WAIT, 0, 8, NULL, 0));
    t = in_ms(CLOCK_MONOTONIC, 5);
    TRY(FUTEX(&words[0], FUTEX_WAIT_BITSET, 0, &t, NULL, ~0u));
    t = in_ms(CLOCK_REALTIME, 5);
    TRY(FUTEX(&words[0], FUTEX_WAIT_BITSET | FUTEX_CLOCK_REALTIME, 0, &t, NULL, ~0u));
    t = (struct timespec){0, 0};
    TRY(FUTEX(&words[0], FUTEX_WAIT_BITSET, 0, &t, NULL, ~0u));
    t = (struct timespec){0, 5000000};
    TRY(FUTEX(&words[0], FUTEX_WAIT | FUTEX_CLOCK_REALTIME, 0, &t, NULL, 0));

    PART("wake");
    start(w, 3, &words[0]);
    TRY(FUTEX(&words[0], FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0));
    pthread_join(w[0].thread, NULL);
    say("in order of arrival: %d %d %d\n", w[0].result, w[1].result, w[2].result);
    TRY(FUTEX(&words[0], FUTEX_WAKE, 10, NULL, NULL, 0));
    TRY(FUTEX(&words[0], FUTEX_WAKE_PRIVATE, 10, NULL, NULL, 0));
    finish(w + 1, 2);
    TRY(FUTEX(&words[0], FUTEX_WAKE_PRIVATE, 10, NULL, NULL, 0));

    PART("bit sets");
    start(w, 4, &words[0]);
    TRY(FUTEX(&words[0], FUTEX_WAKE_BITSET_PRIVATE, 10, NULL, NULL, 4));
    pthread_join(w[2].thread, NULL);
    TRY(FUTEX(&words[0], FUTEX_WAKE_BITSET_PRIVATE, 10, NULL, NULL, 4));
    TRY(FUTEX(&words[0], FUTEX_WAKE_BITSET_PRIVATE, 1, NULL, NULL, 3));
    TRY(FUTEX(&words[0], FUTEX_WAKE_BITSET_PRIVATE, 10, NULL, NULL, ~0u));
    pthread_join(w[0].thread, NULL);
    pthread_join(w[1].thread, NULL);
    pthread_join(w[3].thread, NULL);

    PART("requeue");
    start(w, 4, &words[0]);
    TRY(FUTEX(&words[0], FUTEX_CMP_REQUEUE_PRIVATE, 1, 2, &words[1], 5));
    TRY(FUTEX(&words[0], FUTEX_CMP_REQUEUE_PRIVATE, -1, 2, &words[1], 0));
    TRY(FUTEX(&words[0], FUTEX_CMP_REQUEUE_PRIVATE, 1, 2, &words[1], 0));
    TRY(FUTEX(&words[0], FUTEX_WAKE_PRIVATE, 10, NULL, NULL, 0));
    TRY(FUTEX(&words[1], FUTEX_REQUEUE_PRIVATE, 0, 1, &words[2], 0));
    TRY(FUTEX(&words[1], FUTEX_WAKE_PRIVATE, 10, NULL, NULL, 0));
    TRY(FUTEX(&words[2], FUTEX_WAKE_PRIVATE, 10, NULL, NULL, 0));
    finish(w, 4);

    PART("wake_op");
    start(w, 2, &words[0]);
    start(w + 2, 2, &words[1]);
    words[1] = 0;
    TRY(FUTEX(&words[0], FUTEX_WAKE_OP_PRIVATE, 1, 1, &words[1],
              FUTEX_OP(FUTEX_OP_SET, 7, FUTEX_OP_CMP_EQ, 0)));
    say("word %u\n", words[1]);
    TRY(FUTEX(&words[0], FUTEX_WAKE_OP_PRIVATE, 1, 1, &words[1],
              FUTEX_OP(FUTEX_OP_ADD, 3, FUTEX_OP_CMP_EQ, 0)));
    say("word %u\n", words[1]);
    TRY(FUTEX(&words[0], FUTEX_WAKE_OP_PRIVATE, 1, 1, &words[1],
              FUTEX_OP(FUTEX_OP_ANDN, 8, FUTEX_OP_CMP_GT, 9)));
    say("word %u\n", words[1]);
    TRY(FUTEX(&words[0], FUTEX_WAKE_OP_PRIVATE, 1, 1, &words[2],
              FUTEX_OP((FUTEX_OP_OR | FUTEX_OP_OPARG_SHIFT), 4, FUTEX_OP_CMP_LT, -1)));
    say("word %u\n", words[2]);
    TRY(FUTEX(&words[0], FUTEX_WAKE_OP_PRIVATE, 1, 1, &words[2],
              FUTEX_OP(FUTEX_OP_XOR, 17, FUTEX_OP_CMP_NE, 0)));
    say("word %u\n", words[2]);
    TRY(FUTEX(&words[0], FUTEX_WAKE_OP_PRIVATE, 1, 1, &words[2], FUTEX_OP(6, 17, 0, 0)));
    TRY(FUTEX(&words[0], FUTEX_WAKE_OP_PRIVATE, 1, 1, 8, FUTEX_OP(0, 17, 0, 0)));
    finish(w, 4);
    words[1] = words[2] = 0;

    PART("interrupted");
    struct sigaction action = {.sa_handler = nothing};
    sigaction(SIGALRM, &action, NULL);
    alarm(0);
    struct itimerval_ {
        struct timeval interval, value;
    } soon = {{0, 0}, {0, 5000}};
    syscall(SYS_setitimer, 0, &soon, NULL);
    TRY(FUTEX(&words[0], FUTEX_WAIT_PRIVATE, 0, NULL, NULL, 0));
    action.sa_flags = SA_RESTART;
    sigaction(SIGALRM, &action, NULL);
    syscall(SYS_setitimer, 0, &soon, NULL);
    t = (struct timespec){0, 30000000};
    TRY(FUTEX(&words[0], FUTEX_WAIT_PRIVATE, 0, &t, NULL, 0));
    syscall(SYS_setitimer, 0, &soon, NULL);
    t = in_ms(CLOCK_MONOTONIC, 30);
    TRY(FUTEX(&words[0], FUTEX_WAIT_BITSET_PRIVATE, 0, &t, NULL, ~0u));

    PART("PI");
    uint32_t *pi = &words[4];
    TRY(FUTEX(pi, FUTEX_LOCK_PI_PRIVATE, 0, NULL, NULL, 0));
    IS(*pi == (uint32_t)gettid());
    TRY(FUTEX(pi, FUTEX_LOCK_PI_PRIVATE, 0, NULL, NULL, 0));
    TRY(FUTEX(pi, FUTEX_TRYLOCK_PI_PRIVATE, 0, NULL, NULL, 0));
    TRY(FUTEX(pi, FUTEX_UNLOCK_PI_PRIVATE, 0, NULL, NULL, 0));
    IS(*pi == 0);
    TRY(FUTEX(pi, FUTEX_UNLOCK_PI_PRIVATE, 0, NULL, NULL, 0));
    *pi = 0x3ffffffe;
    TRY(FUTEX(pi, FUTEX_LOCK_PI_PRIVATE, 0, NULL, NULL, 0));
    *pi = 0;
    pthread_t thread;
    pthread_create(&thread, NULL, owns, pi);
    while (!owner_tid)
        usleep(1000);
    t = in_ms(CLOCK_REALTIME, 2);
    TRY(FUTEX(pi, FUTEX_LOCK_PI_PRIVATE, 0, &t, NULL, 0));
    TRY(FUTEX(pi, FUTEX_TRYLOCK_PI_PRIVATE, 0, NULL, NULL, 0));
    IS((*pi & FUTEX_TID_MASK) == (uint32_t)owner_tid);
    may_give_up = 1;
    /* The owner prints while this waits. */
    long outcome = FUTEX(pi, FUTEX_LOCK_PI_PRIVATE, 0, NULL, NULL, 0);
    pthread_join(thread, NULL);
    say("then it is ours: %ld %d\n", outcome, (*pi & FUTEX_TID_MASK) == (uint32_t)gettid());

    uint32_t *shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    processes("anonymous memory", shared);
    char *scratch = enter_scratch();
    int fd = MUST(open("word", O_RDWR | O_CREAT, 0600));
    MUST(ftruncate(fd, 8192));
    shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 4096);
    processes("a file", shared);
    PART("one file, mapped at two addresses");
    uint32_t *again = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    again[1024 + 5] = 0;
    pid_t child = MUST(fork());
    if (!child) {
        usleep(10000);
        long woken = FUTEX(&again[1024 + 5], FUTEX_WAKE, 1, NULL, NULL, 0);
        _exit((int)woken);
    }
    TRY(FUTEX(&shared[5], FUTEX_WAIT, 0, NULL, NULL, 0));
    int status;
    MUST(waitpid(child, &status, 0));
    say("woken %d\n", WEXITSTATUS(status));
    leave_scratch(scratch);
    leaves_by_executing();

    PART("robust list");
    void *head;
    size_t size;
    TRY(syscall(SYS_get_robust_list, 0, &head, &size));
    say("size %zu\n", size);
    TRY(syscall(SYS_set_robust_list, head, 23));
    TRY(syscall(SYS_get_robust_list, 0x3ffffff, &head, &size));
    return 0;
}
