/* Waits for standard input with poll, and echoes it in capitals as it comes. */
#include <ctype.h>
#include <poll.h>
#include <unistd.h>

int main(void) {
    char bytes[4096];
    for (;;) {
        struct pollfd input = {.fd = 0, .events = POLLIN};
        if (poll(&input, 1, -1) != 1) return 1;
        ssize_t count = read(0, bytes, sizeof bytes);
        if (count <= 0) return count < 0;
        for (ssize_t i = 0; i < count; i++) bytes[i] = (char)toupper(bytes[i]);
        for (ssize_t done = 0, n; done < count; done += n)
            if ((n = write(1, bytes + done, (size_t)(count - done))) < 0) return 2;
    }
}
