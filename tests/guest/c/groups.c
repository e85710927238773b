/* Multicast groups and broadcast on the loopback interface. */
#include "guest.h"
#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#define GROUP "239.77.12.3"
static in_port_t port;

static struct sockaddr_in at(const char *ip, in_port_t number)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = number};
    inet_pton(AF_INET, ip, &address.sin_addr);
    return address;
}

static int udp(void)
{
    int fd = MUST(socket(AF_INET, SOCK_DGRAM, 0)), one = 1;
    MUST(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one));
    return fd;
}

static int bound(const char *ip)
{
    int fd = udp();
    struct sockaddr_in address = at(ip, port);
    MUST(bind(fd, (struct sockaddr *)&address, sizeof address));
    socklen_t len = sizeof address;
    MUST(getsockname(fd, (struct sockaddr *)&address, &len));
    port = address.sin_port;
    return fd;
}

static struct ip_mreq member(const char *group, const char *interface)
{
    struct ip_mreq request;
    inet_pton(AF_INET, group, &request.imr_multiaddr);
    inet_pton(AF_INET, interface, &request.imr_interface);
    return request;
}

static int join(int fd, const char *group, const char *interface)
{
    struct ip_mreq request = member(group, interface);
    return setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &request, sizeof request);
}

static int leave(int fd, const char *group, const char *interface)
{
    struct ip_mreq request = member(group, interface);
    return setsockopt(fd, IPPROTO_IP, IP_DROP_MEMBERSHIP, &request, sizeof request);
}

static int over(int fd, const char *ip)
{
    struct in_addr address;
    inet_pton(AF_INET, ip, &address);
    return setsockopt(fd, IPPROTO_IP, IP_MULTICAST_IF, &address, sizeof address);
}

static int send_to(int fd, const char *ip, const char *text)
{
    struct sockaddr_in address = at(ip, port);
    return (int)sendto(fd, text, strlen(text), 0, (struct sockaddr *)&address, sizeof address);
}

/* Shows what has come, and from where. */
static void heard(const char *name, int fd)
{
    char text[64], ip[64];
    struct sockaddr_in from;
    socklen_t len = sizeof from;
    ssize_t got;
    while ((got = recvfrom(fd, text, sizeof text, MSG_DONTWAIT, (struct sockaddr *)&from, &len)) >= 0)
        say("%s hears \"%.*s\" from %s\n", name, (int)got, text,
            inet_ntop(AF_INET, &from.sin_addr, ip, sizeof ip));
    if (errno != EAGAIN)
        say("%s: %s\n", name, error_name(errno));
}

static void membership(void)
{
    PART("membership");
    int fd = udp(), stream = MUST(socket(AF_UNIX, SOCK_DGRAM, 0));
    TRY(leave(fd, GROUP, "127.0.0.1"));
    TRY(join(fd, GROUP, "127.0.0.1"));
    TRY(join(fd, GROUP, "127.0.0.1"));
    TRY(join(fd, "10.1.2.3", "127.0.0.1"));
    TRY(join(fd, GROUP, "192.0.2.77"));
    struct ip_mreqn by_index = {.imr_ifindex = 1};
    inet_pton(AF_INET, GROUP, &by_index.imr_multiaddr);
    TRY(setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &by_index, sizeof by_index));
    by_index.imr_ifindex = 7777;
    TRY(setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &by_index, sizeof by_index));
    TRY(setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &by_index, 7));
    TRY(setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, (void *)8, 8));
    TRY(leave(fd, GROUP, "127.0.0.2"));
    TRY(leave(fd, GROUP, "127.0.0.1"));
    TRY(leave(fd, GROUP, "127.0.0.1"));
    struct group_req request = {.gr_interface = 1};
    struct sockaddr_in group = at(GROUP, 0);
    memcpy(&request.gr_group, &group, sizeof group);
    TRY(setsockopt(fd, IPPROTO_IP, MCAST_JOIN_GROUP, &request, sizeof request));
    TRY(setsockopt(fd, IPPROTO_IP, MCAST_JOIN_GROUP, &request, sizeof request));
    TRY(setsockopt(fd, IPPROTO_IP, MCAST_LEAVE_GROUP, &request, sizeof request));
    TRY(setsockopt(fd, IPPROTO_IP, MCAST_LEAVE_GROUP, &request, sizeof request));
    request.gr_group.ss_family = AF_INET6;
    TRY(setsockopt(fd, IPPROTO_IP, MCAST_JOIN_GROUP, &request, sizeof request));
    TRY(setsockopt(fd, IPPROTO_IP, MCAST_JOIN_GROUP, &request, 20));
    int count = 0;
    for (; count < 100; count++) {
        char ip[32];
        snprintf(ip, sizeof ip, "239.77.13.%d", count);
        if (join(fd, ip, "127.0.0.1") < 0)
            break;
    }
    say("%d groups, then %s\n", count, error_name(errno));
    TRY(over(fd, "127.0.0.1"));
    struct in_addr address;
    socklen_t len = sizeof address;
    TRY(getsockopt(fd, IPPROTO_IP, IP_MULTICAST_IF, &address, &len));
    say("over %s\n", inet_ntoa(address));
    TRY(over(fd, "192.0.2.77"));
    TRY(over(fd, "0.0.0.0"));
    close(fd);
    close(stream);
}

static void delivery(void)
{
    PART("delivery");
    port = 0;
    int any = bound("0.0.0.0"), group = bound(GROUP), one = bound("127.0.0.1"), only = bound("0.0.0.0");
    int no = 0, sender = udp();
    MUST(over(sender, "127.0.0.1"));
    MUST(setsockopt(only, IPPROTO_IP, IP_MULTICAST_ALL, &no, sizeof no));
    say("nobody has joined: %d\n", send_to(sender, GROUP, "a"));
    MUST(join(any, GROUP, "127.0.0.1"));
    say("one has joined: %d\n", send_to(sender, GROUP, "b"));
    MUST(join(only, GROUP, "127.0.0.1"));
    say("two have joined: %d\n", send_to(sender, GROUP, "c"));
    say("another group: %d\n", send_to(sender, "239.77.12.4", "d"));
    MUST(setsockopt(sender, IPPROTO_IP, IP_MULTICAST_LOOP, &no, sizeof no));
    say("without loop: %d\n", send_to(sender, GROUP, "e"));
    heard("any", any);
    heard("group", group);
    heard("one", one);
    heard("only", only);
    close(any);
    MUST(leave(only, GROUP, "127.0.0.1"));
    say("all have left: %d\n", send_to(sender, GROUP, "f"));
    heard("group", group);
    /* The group of all hosts needs no member. */
    int another = udp();
    struct sockaddr_in own = at("127.0.0.3", 0);
    MUST(bind(another, (struct sockaddr *)&own, sizeof own));
    say("all hosts: %d\n", send_to(another, "224.0.0.1", "g"));
    heard("only", only);
    int listener = bound("0.0.0.0");
    say("all hosts: %d\n", send_to(another, "224.0.0.1", "h"));
    heard("listener", listener);
    MUST(join(listener, GROUP, "127.0.0.1"));
    int ttl = 3, wants = 1;
    MUST(setsockopt(listener, IPPROTO_IP, IP_PKTINFO, &wants, sizeof wants));
    MUST(setsockopt(listener, IPPROTO_IP, IP_RECVTTL, &wants, sizeof wants));
    MUST(send_to(sender, GROUP, "i"));
    MUST(setsockopt(sender, IPPROTO_IP, IP_MULTICAST_TTL, &ttl, sizeof ttl));
    MUST(send_to(sender, GROUP, "j"));
    for (int i = 0; i < 2; i++) {
        char text[8], control[256];
        struct iovec vector = {text, sizeof text};
        struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1, .msg_control = control};
        message.msg_controllen = sizeof control;
        MUST(recvmsg(listener, &message, 0));
        for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
            if (c->cmsg_type == IP_TTL)
                say("ttl %d\n", *(int *)CMSG_DATA(c));
            if (c->cmsg_type == IP_PKTINFO) {
                struct in_pktinfo *info = (struct in_pktinfo *)CMSG_DATA(c);
                say("interface %d, to %s", info->ipi_ifindex, inet_ntoa(info->ipi_addr));
                say(" at %s\n", inet_ntoa(info->ipi_spec_dst));
            }
        }
    }
    close(group);
    close(one);
    close(only);
    close(sender);
    close(another);
    close(listener);
}

static int source(int fd, int option, const char *ip)
{
    struct ip_mreq_source request;
    inet_pton(AF_INET, GROUP, &request.imr_multiaddr);
    inet_pton(AF_INET, "127.0.0.1", &request.imr_interface);
    inet_pton(AF_INET, ip, &request.imr_sourceaddr);
    return setsockopt(fd, IPPROTO_IP, option, &request, sizeof request);
}

static void sources(void)
{
    PART("sources");
    port = 0;
    int fd = bound("0.0.0.0"), first = udp(), second = udp();
    struct sockaddr_in one = at("127.0.0.1", 0), two = at("127.0.0.2", 0);
    MUST(bind(first, (struct sockaddr *)&one, sizeof one));
    MUST(bind(second, (struct sockaddr *)&two, sizeof two));
    TRY(source(fd, IP_BLOCK_SOURCE, "127.0.0.2"));
    TRY(source(fd, IP_ADD_SOURCE_MEMBERSHIP, "127.0.0.1"));
    TRY(source(fd, IP_ADD_SOURCE_MEMBERSHIP, "127.0.0.1"));
    MUST(send_to(first, GROUP, "a"));
    MUST(send_to(second, GROUP, "b"));
    heard("fd", fd);
    TRY(source(fd, IP_DROP_SOURCE_MEMBERSHIP, "127.0.0.2"));
    TRY(source(fd, IP_DROP_SOURCE_MEMBERSHIP, "127.0.0.1"));
    TRY(source(fd, IP_DROP_SOURCE_MEMBERSHIP, "127.0.0.1"));
    TRY(join(fd, GROUP, "127.0.0.1"));
    TRY(source(fd, IP_BLOCK_SOURCE, "127.0.0.2"));
    TRY(source(fd, IP_BLOCK_SOURCE, "127.0.0.2"));
    MUST(send_to(first, GROUP, "c"));
    MUST(send_to(second, GROUP, "d"));
    heard("fd", fd);
    TRY(source(fd, IP_UNBLOCK_SOURCE, "127.0.0.2"));
    TRY(source(fd, IP_UNBLOCK_SOURCE, "127.0.0.2"));
    MUST(send_to(second, GROUP, "e"));
    heard("fd", fd);
    close(fd);
    close(first);
    close(second);
}

static void broadcast(void)
{
    PART("broadcast");
    port = 0;
    int any = bound("0.0.0.0"), one = bound("127.0.0.1"), all = bound("127.255.255.255");
    int sender = udp(), yes = 1;
    TRY(send_to(sender, "127.255.255.255", "a"));
    TRY(send_to(sender, "255.255.255.255", "a"));
    struct sockaddr_in everybody = at("127.255.255.255", port);
    TRY(connect(sender, (struct sockaddr *)&everybody, sizeof everybody));
    MUST(setsockopt(sender, SOL_SOCKET, SO_BROADCAST, &yes, sizeof yes));
    TRY(send_to(sender, "127.255.255.255", "b"));
    TRY(connect(sender, (struct sockaddr *)&everybody, sizeof everybody));
    TRY(send(sender, "c", 1, 0));
    heard("any", any);
    heard("one", one);
    heard("all", all);
    close(any);
    close(one);
    close(all);
    close(sender);
}

static void sharing(void)
{
    PART("sharing a port");
    port = 0;
    int fds[3], one = 1;
    for (int i = 0; i < 3; i++) {
        fds[i] = MUST(socket(AF_INET, SOCK_DGRAM, 0));
        MUST(setsockopt(fds[i], SOL_SOCKET, SO_REUSEPORT, &one, sizeof one));
        struct sockaddr_in address = at("0.0.0.0", port);
        MUST(bind(fds[i], (struct sockaddr *)&address, sizeof address));
        socklen_t len = sizeof address;
        MUST(getsockname(fds[i], (struct sockaddr *)&address, &len));
        port = address.sin_port;
        MUST(join(fds[i], GROUP, "127.0.0.1"));
    }
    int sender = udp();
    struct sockaddr_in own = at("127.0.0.1", 0), group = at(GROUP, port);
    MUST(bind(sender, (struct sockaddr *)&own, sizeof own));
    TRY(connect(sender, (struct sockaddr *)&group, sizeof group));
    TRY(send(sender, "to all", 6, 0));
    for (int i = 0; i < 3; i++) {
        heard("member", fds[i]);
        close(fds[i]);
    }
    TRY(send(sender, "to nobody", 9, 0));
    TRY(send(sender, "to nobody", 9, 0));
    close(sender);
}

static void version_6(void)
{
    PART("IPv6");
    int fd = MUST(socket(AF_INET6, SOCK_DGRAM, 0)), sender = MUST(socket(AF_INET6, SOCK_DGRAM, 0));
    struct ipv6_mreq request = {.ipv6mr_interface = 1};
    inet_pton(AF_INET6, "ff12::77", &request.ipv6mr_multiaddr);
    TRY(setsockopt(fd, IPPROTO_IPV6, IPV6_LEAVE_GROUP, &request, sizeof request));
    TRY(setsockopt(fd, IPPROTO_IPV6, IPV6_JOIN_GROUP, &request, sizeof request));
    TRY(setsockopt(fd, IPPROTO_IPV6, IPV6_JOIN_GROUP, &request, sizeof request));
    TRY(setsockopt(fd, IPPROTO_IPV6, IPV6_JOIN_GROUP, &request, 19));
    request.ipv6mr_interface = 7777;
    TRY(setsockopt(fd, IPPROTO_IPV6, IPV6_JOIN_GROUP, &request, sizeof request));
    int interface = 7777;
    TRY(setsockopt(sender, IPPROTO_IPV6, IPV6_MULTICAST_IF, &interface, sizeof interface));
    interface = 1;
    TRY(setsockopt(sender, IPPROTO_IPV6, IPV6_MULTICAST_IF, &interface, sizeof interface));
    request.ipv6mr_interface = 1;
    TRY(setsockopt(fd, IPPROTO_IPV6, IPV6_LEAVE_GROUP, &request, sizeof request));
    close(fd);
    close(sender);
}

int main(void)
{
    membership();
    delivery();
    sources();
    broadcast();
    sharing();
    version_6();
    return 0;
}
