/* System V semaphores: values, waiting, undoing, limits and errors. */
#include "guest.h"
#include <sys/ipc.h>
#include <sys/sem.h>
#include <sys/wait.h>

union argument {
    int value;
    struct semid_ds *status;
    unsigned short *values;
    struct seminfo *info;
};

enum { NOBODY = 65534 };
static int id;

static int operate(int number, int amount, int flags)
{
    struct sembuf operation = {(unsigned short)number, (short)amount, (short)flags};
    return semop(id, &operation, 1);
}

static void show_values(void)
{
    unsigned short values[4] = {9, 9, 9, 9};
    MUST(semctl(id, 0, GETALL, (union argument){.values = values}));
    say("values %d %d %d\n", values[0], values[1], values[2]);
}

static struct semid_ds status(void)
{
    struct semid_ds found;
    MUST(semctl(id, 0, IPC_STAT, (union argument){.status = &found}));
    return found;
}

static void await(int number, int command, int count)
{
    while (semctl(id, number, command) != count)
        usleep(1000);
}

static void finish(pid_t child)
{
    int code;
    MUST(waitpid(child, &code, 0));
    say("status %x\n", code);
}

static void nothing(int signal)
{
    (void)signal;
}

static void keys(void)
{
    PART("keys");
    key_t key = 0x7468 + getpid();
    TRY(semget(key, 1, 0));
    TRY(semget(key, 0, IPC_CREAT | 0600));
    TRY(semget(key, -1, IPC_CREAT | 0600));
    TRY(semget(key, 32001, IPC_CREAT | 0600));
    int first = OK(semget(key, 2, IPC_CREAT | IPC_EXCL | 0640));
    IS(semget(key, 0, 0) == first);
    IS(semget(key, 2, IPC_CREAT) == first);
    TRY(semget(key, 3, 0));
    TRY(semget(key, 1, IPC_CREAT | IPC_EXCL));
    IS(semget(IPC_PRIVATE, 1, 0) != first);
    id = first;
    struct semid_ds found = status();
    say("mode %o, %lu semaphores, %d\n", found.sem_perm.mode, (unsigned long)found.sem_nsems,
        found.sem_perm.__key == key);
    IS(found.sem_otime == 0 && found.sem_ctime > 0);
    found.sem_perm.mode = 07600;
    TRY(semctl(id, 0, IPC_SET, (union argument){.status = &found}));
    say("mode %o\n", status().sem_perm.mode);
    found.sem_perm.uid = (uid_t)-1;
    TRY(semctl(id, 0, IPC_SET, (union argument){.status = &found}));
    TRY(semctl(id, 0, IPC_RMID));
    TRY(semctl(id, 0, IPC_RMID));
    TRY(semctl(id, 0, GETVAL));
    TRY(semget(key, 1, 0));
    TRY(semctl(-1, 0, IPC_RMID));
}

static void values(void)
{
    PART("values");
    id = (int)MUST(semget(IPC_PRIVATE, 3, 0600));
    show_values();
    TRY(semctl(id, 1, SETVAL, (union argument){.value = 5}));
    TRY(semctl(id, 1, GETVAL));
    IS(semctl(id, 1, GETPID) == getpid());
    TRY(semctl(id, 3, GETVAL));
    TRY(semctl(id, -1, GETVAL));
    TRY(semctl(id, 3, SETVAL, (union argument){.value = 1}));
    TRY(semctl(id, 0, SETVAL, (union argument){.value = 32768}));
    TRY(semctl(id, 0, SETVAL, (union argument){.value = -1}));
    unsigned short many[3] = {1, 2, 40000};
    TRY(semctl(id, 0, SETALL, (union argument){.values = many}));
    many[2] = 3;
    TRY(semctl(id, 0, SETALL, (union argument){.values = many}));
    show_values();
    TRY(semctl(id, 0, SETALL, (union argument){.values = (unsigned short *)8}));
    TRY(semctl(id, 0, GETALL, (union argument){.values = (unsigned short *)8}));
    TRY(semctl(id, 0, 77));

    PART("operations");
    TRY(operate(0, -1, 0));
    TRY(operate(0, -1, IPC_NOWAIT));
    TRY(operate(0, 0, IPC_NOWAIT));
    TRY(operate(1, 0, IPC_NOWAIT));
    TRY(operate(3, 1, 0));
    TRY(operate(0, 32767, 0));
    TRY(operate(0, 1, 0));
    TRY(operate(0, -32768, IPC_NOWAIT));
    TRY(operate(0, -32767, 0));
    struct sembuf both[] = {{0, 4, 0}, {0, -1, 0}, {2, -4, IPC_NOWAIT}};
    TRY(semop(id, both, 3));
    show_values();
    both[2].sem_op = -2;
    TRY(semop(id, both, 3));
    show_values();
    IS(status().sem_otime > 0);
    TRY(semop(id, both, 0));
    TRY(semop(id, both, 501));
    TRY(semop(id, (struct sembuf *)8, 1));
    TRY(semop(-1, both, 1));
    TRY(semop(id + 1, both, 1));
    struct timespec time = {0, 10000000};
    TRY(semtimedop(id, &(struct sembuf){0, -9, 0}, 1, &time));
    time.tv_nsec = 0;
    TRY(semtimedop(id, &(struct sembuf){0, -9, 0}, 1, &time));
    TRY(semtimedop(id, &(struct sembuf){0, -1, 0}, 1, &time));
    time.tv_nsec = 1000000000;
    TRY(semtimedop(id, &(struct sembuf){0, -1, 0}, 1, &time));
    TRY(semtimedop(id, &(struct sembuf){0, -1, 0}, 1, (struct timespec *)8));
    show_values();
}

static void waiting(void)
{
    PART("waiting");
    unsigned short zeros[3] = {0, 0, 0};
    MUST(semctl(id, 0, SETALL, (union argument){.values = zeros}));
    pid_t two = MUST(fork());
    if (!two)
        _exit(operate(0, -2, 0) == 0 ? 2 : errno);
    await(0, GETNCNT, 1);
    pid_t one = MUST(fork());
    if (!one)
        _exit(operate(0, -1, 0) == 0 ? 1 : errno);
    await(0, GETNCNT, 2);
    say("waiting %d %d\n", semctl(id, 0, GETNCNT), semctl(id, 0, GETZCNT));
    /* Who waits for less does not wait for who waits for more. */
    TRY(operate(0, 1, 0));
    TRY(semctl(id, 0, GETVAL));
    finish(one);
    IS(semctl(id, 0, GETPID) == one);
    TRY(operate(0, 1, 0));
    TRY(operate(0, 1, 0));
    TRY(semctl(id, 0, GETVAL));
    finish(two);

    MUST(semctl(id, 1, SETVAL, (union argument){.value = 1}));
    pid_t zero = MUST(fork());
    if (!zero) {
        struct sembuf operations[] = {{1, 0, 0}, {1, 3, 0}};
        _exit(semop(id, operations, 2) == 0 ? 3 : errno);
    }
    await(1, GETZCNT, 1);
    TRY(operate(1, -1, 0));
    TRY(semctl(id, 1, GETVAL));
    finish(zero);

    struct sigaction action = {.sa_handler = nothing, .sa_flags = SA_RESTART};
    MUST(sigaction(SIGUSR1, &action, NULL));
    pid_t interrupted = MUST(fork());
    if (!interrupted)
        _exit(operate(2, -1, 0) == -1 && errno == EINTR ? 4 : 99);
    await(2, GETNCNT, 1);
    MUST(kill(interrupted, SIGUSR1));
    finish(interrupted);
    say("waiting %d\n", semctl(id, 2, GETNCNT));

    pid_t killed = MUST(fork());
    if (!killed)
        _exit(operate(2, -1, 0));
    await(2, GETNCNT, 1);
    MUST(kill(killed, SIGKILL));
    finish(killed);
    say("waiting %d\n", semctl(id, 2, GETNCNT));
}

static void undoing(void)
{
    PART("undoing");
    unsigned short some[3] = {5, 5, 5};
    MUST(semctl(id, 0, SETALL, (union argument){.values = some}));
    pid_t child = MUST(fork());
    if (!child) {
        struct sembuf operations[] = {{0, -3, SEM_UNDO}, {1, 10, SEM_UNDO}, {2, -1, 0}};
        MUST(semop(id, operations, 3));
        show_values();
        _exit(0);
    }
    finish(child);
    show_values();
    child = MUST(fork());
    if (!child) {
        operate(1, 10, SEM_UNDO);
        pid_t grandchild = MUST(fork());
        if (!grandchild) {
            /* What the parent would undo is not inherited. */
            operate(1, -12, 0);
            _exit(0);
        }
        waitpid(grandchild, NULL, 0);
        show_values();
        _exit(0);
    }
    finish(child);
    show_values();
    child = MUST(fork());
    if (!child) {
        operate(0, 2, SEM_UNDO);
        semctl(id, 0, SETVAL, (union argument){.value = 6});
        pause();
        _exit(0);
    }
    while (semctl(id, 0, GETVAL) != 6)
        usleep(1000);
    MUST(kill(child, SIGKILL));
    finish(child);
    show_values();
    child = MUST(fork());
    if (!child) {
        int code = operate(0, -6, SEM_UNDO);
        execl("/bin/sh", "sh", "-c", code ? "exit 1" : "echo executed", NULL);
        _exit(1);
    }
    finish(child);
    show_values();
}

static void permissions(void)
{
    PART("permissions");
    pid_t child = MUST(fork());
    if (!child) {
        if (geteuid() == 0)
            MUST(setresuid(NOBODY, NOBODY, NOBODY));
        int own = (int)MUST(semget(IPC_PRIVATE, 1, 0200));
        id = own;
        TRY(operate(0, 1, 0));
        TRY(operate(0, 0, IPC_NOWAIT));
        TRY(semctl(id, 0, GETVAL));
        TRY(semctl(id, 0, SETVAL, (union argument){.value = 1}));
        struct semid_ds found;
        TRY(semctl(id, 0, IPC_STAT, (union argument){.status = &found}));
        TRY(semctl(id, 0, IPC_RMID));
        _exit(0);
    }
    finish(child);
    if (geteuid() == 0) {
        child = MUST(fork());
        if (!child) {
            MUST(setresgid(NOBODY, NOBODY, NOBODY));
            MUST(setresuid(NOBODY, NOBODY, NOBODY));
            bool refused = operate(0, 1, 0) == -1 && errno == EACCES;
            bool kept = semctl(id, 0, IPC_RMID) == -1 && errno == EPERM;
            say("others: %d %d\n", refused, kept);
            _exit(0);
        }
        finish(child);
    } else {
        say("others: 1 1\nstatus 0\n");
    }
}

static void removal(void)
{
    PART("removal");
    pid_t child = MUST(fork());
    if (!child)
        _exit(operate(2, -100, 0) == -1 && errno == EIDRM ? 5 : 99);
    await(2, GETNCNT, 1);
    TRY(semctl(id, 0, IPC_RMID));
    finish(child);
    TRY(operate(0, 1, 0));

    struct seminfo info;
    IS(semctl(0, 0, IPC_INFO, (union argument){.info = &info}) >= 0);
    say("%d %d %d\n", info.semmsl, info.semopm, info.semvmx);
    IS(semctl(0, 0, SEM_INFO, (union argument){.info = &info}) >= 0);
    IS(info.semusz >= 0 && info.semaem >= 0);
}

int main(void)
{
    keys();
    values();
    waiting();
    undoing();
    permissions();
    removal();
    return 0;
}
