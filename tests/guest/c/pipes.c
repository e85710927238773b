/* pipe(7): order, capacity, non-blocking ends, closed ends, poll(2) states,
 * named pipes, atomic writes, splice(2) and tee(2) are optional. */
#include "guest.h"
#include <poll.h>
#include <sys/ioctl.h>

static volatile sig_atomic_t broken;
static void on_pipe(int signal) { (void)signal; broken++; }

static void states(const char *what, int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLIN | POLLOUT | POLLPRI};
    int got = poll(&p, 1, 0);
    say("%s: %d%s%s%s%s%s\n", what, got, p.revents & POLLIN ? " in" : "",
        p.revents & POLLOUT ? " out" : "", p.revents & POLLHUP ? " hup" : "",
        p.revents & POLLERR ? " err" : "", p.revents & POLLNVAL ? " nval" : "");
}

int main(void)
{
    char *scratch = enter_scratch();
    int ends[2], pending;
    char data[5000];

    PART("basics");
    TRY(pipe(ends));
    say("%d %d\n", ends[0], ends[1]);
    TRY(fcntl(ends[0], F_GETFL));
    TRY(fcntl(ends[1], F_GETFL));
    states("empty read end", ends[0]);
    states("empty write end", ends[1]);
    TRY(write(ends[1], "hello", 5));
    TRY(write(ends[1], " world", 6));
    states("full read end", ends[0]);
    TRY(ioctl(ends[0], FIONREAD, &pending));
    say("pending %d\n", pending);
    TRY(read(ends[0], data, 3));
    TRY(read(ends[0], data, 100));
    say("%.8s\n", data);
    TRY(read(ends[1], data, 1));
    TRY(write(ends[0], data, 1));
    TRY(write(ends[1], data, 0));
    TRY(lseek(ends[0], 0, SEEK_SET));
    struct stat st;
    TRY(fstat(ends[0], &st));
    IS(S_ISFIFO(st.st_mode));

    PART("end of file");
    TRY(write(ends[1], "last", 4));
    TRY(close(ends[1]));
    states("writer gone, data left", ends[0]);
    TRY(read(ends[0], data, 100));
    TRY(read(ends[0], data, 100));
    states("writer gone", ends[0]);
    TRY(close(ends[0]));

    PART("broken pipe");
    signal(SIGPIPE, on_pipe);
    TRY(pipe(ends));
    TRY(close(ends[0]));
    states("reader gone", ends[1]);
    TRY(write(ends[1], "x", 1));
    say("SIGPIPE %d\n", broken);
    signal(SIGPIPE, SIG_IGN);
    TRY(write(ends[1], "x", 1));
    TRY(write(ends[1], "x", 0));
    close(ends[1]);

    PART("flags");
    TRY(pipe2(ends, O_NONBLOCK | O_CLOEXEC));
    TRY(fcntl(ends[0], F_GETFD));
    TRY(fcntl(ends[1], F_GETFL));
    TRY(pipe2(ends, O_APPEND));
    TRY(pipe2((int *)8, 0));

    PART("capacity");
    TRY(fcntl(ends[1], F_GETPIPE_SZ));
    memset(data, 'x', sizeof data);
    long total = 0, got;
    while ((got = write(ends[1], data, 4096)) > 0)
        total += got;
    say("full after %ld with %s\n", total, error_name(errno));
    states("write end of a full pipe", ends[1]);
    TRY(write(ends[1], data, 1));
    TRY(read(ends[0], data, 4096));
    states("after one page", ends[1]);
    TRY(write(ends[1], data, 4096));
    TRY(write(ends[1], data, 1));
    while (read(ends[0], data, sizeof data) > 0)
        ;
    TRY(read(ends[0], data, 1));
    TRY(fcntl(ends[0], F_SETPIPE_SZ, 4096));
    TRY(fcntl(ends[0], F_SETPIPE_SZ, 5000));
    TRY(fcntl(ends[0], F_GETPIPE_SZ));
    TRY(write(ends[1], data, 4096));
    TRY(write(ends[1], data, 4097));
    close(ends[0]);
    close(ends[1]);

    PART("atomic writes");
    TRY(pipe2(ends, O_NONBLOCK));
    TRY(fcntl(ends[1], F_SETPIPE_SZ, 4096));
    TRY(write(ends[1], data, 100));
    TRY(write(ends[1], data, 4096)); /* does not fit as a whole: PIPE_BUF */
    close(ends[0]);
    close(ends[1]);

    PART("named pipes");
    MUST(mkfifo("fifo", 0644));
    TRY(open("fifo", O_WRONLY | O_NONBLOCK));
    int reader = TRY(open("fifo", O_RDONLY | O_NONBLOCK));
    TRY(read(reader, data, 10)); /* no writer yet: end of file */
    int writer = TRY(open("fifo", O_WRONLY));
    TRY(read(reader, data, 10));
    TRY(write(writer, "through a name", 14));
    TRY(read(reader, data, 100));
    TRY(close(writer));
    TRY(read(reader, data, 100));
    int both = TRY(open("fifo", O_RDWR));
    TRY(write(both, "self", 4));
    TRY(read(both, data, 100));
    leave_scratch(scratch);
    return 0;
}
