/* Sockets in /proc/net (proc(5)): those that listen, and those that datagrams reach. */
#include "guest.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

/* Prints the row of a socket, with a mark for its port. */
static void row(const char *path, int fd, unsigned port)
{
    struct stat stat;
    MUST(fstat(fd, &stat));
    FILE *file = fopen(path, "r");
    char line[512];
    while (file && fgets(line, sizeof line, file)) {
        char local[64], remote[64];
        unsigned state, found, transfer[2], timer[2], retransmits, uid, timeout;
        unsigned long ino;
        if (sscanf(line, " %*d: %63[0-9A-F]:%x %63s %x %x:%x %x:%x %x %u %u %lu", local, &found, remote, &state,
                   &transfer[0], &transfer[1], &timer[0], &timer[1], &retransmits, &uid, &timeout, &ino) != 12
            || ino != (unsigned long)stat.st_ino)
            continue;
        say("%s: %s %s %02x%s\n", path, local, remote, state, found == port ? "" : ", another port");
        fclose(file);
        return;
    }
    say("%s: no row\n", path);
    if (file)
        fclose(file);
}

static unsigned bound(int fd, const char *address, int family)
{
    struct sockaddr_storage name = {.ss_family = (sa_family_t)family};
    struct sockaddr_in *four = (struct sockaddr_in *)&name;
    struct sockaddr_in6 *six = (struct sockaddr_in6 *)&name;
    inet_pton(family, address, family == AF_INET ? (void *)&four->sin_addr : (void *)&six->sin6_addr);
    socklen_t len = family == AF_INET ? sizeof *four : sizeof *six;
    MUST(bind(fd, (struct sockaddr *)&name, len));
    MUST(getsockname(fd, (struct sockaddr *)&name, &len));
    return ntohs(four->sin_port);
}

int main(void)
{
    int tcp = MUST(socket(AF_INET, SOCK_STREAM, 0));
    unsigned port = bound(tcp, "127.0.0.1", AF_INET);
    row("/proc/net/tcp", tcp, port);
    MUST(listen(tcp, 5));
    row("/proc/net/tcp", tcp, port);
    row("/proc/self/net/tcp6", tcp, port);
    int any = MUST(socket(AF_INET6, SOCK_STREAM, 0));
    port = bound(any, "::", AF_INET6);
    MUST(listen(any, 5));
    row("/proc/net/tcp6", any, port);
    int six = MUST(socket(AF_INET6, SOCK_STREAM, 0));
    port = bound(six, "::1", AF_INET6);
    MUST(listen(six, 5));
    row("/proc/net/tcp6", six, port);
    int udp = MUST(socket(AF_INET, SOCK_DGRAM, 0));
    port = bound(udp, "127.0.0.1", AF_INET);
    row("/proc/net/udp", udp, port);
    MUST(close(tcp));
    row("/proc/net/tcp", udp, port);
    return 0;
}
