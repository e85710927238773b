/* splice(2), tee(2), vmsplice(2), sendfile(2): between pipes, files and sockets,
 * with offsets, short and at the end, and what they refuse. */
#include "guest.h"
#include <netinet/in.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>

static char data[200000];

static void make(int pair[2])
{
    if (pipe2(pair, O_NONBLOCK))
        _exit(112);
}

static void show(int fd, size_t len)
{
    char text[64] = {0};
    ssize_t got = read(fd, text, len);
    say("read %zd %s\n", got, got > 0 ? text : "");
}

int main(void)
{
    char *scratch = enter_scratch();
    int a[2], b[2], s[2];
    loff_t at = 3;
    signal(SIGPIPE, SIG_IGN);
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = "0123456789"[i % 10];
    int file = open("file", O_RDWR | O_CREAT | O_TRUNC, 0644);
    TRY(write(file, data, 100000));
    TRY(lseek(file, 5, SEEK_SET));

    PART("file to pipe");
    make(a);
    TRY(splice(file, NULL, a[1], NULL, 4, 0));
    show(a[0], 10);
    TRY(lseek(file, 0, SEEK_CUR));
    TRY(splice(file, &at, a[1], NULL, 4, 0));
    say("at %lld\n", (long long)at);
    TRY(lseek(file, 0, SEEK_CUR));
    show(a[0], 10);
    at = 99998;
    TRY(splice(file, &at, a[1], NULL, 10, 0));
    TRY(splice(file, &at, a[1], NULL, 10, 0));
    show(a[0], 10);
    at = 0;
    TRY(splice(file, &at, a[1], NULL, 65536, 0));
    TRY(splice(file, &at, a[1], NULL, 1, SPLICE_F_NONBLOCK));
    TRY(splice(file, &at, a[1], NULL, 1, 0));

    PART("pipe to file");
    int copy = open("copy", O_RDWR | O_CREAT | O_TRUNC, 0644);
    TRY(splice(a[0], NULL, copy, NULL, 10, 0));
    at = 2;
    TRY(splice(a[0], NULL, copy, &at, 3, 0));
    say("at %lld\n", (long long)at);
    TRY(lseek(copy, 0, SEEK_SET));
    show(copy, 20);
    size_t left = 0;
    for (long got; (got = splice(a[0], NULL, copy, NULL, 200000, SPLICE_F_MORE)) > 0;)
        left += got;
    say("left %zu, then %s\n", left, error_name(errno));

    PART("pipe to pipe");
    make(b);
    TRY(write(a[1], "hello world", 11));
    TRY(tee(a[0], b[1], 5, 0));
    show(b[0], 20);
    TRY(tee(a[0], b[1], 100, 0));
    TRY(splice(a[0], NULL, b[1], NULL, 6, 0));
    show(a[0], 20);
    show(b[0], 40);
    TRY(tee(a[0], b[1], 1, 0));
    TRY(tee(a[0], b[1], 0, 0));
    TRY(splice(a[0], NULL, a[1], NULL, 1, 0));
    TRY(tee(a[0], a[1], 1, 0));

    PART("vmsplice");
    struct iovec vector[2] = {{"one ", 4}, {"two", 3}};
    TRY(vmsplice(a[1], vector, 2, 0));
    TRY(vmsplice(a[1], vector, 0, 0));
    char text[32] = {0};
    struct iovec into[2] = {{text, 2}, {text + 8, 3}};
    TRY(vmsplice(a[0], into, 2, 0));
    say("%s %s\n", text, text + 8);
    show(a[0], 20);
    TRY(vmsplice(file, vector, 1, 0));
    TRY(vmsplice(a[1], vector, 1, 0x10));
    TRY(vmsplice(a[1], vector, 2000, 0));

    PART("sockets");
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, s))
        _exit(112);
    TRY(write(a[1], "to a socket", 11));
    TRY(splice(a[0], NULL, s[0], NULL, 100, 0));
    show(s[1], 20);
    TRY(write(s[0], "from a socket", 13));
    TRY(splice(s[1], NULL, a[1], NULL, 4, 0));
    TRY(splice(s[1], NULL, a[1], NULL, 100, 0));
    show(a[0], 30);
    fcntl(s[1], F_SETFL, O_NONBLOCK);
    TRY(splice(s[1], NULL, a[1], NULL, 4, 0));
    at = 5;
    TRY(sendfile(s[0], file, &at, 10));
    say("at %lld\n", (long long)at);
    show(s[1], 20);
    TRY(sendfile(a[1], file, &at, 3));
    show(a[0], 20);
    TRY(sendfile(s[0], s[1], NULL, 10));
    TRY(sendfile(s[0], a[0], NULL, 10));
    TRY(sendfile(s[0], s[1], &at, 10));
    TRY(shutdown(s[0], SHUT_WR));
    TRY(splice(s[1], NULL, a[1], NULL, 4, 0));
    TRY(write(a[1], "x", 1));
    TRY(splice(a[0], NULL, s[0], NULL, 4, 0));
    TRY(sendfile(s[0], file, NULL, 4));
    show(a[0], 20);

    PART("ends");
    TRY(close(b[0]));
    TRY(splice(file, NULL, b[1], NULL, 4, 0));
    TRY(vmsplice(b[1], vector, 1, 0));
    TRY(close(a[1]));
    TRY(splice(a[0], NULL, copy, NULL, 4, 0));
    TRY(tee(a[0], b[1], 4, 0));

    PART("refusals");
    make(a);
    TRY(splice(file, NULL, copy, NULL, 4, 0));
    TRY(splice(a[0], &at, copy, NULL, 4, 0));
    TRY(splice(file, NULL, a[1], &at, 4, 0));
    TRY(splice(s[0], &at, a[1], NULL, 4, 0));
    TRY(splice(a[1], NULL, copy, NULL, 4, 0));
    TRY(splice(file, NULL, a[0], NULL, 4, 0));
    TRY(splice(-1, NULL, a[1], NULL, 4, 0));
    TRY(splice(-1, NULL, a[1], NULL, 0, 0));
    TRY(splice(file, NULL, a[1], NULL, 4, 0x10));
    int append = open("copy", O_WRONLY | O_APPEND);
    TRY(write(a[1], "y", 1));
    TRY(splice(a[0], NULL, append, NULL, 1, 0));
    TRY(sendfile(append, file, NULL, 1));
    TRY(tee(file, a[1], 1, 0));
    TRY(tee(a[0], file, 1, 0));
    int reading = open("file", O_RDONLY), path = open("file", O_PATH);
    TRY(splice(a[0], NULL, reading, NULL, 1, 0));
    TRY(splice(path, NULL, a[1], NULL, 1, 0));
    at = -1;
    TRY(splice(file, &at, a[1], NULL, 1, 0));
    leave_scratch(scratch);
    return 0;
}
