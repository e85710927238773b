/* What a handler sees and may change of the interrupted state, as the JVM and
 * Go do; vector state over handlers, switches and forks; nested handlers;
 * siglongjmp; alternate stacks of threads. */
#include "guest.h"
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <ucontext.h>

static char *guard;
static volatile sig_atomic_t handled;

/* Null checks as the JVM makes them: go on elsewhere with another value. */
static void skips(int signal, siginfo_t *info, void *context)
{
    ucontext_t *c = context;
    greg_t *r = c->uc_mcontext.gregs;
    say("%s: code %d address %s trapno %lld error %llx cr2 %s\n", sigabbrev_np(signal), info->si_code,
        info->si_addr == guard + 16 ? "right" : "wrong", r[REG_TRAPNO], r[REG_ERR],
        (char *)r[REG_CR2] == guard + 16 ? "right" : "wrong");
    r[REG_RAX] = 777;
    r[REG_RIP] += 3;
}

static long loads(char *at)
{
    long value = 1;
    /* mov (%rdi),%rax is three bytes long. */
    __asm__ volatile(".byte 0x48, 0x8b, 0x07" : "=a"(value) : "D"(at) : "memory");
    return value;
}

/* Preemption as Go does it: the handler makes the interrupted code call a
 * function that it did not call. That also gives back the red zone. */
static volatile int calls_pushed;
__attribute__((naked)) static void pushed(void)
{
    __asm__("pushfq\n incl %0\n popfq\n ret $128" : : "m"(calls_pushed));
}

static void pushes_call(int signal, siginfo_t *info, void *context)
{
    (void)signal, (void)info;
    ucontext_t *c = context;
    greg_t *r = c->uc_mcontext.gregs;
    r[REG_RSP] -= 128 + 8;
    *(greg_t *)r[REG_RSP] = r[REG_RIP];
    r[REG_RIP] = (greg_t)pushed;
    handled++;
}

__attribute__((noinline)) static long spins(volatile int *until, int count)
{
    long turns = 0;
    while (*until < count)
        turns++;
    return turns;
}

static void counts(int signal) { handled += signal != 0; }

/* Keeps values in vector registers and sees whether they stay. */
__attribute__((target("avx2"))) static int keeps_avx(int seed, volatile int *until, int count)
{
    __m256i a = _mm256_set1_epi32(seed), b = _mm256_set1_epi32(seed * 3), c = _mm256_setzero_si256();
    while (*until < count) {
        __asm__ volatile("" : "+x"(a), "+x"(b), "+x"(c));
        c = _mm256_add_epi32(_mm256_sub_epi32(b, a), _mm256_sub_epi32(a, b));
        __m256i wrong = _mm256_or_si256(_mm256_xor_si256(a, _mm256_set1_epi32(seed)), c);
        if (!_mm256_testz_si256(wrong, wrong))
            return 0;
    }
    return 1;
}

static int keeps_x87(volatile int *until, int count)
{
    unsigned short control = 0x0c7f, now;
    __asm__ volatile("fldcw %0\n fldpi" : : "m"(control));
    while (*until < count)
        ;
    long double pi;
    __asm__ volatile("fstpt %0\n fnstcw %1" : "=m"(pi), "=m"(now));
    __asm__ volatile("fninit");
    return now == control && pi > 3.14159L && pi < 3.1416L;
}

__attribute__((target("avx2"))) static void dirties(int signal)
{
    (void)signal;
    unsigned short control;
    __asm__ volatile("fnstcw %0" : "=m"(control));
    unsigned mxcsr = _mm_getcsr();
    if (control != 0x37f || mxcsr != 0x1f80)
        say("the handler starts with control word %x and mxcsr %x\n", control, mxcsr);
    __asm__ volatile("vpcmpeqd %%ymm0, %%ymm0, %%ymm0\n vmovdqa %%ymm0, %%ymm1\n vmovdqa %%ymm0, %%ymm2\n"
                     "vmovdqa %%ymm0, %%ymm15\n fninit\n fldz\n fldz" ::: "xmm0", "xmm1", "xmm2", "xmm15");
    handled++;
}

static void every(long microseconds)
{
    struct itimerval timer = {{0, microseconds}, {0, microseconds}};
    setitimer(ITIMER_REAL, &timer, NULL);
}

static volatile int switches;
static void *keeps_in_thread(void *argument)
{
    return (void *)(long)keeps_avx((int)(long)argument, &switches, 1);
}

static sigjmp_buf jump;
static volatile int depth;
static void jumps(int signal) { siglongjmp(jump, signal); }
static void nests(int signal)
{
    depth++;
    if (depth < 100)
        raise(signal);
}

static char thread_stacks[4][32768];
static void *faults_on_own_stack(void *argument);
static __thread char *expected;
static __thread sigjmp_buf thread_jump;
static volatile int on_right_stack;
static void checks_stack(int signal, siginfo_t *info, void *context)
{
    char here;
    (void)signal, (void)info, (void)context;
    if (&here > expected && &here < expected + 32768)
        __atomic_add_fetch(&on_right_stack, 1, __ATOMIC_SEQ_CST);
    siglongjmp(thread_jump, 1);
}
static void *faults_on_own_stack(void *argument)
{
    expected = thread_stacks[(long)argument];
    stack_t stack = {.ss_sp = expected, .ss_size = 32768};
    MUST(sigaltstack(&stack, NULL));
    for (int i = 0; i < 50; i++)
        if (!sigsetjmp(thread_jump, 1))
            *(volatile char *)(guard + 16) = 1;
    return NULL;
}

static void masked(int signal, siginfo_t *info, void *context)
{
    ucontext_t *c = context;
    (void)signal, (void)info;
    sigaddset(&c->uc_sigmask, SIGUSR2);
    handled++;
}

/* Where a handler makes its process go on: at high addresses, in other memory. */
static unsigned long wild_stack, wild_code;

static void goes_wild(int signal, siginfo_t *info, void *context)
{
    greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
    (void)signal, (void)info;
    r[REG_RSP] = (greg_t)wild_stack;
    r[REG_RIP] = (greg_t)wild_code;
    r[REG_EFL] |= 0x40000;
}

static void wild_registers(void)
{
    static const unsigned long places[] = {0, 0x7e0000000000, 0x7e0000100000, 0x7e1000000000, 0x800000000000};
    struct sigaction wild = {.sa_sigaction = goes_wild, .sa_flags = SA_SIGINFO};
    sigaction(SIGUSR1, &wild, NULL);
    signal(SIGSEGV, SIG_DFL);
    signal(SIGBUS, SIG_DFL);
    for (size_t i = 0; i < 25; i++) {
        wild_stack = places[i / 5];
        wild_code = places[i % 5];
        pid_t child = fork();
        if (!child) {
            raise(SIGUSR1);
            _exit(1);
        }
        int status;
        waitpid(child, &status, 0);
        /* By which signal depends on the instructions that lie there. */
        say("%s ", WIFSIGNALED(status) ? "killed" : "no signal");
    }
    say("\n");
}

int main(void)
{
    guard = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct sigaction action = {.sa_sigaction = skips, .sa_flags = SA_SIGINFO};

    PART("a fault is skipped");
    sigaction(SIGSEGV, &action, NULL);
    for (int i = 0; i < 3; i++)
        say("value %ld\n", loads(guard + 16));
    MUST(munmap(guard, 4096));
    say("value %ld\n", loads(guard + 16));

    PART("calls pushed into a loop");
    action.sa_sigaction = pushes_call;
    sigaction(SIGALRM, &action, NULL);
    every(500);
    spins(&calls_pushed, 50);
    every(0);
    IS(calls_pushed >= 50);

    PART("vector state over handlers");
    signal(SIGALRM, dirties);
    if (__builtin_cpu_supports("avx2")) {
        handled = 0;
        every(300);
        say("AVX %d\n", keeps_avx(5, &handled, 50));
        handled = 0;
        say("x87 %d\n", keeps_x87(&handled, 20));
        every(0);
        PART("vector state of threads");
        pthread_t threads[4];
        signal(SIGALRM, counts);
        for (long i = 0; i < 4; i++)
            pthread_create(&threads[i], NULL, keeps_in_thread, (void *)(i + 7));
        pid_t child = MUST(fork());
        if (!child)
            _exit(0);
        for (int i = 0; i < 20; i++)
            sched_yield();
        usleep(30000);
        switches = 1;
        long kept = 0;
        for (int i = 0; i < 4; i++) {
            void *result;
            pthread_join(threads[i], &result);
            kept += (long)result;
        }
        MUST(waitpid(child, NULL, 0));
        say("kept %ld\n", kept);
        PART("a child has the registers of its maker");
        __m128i value = _mm_set_epi32(1, 2, 3, 4);
        __asm__ volatile("movdqa %0, %%xmm14" : : "x"(value) : "xmm14");
        child = (pid_t)MUST(fork());
        if (!child) {
            __m128i seen;
            __asm__ volatile("movdqa %%xmm14, %0" : "=x"(seen));
            _exit(_mm_movemask_epi8(_mm_cmpeq_epi8(seen, value)) == 0xffff);
        }
        int status;
        MUST(waitpid(child, &status, 0));
        say("status %x\n", status);
    }

    PART("rounding modes stay");
    unsigned mxcsr = _mm_getcsr() | 0x6000;
    _mm_setcsr(mxcsr);
    signal(SIGUSR1, dirties);
    raise(SIGUSR1);
    usleep(100);
    IS(_mm_getcsr() == mxcsr);
    _mm_setcsr(mxcsr & ~0x6000u);

    PART("jumps and nesting");
    signal(SIGUSR1, jumps);
    int jumped = 0;
    for (int i = 0; i < 100; i++)
        if (!sigsetjmp(jump, 1))
            raise(SIGUSR1);
        else
            jumped++;
    say("jumped %d\n", jumped);
    action = (struct sigaction){.sa_handler = nests, .sa_flags = SA_NODEFER};
    sigaction(SIGUSR1, &action, NULL);
    raise(SIGUSR1);
    say("depth %d\n", depth);

    PART("alternate stacks of threads");
    guard = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    action = (struct sigaction){.sa_sigaction = checks_stack, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigaction(SIGSEGV, &action, NULL);
    pthread_t threads[4];
    for (long i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, faults_on_own_stack, (void *)i);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    say("on the right stack %d\n", on_right_stack);

    PART("the mask in the context counts");
    action = (struct sigaction){.sa_sigaction = masked, .sa_flags = SA_SIGINFO};
    sigaction(SIGUSR1, &action, NULL);
    raise(SIGUSR1);
    sigset_t now;
    sigprocmask(SIG_SETMASK, NULL, &now);
    say("blocked %d\n", sigismember(&now, SIGUSR2));

    PART("wild registers end their process only");
    wild_registers();
    return 0;
}
