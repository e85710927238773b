/* Sockets that share a port: SO_REUSEADDR and connected datagram sockets, SO_REUSEPORT. */
#include "guest.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

static int made(int type, int option, struct sockaddr_in *at)
{
    int on = 1, fd = (int)MUST(socket(AF_INET, type, 0));
    if (option)
        MUST(setsockopt(fd, SOL_SOCKET, option, &on, sizeof on));
    MUST(bind(fd, (struct sockaddr *)at, sizeof *at));
    socklen_t len = sizeof *at;
    MUST(getsockname(fd, (struct sockaddr *)at, &len));
    return fd;
}

static void show(const char *what, int fd)
{
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    char bytes[20] = {0};
    if (poll(&ready, 1, 300) > 0 && recv(fd, bytes, sizeof bytes - 1, 0) > 0)
        say("%s: %s\n", what, bytes);
    else
        say("%s: nothing\n", what);
}

static struct sockaddr_in loopback(void)
{
    return (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}

/* As servers of DTLS do. */
static void connected_datagrams(void)
{
    struct sockaddr_in at = loopback(), first_at = loopback(), second_at = loopback();
    int all = made(SOCK_DGRAM, SO_REUSEADDR, &at);
    int first = made(SOCK_DGRAM, 0, &first_at), second = made(SOCK_DGRAM, 0, &second_at);
    TRY(sendto(first, "hello", 5, 0, (struct sockaddr *)&at, sizeof at));
    show("all", all);
    int one = made(SOCK_DGRAM, SO_REUSEADDR, &at);
    MUST(connect(one, (struct sockaddr *)&first_at, sizeof first_at));
    TRY(sendto(first, "again", 5, 0, (struct sockaddr *)&at, sizeof at));
    TRY(sendto(second, "other", 5, 0, (struct sockaddr *)&at, sizeof at));
    show("one", one);
    show("all", all);
    close(all);
    TRY(sendto(second, "lost", 4, 0, (struct sockaddr *)&at, sizeof at));
    show("one", one);
    close(one);
    close(first);
    close(second);
}

static void listeners_take_turns(void)
{
    enum { COUNT = 60 };
    struct sockaddr_in at = loopback();
    int listeners[2], clients[COUNT];
    for (int i = 0; i < 2; i++) {
        listeners[i] = made(SOCK_STREAM, SO_REUSEPORT, &at);
        MUST(listen(listeners[i], COUNT));
    }
    for (int i = 0; i < COUNT; i++) {
        clients[i] = (int)MUST(socket(AF_INET, SOCK_STREAM, 0));
        MUST(connect(clients[i], (struct sockaddr *)&at, sizeof at));
    }
    int accepted[2] = {0, 0};
    for (int i = 0; i < 2; i++) {
        MUST(fcntl(listeners[i], F_SETFL, O_NONBLOCK));
        int fd;
        while ((fd = accept(listeners[i], NULL, NULL)) >= 0) {
            accepted[i]++;
            close(fd);
        }
    }
    IS(accepted[0] > 0 && accepted[1] > 0);
    say("%d\n", accepted[0] + accepted[1]);
    for (int i = 0; i < COUNT; i++)
        close(clients[i]);
    close(listeners[0]);
    close(listeners[1]);
}

int main(void)
{
    PART("connected datagram sockets");
    connected_datagrams();
    PART("listeners take turns");
    listeners_take_turns();
    return 0;
}
