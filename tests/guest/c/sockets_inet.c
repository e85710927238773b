/* TCP over the loopback address in one process: bind, listen, non-blocking
 * connect and accept, addresses, options, shutdown, errors. */
#include "guest.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

static void states(const char *what, int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLIN | POLLOUT};
    int got = poll(&p, 1, 1000);
    say("%s: %d%s%s%s%s\n", what, got, p.revents & POLLIN ? " in" : "",
        p.revents & POLLOUT ? " out" : "", p.revents & POLLHUP ? " hup" : "",
        p.revents & POLLERR ? " err" : "");
}

static int option(int fd, int level, int name)
{
    int value = -1;
    socklen_t len = sizeof value;
    return getsockopt(fd, level, name, &value, &len) ? -errno : value;
}

int main(void)
{
    char data[100];
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_in seen, peer;
    socklen_t len = sizeof seen;
    int on = 1;

    signal(SIGPIPE, SIG_IGN);
    PART("listening");
    int server = TRY(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
    TRY(setsockopt(server, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on));
    say("reuse %d type %d error %d accepting %d domain %d\n", option(server, SOL_SOCKET, SO_REUSEADDR),
        option(server, SOL_SOCKET, SO_TYPE), option(server, SOL_SOCKET, SO_ERROR),
        option(server, SOL_SOCKET, SO_ACCEPTCONN), option(server, SOL_SOCKET, SO_DOMAIN));
    TRY(bind(server, (struct sockaddr *)&address, 3));
    TRY(bind(server, (struct sockaddr *)8, sizeof address));
    TRY(bind(server, (struct sockaddr *)&address, sizeof address));
    TRY(getsockname(server, (struct sockaddr *)&seen, &len));
    IS(seen.sin_port != 0 && seen.sin_addr.s_addr == htonl(INADDR_LOOPBACK));
    TRY(bind(server, (struct sockaddr *)&address, sizeof address));
    TRY(accept(server, NULL, NULL));
    TRY(listen(server, 5));
    TRY(accept(server, NULL, NULL));
    say("accepting %d\n", option(server, SOL_SOCKET, SO_ACCEPTCONN));
    len = sizeof peer;
    TRY(getpeername(server, (struct sockaddr *)&peer, &len));
    TRY(read(server, data, 1));
    TRY(write(server, data, 1));

    PART("the address is taken");
    int second = MUST(socket(AF_INET, SOCK_STREAM, 0));
    TRY(bind(second, (struct sockaddr *)&seen, sizeof seen));
    struct sockaddr_in foreign = seen;
    foreign.sin_addr.s_addr = htonl(0xc0000201); /* 192.0.2.1: not ours */
    TRY(bind(second, (struct sockaddr *)&foreign, sizeof foreign));
    foreign.sin_family = 77;
    TRY(bind(second, (struct sockaddr *)&foreign, sizeof foreign));
    close(second);

    PART("connecting");
    int client = MUST(socket(AF_INET, SOCK_STREAM, 0));
    TRY(write(client, "x", 1));
    TRY(read(client, data, 1));
    TRY(getpeername(client, (struct sockaddr *)&peer, &len));
    TRY(connect(client, (struct sockaddr *)&seen, sizeof seen));
    TRY(connect(client, (struct sockaddr *)&seen, sizeof seen));
    states("a client waits", server);
    len = sizeof peer;
    int accepted = TRY(accept4(server, (struct sockaddr *)&peer, &len, SOCK_CLOEXEC));
    say("length %u family %d\n", len, peer.sin_family);
    struct sockaddr_in own;
    len = sizeof own;
    TRY(getsockname(client, (struct sockaddr *)&own, &len));
    IS(own.sin_port == peer.sin_port && own.sin_addr.s_addr == peer.sin_addr.s_addr);
    len = sizeof own;
    TRY(getpeername(client, (struct sockaddr *)&own, &len));
    IS(own.sin_port == seen.sin_port);
    len = 4;
    TRY(getpeername(client, (struct sockaddr *)&own, &len));
    say("length %u\n", len);
    TRY(fcntl(accepted, F_GETFL));

    PART("talking");
    TRY(setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on));
    say("nodelay %d keepalive %d\n", option(client, IPPROTO_TCP, TCP_NODELAY) != 0,
        option(client, SOL_SOCKET, SO_KEEPALIVE));
    TRY(setsockopt(client, SOL_SOCKET, 9999, &on, sizeof on));
    TRY(setsockopt(client, SOL_SOCKET, SO_KEEPALIVE, &on, 1));
    TRY(send(client, "request", 7, 0));
    states("request", accepted);
    TRY(recv(accepted, data, 3, MSG_PEEK));
    TRY(recv(accepted, data, 100, 0));
    TRY(recv(accepted, data, 100, MSG_DONTWAIT));
    TRY(send(accepted, "response", 8, MSG_NOSIGNAL | MSG_MORE));
    TRY(send(accepted, "!", 1, 0));
    TRY(recv(client, data, 9, MSG_WAITALL));
    say("%.9s\n", data);
    static char block[1 << 16];
    long total = 0, got;
    MUST(fcntl(client, F_SETFL, O_NONBLOCK));
    while ((got = write(client, block, sizeof block)) > 0)
        total += got;
    say("filled until %s\n", error_name(errno));
    MUST(fcntl(accepted, F_SETFL, O_NONBLOCK));
    long drained = 0;
    struct pollfd p = {.fd = accepted, .events = POLLIN};
    while (drained < total && poll(&p, 1, 1000) == 1 && (got = read(accepted, block, sizeof block)) > 0)
        drained += got;
    IS(drained == total);
    states("room again", client);

    PART("closing");
    TRY(shutdown(client, SHUT_WR));
    TRY(write(client, "x", 1));
    states("end of the request", accepted);
    TRY(read(accepted, data, 1));
    TRY(write(accepted, "bye", 3));
    TRY(close(accepted));
    states("bye", client);
    TRY(read(client, data, 100));
    states("the end", client);
    TRY(read(client, data, 100));
    TRY(getpeername(client, (struct sockaddr *)&peer, &len));
    TRY(shutdown(client, SHUT_RDWR));
    TRY(close(client));

    PART("non-blocking connect");
    client = MUST(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
    errno = 0;
    int connected = connect(client, (struct sockaddr *)&seen, sizeof seen);
    IS(connected == 0 || errno == EINPROGRESS);
    states("connected", client);
    say("error %d\n", option(client, SOL_SOCKET, SO_ERROR));
    accepted = TRY(accept(server, NULL, NULL));
    struct linger linger = {.l_onoff = 1};
    TRY(setsockopt(accepted, SOL_SOCKET, SO_LINGER, &linger, sizeof linger));
    TRY(write(accepted, "early", 5));
    TRY(getpeername(client, (struct sockaddr *)&peer, &len));
    TRY(close(accepted)); /* a reset */
    states("reset", client);
    TRY(getpeername(client, (struct sockaddr *)&peer, &len));
    TRY(shutdown(client, SHUT_RDWR));
    TRY(read(client, data, 5));
    TRY(read(client, data, 1));
    TRY(read(client, data, 1));
    close(client);

    PART("fast open");
    client = MUST(socket(AF_INET, SOCK_STREAM, 0));
    TRY(sendto(client, "hi", 2, MSG_FASTOPEN, (struct sockaddr *)&seen, sizeof seen));
    TRY(sendto(client, "hi", 2, MSG_FASTOPEN, (struct sockaddr *)&seen, sizeof seen));
    TRY(sendto(client, "hi", 2, MSG_FASTOPEN, NULL, 0));
    accepted = TRY(accept(server, NULL, NULL));
    TRY(recv(accepted, data, 2, MSG_WAITALL));
    close(accepted);
    close(client);
    client = MUST(socket(AF_INET, SOCK_STREAM, 0));
    TRY(sendto(client, "hi", 2, MSG_FASTOPEN, NULL, 0));
    close(client);

    PART("nobody listens");
    TRY(close(server));
    client = MUST(socket(AF_INET, SOCK_STREAM, 0));
    TRY(connect(client, (struct sockaddr *)&seen, sizeof seen));
    say("error %d\n", option(client, SOL_SOCKET, SO_ERROR));
    close(client);

    PART("IPv6 and any address");
    int six = socket(AF_INET6, SOCK_STREAM, 0);
    IS(six >= 0 || errno == EAFNOSUPPORT);
    server = MUST(socket(AF_INET, SOCK_STREAM, 0));
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    TRY(bind(server, (struct sockaddr *)&address, sizeof address));
    TRY(listen(server, 128));
    len = sizeof seen;
    MUST(getsockname(server, (struct sockaddr *)&seen, &len));
    IS(seen.sin_addr.s_addr == htonl(INADDR_ANY) && seen.sin_port != 0);
    client = MUST(socket(AF_INET, SOCK_STREAM, 0));
    seen.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    TRY(connect(client, (struct sockaddr *)&seen, sizeof seen));
    accepted = TRY(accept(server, NULL, NULL));
    len = sizeof own;
    MUST(getsockname(accepted, (struct sockaddr *)&own, &len));
    IS(own.sin_addr.s_addr == htonl(INADDR_LOOPBACK));

    PART("datagrams");
    int a = MUST(socket(AF_INET, SOCK_DGRAM, 0)), b = MUST(socket(AF_INET, SOCK_DGRAM, 0));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    TRY(bind(a, (struct sockaddr *)&address, sizeof address));
    len = sizeof seen;
    MUST(getsockname(a, (struct sockaddr *)&seen, &len));
    TRY(sendto(b, "datagram", 8, 0, (struct sockaddr *)&seen, sizeof seen));
    len = sizeof peer;
    TRY(recvfrom(a, data, 4, MSG_TRUNC, (struct sockaddr *)&peer, &len));
    TRY(recv(a, data, 4, MSG_DONTWAIT));
    TRY(send(b, "x", 1, 0));
    return 0;
}
