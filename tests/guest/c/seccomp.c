/* seccomp(2) and prctl(PR_SET_SECCOMP): modes, the checks of programs, actions, stacks of filters, what
 * children and threads get, tracers, restarted calls. */
#include "guest.h"

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <ucontext.h>

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define RETURN(verdict) BPF_STMT(BPF_RET | BPF_K, verdict)
#define ALLOW RETURN(SECCOMP_RET_ALLOW)
#define COUNT(array) (sizeof(array) / sizeof *(array))

static long seccomp(unsigned operation, unsigned flags, void *arguments)
{
    return syscall(SYS_seccomp, operation, flags, arguments);
}

static long set_program(unsigned flags, struct sock_filter *instructions, size_t count)
{
    struct sock_fprog program = {(unsigned short)count, instructions};
    return seccomp(SECCOMP_SET_MODE_FILTER, flags, &program);
}

/* All calls are allowed but one. */
static long filter(unsigned flags, unsigned number, unsigned verdict)
{
    struct sock_filter program[] = {
        LOAD(nr),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1),
        RETURN(verdict),
        ALLOW,
    };
    return set_program(flags, program, COUNT(program));
}

static void no_new_privileges(void)
{
    MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
}

static void in_child(const char *what, void (*run)(void))
{
    pid_t pid = (pid_t)MUST(fork());
    if (pid == 0) {
        no_new_privileges();
        run();
        _exit(0);
    }
    await_child(pid, what);
}

static void show_status(const char *path)
{
    char line[256];
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file))
        if (!strncmp(line, "Seccomp", 7))
            say("%s", line);
    if (file)
        fclose(file);
}

static void modes(void)
{
    PART("modes and what is refused");
    TRY(prctl(PR_GET_SECCOMP));
    TRY(prctl(PR_SET_SECCOMP, 0));
    TRY(prctl(PR_SET_SECCOMP, 3));
    TRY(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, NULL));
    TRY(seccomp(SECCOMP_SET_MODE_STRICT, 1, NULL));
    TRY(seccomp(SECCOMP_SET_MODE_STRICT, 0, ""));
    TRY(seccomp(99, 0, NULL));
    TRY(seccomp(SECCOMP_SET_MODE_FILTER, 0, NULL));
    TRY(seccomp(SECCOMP_SET_MODE_FILTER, 1 << 20, NULL));
    TRY(seccomp(SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC | SECCOMP_FILTER_FLAG_LOG, NULL));
    TRY(seccomp(SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, (void *)8));
    TRY(seccomp(SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC_ESRCH, NULL));
    TRY(seccomp(SECCOMP_GET_ACTION_AVAIL, 0, NULL));
    TRY(seccomp(SECCOMP_GET_ACTION_AVAIL, 1, NULL));
    unsigned actions[] = {
        SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_KILL_THREAD, SECCOMP_RET_TRAP, SECCOMP_RET_ERRNO,
        SECCOMP_RET_TRACE, SECCOMP_RET_LOG, SECCOMP_RET_ALLOW, 0x10000, SECCOMP_RET_ERRNO | 1,
    };
    for (size_t i = 0; i < COUNT(actions); i++)
        TRY(seccomp(SECCOMP_GET_ACTION_AVAIL, 0, &actions[i]));
    int tsc = 0;
    TRY(prctl(PR_GET_TSC, &tsc));
    IS(tsc == PR_TSC_ENABLE);
    TRY(prctl(PR_SET_TSC, PR_TSC_ENABLE));
    TRY(prctl(PR_SET_TSC, 7));
    show_status("/proc/self/status");
}

static void try_program(const char *what, struct sock_filter *instructions, size_t count)
{
    long result = set_program(0, instructions, count);
    say("%s: %s\n", what, result < 0 ? error_name(errno) : "ok");
}

#define PROGRAM(what, ...)                                                                         \
    do {                                                                                           \
        struct sock_filter program_[] = {__VA_ARGS__};                                             \
        try_program(what, program_, COUNT(program_));                                              \
    } while (0)

static void check_programs(void)
{
    PROGRAM("one instruction", ALLOW);
    PROGRAM("no end", BPF_STMT(BPF_LD | BPF_IMM, 1));
    PROGRAM("a word that is not aligned", BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 2), ALLOW);
    PROGRAM("a word behind the data", BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 64), ALLOW);
    PROGRAM("the last word", BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 60), ALLOW);
    PROGRAM("a byte", BPF_STMT(BPF_LD | BPF_B | BPF_ABS, 0), ALLOW);
    PROGRAM("an indirect word", BPF_STMT(BPF_LD | BPF_W | BPF_IND, 0), ALLOW);
    PROGRAM("a remainder", BPF_STMT(BPF_ALU | BPF_MOD | BPF_K, 2), ALLOW);
    PROGRAM("a division by zero", BPF_STMT(BPF_ALU | BPF_DIV | BPF_K, 0), ALLOW);
    PROGRAM("a shift too far", BPF_STMT(BPF_ALU | BPF_LSH | BPF_K, 32), ALLOW);
    PROGRAM("a jump out", BPF_STMT(BPF_JMP | BPF_JA, 1), ALLOW);
    PROGRAM("a jump back", BPF_STMT(BPF_JMP | BPF_JA, 0xffffffff), ALLOW);
    PROGRAM("a condition that jumps out", BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0, 0, 1), ALLOW);
    PROGRAM("memory that was not stored", BPF_STMT(BPF_LD | BPF_MEM, 0), ALLOW);
    PROGRAM("memory that was stored", BPF_STMT(BPF_ST, 0), BPF_STMT(BPF_LD | BPF_MEM, 0), ALLOW);
    PROGRAM("memory that was stored on one way", BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0, 1, 0),
            BPF_STMT(BPF_ST, 0), BPF_STMT(BPF_LD | BPF_MEM, 0), ALLOW);
    PROGRAM("memory that there is not", BPF_STMT(BPF_ST, 16), ALLOW);
    PROGRAM("an unknown code", {0xffff, 0, 0, 0}, ALLOW);
    PROGRAM("the size", BPF_STMT(BPF_LD | BPF_W | BPF_LEN, 0), BPF_STMT(BPF_LDX | BPF_W | BPF_LEN, 0), ALLOW);
    try_program("nothing", NULL, 0);
    try_program("an address that is bad", (void *)8, 1);
    try_program("too many", (void *)8, BPF_MAXINSNS + 1);
    show_status("/proc/thread-self/status");
}

static void too_many_instructions(void)
{
    static struct sock_filter program[BPF_MAXINSNS];
    for (size_t i = 0; i < BPF_MAXINSNS; i++)
        program[i] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_IMM, 1);
    program[BPF_MAXINSNS - 1] = (struct sock_filter)ALLOW;
    for (int i = 1; i <= 8; i++)
        say("%d of the largest programs: %s\n", i,
            set_program(0, program, BPF_MAXINSNS) < 0 ? error_name(errno) : "ok");
    IS(getppid() > 0);
}

static void without_rights(void)
{
    PART("rights");
    pid_t pid = (pid_t)MUST(fork());
    if (pid == 0) {
        if (getuid() == 0)
            MUST(setresuid(65534, 65534, 65534));
        TRY(filter(0, SYS_getppid, SECCOMP_RET_ERRNO));
        TRY(seccomp(SECCOMP_SET_MODE_FILTER, 0, NULL));
        TRY(set_program(0, NULL, 0));
        no_new_privileges();
        TRY(filter(0, SYS_getppid, SECCOMP_RET_ERRNO | EXDEV));
        TRY(syscall(SYS_getppid));
        _exit(3);
    }
    await_child(pid, "without rights");
}

static unsigned verdict;

static void meets_verdict(void)
{
    MUST(filter(0, SYS_getppid, verdict));
    long result = syscall(SYS_getppid);
    int error = errno;
    if (result == -1)
        say("%#x: error %d\n", verdict, error);
    else
        say("%#x: %s\n", verdict, result == getpid() ? "itself" : result > 0 ? "allowed" : "zero");
    _exit(5);
}

static void actions(void)
{
    PART("actions");
    unsigned verdicts[] = {
        SECCOMP_RET_ALLOW,
        SECCOMP_RET_LOG,
        SECCOMP_RET_ERRNO,
        SECCOMP_RET_ERRNO | EXDEV,
        SECCOMP_RET_ERRNO | 4095,
        SECCOMP_RET_ERRNO | 0xffff,
        SECCOMP_RET_TRACE | 1,
        SECCOMP_RET_USER_NOTIF,
        SECCOMP_RET_TRAP,
        SECCOMP_RET_KILL_THREAD,
        SECCOMP_RET_KILL_PROCESS,
        0x12340000,
        0x7ffe0000,
        0xffffffff,
    };
    for (size_t i = 0; i < COUNT(verdicts); i++) {
        verdict = verdicts[i];
        in_child("after it", meets_verdict);
    }
}

static void sees_arguments(void)
{
    /* The first argument of close is 0x1_0000_0002 for one error, 2 for another one. */
    struct sock_filter program[] = {
        LOAD(arch),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 1, 0),
        RETURN(SECCOMP_RET_KILL_PROCESS),
        LOAD(nr),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_close, 0, 5),
        LOAD(args[0]),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 2, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0]) + 4),
        BPF_STMT(BPF_ALU | BPF_OR | BPF_K, SECCOMP_RET_ERRNO | 64),
        BPF_STMT(BPF_RET | BPF_A, 0),
        ALLOW,
    };
    MUST(set_program(0, program, COUNT(program)));
    IS(syscall(SYS_close, 2) == -1 && errno == 64);
    IS(syscall(SYS_close, 0x100000002) == -1 && errno == 65);
    TRY(syscall(SYS_close, 1234));
    /* The last argument. */
    struct sock_filter last[] = {
        LOAD(args[5]),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0x5ec, 0, 1),
        RETURN(SECCOMP_RET_ERRNO | EXDEV),
        ALLOW,
    };
    MUST(set_program(0, last, COUNT(last)));
    TRY(syscall(SYS_getppid, 0, 0, 0, 0, 0, 0x5ec));
    /* Numbers that there are not are asked for, too; the upper half does not count. */
    MUST(filter(0, (unsigned)-1, SECCOMP_RET_ERRNO | EXDEV));
    MUST(filter(0, 100000, SECCOMP_RET_ERRNO | EXDEV));
    TRY(syscall(-1));
    TRY(syscall(100000));
    TRY(syscall(100001));
}

static void divides_by_zero(void)
{
    struct sock_filter program[] = {
        LOAD(nr),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getppid, 0, 2),
        BPF_STMT(BPF_LDX | BPF_IMM, 0),
        BPF_STMT(BPF_ALU | BPF_DIV | BPF_X, 0),
        ALLOW,
    };
    MUST(set_program(0, program, COUNT(program)));
    say("divides\n");
    syscall(SYS_getppid);
}

static void stacked(void)
{
    MUST(filter(0, SYS_getppid, SECCOMP_RET_ERRNO | 1));
    MUST(filter(0, SYS_getppid, SECCOMP_RET_LOG));
    IS(syscall(SYS_getppid) == -1 && errno == 1);
    MUST(filter(0, SYS_getppid, SECCOMP_RET_ERRNO | 2));
    IS(syscall(SYS_getppid) == -1 && errno == 2);
    MUST(filter(0, SYS_getuid, SECCOMP_RET_ERRNO | 3));
    IS(syscall(SYS_getuid) == -1 && errno == 3);
    TRY(prctl(PR_GET_SECCOMP));
    show_status("/proc/self/status");
    TRY(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT));
    MUST(filter(0, SYS_seccomp, SECCOMP_RET_ERRNO | EXDEV));
    TRY(filter(0, SYS_getuid, SECCOMP_RET_ALLOW));
    pid_t pid = fork();
    if (pid == 0) {
        IS(syscall(SYS_getppid) == -1 && errno == 2);
        show_status("/proc/self/status");
        _exit(4);
    }
    await_child(pid, "a child");
}

static void executes(void)
{
    MUST(filter(0, SYS_getppid, SECCOMP_RET_ERRNO | EXDEV));
    execl("/proc/self/exe", "seccomp", "executed", NULL);
    _exit(98);
}

static void executed(void)
{
    TRY(syscall(SYS_getppid));
    TRY(prctl(PR_GET_SECCOMP));
    show_status("/proc/self/status");
}

static void on_sigsys(int signal, siginfo_t *info, void *context)
{
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    say("signal %d, code %d, errno %d, call %d\n", signal, info->si_code, info->si_errno, info->si_syscall);
    IS(info->si_arch == AUDIT_ARCH_X86_64);
    IS((greg_t)info->si_call_addr == registers[REG_RIP]);
    say("rax %lld, rdi %lld\n", registers[REG_RAX], registers[REG_RDI]);
    registers[REG_RAX] = 42;
}

static void traps(void)
{
    struct sigaction action = {.sa_sigaction = on_sigsys, .sa_flags = SA_SIGINFO};
    MUST(sigaction(SIGSYS, &action, NULL));
    MUST(filter(0, SYS_getppid, SECCOMP_RET_TRAP | 0xabcd));
    for (int i = 0; i < 3; i++)
        TRY(syscall(SYS_getppid, 7));
}

static void traps_blocked(void)
{
    struct sigaction action = {.sa_sigaction = on_sigsys, .sa_flags = SA_SIGINFO};
    MUST(sigaction(SIGSYS, &action, NULL));
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGSYS);
    sigprocmask(SIG_BLOCK, &set, NULL);
    MUST(filter(0, SYS_getppid, SECCOMP_RET_TRAP));
    syscall(SYS_getppid);
    say("goes on\n");
}

static void traps_ignored(void)
{
    signal(SIGSYS, SIG_IGN);
    MUST(filter(0, SYS_getppid, SECCOMP_RET_TRAP));
    syscall(SYS_getppid);
    say("goes on\n");
}

static int pipe_to[2], pipe_from[2];

static void strict(void)
{
    int ends[2];
    MUST(pipe(ends));
    TRY(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT));
    char byte = 'x';
    IS(write(ends[1], &byte, 1) == 1);
    IS(read(ends[0], &byte, 1) == 1);
    syscall(SYS_exit, 6);
}

static void on_alarm(int signal) { say("handler of %d\n", signal); }

static void strict_with_handler(void)
{
    signal(SIGCHLD, on_alarm);
    signal(SIGPIPE, on_alarm);
    int ends[2];
    MUST(pipe(ends));
    MUST(close(ends[0]));
    MUST(seccomp(SECCOMP_SET_MODE_STRICT, 0, NULL));
    /* rt_sigreturn works. */
    IS(write(ends[1], "x", 1) == -1);
    syscall(SYS_getppid);
    say("goes on\n");
}

static void strict_exit_group(void)
{
    MUST(seccomp(SECCOMP_SET_MODE_STRICT, 0, NULL));
    _exit(0);
}

static void *makes_strict(void *unused)
{
    MUST(seccomp(SECCOMP_SET_MODE_STRICT, 0, NULL));
    say("strict\n");
    syscall(SYS_getppid);
    say("goes on\n");
    return unused;
}

static void strict_thread(void)
{
    pthread_t thread;
    /* The thread says something, too: nothing is said until it has. */
    int error = pthread_create(&thread, NULL, makes_strict, NULL);
    CODE(pthread_join(thread, NULL));
    IS(error == 0);
    TRY(prctl(PR_GET_SECCOMP));
}

static pid_t thread_id;

/* A thread that does what it is told, a letter for each thing, and answers. */
static void *obeys(void *unused)
{
    char order, answer = '.';
    thread_id = (pid_t)syscall(SYS_gettid);
    MUST(write(pipe_from[1], &answer, 1));
    while (read(pipe_to[0], &order, 1) == 1 && order != 'q') {
        switch (order) {
        case 'c':
            TRY(syscall(SYS_getppid) > 0 ? 0 : -1);
            TRY(prctl(PR_GET_SECCOMP));
            show_status("/proc/thread-self/status");
            break;
        case 'f':
            TRY(filter(0, SYS_getegid, SECCOMP_RET_ALLOW));
            break;
        case 'k':
            syscall(SYS_getpgrp);
            break;
        }
        MUST(write(pipe_from[1], &answer, 1));
    }
    return unused;
}

static pthread_t begin_thread(void)
{
    char answer;
    pthread_t thread;
    MUST(pipe(pipe_to));
    MUST(pipe(pipe_from));
    CODE(pthread_create(&thread, NULL, obeys, NULL));
    MUST(read(pipe_from[0], &answer, 1));
    return thread;
}

static void order(char what)
{
    char answer;
    MUST(write(pipe_to[1], &what, 1));
    MUST(read(pipe_from[0], &answer, 1));
}

static void synchronized(void)
{
    pthread_t thread = begin_thread();
    TRY(filter(0, SYS_getppid, SECCOMP_RET_ERRNO | 1));
    order('c');
    TRY(filter(SECCOMP_FILTER_FLAG_TSYNC, SYS_getppid, SECCOMP_RET_ERRNO | EXDEV));
    order('c');
    TRY(filter(SECCOMP_FILTER_FLAG_TSYNC | SECCOMP_FILTER_FLAG_LOG, SYS_getuid, SECCOMP_RET_ALLOW));
    order('c');
    order('f');
    order('c');
    IS(filter(SECCOMP_FILTER_FLAG_TSYNC, SYS_getuid, SECCOMP_RET_ALLOW) == thread_id);
    TRY(filter(SECCOMP_FILTER_FLAG_TSYNC | SECCOMP_FILTER_FLAG_TSYNC_ESRCH, SYS_getuid, SECCOMP_RET_ALLOW));
    show_status("/proc/thread-self/status");
    MUST(write(pipe_to[1], "q", 1));
    CODE(pthread_join(thread, NULL));
    TRY(filter(SECCOMP_FILTER_FLAG_TSYNC, SYS_getuid, SECCOMP_RET_ALLOW));
    /* New threads have all filters. */
    thread = begin_thread();
    order('c');
    MUST(write(pipe_to[1], "q", 1));
    CODE(pthread_join(thread, NULL));
}

static void kills_thread(void)
{
    MUST(filter(0, SYS_getpgrp, SECCOMP_RET_KILL_THREAD));
    pthread_t thread = begin_thread();
    MUST(write(pipe_to[1], "k", 1));
    CODE(pthread_join(thread, NULL));
    say("the process goes on\n");
    syscall(SYS_getpgrp);
}

static void kills_process(void)
{
    MUST(filter(0, SYS_getpgrp, SECCOMP_RET_KILL_PROCESS));
    begin_thread();
    MUST(write(pipe_to[1], "k", 1));
    pause();
}

static void restarts(void)
{
    PART("a call that is restarted");
    pid_t pid = (pid_t)MUST(fork());
    if (pid == 0) {
        no_new_privileges();
        MUST(filter(0, SYS_restart_syscall, SECCOMP_RET_ERRNO | EXDEV));
        TRY(syscall(SYS_nanosleep, &(struct timespec){.tv_sec = 20}, NULL));
        _exit(0);
    }
    usleep(400000);
    MUST(kill(pid, SIGSTOP));
    int status;
    MUST(waitpid(pid, &status, WUNTRACED));
    MUST(kill(pid, SIGCONT));
    await_child(pid, "the sleeper");
}

static void traced_calls(void)
{
    no_new_privileges();
    MUST(filter(0, SYS_getppid, SECCOMP_RET_TRACE | 0x123));
    MUST(filter(0, SYS_getegid, SECCOMP_RET_ERRNO | EXDEV));
    IS(syscall(SYS_getppid) > 0);
    TRY(syscall(SYS_getppid));
    IS(syscall(SYS_getppid) == getpid());
    TRY(syscall(SYS_getppid));
    IS(syscall(SYS_getppid) > 0);
}

static void tracers(void)
{
    PART("tracers");
    pid_t pid = (pid_t)MUST(fork());
    if (pid == 0) {
        MUST(ptrace(PTRACE_TRACEME, 0, 0, 0));
        raise(SIGSTOP);
        traced_calls();
        _exit(7);
    }
    await_child(pid, "first stop");
    TRY(ptrace(PTRACE_SETOPTIONS, pid, 0, PTRACE_O_TRACESECCOMP | PTRACE_O_TRACESYSGOOD));
    for (int i = 0; i < 4; i++) {
        MUST(ptrace(PTRACE_CONT, pid, 0, 0));
        await_child(pid, "the filter");
        unsigned long message = 0;
        MUST(ptrace(PTRACE_GETEVENTMSG, pid, 0, &message));
        struct user_regs_struct registers;
        MUST(ptrace(PTRACE_GETREGS, pid, 0, &registers));
        struct __ptrace_syscall_info info = {0};
        long size = ptrace(PTRACE_GET_SYSCALL_INFO, pid, sizeof info, &info);
        say("message %#lx, call %lld, result %lld\n", message, registers.orig_rax, registers.rax);
        say("size %ld, kind %d, call %llu, message %#x\n", size, info.op,
            (unsigned long long)info.seccomp.nr, info.seccomp.ret_data);
        if (i == 1) {
            registers.orig_rax = -1;
            registers.rax = 77;
        } else if (i > 1) {
            registers.orig_rax = i == 2 ? SYS_getpid : SYS_getegid;
        }
        MUST(ptrace(PTRACE_SETREGS, pid, 0, &registers));
    }
    /* The last call is a traced one, too. */
    MUST(ptrace(PTRACE_CONT, pid, 0, 0));
    await_child(pid, "the filter");
    MUST(ptrace(PTRACE_SYSCALL, pid, 0, 0));
    await_child(pid, "the end of the call");
    MUST(ptrace(PTRACE_SETOPTIONS, pid, 0, 0));
    MUST(ptrace(PTRACE_CONT, pid, 0, 0));
    await_child(pid, "the tracee");
}

static void traced_without_option(void)
{
    MUST(filter(0, SYS_getppid, SECCOMP_RET_TRACE));
    TRY(syscall(SYS_getppid));
}

static void settings(void)
{
    PART("settings");
    char text[256] = "";
    int fd = (int)MUST(open("/proc/sys/kernel/seccomp/actions_avail", O_RDONLY));
    MUST(read(fd, text, sizeof text - 1));
    IS(!strncmp(text, "kill_process kill_thread trap errno", 35) && strstr(text, "trace log allow\n"));
    OK(open("/proc/sys/kernel/seccomp/actions_logged", O_RDONLY));
}

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "executed")) {
        executed();
        return 8;
    }
    modes();
    settings();
    PART("programs");
    in_child("programs", check_programs);
    in_child("too many instructions", too_many_instructions);
    without_rights();
    actions();
    PART("what filters see");
    in_child("arguments", sees_arguments);
    in_child("division", divides_by_zero);
    PART("stacks and heirs");
    in_child("stacks", stacked);
    in_child("execve", executes);
    PART("SIGSYS");
    in_child("trap", traps);
    in_child("blocked", traps_blocked);
    in_child("ignored", traps_ignored);
    PART("strict mode");
    in_child("strict", strict);
    in_child("a handler", strict_with_handler);
    in_child("exit_group", strict_exit_group);
    in_child("a thread", strict_thread);
    PART("threads");
    in_child("synchronized", synchronized);
    in_child("a thread", kills_thread);
    in_child("a process", kills_process);
    restarts();
    tracers();
    in_child("without the option", traced_without_option);
    return 0;
}
