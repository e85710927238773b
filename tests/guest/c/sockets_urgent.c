/* tcp(7): urgent data: MSG_OOB, SO_OOBINLINE, SIOCATMARK, SIGURG, POLLPRI. */
#include "guest.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/socket.h>

static volatile sig_atomic_t told;
static int server, client, peer;
static struct sockaddr_in address = {.sin_family = AF_INET};

static void urgent(int signal) { (void)signal; told++; }

static void connect_both(void)
{
    client = MUST(socket(AF_INET, SOCK_STREAM, 0));
    MUST(connect(client, (struct sockaddr *)&address, sizeof address));
    peer = MUST(accept(server, NULL, NULL));
}

static void disconnect(void)
{
    close(client);
    close(peer);
}

static void state(void)
{
    struct pollfd p = {.fd = peer, .events = POLLIN | POLLPRI | POLLRDBAND};
    int mark = -1, waiting = -1;
    poll(&p, 1, 0);
    ioctl(peer, SIOCATMARK, &mark);
    ioctl(peer, FIONREAD, &waiting);
    say("events %#x, at the mark %d, waiting %d\n", p.revents, mark, waiting);
}

static void get(int flags)
{
    char data[32] = "";
    struct iovec vector = {data, sizeof data - 1};
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1};
    errno = 0;
    long got = recvmsg(peer, &message, flags | MSG_DONTWAIT);
    say("got %ld \"%s\" %s, flags %#x\n", got, data, error_name(errno), message.msg_flags);
    state();
}

static void *reads(void *data)
{
    return (void *)recv(peer, data, 8, 0);
}

int main(void)
{
    char data[32] = "";
    int on = 1, off = 0, mark = -1;
    socklen_t len = sizeof address;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    server = MUST(socket(AF_INET, SOCK_STREAM, 0));
    MUST(bind(server, (struct sockaddr *)&address, sizeof address));
    MUST(getsockname(server, (struct sockaddr *)&address, &len));
    MUST(listen(server, 5));

    PART("beside the others");
    connect_both();
    state();
    get(MSG_OOB);
    TRY(send(client, "abc", 3, MSG_OOB));
    state();
    get(MSG_OOB | MSG_PEEK);
    get(MSG_OOB);
    get(MSG_OOB);
    get(0);
    TRY(send(client, "de", 2, 0));
    get(MSG_PEEK);
    get(0);
    disconnect();

    PART("never taken");
    connect_both();
    TRY(send(client, "abc", 3, MSG_OOB));
    TRY(send(client, "de", 2, 0));
    get(0);
    get(0);
    get(MSG_OOB);
    TRY(send(client, "f", 1, MSG_OOB));
    get(0);
    get(MSG_OOB);
    disconnect();

    PART("two of them");
    connect_both();
    TRY(send(client, "abc", 3, MSG_OOB));
    TRY(send(client, "de", 2, MSG_OOB));
    state();
    get(MSG_OOB);
    get(0);
    get(0);
    TRY(send(client, "f", 1, MSG_OOB));
    state();
    TRY(send(client, "g", 1, MSG_OOB));
    state();
    get(0);
    get(MSG_OOB);
    disconnect();

    PART("in line");
    connect_both();
    TRY(setsockopt(peer, SOL_SOCKET, SO_OOBINLINE, &on, sizeof on));
    TRY(send(client, "abc", 3, MSG_OOB));
    TRY(send(client, "de", 2, 0));
    state();
    get(MSG_OOB);
    get(0);
    get(0);
    TRY(send(client, "x", 1, MSG_OOB));
    TRY(setsockopt(peer, SOL_SOCKET, SO_OOBINLINE, &off, sizeof off));
    get(MSG_OOB);
    disconnect();

    PART("the whole buffer");
    connect_both();
    TRY(send(client, "ab!", 3, MSG_OOB));
    TRY(send(client, "cd", 2, 0));
    TRY(recv(peer, data, 4, MSG_WAITALL));
    TRY(read(peer, data, 4));
    say("%.2s\n", data);
    disconnect();

    PART("the owner hears");
    connect_both();
    struct sigaction action = {.sa_handler = urgent};
    MUST(sigaction(SIGURG, &action, NULL));
    TRY(send(client, "a", 1, MSG_OOB));
    say("told %d\n", told);
    OK(fcntl(peer, F_SETOWN, getpid()));
    TRY(send(client, "b", 1, MSG_OOB));
    say("told %d\n", told);
    TRY(send(client, "c", 1, 0));
    say("told %d\n", told);
    disconnect();

    PART("who waits");
    connect_both();
    fd_set exceptional;
    FD_ZERO(&exceptional);
    FD_SET(peer, &exceptional);
    int epoll = MUST(epoll_create1(0));
    struct epoll_event event = {.events = EPOLLPRI | EPOLLET};
    MUST(epoll_ctl(epoll, EPOLL_CTL_ADD, peer, &event));
    TRY(send(client, "a", 1, 0));
    TRY(epoll_wait(epoll, &event, 1, 0));
    TRY(send(client, "b", 1, MSG_OOB));
    TRY(epoll_wait(epoll, &event, 1, 0));
    TRY(select(peer + 1, NULL, NULL, &exceptional, NULL));
    IS(FD_ISSET(peer, &exceptional));
    TRY(recv(peer, data, 1, 0));
    pthread_t thread;
    void *got;
    MUST(pthread_create(&thread, NULL, reads, data));
    usleep(50000);
    TRY(send(client, "c", 1, 0));
    MUST(pthread_join(thread, &got));
    say("woken: %ld \"%.1s\"\n", (long)got, data);
    disconnect();

    PART("other sockets");
    int udp = MUST(socket(AF_INET, SOCK_DGRAM, 0));
    TRY(ioctl(udp, SIOCATMARK, &mark));
    TRY(ioctl(server, SIOCATMARK, &mark));
    TRY(send(server, "x", 1, MSG_OOB | MSG_NOSIGNAL));
    TRY(recv(server, data, 1, MSG_OOB));
    return 0;
}
