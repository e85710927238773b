/* netlink(7), rtnetlink(7): the loopback interface by netlink, by the C library
 * and by ioctl(2); addresses of netlink sockets; refusals. Other interfaces
 * differ from machine to machine. */
#include "guest.h"
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netpacket/packet.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

struct request {
    struct nlmsghdr header;
    char body[64];
};

static char answer[65536];

/* Asks, and prints what the answers say of loopback and of success. */
static void ask(int fd, int type, int flags, const void *body, int len)
{
    struct request request = {0};
    request.header.nlmsg_len = NLMSG_LENGTH(len);
    request.header.nlmsg_type = type;
    request.header.nlmsg_flags = NLM_F_REQUEST | flags;
    request.header.nlmsg_seq = 77;
    memcpy(request.body, body, len);
    if (send(fd, &request, request.header.nlmsg_len, 0) < 0) {
        say("send %s\n", error_name(errno));
        return;
    }
    for (int last = 0; !last;) {
        ssize_t got = recv(fd, answer, sizeof answer, MSG_DONTWAIT);
        if (got < 0) {
            say("nothing more: %s\n", error_name(errno));
            return;
        }
        for (struct nlmsghdr *h = (void *)answer; NLMSG_OK(h, got); h = NLMSG_NEXT(h, got)) {
            if (h->nlmsg_seq != 77)
                say("wrong sequence\n");
            last |= !(h->nlmsg_flags & NLM_F_MULTI) || h->nlmsg_type == NLMSG_DONE;
            if (h->nlmsg_type == NLMSG_DONE) {
                say("done\n");
            } else if (h->nlmsg_type == NLMSG_ERROR) {
                int error = -((struct nlmsgerr *)NLMSG_DATA(h))->error;
                say("answer %s\n", error ? error_name(error) : "ok");
            } else if (h->nlmsg_type == RTM_NEWLINK) {
                struct ifinfomsg *link = NLMSG_DATA(h);
                if (link->ifi_index != 1)
                    continue;
                say("link type %d flags %x\n", link->ifi_type, link->ifi_flags);
                int left = IFLA_PAYLOAD(h);
                for (struct rtattr *a = IFLA_RTA(link); RTA_OK(a, left); a = RTA_NEXT(a, left)) {
                    if (a->rta_type == IFLA_IFNAME)
                        say("  name %s\n", (char *)RTA_DATA(a));
                    if (a->rta_type == IFLA_MTU)
                        say("  mtu %u\n", *(unsigned *)RTA_DATA(a));
                    if (a->rta_type == IFLA_ADDRESS)
                        say("  address of %d bytes\n", (int)RTA_PAYLOAD(a));
                    /* Later versions of Linux have more. */
                    if (a->rta_type == IFLA_STATS64)
                        say("  statistics: %d\n", RTA_PAYLOAD(a) >= 24 * sizeof(long));
                    if (a->rta_type == IFLA_STATS)
                        say("  statistics of 32 bits: %d\n", RTA_PAYLOAD(a) >= 23 * sizeof(int));
                }
            } else if (h->nlmsg_type == RTM_NEWADDR) {
                struct ifaddrmsg *found = NLMSG_DATA(h);
                if (found->ifa_index != 1)
                    continue;
                say("address family %d prefix %d scope %d flags %x\n", found->ifa_family,
                    found->ifa_prefixlen, found->ifa_scope, found->ifa_flags);
            } else if (h->nlmsg_type == RTM_NEWROUTE) {
                struct rtmsg *route = NLMSG_DATA(h);
                int left = RTM_PAYLOAD(h);
                for (struct rtattr *a = RTM_RTA(route); RTA_OK(a, left); a = RTA_NEXT(a, left)) {
                    if (a->rta_type == RTA_OIF && *(int *)RTA_DATA(a) == 1 && !(flags & NLM_F_DUMP))
                        say("route over loopback, type %d\n", route->rtm_type);
                }
            }
        }
    }
}

/* The lines of a file that begin so, up to a character; later versions of Linux have more behind it. */
static void show(const char *path, const char *beginning, const char *end)
{
    char line[4096];
    FILE *file = fopen(path, "r");
    say("%s: %s\n", path, file ? "there" : error_name(errno));
    while (file && fgets(line, sizeof line, file))
        if (!strncmp(line, beginning, strlen(beginning)))
            say("%.*s\n", (int)strcspn(line, end), line);
    if (file)
        fclose(file);
}

int main(void)
{
    PART("making");
    TRY(socket(AF_NETLINK, SOCK_STREAM, NETLINK_ROUTE));
    int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
    struct sockaddr_nl name = {.nl_family = AF_NETLINK}, kernel = name;
    socklen_t len = sizeof name;
    TRY(getsockname(fd, (void *)&name, &len));
    say("length %u family %d pid %u\n", len, name.nl_family, name.nl_pid);
    TRY(bind(fd, (void *)&kernel, 6));
    TRY(bind(fd, (void *)&kernel, sizeof kernel));
    TRY(getsockname(fd, (void *)&name, &len));
    IS(name.nl_pid == (unsigned)getpid());
    TRY(bind(fd, (void *)&kernel, sizeof kernel));
    int other = socket(AF_NETLINK, SOCK_DGRAM, NETLINK_ROUTE);
    TRY(bind(other, (void *)&name, sizeof name));
    TRY(bind(other, (void *)&kernel, sizeof kernel));
    TRY(getsockname(other, (void *)&name, &len));
    IS(name.nl_pid != 0 && name.nl_pid != (unsigned)getpid());
    TRY(listen(fd, 1));
    TRY(accept(fd, NULL, NULL));
    TRY(shutdown(fd, SHUT_RD));
    int value;
    len = sizeof value;
    TRY(getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &value, &len));
    TRY(getsockopt(fd, SOL_SOCKET, SO_TYPE, &value, &len));
    say("type %d\n", value);

    PART("links");
    struct ifinfomsg link = {0};
    ask(fd, RTM_GETLINK, NLM_F_DUMP, &link, sizeof link);
    link.ifi_index = 1;
    ask(fd, RTM_GETLINK, 0, &link, sizeof link);
    link.ifi_index = 12345;
    ask(fd, RTM_GETLINK, 0, &link, sizeof link);
    link.ifi_index = 0;
    ask(fd, RTM_GETLINK, 0, &link, sizeof link);

    PART("addresses");
    struct ifaddrmsg address = {.ifa_family = AF_INET};
    ask(fd, RTM_GETADDR, NLM_F_DUMP, &address, sizeof address);

    PART("routes");
    struct rtmsg route = {.rtm_family = AF_INET};
    ask(fd, RTM_GETROUTE, NLM_F_DUMP, &route, sizeof route);
    struct {
        struct rtmsg route;
        struct rtattr attribute;
        struct in_addr to;
    } lookup = {{.rtm_family = AF_INET, .rtm_dst_len = 32}, {8, RTA_DST}, {htonl(0x7f000001)}};
    ask(fd, RTM_GETROUTE, 0, &lookup, sizeof lookup);

    PART("others");
    ask(fd, NLMSG_NOOP, NLM_F_ACK, "", 0);
    ask(fd, NLMSG_NOOP, 0, "", 0);
    ask(fd, 0x7002, 0, &link, sizeof link);
    kernel.nl_pid = 4000000000u;
    TRY(sendto(fd, "x", 1, 0, (void *)&kernel, sizeof kernel));
    TRY(send(fd, "short", 5, 0));
    TRY(recv(fd, answer, 10, MSG_DONTWAIT));

    PART("the C library");
    struct ifaddrs *all;
    TRY(getifaddrs(&all));
    for (struct ifaddrs *a = all; a; a = a->ifa_next) {
        if (!a->ifa_addr || strcmp(a->ifa_name, "lo") || a->ifa_addr->sa_family == AF_INET6)
            continue;
        say("%s family %d flags %x\n", a->ifa_name, a->ifa_addr->sa_family, a->ifa_flags);
        if (a->ifa_addr->sa_family == AF_PACKET) {
            struct sockaddr_ll *hardware = (void *)a->ifa_addr;
            say("  type %d length %d\n", hardware->sll_hatype, hardware->sll_halen);
        }
        if (a->ifa_addr->sa_family == AF_INET)
            say("  %s\n", inet_ntoa(((struct sockaddr_in *)a->ifa_netmask)->sin_addr));
    }
    TRY(if_nametoindex("lo"));
    TRY(if_nametoindex("nosuch"));
    char text[IF_NAMESIZE] = "";
    IS(if_indextoname(1, text) == text);
    say("%s\n", text);

    PART("files");
    show("/proc/net/dev", "Inter", "\n");
    show("/proc/net/dev", " face", "\n");
    show("/proc/net/snmp", "Ip:", " ");
    show("/proc/net/snmp", "Tcp: Rto", "\n");
    show("/proc/net/snmp", "Udp: In", "\n");
    show("/proc/net/snmp6", "Ip6InReceives", " ");
    show("/proc/net/netstat", "TcpExt: ", " ");
    show("/proc/net/netstat", "IpExt: In", "\n");
    show("/proc/net/sockstat", "RAW", "\n");
    show("/proc/net/sockstat6", "RAW6", "\n");
    show("/sys/class/net/lo/address", "", "\n");
    show("/sys/class/net/lo/broadcast", "", "\n");
    show("/sys/class/net/lo/carrier", "", "\n");
    show("/sys/class/net/lo/flags", "", "\n");
    show("/sys/class/net/lo/ifindex", "", "\n");
    show("/sys/class/net/lo/iflink", "", "\n");
    show("/sys/class/net/lo/mtu", "", "\n");
    show("/sys/class/net/lo/operstate", "", "\n");
    show("/sys/class/net/lo/tx_queue_len", "", "\n");
    show("/sys/class/net/lo/type", "", "\n");
    show("/sys/class/net/lo/uevent", "", "\n");
    show("/sys/class/net/nosuch/uevent", "", "\n");

    PART("ioctl");
    int inet = socket(AF_INET, SOCK_DGRAM, 0);
    struct ifreq request = {.ifr_name = "lo"};
    TRY(ioctl(inet, SIOCGIFFLAGS, &request));
    say("flags %x\n", request.ifr_flags);
    TRY(ioctl(inet, SIOCGIFADDR, &request));
    say("%s\n", inet_ntoa(((struct sockaddr_in *)&request.ifr_addr)->sin_addr));
    TRY(ioctl(inet, SIOCGIFNETMASK, &request));
    say("%s\n", inet_ntoa(((struct sockaddr_in *)&request.ifr_addr)->sin_addr));
    TRY(ioctl(inet, SIOCGIFBRDADDR, &request));
    say("%s\n", inet_ntoa(((struct sockaddr_in *)&request.ifr_addr)->sin_addr));
    TRY(ioctl(inet, SIOCGIFMTU, &request));
    say("mtu %d\n", request.ifr_mtu);
    TRY(ioctl(inet, SIOCGIFHWADDR, &request));
    say("type %d\n", request.ifr_hwaddr.sa_family);
    TRY(ioctl(inet, SIOCGIFINDEX, &request));
    say("index %d\n", request.ifr_ifindex);
    request.ifr_ifindex = 12345;
    TRY(ioctl(inet, SIOCGIFNAME, &request));
    strcpy(request.ifr_name, "nosuch");
    TRY(ioctl(inet, SIOCGIFFLAGS, &request));
    return 0;
}
