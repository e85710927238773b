/* A small HTTP server in plain C: one connection at a time, one response each.
 *
 * Nothing in it knows about Thaw. It listens, accepts, reads a request head,
 * answers and closes. Thaw freezes it in accept(). */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

/* Reads until the blank line that ends a request head. Returns the number of
 * bytes in `head`, or -1 when the client left or sent too much. */
static ssize_t read_head(int client, char *head, size_t capacity)
{
    size_t have = 0;

    while (have < capacity - 1) {
        ssize_t got = read(client, head + have, capacity - 1 - have);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return -1;
        have += (size_t)got;
        head[have] = '\0';
        if (strstr(head, "\r\n\r\n"))
            return (ssize_t)have;
    }
    return -1;
}

static void write_all(int client, const char *data, size_t len)
{
    while (len > 0) {
        ssize_t put = write(client, data, len);
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            return;
        data += put;
        len -= (size_t)put;
    }
}

static void serve(int client)
{
    char head[8192];
    char method[16] = "", path[1024] = "";
    char body[1200], response[1600];

    if (read_head(client, head, sizeof head) < 0)
        return;
    sscanf(head, "%15s %1023s", method, path);
    int body_len = snprintf(body, sizeof body, "Hello from C! You asked for %s.\n", path);
    int len = snprintf(response, sizeof response,
                       "HTTP/1.1 200 OK\r\n"
                       "Content-Type: text/plain\r\n"
                       "Content-Length: %d\r\n"
                       "Connection: close\r\n"
                       "\r\n"
                       "%s",
                       body_len, strcmp(method, "HEAD") == 0 ? "" : body);
    write_all(client, response, (size_t)len);
}

int main(void)
{
    const char *port = getenv("PORT");
    struct sockaddr_in address = {
        .sin_family = AF_INET,
        .sin_port = htons((unsigned short)(port ? atoi(port) : 8080)),
        .sin_addr.s_addr = htonl(INADDR_ANY),
    };
    int on = 1;

    signal(SIGPIPE, SIG_IGN);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (listener < 0)
        fail("socket");
    if (setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) < 0)
        fail("setsockopt");
    if (bind(listener, (struct sockaddr *)&address, sizeof address) < 0)
        fail("bind");
    if (listen(listener, 16) < 0)
        fail("listen");

    for (;;) {
        int client = accept(listener, NULL, NULL);
        if (client < 0) {
            if (errno == EINTR || errno == ECONNABORTED)
                continue;
            fail("accept");
        }
        serve(client);
        close(client);
    }
}
