/* fcntl(2): signal-driven I/O: O_ASYNC, F_SETOWN, F_SETOWN_EX, F_SETSIG; FIOASYNC. */
#include "guest.h"
#include <sys/ioctl.h>
#include <sys/socket.h>

static volatile sig_atomic_t told, code, described;

static void plain(int signal) { (void)signal; told++; }

static void detailed(int signal, siginfo_t *info, void *context)
{
    (void)signal;
    (void)context;
    told++;
    code = info->si_code;
    described = info->si_fd;
}

int main(void)
{
    int pair[2], ends[2], on = 1, off = 0;
    struct f_owner_ex owner = {F_OWNER_TID, 0};
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    signal(SIGIO, plain);

    PART("owners");
    TRY(fcntl(pair[0], F_GETOWN));
    TRY(fcntl(pair[0], F_SETOWN, 999999));
    OK(fcntl(pair[0], F_SETOWN, getpid()));
    IS(fcntl(pair[0], F_GETOWN) == getpid());
    TRY(fcntl(pair[0], F_GETOWN_EX, &owner));
    IS(owner.type == F_OWNER_PID && owner.pid == getpid());
    owner.type = 9;
    TRY(fcntl(pair[0], F_SETOWN_EX, &owner));
    TRY(fcntl(pair[0], F_GETSIG));
    TRY(fcntl(pair[0], F_SETSIG, 65));

    PART("a socket");
    TRY(write(pair[1], "a", 1));
    say("told %d\n", told);
    TRY(ioctl(pair[0], FIOASYNC, &on));
    IS(fcntl(pair[0], F_GETFL) & O_ASYNC);
    TRY(write(pair[1], "b", 1));
    say("told %d\n", told);
    TRY(ioctl(pair[0], FIOASYNC, &off));
    IS(fcntl(pair[0], F_GETFL) & O_ASYNC);
    TRY(write(pair[1], "c", 1));
    say("told %d\n", told);

    PART("a pipe, with details");
    struct sigaction action = {.sa_sigaction = detailed, .sa_flags = SA_SIGINFO};
    MUST(sigaction(SIGRTMIN + 1, &action, NULL));
    MUST(pipe(ends));
    OK(fcntl(ends[0], F_SETSIG, SIGRTMIN + 1));
    OK(fcntl(ends[0], F_SETOWN, getpid()));
    TRY(fcntl(ends[0], F_SETFL, O_ASYNC | O_NONBLOCK));
    TRY(write(ends[1], "x", 1));
    say("told %d, code %d\n", told, code);
    IS(described == ends[0]);

    PART("owners by ioctl");
    int id = getpid(), group = -getpgrp(), found = -1;
    TRY(ioctl(pair[1], SIOCGPGRP, &found));
    say("owner %d\n", found);
    TRY(ioctl(pair[1], SIOCSPGRP, &id));
    TRY(ioctl(pair[1], FIOGETOWN, &found));
    IS(found == id && fcntl(pair[1], F_GETOWN) == id);
    TRY(ioctl(pair[1], FIOSETOWN, &group));
    TRY(ioctl(pair[1], SIOCGPGRP, &found));
    IS(found == group);
    TRY(ioctl(pair[1], SIOCSPGRP, NULL));
    TRY(ioctl(ends[0], SIOCSPGRP, &id));

    PART("what cannot tell");
    int file = MUST(open("/proc/self/exe", O_RDONLY));
    TRY(ioctl(file, FIOASYNC, &on));
    return 0;
}
