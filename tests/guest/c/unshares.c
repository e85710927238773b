/* unshare(2) without new namespaces: files, directories, semaphore adjustments. */
#include "guest.h"
#include <pthread.h>
#include <sched.h>
#include <sys/sem.h>
#include <sys/wait.h>

static void finish(void)
{
    int code;
    MUST(waitpid(-1, &code, __WALL));
    say("status %x\n", code);
}

static pid_t share(unsigned long flags)
{
    return (pid_t)MUST(syscall(SYS_clone, flags | SIGCHLD, 0, 0, 0, 0));
}

static void flags(void)
{
    PART("flags");
    TRY(unshare(0));
    TRY(unshare(CLONE_THREAD | CLONE_SIGHAND | CLONE_VM));
    TRY(unshare(CLONE_FILES | CLONE_FS | CLONE_SYSVSEM));
    TRY(unshare(1));
    TRY(unshare(CLONE_PARENT));
    TRY(unshare(CLONE_PIDFD));
    TRY(syscall(SYS_unshare, 1UL << 32));
}

static void files(void)
{
    PART("files");
    pid_t child = share(CLONE_FILES);
    if (!child) {
        MUST(dup2(1, 77));
        TRY(unshare(CLONE_FILES));
        TRY(fcntl(77, F_GETFD));
        MUST(dup2(1, 78));
        MUST(close(77));
        _exit(0);
    }
    finish();
    TRY(fcntl(77, F_GETFD));
    TRY(fcntl(78, F_GETFD));
    close(77);
}

static void directories(void)
{
    PART("directories");
    MUST(chdir("/"));
    umask(022);
    pid_t child = share(CLONE_FS);
    if (!child) {
        MUST(chdir("/tmp"));
        TRY(unshare(CLONE_FS));
        char where[64];
        say("in %s\n", getcwd(where, sizeof where));
        MUST(chdir("/proc"));
        umask(077);
        _exit(0);
    }
    finish();
    char where[64];
    say("in %s, umask %o\n", getcwd(where, sizeof where), umask(022));
}

static void semaphores(void)
{
    PART("semaphores");
    int id = MUST(semget(IPC_PRIVATE, 1, 0600));
    pid_t child = MUST(fork());
    if (!child) {
        struct sembuf up = {0, 3, SEM_UNDO};
        MUST(semop(id, &up, 1));
        say("value %d\n", semctl(id, 0, GETVAL));
        TRY(unshare(CLONE_SYSVSEM));
        say("value %d\n", semctl(id, 0, GETVAL));
        _exit(0);
    }
    finish();
    MUST(semctl(id, 0, IPC_RMID));
}

static void *wait_for(void *barrier)
{
    pthread_barrier_wait(barrier);
    pthread_barrier_wait(barrier);
    return NULL;
}

static void threads(void)
{
    PART("threads");
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, NULL, 2);
    pthread_t thread;
    CODE(pthread_create(&thread, NULL, wait_for, &barrier));
    pthread_barrier_wait(&barrier);
    TRY(unshare(0));
    TRY(unshare(CLONE_THREAD));
    TRY(unshare(CLONE_SIGHAND));
    TRY(unshare(CLONE_VM));
    TRY(unshare(CLONE_NEWUSER));
    pthread_barrier_wait(&barrier);
    CODE(pthread_join(thread, NULL));
}

/* What a process without privileges may not have. */
static void namespaces(void)
{
    PART("namespaces");
    pid_t child = MUST(fork());
    if (!child) {
        MUST(setgid(65534));
        MUST(setuid(65534));
        TRY(unshare(CLONE_NEWNS));
        TRY(unshare(CLONE_NEWUTS));
        TRY(unshare(CLONE_NEWIPC));
        TRY(unshare(CLONE_NEWPID));
        TRY(unshare(CLONE_NEWNET));
        TRY(unshare(CLONE_NEWCGROUP));
        _exit(0);
    }
    finish();
}

int main(void)
{
    flags();
    files();
    directories();
    semaphores();
    threads();
    namespaces();
    return 0;
}
