/* ptrace(2): stops at signals, system calls and events, memory, registers, breakpoints, attaching and
 * detaching, the ends of tracers and tracees; process_vm_readv(2) and /proc/PID/mem. */
#include "guest.h"

#include <asm/prctl.h>
#include <elf.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>

static volatile long shared_number = 41;

__attribute__((noinline)) static int marked(int x)
{
    __asm__ volatile("nop");
    return x + 1;
}

static pid_t start_traced(void (*run)(void))
{
    pid_t pid = fork();
    if (pid == 0) {
        if (ptrace(PTRACE_TRACEME, 0, 0, 0) < 0)
            _exit(99);
        raise(SIGSTOP);
        run();
        _exit(7);
    }
    await_child(pid, "first stop");
    return pid;
}

static void go(int request, pid_t pid, long signal)
{
    if (ptrace(request, pid, 0, signal) < 0)
        say("going on: %s\n", error_name(errno));
}

static void make_calls(void)
{
    syscall(SYS_getppid);
    syscall(SYS_close, 12345);
    syscall(SYS_getuid);
}

static void system_calls(void)
{
    PART("system calls");
    pid_t pid = start_traced(make_calls);
    TRY(ptrace(PTRACE_SETOPTIONS, pid, 0, PTRACE_O_TRACESYSGOOD));
    for (int i = 0; i < 6; i++) {
        go(PTRACE_SYSCALL, pid, 0);
        await_child(pid, i % 2 ? "end" : "begin");
        struct user_regs_struct registers;
        ptrace(PTRACE_GETREGS, pid, 0, &registers);
        struct __ptrace_syscall_info info;
        long size = ptrace(PTRACE_GET_SYSCALL_INFO, pid, sizeof info, &info);
        say("size %ld, kind %d, ip right: %d\n", size, info.op, info.instruction_pointer == registers.rip);
        long code = ptrace(PTRACE_PEEKTEXT, pid, registers.rip - 2, 0);
        say("behind a syscall instruction: %d\n", (code & 0xffff) == 0x050f);
        if (info.op == PTRACE_SYSCALL_INFO_ENTRY) {
            say("call %lld, rax %lld\n", (long long)registers.orig_rax, (long long)registers.rax);
            if (info.entry.nr == SYS_getuid) {
                /* Another call in its place. */
                registers.orig_rax = SYS_close;
                registers.rdi = 4321;
                TRY(ptrace(PTRACE_SETREGS, pid, 0, &registers));
            }
        } else if (registers.orig_rax == SYS_close)
            say("result %lld, error %d\n", (long long)registers.rax, info.exit.is_error);
    }
    siginfo_t info;
    TRY(ptrace(PTRACE_GETSIGINFO, pid, 0, &info));
    say("signal %d, code %#x\n", info.si_signo, info.si_code);
    go(PTRACE_CONT, pid, 0);
    await_child(pid, "end");
}

static void work_on_number(void)
{
    shared_number = marked((int)shared_number);
    _exit((int)shared_number);
}

static void memory_and_breakpoints(void)
{
    PART("memory and breakpoints");
    pid_t pid = start_traced(work_on_number);
    say("number %ld\n", ptrace(PTRACE_PEEKDATA, pid, &shared_number, 0));
    TRY(ptrace(PTRACE_POKEDATA, pid, &shared_number, 50));
    TRY(ptrace(PTRACE_PEEKDATA, pid, 8, 0));
    TRY(ptrace(PTRACE_POKEDATA, pid, 8, 0));
    long old = ptrace(PTRACE_PEEKTEXT, pid, marked, 0);
    TRY(ptrace(PTRACE_POKETEXT, pid, marked, (old & ~0xffL) | 0xcc));
    go(PTRACE_CONT, pid, 0);
    await_child(pid, "breakpoint");
    siginfo_t info;
    ptrace(PTRACE_GETSIGINFO, pid, 0, &info);
    struct user_regs_struct registers;
    ptrace(PTRACE_GETREGS, pid, 0, &registers);
    say("code %#x, behind the breakpoint: %d, argument %d\n", info.si_code,
        registers.rip == (unsigned long)marked + 1, (int)registers.rdi);
    TRY(ptrace(PTRACE_POKETEXT, pid, marked, old));
    registers.rip--;
    registers.rdi = 60;
    TRY(ptrace(PTRACE_SETREGS, pid, 0, &registers));
    unsigned long before = registers.rip;
    for (int i = 0; i < 3; i++) {
        go(PTRACE_SINGLESTEP, pid, 0);
        await_child(pid, "step");
        ptrace(PTRACE_GETSIGINFO, pid, 0, &info);
        unsigned long rip = (unsigned long)ptrace(PTRACE_PEEKUSER, pid, offsetof(struct user, regs.rip), 0);
        say("code %d, moved: %d\n", info.si_code, rip != before && rip - before < 16);
        before = rip;
    }
    long flags = ptrace(PTRACE_PEEKUSER, pid, offsetof(struct user, regs.eflags), 0);
    say("trap flag: %d\n", (flags & 0x100) != 0);
    say("debug register: %ld\n", ptrace(PTRACE_PEEKUSER, pid, offsetof(struct user, u_debugreg[7]), 0));
    TRY(ptrace(PTRACE_PEEKUSER, pid, 3, 0));
    // As gdbserver asks for the data of a thread.
    unsigned long base = 0;
    TRY(ptrace(PTRACE_ARCH_PRCTL, pid, &base, ARCH_GET_FS));
    say("base of %%fs: %d\n", base != 0 && base == registers.fs_base);
    TRY(ptrace(PTRACE_ARCH_PRCTL, pid, &base, ARCH_GET_GS));
    say("base of %%gs: %lu\n", base);
    TRY(ptrace(PTRACE_ARCH_PRCTL, pid, registers.fs_base + 4096, ARCH_SET_FS));
    TRY(ptrace(PTRACE_ARCH_PRCTL, pid, &base, ARCH_GET_FS));
    say("moved by %lu\n", base - (unsigned long)registers.fs_base);
    TRY(ptrace(PTRACE_ARCH_PRCTL, pid, registers.fs_base, ARCH_SET_FS));
    TRY(ptrace(PTRACE_ARCH_PRCTL, pid, -1L, ARCH_SET_FS));
    TRY(ptrace(PTRACE_ARCH_PRCTL, pid, 1, ARCH_GET_FS));
    TRY(ptrace(PTRACE_ARCH_PRCTL, pid, &base, 0x1011));
    go(PTRACE_CONT, pid, 0);
    await_child(pid, "end");
}

static volatile int watched[4];

static void touch(int signal)
{
    (void)signal;
    watched[0] = 5;
}

static void write_values(void)
{
    signal(SIGUSR1, touch);
    for (int i = 0; i < 3; i++)
        watched[1] = i;
    watched[0] = 3;
    raise(SIGUSR1);
    watched[2] = marked(6);
    _exit(watched[0] + watched[2]);
}

/* What the registers say of a stop, and where it is. */
static void say_watched(pid_t pid, const char *what)
{
    await_child(pid, what);
    siginfo_t info = {0};
    ptrace(PTRACE_GETSIGINFO, pid, 0, &info);
    long status = ptrace(PTRACE_PEEKUSER, pid, offsetof(struct user, u_debugreg[6]), 0);
    long ip = ptrace(PTRACE_PEEKUSER, pid, offsetof(struct user, regs.rip), 0);
    errno = 0;
    int value = (int)ptrace(PTRACE_PEEKDATA, pid, watched, 0);
    say("code %d, status %#lx, value %d, at the function: %d\n", info.si_code, status & 0x400f, value,
        ip == (long)marked);
}

static void watchpoints(void)
{
    PART("watchpoints");
    pid_t pid = start_traced(write_values);
    TRY(ptrace(PTRACE_POKEUSER, pid, offsetof(struct user, u_debugreg[0]), watched));
    TRY(ptrace(PTRACE_POKEUSER, pid, offsetof(struct user, u_debugreg[3]), marked));
    TRY(ptrace(PTRACE_POKEUSER, pid, offsetof(struct user, u_debugreg[1]), -1L));
    TRY(ptrace(PTRACE_POKEUSER, pid, offsetof(struct user, u_debugreg[4]), 1));
    /* Four bytes that are written, and an instruction. */
    TRY(ptrace(PTRACE_POKEUSER, pid, offsetof(struct user, u_debugreg[7]), 0xd0000L | 1 | 1 << 6));
    say("control %#lx\n", ptrace(PTRACE_PEEKUSER, pid, offsetof(struct user, u_debugreg[7]), 0));
    go(PTRACE_CONT, pid, 0);
    say_watched(pid, "value");
    go(PTRACE_CONT, pid, 0);
    await_child(pid, "signal");
    go(PTRACE_CONT, pid, SIGUSR1);
    say_watched(pid, "value in a handler");
    TRY(ptrace(PTRACE_POKEDATA, pid, watched, 11));
    go(PTRACE_CONT, pid, 0);
    say_watched(pid, "function");
    TRY(ptrace(PTRACE_POKEUSER, pid, offsetof(struct user, u_debugreg[7]), 0));
    go(PTRACE_SINGLESTEP, pid, 0);
    await_child(pid, "step");
    go(PTRACE_CONT, pid, 0);
    await_child(pid, "end");
}

static void step_over_call(void)
{
    __asm__ volatile("mov $110, %%eax\nsyscall\nmov $77, %%edi\nmov $231, %%eax\nsyscall" ::: "rax", "rcx", "r11");
}

static void steps_over_calls(void)
{
    PART("steps over system calls");
    pid_t pid = start_traced(step_over_call);
    int calls = 0, steps = 0;
    for (; steps < 100000; steps++) {
        struct user_regs_struct registers;
        ptrace(PTRACE_GETREGS, pid, 0, &registers);
        long code = ptrace(PTRACE_PEEKTEXT, pid, registers.rip, 0);
        bool at_call = (code & 0xffff) == 0x050f;
        bool last = at_call && registers.rax == 231;
        ptrace(PTRACE_SINGLESTEP, pid, 0, 0);
        int status;
        waitpid(pid, &status, 0);
        if (!WIFSTOPPED(status)) {
            say("exited with %d, at the last call: %d\n", WEXITSTATUS(status), last);
            break;
        }
        if (at_call && registers.rax == 110) {
            unsigned long rip = (unsigned long)ptrace(PTRACE_PEEKUSER, pid, offsetof(struct user, regs.rip), 0);
            say("stopped behind the call: %d, by %d\n", rip == registers.rip + 2, WSTOPSIG(status));
            calls++;
        }
    }
    say("calls %d\n", calls);
}

static volatile sig_atomic_t handled;
static void on_signal(int signal)
{
    handled += signal;
}

static void raise_signals(void)
{
    signal(SIGUSR1, on_signal);
    signal(SIGUSR2, SIG_IGN);
    raise(SIGUSR1);
    raise(SIGUSR2);
    raise(SIGUSR1);
    _exit(handled);
}

static void signals(void)
{
    PART("signals");
    pid_t pid = start_traced(raise_signals);
    go(PTRACE_CONT, pid, 0);
    await_child(pid, "handled");
    unsigned long long mask = 0;
    TRY(ptrace(PTRACE_GETSIGMASK, pid, 8, &mask));
    go(PTRACE_CONT, pid, 0);
    await_child(pid, "ignored");
    go(PTRACE_CONT, pid, SIGUSR2);
    await_child(pid, "handled");
    siginfo_t info;
    waitid(P_PID, (id_t)pid, &info, WNOHANG | WSTOPPED | WNOWAIT);
    go(PTRACE_CONT, pid, SIGUSR1);
    await_child(pid, "end: one of two handled");
    pid = start_traced(raise_signals);
    go(PTRACE_CONT, pid, SIGKILL);
    await_child(pid, "killed");
}

static void registers(void)
{
    PART("register sets");
    pid_t pid = start_traced(make_calls);
    struct user_fpregs_struct vectors;
    TRY(ptrace(PTRACE_GETFPREGS, pid, 0, &vectors));
    say("control words %#x %#x\n", vectors.cwd, vectors.mxcsr);
    vectors.xmm_space[0] = 0x1234;
    TRY(ptrace(PTRACE_SETFPREGS, pid, 0, &vectors));
    static unsigned char area[16384] __attribute__((aligned(64)));
    struct iovec vector = {area, sizeof area};
    TRY(ptrace(PTRACE_GETREGSET, pid, NT_X86_XSTATE, &vector));
    say("xmm0 %#x\n", *(unsigned *)(area + 160));
    area[160] = 0x56;
    TRY(ptrace(PTRACE_SETREGSET, pid, NT_X86_XSTATE, &vector));
    vector = (struct iovec){&vectors, sizeof vectors};
    TRY(ptrace(PTRACE_GETREGSET, pid, NT_PRFPREG, &vector));
    say("%zu bytes, xmm0 %#x\n", vector.iov_len, vectors.xmm_space[0]);
    struct user_regs_struct general;
    vector = (struct iovec){&general, sizeof general};
    TRY(ptrace(PTRACE_GETREGSET, pid, NT_PRSTATUS, &vector));
    say("%zu bytes, cs %#llx\n", vector.iov_len, general.cs);
    TRY(ptrace(PTRACE_GETREGSET, pid, 0x7777, &vector));
    TRY(ptrace(PTRACE_CONT, pid, 0, 1000));
    TRY(ptrace(PTRACE_SETOPTIONS, pid, 0, 0x8000));
    go(PTRACE_DETACH, pid, 0);
    await_child(pid, "detached");
}

static void *in_thread(void *unused)
{
    (void)unused;
    return NULL;
}

static void have_children(void)
{
    pid_t child = fork();
    if (child == 0)
        _exit(3);
    waitpid(child, NULL, 0);
    pthread_t thread;
    pthread_create(&thread, NULL, in_thread, NULL);
    pthread_join(thread, NULL);
    execl("/bin/true", "true", NULL);
}

static void events(void)
{
    PART("events");
    pid_t pid = start_traced(have_children);
    TRY(ptrace(PTRACE_SETOPTIONS, pid, 0,
               PTRACE_O_TRACEFORK | PTRACE_O_TRACECLONE | PTRACE_O_TRACEEXEC | PTRACE_O_TRACEEXIT));
    go(PTRACE_CONT, pid, 0);
    int forks = 0, clones = 0, execs = 0, exits = 0, begun = 0, ended = 0;
    pid_t who;
    int status;
    while ((who = waitpid(-1, &status, __WALL)) > 0) {
        int event = status >> 16;
        long signal = 0;
        if (!WIFSTOPPED(status)) {
            ended++;
            if (who == pid)
                say("main thread ends with %d\n", WEXITSTATUS(status));
            continue;
        }
        unsigned long message = 0;
        ptrace(PTRACE_GETEVENTMSG, who, 0, &message);
        forks += event == PTRACE_EVENT_FORK && message != 0;
        clones += event == PTRACE_EVENT_CLONE && message != 0;
        execs += event == PTRACE_EVENT_EXEC && message == (unsigned long)pid;
        exits += event == PTRACE_EVENT_EXIT;
        if (event == 0 && WSTOPSIG(status) == SIGSTOP)
            begun++;
        else if (event == 0)
            signal = WSTOPSIG(status);
        ptrace(PTRACE_CONT, who, 0, signal);
    }
    say("forks %d, clones %d, execs %d, exits %d, begun %d, ended %d\n", forks, clones, execs, exits, begun,
        ended);
}

static void sleep_for_ever(void)
{
    for (;;)
        pause();
}

static void say_state(pid_t pid)
{
    char path[64], line[256];
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file)) {
        if (!strncmp(line, "State:", 6) && strchr(line, 't'))
            say("%s", line);
        if (!strncmp(line, "TracerPid:", 10))
            say("traced by this process: %d\n", atoi(line + 10) == getpid());
    }
    if (file)
        fclose(file);
}

static void attaching(void)
{
    PART("attaching");
    pid_t pid = fork();
    if (pid == 0)
        sleep_for_ever();
    TRY(ptrace(PTRACE_CONT, pid, 0, 0));
    TRY(ptrace(PTRACE_ATTACH, pid, 0, 0));
    TRY(ptrace(PTRACE_ATTACH, getpid(), 0, 0));
    await_child(pid, "attached");
    TRY(ptrace(PTRACE_ATTACH, pid, 0, 0));
    say_state(pid);
    long number = 0;
    struct iovec local = {&number, sizeof number}, remote = {(void *)&shared_number, sizeof number};
    TRY(process_vm_readv(pid, &local, 1, &remote, 1, 0));
    say("number %ld\n", number);
    number = 90;
    TRY(process_vm_writev(pid, &local, 1, &remote, 1, 0));
    say("number %ld\n", ptrace(PTRACE_PEEKDATA, pid, &shared_number, 0));
    remote.iov_base = (void *)8;
    TRY(process_vm_readv(pid, &local, 1, &remote, 1, 0));
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/mem", pid);
    int mem = open(path, O_RDWR);
    TRY(pread(mem, &number, sizeof number, (off_t)(uintptr_t)&shared_number));
    say("number %ld\n", number);
    unsigned char byte = 0xcc;
    TRY(pwrite(mem, &byte, 1, (off_t)(uintptr_t)marked));
    say("code %#lx\n", ptrace(PTRACE_PEEKTEXT, pid, marked, 0) & 0xff);
    TRY(pread(mem, &number, sizeof number, 8));
    close(mem);
    TRY(ptrace(PTRACE_DETACH, pid, 0, SIGTERM));
    await_child(pid, "detached with a signal");

    pid = fork();
    if (pid == 0)
        sleep_for_ever();
    TRY(ptrace(PTRACE_SEIZE, pid, 0, PTRACE_O_TRACESYSGOOD));
    TRY(waitpid(pid, NULL, WNOHANG | __WALL));
    TRY(ptrace(PTRACE_INTERRUPT, pid, 0, 0));
    await_child(pid, "interrupted");
    go(PTRACE_CONT, pid, 0);
    kill(pid, SIGSTOP);
    await_child(pid, "signal");
    go(PTRACE_CONT, pid, SIGSTOP);
    await_child(pid, "group stop");
    TRY(ptrace(PTRACE_LISTEN, pid, 0, 0));
    kill(pid, SIGCONT);
    await_child(pid, "continued");
    go(PTRACE_CONT, pid, 0);
    await_child(pid, "signal");
    go(PTRACE_CONT, pid, 0);
    kill(pid, SIGKILL);
    await_child(pid, "killed");
}

/* A tracer that is not the parent ends; the parent hears of the tracee. */
static void tracer_ends(long options, const char *what)
{
    int ready[2];
    char byte = 0;
    if (pipe(ready) < 0)
        return;
    pid_t tracee = fork();
    if (tracee == 0)
        sleep_for_ever();
    pid_t tracer = fork();
    if (tracer == 0) {
        ptrace(PTRACE_SEIZE, tracee, 0, options);
        ptrace(PTRACE_INTERRUPT, tracee, 0, 0);
        waitpid(tracee, NULL, __WALL);
        if (write(ready[1], &byte, 1) != 1)
            _exit(1);
        _exit(0);
    }
    if (read(ready[0], &byte, 1) != 1)
        return;
    await_child(tracer, "tracer");
    if (options == 0)
        kill(tracee, SIGTERM);
    await_child(tracee, what);
    close(ready[0]);
    close(ready[1]);
}

/* The tracer hears first that a process has ended. */
/* What runs while its values are watched goes on when its tracer ends. */
static void watched_outlives_its_tracer(void)
{
    volatile int *may_end = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t tracee = fork();
    if (tracee == 0) {
        while (!*may_end) {
            watched[1]++;
        }
        _exit(5);
    }
    pid_t tracer = fork();
    if (tracer == 0) {
        ptrace(PTRACE_ATTACH, tracee, 0, 0);
        waitpid(tracee, NULL, __WALL);
        ptrace(PTRACE_POKEUSER, tracee, offsetof(struct user, u_debugreg[0]), watched);
        ptrace(PTRACE_POKEUSER, tracee, offsetof(struct user, u_debugreg[7]), 0xd0001L);
        ptrace(PTRACE_CONT, tracee, 0, 0);
        usleep(20000);
        _exit(0);
    }
    int status;
    waitpid(tracer, &status, 0);
    usleep(20000);
    *may_end = 1;
    waitpid(tracee, &status, 0);
    say("watched, without its tracer: %s %d\n", WIFEXITED(status) ? "ends with" : "killed by",
        WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
}

static void tracer_first(void)
{
    int ready[2], let[2];
    char byte = 0;
    if (pipe(ready) < 0 || pipe(let) < 0)
        return;
    pid_t tracee = fork();
    if (tracee == 0)
        sleep_for_ever();
    pid_t tracer = fork();
    if (tracer == 0) {
        ptrace(PTRACE_SEIZE, tracee, 0, 0);
        ptrace(PTRACE_KILL, tracee, 0, 0);
        kill(tracee, SIGKILL);
        siginfo_t info;
        waitid(P_PID, (id_t)tracee, &info, WEXITED | WNOWAIT | __WALL);
        if (write(ready[1], &byte, 1) != 1 || read(let[0], &byte, 1) != 1)
            _exit(1);
        int status;
        _exit(waitpid(tracee, &status, __WALL) == tracee && WIFSIGNALED(status) ? WTERMSIG(status) : 0);
    }
    if (read(ready[0], &byte, 1) != 1)
        return;
    TRY(waitpid(tracee, NULL, WNOHANG));
    if (write(let[1], &byte, 1) != 1)
        return;
    await_child(tracer, "tracer, by the signal that it saw");
    await_child(tracee, "tracee");
}

/* What a program may not learn or do by tracing: neither that of a set-user-ID program, nor the memory of one
 * that was executed since, nor what a process that has changed its ids knows. */
static void rights(const char *self)
{
    PART("rights");
    char *scratch = enter_scratch();
    MUST(chmod(scratch, 0755));
    struct stat st;
    int from = MUST(open(self, O_RDONLY)), to = MUST(open("program", O_WRONLY | O_CREAT | O_EXCL, 0755));
    MUST(fstat(from, &st));
    IS(sendfile(to, from, NULL, (size_t)st.st_size) == st.st_size);
    close(from);
    close(to);
    MUST(chmod("program", 04755));
    fflush(stdout);
    pid_t user = fork();
    if (user == 0) {
        MUST(setresuid(65534, 65534, 65534));
        pid_t tracee = fork();
        if (tracee == 0) {
            ptrace(PTRACE_TRACEME, 0, 0, 0);
            execl("./program", "./program", "euid", NULL);
            _exit(9);
        }
        for (int status; waitpid(tracee, &status, 0) == tracee && WIFSTOPPED(status);)
            ptrace(PTRACE_CONT, tracee, 0, 0);
        if (fork() == 0)
            execl("./program", "./program", "euid", NULL);
        wait(NULL);
        _exit(0);
    }
    MUST(waitpid(user, NULL, 0));

    int ends[2];
    MUST(pipe(ends));
    pid_t child = fork();
    if (child == 0) {
        char byte;
        read(ends[0], &byte, 1);
        execl(self, self, "sleep", NULL);
        _exit(9);
    }
    char name[64], byte;
    snprintf(name, sizeof name, "/proc/%d/mem", child);
    int memory = MUST(open(name, O_RDWR));
    say("before it executes: %zd\n", pread(memory, &byte, 1, (off_t)(uintptr_t)&shared_number));
    write(ends[1], "x", 1);
    char path[64], program[4200];
    snprintf(path, sizeof path, "/proc/%d/cmdline", child);
    do {
        int fd = open(path, O_RDONLY);
        ssize_t len = read(fd, program, sizeof program - 1);
        close(fd);
        program[len > 0 ? len : 0] = 0;
        usleep(1000);
        if (len > 0 && memmem(program, (size_t)len, "sleep", 5))
            break;
    } while (1);
    say("after: %zd\n", pread(memory, &byte, 1, (off_t)(uintptr_t)&shared_number));
    kill(child, SIGKILL);
    MUST(waitpid(child, NULL, 0));

    fflush(stdout);
    if (fork() == 0) {
        say("dumpable: %d\n", prctl(PR_GET_DUMPABLE) == 1);
        MUST(setresuid(-1, 65534, -1));
        say("with other ids: %d\n", prctl(PR_GET_DUMPABLE) == 1);
        fflush(stdout);
        _exit(0);
    }
    wait(NULL);
    leave_scratch(scratch);
}

int main(int count, char **arguments)
{
    if (count > 1 && strcmp(arguments[1], "euid") == 0) {
        say("effective user %d\n", geteuid());
        return 0;
    }
    if (count > 1 && strcmp(arguments[1], "sleep") == 0) {
        pause();
        return 0;
    }
    static char self[4096];
    readlink("/proc/self/exe", self, sizeof self - 1);
    rights(self);
    system_calls();
    memory_and_breakpoints();
    watchpoints();
    steps_over_calls();
    signals();
    registers();
    events();
    attaching();
    PART("ends of tracers");
    tracer_ends(0, "goes on, and gets a signal");
    tracer_ends(PTRACE_O_EXITKILL, "ends with its tracer");
    watched_outlives_its_tracer();
    tracer_first();
    TRY(ptrace(PTRACE_ATTACH, 4000000, 0, 0));
    TRY(ptrace(PTRACE_CONT, 1, 0, 0));
    return 0;
}
