/* Pseudo terminals: both ends, the line discipline, signals, hang-up. */
#include "guest.h"
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <termios.h>

static int master, slave;

static void show(const char *what, const char *bytes, ssize_t len)
{
    if (len < 0) {
        say("%s: %s\n", what, error_name(errno));
        return;
    }
    say("%s: %ld \"", what, (long)len);
    for (ssize_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)bytes[i];
        if (c == '\n')
            say("\\n");
        else if (c == '\r')
            say("\\r");
        else if (c < 32 || c > 126)
            say("<%02x>", c);
        else
            say("%c", c);
    }
    say("\"\n");
}

/* What the terminal shows. Echo of what was typed may be on its way. */
static void screen(void)
{
    char bytes[4096];
    ssize_t total = 0, got;
    struct pollfd request = {master, POLLIN, 0};
    /* Linux echoes from a kernel thread, which a busy machine may keep waiting. */
    while (poll(&request, 1, total ? 100 : 1000) > 0 && (request.revents & POLLIN)) {
        got = read(master, bytes + total, sizeof bytes - (size_t)total);
        if (got <= 0)
            break;
        total += got;
    }
    show("screen", bytes, total);
}

static void type(const char *text)
{
    MUST(write(master, text, strlen(text)));
    /* The host's kernel hands input over in the background. */
    usleep(20000);
}

/* Waits until what was typed has stopped output, or has it go on. */
static void await_output(short wanted)
{
    struct pollfd request = {slave, POLLOUT, 0};
    for (int tries = 0; tries < 1000; tries++) {
        MUST(poll(&request, 1, 0));
        if ((request.revents & POLLOUT) == wanted)
            break;
        usleep(10000);
    }
    IS((request.revents & POLLOUT) == wanted);
}

static void program(size_t room)
{
    char bytes[4096];
    errno = 0;
    ssize_t got = read(slave, bytes, room);
    show("program", bytes, got);
}

/* Waits until the program's side has so many bytes: the host's terminals pass on what they get when
   they have time for it. */
static void await_input(int count)
{
    int there = 0;
    while (there < count) {
        MUST(ioctl(slave, FIONREAD, &there));
        usleep(1000);
    }
}

static void on_alarm(int signal)
{
    (void)signal;
}

static void modes(tcflag_t set, tcflag_t clear, int minimum, int time)
{
    struct termios termios;
    MUST(tcgetattr(slave, &termios));
    termios.c_lflag |= set;
    termios.c_lflag &= ~clear;
    if (minimum >= 0) {
        termios.c_cc[VMIN] = (cc_t)minimum;
        termios.c_cc[VTIME] = (cc_t)time;
    }
    MUST(tcsetattr(slave, TCSANOW, &termios));
}

int main(void)
{
    char name[64], again[64];
    int number = -1, value = -1;
    struct stat st;
    struct termios termios;

    PART("opening");
    master = (int)MUST(posix_openpt(O_RDWR | O_NOCTTY));
    MUST(ioctl(master, TIOCGPTN, &number));
    IS(number >= 0);
    IS(ptsname_r(master, name, sizeof name) == 0);
    snprintf(again, sizeof again, "/dev/pts/%d", number);
    IS(!strcmp(name, again));
    TRY(isatty(master));
    TRY(open(name, O_RDWR | O_NOCTTY));
    TRY(grantpt(master));
    TRY(ioctl(master, TIOCGPTLCK, &value));
    IS(value == 1);
    TRY(unlockpt(master));
    slave = (int)MUST(open(name, O_RDWR | O_NOCTTY));
    TRY(isatty(slave));
    IS(ttyname_r(slave, again, sizeof again) == 0 && !strcmp(name, again));
    MUST(fstat(slave, &st));
    say("mode %o major %u\n", st.st_mode & S_IFMT, (unsigned)(st.st_rdev >> 8));
    TRY(chmod(name, 0600));
    MUST(stat(name, &st));
    say("permissions %o\n", st.st_mode & 0777);
    TRY(lseek(slave, 0, SEEK_CUR));
    int peer = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    IS(peer >= 0 && isatty(peer) && fcntl(peer, F_GETFD) == FD_CLOEXEC);
    close(peer);

    PART("modes");
    MUST(tcgetattr(slave, &termios));
    say("%o %o %o %o\n", termios.c_iflag, termios.c_oflag, termios.c_cflag & CSIZE,
        termios.c_lflag);
    for (int i = 0; i < 17; i++)
        say(" %d", termios.c_cc[i]);
    say("\n");
    TRY(ioctl(slave, TIOCGPTN, &value));
    TRY(ioctl(slave, TIOCGETD, &value));
    say("line discipline %d\n", value);
    struct winsize size = {0};
    TRY(ioctl(slave, TIOCGWINSZ, &size));
    say("%u x %u\n", size.ws_row, size.ws_col);
    size = (struct winsize){24, 80, 7, 9};
    TRY(ioctl(master, TIOCSWINSZ, &size));
    memset(&size, 0, sizeof size);
    TRY(ioctl(slave, TIOCGWINSZ, &size));
    say("%u x %u, %u x %u\n", size.ws_row, size.ws_col, size.ws_xpixel, size.ws_ypixel);
    TRY(tcflush(slave, 9));
    TRY(tcgetpgrp(slave));
    TRY(tcsetpgrp(slave, getpgrp()));
    TRY(ioctl(slave, TIOCGSID, &value));
    TRY(ioctl(slave, 0x5499, &value));

    PART("canonical input");
    type("hello\r");
    screen();
    program(100);
    type("abcd\x7f\x7fxy\x15kill\nsplit line\n");
    screen();
    program(100);
    program(5);
    program(100);
    type("one two  \x17three\x16\x03\n");
    screen();
    program(100);
    type("end\x04\x04");
    screen();
    program(100);
    program(100);
    type("partial");
    TRY(ioctl(slave, FIONREAD, &value));
    say("%d bytes\n", value);
    struct pollfd request = {slave, POLLIN | POLLOUT, 0};
    TRY(poll(&request, 1, 0));
    IS(request.revents == POLLOUT);
    MUST(fcntl(slave, F_SETFL, O_RDWR | O_NONBLOCK));
    program(100);
    type("\n");
    await_input(8);
    TRY(ioctl(slave, FIONREAD, &value));
    say("%d bytes\n", value);
    TRY(poll(&request, 1, 0));
    IS(request.revents == (POLLIN | POLLOUT));
    program(100);
    MUST(fcntl(slave, F_SETFL, O_RDWR));
    screen();

    PART("echo");
    modes(0, ECHO, -1, 0);
    type("secret\n");
    screen();
    program(100);
    modes(ECHONL, 0, -1, 0);
    type("x\n");
    screen();
    program(100);
    modes(ECHO, ECHONL | ECHOE | ECHOK | ECHOKE, -1, 0);
    type("ab\x7f\n");
    screen();
    program(100);
    modes(ECHOE | ECHOK | ECHOKE, ECHOCTL, -1, 0);
    type("a\x01z\n");
    screen();
    program(100);
    modes(ECHOCTL, 0, -1, 0);

    PART("output");
    MUST(write(slave, "a\nb\tc\r\n", 7));
    screen();
    MUST(tcgetattr(slave, &termios));
    termios.c_oflag |= XTABS;
    MUST(tcsetattr(slave, TCSADRAIN, &termios));
    MUST(write(slave, "a\tb\n\tc", 6));
    screen();
    termios.c_oflag &= ~(tcflag_t)OPOST;
    MUST(tcsetattr(slave, TCSADRAIN, &termios));
    MUST(write(slave, "\ta\nb", 4));
    screen();
    termios.c_oflag = OPOST | ONLCR;
    MUST(tcsetattr(slave, TCSAFLUSH, &termios));

    PART("input translation");
    termios.c_iflag |= INLCR;
    termios.c_iflag &= ~(tcflag_t)ICRNL;
    termios.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
    termios.c_cc[VMIN] = 1;
    termios.c_cc[VTIME] = 0;
    MUST(tcsetattr(slave, TCSANOW, &termios));
    type("a\rb\nc");
    program(100);
    termios.c_iflag |= IGNCR | ISTRIP;
    MUST(tcsetattr(slave, TCSANOW, &termios));
    type("a\rb\xe1");
    program(100);
    termios.c_iflag = ICRNL | IXON;
    MUST(tcsetattr(slave, TCSANOW, &termios));

    PART("raw input");
    modes(0, ICANON | ECHO | ISIG, 3, 0);
    type("ab");
    request.events = POLLIN;
    TRY(poll(&request, 1, 0));
    type("cd");
    TRY(poll(&request, 1, 0));
    program(100);
    type("1");
    program(1);
    modes(0, 0, 0, 0);
    program(100);
    modes(0, 0, 0, 2);
    program(100);
    type("now");
    program(2);
    program(100);
    modes(0, 0, 1, 0);
    type("\x03\x1a\x7f\x04");
    program(100);

    PART("time between bytes");
    modes(0, 0, 3, 2);
    type("a");
    TRY(poll(&request, 1, 0));
    program(100);
    type("abcd");
    program(100);
    type("abc");
    program(2);
    program(100);
    modes(0, 0, 3, 10);
    pid_t typist = MUST(fork());
    if (!typist) {
        /* The first byte may take longer than the time between bytes. */
        usleep(1100000);
        MUST(write(master, "x", 1));
        usleep(100000);
        MUST(write(master, "y", 1));
        _exit(0);
    }
    program(100);
    MUST(waitpid(typist, NULL, 0));
    modes(0, 0, 3, 0);
    type("ab");
    struct sigaction ring = {.sa_handler = on_alarm};
    MUST(sigaction(SIGALRM, &ring, NULL));
    /* Again and again: the first one may come before the read. */
    struct itimerval rings = {.it_value.tv_usec = 100000, .it_interval.tv_usec = 100000};
    MUST(setitimer(ITIMER_REAL, &rings, NULL));
    program(100);
    rings = (struct itimerval){0};
    MUST(setitimer(ITIMER_REAL, &rings, NULL));
    MUST(fcntl(slave, F_SETFL, O_RDWR | O_NONBLOCK));
    type("cd");
    program(100);
    program(100);
    MUST(fcntl(slave, F_SETFL, O_RDWR));
    modes(0, 0, 1, 0);
    type("typed before");
    await_input(12);
    modes(ICANON | ECHO | ISIG, 0, -1, 0);
    type("\n");
    screen();
    MUST(tcflush(slave, TCIFLUSH));

    PART("flow");
    type("\x13");
    await_output(0);
    MUST(fcntl(slave, F_SETFL, O_RDWR | O_NONBLOCK));
    TRY(write(slave, "x", 1));
    type("\x11");
    await_output(POLLOUT);
    TRY(write(slave, "x", 1));
    MUST(fcntl(slave, F_SETFL, O_RDWR));
    screen();
    TRY(tcflow(slave, TCOOFF));
    TRY(tcflow(slave, TCOON));

    PART("packet mode");
    value = 1;
    TRY(ioctl(master, TIOCPKT, &value));
    MUST(write(slave, "data", 4));
    screen();
    TRY(tcflush(slave, TCIOFLUSH));
    screen();
    value = 0;
    TRY(ioctl(master, TIOCPKT, &value));

    PART("hang-up");
    char byte[16];
    MUST(write(slave, "last", 4));
    MUST(close(slave));
    TRY(read(master, byte, sizeof byte));
    TRY(read(master, byte, sizeof byte));
    request = (struct pollfd){master, POLLIN, 0};
    TRY(poll(&request, 1, 0));
    IS((request.revents & POLLHUP) != 0);
    slave = (int)MUST(open(name, O_RDWR | O_NOCTTY));
    TRY(poll(&request, 1, 0));
    MUST(write(slave, "back", 4));
    TRY(read(master, byte, sizeof byte));
    MUST(close(master));
    program(10);
    TRY(write(slave, "x", 1));
    TRY(tcgetattr(slave, &termios));
    request = (struct pollfd){slave, POLLIN | POLLOUT, 0};
    TRY(poll(&request, 1, 0));
    IS((request.revents & (POLLIN | POLLHUP)) == (POLLIN | POLLHUP));
    TRY(open(name, O_RDWR | O_NOCTTY));
    return 0;
}
