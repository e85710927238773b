/* Extended attributes of the user.* name space, and the errors of the others. */
#include "guest.h"
#include <sys/xattr.h>

static void show_list(const char *path)
{
    char list[1024], *names[64];
    ssize_t len = listxattr(path, list, sizeof list);
    if (len < 0) {
        say("list of %s: %s\n", path, error_name(errno));
        return;
    }
    size_t count = 0;
    for (char *at = list; at < list + len; at += strlen(at) + 1)
        if (!strncmp(at, "user.", 5))
            names[count++] = at;
    qsort(names, count, sizeof *names, by_name);
    say("list of %s:", path);
    for (size_t i = 0; i < count; i++)
        say(" %s", names[i]);
    say("\n");
}

static void show(const char *path, const char *name)
{
    char value[256];
    ssize_t len = getxattr(path, name, value, sizeof value);
    if (len < 0)
        say("%s of %s: %s\n", name, path, error_name(errno));
    else
        say("%s of %s: \"%.*s\"\n", name, path, (int)len, value);
}

int main(int argc, char **argv)
{
    char *scratch = enter_scratch();
    char value[16], long_name[300];
    (void)argc;

    PART("set, get, list, remove");
    put_file("file", "");
    show_list("file");
    TRY(setxattr("file", "user.one", "first", 5, 0));
    TRY(setxattr("file", "user.two", "", 0, 0));
    TRY(setxattr("file", "user.two", "second", 6, XATTR_CREATE));
    TRY(setxattr("file", "user.three", "third", 5, XATTR_REPLACE));
    TRY(setxattr("file", "user.three", "third", 5, XATTR_CREATE));
    TRY(setxattr("file", "user.three", "3", 1, XATTR_REPLACE));
    show_list("file");
    show("file", "user.one");
    show("file", "user.two");
    show("file", "user.three");
    show("file", "user.four");
    TRY(getxattr("file", "user.one", NULL, 0));
    TRY(getxattr("file", "user.one", value, 4));
    TRY(getxattr("file", "user.one", value, 5));
    TRY(listxattr("file", value, 5));
    TRY(removexattr("file", "user.one"));
    TRY(removexattr("file", "user.one"));
    show_list("file");

    PART("by descriptor, on directories, after a rename");
    int fd = (int)MUST(open("file", O_RDONLY));
    TRY(fsetxattr(fd, "user.fd", "by descriptor", 13, 0));
    show("file", "user.fd");
    TRY(fgetxattr(fd, "user.fd", value, 4));
    TRY(fremovexattr(fd, "user.fd"));
    TRY(fgetxattr(fd, "user.fd", value, 4));
    TRY(flistxattr(fd, NULL, 0) > 0);
    TRY(fgetxattr(999, "user.fd", value, 4));
    int path = (int)MUST(open("file", O_PATH));
    TRY(fgetxattr(path, "user.fd", value, 4));
    MUST(mkdir("dir", 0755));
    TRY(setxattr("dir", "user.of-directory", "yes", 3, 0));
    show("dir", "user.of-directory");
    MUST(rename("file", "dir/moved"));
    show("dir/moved", "user.two");
    MUST(link("dir/moved", "again"));
    show("again", "user.three");

    PART("links and special files");
    MUST(symlink("again", "link"));
    show("link", "user.three");
    TRY(lgetxattr("link", "user.three", value, sizeof value));
    TRY(lsetxattr("link", "user.new", "x", 1, 0));
    TRY(setxattr("link", "user.new", "x", 1, 0));
    show("again", "user.new");
    MUST(mkfifo("fifo", 0644));
    TRY(setxattr("fifo", "user.new", "x", 1, 0));
    TRY(getxattr("fifo", "user.new", value, sizeof value));

    PART("errors");
    memset(long_name, 'n', sizeof long_name - 1);
    memcpy(long_name, "user.", 5);
    TRY(setxattr("again", long_name, "x", 1, 0));
    TRY(setxattr("again", "", "x", 1, 0));
    TRY(setxattr("again", "user.", "x", 1, 0));
    TRY(setxattr("again", "unknown.name", "x", 1, 0));
    TRY(getxattr("again", "unknown.name", value, sizeof value));
    TRY(setxattr("again", "noprefix", "x", 1, 0));
    TRY(setxattr("again", "user.x", "x", 1, 77));
    TRY(setxattr("again", "user.x", "x", 65537, 0));
    TRY(setxattr("again", "user.x", NULL, 4, 0));
    TRY(setxattr("none", "user.x", "x", 1, 0));
    TRY(getxattr("none", "user.x", value, sizeof value));
    TRY(listxattr("none", value, sizeof value));
    TRY(removexattr("none", "user.x"));
    TRY(getxattr("again", "user.three", (void *)8, 100));

    PART("times");
    struct stat before, after;
    MUST(stat("again", &before));
    usleep(20000);
    MUST(setxattr("again", "user.time", "x", 1, 0));
    MUST(stat("again", &after));
    IS(before.st_mtim.tv_sec == after.st_mtim.tv_sec &&
       before.st_mtim.tv_nsec == after.st_mtim.tv_nsec);
    IS(before.st_ctim.tv_sec != after.st_ctim.tv_sec ||
       before.st_ctim.tv_nsec != after.st_ctim.tv_nsec);

    PART("a file that existed before");
    MUST(chdir(argv[1]));
    show_list("hello.txt");
    TRY(setxattr("hello.txt", "user.new", "value", 5, 0));
    show("hello.txt", "user.new");
    TRY(removexattr("hello.txt", "user.new"));
    leave_scratch(scratch);
    return 0;
}
