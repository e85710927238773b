/* Unix sockets in one process: pairs, streams, datagrams, abstract names,
 * non-blocking accept, MSG_PEEK, shutdown, descriptors over SCM_RIGHTS. */
#include "guest.h"
#include <poll.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>

static void states(const char *what, int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLIN | POLLOUT | POLLRDHUP};
    int got = poll(&p, 1, 0);
    say("%s: %d%s%s%s%s%s\n", what, got, p.revents & POLLIN ? " in" : "",
        p.revents & POLLOUT ? " out" : "", p.revents & POLLRDHUP ? " rdhup" : "",
        p.revents & POLLHUP ? " hup" : "", p.revents & POLLERR ? " err" : "");
}

int main(void)
{
    char *scratch = enter_scratch();
    int pair[2];
    char data[100];

    signal(SIGPIPE, SIG_IGN);
    PART("creation");
    TRY(socket(77, SOCK_STREAM, 0));
    TRY(socket(AF_UNIX, 77, 0));
    TRY(socket(AF_UNIX, SOCK_STREAM, 77));
    TRY(socketpair(AF_UNIX, SOCK_STREAM, 0, (int *)8));
    TRY(socketpair(AF_INET, SOCK_STREAM, 0, pair));
    TRY(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair));
    TRY(fcntl(pair[0], F_GETFL));
    TRY(fcntl(pair[1], F_GETFD));

    PART("a stream pair");
    states("fresh", pair[0]);
    TRY(read(pair[0], data, 1));
    TRY(send(pair[0], "hello world", 11, 0));
    states("data", pair[1]);
    TRY(recv(pair[1], data, 5, MSG_PEEK));
    TRY(recv(pair[1], data, 5, 0));
    say("%.5s\n", data);
    int pending;
    TRY(ioctl(pair[1], FIONREAD, &pending));
    say("pending %d\n", pending);
    TRY(read(pair[1], data, 100));
    TRY(recv(pair[1], data, 1, MSG_DONTWAIT));
    struct iovec parts[2] = {{"one", 3}, {"two", 3}};
    TRY(writev(pair[0], parts, 2));
    TRY(read(pair[1], data, 100));
    TRY(send(pair[0], data, 0, 0));
    TRY(recv(pair[1], data, 1, MSG_OOB) < 0);
    TRY(lseek(pair[0], 0, SEEK_SET));
    TRY(send(pair[0], (void *)8, 4, 0));
    long total = 0, got;
    static char block[4096];
    while ((got = write(pair[0], block, sizeof block)) > 0)
        total += got;
    say("filled until %s, more than 16 KiB: %d\n", error_name(errno), total > 16384);
    states("full", pair[0]);
    long drained = 0;
    while ((got = read(pair[1], block, sizeof block)) > 0)
        drained += got;
    IS(drained == total);
    states("empty", pair[0]);

    PART("shutdown and close");
    TRY(write(pair[0], "left", 4));
    TRY(shutdown(pair[0], SHUT_WR));
    TRY(write(pair[0], "x", 1));
    states("peer of the closed direction", pair[1]);
    TRY(read(pair[1], data, 100));
    TRY(read(pair[1], data, 100));
    TRY(write(pair[1], "back", 4));
    TRY(read(pair[0], data, 100));
    TRY(shutdown(pair[0], 77));
    TRY(shutdown(0, SHUT_RD));
    TRY(close(pair[1]));
    states("peer gone", pair[0]);
    TRY(write(pair[0], "x", 1));
    TRY(read(pair[0], data, 1));
    close(pair[0]);
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    MUST(write(pair[0], "unread", 6));
    MUST(close(pair[1]));
    TRY(shutdown(pair[0], SHUT_WR)); /* the peer had unread data */
    TRY(read(pair[0], data, 10));
    TRY(read(pair[0], data, 10));
    close(pair[0]);

    PART("names");
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "server"}, seen;
    socklen_t len = sizeof seen;
    int server = MUST(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0));
    int client = MUST(socket(AF_UNIX, SOCK_STREAM, 0));
    TRY(connect(client, (struct sockaddr *)&address, sizeof address));
    TRY(listen(server, 1));
    TRY(accept(server, NULL, NULL));
    TRY(bind(server, (struct sockaddr *)&address, sizeof address));
    show_stat("server");
    TRY(open("server", O_RDWR));
    TRY(connect(client, (struct sockaddr *)&address, sizeof address));
    TRY(listen(server, 2));
    TRY(accept(server, NULL, NULL));
    states("listening", server);
    TRY(connect(client, (struct sockaddr *)&address, sizeof address));
    TRY(connect(client, (struct sockaddr *)&address, sizeof address));
    states("a client waits", server);
    TRY(send(client, "early", 5, 0));
    int accepted = TRY(accept4(server, (struct sockaddr *)&seen, &len, SOCK_CLOEXEC));
    say("peer address length %u\n", len);
    TRY(fcntl(accepted, F_GETFD));
    TRY(recv(accepted, data, 100, 0));
    len = sizeof seen;
    TRY(getsockname(accepted, (struct sockaddr *)&seen, &len));
    say("%s\n", seen.sun_path);
    len = sizeof seen;
    TRY(getpeername(client, (struct sockaddr *)&seen, &len));
    say("%s\n", seen.sun_path);
    struct ucred credentials;
    len = sizeof credentials;
    TRY(getsockopt(client, SOL_SOCKET, SO_PEERCRED, &credentials, &len));
    IS(credentials.pid == getpid() && credentials.uid == getuid());
    TRY(unlink("server"));
    int late = MUST(socket(AF_UNIX, SOCK_STREAM, 0));
    TRY(connect(late, (struct sockaddr *)&address, sizeof address));
    TRY(close(server));
    put_file("plain", "");
    strcpy(address.sun_path, "plain");
    TRY(connect(late, (struct sockaddr *)&address, sizeof address));
    TRY(bind(late, (struct sockaddr *)&address, sizeof address));
    TRY(bind(late, (struct sockaddr *)&address, 1));
    memcpy(address.sun_path, "\0abstract-thaw-guest", 20);
    len = (socklen_t)offsetof(struct sockaddr_un, sun_path) + 20;
    TRY(bind(late, (struct sockaddr *)&address, len));
    TRY(listen(late, 5));
    int second = MUST(socket(AF_UNIX, SOCK_STREAM, 0));
    TRY(bind(second, (struct sockaddr *)&address, len));
    TRY(connect(second, (struct sockaddr *)&address, len));
    TRY(accept(late, NULL, NULL));

    PART("descriptors over a socket");
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    put_file("passed", "came over a socket");
    int file = MUST(open("passed", O_RDONLY));
    union { struct cmsghdr header; char bytes[CMSG_SPACE(sizeof(int))]; } control = {0};
    struct iovec one = {"f", 1};
    struct msghdr message = {.msg_iov = &one, .msg_iovlen = 1, .msg_control = &control,
                             .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &file, sizeof file);
    TRY(sendmsg(pair[0], &message, 0));
    close(file);
    memset(&control, 0, sizeof control);
    one.iov_base = data;
    TRY(recvmsg(pair[1], &message, MSG_CMSG_CLOEXEC));
    header = CMSG_FIRSTHDR(&message);
    if (header && header->cmsg_type == SCM_RIGHTS) {
        memcpy(&file, CMSG_DATA(header), sizeof file);
        TRY(read(file, data, 100));
        say("%.18s\n", data);
        TRY(fcntl(file, F_GETFD));
    } else {
        say("no descriptor came\n");
    }

    PART("datagrams and packets");
    MUST(socketpair(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK, 0, pair));
    TRY(send(pair[0], "first", 5, 0));
    TRY(send(pair[0], "second", 6, 0));
    TRY(recv(pair[1], data, 3, MSG_TRUNC));
    TRY(recv(pair[1], data, 100, 0));
    TRY(recv(pair[1], data, 100, 0));
    MUST(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, pair));
    TRY(send(pair[0], "packet", 6, 0));
    TRY(send(pair[0], "x", 1, 0));
    TRY(recv(pair[1], data, 100, 0));
    TRY(close(pair[0]));
    TRY(recv(pair[1], data, 100, 0));
    TRY(recv(pair[1], data, 100, 0));
    leave_scratch(scratch);
    return 0;
}
