/* POSIX threads: create, join, detach, cancel; every kind of mutex, condition
 * variables, barriers, read-write locks, once, thread-local storage. */
#include "guest.h"
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/wait.h>

static void *returns_argument(void *argument) { return argument; }

static struct timespec after_ms(clockid_t clock, long ms)
{
    struct timespec t;
    clock_gettime(clock, &t);
    t.tv_nsec += ms * 1000000;
    t.tv_sec += t.tv_nsec / 1000000000;
    t.tv_nsec %= 1000000000;
    return t;
}

static pthread_mutex_t counted = PTHREAD_MUTEX_INITIALIZER;
static long counter;

static void *counts(void *argument)
{
    for (long i = 0; i < (long)argument; i++) {
        pthread_mutex_lock(&counted);
        counter++;
        pthread_mutex_unlock(&counted);
    }
    return NULL;
}

static void basics(void)
{
    PART("create, join, detach");
    pthread_t thread, many[32];
    void *result;
    CODE(pthread_create(&thread, NULL, returns_argument, (void *)42));
    CODE(pthread_join(thread, &result));
    say("result %ld\n", (long)result);
    for (int i = 0; i < 32; i++)
        pthread_create(&many[i], NULL, counts, (void *)1000);
    for (int i = 0; i < 32; i++)
        pthread_join(many[i], NULL);
    say("counter %ld\n", counter);
    long sum = 0;
    for (long i = 0; i < 500; i++) {
        pthread_create(&thread, NULL, returns_argument, (void *)i);
        pthread_join(thread, &result);
        sum += (long)result;
    }
    say("one after another %ld\n", sum);
    CODE(pthread_join(pthread_self(), NULL));
    CODE(pthread_create(&thread, NULL, returns_argument, NULL));
    CODE(pthread_detach(thread));
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    CODE(pthread_attr_setstacksize(&attributes, 1));
    CODE(pthread_attr_setstacksize(&attributes, 64 << 10));
    CODE(pthread_create(&thread, &attributes, returns_argument, (void *)7));
    CODE(pthread_join(thread, &result));
    char name[16];
    CODE(pthread_setname_np(pthread_self(), "sixteen-and-more"));
    CODE(pthread_setname_np(pthread_self(), "fifteen-letters"));
    CODE(pthread_getname_np(pthread_self(), name, sizeof name));
    say("name %s\n", name);
}

static void *waits_for_ever(void *argument)
{
    int kind = (int)(long)argument, ends[2];
    if (kind == 0)
        for (;;)
            pause();
    MUST(pipe(ends));
    char byte;
    for (;;)
        MUST(read(ends[0], &byte, 1));
}

static int cleaned;
static void cleans(void *argument) { cleaned += (int)(long)argument; }

static void *spins(void *argument)
{
    pthread_cleanup_push(cleans, (void *)100);
    pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, NULL);
    *(volatile int *)argument = 1;
    for (;;)
        ;
    pthread_cleanup_pop(0);
    return NULL;
}

static void gives_back(void *mutex) { pthread_mutex_unlock(mutex); }

static void *waits_on_condition(void *argument)
{
    static pthread_cond_t never = PTHREAD_COND_INITIALIZER;
    pthread_mutex_t *mutex = argument;
    pthread_mutex_lock(mutex);
    pthread_cleanup_push(gives_back, mutex);
    pthread_cleanup_push(cleans, (void *)1);
    for (;;)
        pthread_cond_wait(&never, mutex);
    pthread_cleanup_pop(0);
    pthread_cleanup_pop(0);
}

static void cancellation(void)
{
    PART("cancel");
    pthread_t thread;
    void *result;
    for (int kind = 0; kind < 2; kind++) {
        pthread_create(&thread, NULL, waits_for_ever, (void *)(long)kind);
        usleep(2000);
        CODE(pthread_cancel(thread));
        pthread_join(thread, &result);
        say("canceled %d\n", result == PTHREAD_CANCELED);
    }
    volatile int started = 0;
    pthread_create(&thread, NULL, spins, (void *)&started);
    while (!started)
        sched_yield();
    CODE(pthread_cancel(thread));
    pthread_join(thread, &result);
    say("canceled %d cleaned %d\n", result == PTHREAD_CANCELED, cleaned);
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_create(&thread, NULL, waits_on_condition, &mutex);
    usleep(2000);
    pthread_cancel(thread);
    pthread_join(thread, &result);
    say("canceled %d cleaned %d\n", result == PTHREAD_CANCELED, cleaned);
    CODE(pthread_mutex_trylock(&mutex));
}

static void *tries(void *argument)
{
    int code = pthread_mutex_trylock(argument);
    if (!code)
        pthread_mutex_unlock(argument);
    return (void *)(long)code;
}

static void *unlocks(void *argument) { return (void *)(long)pthread_mutex_unlock(argument); }

static void *locks_and_dies(void *argument)
{
    pthread_mutex_lock(argument);
    return NULL;
}

static const char *in_thread(void *(*work)(void *), void *argument)
{
    pthread_t thread;
    void *result;
    pthread_create(&thread, NULL, work, argument);
    pthread_join(thread, &result);
    return result ? error_name((int)(long)result) : "0";
}

static void mutexes(void)
{
    static const char *const kinds[] = {"normal", "recursive", "error-checking"};
    static const int types[] = {PTHREAD_MUTEX_NORMAL, PTHREAD_MUTEX_RECURSIVE,
                                PTHREAD_MUTEX_ERRORCHECK};
    static const int protocols[] = {PTHREAD_PRIO_NONE, PTHREAD_PRIO_INHERIT};
    for (int protocol = 0; protocol < 2; protocol++)
        for (int kind = 0; kind < 3; kind++)
            for (int robust = 0; robust < 2; robust++) {
                say("-- mutex: %s%s%s\n", kinds[kind], protocol ? ", PI" : "",
                    robust ? ", robust" : "");
                pthread_mutexattr_t attributes;
                pthread_mutex_t mutex;
                pthread_mutexattr_init(&attributes);
                pthread_mutexattr_settype(&attributes, types[kind]);
                CODE(pthread_mutexattr_setprotocol(&attributes, protocols[protocol]));
                pthread_mutexattr_setrobust(&attributes, robust ? PTHREAD_MUTEX_ROBUST
                                                                : PTHREAD_MUTEX_STALLED);
                CODE(pthread_mutex_init(&mutex, &attributes));
                CODE(pthread_mutex_lock(&mutex));
                say("another tries: %s\n", in_thread(tries, &mutex));
                if (kind != 0) {
                    CODE(pthread_mutex_lock(&mutex));
                    say("another unlocks: %s\n", in_thread(unlocks, &mutex));
                }
                if (kind == 1)
                    CODE(pthread_mutex_unlock(&mutex));
                struct timespec soon = after_ms(CLOCK_REALTIME, 5);
                if (kind == 0)
                    CODE(pthread_mutex_timedlock(&mutex, &soon));
                CODE(pthread_mutex_unlock(&mutex));
                if (kind == 2)
                    CODE(pthread_mutex_unlock(&mutex));
                if (robust) {
                    in_thread(locks_and_dies, &mutex);
                    CODE(pthread_mutex_trylock(&mutex));
                    CODE(pthread_mutex_consistent(&mutex));
                    CODE(pthread_mutex_unlock(&mutex));
                    in_thread(locks_and_dies, &mutex);
                    CODE(pthread_mutex_lock(&mutex));
                    CODE(pthread_mutex_unlock(&mutex));
                    CODE(pthread_mutex_lock(&mutex));
                }
                pthread_mutex_destroy(&mutex);
            }
}

struct shared {
    pthread_mutex_t mutex;
    pthread_cond_t condition;
    pthread_barrier_t barrier;
    sem_t semaphore;
    long counter;
    int turn;
};

static void pi_contention(void)
{
    PART("contended PI mutex");
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setprotocol(&attributes, PTHREAD_PRIO_INHERIT);
    pthread_mutex_init(&counted, &attributes);
    pthread_t threads[4];
    counter = 0;
    for (int i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, counts, (void *)5000);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    say("counter %ld\n", counter);
}

static void between_processes(int robust)
{
    PART("mutex, condition, barrier and semaphore between processes");
    struct shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE,
                                 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_mutexattr_t mutex;
    pthread_condattr_t condition;
    pthread_barrierattr_t barrier;
    pthread_mutexattr_init(&mutex);
    pthread_mutexattr_setpshared(&mutex, PTHREAD_PROCESS_SHARED);
    if (robust)
        pthread_mutexattr_setrobust(&mutex, PTHREAD_MUTEX_ROBUST);
    pthread_condattr_init(&condition);
    pthread_condattr_setpshared(&condition, PTHREAD_PROCESS_SHARED);
    pthread_barrierattr_init(&barrier);
    pthread_barrierattr_setpshared(&barrier, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&shared->mutex, &mutex);
    pthread_cond_init(&shared->condition, &condition);
    pthread_barrier_init(&shared->barrier, &barrier, 3);
    sem_init(&shared->semaphore, 1, 0);
    for (int child = 0; child < 2; child++) {
        if (MUST(fork()) == 0) {
            pthread_barrier_wait(&shared->barrier);
            for (int i = 0; i < 2000; i++) {
                pthread_mutex_lock(&shared->mutex);
                shared->counter++;
                pthread_mutex_unlock(&shared->mutex);
            }
            for (int i = 0; i < 100; i++) {
                pthread_mutex_lock(&shared->mutex);
                while (shared->turn % 2 != child)
                    pthread_cond_wait(&shared->condition, &shared->mutex);
                shared->turn++;
                pthread_cond_broadcast(&shared->condition);
                pthread_mutex_unlock(&shared->mutex);
            }
            sem_post(&shared->semaphore);
            pthread_barrier_wait(&shared->barrier);
            if (robust && child == 0)
                pthread_mutex_lock(&shared->mutex);
            _exit(0);
        }
    }
    pthread_barrier_wait(&shared->barrier);
    sem_wait(&shared->semaphore);
    sem_wait(&shared->semaphore);
    pthread_barrier_wait(&shared->barrier);
    int status, dead = 0;
    while (wait(&status) > 0)
        dead += WIFEXITED(status) && WEXITSTATUS(status) == 0;
    say("ended %d counter %ld turn %d\n", dead, shared->counter, shared->turn);
    if (robust)
        CODE(pthread_mutex_lock(&shared->mutex));
    munmap(shared, sizeof *shared);
}

static pthread_mutex_t door = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t opened = PTHREAD_COND_INITIALIZER;
static int is_open, passed;

static void *passes(void *argument)
{
    (void)argument;
    pthread_mutex_lock(&door);
    while (!is_open)
        pthread_cond_wait(&opened, &door);
    passed++;
    pthread_mutex_unlock(&door);
    return NULL;
}

static pthread_barrier_t barrier;
static void *meets(void *argument)
{
    long serial = 0;
    for (long i = 0; i < (long)argument; i++)
        serial += pthread_barrier_wait(&barrier) == PTHREAD_BARRIER_SERIAL_THREAD;
    return (void *)serial;
}

static pthread_rwlock_t rwlock = PTHREAD_RWLOCK_INITIALIZER;
static long readers_saw_half;
static volatile long pair[2];

static void *reads_pairs(void *argument)
{
    for (long i = 0; i < (long)argument; i++) {
        pthread_rwlock_rdlock(&rwlock);
        if (pair[0] != pair[1])
            readers_saw_half++;
        pthread_rwlock_unlock(&rwlock);
    }
    return NULL;
}

static void *writes_pairs(void *argument)
{
    for (long i = 0; i < (long)argument; i++) {
        pthread_rwlock_wrlock(&rwlock);
        pair[0]++;
        sched_yield();
        pair[1]++;
        pthread_rwlock_unlock(&rwlock);
    }
    return NULL;
}

static void *tries_to_write(void *argument)
{
    (void)argument;
    return (void *)(long)pthread_rwlock_trywrlock(&rwlock);
}

static _Thread_local int local = 5;
static pthread_key_t key;
static int destroyed;
static void destroys(void *value) { destroyed += (int)(long)value; }
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int onces;
static void only_once(void) { onces++; }

static void *uses_local(void *argument)
{
    local += (int)(long)argument;
    pthread_setspecific(key, argument);
    pthread_once(&once, only_once);
    return (void *)(long)local;
}

static void others(void)
{
    pthread_t threads[8];
    PART("condition variables");
    for (int i = 0; i < 8; i++)
        pthread_create(&threads[i], NULL, passes, NULL);
    usleep(1000);
    pthread_mutex_lock(&door);
    is_open = 1;
    pthread_cond_broadcast(&opened);
    pthread_mutex_unlock(&door);
    for (int i = 0; i < 8; i++)
        pthread_join(threads[i], NULL);
    say("passed %d\n", passed);
    pthread_mutex_lock(&door);
    struct timespec soon = after_ms(CLOCK_REALTIME, 5);
    CODE(pthread_cond_timedwait(&opened, &door, &soon));
    soon.tv_nsec = -1;
    CODE(pthread_cond_timedwait(&opened, &door, &soon));
    soon = after_ms(CLOCK_MONOTONIC, 5);
    CODE(pthread_cond_clockwait(&opened, &door, CLOCK_MONOTONIC, &soon));
    pthread_mutex_unlock(&door);

    PART("barriers");
    pthread_barrier_init(&barrier, NULL, 4);
    long serial = 0;
    for (int i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, meets, (void *)200);
    for (int i = 0; i < 4; i++) {
        void *result;
        pthread_join(threads[i], &result);
        serial += (long)result;
    }
    say("serial %ld\n", serial);

    PART("read-write locks");
    for (int i = 0; i < 6; i++)
        pthread_create(&threads[i], NULL, i < 2 ? writes_pairs : reads_pairs, (void *)500);
    for (int i = 0; i < 6; i++)
        pthread_join(threads[i], NULL);
    say("pairs %ld %ld halves %ld\n", pair[0], pair[1], readers_saw_half);
    CODE(pthread_rwlock_wrlock(&rwlock));
    CODE(pthread_rwlock_rdlock(&rwlock));
    say("another writes: %s\n", in_thread(tries_to_write, NULL));
    CODE(pthread_rwlock_unlock(&rwlock));
    CODE(pthread_rwlock_rdlock(&rwlock));
    CODE(pthread_rwlock_tryrdlock(&rwlock));
    say("another writes: %s\n", in_thread(tries_to_write, NULL));

    PART("thread-local storage and once");
    CODE(pthread_key_create(&key, destroys));
    long sum = 0;
    for (long i = 0; i < 8; i++)
        pthread_create(&threads[i], NULL, uses_local, (void *)(i + 1));
    for (int i = 0; i < 8; i++) {
        void *result;
        pthread_join(threads[i], &result);
        sum += (long)result;
    }
    say("sum %ld own %d destroyed %d once %d\n", sum, local, destroyed, onces);

    PART("semaphores");
    sem_t semaphore;
    sem_init(&semaphore, 0, 1);
    TRY(sem_wait(&semaphore));
    TRY(sem_trywait(&semaphore));
    soon = after_ms(CLOCK_REALTIME, 5);
    TRY(sem_timedwait(&semaphore, &soon));
    TRY(sem_post(&semaphore));
    TRY(sem_wait(&semaphore));
}

int main(void)
{
    basics();
    cancellation();
    mutexes();
    pi_contention();
    others();
    between_processes(0);
    between_processes(1);
    return 0;
}
