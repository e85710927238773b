/* Calls that fail late leave nothing behind: no process, thread, descriptor, file
 * or connection, and execve(2) that fails changes nothing of its caller. */
#include "guest.h"
#include <arpa/inet.h>
#include <dirent.h>
#include <linux/sched.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <sys/wait.h>

#define BAD ((void *)8)

static char *own_path;

/* Number of entries of a directory, "." and ".." and its own descriptor left out. */
static int entries(const char *path)
{
    int count = 0;
    DIR *dir = opendir(path);
    struct dirent *entry;
    char self[16];
    if (!dir)
        return -1;
    snprintf(self, sizeof self, "%d", dirfd(dir));
    while ((entry = readdir(dir)))
        count += entry->d_name[0] != '.' && strcmp(entry->d_name, self) != 0;
    closedir(dir);
    return count;
}

/* Number of threads that the table of processes shows for our children and us. */
static int processes_of_ours(void)
{
    int count = 0;
    DIR *dir = opendir("/proc");
    struct dirent *entry;
    while (dir && (entry = readdir(dir))) {
        char path[64], text[512] = {0};
        int pid = atoi(entry->d_name), parent = 0;
        if (!pid)
            continue;
        snprintf(path, sizeof path, "/proc/%d/stat", pid);
        int fd = open(path, O_RDONLY);
        if (fd < 0)
            continue;
        ssize_t got = read(fd, text, sizeof text - 1);
        close(fd);
        char *name_end = got > 0 ? strrchr(text, ')') : NULL;
        if (name_end && sscanf(name_end + 1, " %*c %d", &parent) == 1)
            count += pid == getpid() || parent == getpid();
    }
    if (dir)
        closedir(dir);
    return count;
}

/* Prints how many processes, threads and descriptors we have. */
static void count_all(void)
{
    say("processes %d threads %d descriptors %d\n", processes_of_ours(), entries("/proc/self/task"),
        entries("/proc/self/fd"));
    TRY(waitpid(-1, NULL, WNOHANG | __WALL));
}

/* Sets the limit so that `left` more descriptors can be opened. */
static void leave_room_for(int left)
{
    struct rlimit limit;
    int next = (int)MUST(dup(0));
    close(next);
    MUST(getrlimit(RLIMIT_NOFILE, &limit));
    limit.rlim_cur = (rlim_t)(next + left);
    MUST(setrlimit(RLIMIT_NOFILE, &limit));
}

static void lift_limit(void)
{
    struct rlimit limit;
    MUST(getrlimit(RLIMIT_NOFILE, &limit));
    limit.rlim_cur = 1024;
    MUST(setrlimit(RLIMIT_NOFILE, &limit));
}

static long clone_3(struct clone_args *args)
{
    long pid = syscall(SYS_clone3, args, sizeof *args);
    if (pid == 0)
        _exit(7);
    return pid;
}

static long clone_with(unsigned long flags, void *parent, void *child)
{
    long pid = syscall(SYS_clone, flags, 0, parent, child, 0);
    if (pid == 0)
        _exit(7);
    return pid;
}

static void clones(void)
{
    int pidfd = -77, tid = -78, status;
    long pid;
    struct clone_args args;

    PART("clone without room for the pidfd");
    leave_room_for(0);
    TRY(clone_with(CLONE_PIDFD | SIGCHLD, &pidfd, NULL));
    TRY(clone_with(CLONE_PIDFD | CLONE_FILES | SIGCHLD, &pidfd, NULL));
    TRY(clone_with(CLONE_PIDFD | CLONE_VM | CLONE_VFORK | SIGCHLD, &pidfd, NULL));
    args = (struct clone_args){.flags = CLONE_PIDFD | CLONE_PARENT_SETTID,
                               .pidfd = (uintptr_t)&pidfd,
                               .parent_tid = (uintptr_t)&tid,
                               .exit_signal = SIGCHLD};
    TRY(clone_3(&args));
    say("pidfd %d tid %d\n", pidfd, tid);
    lift_limit();
    count_all();

    PART("clone with a place for the pidfd that cannot be written to");
    TRY(clone_with(CLONE_PIDFD | SIGCHLD, BAD, NULL));
    TRY(clone_with(CLONE_PIDFD | CLONE_FILES | SIGCHLD, BAD, NULL));
    TRY(clone_with(CLONE_PIDFD | CLONE_VM | CLONE_VFORK | SIGCHLD, BAD, NULL));
    args.pidfd = (uintptr_t)BAD;
    TRY(clone_3(&args));
    say("tid %d\n", tid);
    count_all();

    PART("bad addresses that do not matter");
    pid = clone_with(CLONE_PARENT_SETTID | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | SIGCHLD, BAD,
                     BAD);
    IS(pid > 0);
    IS(waitpid((pid_t)pid, &status, 0) == pid);
    say("status %x\n", status);
    count_all();

    PART("and one that works");
    args.pidfd = (uintptr_t)&pidfd;
    pid = clone_3(&args);
    IS(pid > 0 && tid == pid && pidfd > 2);
    IS(waitpid((pid_t)pid, &status, 0) == pid);
    close(pidfd);
    count_all();

    /* parent_tid is in the memory of the parent only. */
    tid = -78;
    args = (struct clone_args){
        .flags = CLONE_PARENT_SETTID, .parent_tid = (uintptr_t)&tid, .exit_signal = SIGCHLD};
    pid = syscall(SYS_clone3, &args, sizeof args);
    if (pid == 0)
        _exit(tid == -78 ? 1 : 2);
    MUST(waitpid((pid_t)pid, &status, 0));
    say("status %x, %s\n", status, tid == pid ? "told" : "not told");
}

static void descriptors(void)
{
    int pair[2] = {-7, -7};
    struct rlimit limit;

    PART("open without room");
    put_file("full", "text");
    leave_room_for(0);
    TRY(open("new", O_RDWR | O_CREAT, 0644));
    TRY(open("full", O_RDWR | O_TRUNC));
    TRY(open("full", O_RDWR | O_CREAT | O_TRUNC, 0600));
    TRY(open(".", O_RDWR | O_TMPFILE, 0600));
    TRY(open("nowhere/x", O_RDONLY));
    TRY(open(BAD, O_RDONLY));
    TRY(creat("new", 0644));
    lift_limit();
    show_file("full");
    show_dir(".");

    PART("pairs with room for one");
    leave_room_for(1);
    TRY(pipe(pair));
    TRY(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    say("%d %d\n", pair[0], pair[1]);
    lift_limit();
    TRY(syscall(SYS_pipe2, BAD, 0));
    TRY(syscall(SYS_socketpair, AF_UNIX, SOCK_STREAM, 0, BAD));
    count_all();

    PART("other makers without room");
    leave_room_for(0);
    TRY(epoll_create1(0));
    TRY(syscall(SYS_memfd_create, "x", 0));
    TRY(timerfd_create(CLOCK_MONOTONIC, 0));
    TRY(socket(AF_UNIX, SOCK_STREAM, 0));
    TRY(socket(AF_INET, SOCK_DGRAM, 0));
    TRY(dup(1));
    TRY(fcntl(1, F_DUPFD, 3));
    MUST(getrlimit(RLIMIT_NOFILE, &limit));
    TRY(dup2(1, (int)limit.rlim_cur));
    TRY(syscall(SYS_pidfd_open, getpid(), 0));
    lift_limit();
    count_all();
}

static void connections(void)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX, .sun_path = "listener"};
    struct sockaddr_in inet = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr *addresses[] = {(struct sockaddr *)&name, (struct sockaddr *)&inet};
    socklen_t lens[] = {sizeof name, sizeof inet};
    int families[] = {AF_UNIX, AF_INET};
    char byte;

    for (int i = 0; i < 2; i++) {
        say("-- accept of family %d without room\n", families[i]);
        int listener = (int)MUST(socket(families[i], SOCK_STREAM, 0));
        MUST(bind(listener, addresses[i], lens[i]));
        MUST(listen(listener, 5));
        MUST(getsockname(listener, addresses[i], &lens[i]));
        int client = (int)MUST(socket(families[i], SOCK_STREAM, 0));
        MUST(connect(client, addresses[i], lens[i]));
        struct pollfd waiting = {.fd = listener, .events = POLLIN};
        TRY(poll(&waiting, 1, 10000));
        leave_room_for(0);
        TRY(accept(listener, NULL, NULL));
        TRY(accept4(listener, NULL, NULL, SOCK_NONBLOCK));
        lift_limit();
        /* The connection still waits. */
        TRY(poll(&waiting, 1, 10000));
        TRY(send(client, "x", 1, 0));
        int served = accept(listener, NULL, NULL);
        IS(served >= 0);
        TRY(recv(served, &byte, 1, 0));
        close(served);
        close(client);

        PART("and one whose address cannot be told");
        client = (int)MUST(socket(families[i], SOCK_STREAM, 0));
        MUST(connect(client, addresses[i], lens[i]));
        socklen_t len = sizeof(struct sockaddr_in);
        int before = entries("/proc/self/fd");
        TRY(accept(listener, BAD, &len));
        say("%d more descriptors\n", entries("/proc/self/fd") - before);
        /* Linux has closed the connection or kept it for the next call, but not lost it. */
        close(client);
        close(listener);
    }

    PART("a socket that is bound twice");
    int first = (int)MUST(socket(AF_UNIX, SOCK_STREAM, 0));
    struct sockaddr_un other = {.sun_family = AF_UNIX, .sun_path = "once"};
    TRY(bind(first, (struct sockaddr *)&other, sizeof other));
    strcpy(other.sun_path, "twice");
    TRY(bind(first, (struct sockaddr *)&other, sizeof other));
    show_dir(".");
    close(first);
    unlink("listener");
    unlink("once");
}

static void *sleeper(void *unused)
{
    (void)unused;
    for (;;)
        pause();
    return NULL;
}

static void *execute_self(void *unused)
{
    char *argv[] = {own_path, "leave", NULL}, *envp[] = {NULL};
    (void)unused;
    execve(own_path, argv, envp);
    _exit(4);
    return NULL;
}

/* Two threads that execute a program at the same time: one of them does. */
static void races(void)
{
    int ended = 0, status;
    PART("execve by two threads at once");
    for (int i = 0; i < 50; i++) {
        pid_t pid = (pid_t)MUST(fork());
        if (pid == 0) {
            pthread_t thread;
            if (pthread_create(&thread, NULL, execute_self, NULL))
                _exit(3);
            execute_self(NULL);
        }
        MUST(waitpid(pid, &status, 0));
        ended += status == 5 << 8;
    }
    say("%d\n", ended);
}

static void executions(void)
{
    char *argv[] = {"program", NULL}, *envp[] = {NULL};
    char *many[2001];
    char *long_one = malloc(130000);
    pthread_t thread;
    int status;
    pid_t pid;

    PART("execve that fails in a process with threads");
    put_file("text", "no program\n");
    put_file("cut", "\177ELF");
    put_file("lost", "#!/nowhere/interpreter\n");
    chmod("text", 0755);
    chmod("cut", 0755);
    chmod("lost", 0755);
    memset(long_one, 'x', 130000 - 1);
    long_one[130000 - 1] = 0;
    for (int i = 0; i < 2000; i++)
        many[i] = long_one;
    many[2000] = NULL;
    CODE(pthread_create(&thread, NULL, sleeper, NULL));
    struct sigaction action = {.sa_handler = SIG_IGN};
    MUST(sigaction(SIGUSR1, &action, NULL));
    int kept = (int)MUST(open("text", O_RDONLY | O_CLOEXEC));
    TRY(execve("text", argv, envp));
    TRY(execve("cut", argv, envp));
    TRY(execve("lost", argv, envp));
    TRY(execve("nothing", argv, envp));
    TRY(execve(own_path, many, envp));
    TRY(execve(own_path, argv, many));
    TRY(execve(own_path, BAD, envp));
    count_all();
    IS(fcntl(kept, F_GETFD) == FD_CLOEXEC);
    CODE(pthread_kill(thread, 0));

    PART("and after vfork");
    const char *names[] = {"text", "cut", "lost", "nothing"};
    for (int i = 0; i < 4; i++) {
        pid = vfork();
        if (pid == 0) {
            execve(names[i], argv, envp);
            _exit(errno == ENOEXEC ? 10 : errno == ENOENT ? 11 : 12);
        }
        MUST(waitpid(pid, &status, 0));
        say("%s: status %x\n", names[i], status);
    }
    pid = vfork();
    if (pid == 0) {
        execve(own_path, many, envp);
        _exit(errno == E2BIG ? 10 : 12);
    }
    MUST(waitpid(pid, &status, 0));
    say("too long: status %x\n", status);
    count_all();
    close(kept);
    free(long_one);
}

static void ipc(void)
{
    struct {
        long type;
        char text[16];
    } message = {1, "hello"};
    struct shmid_ds segment;
    struct msqid_ds queue_info;

    PART("messages");
    int queue = (int)MUST(msgget(IPC_PRIVATE, 0600));
    TRY(syscall(SYS_msgsnd, queue, BAD, 5, 0));
    TRY(syscall(SYS_msgsnd, queue, &message, 1 << 20, 0));
    MUST(msgctl(queue, IPC_STAT, &queue_info));
    say("%lu messages\n", (unsigned long)queue_info.msg_qnum);
    TRY(msgsnd(queue, &message, 6, 0));
    TRY(msgrcv(queue, &message, 2, 0, IPC_NOWAIT));
    MUST(msgctl(queue, IPC_STAT, &queue_info));
    say("%lu messages\n", (unsigned long)queue_info.msg_qnum);
    TRY(syscall(SYS_msgrcv, queue, BAD, 16, 0, IPC_NOWAIT));
    MUST(msgctl(queue, IPC_STAT, &queue_info));
    say("%lu messages\n", (unsigned long)queue_info.msg_qnum);
    MUST(msgctl(queue, IPC_RMID, NULL));

    PART("memory");
    int memory = (int)MUST(shmget(IPC_PRIVATE, 8192, 0600));
    TRY(shmat(memory, (void *)(uintptr_t)12345, 0));
    TRY(shmat(memory, NULL, SHM_REMAP));
    TRY(shmat(memory, (void *)0x7ffffffff000, 0));
    char *page = mmap(NULL, 8192, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TRY(shmat(memory, page, 0));
    MUST(shmctl(memory, IPC_STAT, &segment));
    say("attached %lu\n", (unsigned long)segment.shm_nattch);
    MUST(shmctl(memory, IPC_RMID, NULL));
    TRY(shmctl(memory, IPC_STAT, &segment));

    PART("semaphores");
    int set = (int)MUST(semget(IPC_PRIVATE, 3, 0600));
    struct sembuf steps[] = {{0, 1, SEM_UNDO}, {1, 1, SEM_UNDO}, {2, -1, IPC_NOWAIT}};
    TRY(semop(set, steps, 3));
    steps[2].sem_num = 9;
    TRY(semop(set, steps, 3));
    steps[2] = (struct sembuf){2, 32767, SEM_UNDO};
    TRY(semop(set, steps, 3));
    steps[2] = (struct sembuf){0, 32767, 0};
    TRY(semop(set, steps, 3));
    for (int i = 0; i < 3; i++)
        TRY(semctl(set, i, GETVAL));
    MUST(semctl(set, 0, IPC_RMID));
}

static int handled;

static void handle(int signal)
{
    (void)signal;
    handled++;
}

/* Calls that change something and only then find no place for the answer: Linux
 * keeps the change of some and takes back that of others. */
static void answers(void)
{
    struct sigaction action = {.sa_handler = handle}, seen;
    struct itimerspec when = {.it_value = {1000, 0}};
    struct rlimit limit;
    sigset_t usr1, now;
    stack_t stack = {.ss_sp = malloc(65536), .ss_size = 65536}, old_stack;
    struct sigevent event = {.sigev_notify = SIGEV_NONE};
    int status;

    PART("answers that cannot be told");
    uint64_t kernel_action[4] = {(uintptr_t)handle, 0x04000000, 0, 0};
    TRY(syscall(SYS_rt_sigaction, SIGUSR2, kernel_action, BAD, 8));
    MUST(sigaction(SIGUSR2, NULL, &seen));
    IS(seen.sa_handler == handle);
    action.sa_handler = SIG_DFL;
    MUST(sigaction(SIGUSR2, &action, NULL));

    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    TRY(syscall(SYS_rt_sigprocmask, SIG_BLOCK, &usr1, BAD, 8));
    MUST(sigprocmask(SIG_BLOCK, NULL, &now));
    IS(sigismember(&now, SIGUSR1));
    MUST(sigprocmask(SIG_UNBLOCK, &usr1, NULL));

    TRY(syscall(SYS_sigaltstack, &stack, BAD));
    MUST(sigaltstack(NULL, &old_stack));
    IS(old_stack.ss_sp == stack.ss_sp);
    stack.ss_flags = SS_DISABLE;
    MUST(sigaltstack(&stack, NULL));

    int timer = (int)MUST(timerfd_create(CLOCK_MONOTONIC, 0));
    TRY(syscall(SYS_timerfd_settime, timer, 0, &when, BAD));
    struct itimerspec left;
    MUST(timerfd_gettime(timer, &left));
    IS(left.it_value.tv_sec > 0);
    close(timer);

    TRY(syscall(SYS_timer_create, CLOCK_MONOTONIC, &event, BAD));
    int id = -1;
    MUST(syscall(SYS_timer_create, CLOCK_MONOTONIC, &event, &id));
    TRY(syscall(SYS_timer_settime, id, 0, &when, BAD));
    MUST(syscall(SYS_timer_gettime, id, &left));
    IS(left.it_value.tv_sec > 0);
    MUST(syscall(SYS_timer_delete, id));

    struct {
        struct timeval a, b;
    } virtual = {{0, 0}, {1000, 0}}, got;
    TRY(syscall(SYS_setitimer, 1, &virtual, BAD));
    MUST(syscall(SYS_getitimer, 1, &got));
    IS(got.b.tv_sec > 0);
    memset(&virtual, 0, sizeof virtual);
    MUST(syscall(SYS_setitimer, 1, &virtual, NULL));

    MUST(getrlimit(RLIMIT_CORE, &limit));
    limit.rlim_cur = 4096;
    limit.rlim_max = RLIM_INFINITY;
    TRY(syscall(SYS_prlimit64, 0, RLIMIT_CORE, &limit, BAD));
    MUST(getrlimit(RLIMIT_CORE, &limit));
    say("%ld\n", (long)limit.rlim_cur);

    pid_t pid = fork();
    if (pid == 0)
        _exit(3);
    siginfo_t info;
    MUST(waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT));
    TRY(syscall(SYS_wait4, -1, BAD, 0, NULL));
    TRY(waitpid(-1, &status, WNOHANG));

    PART("reads to nowhere");
    uint64_t value = 5;
    int counter = (int)MUST(syscall(SYS_eventfd2, 5, O_NONBLOCK));
    TRY(read(counter, BAD, 8));
    TRY(read(counter, &value, 8));
    close(counter);
    int pair[2];
    char text[8] = "";
    MUST(pipe2(pair, O_NONBLOCK));
    MUST(write(pair[1], "abc", 3));
    TRY(read(pair[0], BAD, 3));
    TRY(read(pair[0], text, 8));
    close(pair[0]);
    close(pair[1]);
    MUST(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair));
    MUST(write(pair[1], "abc", 3));
    TRY(read(pair[0], BAD, 3));
    TRY(read(pair[0], text, 8));
    close(pair[0]);
    close(pair[1]);

    PART("descriptors in a message without room");
    struct iovec part = {text, 1};
    union {
        char bytes[CMSG_SPACE(2 * sizeof(int))];
        struct cmsghdr header;
    } control;
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = &control,
                             .msg_controllen = sizeof control};
    MUST(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair));
    memset(&control, 0, sizeof control);
    control.header = (struct cmsghdr){CMSG_LEN(2 * sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(&control.header), (int[]){0, 1}, 2 * sizeof(int));
    TRY(sendmsg(pair[0], &message, 0));
    leave_room_for(1);
    TRY(recvmsg(pair[1], &message, 0));
    lift_limit();
    say("flags %x length %zu\n", message.msg_flags, (size_t)message.msg_controllen);
    count_all();
    memset(&control, 0, sizeof control);
    control.header = (struct cmsghdr){CMSG_LEN(2 * sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(&control.header), (int[]){0, 1}, 2 * sizeof(int));
    message.msg_controllen = sizeof control;
    TRY(sendmsg(pair[0], &message, 0));
    message.msg_control = BAD;
    TRY(recvmsg(pair[1], &message, 0));
    say("flags %x\n", message.msg_flags);
    count_all();
    close(pair[0]);
    close(pair[1]);
}

/* Several messages at once: one whose length cannot be told ends the call, which says how many
 * came before it. */
static void several_messages(void)
{
    int pair[2];
    char texts[2][4] = {"one", "two"};
    struct iovec parts[2] = {{texts[0], 3}, {texts[1], 3}};
    char *pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    PART("messages whose length cannot be told");
    MUST(mprotect(pages + 4096, 4096, PROT_NONE));
    MUST(socketpair(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK, 0, pair));
    /* The length of the last message lies in the page that is not there. */
    struct mmsghdr *last = (void *)(pages + 4096 - offsetof(struct mmsghdr, msg_len));
    struct mmsghdr *both = last - 1;
    both->msg_hdr = (struct msghdr){.msg_iov = &parts[0], .msg_iovlen = 1};
    last->msg_hdr = (struct msghdr){.msg_iov = &parts[1], .msg_iovlen = 1};
    TRY(sendmmsg(pair[0], both, 2, 0));
    TRY(sendmmsg(pair[0], last, 1, 0));
    TRY(recvmmsg(pair[1], both, 2, 0, NULL));
    TRY(recvmmsg(pair[1], last, 1, 0, NULL));
    close(pair[0]);
    close(pair[1]);
    MUST(munmap(pages, 8192));
}

/* A mask for the time of a call ends with the call, whether it failed or not. */
static void masks(void)
{
    struct sigaction action = {.sa_handler = handle};
    sigset_t usr1, none, now;
    struct epoll_event event = {.events = EPOLLIN | EPOLLONESHOT}, seen = {0};
    struct pollfd ready;
    fd_set set;
    int pair[2];

    PART("temporary signal masks");
    sigemptyset(&none);
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    MUST(sigaction(SIGUSR1, &action, NULL));
    MUST(sigprocmask(SIG_BLOCK, &usr1, NULL));
    MUST(raise(SIGUSR1));
    MUST(pipe(pair));
    MUST(write(pair[1], "x", 1));
    int epoll = (int)MUST(epoll_create1(0));
    TRY(epoll_pwait(-1, &seen, 1, 0, &none));
    TRY(epoll_pwait(epoll, &seen, 0, 0, &none));
    TRY(epoll_pwait(epoll, &seen, 1, 0, &none));
    TRY(epoll_ctl(epoll, EPOLL_CTL_ADD, pair[0], &event));
    say("%d handled\n", handled);
    TRY(syscall(SYS_epoll_pwait, epoll, BAD, 1, 0, NULL, 8));
    TRY(epoll_pwait(epoll, &seen, 1, 0, &none));
    TRY(epoll_pwait(epoll, &seen, 1, 0, NULL));
    ready = (struct pollfd){.fd = pair[0], .events = POLLIN};
    TRY(ppoll(&ready, 1, NULL, &none));
    TRY(ppoll(&ready, 1 << 30, NULL, &none));
    FD_ZERO(&set);
    FD_SET(pair[0], &set);
    TRY(pselect(pair[0] + 1, &set, NULL, NULL, NULL, &none));
    FD_SET(900, &set);
    TRY(pselect(1000, &set, NULL, NULL, NULL, &none));
    say("%d handled\n", handled);
    MUST(sigprocmask(SIG_BLOCK, NULL, &now));
    IS(sigismember(&now, SIGUSR1));
    /* With nothing to report, the signal ends the call, also one that does not wait. */
    struct timespec at_once = {0, 0};
    ready.events = POLLPRI;
    TRY(ppoll(&ready, 1, &at_once, &none));
    say("%d handled\n", handled);
    MUST(raise(SIGUSR1));
    TRY(pselect(0, NULL, NULL, NULL, &at_once, &none));
    say("%d handled\n", handled);
    MUST(raise(SIGUSR1));
    TRY(epoll_pwait(epoll, &seen, 1, -1, &none));
    say("%d handled\n", handled);
    MUST(raise(SIGUSR1));
    MUST(sigprocmask(SIG_UNBLOCK, &usr1, NULL));
    say("%d handled\n", handled);
    close(epoll);
    close(pair[0]);
    close(pair[1]);
}

static void locks(void)
{
    PART("a lock that cannot be converted is lost");
    int a = (int)MUST(open("locked", O_RDWR | O_CREAT, 0644)), b = (int)MUST(open("locked", O_RDWR));
    struct flock first = {.l_type = F_RDLCK, .l_len = 10}, second = {.l_type = F_WRLCK, .l_len = 20};
    TRY(flock(a, LOCK_SH));
    TRY(flock(b, LOCK_SH));
    TRY(flock(a, LOCK_EX | LOCK_NB));
    TRY(flock(b, LOCK_EX | LOCK_NB));
    /* One that is refused leaves the old record lock. */
    TRY(fcntl(a, F_OFD_SETLK, &first));
    TRY(fcntl(b, F_OFD_SETLK, &first));
    TRY(fcntl(a, F_OFD_SETLK, &second));
    TRY(fcntl(b, F_OFD_SETLK, &second));
    close(a);
    TRY(fcntl(b, F_OFD_SETLK, &second));
    close(b);
    unlink("locked");
}

static void terminals(void)
{
    struct pollfd master = {.events = POLLIN};
    int unlock = 0;
    PART("a terminal without room");
    master.fd = (int)MUST(open("/dev/ptmx", O_RDWR | O_NOCTTY));
    MUST(ioctl(master.fd, TIOCSPTLCK, &unlock));
    leave_room_for(0);
    TRY(ioctl(master.fd, TIOCGPTPEER, O_RDWR | O_NOCTTY));
    lift_limit();
    TRY(poll(&master, 1, 0));
    say("events %x\n", master.revents);
    close(master.fd);
}

int main(int argc, char **argv)
{
    char *scratch;
    if (argc > 1 && !strcmp(argv[1], "leave"))
        return 5;
    closefrom(3);
    own_path = realpath(argv[0], NULL);
    scratch = enter_scratch();
    signal(SIGCHLD, SIG_DFL);
    count_all();
    clones();
    descriptors();
    connections();
    ipc();
    answers();
    several_messages();
    masks();
    locks();
    terminals();
    races();
    executions();
    leave_scratch(scratch);
    return 0;
}
