/* flock, record locks and locks of open file descriptions, in one process. */
#include "guest.h"
#include <sys/file.h>

static const char *kind(int type)
{
    return type == F_RDLCK ? "read" : type == F_WRLCK ? "write" : "none";
}

static void lock(const char *what, int fd, int command, short type, short whence, long start,
                 long len)
{
    struct flock flock = {.l_type = type, .l_whence = whence, .l_start = start, .l_len = len};
    int result = fcntl(fd, command, &flock);
    if (result < 0)
        say("%s: %s\n", what, error_name(errno));
    else if (command == F_GETLK || command == F_OFD_GETLK)
        say("%s: %s from %ld for %ld, %s\n", what, kind(flock.l_type), (long)flock.l_start,
            (long)flock.l_len,
            flock.l_type == F_UNLCK ? "nobody"
            : flock.l_pid == -1     ? "a description"
            : flock.l_pid == getpid() ? "this process"
                                      : "somebody else");
    else
        say("%s: ok\n", what);
}

int main(void)
{
    char *scratch = enter_scratch();
    put_file("file", "0123456789");
    int a = (int)MUST(open("file", O_RDWR)), b = (int)MUST(open("file", O_RDWR));
    int reader = (int)MUST(open("file", O_RDONLY)), writer = (int)MUST(open("file", O_WRONLY));

    PART("flock");
    TRY(flock(a, LOCK_SH | LOCK_NB));
    TRY(flock(b, LOCK_SH | LOCK_NB));
    TRY(flock(b, LOCK_EX | LOCK_NB));
    TRY(flock(a, LOCK_EX | LOCK_NB));
    TRY(flock(a, LOCK_UN));
    TRY(flock(b, LOCK_EX | LOCK_NB));
    TRY(flock(a, LOCK_SH | LOCK_NB));
    TRY(flock(reader, LOCK_EX | LOCK_NB));
    int twin = (int)MUST(dup(b));
    MUST(close(b));
    TRY(flock(a, LOCK_SH | LOCK_NB));
    TRY(flock(twin, LOCK_UN));
    TRY(flock(a, LOCK_EX | LOCK_NB));
    MUST(close(twin));
    b = (int)MUST(open("file", O_RDWR));
    TRY(flock(b, LOCK_EX | LOCK_NB));
    MUST(close(a));
    TRY(flock(b, LOCK_EX | LOCK_NB));
    TRY(flock(b, 0));
    TRY(flock(b, 16));
    TRY(flock(999, LOCK_EX));
    TRY(flock(b, LOCK_UN));

    PART("record locks of one process do not collide");
    a = (int)MUST(open("file", O_RDWR));
    lock("write 0-9", a, F_SETLK, F_WRLCK, SEEK_SET, 0, 10);
    lock("write 5-14 by another descriptor", b, F_SETLK, F_WRLCK, SEEK_SET, 5, 10);
    lock("who", a, F_GETLK, F_WRLCK, SEEK_SET, 0, 0);

    PART("but with those of a description");
    lock("who", a, F_OFD_GETLK, F_WRLCK, SEEK_SET, 0, 0);
    lock("read 12-12", a, F_OFD_SETLK, F_RDLCK, SEEK_SET, 12, 1);
    lock("read 15-", a, F_OFD_SETLK, F_RDLCK, SEEK_SET, 15, 0);
    lock("read 20-29 by another", b, F_OFD_SETLK, F_RDLCK, SEEK_SET, 20, 10);
    lock("write 20-29 by another", b, F_OFD_SETLK, F_WRLCK, SEEK_SET, 20, 10);
    lock("write 100 by the process", a, F_SETLK, F_WRLCK, SEEK_SET, 100, 1);
    lock("who holds 100", a, F_GETLK, F_WRLCK, SEEK_SET, 100, 1);
    lock("who holds 22", a, F_OFD_GETLK, F_WRLCK, SEEK_SET, 22, 1);

    PART("splitting and joining");
    lock("unlock 4-6", a, F_SETLK, F_UNLCK, SEEK_SET, 4, 3);
    lock("who", b, F_OFD_GETLK, F_RDLCK, SEEK_SET, 0, 15);
    lock("who from 4", b, F_OFD_GETLK, F_RDLCK, SEEK_SET, 4, 11);
    lock("again 4-6", a, F_SETLK, F_WRLCK, SEEK_SET, 4, 3);
    lock("who", b, F_OFD_GETLK, F_RDLCK, SEEK_SET, 3, 1);
    lock("read 0-1", a, F_SETLK, F_RDLCK, SEEK_SET, 0, 2);
    lock("who blocks reading", b, F_OFD_GETLK, F_RDLCK, SEEK_SET, 0, 15);
    lock("who blocks writing", b, F_OFD_GETLK, F_WRLCK, SEEK_SET, 0, 15);

    PART("whence and lengths");
    MUST(lseek(a, 4, SEEK_SET));
    lock("unlock from 5 on", a, F_SETLK, F_UNLCK, SEEK_CUR, 1, 0);
    lock("who", b, F_OFD_GETLK, F_WRLCK, SEEK_SET, 2, 0);
    lock("write 8-9 from the end", a, F_OFD_SETLK, F_WRLCK, SEEK_END, -2, 2);
    lock("who", b, F_OFD_GETLK, F_WRLCK, SEEK_SET, 6, 8);
    lock("negative length", a, F_SETLK, F_WRLCK, SEEK_SET, 7, -1);
    lock("who", b, F_OFD_GETLK, F_WRLCK, SEEK_SET, 6, 1);
    lock("before the beginning", a, F_SETLK, F_WRLCK, SEEK_SET, -1, 1);
    lock("too negative", a, F_SETLK, F_WRLCK, SEEK_SET, 1, -2);
    lock("too long", a, F_SETLK, F_WRLCK, SEEK_SET, 1, LONG_MAX);
    lock("unknown whence", a, F_SETLK, F_WRLCK, 9, 0, 1);

    PART("errors");
    lock("write on a reader", reader, F_SETLK, F_WRLCK, SEEK_SET, 0, 1);
    lock("read on a writer", writer, F_SETLK, F_RDLCK, SEEK_SET, 0, 1);
    lock("unknown kind", a, F_SETLK, 9, SEEK_SET, 0, 1);
    lock("a bad descriptor", 999, F_SETLK, F_WRLCK, SEEK_SET, 0, 1);
    struct flock named = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_pid = 1};
    TRY(fcntl(a, F_OFD_SETLK, &named));
    TRY(fcntl(a, F_SETLK, NULL));

    PART("released by any close");
    lock("write all", a, F_SETLK, F_UNLCK, SEEK_SET, 0, 0);
    lock("unlock all", a, F_OFD_SETLK, F_UNLCK, SEEK_SET, 0, 0);
    lock("write 0-9", a, F_SETLK, F_WRLCK, SEEK_SET, 0, 10);
    lock("who", b, F_OFD_GETLK, F_WRLCK, SEEK_SET, 0, 0);
    MUST(close(reader));
    lock("who", b, F_OFD_GETLK, F_WRLCK, SEEK_SET, 0, 0);
    lock("write 0-9 of a description", a, F_OFD_SETLK, F_WRLCK, SEEK_SET, 0, 10);
    MUST(close(writer));
    lock("who", b, F_OFD_GETLK, F_WRLCK, SEEK_SET, 0, 0);
    MUST(close(a));
    lock("who", b, F_OFD_GETLK, F_WRLCK, SEEK_SET, 0, 0);

    PART("lockf");
    MUST(lseek(b, 0, SEEK_SET));
    TRY(lockf(b, F_TLOCK, 5));
    TRY(lockf(b, F_TEST, 5));
    TRY(lockf(b, F_ULOCK, 0));

    PART("leases");
    TRY(fcntl(b, F_SETLEASE, 77));
    leave_scratch(scratch);
    return 0;
}
