/* The signal that a child sends when it ends, clone(2): any number fits its
 * place, and one that is no signal is not sent. */
#include "guest.h"
#include <sys/wait.h>

static volatile sig_atomic_t arrived;

static void note(int signal)
{
    arrived = signal;
}

int main(void)
{
    static const unsigned long signals[] = {0, SIGUSR1, SIGCHLD, 64, 65, 127, 128, 200, 255};
    for (int signal = 1; signal <= 64; signal++)
        if (signal != SIGSEGV)
            sigaction(signal, &(struct sigaction){.sa_handler = note}, NULL);
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        int status = 0;
        arrived = 0;
        long child = syscall(SYS_clone, signals[i], 0, 0, 0, 0);
        if (child == 0)
            _exit(7);
        while (waitpid((pid_t)child, &status, __WALL) < 0 && errno == EINTR)
            continue;
        say("exit signal %lu: %s, ended with %d, arrived %d\n", signals[i], child > 0 ? "cloned" : "refused",
            WEXITSTATUS(status), (int)arrived);
    }
    return 0;
}
