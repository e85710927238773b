/* inotify: every kind of event, their order, and how watches end. */
#include "guest.h"
#include <poll.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/xattr.h>

static int watcher;
static uint32_t cookie;

static void show_mask(uint32_t mask)
{
    static const struct { uint32_t bit; const char *name; } names[] = {
        {IN_ACCESS, "ACCESS"}, {IN_MODIFY, "MODIFY"}, {IN_ATTRIB, "ATTRIB"},
        {IN_CLOSE_WRITE, "CLOSE_WRITE"}, {IN_CLOSE_NOWRITE, "CLOSE_NOWRITE"}, {IN_OPEN, "OPEN"},
        {IN_MOVED_FROM, "MOVED_FROM"}, {IN_MOVED_TO, "MOVED_TO"}, {IN_CREATE, "CREATE"},
        {IN_DELETE, "DELETE"}, {IN_DELETE_SELF, "DELETE_SELF"}, {IN_MOVE_SELF, "MOVE_SELF"},
        {IN_Q_OVERFLOW, "Q_OVERFLOW"}, {IN_IGNORED, "IGNORED"}, {IN_ISDIR, "ISDIR"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (mask & names[i].bit)
            say(" %s", names[i].name);
}

/* Reads and prints all events that are there. */
static void events(const char *what)
{
    static char buffer[1 << 16] __attribute__((aligned(8)));
    say("%s:\n", what);
    ssize_t got = read(watcher, buffer, sizeof buffer);
    if (got < 0) {
        say("  %s\n", error_name(errno));
        return;
    }
    for (char *at = buffer; at < buffer + got;) {
        struct inotify_event *event = (void *)at;
        say("  %d", event->wd);
        show_mask(event->mask);
        if (event->cookie) {
            if (event->mask & IN_MOVED_FROM)
                cookie = event->cookie;
            say(event->cookie == cookie ? " cookie" : " wrong cookie");
        }
        if (event->len)
            say(" \"%s\" in %u", event->name, event->len);
        say("\n");
        at += sizeof *event + event->len;
    }
}

int main(void)
{
    char *scratch = enter_scratch();
    char byte[64];

    PART("instances and watches");
    TRY(inotify_init1(12345));
    watcher = (int)MUST(inotify_init1(IN_NONBLOCK | IN_CLOEXEC));
    IS(fcntl(watcher, F_GETFD) == FD_CLOEXEC);
    say("flags %o\n", fcntl(watcher, F_GETFL) & ~O_LARGEFILE);
    TRY(read(watcher, byte, sizeof byte));
    TRY(write(watcher, byte, 1));
    MUST(mkdir("dir", 0755));
    put_file("dir/old", "content");
    TRY(inotify_add_watch(watcher, "dir", 0));
    TRY(inotify_add_watch(watcher, "none", IN_OPEN));
    TRY(inotify_add_watch(watcher, "dir/old", IN_OPEN | IN_ONLYDIR));
    TRY(inotify_add_watch(watcher, NULL, IN_OPEN));
    TRY(inotify_add_watch(0, "dir", IN_OPEN));
    TRY(inotify_add_watch(999, "dir", IN_OPEN));
    TRY(inotify_add_watch(watcher, "dir", IN_OPEN | IN_MASK_ADD | IN_MASK_CREATE));
    TRY(inotify_rm_watch(watcher, 1));
    TRY(inotify_rm_watch(0, 1));
    int dir = TRY(inotify_add_watch(watcher, "dir", IN_ALL_EVENTS));
    TRY(inotify_add_watch(watcher, "dir", IN_ALL_EVENTS) == dir);
    TRY(inotify_add_watch(watcher, "dir", IN_ALL_EVENTS | IN_MASK_CREATE));

    PART("names in a directory");
    int fd = (int)MUST(open("dir/new", O_CREAT | O_RDWR, 0644));
    events("open(O_CREAT)");
    MUST(write(fd, "12345", 5));
    MUST(write(fd, "12345", 5));
    events("two writes");
    MUST(pread(fd, byte, 3, 0));
    MUST(ftruncate(fd, 3));
    MUST(fchmod(fd, 0600));
    events("pread, ftruncate, fchmod");
    MUST(read(fd, byte, 3));
    events("read at the end");
    int twin = (int)MUST(dup(fd));
    MUST(close(fd));
    events("close of one of two");
    MUST(close(twin));
    events("close of the other");
    MUST(close((int)MUST(open("dir/old", O_RDONLY))));
    events("open and close");
    MUST(close((int)MUST(open("dir/old", O_WRONLY | O_TRUNC))));
    events("open(O_TRUNC) and close");
    MUST(close((int)MUST(open("dir/old", O_PATH))));
    events("O_PATH");
    struct timespec both[2] = {{1, 0}, {2, 0}}, one[2] = {{1, 0}, {0, UTIME_OMIT}};
    MUST(utimensat(AT_FDCWD, "dir/old", both, 0));
    MUST(utimensat(AT_FDCWD, "dir/old", one, 0));
    one[0] = one[1];
    one[1] = both[0];
    MUST(utimensat(AT_FDCWD, "dir/old", one, 0));
    MUST(chown("dir/old", getuid(), (gid_t)-1));
    MUST(truncate("dir/old", 2));
    events("utimensat three times, chown, truncate");
    MUST(link("dir/old", "dir/link"));
    MUST(symlink("old", "dir/symlink"));
    MUST(mkdir("dir/sub", 0755));
    MUST(mkfifo("dir/fifo", 0644));
    events("link, symlink, mkdir, mkfifo");
    MUST(unlink("dir/link"));
    MUST(unlink("dir/symlink"));
    MUST(rmdir("dir/sub"));
    MUST(unlink("dir/fifo"));
    events("unlink, rmdir");
    show_dir("dir");
    events("opendir and reading");
    MUST(chmod("dir", 0700));
    events("chmod of the directory itself");

    PART("moves");
    MUST(rename("dir/new", "dir/newer"));
    events("inside");
    MUST(rename("dir/newer", "outside"));
    events("out");
    MUST(rename("outside", "dir/back"));
    events("in");
    MUST(rename("dir/back", "dir/old"));
    events("over another");
    put_file("other", "");
    MUST(renameat2(AT_FDCWD, "other", AT_FDCWD, "dir/old", RENAME_EXCHANGE));
    events("exchanged");
    MUST(rename("dir", "moved"));
    events("the directory itself");
    MUST(rename("moved", "dir"));
    events("and back");

    PART("a file and its directory, both watched");
    int file = TRY(inotify_add_watch(watcher, "dir/old", IN_ALL_EVENTS));
    put_file("dir/old", "x");
    events("written");
    MUST(rename("dir/old", "dir/new"));
    events("moved");
    MUST(link("dir/new", "dir/second"));
    MUST(unlink("dir/second"));
    events("linked and unlinked");
    fd = (int)MUST(open("dir/new", O_RDWR));
    MUST(unlink("dir/new"));
    events("unlinked while open");
    MUST(write(fd, "y", 1));
    events("written without a name");
    MUST(close(fd));
    events("closed");
    TRY(inotify_rm_watch(watcher, file));

    PART("masks");
    put_file("plain", "");
    file = TRY(inotify_add_watch(watcher, "plain", IN_OPEN));
    TRY(inotify_add_watch(watcher, "plain", IN_CLOSE | IN_MASK_ADD) == file);
    put_file("plain", "z");
    events("added to");
    TRY(inotify_add_watch(watcher, "plain", IN_MODIFY) == file);
    put_file("plain", "zz");
    events("replaced");
    TRY(inotify_add_watch(watcher, "plain", IN_OPEN | IN_ONESHOT) == file);
    put_file("plain", "zzz");
    events("one shot");
    TRY(inotify_rm_watch(watcher, file));
    MUST(symlink("plain", "link"));
    int link = TRY(inotify_add_watch(watcher, "link", IN_ALL_EVENTS | IN_DONT_FOLLOW));
    MUST(unlink("link"));
    events("a symbolic link");
    TRY(inotify_rm_watch(watcher, link));
    TRY(inotify_add_watch(watcher, "dir", IN_ALL_EVENTS | IN_EXCL_UNLINK) == dir);
    fd = (int)MUST(open("dir/gone", O_CREAT | O_RDWR, 0644));
    MUST(unlink("dir/gone"));
    events("created and removed");
    MUST(write(fd, "q", 1));
    MUST(close(fd));
    events("nothing after that");

    PART("reading");
    put_file("dir/a-name-of-some-length", "");
    int bytes = 0;
    TRY(ioctl(watcher, FIONREAD, &bytes));
    say("%d bytes\n", bytes);
    struct pollfd request = {watcher, POLLIN | POLLOUT, 0};
    TRY(poll(&request, 1, 0));
    say("revents %x\n", (unsigned)request.revents);
    TRY(read(watcher, byte, 16));
    TRY(read(watcher, byte, 63));
    events("the rest");
    TRY(poll(&request, 1, 0));

    PART("a directory that is removed");
    MUST(mkdir("short", 0755));
    int gone = TRY(inotify_add_watch(watcher, "short", IN_ALL_EVENTS));
    MUST(rmdir("short"));
    events("rmdir");
    TRY(inotify_rm_watch(watcher, gone));
    TRY(inotify_rm_watch(watcher, dir));
    events("the end");

    PART("too many events");
    dir = TRY(inotify_add_watch(watcher, "dir", IN_CREATE | IN_DELETE));
    for (int i = 0; i < 9000; i++) {
        MUST(mknod("dir/x", S_IFREG | 0644, 0));
        MUST(unlink("dir/x"));
    }
    int count = 0, overflow = 0;
    static char big[1 << 20] __attribute__((aligned(8)));
    ssize_t got;
    while ((got = read(watcher, big, sizeof big)) > 0)
        for (char *at = big; at < big + got;) {
            struct inotify_event *event = (void *)at;
            count++;
            if (event->mask & IN_Q_OVERFLOW)
                overflow += event->wd == -1;
            at += sizeof *event + event->len;
        }
    IS(count > 1000);
    IS(overflow == 1 || count == 18000);
    MUST(close(watcher));
    put_file("dir/after", "");
    leave_scratch(scratch);
    return 0;
}
