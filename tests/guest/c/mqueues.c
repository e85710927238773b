/* POSIX message queues: names, order, waiting, notification, limits and errors. */
#include "guest.h"
#include <mqueue.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/wait.h>

enum { NOBODY = 65534 };
static char name[64];
static mqd_t queue;

static void send_text(const char *text, unsigned priority)
{
    say("send %s at %u: %s\n", text, priority,
        mq_send(queue, text, strlen(text), priority) ? error_name(errno) : "ok");
}

static void take(void)
{
    char text[8192];
    unsigned priority = 77;
    ssize_t got = mq_receive(queue, text, sizeof text, &priority);
    if (got < 0)
        say("take: %s\n", error_name(errno));
    else
        say("take: \"%.*s\" at %u\n", (int)got, text, priority);
}

static void show_attributes(void)
{
    struct mq_attr found;
    MUST(mq_getattr(queue, &found));
    say("flags %lo, %ld of %ld messages of %ld bytes\n", found.mq_flags, found.mq_curmsgs,
        found.mq_maxmsg, found.mq_msgsize);
}

static void set_nonblocking(bool is_on)
{
    struct mq_attr wanted = {.mq_flags = is_on ? O_NONBLOCK : 0};
    MUST(mq_setattr(queue, &wanted, NULL));
}

static mqd_t open_small(long messages, long bytes)
{
    struct mq_attr attributes = {.mq_maxmsg = messages, .mq_msgsize = bytes};
    return mq_open(name, O_RDWR | O_CREAT | O_EXCL, 0600, &attributes);
}

static void finish(pid_t child)
{
    int code;
    MUST(waitpid(child, &code, 0));
    say("status %x\n", code);
}

/* Waits until a child sleeps: it has nothing to wait for but the queue. */
static void settle(pid_t child)
{
    char path[64], line[256], *state;
    snprintf(path, sizeof path, "/proc/%d/stat", child);
    do {
        usleep(2000);
        int fd = MUST(open(path, O_RDONLY));
        ssize_t len = MUST(read(fd, line, sizeof line - 1));
        close(fd);
        line[len] = 0;
        state = strrchr(line, ')');
    } while (!state || (state[2] != 'S' && state[2] != 'Z'));
}

static void names(void)
{
    PART("names");
    TRY(mq_open("/thaw-no-such-queue", O_RDWR));
    TRY(mq_open("/", O_RDWR | O_CREAT, 0600, NULL));
    TRY(mq_open("thaw", O_RDWR | O_CREAT, 0600, NULL));
    TRY(mq_open("/a/b", O_RDWR | O_CREAT, 0600, NULL));
    TRY(mq_open("/..", O_RDWR | O_CREAT, 0600, NULL));
    char long_name[300];
    memset(long_name, 'x', sizeof long_name);
    long_name[0] = '/';
    long_name[257] = 0;
    say("257: %s\n", mq_open(long_name, O_RDWR | O_CREAT, 0600, NULL) < 0 ? error_name(errno) : "ok");
    TRY(mq_unlink("/thaw-no-such-queue"));
    TRY(mq_unlink("/a/b"));
    umask(022);
    queue = OK(mq_open(name, O_RDWR | O_CREAT, 0666, NULL));
    TRY(mq_open(name, O_RDWR | O_CREAT | O_EXCL, 0600, NULL));
    TRY(mq_open(name, O_RDWR | O_WRONLY));
    show_attributes();
    struct stat st;
    MUST(fstat(queue, &st));
    say("mode %o links %d size %d\n", st.st_mode, (int)st.st_nlink, (int)st.st_size);
    say("descriptor flags %d, status %o\n", fcntl(queue, F_GETFD), fcntl(queue, F_GETFL));
    char link[64], target[128] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", queue);
    MUST(readlink(link, target, sizeof target - 1));
    IS(!strcmp(target, name));
    char text[100];
    ssize_t got = pread(queue, text, sizeof text, 0);
    say("status %.*s", (int)got, text);
    TRY(write(queue, "x", 1));
    mqd_t reader = OK(mq_open(name, O_RDONLY)), writer = OK(mq_open(name, O_WRONLY));
    TRY(mq_send(reader, "x", 1, 0));
    TRY(mq_receive(writer, text, 8192, NULL));
    TRY(mq_send(0, "x", 1, 0));
    TRY(mq_send(-1, "x", 1, 0));
    mq_close(reader);
    mq_close(writer);
    OK(mq_unlink(name));
    TRY(mq_open(name, O_RDWR));
    MUST(fstat(queue, &st));
    say("links %d\n", (int)st.st_nlink);
    send_text("still there", 1);
    take();
    TRY(mq_close(queue));
    TRY(mq_close(queue));
}

static void order(void)
{
    PART("order");
    queue = MUST(open_small(5, 20));
    send_text("a", 1);
    send_text("b", 30);
    send_text("", 1);
    send_text("d", 30);
    send_text("e", 32767);
    send_text("f", 32768);
    show_attributes();
    set_nonblocking(true);
    show_attributes();
    send_text("g", 0);
    send_text("much longer than twenty bytes", 0);
    char small[10];
    TRY(mq_receive(queue, small, sizeof small, NULL));
    for (int i = 0; i < 6; i++)
        take();
    struct mq_attr wrong = {.mq_flags = O_APPEND};
    TRY(mq_setattr(queue, &wrong, NULL));
    TRY(syscall(SYS_mq_timedsend, queue, (void *)8, 5, 0, NULL));
    TRY(syscall(SYS_mq_getsetattr, queue, (void *)8, NULL));
    show_attributes();
    mq_close(queue);
    MUST(mq_unlink(name));
}

static void limits(void)
{
    PART("limits");
    TRY(open_small(0, 1));
    TRY(open_small(1, 0));
    TRY(open_small(-1, 10));
    TRY(open_small(65537, 10));
    TRY(open_small(1, (16 << 20) + 1));
    /* As an ordinary user, with the limits of /proc/sys/fs/mqueue. */
    pid_t child = MUST(fork());
    if (!child) {
        MUST(setgid(NOBODY));
        MUST(setuid(NOBODY));
        TRY(open_small(11, 10));
        TRY(open_small(1, 8193));
        struct rlimit limit = {20000, 20000};
        MUST(setrlimit(RLIMIT_MSGQUEUE, &limit));
        TRY(mq_open(name, O_RDWR | O_CREAT, 0600, NULL));
        queue = OK(open_small(2, 8192));
        char other[80];
        snprintf(other, sizeof other, "%s-other", name);
        struct mq_attr attributes = {.mq_maxmsg = 2, .mq_msgsize = 8192};
        TRY(mq_open(other, O_RDWR | O_CREAT, 0600, &attributes));
        MUST(mq_unlink(name));
        TRY(mq_open(other, O_RDWR | O_CREAT, 0600, &attributes));
        mq_close(queue);
        queue = OK(mq_open(other, O_RDWR | O_CREAT, 0600, &attributes));
        MUST(mq_unlink(other));
        _exit(0);
    }
    finish(child);
    show_file("/proc/sys/fs/mqueue/msg_default");
    show_file("/proc/sys/fs/mqueue/msg_max");
    show_file("/proc/sys/fs/mqueue/msgsize_default");
    show_file("/proc/sys/fs/mqueue/msgsize_max");
    show_file("/proc/sys/fs/mqueue/queues_max");
}

static void permissions(void)
{
    PART("permissions");
    umask(0);
    queue = MUST(mq_open(name, O_RDWR | O_CREAT, 0604, NULL));
    umask(022);
    pid_t child = MUST(fork());
    if (!child) {
        MUST(setgid(NOBODY));
        MUST(setuid(NOBODY));
        TRY(mq_open(name, O_RDWR));
        TRY(mq_open(name, O_WRONLY | O_CREAT, 0666, NULL));
        OK(mq_open(name, O_RDONLY));
        int code = mq_unlink(name);
        say("unlink: %s\n", code ? error_name(errno) : "ok");
        send_text("by descriptor", 3);
        _exit(0);
    }
    finish(child);
    take();
    mq_close(queue);
    MUST(mq_unlink(name));
}

static struct timespec after_ms(long ms)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    now.tv_nsec += ms * 1000000;
    now.tv_sec += now.tv_nsec / 1000000000;
    now.tv_nsec %= 1000000000;
    return now;
}

static void nothing(int signal)
{
    (void)signal;
}

static void waiting(void)
{
    PART("waiting");
    queue = MUST(open_small(1, 8192));
    char text[8192];
    struct timespec past = {1, 0}, wrong = {1, 2000000000}, soon = after_ms(20);
    TRY(mq_timedreceive(queue, text, sizeof text, NULL, &past));
    TRY(mq_timedreceive(queue, text, sizeof text, NULL, &wrong));
    TRY(mq_timedreceive(queue, text, sizeof text, NULL, &soon));
    pid_t child = MUST(fork());
    if (!child) {
        take();
        take();
        _exit(0);
    }
    settle(child);
    MUST(mq_send(queue, "one", 3, 1));
    /* The child got it: this one is for the queue, or for its second call. */
    struct timespec later = after_ms(5000);
    MUST(mq_timedsend(queue, "two", 3, 2, &later));
    finish(child);
    show_attributes();
    send_text("full", 1);
    soon = after_ms(20);
    TRY(mq_timedsend(queue, "x", 1, 1, &soon));
    child = MUST(fork());
    if (!child) {
        int code = mq_send(queue, "late", 4, 9);
        _exit(code ? 1 : 0);
    }
    settle(child);
    take();
    finish(child);
    take();

    /* Signals. */
    struct sigaction action = {.sa_handler = nothing};
    sigaction(SIGUSR1, &action, NULL);
    child = MUST(fork());
    if (!child) {
        take();
        _exit(0);
    }
    settle(child);
    kill(child, SIGUSR1);
    finish(child);
    action.sa_flags = SA_RESTART;
    sigaction(SIGUSR1, &action, NULL);
    child = MUST(fork());
    if (!child) {
        take();
        _exit(0);
    }
    settle(child);
    kill(child, SIGUSR1);
    settle(child);
    MUST(mq_send(queue, "after a signal", 14, 5));
    finish(child);
}

static void readiness(void)
{
    PART("readiness");
    struct pollfd wanted = {.fd = queue, .events = POLLIN | POLLOUT};
    MUST(poll(&wanted, 1, 0));
    say("empty: %x\n", wanted.revents);
    int epoll = MUST(epoll_create1(0));
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLET};
    TRY(epoll_ctl(epoll, EPOLL_CTL_ADD, queue, &event));
    say("epoll %ld", (long)epoll_wait(epoll, &event, 1, 0));
    say(": %x\n", event.events);
    send_text("a", 1);
    MUST(poll(&wanted, 1, 0));
    say("full: %x\n", wanted.revents);
    say("epoll %ld", (long)epoll_wait(epoll, &event, 1, 1000));
    say(": %x\n", event.events);
    take();
    say("epoll %ld", (long)epoll_wait(epoll, &event, 1, 1000));
    say(": %x\n", event.events);
    close(epoll);
}

static void signals(void)
{
    PART("notification by signal");
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGRTMIN);
    sigprocmask(SIG_BLOCK, &set, NULL);
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN};
    event.sigev_value.sival_int = 42;
    TRY(mq_notify(queue, &event));
    TRY(mq_notify(queue, &event));
    send_text("a", 1);
    siginfo_t info;
    struct timespec none = {0, 0};
    IS(sigtimedwait(&set, &info, &none) == SIGRTMIN);
    say("code %d value %d\n", info.si_code, info.si_value.sival_int);
    IS(info.si_pid == getpid() && info.si_uid == getuid());
    take();
    send_text("b", 1);
    TRY(sigtimedwait(&set, &info, &none));
    TRY(mq_notify(queue, &event));
    take();
    TRY(sigtimedwait(&set, &info, &none));
    TRY(mq_notify(queue, NULL));
    send_text("c", 1);
    TRY(sigtimedwait(&set, &info, &none));
    take();

    event.sigev_notify = SIGEV_NONE;
    TRY(mq_notify(queue, &event));
    pid_t child = MUST(fork());
    if (!child) {
        TRY(mq_notify(queue, &event));
        TRY(mq_notify(queue, NULL));
        TRY(mq_notify(queue, &event));
        _exit(0);
    }
    finish(child);
    /* A close of any of its descriptors ends it. */
    close(dup(queue));
    TRY(mq_notify(queue, &event));
    TRY(mq_notify(queue, NULL));
    child = MUST(fork());
    if (!child) {
        TRY(mq_notify(queue, &event));
        _exit(0);
    }
    finish(child);
    TRY(mq_notify(queue, &event));
    TRY(mq_notify(queue, NULL));

    /* Who waits for a message comes before who wants to hear of one. */
    event.sigev_notify = SIGEV_SIGNAL;
    TRY(mq_notify(queue, &event));
    child = MUST(fork());
    if (!child) {
        take();
        _exit(0);
    }
    settle(child);
    MUST(mq_send(queue, "d", 1, 1));
    finish(child);
    TRY(sigtimedwait(&set, &info, &none));
    TRY(mq_notify(queue, NULL));

    event.sigev_notify = 77;
    TRY(mq_notify(queue, &event));
    event = (struct sigevent){.sigev_notify = SIGEV_SIGNAL, .sigev_signo = 65};
    TRY(mq_notify(queue, &event));
    event.sigev_signo = SIGRTMIN;
    TRY(mq_notify(0, &event));
    TRY(mq_notify(-1, NULL));
}

static int told[2];

static void tell(union sigval value)
{
    char letter = (char)value.sival_int;
    MUST(write(told[1], &letter, 1));
}

static void threads(void)
{
    PART("notification by thread");
    MUST(pipe(told));
    struct sigevent event = {.sigev_notify = SIGEV_THREAD, .sigev_notify_function = tell};
    event.sigev_value.sival_int = 'n';
    for (int i = 0; i < 2; i++) {
        TRY(mq_notify(queue, &event));
        send_text("a", 1);
        char letter;
        MUST(read(told[0], &letter, 1));
        say("told %c\n", letter);
        take();
    }
    TRY(mq_notify(queue, &event));
    TRY(mq_notify(queue, NULL));
    char cookie[32] = "cookie";
    event = (struct sigevent){.sigev_notify = SIGEV_THREAD, .sigev_signo = 0};
    event.sigev_value.sival_ptr = cookie;
    int pair[2];
    MUST(pipe(pair));
    event.sigev_signo = pair[0];
    TRY(syscall(SYS_mq_notify, queue, &event));
    event.sigev_signo = 99;
    TRY(syscall(SYS_mq_notify, queue, &event));
    event.sigev_value.sival_ptr = (void *)8;
    TRY(syscall(SYS_mq_notify, queue, &event));
}

int main(void)
{
    snprintf(name, sizeof name, "/thaw-guest-%d", getpid());
    names();
    order();
    limits();
    permissions();
    waiting();
    readiness();
    signals();
    threads();
    mq_close(queue);
    MUST(mq_unlink(name));
    return 0;
}
