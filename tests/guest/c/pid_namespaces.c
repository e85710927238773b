/* PID namespaces: numbers of processes in one, and outside (pid_namespaces(7)). */
#include "guest.h"
#include <pthread.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/un.h>

static int pidfd_open_of(pid_t pid)
{
    return (int)syscall(SYS_pidfd_open, pid, 0);
}

/* A child in a new namespace, or in that for children with no flags. */
static pid_t spawn(int flags)
{
    return (pid_t)syscall(SYS_clone, flags | SIGCHLD, 0, 0, 0, 0);
}

static void report(pid_t child)
{
    int status;
    pid_t heard = waitpid(child, &status, 0);
    if (heard != child)
        say("waitpid: %s\n", error_name(errno));
    else if (WIFSIGNALED(status))
        say("killed by %d\n", WTERMSIG(status));
    else
        say("exit %d\n", WEXITSTATUS(status));
}

static pid_t answer;
static void note(int signal, siginfo_t *info, void *context)
{
    (void)signal;
    (void)context;
    answer = info->si_pid;
}

static void handle(int signal)
{
    struct sigaction action = { .sa_sigaction = note, .sa_flags = SA_SIGINFO | SA_RESTART };
    sigaction(signal, &action, 0);
}

static void *thread(void *tid)
{
    *(long *)tid = syscall(SYS_gettid);
    return 0;
}

static void numbers(void)
{
    PART("numbers");
    int pair[2];
    socketpair(AF_UNIX, SOCK_DGRAM, 0, pair);
    int on = 1;
    setsockopt(pair[0], SOL_SOCKET, SO_PASSCRED, &on, sizeof on);
    handle(SIGCHLD);
    pid_t child = spawn(CLONE_NEWPID);
    if (child == 0) {
        say("pid %d tid %ld parent %d\n", getpid(), syscall(SYS_gettid), getppid());
        say("group %d session %d\n", getpgrp(), getsid(0));
        long tid = 0;
        pthread_t other;
        pthread_create(&other, 0, thread, &tid);
        pthread_join(other, 0);
        say("thread %ld\n", tid);
        pid_t inner = fork();
        if (inner == 0) {
            say("pid %d parent %d\n", getpid(), getppid());
            pid_t session = setsid();
            say("setsid %d group %d\n", session, getpgrp());
            _exit(4);
        }
        siginfo_t info = { 0 };
        TRY(waitid(P_PID, (id_t)inner, &info, WEXITED));
        say("child %d\n", inner);
        say("si_pid %d, handler %d\n", info.si_pid, answer);
        TRY(kill(inner, 0));
        TRY(kill(getppid() + 1000000, 0));
        TRY(getpgid(1));
        TRY(pidfd_open_of(77777));
        send(pair[1], "x", 1, 0);
        _exit(7);
    }
    char byte, control[256];
    struct iovec vector = { &byte, 1 };
    struct msghdr message = { .msg_iov = &vector, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
    while (recvmsg(pair[0], &message, 0) < 0 && errno == EINTR)
        ;
    struct ucred *sender = (struct ucred *)CMSG_DATA(CMSG_FIRSTHDR(&message));
    say("sender is the child: %d\n", sender->pid == child);
    report(child);
    say("SIGCHLD is of the child: %d\n", answer == child);
    close(pair[0]);
    close(pair[1]);
    signal(SIGCHLD, SIG_DFL);
}

static void sight(void)
{
    PART("what is seen from inside");
    char name[] = "/tmp/pid_namespaces.XXXXXX";
    int file = mkstemp(name);
    struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET };
    fcntl(file, F_SETLK, &lock);
    int pair[2];
    socketpair(AF_UNIX, SOCK_STREAM, 0, pair);
    int own = pidfd_open_of(getpid());
    pid_t child = spawn(CLONE_NEWPID);
    if (child == 0) {
        TRY(fcntl(file, F_GETLK, &lock));
        say("l_pid %d\n", lock.l_pid);
        struct ucred peer;
        socklen_t len = sizeof peer;
        getsockopt(pair[0], SOL_SOCKET, SO_PEERCRED, &peer, &len);
        say("peer %d\n", peer.pid);
        char path[64];
        snprintf(path, sizeof path, "/proc/self/fdinfo/%d", own);
        int fd = open(path, O_RDONLY);
        say("fdinfo can be opened: %s\n", fd < 0 ? error_name(errno) : "yes");
        close(fd);
        TRY(syscall(SYS_pidfd_send_signal, own, 0, 0, 0));
        fcntl(file, F_SETOWN, getpid());
        say("owner %d\n", fcntl(file, F_GETOWN));
        _exit(0);
    }
    report(child);
    say("owner is the child's id: %d\n", fcntl(file, F_GETOWN) == child || fcntl(file, F_GETOWN) == 0);
    unlink(name);
    close(file);
    close(own);
    close(pair[0]);
    close(pair[1]);
}

static void guarded(void)
{
    PART("signals to init");
    pid_t child = spawn(CLONE_NEWPID);
    if (child == 0) {
        TRY(kill(1, SIGTERM));
        TRY(kill(1, SIGKILL));
        TRY(raise(SIGSTOP));
        pid_t inner = fork();
        if (inner == 0) {
            kill(1, SIGKILL);
            kill(1, SIGSTOP);
            kill(1, SIGTERM);
            _exit(0);
        }
        waitpid(inner, 0, 0);
        handle(SIGUSR1);
        inner = fork();
        if (inner == 0) {
            kill(1, SIGUSR1);
            _exit(0);
        }
        waitpid(inner, 0, 0);
        say("a handler hears of %d\n", answer == inner);
        TRY(kill(-1, 0));
        say("still there\n");
        _exit(5);
    }
    report(child);
    int ready[2];
    pipe(ready);
    sigset_t user;
    sigemptyset(&user);
    sigaddset(&user, SIGUSR1);
    sigprocmask(SIG_BLOCK, &user, 0);
    child = spawn(CLONE_NEWPID);
    if (child == 0) {
        handle(SIGUSR1);
        answer = -1;
        write(ready[1], "x", 1);
        sigset_t none;
        sigemptyset(&none);
        while (answer == -1)
            sigsuspend(&none);
        say("sender from outside is %d\n", answer);
        write(ready[1], "x", 1);
        for (;;)
            pause();
    }
    char byte;
    read(ready[0], &byte, 1);
    kill(child, SIGTERM);
    kill(child, SIGUSR1);
    read(ready[0], &byte, 1);
    kill(child, SIGKILL);
    report(child);
    sigprocmask(SIG_UNBLOCK, &user, 0);
    close(ready[0]);
    close(ready[1]);
}

static void end_of_init(void)
{
    PART("the end of init");
    int pipe_[2];
    pipe(pipe_);
    pid_t child = spawn(CLONE_NEWPID);
    if (child == 0) {
        for (int i = 0; i < 3; i++)
            if (fork() == 0) {
                signal(SIGTERM, SIG_IGN);
                if (i == 1) {
                    pid_t below = spawn(CLONE_NEWPID);
                    if (below == 0)
                        for (;;)
                            pause();
                }
                for (;;)
                    pause();
            }
        close(pipe_[1]);
        _exit(3);
    }
    close(pipe_[1]);
    char byte;
    report(child);
    say("nobody is left: %zd\n", read(pipe_[0], &byte, 1));
    close(pipe_[0]);
}

static void orphans(void)
{
    PART("orphans");
    pid_t child = spawn(CLONE_NEWPID);
    if (child == 0) {
        int ready[2];
        pipe(ready);
        pid_t middle = fork();
        if (middle == 0) {
            if (fork() == 0) {
                char byte;
                close(ready[1]);
                read(ready[0], &byte, 1);
                say("an orphan's parent is %d\n", getppid());
                _exit(9);
            }
            _exit(0);
        }
        waitpid(middle, 0, 0);
        close(ready[0]);
        close(ready[1]);
        int status;
        say("its number is %d\n", waitpid(-1, &status, 0));
        say("its status is %d\n", WEXITSTATUS(status));
        _exit(0);
    }
    report(child);
}

static void unshared(void)
{
    PART("unshare");
    pid_t child = fork();
    if (child == 0) {
        TRY(unshare(CLONE_NEWPID));
        TRY(unshare(CLONE_NEWPID));
        TRY(spawn(CLONE_NEWPID));
        long tid;
        pthread_t other;
        say("thread: %s\n", error_name(pthread_create(&other, 0, thread, &tid)));
        char link[64];
        TRY(readlink("/proc/self/ns/pid_for_children", link, sizeof link));
        pid_t first = fork();
        if (first == 0)
            for (;;)
                pause();
        pid_t second = fork();
        if (second == 0) {
            say("pid %d parent %d\n", getpid(), getppid());
            _exit(0);
        }
        report(second);
        int fd = open("/proc/self/ns/pid_for_children", O_RDONLY);
        say("it has a file: %d\n", fd >= 0);
        close(fd);
        kill(first, SIGKILL);
        report(first);
        TRY(fork());
        _exit(0);
    }
    report(child);
}

static void entered(void)
{
    PART("setns");
    pid_t child = spawn(CLONE_NEWPID);
    if (child == 0)
        for (;;)
            pause();
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/ns/pid", child);
    int theirs = open(path, O_RDONLY | O_CLOEXEC), own = open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC);
    TRY(setns(theirs, CLONE_NEWNS));
    TRY(setns(theirs, CLONE_NEWPID));
    pid_t entered = fork();
    if (entered == 0) {
        say("pid %d parent %d\n", getpid(), getppid());
        TRY(setns(own, 0));
        TRY(setns(theirs, 0));
        TRY(prctl(PR_SET_CHILD_SUBREAPER, 1));
        _exit(6);
    }
    report(entered);
    TRY(setns(own, 0));
    kill(child, SIGKILL);
    report(child);
    TRY(setns(theirs, 0));
    TRY(fork());
    TRY(setns(own, 0));
}

static void nested(void)
{
    PART("levels");
    pid_t child = spawn(CLONE_NEWPID);
    if (child == 0) {
        int level = 1;
        for (;;) {
            pid_t below = spawn(CLONE_NEWPID);
            if (below < 0) {
                say("level %d: %s\n", level, error_name(errno));
                _exit(0);
            }
            if (below > 0) {
                waitpid(below, 0, 0);
                _exit(0);
            }
            level++;
        }
    }
    report(child);
}

/* A child in the namespace for children that only waits. */
static pid_t waiting(void)
{
    pid_t child = fork();
    if (child == 0)
        for (;;)
            pause();
    return child;
}

/* Init waits for the children of others in its namespace, which first wait for what init has. */
static void given_back(void)
{
    PART("what init gives back before it waits");
    pid_t child = fork();
    if (child == 0) {
        int ready[2], held[2];
        char byte;
        pipe(ready);
        pipe(held);
        TRY(unshare(CLONE_NEWPID));
        pid_t init = fork();
        if (init == 0) {
            close(held[0]);
            read(ready[0], &byte, 1);
            _exit(3);
        }
        close(held[1]);
        pid_t other = waiting();
        int file = pidfd_open_of(init);
        write(ready[1], "x", 1);
        say("end of file: %zd\n", read(held[0], &byte, 1));
        say("init waits: %d\n", waitpid(init, 0, WNOHANG));
        report(other);
        report(init);
        close(file);
        _exit(0);
    }
    report(child);
    child = fork();
    if (child == 0) {
        int ready[2];
        char byte;
        pipe(ready);
        TRY(unshare(CLONE_NEWPID));
        pid_t init = fork();
        if (init == 0) {
            read(ready[0], &byte, 1);
            TRY(ptrace(PTRACE_SEIZE, 2, 0, PTRACE_O_TRACEEXIT));
            TRY(ptrace(PTRACE_SEIZE, 3, 0, 0));
            TRY(kill(3, SIGKILL));
            siginfo_t info;
            waitid(P_PID, 3, &info, WEXITED | WNOWAIT);
            _exit(3);
        }
        pid_t others[] = { waiting(), waiting() };
        write(ready[1], "x", 1);
        report(others[0]);
        report(others[1]);
        report(init);
        _exit(0);
    }
    report(child);
}

static void traced_init(void)
{
    PART("init that is traced");
    pid_t child = spawn(CLONE_NEWPID);
    if (child == 0) {
        TRY(ptrace(PTRACE_TRACEME, 0, 0, 0));
        raise(SIGSTOP);
        kill(1, SIGKILL);
        _exit(4);
    }
    int status;
    waitpid(child, &status, WUNTRACED);
    say("stopped by %d\n", WIFSTOPPED(status) ? WSTOPSIG(status) : 0);
    TRY(ptrace(PTRACE_CONT, child, 0, 0));
    report(child);
}

static void timer_of_init(void)
{
    PART("a timer does not kill init");
    pid_t child = spawn(CLONE_NEWPID);
    if (child == 0) {
        struct sigevent event = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGKILL };
        struct itimerspec soon = { .it_value = { 0, 1000000 } };
        timer_t timer;
        TRY(timer_create(CLOCK_MONOTONIC, &event, &timer));
        TRY(timer_settime(timer, 0, &soon, 0));
        usleep(50000);
        _exit(5);
    }
    report(child);
}

static void sent_as(pid_t pid)
{
    int pair[2];
    socketpair(AF_UNIX, SOCK_DGRAM, 0, pair);
    struct {
        struct cmsghdr header;
        struct ucred credentials;
    } control = { { CMSG_LEN(sizeof(struct ucred)), SOL_SOCKET, SCM_CREDENTIALS }, { pid, getuid(), getgid() } };
    struct iovec vector = { "x", 1 };
    struct msghdr message = { .msg_iov = &vector, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control };
    TRY(sendmsg(pair[0], &message, 0));
    close(pair[0]);
    close(pair[1]);
}

/* Who has sent a datagram, connected a socket and set a semaphore, once it is gone. */
static void left_behind(void)
{
    int pair[2], on = 1;
    socketpair(AF_UNIX, SOCK_DGRAM, 0, pair);
    setsockopt(pair[0], SOL_SOCKET, SO_PASSCRED, &on, sizeof on);
    struct sockaddr_un name = { .sun_family = AF_UNIX };
    socklen_t len = sizeof(sa_family_t);
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    bind(listener, (struct sockaddr *)&name, len);
    listen(listener, 1);
    len = sizeof name;
    getsockname(listener, (struct sockaddr *)&name, &len);
    int set = semget(IPC_PRIVATE, 1, 0600);
    pid_t gone = fork();
    if (gone == 0) {
        send(pair[1], "x", 1, 0);
        connect(socket(AF_UNIX, SOCK_STREAM, 0), (struct sockaddr *)&name, len);
        semctl(set, 0, SETVAL, 3);
        _exit(0);
    }
    report(gone);
    char byte, control[256];
    struct iovec vector = { &byte, 1 };
    struct msghdr message = { .msg_iov = &vector, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
    recvmsg(pair[0], &message, 0);
    struct ucred *sender = (struct ucred *)CMSG_DATA(CMSG_FIRSTHDR(&message)), peer;
    say("it was the sender: %d\n", sender->pid == gone);
    int accepted = accept(listener, 0, 0);
    len = sizeof peer;
    getsockopt(accepted, SOL_SOCKET, SO_PEERCRED, &peer, &len);
    say("it was the peer: %d\n", peer.pid == gone);
    say("it set the semaphore: %d\n", semctl(set, 0, GETPID) == gone);
    semctl(set, 0, IPC_RMID);
    TRY(kill(gone, 0));
}

static void unheard(void)
{
    PART("numbers of those who are gone");
    pid_t child = spawn(CLONE_NEWPID);
    if (child == 0) {
        struct sigaction action = { .sa_sigaction = note, .sa_flags = SA_SIGINFO | SA_NOCLDWAIT };
        sigaction(SIGCHLD, &action, 0);
        sigset_t children, none;
        sigemptyset(&none);
        sigemptyset(&children);
        sigaddset(&children, SIGCHLD);
        sigprocmask(SIG_BLOCK, &children, 0);
        answer = -1;
        pid_t gone = fork();
        if (gone == 0)
            _exit(0);
        while (answer == -1)
            sigsuspend(&none);
        say("SIGCHLD is of the child: %d\n", answer == gone);
        sent_as(getpid());
        sent_as(77777);
        signal(SIGCHLD, SIG_DFL);
        left_behind();
        _exit(0);
    }
    report(child);
}

/* A group whose leader was in a namespace, and whose last member is not. */
static void outer_member(void)
{
    PART("a group across namespaces");
    pid_t child = fork();
    if (child == 0) {
        int ask[2], told[2];
        char byte;
        pipe(ask);
        pipe(told);
        TRY(unshare(CLONE_NEWPID));
        pid_t init = fork();
        if (init == 0) {
            read(ask[0], &byte, 1);
            TRY(kill(2, 0));
            say("its group is seen: %s\n", kill(-2, 0) == 0 ? "yes" : error_name(errno));
            write(told[1], "x", 1);
            read(ask[0], &byte, 1);
            TRY(kill(-2, 0));
            _exit(0);
        }
        pid_t leader = waiting(), own = getpgrp();
        setpgid(leader, 0);
        TRY(setpgid(0, leader));
        kill(leader, SIGKILL);
        report(leader);
        write(ask[1], "x", 1);
        read(told[0], &byte, 1);
        TRY(setpgid(0, own));
        write(ask[1], "x", 1);
        report(init);
        _exit(0);
    }
    report(child);
}

int main(void)
{
    numbers();
    sight();
    guarded();
    end_of_init();
    orphans();
    unshared();
    entered();
    nested();
    given_back();
    traced_init();
    timer_of_init();
    unheard();
    outer_member();
    return 0;
}
