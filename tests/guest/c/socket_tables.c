/* Sockets in /proc/net (proc(5)): those that listen, those that datagrams reach, connections with both
 * their ends, and Unix sockets. */
#include "guest.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/un.h>

static char ports[65536]; /* names for ports, which differ from run to run */

static unsigned long inode_of(int fd)
{
    struct stat stat;
    MUST(fstat(fd, &stat));
    return stat.st_ino;
}

/* An address of a table with the name of its port. */
static const char *named(const char *address, unsigned port)
{
    static char text[4][80];
    static int next;
    char *to = text[next++ % 4];
    snprintf(to, sizeof text[0], "%s:%c", address, port == 0 ? '0' : ports[port] ? ports[port] : '?');
    return to;
}

/* Whether the table has had this row: Linux may show one again, if the table changes while it is read. */
static bool is_repeated(const char *local, unsigned from, const char *remote, unsigned to, bool is_first)
{
    static char seen[64][160];
    static int count;
    char row[160];
    count = is_first ? 0 : count;
    snprintf(row, sizeof row, "%s:%x %s:%x", local, from, remote, to);
    for (int i = 0; i < count; i++)
        if (strcmp(seen[i], row) == 0)
            return true;
    if (count < 64)
        strcpy(seen[count++], row);
    return false;
}

/* Prints the rows of a table that have this inode, of those with inode 0 the ones with a local port. */
static void rows(const char *path, unsigned long wanted, unsigned port)
{
    FILE *file = fopen(path, "r");
    char line[512];
    bool found = false;
    while (file && fgets(line, sizeof line, file)) {
        char local[64], remote[64];
        unsigned from, to, state, transfer[2], timer[2], retransmits, uid, timeout;
        unsigned long ino;
        if (sscanf(line, " %*d: %63[0-9A-F]:%x %63[0-9A-F]:%x %x %x:%x %x:%x %x %u %u %lu", local, &from, remote, &to,
                   &state, &transfer[0], &transfer[1], &timer[0], &timer[1], &retransmits, &uid, &timeout, &ino) != 13
            || ino != wanted || (!wanted && from != port))
            continue;
        if (is_repeated(local, from, remote, to, !found))
            continue;
        if (state == 4)
            state = 5; /* FIN_WAIT1, until the other end has acknowledged the end */
        say("%s: %s %s %02x, %u to read\n", path, named(local, from), named(remote, to), state, transfer[1]);
        found = true;
    }
    if (!found)
        say("%s: no row\n", path);
    if (file)
        fclose(file);
}

static void row(const char *path, int fd) { rows(path, inode_of(fd), 0); }

/* Gives the local port of a socket a name. */
static unsigned name_port(int fd, char name)
{
    struct sockaddr_storage own;
    socklen_t len = sizeof own;
    MUST(getsockname(fd, (struct sockaddr *)&own, &len));
    unsigned port = ntohs(own.ss_family == AF_INET ? ((struct sockaddr_in *)&own)->sin_port
                                                   : ((struct sockaddr_in6 *)&own)->sin6_port);
    ports[port] = name;
    return port;
}

static socklen_t address(struct sockaddr_storage *at, int family, const char *text, unsigned port)
{
    struct sockaddr_in *four = (struct sockaddr_in *)at;
    struct sockaddr_in6 *six = (struct sockaddr_in6 *)at;
    memset(at, 0, sizeof *at);
    at->ss_family = (sa_family_t)family;
    inet_pton(family, text, family == AF_INET ? (void *)&four->sin_addr : (void *)&six->sin6_addr);
    four->sin_port = htons((uint16_t)port);
    return family == AF_INET ? sizeof *four : sizeof *six;
}

static int bound(int family, int type, const char *text, char name)
{
    struct sockaddr_storage at;
    int fd = MUST(socket(family, type, 0));
    socklen_t len = address(&at, family, text, 0);
    MUST(bind(fd, (struct sockaddr *)&at, len));
    name_port(fd, name);
    return fd;
}

static int connected(int family, int type, const char *text, unsigned port, char name)
{
    struct sockaddr_storage at;
    int fd = MUST(socket(family, type, 0));
    socklen_t len = address(&at, family, text, port);
    MUST(connect(fd, (struct sockaddr *)&at, len));
    name_port(fd, name);
    return fd;
}

static void of_bound_sockets(void)
{
    PART("bound");
    int tcp = bound(AF_INET, SOCK_STREAM, "127.0.0.1", 'a');
    row("/proc/net/tcp", tcp);
    MUST(listen(tcp, 5));
    row("/proc/net/tcp", tcp);
    row("/proc/self/net/tcp6", tcp);
    int any = bound(AF_INET6, SOCK_STREAM, "::", 'b');
    MUST(listen(any, 5));
    row("/proc/net/tcp6", any);
    int six = bound(AF_INET6, SOCK_STREAM, "::1", 'c');
    MUST(listen(six, 5));
    row("/proc/net/tcp6", six);
    int udp = bound(AF_INET, SOCK_DGRAM, "127.0.0.1", 'd');
    row("/proc/net/udp", udp);
    unsigned long ino = inode_of(tcp);
    MUST(close(tcp));
    rows("/proc/net/tcp", ino, 0);
    row("/proc/net/tcp", udp);
    close(any);
    close(six);
    close(udp);
}

static void of_connections(void)
{
    PART("connections");
    int listener = bound(AF_INET, SOCK_STREAM, "127.0.0.1", 'l');
    unsigned port = name_port(listener, 'l');
    MUST(listen(listener, 5));
    int client = connected(AF_INET, SOCK_STREAM, "127.0.0.1", port, 'c');
    row("/proc/net/tcp", listener);
    row("/proc/net/tcp", client);
    rows("/proc/net/tcp", 0, port);
    int server = MUST(accept(listener, NULL, NULL));
    row("/proc/net/tcp", listener);
    row("/proc/net/tcp", server);
    rows("/proc/net/tcp", 0, port);
    MUST(write(client, "hello", 5));
    row("/proc/net/tcp", server);
    char text[64], link[64];
    MUST(read(server, text, sizeof text));
    MUST(shutdown(client, SHUT_WR));
    MUST(read(server, text, sizeof text) == 0 ? 0 : -1);
    row("/proc/net/tcp", client);
    row("/proc/net/tcp", server);
    snprintf(text, sizeof text, "/proc/self/fd/%d", server);
    ssize_t len = MUST(readlink(text, link, sizeof link - 1));
    link[len] = '\0';
    snprintf(text, sizeof text, "socket:[%lu]", inode_of(server));
    IS(!strcmp(text, link));
    int copy = MUST(dup(server));
    row("/proc/net/tcp", copy);
    close(copy);
    close(server);
    close(client);
    close(listener);

    PART("connections of IPv6");
    listener = bound(AF_INET6, SOCK_STREAM, "::", 'l');
    port = name_port(listener, 'l');
    MUST(listen(listener, 5));
    client = connected(AF_INET, SOCK_STREAM, "127.0.0.1", port, 'c');
    server = MUST(accept(listener, NULL, NULL));
    row("/proc/net/tcp", client);
    row("/proc/net/tcp", server);
    row("/proc/net/tcp6", server);
    int six = connected(AF_INET6, SOCK_STREAM, "::1", port, 's');
    row("/proc/net/tcp6", six);
    close(six);
    close(server);
    close(client);
    close(listener);
}

static void of_datagrams(void)
{
    PART("datagrams");
    int receiver = bound(AF_INET, SOCK_DGRAM, "127.0.0.1", 'r');
    int sender = MUST(socket(AF_INET, SOCK_DGRAM, 0));
    row("/proc/net/udp", sender);
    close(sender);
    sender = connected(AF_INET, SOCK_DGRAM, "127.0.0.1", name_port(receiver, 'r'), 's');
    row("/proc/net/udp", sender);
    row("/proc/net/udp", receiver);
    close(sender);
    close(receiver);
}

/* Prints the row of a Unix socket; with fd -1 that of one which nobody has, with this name. */
static void unix_row(int fd, const char *name)
{
    FILE *file = fopen("/proc/net/unix", "r");
    unsigned long wanted = fd < 0 ? 0 : inode_of(fd);
    char line[512];
    while (file && fgets(line, sizeof line, file)) {
        unsigned long ino;
        unsigned references, protocol, flags, type, state;
        int end = 0;
        if (sscanf(line, "%*x: %x %x %x %x %x %lu%n", &references, &protocol, &flags, &type, &state, &ino, &end) != 6
            || ino != wanted || (name && !strstr(line, name)))
            continue;
        line[strcspn(line, "\n")] = '\0';
        say("unix: %08x %08x %04x %02x%s\n", protocol, flags, type, state, line + end);
        fclose(file);
        return;
    }
    say("unix: no row\n");
    if (file)
        fclose(file);
}

static void of_unix_sockets(void)
{
    PART("unix");
    char *scratch = enter_scratch();
    struct sockaddr_un at = {.sun_family = AF_UNIX, .sun_path = "a socket"};
    int listener = MUST(socket(AF_UNIX, SOCK_STREAM, 0));
    unix_row(listener, NULL);
    MUST(bind(listener, (struct sockaddr *)&at, sizeof at));
    MUST(listen(listener, 5));
    unix_row(listener, NULL);
    int client = MUST(socket(AF_UNIX, SOCK_STREAM, 0));
    MUST(connect(client, (struct sockaddr *)&at, sizeof at));
    unix_row(client, NULL);
    unix_row(-1, "a socket");
    int server = MUST(accept(listener, NULL, NULL));
    unix_row(server, NULL);
    struct sockaddr_un other = {.sun_family = AF_UNIX, .sun_path = "\0thaw-\0-abstract"};
    int named = MUST(socket(AF_UNIX, SOCK_DGRAM, 0));
    MUST(bind(named, (struct sockaddr *)&other, offsetof(struct sockaddr_un, sun_path) + 16));
    unix_row(named, NULL);
    int pair[2];
    MUST(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair));
    unix_row(pair[0], NULL);
    unix_row(pair[1], NULL);
    close(pair[1]);
    unix_row(pair[0], NULL);
    leave_scratch(scratch);
}

/* A table that is longer than what one read gives. */
static void of_many(void)
{
    PART("many");
    enum { MANY = 300 };
    int fds[MANY];
    for (int i = 0; i < MANY; i++) {
        fds[i] = bound(AF_INET, SOCK_STREAM, "127.0.0.1", 'm');
        MUST(listen(fds[i], 1));
    }
    int table = MUST(open("/proc/net/tcp", O_RDONLY)), lines = 0;
    char text[1000], first[1000];
    ssize_t got, before = 0;
    while ((got = MUST(read(table, text, sizeof text))) > 0) {
        if (!before)
            memcpy(first, text, (size_t)(before = got));
        for (ssize_t i = 0; i < got; i++)
            lines += text[i] == '\n';
    }
    IS(lines > MANY);
    MUST(lseek(table, 0, SEEK_SET));
    got = MUST(read(table, text, sizeof text));
    IS(got == before && !memcmp(text, first, 80));
    close(table);
    for (int i = 0; i < MANY; i++)
        close(fds[i]);
}

int main(void)
{
    of_bound_sockets();
    of_connections();
    of_datagrams();
    of_unix_sockets();
    of_many();
    return 0;
}
