/* Answers every request with a greeting. */
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* What is done before accept() is done once, when the function is built. */
static const char body[] = "Hello from C! Nice to meet you.\n";

static void answer(int client)
{
    char request[8192], response[512];
    size_t length = 0;
    /* The head of a request may come in pieces; it ends with an empty line. */
    for (;;) {
        ssize_t got = read(client, request + length, sizeof request - 1 - length);
        if (got <= 0)
            return;
        length += (size_t)got;
        request[length] = '\0';
        if (strstr(request, "\r\n\r\n") || length == sizeof request - 1)
            break;
    }
    int n = snprintf(response, sizeof response,
                     "HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\n"
                     "Content-Length: %zu\r\nConnection: close\r\n\r\n%s",
                     strlen(body), body);
    if (write(client, response, (size_t)n) != n)
        perror("write");
}

int main(void)
{
    const char *port = getenv("PORT");
    struct sockaddr_in address = { .sin_family = AF_INET,
                                   .sin_port = htons(port ? (unsigned short)atoi(port) : 8080) };
    int server = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(server, (struct sockaddr *)&address, sizeof address) || listen(server, 64)) {
        perror("listen");
        return 1;
    }
    for (;;) {
        int client = accept(server, NULL, NULL);
        if (client < 0)
            continue;
        answer(client);
        close(client);
    }
}
