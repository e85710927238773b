/* System V shared memory: segments that processes attach, detach and remove. */
#include "guest.h"
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/wait.h>

enum { NOBODY = 65534, PAGE = 4096 };
static int id;

static struct shmid_ds status(void)
{
    struct shmid_ds found;
    MUST(shmctl(id, IPC_STAT, &found));
    return found;
}

static void show_attached(void)
{
    say("attached %lu times, mode %o\n", (unsigned long)status().shm_nattch, status().shm_perm.mode);
}

static void finish(pid_t child)
{
    int code;
    MUST(waitpid(child, &code, 0));
    say("status %x\n", code);
}

static void *attach(int flags)
{
    void *at = shmat(id, NULL, flags);
    if (at == (void *)-1) {
        say("shmat failed with %s\n", error_name(errno));
        _exit(99);
    }
    return at;
}

static void keys(void)
{
    PART("keys");
    key_t key = 0x7367 + getpid();
    TRY(shmget(key, PAGE, 0));
    TRY(shmget(key, 0, IPC_CREAT | 0600));
    TRY(shmget(key, (size_t)-1, IPC_CREAT | 0600));
    id = OK(shmget(key, 5000, IPC_CREAT | IPC_EXCL | 0640));
    IS(shmget(key, 0, 0) == id);
    IS(shmget(key, 5000, IPC_CREAT) == id);
    TRY(shmget(key, 5001, 0));
    TRY(shmget(key, 1, IPC_CREAT | IPC_EXCL));
    struct shmid_ds found = status();
    say("mode %o, %zu bytes\n", found.shm_perm.mode, found.shm_segsz);
    IS(found.shm_atime == 0 && found.shm_dtime == 0 && found.shm_ctime > 0);
    IS(found.shm_cpid == getpid() && found.shm_lpid == 0);
    show_attached();
}

static void attachments(void)
{
    PART("attachments");
    char *first = attach(0);
    show_attached();
    IS(status().shm_atime > 0 && status().shm_lpid == getpid());
    IS(first[0] == 0 && first[2 * PAGE - 1] == 0);
    strcpy(first + 4990, "across the page");
    char *second = attach(SHM_RDONLY);
    show_attached();
    say("%s\n", second + 4990);
    first[0] = 'x';
    say("%c\n", second[0]);
    TRY(mprotect(second, PAGE, PROT_READ | PROT_WRITE));
    TRY(shmdt(second + 1));
    TRY(shmdt(second + PAGE));
    TRY(shmdt(second));
    TRY(shmdt(second));
    IS(status().shm_dtime > 0);
    show_attached();

    TRY(mprotect(first + PAGE, PAGE, PROT_READ));
    show_attached();
    TRY(munmap(first, PAGE));
    show_attached();
    IS((char *)shmat(id, first, 0) == (char *)-1 || shmdt(first) == 0);
    say("%s\n", first + 4990 < first + PAGE ? "" : first + 4990);
    TRY(shmdt(first));
    show_attached();
    first = attach(0);
    say("kept: %c %s\n", first[0], first + 4990);

    PART("addresses");
    TRY(shmat(id, (void *)1, 0));
    TRY(shmat(id, first, 0));
    TRY(shmat(id, first + 5, 0));
    TRY(shmat(id, NULL, SHM_REMAP));
    IS(shmat(id, first, SHM_REMAP) == first);
    show_attached();
    char *room = mmap(NULL, 16 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    MUST(munmap(room, 16 * PAGE));
    IS(shmat(id, room + 4 * PAGE + 77, SHM_RND) == room + 4 * PAGE);
    say("%s\n", room + 4 * PAGE + 4990);
    TRY(shmdt(room + 4 * PAGE));
    TRY(shmat(-1, NULL, 0));
    TRY(shmat(id + 1, NULL, 0));
    TRY(shmdt(room));
    TRY(shmdt(first));
    show_attached();
}

static void processes(void)
{
    PART("processes");
    volatile int *shared = attach(0);
    pid_t child = MUST(fork());
    if (!child) {
        show_attached();
        shared[100] = 7;
        int *again = attach(0);
        say("%d\n", again[100]);
        again[101] = 8;
        show_attached();
        _exit(0);
    }
    finish(child);
    IS(status().shm_lpid == child);
    show_attached();
    say("%d %d\n", shared[100], shared[101]);

    MUST(madvise((void *)shared, PAGE, MADV_DONTFORK));
    child = MUST(fork());
    if (!child) {
        show_attached();
        _exit(0);
    }
    finish(child);
    IS(status().shm_lpid != child);
    show_attached();

    /* Strangers find it by its id. */
    MUST(shmdt((void *)shared));
    child = MUST(fork());
    if (!child) {
        int *theirs = attach(0);
        theirs[5] += 10;
        execl("/bin/true", "true", NULL);
        _exit(1);
    }
    finish(child);
    show_attached();
    shared = attach(SHM_RDONLY);
    say("%d %d\n", shared[5], shared[100]);
    child = MUST(fork());
    if (!child) {
        shared[5] = 1;
        _exit(0);
    }
    finish(child);
    show_attached();
}

/* A child that is not to have it does not keep it, however late the child runs. */
static void left_out(void)
{
    enum { TURNS = 50 };
    PART("left out by forks");
    int alone = 0, gone = 0, code;
    for (int turn = 0; turn < TURNS; turn++) {
        struct shmid_ds found;
        int segment = (int)MUST(shmget(IPC_PRIVATE, PAGE, 0600));
        void *mine = shmat(segment, NULL, 0);
        MUST(madvise(mine, PAGE, MADV_DONTFORK));
        pid_t child = MUST(fork());
        if (!child)
            _exit(0);
        MUST(shmctl(segment, IPC_STAT, &found));
        alone += found.shm_nattch == 1;
        MUST(shmdt(mine));
        MUST(shmctl(segment, IPC_RMID, NULL));
        MUST(waitpid(child, &code, 0));
        gone += shmctl(segment, IPC_STAT, &found) < 0;
    }
    say("alone %d, gone %d\n", alone, gone);
}

static void removal(void)
{
    PART("removal");
    key_t key = status().shm_perm.__key;
    TRY(shmctl(id, IPC_RMID, NULL));
    show_attached();
    IS(status().shm_perm.__key == IPC_PRIVATE);
    TRY(shmget(key, 1, 0));
    char *again = attach(0);
    say("%d\n", ((int *)again)[5]);
    show_attached();
    pid_t child = MUST(fork());
    if (!child) {
        MUST(shmdt(again));
        show_attached();
        _exit(0);
    }
    finish(child);
    TRY(shmdt(again));
    show_attached();
    int other = (int)MUST(shmget(key, 3 * PAGE, IPC_CREAT | 0600));
    IS(other != id);
    /* The one that is left is read-only and goes with the process that has it. */
    child = MUST(fork());
    if (!child) {
        show_attached();
        _exit(0);
    }
    finish(child);
    show_attached();
    id = other;

    PART("a segment that goes with its last process");
    int ends[2];
    MUST(pipe(ends));
    child = MUST(fork());
    if (!child) {
        attach(0);
        MUST(shmctl(id, IPC_RMID, NULL));
        show_attached();
        MUST(write(ends[1], "x", 1));
        pause();
        _exit(0);
    }
    char byte;
    MUST(read(ends[0], &byte, 1));
    show_attached();
    MUST(kill(child, SIGKILL));
    finish(child);
    struct shmid_ds found;
    TRY(shmctl(id, IPC_STAT, &found));
}

static void permissions(void)
{
    PART("permissions");
    pid_t child = MUST(fork());
    if (!child) {
        if (geteuid() == 0)
            MUST(setresuid(NOBODY, NOBODY, NOBODY));
        id = (int)MUST(shmget(IPC_PRIVATE, PAGE, 0400));
        OK(shmat(id, NULL, SHM_RDONLY));
        TRY(shmat(id, NULL, 0));
        TRY(shmat(id, NULL, SHM_RDONLY | SHM_EXEC));
        struct shmid_ds found = status();
        found.shm_perm.mode = 0700;
        TRY(shmctl(id, IPC_SET, &found));
        OK(shmat(id, NULL, SHM_EXEC));
        TRY(shmctl(id, SHM_LOCK, NULL));
        show_attached();
        TRY(shmctl(id, SHM_UNLOCK, NULL));
        show_attached();
        TRY(shmctl(id, IPC_RMID, NULL));
        _exit(0);
    }
    finish(child);
    TRY(shmctl(-1, IPC_RMID, NULL));
    TRY(shmctl(0, 77, NULL));
    struct shminfo info;
    IS(shmctl(0, IPC_INFO, (struct shmid_ds *)&info) >= 0);
    say("%lx %lu\n", info.shmmax, info.shmmin);
    struct shm_info usage;
    IS(shmctl(0, SHM_INFO, (struct shmid_ds *)&usage) >= 0);
}

int main(void)
{
    keys();
    attachments();
    processes();
    left_out();
    removal();
    permissions();
    return 0;
}
