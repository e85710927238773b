/* fork(2), vfork(2), clone(2), clone3(2), posix_spawn(3): what is copied, what
 * is shared, errors. */
#include "guest.h"
#include <linux/sched.h>
#include <poll.h>
#include <sched.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

static int wait_for(pid_t child)
{
    int status;
    MUST(waitpid(child, &status, __WALL));
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static int global = 1;
static char page[4096 * 4] __attribute__((aligned(4096)));

static void memory(void)
{
    PART("memory of a child");
    int local = 2, *heap = malloc(sizeof *heap), ends[2];
    *heap = 3;
    int *shared = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int *private = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    shared[0] = 10;
    private[0] = 20;
    memset(page, 'a', sizeof page);
    MUST(pipe(ends));
    pid_t child = MUST(fork());
    if (!child) {
        char byte;
        read(ends[0], &byte, 1);
        say("child sees %d %d %d %d %d %c\n", global, local, *heap, shared[0], private[0], page[5]);
        global = local = *heap = private[0] = 99;
        page[5] = 'c';
        shared[1] = 11;
        _exit(0);
    }
    global = 5;
    private[0] = 21;
    page[5] = 'p';
    shared[0] = 12;
    write(ends[1], "x", 1);
    say("exit %d\n", wait_for(child));
    say("parent sees %d %d %d %d %d %c\n", global, local, *heap, shared[1], private[0], page[5]);

    PART("parts of shared memory in several processes");
    enum { PAGES = 32, SIZE = 4096 };
    char *parts = mmap(NULL, PAGES * SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int page = 0; page < PAGES; page++)
        parts[page * SIZE] = (char)(page + 1);
    pid_t children[4];
    for (int child = 0; child < 4; child++) {
        children[child] = fork();
        if (children[child] != 0)
            continue;
        /* Each keeps a part of its own, which it moves. */
        char *own = parts + child * 8 * SIZE;
        munmap(parts, (size_t)(own - parts));
        munmap(own + 8 * SIZE, (size_t)(parts + PAGES * SIZE - own - 8 * SIZE));
        own = mremap(own, 8 * SIZE, 4 * SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)0x200000000000);
        own[SIZE] = (char)(100 + child);
        char *fresh = mmap(NULL, 64 * SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        bool clean = own[2 * SIZE] == child * 8 + 3;
        for (int page = 0; page < 64; page++)
            clean &= fresh[page * SIZE] == 0;
        memset(fresh, 7, 64 * SIZE);
        _exit(clean ? 0 : 1);
    }
    for (int child = 0; child < 4; child++) {
        int status;
        MUST(waitpid(children[child], &status, 0));
        say("child %d: %d, page %d, next %d\n", child, WEXITSTATUS(status), parts[child * 8 * SIZE],
            parts[(child * 8 + 1) * SIZE]);
    }
    munmap(parts, PAGES * SIZE);
    parts = mmap(NULL, PAGES * SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int page = 0; page < PAGES; page++)
        if (parts[page * SIZE] != 0)
            say("page %d has old content\n", page);
    munmap(parts, PAGES * SIZE);

    PART("MADV_DONTFORK, MADV_WIPEONFORK, protections");
    char *area = mmap(NULL, 4 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(area, 'x', 4 * 4096);
    TRY(madvise(area, 4096, MADV_DONTFORK));
    TRY(madvise(area + 4096, 4096, MADV_WIPEONFORK));
    TRY(mprotect(area + 8192, 4096, PROT_READ));
    TRY(madvise(shared, 4096, MADV_WIPEONFORK));
    child = MUST(fork());
    if (!child) {
        unsigned char resident;
        TRY(mincore(area, 4096, &resident));
        say("wiped %d kept %c %c\n", area[4096], area[8192], area[3 * 4096]);
        int fd = MUST(open("/dev/zero", O_RDONLY));
        TRY(read(fd, area + 8192, 1));
        pid_t grandchild = MUST(fork());
        if (!grandchild)
            _exit(area[4096] ? 1 : 0);
        say("wiped again %d\n", wait_for(grandchild));
        area[0] = 1;
        _exit(0);
    }
    say("exit %d\n", wait_for(child));
    say("parent keeps %c %c\n", area[0], area[4096]);

    PART("a shared mapping of a file");
    int fd = MUST(open("shared", O_RDWR | O_CREAT, 0600));
    MUST(ftruncate(fd, 8192));
    char *file = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    char *copy = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    strcpy(file, "by the parent");
    copy[4096] = 'P';
    child = MUST(fork());
    if (!child) {
        say("child reads %s\n", file);
        strcpy(file + 4096, "by the child");
        copy[4096] = 'C';
        char text[32] = "";
        MUST(pread(fd, text, 13, 0));
        say("child preads %s\n", text);
        MUST(pwrite(fd, "child pwrite", 13, 100));
        _exit(0);
    }
    wait_for(child);
    say("parent reads %s, %s, %c\n", file + 4096, file + 100, copy[4096]);
    char text[32] = "";
    MUST(pread(fd, text, 12, 4096));
    say("parent preads %s\n", text);
}

static void many(void)
{
    PART("many in sequence, many at once, a chain");
    int sum = 0;
    for (int i = 0; i < 100; i++) {
        pid_t child = MUST(fork());
        if (!child)
            _exit(i);
        sum += wait_for(child);
    }
    say("sum %d\n", sum);
    pid_t pids[30];
    for (int i = 0; i < 30; i++)
        if ((pids[i] = MUST(fork())) == 0) {
            usleep(1000 * (i % 5));
            _exit(i);
        }
    sum = 0;
    for (int i = 29; i >= 0; i--)
        sum += wait_for(pids[i]) == i;
    say("good %d\n", sum);
    pid_t first = MUST(fork());
    if (!first) {
        for (int depth = 1; depth < 20; depth++) {
            pid_t child = MUST(fork());
            if (child)
                _exit(wait_for(child) + 1);
        }
        _exit(0);
    }
    say("chain %d\n", wait_for(first));

    PART("data through pipes between processes");
    int there[2], back[2];
    MUST(pipe(there));
    MUST(pipe(back));
    pid_t child = MUST(fork());
    if (!child) {
        close(there[1]);
        char block[1000];
        long count;
        while ((count = read(there[0], block, sizeof block)) > 0) {
            for (long i = 0; i < count; i++)
                block[i]++;
            write(back[1], block, (size_t)count);
        }
        _exit(0);
    }
    close(there[0]);
    close(back[1]);
    long total = 0, wrong = 0;
    for (int i = 0; i < 300; i++) {
        char block[700];
        memset(block, i, sizeof block);
        MUST(write(there[1], block, sizeof block));
        for (size_t got = 0; got < sizeof block;) {
            long count = MUST(read(back[0], block + got, sizeof block - got));
            for (long j = 0; j < count; j++)
                wrong += block[got + (size_t)j] != (char)(i + 1);
            got += (size_t)count;
            total += count;
        }
    }
    close(there[1]);
    say("total %ld wrong %ld exit %d\n", total, wrong, wait_for(child));
}

static char stack[65536] __attribute__((aligned(16)));

static int in_clone(void *argument)
{
    global = 1234;
    return (int)(long)argument;
}

static int opens(void *argument)
{
    (void)argument;
    umask(077);
    return dup(0);
}

static void nothing(int signal) { (void)signal; }

static void clones(void)
{
    PART("clone");
    global = 0;
    pid_t child = MUST(clone(in_clone, stack + sizeof stack, SIGCHLD, (void *)5));
    int code = wait_for(child);
    say("exit %d global %d\n", code, global);
    child = MUST(clone(in_clone, stack + sizeof stack, CLONE_VM | SIGCHLD, (void *)6));
    code = wait_for(child); /* before `global` is read: arguments have no order */
    say("exit %d global %d\n", code, global);
    child = MUST(clone(in_clone, stack + sizeof stack, CLONE_VM | CLONE_VFORK | SIGCHLD, (void *)7));
    say("exit %d\n", wait_for(child));
    child = MUST(clone(opens, stack + sizeof stack, CLONE_FILES | CLONE_FS | SIGCHLD, NULL));
    int fd = wait_for(child);
    IS(fcntl(fd, F_GETFD) == 0);
    TRY(umask(022));
    close(fd);
    child = MUST(clone(opens, stack + sizeof stack, SIGCHLD, NULL));
    fd = wait_for(child);
    TRY(fcntl(fd, F_GETFD));
    TRY(umask(022));
    pid_t parent_tid = 0;
    int *child_tid = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    child = MUST(syscall(SYS_clone, CLONE_PARENT_SETTID | CLONE_CHILD_SETTID | SIGCHLD, 0, &parent_tid,
                         child_tid, 0));
    if (!child)
        _exit(*child_tid == getpid());
    int told = wait_for(child);
    say("tid told to child %d, parent %d %d\n", told, parent_tid == child, *child_tid == child);
    child = MUST(syscall(SYS_clone, CLONE_CHILD_CLEARTID | SIGCHLD, 0, 0, child_tid, 0));
    if (!child)
        _exit(0);
    wait_for(child);
    IS(*child_tid != 0);

    PART("without a signal, another signal");
    child = MUST(syscall(SYS_clone, 0, 0, 0, 0, 0));
    if (!child)
        _exit(3);
    usleep(2000);
    int status;
    TRY(waitpid(child, &status, WNOHANG));
    IS(waitpid(child, &status, __WCLONE) == child);
    say("exit %d\n", WEXITSTATUS(status));
    sigset_t set, old;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigaddset(&set, SIGCHLD);
    sigprocmask(SIG_BLOCK, &set, &old);
    child = MUST(syscall(SYS_clone, SIGUSR1, 0, 0, 0, 0));
    if (!child)
        _exit(4);
    siginfo_t info;
    TRY(sigwaitinfo(&set, &info) == SIGUSR1);
    say("code %d status %d pid %d\n", info.si_code, info.si_status, info.si_pid == child);
    say("exit %d\n", wait_for(child));
    struct timespec none = {0, 0};
    TRY(sigtimedwait(&set, NULL, &none));
    sigprocmask(SIG_SETMASK, &old, NULL);

    PART("errors");
    TRY(syscall(SYS_clone, CLONE_THREAD | SIGCHLD, 0, 0, 0, 0));
    TRY(syscall(SYS_clone, CLONE_SIGHAND | SIGCHLD, 0, 0, 0, 0));
    TRY(syscall(SYS_clone, CLONE_THREAD | CLONE_SIGHAND | SIGCHLD, 0, 0, 0, 0));
    TRY(syscall(SYS_clone, CLONE_FS | CLONE_NEWNS | SIGCHLD, 0, 0, 0, 0));
    TRY(syscall(SYS_clone, CLONE_PIDFD | CLONE_PARENT_SETTID | SIGCHLD, 0, &parent_tid, 0, 0));
    TRY(syscall(SYS_clone3, NULL, 64));
    struct clone_args args = {.exit_signal = SIGCHLD};
    TRY(syscall(SYS_clone3, &args, 63));
    TRY(syscall(SYS_clone3, &args, 100000));
    args.exit_signal = 65;
    TRY(syscall(SYS_clone3, &args, sizeof args));
    args = (struct clone_args){.exit_signal = SIGCHLD, .stack = 4096};
    TRY(syscall(SYS_clone3, &args, sizeof args));
    args = (struct clone_args){.exit_signal = SIGCHLD, .flags = 1ULL << 60};
    TRY(syscall(SYS_clone3, &args, sizeof args));
    args = (struct clone_args){.exit_signal = SIGCHLD, .flags = CLONE_THREAD | CLONE_SIGHAND | CLONE_VM};
    TRY(syscall(SYS_clone3, &args, sizeof args));
    args = (struct clone_args){.exit_signal = SIGCHLD, .flags = CLONE_SIGHAND | CLONE_VM | CLONE_CLEAR_SIGHAND};
    TRY(syscall(SYS_clone3, &args, sizeof args));
    struct { struct clone_args args; long more[4]; } larger = {.args.exit_signal = SIGCHLD, .more[3] = 1};
    TRY(syscall(SYS_clone3, &larger, sizeof larger));
    larger.more[3] = 0;
    child = MUST(syscall(SYS_clone3, &larger, sizeof larger));
    if (!child)
        _exit(12);
    say("larger exit %d\n", wait_for(child));

    PART("clone3 with a pidfd, handlers cleared");
    int pidfd = -1;
    signal(SIGUSR2, nothing);
    signal(SIGHUP, SIG_IGN);
    args = (struct clone_args){.flags = CLONE_PIDFD | CLONE_CLEAR_SIGHAND, .pidfd = (uint64_t)&pidfd,
                               .exit_signal = SIGCHLD};
    child = MUST(syscall(SYS_clone3, &args, sizeof args));
    if (!child) {
        struct sigaction usr2, hup;
        sigaction(SIGUSR2, NULL, &usr2);
        sigaction(SIGHUP, NULL, &hup);
        _exit((usr2.sa_handler == SIG_DFL) + 2 * (hup.sa_handler == SIG_IGN));
    }
    signal(SIGUSR2, SIG_DFL);
    struct pollfd poll_pidfd = {pidfd, POLLIN, 0};
    TRY(poll(&poll_pidfd, 1, -1));
    say("exit %d\n", wait_for(child));
    IS(fcntl(pidfd, F_GETFD) == FD_CLOEXEC);
    close(pidfd);
}

static void spawns(void)
{
    char *const arguments[] = {"sh", "-c", "exit 17", NULL}, *environment[] = {NULL};
    pid_t child = 0;
    PART("posix_spawn");
    CODE(posix_spawn(&child, "/bin/sh", NULL, NULL, arguments, environment));
    say("exit %d\n", wait_for(child));
    CODE(posix_spawn(&child, "/nowhere/at/all", NULL, NULL, arguments, environment));
    CODE(posix_spawn(&child, "/etc/passwd", NULL, NULL, arguments, environment));
    CODE(posix_spawnp(&child, "sh", NULL, NULL, arguments, environment));
    say("exit %d\n", wait_for(child));
    TRY(waitpid(-1, NULL, WNOHANG));
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 5, "/nowhere", O_RDONLY, 0);
    CODE(posix_spawn(&child, "/bin/sh", &actions, NULL, arguments, environment));
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, 1, 9);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK);
    sigset_t set;
    sigfillset(&set);
    posix_spawnattr_setsigmask(&attributes, &set);
    char *const echo[] = {"sh", "-c", "echo to nine >&9", NULL};
    int code = posix_spawn(&child, "/bin/sh", &actions, &attributes, echo, environment);
    say("exit %d\n", wait_for(child));
    say("posix_spawn %d\n", code);
    int status = system("exit 3");
    say("system %x\n", status);
    FILE *pipe = popen("echo through popen; exit 2", "r");
    char line[64] = "";
    fgets(line, sizeof line, pipe);
    say("%s", line);
    say("pclose %x\n", pclose(pipe));

    PART("vfork");
    volatile int seen = 0;
    child = vfork();
    if (!child) {
        seen = 55;
        _exit(6);
    }
    say("seen %d exit %d\n", seen, wait_for(child));
    child = vfork();
    if (!child) {
        execl("/bin/sh", "sh", "-c", "sleep 0.5; exit 8", NULL);
        _exit(1);
    }
    TRY(waitpid(child, NULL, WNOHANG));
    say("exit %d\n", wait_for(child));
    child = vfork();
    if (!child) {
        execl("/nowhere", "x", NULL);
        _exit(errno == ENOENT ? 9 : 1);
    }
    say("exit %d\n", wait_for(child));
    child = vfork();
    if (!child) {
        raise(SIGKILL);
        _exit(0);
    }
    say("exit %d\n", wait_for(child));
}

static void files(void)
{
    PART("descriptors");
    int fd = MUST(open("file", O_RDWR | O_CREAT, 0600));
    write(fd, "0123456789", 10);
    lseek(fd, 2, SEEK_SET);
    pid_t child = MUST(fork());
    if (!child) {
        char text[3] = "";
        read(fd, text, 2);
        say("child reads %s\n", text);
        int flags = fcntl(fd, F_GETFL);
        fcntl(fd, F_SETFL, flags | O_APPEND);
        close(fd);
        _exit(0);
    }
    wait_for(child);
    char text[3] = "";
    read(fd, text, 2);
    say("parent goes on with %s, append %d\n", text, (fcntl(fd, F_GETFL) & O_APPEND) != 0);
    int other = MUST(open("file", O_RDONLY | O_CLOEXEC));
    child = MUST(fork());
    if (!child) {
        dup2(fd, 30);
        dup3(fd, 31, O_CLOEXEC);
        dup2(other, 32);
        execl("/bin/sh", "sh", "-c",
              "for f in 30 31 32; do if [ -e /proc/self/fd/$f ]; then echo $f open; else echo $f closed; fi; done",
              NULL);
    }
    say("exit %d\n", wait_for(child));
    child = MUST(fork());
    if (!child) {
        chdir("/");
        umask(0);
        _exit(0);
    }
    wait_for(child);
    TRY(access("file", F_OK));
    TRY(umask(022));
}

static void limits(void)
{
    PART("limits");
    pid_t child = MUST(fork());
    if (!child) {
        struct rlimit limit = {20, 30}, seen;
        TRY(setrlimit(RLIMIT_NOFILE, &limit));
        pid_t grandchild = MUST(fork());
        if (!grandchild) {
            getrlimit(RLIMIT_NOFILE, &seen);
            say("inherited %ld %ld\n", (long)seen.rlim_cur, (long)seen.rlim_max);
            TRY(dup2(0, 20));
            TRY(dup2(0, 19));
            int last = 0, fd;
            while ((fd = dup(0)) >= 0)
                last = fd;
            say("last %d %s\n", last, error_name(errno));
            TRY(open("/dev/null", O_RDONLY));
            int ends[2];
            TRY(pipe(ends));
            TRY(fcntl(0, F_DUPFD, 20));
            execl("/bin/sh", "sh", "-c", "ulimit -n; ulimit -Hn", NULL);
        }
        say("exit %d\n", wait_for(grandchild));
        _exit(0);
    }
    wait_for(child);
}

static int ends_at_once(void *unused)
{
    (void)unused;
    return 0;
}

/* Descriptors are closed when the last process ends that has them, though another
 * that had them waits for its parent, and for a parent that never asks. */
static void shared_files(void)
{
    PART("descriptors that two processes have");
    int ends[2];
    siginfo_t info;
    MUST(pipe(ends));
    MUST(prctl(PR_SET_CHILD_SUBREAPER, 1));
    pid_t child = MUST(fork());
    if (!child) {
        close(ends[0]);
        pid_t other = clone(ends_at_once, stack + sizeof stack, CLONE_FILES, NULL);
        MUST(waitid(P_PID, (id_t)other, &info, WEXITED | WNOWAIT | __WALL));
        _exit(0);
    }
    close(ends[1]);
    say("status %x\n", wait_for(child));
    struct pollfd reader = {ends[0], POLLIN, 0};
    TRY(poll(&reader, 1, 5000));
    IS(reader.revents == POLLHUP);
    close(ends[0]);
    /* It had no signal for its parent, but is an ordinary child of its heir. */
    IS(waitpid(-1, NULL, 0) > 0);
    TRY(waitpid(-1, NULL, 0));
}

/* A child that could not be made leaves nothing: no descriptor of it stays open. */
static void unmade(void)
{
    PART("a pidfd that cannot be stored");
    int ends[2];
    MUST(pipe(ends));
    TRY(syscall(SYS_clone, CLONE_PIDFD | SIGCHLD, 0, 16L, 0, 0));
    struct clone_args args = {.flags = CLONE_PIDFD, .exit_signal = SIGCHLD, .pidfd = 16};
    TRY(syscall(SYS_clone3, &args, sizeof args));
    TRY(waitpid(-1, NULL, __WALL | WNOHANG));
    MUST(close(ends[1]));
    struct pollfd end = {ends[0], POLLIN, 0};
    TRY(poll(&end, 1, 0));
    IS(end.revents & POLLHUP);
    close(ends[0]);
}

int main(void)
{
    char *scratch = enter_scratch();
    memory();
    many();
    clones();
    spawns();
    files();
    limits();
    shared_files();
    unmade();
    leave_scratch(scratch);
    return 0;
}
