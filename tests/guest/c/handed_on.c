/* What a program leaves to others, or finds as others have left it: signals for a child that has
 * the descriptor only, locks behind execve(2), input typed in another mode, places in a queue of
 * those who have gone, a terminal without a shell, shared memory of processes that have ended. */
#include "guest.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <pty.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <termios.h>

static void finish(pid_t child)
{
    int status;
    MUST(waitpid(child, &status, 0));
    say("child: %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
}

static void a_signalfd_of_the_parent(void)
{
    sigset_t set, old;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    MUST(sigprocmask(SIG_BLOCK, &set, &old));
    int fd = (int)MUST(signalfd(-1, &set, 0));
    pid_t child = fork();
    if (child == 0) {
        struct signalfd_siginfo info;
        alarm(20);
        _exit(read(fd, &info, sizeof info) == sizeof info ? (int)info.ssi_signo : 1);
    }
    usleep(200000);
    MUST(kill(child, SIGTERM));
    finish(child);
    MUST(close(fd));
    MUST(sigprocmask(SIG_SETMASK, &old, NULL));
}

/* Neither has a use for O_ASYNC. */
static void signals_that_tell_of_signals(void)
{
    sigset_t set, old;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigaddset(&set, SIGIO);
    MUST(sigprocmask(SIG_BLOCK, &set, &old));
    int fd = (int)MUST(signalfd(-1, &set, SFD_NONBLOCK)), all = (int)MUST(epoll_create1(0));
    struct epoll_event event = {.events = EPOLLIN};
    MUST(epoll_ctl(all, EPOLL_CTL_ADD, fd, &event));
    int both[] = {fd, all};
    for (int i = 0; i < 2; i++) {
        MUST(fcntl(both[i], F_SETOWN, getpid()));
        TRY(fcntl(both[i], F_SETFL, O_ASYNC | O_NONBLOCK));
    }
    MUST(raise(SIGUSR1));
    struct signalfd_siginfo info;
    TRY(read(fd, &info, sizeof info));
    IS(info.ssi_signo == SIGUSR1);
    TRY(read(fd, &info, sizeof info));
    close(fd);
    close(all);
    MUST(sigprocmask(SIG_SETMASK, &old, NULL));
}

static void a_lock_of_another_program(char *self)
{
    int file = (int)MUST(open("locked", O_RDWR | O_CREAT | O_CLOEXEC, 0600)), ready[2];
    MUST(pipe2(ready, O_CLOEXEC));
    pid_t child = fork();
    if (child == 0) {
        int own = (int)MUST(open("locked", O_RDWR | O_CLOEXEC));
        struct flock lock = {.l_type = F_WRLCK};
        MUST(fcntl(own, F_SETLK, &lock));
        execl(self, self, "wait", (char *)NULL);
        _exit(1);
    }
    close(ready[1]);
    char byte;
    /* Its end closes with the execve(2). */
    TRY(read(ready[0], &byte, 1));
    struct flock lock = {.l_type = F_WRLCK};
    TRY(fcntl(file, F_SETLK, &lock));
    MUST(kill(child, SIGKILL));
    finish(child);
    close(ready[0]);
    close(file);
}

static void input_of_another_mode(void)
{
    int master, slave;
    struct termios termios;
    MUST(openpty(&master, &slave, NULL, NULL, NULL));
    MUST(tcgetattr(slave, &termios));
    struct termios raw = termios;
    raw.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
    MUST(tcsetattr(slave, TCSANOW, &raw));
    MUST(write(master, "typed ahead\n", 12));
    struct pollfd ready = {.fd = slave, .events = POLLIN};
    TRY(poll(&ready, 1, 5000));
    termios.c_lflag &= ~(tcflag_t)ECHO;
    MUST(tcsetattr(slave, TCSANOW, &termios));
    TRY(poll(&ready, 1, 1000));
    char line[40] = {0};
    MUST(fcntl(slave, F_SETFL, O_NONBLOCK));
    TRY(read(slave, line, sizeof line));
    say("%s", line);
    close(slave);
    close(master);
}

/* A background process whose group nobody could continue. */
static void a_terminal_without_a_shell(void)
{
    int master, told[2];
    MUST(pipe(told));
    pid_t leader = forkpty(&master, NULL, NULL, NULL);
    if (leader == 0) {
        signal(SIGHUP, SIG_IGN);
        if (fork() == 0) {
            if (fork() == 0) {
                MUST(setpgid(0, 0));
                while (getppid() != 1 && getppid() != leader)
                    usleep(1000);
                usleep(100000);
                char byte;
                int result = read(0, &byte, 1) < 0 ? errno : 0;
                MUST(write(told[1], &result, sizeof result));
                result = tcsetpgrp(0, getpid()) < 0 ? errno : 0;
                MUST(write(told[1], &result, sizeof result));
                _exit(0);
            }
            _exit(0);
        }
        wait(NULL);
        pause();
    }
    struct pollfd ready = {.fd = told[0], .events = POLLIN};
    for (int i = 0; i < 2; i++) {
        int result = -1;
        if (poll(&ready, 1, 10000) > 0)
            MUST(read(told[0], &result, sizeof result));
        say("%s\n", result < 0 ? "nothing" : error_name(result));
    }
    MUST(kill(leader, SIGKILL));
    finish(leader);
    close(master);
    close(told[0]);
    close(told[1]);
}

static int connected(struct sockaddr_in *address, int flags)
{
    int fd = (int)MUST(socket(AF_INET, SOCK_STREAM | flags, 0));
    int result = connect(fd, (struct sockaddr *)address, sizeof *address);
    return result < 0 && errno != EINPROGRESS ? -1 : fd;
}

static void places_of_those_who_have_gone(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    int server = (int)MUST(socket(AF_INET, SOCK_STREAM, 0));
    MUST(bind(server, (struct sockaddr *)&address, sizeof address));
    MUST(listen(server, 0));
    MUST(getsockname(server, (struct sockaddr *)&address, &len));
    int first = connected(&address, 0);
    for (int i = 0; i < 3; i++)
        close(connected(&address, SOCK_NONBLOCK));
    pid_t client = fork();
    if (client == 0) {
        alarm(20);
        int fd = connected(&address, 0);
        _exit(fd < 0 || write(fd, "late", 4) != 4);
    }
    usleep(300000);
    /* Others of those who have gone may be in the queue, too: until the late one's bytes come. */
    char bytes[4] = {0};
    for (int i = 0; i < 6 && memcmp(bytes, "late", 4); i++) {
        struct pollfd ready = {.fd = server, .events = POLLIN};
        if (poll(&ready, 1, 10000) <= 0)
            break;
        int fd = (int)MUST(accept(server, NULL, NULL));
        ready.fd = fd;
        if (poll(&ready, 1, 500) > 0 && read(fd, bytes, 4) < 0)
            say("%s\n", error_name(errno));
        close(fd);
    }
    say("%.4s\n", bytes);
    finish(client);
    close(first);
    close(server);
}

/* More in all than the sandbox has. */
static void shared_memory_of_those_who_have_ended(void)
{
    const size_t size = 96 << 20;
    int done = 0;
    for (int i = 0; i < 12; i++) {
        pid_t child = fork();
        if (child == 0) {
            char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
            if (memory == MAP_FAILED)
                _exit(1);
            memset(memory, 'x', size);
            _exit(0);
        }
        int status;
        MUST(waitpid(child, &status, 0));
        done += status == 0;
    }
    say("%d\n", done);
}

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "wait")) {
        alarm(20);
        pause();
    }
    char self[PATH_MAX] = {0};
    MUST(readlink("/proc/self/exe", self, sizeof self - 1));
    char *scratch = enter_scratch();
    PART("a signalfd of the parent");
    a_signalfd_of_the_parent();
    PART("signals that tell of signals");
    signals_that_tell_of_signals();
    PART("a lock of another program");
    a_lock_of_another_program(self);
    PART("input of another mode");
    input_of_another_mode();
    PART("a terminal without a shell");
    a_terminal_without_a_shell();
    PART("places of those who have gone");
    places_of_those_who_have_gone();
    PART("shared memory of those who have ended");
    shared_memory_of_those_who_have_ended();
    leave_scratch(scratch);
    return 0;
}
