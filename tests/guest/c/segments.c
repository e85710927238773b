/* The segment registers: %fs and %gs of a thread, set by arch_prctl(2) and by the
 * program itself, through system calls, signals, threads, forks and time slices. */
#include "guest.h"
#include <asm/prctl.h>
#include <pthread.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>

#define THREADS 4

static uint64_t of_gs(void)
{
    uint64_t value;
    asm volatile("movq %%gs:0, %0" : "=r"(value));
    return value;
}

__attribute__((target("fsgsbase"))) static void set_gs(const void *base)
{
    __builtin_ia32_wrgsbase64((uint64_t)base);
}

__attribute__((target("fsgsbase"))) static uint64_t gs(void)
{
    return __builtin_ia32_rdgsbase64();
}

static volatile int ticks;

static void on_alarm(int signal)
{
    ticks += signal == SIGALRM;
    getppid();
}

/* Sets %gs, does much that leads through the kernel, sets what was there. */
static void *use(void *argument)
{
    uint64_t values[16] = {(uint64_t)argument};
    uint64_t before = gs(), wrong = 0;
    int previous = ticks;
    set_gs(values);
    for (int i = 0; i < 3000 || ticks < previous + 20; i++) {
        wrong += of_gs() != (uint64_t)argument || gs() != (uint64_t)values;
        getppid();
        wrong += of_gs() != (uint64_t)argument;
        if (i % 64 == 0) {
            char *page = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            page[4096] = 1; /* a fault */
            wrong += of_gs() != (uint64_t)argument;
            munmap(page, 8192);
            /* As those do that use it for a while only. */
            set_gs((void *)before);
            getppid();
            set_gs(values);
        }
    }
    set_gs((void *)before);
    getppid();
    return (void *)wrong;
}

static void *inherits(void *values)
{
    return (void *)(uint64_t)(gs() == (uint64_t)values);
}

int main(void)
{
    uint64_t base = 0, values[16] = {42};
    PART("arch_prctl");
    TRY(syscall(SYS_arch_prctl, ARCH_GET_GS, &base));
    IS(base == 0);
    TRY(syscall(SYS_arch_prctl, ARCH_SET_GS, values));
    IS(of_gs() == 42);
    TRY(syscall(SYS_arch_prctl, ARCH_GET_GS, &base));
    IS(base == (uint64_t)values);
    TRY(syscall(SYS_arch_prctl, ARCH_SET_GS, 1UL << 63));
    TRY(syscall(SYS_arch_prctl, ARCH_GET_GS, 8));
    TRY(syscall(SYS_arch_prctl, ARCH_GET_FS, &base));
    IS(*(uint64_t *)base == base);

    PART("who inherits it");
    pid_t child = fork();
    if (child == 0)
        _exit(of_gs() == 42 ? 0 : 1);
    int status;
    waitpid(child, &status, 0);
    IS(status == 0);
    pthread_t thread, threads[THREADS];
    void *result;
    pthread_create(&thread, NULL, inherits, values);
    pthread_join(thread, &result);
    IS(result != NULL);

    if (!(getauxval(AT_HWCAP2) & 2))
        return 0; /* no FSGSBASE */
    PART("wrgsbase");
    signal(SIGALRM, on_alarm);
    struct itimerval every = {{0, 2000}, {0, 2000}};
    setitimer(ITIMER_REAL, &every, NULL);
    IS(use((void *)7) == NULL);
    for (uintptr_t i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, use, (void *)(100 + i));
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], &result);
        IS(result == NULL);
    }
    IS(of_gs() == 42);
    /* Where nothing can be read. */
    set_gs((void *)0x7000);
    IS(getppid() >= 0 && gs() == 0x7000);
    return 0;
}
