/* mprotect(2) and what touching forbidden memory gives: signal, si_code and
 * si_addr, also from system calls (EFAULT). */
#include "guest.h"
#include <setjmp.h>
#include <sys/mman.h>

#define PAGE 4096UL
#define RW (PROT_READ | PROT_WRITE)

static sigjmp_buf back;
static volatile bool armed; /* a fault is expected */
static volatile sig_atomic_t seen_signal, seen_code;
static char *volatile seen_address;

static void on_fault(int signal, siginfo_t *info, void *context)
{
    (void)context;
    if (!armed)
        _exit(97);
    seen_signal = signal;
    seen_code = info->si_code;
    seen_address = info->si_addr;
    siglongjmp(back, 1);
}

static const char *code_name(void)
{
    if (seen_signal == SIGSEGV)
        return seen_code == SEGV_MAPERR ? "MAPERR" : seen_code == SEGV_ACCERR ? "ACCERR" : "?";
    return seen_code == BUS_ADRERR ? "ADRERR" : seen_code == BUS_ADRALN ? "ADRALN" : "?";
}

enum how { READ, WRITE, EXECUTE };

static void touch(const char *what, char *at, enum how how)
{
    static const char *names[] = {"read", "write", "execute"};
    armed = true;
    if (sigsetjmp(back, 1) == 0) {
        if (how == READ)
            (void)*(volatile char *)at;
        else if (how == WRITE)
            *(volatile char *)at = 1;
        else
            ((void (*)(void))at)();
        armed = false;
        say("%s %s: fine\n", what, names[how]);
        return;
    }
    say("%s %s: %s %s address %s\n", what, names[how], sigabbrev_np(seen_signal), code_name(),
        seen_address == at ? "right" : "wrong");
    armed = false;
}

int main(void)
{
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    MUST(sigaction(SIGSEGV, &action, NULL));
    MUST(sigaction(SIGBUS, &action, NULL));

    char *p = mmap(NULL, 8 * PAGE, RW, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    MUST(munmap(p + 7 * PAGE, PAGE));
    memset(p, 0xc3, 4 * PAGE); /* ret */

    PART("faults");
    touch("unmapped", p + 7 * PAGE + 5, READ);
    touch("unmapped", p + 7 * PAGE + 5, WRITE);
    touch("page zero", (char *)8, READ);
    touch("page zero", (char *)8, WRITE);
    touch("page zero", (char *)8, EXECUTE);
    touch("not executable", p, EXECUTE);
    TRY(mprotect(p, PAGE, PROT_READ));
    touch("read only", p + 10, READ);
    touch("read only", p + 10, WRITE);
    TRY(mprotect(p, PAGE, PROT_NONE));
    touch("none", p + 10, READ);
    touch("none", p + 10, WRITE);
    TRY(mprotect(p, PAGE, PROT_READ | PROT_EXEC));
    touch("executable", p, EXECUTE);
    touch("executable", p, WRITE);
    TRY(mprotect(p, PAGE, RW));
    touch("again", p, WRITE);
    touch("kernel half", (char *)0xffff800000000000, READ);
    touch("text", (char *)main, WRITE);

    PART("across pages");
    TRY(mprotect(p, 6 * PAGE, PROT_READ));
    TRY(mprotect(p + 2 * PAGE, 2 * PAGE, RW));
    touch("page 1", p + PAGE, WRITE);
    touch("page 2", p + 2 * PAGE, WRITE);
    touch("page 3", p + 4 * PAGE - 1, WRITE);
    touch("page 4", p + 4 * PAGE, WRITE);
    TRY(mprotect(p, 6 * PAGE, RW));
    touch("page 1", p + PAGE, WRITE);
    IS((unsigned char)p[1] == 0xc3);
    armed = true;
    if (sigsetjmp(back, 1) == 0) {
        *(volatile uint64_t *)(p + 7 * PAGE - 4) = 1;
        say("no fault\n");
    } else {
        say("straddling: %s %s at the unmapped page: %s\n", sigabbrev_np(seen_signal), code_name(),
            seen_address == p + 7 * PAGE ? "yes" : "no");
    }

    PART("errors");
    TRY(mprotect(p + 1, PAGE, RW));
    TRY(mprotect(p, 0, RW));
    TRY(mprotect(p, 8 * PAGE, PROT_READ)); /* the last page is missing */
    touch("before the hole", p + 6 * PAGE, WRITE);
    TRY(mprotect(p, 7 * PAGE, RW));
    TRY(mprotect(p, PAGE, 0x100));
    TRY(mprotect((void *)(1UL << 62), PAGE, RW));
    TRY(mprotect(p, ~0UL - 10, RW));
    int fd = MUST(open("/proc/self/exe", O_RDONLY));
    errno = 0;
    IS(mmap(NULL, PAGE, RW, MAP_SHARED, fd, 0) == MAP_FAILED && errno == EACCES);
    char *file = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, 0);
    TRY(mprotect(file, PAGE, RW));
    char *private = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, fd, 0);
    TRY(mprotect(private, PAGE, RW));
    touch("private file page", private, WRITE);

    PART("faults in system calls");
    TRY(mprotect(p, PAGE, PROT_READ));
    int ends[2];
    MUST(pipe(ends));
    TRY(write(ends[1], "0123456789", 10));
    TRY(read(ends[0], p, 4));
    TRY(mprotect(p, PAGE, PROT_NONE));
    TRY(write(ends[1], p, 4));
    TRY(write(ends[1], p + PAGE - 2, 4));
    TRY(mprotect(p, PAGE, RW));
    TRY(read(ends[0], p, 4));
    TRY(pipe((int *)8));
    TRY(clock_gettime(CLOCK_REALTIME, (void *)p));
    TRY(syscall(SYS_clock_gettime, CLOCK_REALTIME, 8));
    TRY(syscall(SYS_rt_sigaction, SIGUSR1, 8, 0, 8));
    TRY(syscall(SYS_nanosleep, 8, 0));

    PART("a guard page under a stack");
    char *guard = mmap(NULL, 4 * PAGE, RW, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TRY(mprotect(guard, PAGE, PROT_NONE));
    touch("guard", guard + PAGE - 8, WRITE);
    touch("above the guard", guard + PAGE, WRITE);
    return 0;
}
