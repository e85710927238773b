/* Sockets by NETLINK_SOCK_DIAG (sock_diag(7)), as ss(8) asks for them. */
#include "guest.h"
#include <arpa/inet.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <linux/sock_diag.h>
#include <linux/unix_diag.h>
#include <netinet/in.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/un.h>

enum { SOCKETS = 16 };
static struct {
    unsigned long ino;
    const char *name;
} known[SOCKETS];
static int count;
static unsigned long only; /* the one Unix socket that is shown, since their order differs from run to run */
static char answer[65536] __attribute__((aligned(8)));

static unsigned long inode_of(int fd)
{
    struct stat stat;
    MUST(fstat(fd, &stat));
    return stat.st_ino;
}

static int name_socket(int fd, const char *name)
{
    known[count].ino = inode_of(fd);
    known[count++].name = name;
    return fd;
}

static const char *name_of(unsigned long ino)
{
    for (int i = 0; i < count; i++)
        if (known[i].ino == ino)
            return known[i].name;
    return NULL;
}

static void show_inet(struct nlmsghdr *h)
{
    struct inet_diag_msg *found = NLMSG_DATA(h);
    char local[64], remote[64];
    const char *name = name_of(found->idiag_inode);
    if (!name)
        return;
    inet_ntop(found->idiag_family, found->id.idiag_src, local, sizeof local);
    inet_ntop(found->idiag_family, found->id.idiag_dst, remote, sizeof remote);
    bool is_listening = found->idiag_state == 10;
    say("%s: family %d state %d, %s to %s%s, %u to read", name, found->idiag_family, found->idiag_state, local, remote,
        found->id.idiag_dport ? " and a port" : "", found->idiag_rqueue);
    say(is_listening ? " of %u\n" : "\n", found->idiag_wqueue);
    if (found->idiag_uid != getuid())
        say("of another user\n");
    int left = (int)(h->nlmsg_len - NLMSG_LENGTH(sizeof *found));
    for (struct rtattr *a = (void *)(found + 1); RTA_OK(a, left); a = RTA_NEXT(a, left))
        if (a->rta_type == INET_DIAG_SKV6ONLY)
            say("  IPv6 only: %d\n", *(unsigned char *)RTA_DATA(a));
}

static void show_unix(struct nlmsghdr *h)
{
    struct unix_diag_msg *found = NLMSG_DATA(h);
    const char *name = name_of(found->udiag_ino), *peer;
    if (!name || found->udiag_ino != only)
        return;
    say("%s: type %d state %d\n", name, found->udiag_type, found->udiag_state);
    int left = (int)(h->nlmsg_len - NLMSG_LENGTH(sizeof *found));
    for (struct rtattr *a = (void *)(found + 1); RTA_OK(a, left); a = RTA_NEXT(a, left)) {
        char *text = RTA_DATA(a);
        unsigned *words = RTA_DATA(a);
        switch (a->rta_type) {
        case UNIX_DIAG_NAME:
            say("  name of %d bytes, %s%s\n", (int)RTA_PAYLOAD(a), *text ? "" : "@", *text ? text : text + 1);
            break;
        case UNIX_DIAG_PEER:
            peer = name_of(*words);
            say("  peer %s\n", peer ? peer : "?");
            break;
        case UNIX_DIAG_RQLEN:
            say("  %u to read\n", words[0]);
            break;
        }
    }
}

/* Asks for a dump, and prints what it says of known sockets. */
static void ask(const void *body, int len, int flags)
{
    int fd = MUST(socket(AF_NETLINK, SOCK_RAW, NETLINK_SOCK_DIAG));
    struct {
        struct nlmsghdr header;
        char body[128];
    } request = {{NLMSG_LENGTH(len), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | flags, 5, 0}, {0}};
    memcpy(request.body, body, (size_t)len);
    MUST(send(fd, &request, request.header.nlmsg_len, 0));
    for (bool done = false; !done;) {
        ssize_t got = MUST(recv(fd, answer, sizeof answer, 0));
        for (struct nlmsghdr *h = (void *)answer; NLMSG_OK(h, got); h = NLMSG_NEXT(h, got)) {
            done |= h->nlmsg_type == NLMSG_DONE || h->nlmsg_type == NLMSG_ERROR;
            if (h->nlmsg_type == NLMSG_ERROR)
                say("error %s\n", error_name(-((struct nlmsgerr *)NLMSG_DATA(h))->error));
            else if (h->nlmsg_type == NLMSG_DONE && *(int *)NLMSG_DATA(h))
                say("error %s at the end\n", error_name(-*(int *)NLMSG_DATA(h)));
            else if (h->nlmsg_type == SOCK_DIAG_BY_FAMILY && ((char *)NLMSG_DATA(h))[0] == AF_UNIX)
                show_unix(h);
            else if (h->nlmsg_type == SOCK_DIAG_BY_FAMILY)
                show_inet(h);
        }
    }
    say("done\n");
    close(fd);
}

static void ask_inet(int family, int protocol, unsigned states, unsigned port)
{
    struct inet_diag_req_v2 request = {
        .sdiag_family = (unsigned char)family, .sdiag_protocol = (unsigned char)protocol, .idiag_states = states};
    request.id.idiag_sport = htons((uint16_t)port);
    ask(&request, sizeof request, NLM_F_DUMP);
}

static unsigned port_of(int fd)
{
    struct sockaddr_in at;
    socklen_t len = sizeof at;
    MUST(getsockname(fd, (struct sockaddr *)&at, &len));
    return ntohs(at.sin_port);
}

static int listening(int family, const char *name, int v6_only)
{
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_in6 six = {.sin6_family = AF_INET6};
    int fd = MUST(socket(family, SOCK_STREAM, 0));
    if (family == AF_INET6)
        MUST(setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &v6_only, sizeof v6_only));
    MUST(bind(fd, family == AF_INET ? (struct sockaddr *)&four : (struct sockaddr *)&six,
              family == AF_INET ? sizeof four : sizeof six));
    MUST(listen(fd, 7));
    return name_socket(fd, name);
}

static int connected(unsigned port, const char *name)
{
    struct sockaddr_in to = {AF_INET, htons((uint16_t)port), {htonl(INADDR_LOOPBACK)}, {0}};
    int fd = MUST(socket(AF_INET, SOCK_STREAM, 0));
    MUST(connect(fd, (struct sockaddr *)&to, sizeof to));
    return name_socket(fd, name);
}

int main(void)
{
    enum { ALL = -1, LISTEN = 1 << 10, ESTABLISHED = 1 << 1 };
    int listener = listening(AF_INET, "listener", 0);
    unsigned port = port_of(listener);
    int client = connected(port, "client");
    int server = name_socket(MUST(accept(listener, NULL, NULL)), "server");
    MUST(write(client, "hello", 5));
    connected(port, "not accepted");

    PART("by state");
    ask_inet(AF_INET, IPPROTO_TCP, LISTEN, 0);
    PART("by port");
    ask_inet(AF_INET, IPPROTO_TCP, (unsigned)ALL, port_of(client));
    ask_inet(AF_INET, IPPROTO_TCP, ESTABLISHED, port_of(server));
    PART("IPv6");
    close(listening(AF_INET6, "closed", 0));
    int both = listening(AF_INET6, "both families", 0);
    ask_inet(AF_INET6, IPPROTO_TCP, LISTEN, 0);
    close(both);
    listening(AF_INET6, "one family", 1);
    ask_inet(AF_INET6, IPPROTO_TCP, LISTEN, 0);
    PART("datagrams");
    struct sockaddr_in any = {.sin_family = AF_INET};
    int udp = name_socket(MUST(socket(AF_INET, SOCK_DGRAM, 0)), "datagrams");
    ask_inet(AF_INET, IPPROTO_UDP, (unsigned)ALL, 0);
    MUST(bind(udp, (struct sockaddr *)&any, sizeof any));
    ask_inet(AF_INET, IPPROTO_UDP, (unsigned)ALL, 0);

    PART("unix");
    struct unix_diag_req request = {.sdiag_family = AF_UNIX, .udiag_states = (unsigned)ALL,
                                    .udiag_show = UDIAG_SHOW_NAME | UDIAG_SHOW_PEER | UDIAG_SHOW_RQLEN};
    int pair[2];
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    name_socket(pair[0], "first");
    name_socket(pair[1], "second");
    MUST(write(pair[0], "hello", 5));
    for (int i = 0; i < 2; i++) {
        only = inode_of(pair[i]);
        ask(&request, sizeof request, NLM_F_DUMP);
    }
    request.udiag_show = UDIAG_SHOW_PEER;
    ask(&request, sizeof request, NLM_F_DUMP);
    request.udiag_show = UDIAG_SHOW_NAME | UDIAG_SHOW_RQLEN;
    struct sockaddr_un name = {.sun_family = AF_UNIX, .sun_path = "\0thaw-diagnosis"};
    int named = name_socket(MUST(socket(AF_UNIX, SOCK_SEQPACKET, 0)), "named");
    MUST(bind(named, (struct sockaddr *)&name, offsetof(struct sockaddr_un, sun_path) + 15));
    MUST(listen(named, 3));
    request.udiag_states = LISTEN;
    only = inode_of(named);
    ask(&request, sizeof request, NLM_F_DUMP);

    PART("refusals");
    struct inet_diag_req_v2 none = {.sdiag_family = AF_INET, .sdiag_protocol = 77};
    ask(&none, sizeof none, NLM_F_DUMP);
    ask(&none, 1, NLM_F_DUMP);
    none.sdiag_family = 60;
    ask(&none, sizeof none, NLM_F_DUMP);
    return 0;
}
