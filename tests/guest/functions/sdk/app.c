#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "thaw.h"

static char events[256];

static void note(void *what, long generation) {
    char text[64];
    snprintf(text, sizeof text, what, generation);
    if (events[0]) strncat(events, ", ", sizeof events - strlen(events) - 1);
    strncat(events, text, sizeof events - strlen(events) - 1);
}

int main(void) {
    thaw_before_freeze(note, "closed last");
    thaw_before_freeze(note, "closed first");
    thaw_after_thaw(note, "opened in %ld");
    thaw_after_thaw(note, "opened last");
    long which = thaw_freeze();

    int listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(8080)};
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 16)) return 1;
    for (;;) {
        int client = accept(listener, NULL, NULL);
        char request[4096], text[512], answer[1024];
        if (client < 0 || read(client, request, sizeof request) <= 0) return 2;
        int len = snprintf(text, sizeof text, "copy %ld: %s\n", which, events);
        int all = snprintf(answer, sizeof answer,
                           "HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", len, text);
        if (write(client, answer, (size_t)all) != all) return 3;
        close(client);
    }
}
