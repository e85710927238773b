/* What a sender says about a single datagram, and what the receiver is told:
 * hop limits, traffic classes and addresses in control messages. */
#include "guest.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

static struct sockaddr_storage to;
static socklen_t to_len;

static int bound(int family)
{
    int fd = (int)MUST(socket(family, SOCK_DGRAM, 0));
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    if (family == AF_INET)
        MUST(bind(fd, (struct sockaddr *)&v4, sizeof v4));
    else
        MUST(bind(fd, (struct sockaddr *)&v6, sizeof v6));
    to_len = sizeof to;
    MUST(getsockname(fd, (struct sockaddr *)&to, &to_len));
    return fd;
}

static long send_with(int fd, int level, int kind, const void *data, size_t len)
{
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(64)] = {0};
    struct iovec vector = {"datagram", 8};
    struct msghdr message = {.msg_name = &to, .msg_namelen = to_len, .msg_iov = &vector,
                             .msg_iovlen = 1, .msg_control = control,
                             .msg_controllen = CMSG_SPACE(len)};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = level;
    header->cmsg_type = kind;
    header->cmsg_len = CMSG_LEN(len);
    memcpy(CMSG_DATA(header), data, len);
    return sendmsg(fd, &message, 0);
}

static long send_number(int fd, int level, int kind, int value)
{
    return send_with(fd, level, kind, &value, sizeof value);
}

static void receive(int fd)
{
    _Alignas(struct cmsghdr) char control[512];
    char bytes[64], from[INET6_ADDRSTRLEN] = "?";
    struct sockaddr_storage peer;
    struct iovec vector = {bytes, sizeof bytes};
    struct msghdr message = {.msg_name = &peer, .msg_namelen = sizeof peer, .msg_iov = &vector,
                             .msg_iovlen = 1, .msg_control = control,
                             .msg_controllen = sizeof control};
    ssize_t got = recvmsg(fd, &message, MSG_DONTWAIT);
    if (got < 0) {
        say("nothing: %s\n", error_name(errno));
        return;
    }
    if (peer.ss_family == AF_INET)
        inet_ntop(AF_INET, &((struct sockaddr_in *)&peer)->sin_addr, from, sizeof from);
    else
        inet_ntop(AF_INET6, &((struct sockaddr_in6 *)&peer)->sin6_addr, from, sizeof from);
    say("%zd bytes from %s", got, from);
    for (struct cmsghdr *at = CMSG_FIRSTHDR(&message); at; at = CMSG_NXTHDR(&message, at)) {
        int value = 0;
        size_t len = at->cmsg_len - CMSG_LEN(0);
        if (len <= sizeof value)
            memcpy(&value, CMSG_DATA(at), len);
        say(", level %d type %d len %zu value %d", at->cmsg_level, at->cmsg_type, len, value);
    }
    say("\n");
}

static void on(int fd, int level, int option)
{
    int yes = 1;
    MUST(setsockopt(fd, level, option, &yes, sizeof yes));
}

int main(void)
{
    PART("IPv4");
    int receiver = bound(AF_INET);
    on(receiver, IPPROTO_IP, IP_RECVTTL);
    on(receiver, IPPROTO_IP, IP_RECVTOS);
    int sender = (int)MUST(socket(AF_INET, SOCK_DGRAM, 0));
    TRY(send_number(sender, IPPROTO_IP, IP_TTL, 3));
    receive(receiver);
    TRY(send_number(sender, IPPROTO_IP, IP_TOS, 8));
    receive(receiver);
    TRY(send_with(sender, IPPROTO_IP, IP_TOS, "\x10", 1));
    receive(receiver);
    TRY(send_number(sender, IPPROTO_IP, IP_TTL, 0));
    TRY(send_number(sender, IPPROTO_IP, IP_TTL, 256));
    TRY(send_with(sender, IPPROTO_IP, IP_TTL, "\x01", 1));
    TRY(send_number(sender, IPPROTO_IP, 99, 1));
    TRY(send_number(sender, SOL_SOCKET, 99, 1));
    TRY(send_number(sender, IPPROTO_TCP, 99, 1));
    receive(receiver);
    struct in_pktinfo source = {.ipi_spec_dst.s_addr = htonl(INADDR_LOOPBACK + 1)};
    TRY(send_with(sender, IPPROTO_IP, IP_PKTINFO, &source, sizeof source));
    receive(receiver);
    source.ipi_spec_dst.s_addr = 0;
    TRY(send_with(sender, IPPROTO_IP, IP_PKTINFO, &source, sizeof source));
    receive(receiver);
    TRY(send_with(sender, IPPROTO_IP, IP_PKTINFO, &source, sizeof source - 1));
    /* Only for the one datagram. */
    TRY(sendto(sender, "x", 1, 0, (struct sockaddr *)&to, to_len));
    receive(receiver);
    receive(receiver);

    PART("IPv6");
    receiver = bound(AF_INET6);
    on(receiver, IPPROTO_IPV6, IPV6_RECVHOPLIMIT);
    on(receiver, IPPROTO_IPV6, IPV6_RECVTCLASS);
    sender = (int)MUST(socket(AF_INET6, SOCK_DGRAM, 0));
    TRY(send_number(sender, IPPROTO_IPV6, IPV6_HOPLIMIT, 2));
    receive(receiver);
    TRY(send_number(sender, IPPROTO_IPV6, IPV6_HOPLIMIT, -1));
    receive(receiver);
    TRY(send_number(sender, IPPROTO_IPV6, IPV6_TCLASS, 7));
    receive(receiver);
    TRY(send_number(sender, IPPROTO_IPV6, IPV6_HOPLIMIT, 256));
    TRY(send_number(sender, IPPROTO_IPV6, IPV6_TCLASS, -2));
    TRY(send_with(sender, IPPROTO_IPV6, IPV6_HOPLIMIT, "\x01", 1));
    TRY(send_number(sender, IPPROTO_IPV6, 99, 1));
    TRY(send_number(sender, SOL_SOCKET, 99, 1));
    struct in6_pktinfo source6 = {.ipi6_addr = IN6ADDR_LOOPBACK_INIT};
    TRY(send_with(sender, IPPROTO_IPV6, IPV6_PKTINFO, &source6, sizeof source6));
    receive(receiver);
    TRY(send_with(sender, IPPROTO_IPV6, IPV6_PKTINFO, &source6, sizeof source6 - 1));
    source6.ipi6_addr.s6_addr[0] = 0x20;
    TRY(send_with(sender, IPPROTO_IPV6, IPV6_PKTINFO, &source6, sizeof source6));
    receive(receiver);
    return 0;
}
