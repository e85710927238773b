/* Sockets that travel in the queue of the next one, and so on: whoever closes the last one
 * closes all of them. */
#include "guest.h"
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define LENGTH 20000

/* Sends a descriptor, and closes it here. */
static void pass(int over, int fd)
{
    union { char bytes[CMSG_SPACE(sizeof(int))]; struct cmsghdr align; } control = {{0}};
    struct iovec one = {"f", 1};
    struct msghdr message = {.msg_iov = &one, .msg_iovlen = 1, .msg_control = &control,
                             .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    MUST(sendmsg(over, &message, 0));
    close(fd);
}

static void chain(const char *what, int type)
{
    int innermost[2], last;
    PART(what);
    MUST(socketpair(AF_UNIX, type, 0, innermost));
    last = innermost[1];
    for (int i = 0; i < LENGTH; i++) {
        int pair[2];
        MUST(socketpair(AF_UNIX, type, 0, pair));
        pass(pair[0], last);
        close(pair[0]);
        last = pair[1];
    }
    struct pollfd p = {.fd = innermost[0], .events = POLLIN};
    say("before: %d\n", poll(&p, 1, 0));
    close(last);
    /* Linux may leave a part of the work to a thread of its own. */
    say("after: %d\n", poll(&p, 1, 10000));
    TRY(send(innermost[0], "x", 1, MSG_NOSIGNAL));
    close(innermost[0]);
}

int main(void)
{
    chain("streams", SOCK_STREAM);
    chain("packets", SOCK_SEQPACKET);
    return 0;
}
