/* The controlling terminal: sessions, foreground groups, hang-up. */
#include "guest.h"
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <termios.h>

static int master;
static char name[64];
static volatile sig_atomic_t heard;

static void note(int signal) { heard |= 1 << signal; }

/* The host's terminals pass on what they get when they have time for it. */
static void hear(int signal)
{
    for (int i = 0; i < 10000 && !(heard & 1 << signal); i++)
        usleep(1000);
}

static void catch_signal(int signal)
{
    struct sigaction action = {.sa_handler = note};
    MUST(sigaction(signal, &action, NULL));
}

static void finish(pid_t child)
{
    int status;
    MUST(waitpid(child, &status, 0));
    say("child: %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
}

/* Leads a session whose controlling terminal is the slave. */
static int lead(void)
{
    MUST(setsid());
    return (int)MUST(open(name, O_RDWR));
}

static void opened(void)
{
    master = (int)MUST(posix_openpt(O_RDWR | O_NOCTTY));
    MUST(grantpt(master));
    MUST(unlockpt(master));
    MUST(ptsname_r(master, name, sizeof name));
}

static void relations(void)
{
    MUST(setsid());
    TRY(open("/dev/tty", O_RDWR));
    int slave = (int)MUST(open(name, O_RDWR | O_NOCTTY));
    TRY(tcgetpgrp(slave));
    TRY(ioctl(slave, TIOCSCTTY, 0));
    IS(tcgetpgrp(slave) == getpgrp());
    IS(tcgetsid(slave) == getpid());
    int tty = (int)MUST(open("/dev/tty", O_RDWR));
    IS(isatty(tty));
    IS(tcgetpgrp(tty) == getpid());
    TRY(tcsetpgrp(slave, getpgrp()));
    TRY(tcsetpgrp(slave, 0x3fffffff));
    TRY(tcsetpgrp(slave, -5));
    int more = (int)MUST(posix_openpt(O_RDWR | O_NOCTTY));
    char second[64];
    MUST(unlockpt(more));
    MUST(ptsname_r(more, second, sizeof second));
    int other = (int)MUST(open(second, O_RDWR));
    TRY(tcgetpgrp(other));
    TRY(ioctl(other, TIOCSCTTY, 0));
    catch_signal(SIGHUP);
    catch_signal(SIGCONT);
    TRY(ioctl(slave, TIOCNOTTY));
    IS(heard == (1 << SIGHUP | 1 << SIGCONT));
    TRY(tcgetpgrp(slave));
    TRY(open("/dev/tty", O_RDWR));
}

static void keys(void)
{
    int slave = lead();
    catch_signal(SIGINT);
    catch_signal(SIGQUIT);
    catch_signal(SIGWINCH);
    MUST(write(master, "abc\x03", 4));
    hear(SIGINT);
    IS(heard == 1 << SIGINT);
    MUST(write(master, "\x1c", 1));
    hear(SIGQUIT);
    IS(heard == (1 << SIGINT | 1 << SIGQUIT));
    struct winsize size = {10, 20, 0, 0};
    MUST(ioctl(master, TIOCSWINSZ, &size));
    hear(SIGWINCH);
    IS((heard & 1 << SIGWINCH) != 0);
    heard = 0;
    MUST(ioctl(master, TIOCSWINSZ, &size));
    usleep(20000);
    IS(heard == 0);
    MUST(close(slave));
}

static void background(void)
{
    int slave = lead();
    pid_t child = fork();
    if (child == 0) {
        setpgid(0, 0);
        char byte;
        signal(SIGTTIN, SIG_IGN);
        TRY(read(slave, &byte, 1));
        signal(SIGTTIN, SIG_DFL);
        signal(SIGTTOU, SIG_IGN);
        struct termios termios;
        TRY(tcgetattr(slave, &termios));
        termios.c_lflag |= TOSTOP;
        TRY(tcsetattr(slave, TCSANOW, &termios));
        TRY(write(slave, "ignored\n", 8));
        signal(SIGTTOU, SIG_DFL);
        read(slave, &byte, 1);
        say("read after all: %c\n", byte);
        _exit(0);
    }
    int status;
    MUST(waitpid(child, &status, WUNTRACED));
    say("stopped by %s\n", WIFSTOPPED(status) ? sigabbrev_np(WSTOPSIG(status)) : "nothing");
    signal(SIGTTOU, SIG_IGN);
    TRY(tcsetpgrp(slave, child));
    IS(tcgetpgrp(slave) == child);
    MUST(write(master, "yes\n", 4));
    MUST(kill(child, SIGCONT));
    finish(child);
    TRY(tcsetpgrp(slave, getpgrp()));
}

static void hang_up(void)
{
    int slave = lead();
    catch_signal(SIGHUP);
    MUST(close(master));
    hear(SIGHUP);
    IS((heard & 1 << SIGHUP) != 0);
    char byte;
    TRY(read(slave, &byte, 1));
    TRY(write(slave, "x", 1));
    TRY(open("/dev/tty", O_RDWR));
}

int main(void)
{
    static const struct { const char *what; void (*run)(void); } parts[] = {
        {"relations", relations}, {"keys", keys}, {"background", background},
        {"hang-up", hang_up},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        PART(parts[i].what);
        opened();
        pid_t child = fork();
        if (child == 0) {
            parts[i].run();
            _exit(0);
        }
        if (parts[i].run == hang_up)
            close(master); /* the child's is the only one left */
        finish(child);
        close(master);
    }
    return 0;
}
