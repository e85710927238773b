/* A server of one connection at a time, which answers requests on it until the client
 * ends it: with the number of the connection, and of the request on it. */
#define _GNU_SOURCE
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int connections;

/* Reads one head; 0 when the client has ended the connection. */
static int read_head(int client, char *head, size_t capacity)
{
    size_t have = 0;

    while (have < capacity - 1) {
        ssize_t got = read(client, head + have, capacity - 1 - have);
        if (got <= 0)
            return 0;
        have += (size_t)got;
        head[have] = '\0';
        if (have >= 4 && strcmp(head + have - 4, "\r\n\r\n") == 0)
            return 1;
    }
    return 0;
}

static void serve(int client)
{
    char head[8192], body[128], answer[512];

    connections++;
    for (int request = 1; read_head(client, head, sizeof head); request++) {
        int last = strcasestr(head, "\r\nConnection: close\r\n") != NULL;
        int len = snprintf(body, sizeof body, "connection %d, request %d\n", connections, request);
        int all = snprintf(answer, sizeof answer,
                           "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%s\r\n%s", len,
                           last ? "Connection: close\r\n" : "", body);
        if (write(client, answer, (size_t)all) != all || last)
            return;
    }
}

int main(void)
{
    struct sockaddr_in address = {
        .sin_family = AF_INET,
        .sin_port = htons(8080),
        .sin_addr.s_addr = htonl(INADDR_ANY),
    };

    signal(SIGPIPE, SIG_IGN);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) < 0 || listen(listener, 16) < 0) {
        perror("listen");
        return 1;
    }
    for (;;) {
        int client = accept(listener, NULL, NULL);
        if (client < 0)
            continue;
        serve(client);
        close(client);
    }
}
