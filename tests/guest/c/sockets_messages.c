/* ip(7), ipv6(7), socket(7): what recvmsg(2) tells of a datagram; sendmmsg(2) and
 * recvmmsg(2); MSG_* flags; how options of servers are kept. */
#include "guest.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>

static char data[64], control[512];

/* Receives one message and prints it with its control messages. */
static void receive(int fd, size_t room, int flags)
{
    struct iovec vector = {data, sizeof data};
    struct msghdr message = {
        .msg_iov = &vector, .msg_iovlen = 1, .msg_control = control, .msg_controllen = room};
    memset(data, 0, sizeof data);
    ssize_t got = recvmsg(fd, &message, flags);
    say("got %zd %s flags %x\n", got, got > 0 ? data : error_name(errno), message.msg_flags);
    if (got < 0)
        return;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
        say("  level %d type %d length %zu", c->cmsg_level, c->cmsg_type, (size_t)c->cmsg_len);
        if (c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_PKTINFO) {
            struct in_pktinfo *info = (void *)CMSG_DATA(c);
            say(" interface %d to %s", info->ipi_ifindex, inet_ntoa(info->ipi_addr));
        } else if (c->cmsg_level == IPPROTO_IPV6 && c->cmsg_type == IPV6_PKTINFO) {
            struct in6_pktinfo *info = (void *)CMSG_DATA(c);
            char text[64];
            say(" interface %d to %s", info->ipi6_ifindex,
                inet_ntop(AF_INET6, &info->ipi6_addr, text, sizeof text));
        } else if (c->cmsg_level == SOL_SOCKET) {
            say(" %s", *(long *)CMSG_DATA(c) > 1600000000 ? "recent" : "old");
        } else if (c->cmsg_len == CMSG_LEN(4)) {
            say(" value %d", *(int *)CMSG_DATA(c));
        } else {
            say(" value %d", *CMSG_DATA(c));
        }
        say("\n");
    }
}

static void set(int fd, int level, int option, int value)
{
    int r = setsockopt(fd, level, option, &value, sizeof value);
    int got = -77;
    socklen_t len = sizeof got;
    int g = getsockopt(fd, level, option, &got, &len);
    say("%d/%d to %d: %s", level, option, value, r ? error_name(errno) : "ok");
    say(", reads %d (%u) %s\n", got, len, g ? error_name(errno) : "");
}

/* Says who has sent the next message: this process, or whom Linux names if it does not know. */
static void sender_of(int fd, const char *call)
{
    struct iovec vector = {data, sizeof data};
    struct msghdr message = {
        .msg_iov = &vector, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t got = recvmsg(fd, &message, 0);
    struct cmsghdr *first = CMSG_FIRSTHDR(&message);
    say("%s: %zd", call, got);
    if (first && first->cmsg_level == SOL_SOCKET && first->cmsg_type == SCM_CREDENTIALS) {
        struct ucred *sender = (void *)CMSG_DATA(first);
        int is_own = sender->pid == getpid() && sender->uid == getuid() && sender->gid == getgid();
        say(", from this process: %d", is_own);
    }
    say("\n");
}

/* unix(7): SO_PASSCRED, whichever call has sent the bytes. */
static void credentials(int kind, const char *name)
{
    int pair[2], ends[2], one = 1;
    struct iovec vector = {"abcd", 4};
    PART(name);
    MUST(socketpair(AF_UNIX, kind, 0, pair));
    MUST(setsockopt(pair[0], SOL_SOCKET, SO_PASSCRED, &one, sizeof one));
    MUST(send(pair[1], "abcd", 4, 0));
    sender_of(pair[0], "send");
    MUST(write(pair[1], "abcd", 4));
    sender_of(pair[0], "write");
    MUST(writev(pair[1], &vector, 1));
    sender_of(pair[0], "writev");
    MUST(pipe(ends));
    MUST(write(ends[1], "abcd", 4));
    MUST(splice(ends[0], 0, pair[1], 0, 4, 0));
    sender_of(pair[0], "splice");
}

int main(void)
{
    credentials(SOCK_STREAM, "credentials of a stream");
    credentials(SOCK_DGRAM, "credentials of a datagram");
    credentials(SOCK_SEQPACKET, "credentials of a packet");

    PART("what an IPv4 datagram tells");
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof to;
    int receiver = socket(AF_INET, SOCK_DGRAM, 0), sender = socket(AF_INET, SOCK_DGRAM, 0), one = 1;
    MUST(bind(receiver, (void *)&to, sizeof to));
    MUST(getsockname(receiver, (void *)&to, &len));
    TRY(sendto(sender, "plain", 5, 0, (void *)&to, sizeof to));
    receive(receiver, sizeof control, 0);
    for (int option = 0; option < 3; option++) {
        int names[] = {IP_PKTINFO, IP_RECVTTL, IP_RECVTOS};
        MUST(setsockopt(receiver, IPPROTO_IP, names[option], &one, sizeof one));
    }
    TRY(sendto(sender, "told", 4, 0, (void *)&to, sizeof to));
    receive(receiver, sizeof control, MSG_PEEK);
    receive(receiver, sizeof control, 0);
    int ttl = 9, tos = 0x10;
    MUST(setsockopt(sender, IPPROTO_IP, IP_TTL, &ttl, sizeof ttl));
    MUST(setsockopt(sender, IPPROTO_IP, IP_TOS, &tos, sizeof tos));
    TRY(sendto(sender, "marked", 6, 0, (void *)&to, sizeof to));
    receive(receiver, sizeof control, 0);
    TRY(sendto(sender, "no room", 7, 0, (void *)&to, sizeof to));
    receive(receiver, 40, 0);
    MUST(setsockopt(receiver, SOL_SOCKET, SO_TIMESTAMP, &one, sizeof one));
    TRY(sendto(sender, "timed", 5, 0, (void *)&to, sizeof to));
    receive(receiver, sizeof control, 0);
    MUST(setsockopt(receiver, SOL_SOCKET, SO_TIMESTAMPNS, &one, sizeof one));
    TRY(sendto(sender, "timed", 5, 0, (void *)&to, sizeof to));
    receive(receiver, sizeof control, 0);
    receive(receiver, sizeof control, MSG_DONTWAIT);
    receive(receiver, sizeof control, MSG_ERRQUEUE);

    PART("many at once");
    struct mmsghdr many[4] = {0};
    struct iovec vectors[4] = {{"a", 1}, {"bb", 2}, {"ccc", 3}, {NULL, 0}};
    for (int i = 0; i < 4; i++) {
        many[i].msg_hdr = (struct msghdr){.msg_iov = &vectors[i], .msg_iovlen = 1};
        many[i].msg_hdr.msg_name = &to;
        many[i].msg_hdr.msg_namelen = sizeof to;
    }
    TRY(sendmmsg(sender, many, 4, 0));
    say("%u %u %u %u\n", many[0].msg_len, many[1].msg_len, many[2].msg_len, many[3].msg_len);
    char texts[4][8] = {0};
    struct timespec soon = {.tv_nsec = 1000000};
    for (int i = 0; i < 4; i++) {
        vectors[i] = (struct iovec){texts[i], 2};
        many[i].msg_hdr.msg_name = NULL;
        many[i].msg_hdr.msg_namelen = 0;
    }
    TRY(recvmmsg(receiver, many, 3, MSG_WAITFORONE, &soon));
    say("%u %u %u flags %x\n", many[0].msg_len, many[1].msg_len, many[2].msg_len,
        many[2].msg_hdr.msg_flags);
    TRY(recvmmsg(receiver, many, 4, MSG_DONTWAIT, NULL));
    TRY(recvmmsg(receiver, many, 4, MSG_DONTWAIT, NULL));
    TRY(recvmmsg(receiver, many, 0, 0, NULL));
    TRY(sendmmsg(sender, many, 0, 0));
    many[0].msg_hdr.msg_name = &to;
    many[0].msg_hdr.msg_namelen = sizeof to;
    many[1].msg_hdr.msg_name = &to;
    many[1].msg_hdr.msg_namelen = 1;
    TRY(sendmmsg(sender, many, 2, 0));
    TRY(sendmmsg(sender, many + 1, 1, 0));

    PART("what an IPv6 socket tells of IPv4");
    int dual = socket(AF_INET6, SOCK_DGRAM, 0);
    struct sockaddr_in6 any = {.sin6_family = AF_INET6};
    len = sizeof any;
    if (dual >= 0 && bind(dual, (void *)&any, sizeof any) == 0) {
        MUST(getsockname(dual, (void *)&any, &len));
        MUST(setsockopt(dual, IPPROTO_IPV6, IPV6_RECVPKTINFO, &one, sizeof one));
        to.sin_port = any.sin6_port;
        TRY(sendto(sender, "mapped", 6, 0, (void *)&to, sizeof to));
        receive(dual, sizeof control, 0);
    }

    PART("options that servers set");
    int tcp = socket(AF_INET, SOCK_STREAM, 0);
    for (int value = 1; value >= -1; value--) {
        int names[] = {TCP_NODELAY, TCP_CORK, TCP_DEFER_ACCEPT, TCP_FASTOPEN, TCP_KEEPIDLE,
                       TCP_KEEPINTVL, TCP_KEEPCNT, TCP_QUICKACK, TCP_USER_TIMEOUT, TCP_LINGER2,
                       TCP_NOTSENT_LOWAT, TCP_SYNCNT, TCP_FASTOPEN_CONNECT};
        for (size_t i = 0; i < sizeof names / sizeof *names; i++)
            if (names[i] != TCP_DEFER_ACCEPT || value == 0)
                if (names[i] != TCP_QUICKACK && names[i] != TCP_LINGER2)
                    set(tcp, IPPROTO_TCP, names[i], value);
        set(tcp, SOL_SOCKET, SO_REUSEADDR, value);
        set(tcp, SOL_SOCKET, SO_REUSEPORT, value);
        set(tcp, SOL_SOCKET, SO_KEEPALIVE, value);
        set(tcp, SOL_SOCKET, SO_OOBINLINE, value);
        set(tcp, SOL_SOCKET, SO_BUSY_POLL, value > 0 ? 0 : value);
        set(tcp, IPPROTO_IP, IP_MTU_DISCOVER, value);
        set(tcp, IPPROTO_IP, IP_TTL, value);
        set(tcp, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, value);
    }
    set(tcp, SOL_SOCKET, SO_INCOMING_CPU, 0);
    set(tcp, IPPROTO_IP, IP_TOS, 0x10);
    set(tcp, IPPROTO_IP, IP_MTU, 1);
    set(tcp, IPPROTO_TCP, 9999, 1);
    set(tcp, 9999, 1, 1);
    struct linger linger = {1, 0};
    TRY(setsockopt(tcp, SOL_SOCKET, SO_LINGER, &linger, sizeof linger));
    TRY(setsockopt(tcp, SOL_SOCKET, SO_LINGER, &linger, 4));
    struct timeval wait = {0, 20000};
    TRY(setsockopt(receiver, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait));
    TRY(recv(receiver, data, 1, 0));
    TRY(recv(receiver, data, 1, 0));
    wait.tv_usec = 1000000;
    TRY(setsockopt(receiver, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof wait));

    PART("connections that end badly");
    signal(SIGPIPE, SIG_IGN);
    struct sockaddr_in server = {.sin_family = AF_INET};
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    len = sizeof server;
    MUST(bind(listener, (void *)&server, sizeof server));
    MUST(listen(listener, 8));
    MUST(getsockname(listener, (void *)&server, &len));
    server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int how = 0; how < 3; how++) {
        int client = socket(AF_INET, SOCK_STREAM, 0);
        MUST(connect(client, (void *)&server, sizeof server));
        struct sockaddr_in own;
        len = sizeof own;
        int accepted = MUST(accept(listener, (void *)&own, &len));
        MUST(getsockname(accepted, (void *)&own, &len));
        say("accepted at %s, same port %d\n", inet_ntoa(own.sin_addr),
            own.sin_port == server.sin_port);
        TRY(send(client, "question", 8, how ? MSG_MORE : 0));
        if (how == 1) {
            TRY(recv(accepted, data, 8, MSG_WAITALL));
        } else if (how == 2) {
            TRY(recv(accepted, data, 8, 0));
            MUST(setsockopt(accepted, SOL_SOCKET, SO_LINGER, &linger, sizeof linger));
        }
        TRY(close(accepted));
        TRY(recv(client, data, 8, 0));
        int error = -1;
        len = sizeof error;
        TRY(getsockopt(client, SOL_SOCKET, SO_ERROR, &error, &len));
        say("error %d\n", error);
        TRY(send(client, "more", 4, 0));
        if (how == 1)
            usleep(10000);
        TRY(send(client, "more", 4, MSG_NOSIGNAL));
        TRY(recv(client, data, 8, 0));
        close(client);
    }
    return 0;
}
