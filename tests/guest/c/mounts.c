/* mount(2), umount2(2), pivot_root(2) and mount namespaces, in a namespace of the program's own. */
#include "guest.h"
#include <linux/openat2.h>
#include <sched.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/statfs.h>
#include <sys/xattr.h>

#define SCRATCH "/tmp"

/* Whether a file can be opened, for a moment. */
#define OPENS(...)                                                                                 \
    ({                                                                                             \
        int fd_ = open(__VA_ARGS__);                                                               \
        say("open(%s): %s\n", #__VA_ARGS__, fd_ < 0 ? error_name(errno) : "ok");                   \
        if (fd_ >= 0)                                                                              \
            close(fd_);                                                                            \
    })

/* Permissions, type, and whether it is the root of a mount. */
static void show_place(const char *path)
{
    struct statx st;
    if (statx(AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS | STATX_MNT_ID, &st) < 0)
        say("%s: %s\n", path, error_name(errno));
    else
        say("%s: mode %o%s\n", path, st.stx_mode,
            st.stx_attributes & STATX_ATTR_MOUNT_ROOT ? ", root of a mount" : "");
}

static unsigned long mount_id(const char *path)
{
    struct statx st;
    MUST(statx(AT_FDCWD, path, 0, STATX_MNT_ID, &st));
    return st.stx_mask & STATX_MNT_ID ? st.stx_mnt_id : 0;
}

/* Whether an option is the same in every kernel and sandbox. */
static bool is_shown(const char *option)
{
    return strcmp(option, "inode64") && strcmp(option, "inode32");
}

static void show_options(const char *options)
{
    char copy[512];
    snprintf(copy, sizeof copy, "%s", options);
    for (char *rest = copy, *option; (option = strsep(&rest, ","));)
        if (is_shown(option))
            say(" %s", option);
}

/* Prints what mountinfo says of mounts in the directory of this test, without numbers. */
static void show_mounts(const char *title)
{
    say("%s:\n", title);
    FILE *file = fopen("/proc/self/mountinfo", "r");
    if (!file) {
        say("mountinfo: %s\n", error_name(errno));
        return;
    }
    char line[4096], at[1024], root[1024], own[256], rest[1024];
    while (fgets(line, sizeof line, file)) {
        char kind[64], source[256], options[512];
        char *dash = strstr(line, " - ");
        if (sscanf(line, "%*d %*d %*s %1023s %1023s %255s", root, at, own) != 3 || !dash)
            continue;
        if (strncmp(at, SCRATCH "/m", 6) && strncmp(at, "/inside", 7))
            continue;
        *dash = 0;
        char *optional = strstr(line, own) + strlen(own);
        snprintf(rest, sizeof rest, "%s", optional);
        if (sscanf(dash + 3, "%63s %255s %511s", kind, source, options) != 3)
            continue;
        say("  %s of %s:", at, root);
        show_options(own);
        say("%s | %s %s", rest, kind, source);
        show_options(options);
        say("\n");
    }
    fclose(file);
}

/* Numbers of mounts: in /proc/self/fdinfo, /proc/self/mountinfo and statx(2). */
static void numbers(void)
{
    PART("numbers");
    MUST(mkdir("m", 0755));
    MUST(mount("one", "m", "tmpfs", 0, NULL));
    put_file("m/file", "text");
    IS(mount_id("m") == mount_id("m/file"));
    IS(mount_id("m") != mount_id("."));
    unsigned long of_info = 0, of_descriptor = 0;
    int fd = (int)MUST(open("m/file", O_RDONLY));
    char line[4096], path[64], at[1024];
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd);
    FILE *file = fopen(path, "r");
    while (fgets(line, sizeof line, file))
        sscanf(line, "mnt_id: %lu", &of_descriptor);
    fclose(file);
    file = fopen("/proc/self/mountinfo", "r");
    unsigned long id;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "%lu %*d %*s %*s %1023s", &id, at) == 2 && !strcmp(at, SCRATCH "/m"))
            of_info = id;
    fclose(file);
    IS(of_info == mount_id("m"));
    IS(of_descriptor == of_info);
    close(fd);
    show_place("m");
    show_place("m/file");
    struct stat above, below;
    stat(".", &above);
    stat("m", &below);
    IS(above.st_dev != below.st_dev);
    show_dir(".");
    TRY(umount2("m", 0));
    show_place("m");
    show_dir("m");
    MUST(rmdir("m"));
    MUST(mkdir("m \303\274\\", 0755));
    MUST(mount("a\tb", "m \303\274\\", "tmpfs", 0, NULL));
    show_mounts("a name of any bytes");
    MUST(umount("m \303\274\\"));
    MUST(rmdir("m \303\274\\"));
}

static void refusals(void)
{
    PART("refusals");
    MUST(mkdir("m", 0755));
    put_file("mfile", "");
    TRY(mount("none", "missing", "tmpfs", 0, NULL));
    TRY(mount("none", "m", "no such kind", 0, NULL));
    TRY(mount("none", "m", NULL, 0, NULL));
    TRY(mount("none", "m", "", 0, NULL));
    TRY(mount("none", "mfile", "tmpfs", 0, NULL));
    TRY(mount("none", "mfile/below", "tmpfs", 0, NULL));
    TRY(mount("none", "m", "tmpfs", 1UL << 31, NULL));
    TRY(mount("none", "m", "tmpfs", 0, "unknown=1"));
    TRY(mount("none", "m", "tmpfs", 0, "size=x"));
    TRY(mount("none", "m", "tmpfs", 0, "mode=9"));
    TRY(mount("none", "m", (char *)8, 0, NULL));
    TRY(mount((char *)8, "m", "tmpfs", 0, NULL));
    TRY(mount("none", "m", "tmpfs", 0, (char *)8));
    TRY(mount("none", (char *)8, "tmpfs", 0, NULL));
    TRY(mount(NULL, "m", NULL, MS_BIND, NULL));
    TRY(mount("", "m", NULL, MS_BIND, NULL));
    TRY(mount("missing", "m", NULL, MS_BIND, NULL));
    TRY(mount("mfile", "m", NULL, MS_BIND, NULL));
    TRY(mount("m", "mfile", NULL, MS_BIND, NULL));
    TRY(mount("m", "m", NULL, MS_MOVE, NULL));
    TRY(mount(NULL, "m", NULL, MS_REMOUNT, NULL));
    TRY(mount(NULL, "m", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY, NULL));
    TRY(mount(NULL, "m", NULL, MS_PRIVATE, NULL));
    TRY(mount(NULL, ".", NULL, MS_PRIVATE | MS_SLAVE, NULL));
    TRY(mount(NULL, ".", NULL, MS_PRIVATE | MS_NOEXEC, NULL));
    TRY(umount2("m", 0));
    TRY(umount2("missing", 0));
    TRY(umount2("m", 0x10));
    TRY(umount2("mfile", 0));
    TRY(umount2("m", MNT_DETACH));
    pid_t child = MUST(fork());
    if (!child) {
        MUST(setgid(65534));
        MUST(setuid(65534));
        TRY(mount("none", "m", "tmpfs", 0, NULL));
        TRY(mount("none", "missing", "tmpfs", 0, NULL));
        TRY(mount("none", "m", "tmpfs", 1UL << 31, NULL));
        TRY(mount(NULL, "m", NULL, MS_BIND, NULL));
        TRY(mount("none", "m", (char *)8, 0, NULL));
        TRY(umount2("m", 0));
        TRY(umount2("m", 0x10));
        TRY(syscall(SYS_pivot_root, "missing", "m"));
        TRY(unshare(CLONE_NEWNS));
        TRY(syscall(SYS_clone, CLONE_NEWNS | SIGCHLD, 0, 0, 0, 0));
        _exit(0);
    }
    MUST(waitpid(child, NULL, 0));
    TRY(syscall(SYS_clone, CLONE_NEWNS | CLONE_FS | SIGCHLD, 0, 0, 0, 0));
    MUST(unlink("mfile"));
    MUST(rmdir("m"));
}

static int fill(const char *path)
{
    int fd = (int)MUST(open(path, O_WRONLY | O_CREAT, 0600));
    char page[4096] = {1};
    int pages = 0;
    while (write(fd, page, sizeof page) == (ssize_t)sizeof page)
        pages++;
    int error = errno;
    close(fd);
    say("%s: %s after %d pages\n", path, error_name(error), pages);
    return pages;
}

static void memory(void)
{
    PART("memory");
    MUST(mkdir("m", 0755));
    TRY(mount("some text", "m", "tmpfs", MS_NOSUID | MS_NODEV, "size=64k,mode=0710,uid=7,gid=8"));
    show_mounts("with a size");
    struct stat st;
    MUST(stat("m", &st));
    say("mode %o, owner %u:%u\n", st.st_mode, st.st_uid, st.st_gid);
    struct statfs fs;
    MUST(statfs("m", &fs));
    say("kind %lx, %lu blocks of %ld, %lu free, flags %lx\n", (long)fs.f_type, fs.f_blocks,
        (long)fs.f_bsize, fs.f_bfree, (long)fs.f_flags & 0xf);
    fill("m/file");
    MUST(statfs("m", &fs));
    say("%lu free\n", fs.f_bfree);
    MUST(truncate("m/file", 8192));
    MUST(statfs("m", &fs));
    say("%lu free\n", fs.f_bfree);
    TRY(mount(NULL, "m", NULL, MS_REMOUNT, "size=4k"));
    TRY(mount(NULL, "m", NULL, MS_REMOUNT, "size=8k"));
    fill("m/other");
    MUST(unlink("m/file"));
    fill("m/other");
    TRY(mount(NULL, "m", NULL, MS_REMOUNT | MS_NOEXEC, "size=1m"));
    show_mounts("mounted again");
    TRY(umount("m"));
    TRY(mount("none", "m", "tmpfs", 0, "nr_inodes=3"));
    TRY(mkdir("m/a", 0700));
    TRY(mkdir("m/b", 0700));
    TRY(mkdir("m/c", 0700));
    MUST(rmdir("m/a"));
    TRY(mkdir("m/c", 0700));
    MUST(statfs("m", &fs));
    say("%lu files, %lu free\n", fs.f_files, fs.f_ffree);
    show_mounts("with few files");
    TRY(umount("m"));
    TRY(mount("none", "m", "ramfs", MS_RDONLY, "mode=700"));
    show_mounts("another kind");
    show_place("m");
    OPENS("m/x", O_CREAT | O_RDWR, 0600);
    TRY(umount("m"));
    MUST(rmdir("m"));
}

static void binds(void)
{
    PART("binds");
    MUST(mkdir("from", 0755));
    MUST(mkdir("from/below", 0755));
    MUST(mkdir("m", 0755));
    put_file("from/below/file", "text");
    put_file("mfile", "hidden");
    TRY(mount("from", "m", NULL, MS_BIND, NULL));
    show_file("m/below/file");
    put_file("m/new", "new");
    show_file("from/new");
    TRY(rename("m/new", "from/other"));
    TRY(link("m/new", "from/other"));
    TRY(link("m/new", "m/other"));
    show_dir("from");
    TRY(mount("from/below/file", "mfile", "ignored", MS_BIND, "ignored"));
    show_file("mfile");
    show_mounts("a directory and a file");
    TRY(unlink("mfile"));
    TRY(rmdir("m"));
    TRY(rename("m", "elsewhere"));
    TRY(rename("from", "m"));
    TRY(syscall(SYS_renameat2, AT_FDCWD, "m", AT_FDCWD, "from", RENAME_EXCHANGE));
    TRY(rename("from", "was_from"));
    show_dir("m");
    TRY(chdir("m/below"));
    char where[256];
    say("in %s\n", getcwd(where, sizeof where));
    TRY(chdir("../.."));
    say("in %s\n", getcwd(where, sizeof where));
    MUST(rename("was_from", "from"));
    TRY(umount("mfile"));
    show_file("mfile");
    TRY(umount2("m", UMOUNT_NOFOLLOW));

    PART("a part of a file system");
    TRY(mount("from/below", "m", NULL, MS_BIND, NULL));
    show_mounts("a part");
    MUST(mkdir("m/deep", 0755));
    MUST(mkdir("m/deep/deeper", 0755));
    TRY(chdir("m/deep/deeper"));
    MUST(rename(SCRATCH "/from/below/deep", SCRATCH "/from/moved"));
    TRY(chdir("../.."));
    TRY(chdir(".."));
    TRY(chdir(".."));
    MUST(chdir(SCRATCH));
    MUST(unlink("from/below/file"));
    MUST(rmdir("from/below"));
    show_mounts("removed");
    TRY(mkdir("m/x", 0755));
    TRY(umount("m"));
    remove_tree("from");
    MUST(unlink("mfile"));
    MUST(rmdir("m"));
}

static void trees(void)
{
    PART("trees");
    MUST(mkdir("m1", 0755));
    MUST(mkdir("m2", 0755));
    TRY(mount("one", "m1", "tmpfs", 0, NULL));
    MUST(mkdir("m1/a", 0755));
    MUST(mkdir("m1/b", 0755));
    TRY(mount("two", "m1/a", "tmpfs", 0, NULL));
    TRY(mount("three", "m1/b", "tmpfs", 0, NULL));
    put_file("m1/a/file", "two");
    TRY(mount("m1", "m2", NULL, MS_BIND, NULL));
    show_file("m2/a/file");
    TRY(umount("m2"));
    TRY(mount(NULL, "m1/b", NULL, MS_UNBINDABLE, NULL));
    TRY(mount("m1", "m2", NULL, MS_BIND | MS_REC, NULL));
    show_file("m2/a/file");
    show_mounts("with all below");
    TRY(mount("m1/b", "m2/b", NULL, MS_BIND, NULL));
    TRY(mount("m1", "m1/a", NULL, MS_BIND | MS_REC, NULL));
    show_mounts("a parent in its child");
    TRY(umount("m1/a"));
    TRY(umount2("m1/a", MNT_DETACH));
    TRY(umount("m1"));
    TRY(umount2("m1", MNT_DETACH));
    show_dir("m1");
    show_file("m2/a/file");
    TRY(mount(NULL, "m2", NULL, MS_REC | MS_PRIVATE, NULL));
    TRY(mount(NULL, "m2", NULL, MS_SLAVE, NULL));

    PART("moves");
    TRY(mount("m2", "m1", NULL, MS_MOVE, NULL));
    show_mounts("moved");
    TRY(mount("m1", "m1/a", NULL, MS_MOVE, NULL));
    TRY(mount("m1/b", "m2", NULL, MS_MOVE, NULL));
    put_file("mfile", "");
    TRY(mount("m1", "mfile", NULL, MS_MOVE, NULL));
    MUST(unlink("mfile"));
    TRY(mount("over", "m1", "tmpfs", 0, NULL));
    show_dir("m1");
    show_mounts("one over the other");
    TRY(umount("m1"));
    show_dir("m1");
    TRY(umount2("m1", MNT_DETACH));
    MUST(rmdir("m1"));
    MUST(rmdir("m2"));
}

static void use(void)
{
    PART("use");
    MUST(mkdir("m", 0755));
    MUST(mount("used", "m", "tmpfs", 0, NULL));
    put_file("m/file", "text");
    int fd = (int)MUST(open("m/file", O_RDONLY));
    TRY(umount("m"));
    close(fd);
    MUST(chdir("m"));
    TRY(umount(SCRATCH "/m"));
    MUST(chdir(SCRATCH));
    fd = (int)MUST(open("m/file", O_RDONLY));
    void *page = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    TRY(umount("m"));
    MUST(munmap(page, 4096));
    fd = (int)MUST(open("m", O_PATH | O_DIRECTORY));
    TRY(umount("m"));
    close(fd);
    MUST(mkdir("m/below", 0755));
    MUST(mount("below", "m/below", "tmpfs", 0, NULL));
    TRY(umount("m"));
    MUST(umount("m/below"));

    PART("use of what is gone");
    fd = (int)MUST(open("m/file", O_RDWR));
    MUST(chdir("m/below"));
    TRY(umount2(SCRATCH "/m", MNT_DETACH));
    char text[8] = "", where[256];
    MUST(pread(fd, text, 4, 0));
    say("\"%s\"\n", text);
    TRY(pwrite(fd, "more", 4, 4));
    TRY(syscall(SYS_getcwd, where, sizeof where) > 0);
    say("in %s\n", where);
    TRY(mkdir("x", 0755));
    TRY(chdir("../.."));
    TRY(syscall(SYS_getcwd, where, sizeof where) > 0);
    say("in %s\n", where);
    show_dir(".");
    TRY(mount("none", "below", "tmpfs", 0, NULL));
    TRY(mount("below", SCRATCH "/m", NULL, MS_BIND, NULL));
    TRY(umount2(".", 0));
    TRY(umount2(".", MNT_DETACH));
    MUST(chdir(SCRATCH));
    close(fd);
    show_dir("m");
    MUST(rmdir("m"));
    MUST(mkdir("m", 0755));
    fd = (int)MUST(open("m", O_RDONLY | O_DIRECTORY));
    MUST(rmdir("m"));
    MUST(fchdir(fd));
    TRY(mount("none", ".", "tmpfs", 0, NULL));
    MUST(chdir(SCRATCH));
    close(fd);
}

static void read_only(void)
{
    PART("read-only");
    MUST(mkdir("m", 0755));
    MUST(mkdir("from", 0755));
    put_file("from/file", "text");
    MUST(mkdir("from/empty", 0755));
    MUST(mkfifo("from/fifo", 0644));
    MUST(mount("from", "m", NULL, MS_BIND, NULL));
    int fd = (int)MUST(open("m/file", O_WRONLY));
    TRY(mount(NULL, "m", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY, NULL));
    close(fd);
    fd = (int)MUST(open("from/file", O_WRONLY));
    TRY(mount(NULL, "m", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY, NULL));
    close(fd);
    show_mounts("one of two");
    OPENS("m/file", O_WRONLY);
    OPENS("m/file", O_RDWR);
    OPENS("m/file", O_RDONLY | O_TRUNC);
    OPENS("m/new", O_CREAT | O_RDWR, 0600);
    OPENS("m", O_TMPFILE | O_RDWR, 0600);
    OPENS("m", O_WRONLY);
    OPENS("m/file", O_CREAT | O_RDONLY, 0600);
    OPENS("m/fifo", O_RDWR);
    TRY(mkdir("m/new", 0755));
    TRY(mkdir("m/empty", 0755));
    TRY(mknod("m/new", S_IFREG | 0600, 0));
    TRY(symlink("x", "m/new"));
    TRY(link("m/file", "m/new"));
    TRY(link("from/file", "m/new"));
    TRY(link("m/file", "from/new"));
    TRY(unlink("m/file"));
    TRY(unlink("m/missing"));
    TRY(rmdir("m/empty"));
    TRY(rename("m/file", "m/new"));
    TRY(rename("m/missing", "m/new"));
    TRY(rename("m/file", "from/new"));
    TRY(chmod("m/file", 0600));
    TRY(chown("m/file", 1, 1));
    TRY(utimensat(AT_FDCWD, "m/file", NULL, 0));
    TRY(truncate("m/file", 0));
    TRY(truncate("m/empty", 0));
    TRY(setxattr("m/file", "trusted.a", "b", 1, 0));
    TRY(removexattr("m/file", "trusted.a"));
    TRY(access("m/file", W_OK));
    TRY(access("m/file", R_OK));
    TRY(access("m/empty", W_OK));
    TRY(access("m/fifo", W_OK));
    struct statfs fs;
    MUST(statfs("m", &fs));
    say("flags %lx\n", (long)fs.f_flags & 0xf);
    show_file("m/file");
    put_file("from/file", "changed");
    show_file("m/file");
    fd = (int)MUST(open("m/file", O_RDONLY));
    TRY(fchmod(fd, 0600));
    TRY(fsetxattr(fd, "trusted.a", "b", 1, 0));
    close(fd);
    TRY(mount(NULL, "m", NULL, MS_REMOUNT | MS_BIND, NULL));
    put_file("m/file", "again");
    TRY(umount("m"));

    PART("a file system");
    MUST(mount("both", "m", "tmpfs", 0, NULL));
    MUST(mount("m", "from", NULL, MS_BIND, NULL));
    fd = (int)MUST(open("from/file", O_CREAT | O_WRONLY, 0600));
    TRY(mount(NULL, "m", NULL, MS_REMOUNT | MS_RDONLY, NULL));
    close(fd);
    fd = (int)MUST(open("from/file", O_RDWR));
    MUST(ftruncate(fd, 4096));
    char *mapped = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    TRY(mount(NULL, "m", NULL, MS_REMOUNT | MS_RDONLY, NULL));
    TRY(mount(NULL, "from", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY, NULL));
    IS(*mapped == 0);
    MUST(munmap(mapped, 4096));
    TRY(mount(NULL, "m", NULL, MS_REMOUNT | MS_RDONLY, NULL));
    OPENS("from/file", O_WRONLY);
    show_mounts("all of it");
    TRY(mount(NULL, "m", NULL, MS_REMOUNT | MS_NOATIME, NULL));
    TRY(mount(NULL, "m", NULL, MS_REMOUNT | MS_BIND | MS_NOSUID, NULL));
    show_mounts("times are kept as they were");
    TRY(mount(NULL, "m", NULL, MS_REMOUNT | MS_BIND | MS_STRICTATIME | MS_NODIRATIME, NULL));
    show_mounts("times");
    int watcher = (int)MUST(inotify_init1(IN_NONBLOCK));
    MUST(inotify_add_watch(watcher, "m/file", IN_OPEN));
    TRY(umount("m"));
    struct inotify_event event;
    TRY(read(watcher, &event, sizeof event));
    TRY(umount("from"));
    while (read(watcher, &event, sizeof event) == (ssize_t)sizeof event)
        say("watch %d: %x\n", event.wd, event.mask);
    close(watcher);
    remove_tree("from");
    MUST(rmdir("m"));
}

static void copy_program(const char *to)
{
    int in = (int)MUST(open("/proc/self/exe", O_RDONLY));
    int out = (int)MUST(open(to, O_CREAT | O_WRONLY | O_TRUNC, 0755));
    char bytes[65536];
    for (ssize_t got; (got = read(in, bytes, sizeof bytes)) > 0;)
        MUST(write(out, bytes, (size_t)got));
    close(in);
    close(out);
}

/* Executes a program that says who it is. */
static void execute(const char *path)
{
    pid_t child = MUST(fork());
    if (!child) {
        execl(path, path, "who", NULL);
        say("execve: %s\n", error_name(errno));
        _exit(0);
    }
    MUST(waitpid(child, NULL, 0));
}

static void properties(void)
{
    PART("properties");
    MUST(mkdir("m", 0755));
    MUST(mount("plain", "m", "tmpfs", 0, NULL));
    MUST(mknod("m/null", S_IFCHR | 0666, (1 << 8) | 3));
    copy_program("m/program");
    MUST(chown("m/program", 12, 12));
    MUST(chmod("m/program", 06755));
    MUST(symlink("program", "m/link"));
    OPENS("m/null", O_RDWR);
    execute("m/program");
    TRY(mount(NULL, "m", NULL, MS_REMOUNT | MS_BIND | MS_NODEV | MS_NOSUID | 256, NULL));
    OPENS("m/null", O_RDWR);
    OPENS("m/null", O_RDONLY);
    OPENS("m/null", O_PATH);
    OPENS("m/link", O_RDONLY);
    OK(readlink("m/link", (char[64]){0}, 64));
    execute("m/program");
    show_mounts("without devices");
    int fd = (int)MUST(open("m/program", O_RDONLY));
    void *page = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, fd, 0);
    IS(mprotect(page, 4096, PROT_READ | PROT_EXEC) == 0);
    MUST(munmap(page, 4096));
    TRY(mount(NULL, "m", NULL, MS_REMOUNT | MS_BIND | MS_NOEXEC, NULL));
    IS(mmap(NULL, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0) == MAP_FAILED);
    say("%s\n", error_name(errno));
    page = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, fd, 0);
    TRY(mprotect(page, 4096, PROT_READ | PROT_EXEC));
    TRY(mprotect(page, 4096, PROT_READ));
    MUST(munmap(page, 4096));
    close(fd);
    execute("m/program");
    TRY(access("m/program", X_OK));
    TRY(access("m", X_OK));
    TRY(umount2("m", MNT_DETACH));
    MUST(rmdir("m"));
}

static void finish(pid_t child)
{
    int code;
    MUST(waitpid(child, &code, 0));
    say("status %x\n", code);
}

static void namespaces(void)
{
    PART("namespaces");
    MUST(mkdir("m", 0755));
    MUST(mkdir("other", 0755));
    MUST(mount("before", "m", "tmpfs", 0, NULL));
    put_file("m/file", "before");
    MUST(chdir("m"));
    pid_t child = MUST(fork());
    if (!child) {
        unsigned long old = mount_id(".");
        TRY(unshare(CLONE_NEWNS));
        IS(mount_id(".") == mount_id(SCRATCH "/m"));
        IS(mount_id(".") != old);
        MUST(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL));
        MUST(chdir(SCRATCH));
        MUST(mount("inside", "other", "tmpfs", 0, NULL));
        put_file("other/file", "inside");
        put_file("m/file", "changed");
        TRY(umount("m"));
        show_mounts("inside");
        pid_t grandchild = MUST(fork());
        if (!grandchild) {
            show_file("other/file");
            MUST(umount("other"));
            _exit(0);
        }
        finish(grandchild);
        show_file("other/file");
        _exit(0);
    }
    finish(child);
    MUST(chdir(SCRATCH));
    show_file("m/file");
    show_mounts("outside");
    child = (pid_t)MUST(syscall(SYS_clone, CLONE_NEWNS | SIGCHLD, 0, 0, 0, 0));
    if (!child) {
        TRY(umount("m"));
        _exit(0);
    }
    finish(child);
    show_file("m/file");

    PART("mount points of others");
    int ready[2], go[2];
    MUST(pipe(ready));
    MUST(pipe(go));
    child = MUST(fork());
    if (!child) {
        char byte;
        MUST(unshare(CLONE_NEWNS));
        MUST(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL));
        MUST(mount("over", "other", "tmpfs", 0, NULL));
        MUST(mkdir("other/x", 0755));
        MUST(write(ready[1], "x", 1));
        MUST(read(go[0], &byte, 1));
        show_dir("other");
        show_mounts("inside");
        _exit(0);
    }
    char byte;
    MUST(read(ready[0], &byte, 1));
    TRY(rmdir("m"));
    TRY(rmdir("other"));
    MUST(write(go[1], "x", 1));
    finish(child);
    TRY(umount("m"));
    MUST(rmdir("m"));
    for (int i = 0; i < 2; i++)
        close(ready[i]), close(go[i]);
}

/* A process that nobody has waited for has no places and no namespace any more. */
static void ended(void)
{
    PART("ended");
    MUST(mkdir("m", 0755));
    MUST(mount("ended", "m", "tmpfs", 0, NULL));
    pid_t child = MUST(fork());
    if (!child) {
        MUST(chdir("m"));
        _exit(0);
    }
    siginfo_t info;
    MUST(waitid(P_PID, (id_t)child, &info, WEXITED | WNOWAIT));
    TRY(umount2("m", 0));
    int fd = (int)MUST(syscall(SYS_pidfd_open, child, 0));
    unsigned long before = mount_id("/");
    TRY(setns(fd, CLONE_NEWNS));
    IS(mount_id("/") == before);
    close(fd);
    MUST(waitpid(child, NULL, 0));
    MUST(rmdir("m"));
}

static void crossing(void)
{
    PART("crossing");
    MUST(mkdir("m", 0755));
    MUST(mount("crossed", "m", "tmpfs", 0, NULL));
    put_file("m/file", "text");
    struct open_how how = {.flags = O_PATH, .resolve = RESOLVE_NO_XDEV};
    TRY(syscall(SYS_openat2, AT_FDCWD, "m", &how, sizeof how));
    TRY(syscall(SYS_openat2, AT_FDCWD, "m/file", &how, sizeof how));
    int fd = (int)MUST(open("m", O_PATH));
    int found = (int)OK(syscall(SYS_openat2, fd, "file", &how, sizeof how));
    close(found);
    TRY(syscall(SYS_openat2, fd, "..", &how, sizeof how));
    MUST(symlink("/etc/passwd", "m/link"));
    how.flags = O_RDONLY;
    TRY(syscall(SYS_openat2, fd, "link", &how, sizeof how));
    how.flags = O_RDWR | O_CREAT;
    TRY(syscall(SYS_openat2, fd, "link", &how, sizeof how));
    how.flags = O_PATH;
    close(fd);
    MUST(mkdir("m/d", 0755));
    MUST(mkdir("m/d/below", 0755));
    fd = (int)MUST(open("m/d/below", O_PATH));
    MUST(mount("covers", "m/d", "tmpfs", 0, NULL));
    TRY(syscall(SYS_openat2, fd, "..", &how, sizeof how));
    close(fd);
    pid_t child = MUST(fork());
    if (!child) {
        MUST(chroot("m"));
        char where[256];
        MUST(syscall(SYS_getcwd, where, sizeof where));
        say("in %s\n", where);
        show_file("/file");
        show_file("/../../file");
        MUST(chdir("/"));
        TRY(mount("above", "/", "tmpfs", 0, NULL));
        show_file("/file");
        show_file("/../file");
        show_dir("..");
        TRY(umount2("/..", 0));
        TRY(umount2("/", 0));
        _exit(0);
    }
    finish(child);
    TRY(umount2("m", MNT_DETACH));
    MUST(rmdir("m"));
}

static void pivots(void)
{
    PART("another root");
    MUST(mkdir("m", 0755));
    MUST(mkdir("m/plain", 0755));
    TRY(syscall(SYS_pivot_root, "m", "m/plain"));
    MUST(mount("new", "m", "tmpfs", 0, NULL));
    MUST(mkdir("m/old", 0755));
    MUST(mkdir("m/inside", 0755));
    put_file("m/file", "text");
    TRY(syscall(SYS_pivot_root, "m/old", "m/old"));
    TRY(syscall(SYS_pivot_root, "m", "/"));
    TRY(syscall(SYS_pivot_root, "m", "."));
    TRY(syscall(SYS_pivot_root, "m/file", "m/old"));
    TRY(syscall(SYS_pivot_root, "missing", "m/old"));
    TRY(syscall(SYS_pivot_root, "m", "missing"));
    TRY(syscall(SYS_pivot_root, "/", "m/old"));
    pid_t child = MUST(fork());
    if (!child) {
        MUST(chroot("m/old"));
        TRY(syscall(SYS_pivot_root, "/", "/"));
        _exit(0);
    }
    finish(child);
    child = MUST(fork());
    if (!child) {
        MUST(unshare(CLONE_NEWNS));
        MUST(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL));
        MUST(mount("m", "m", NULL, MS_BIND, NULL));
        MUST(chdir("/"));
        TRY(syscall(SYS_pivot_root, SCRATCH "/m", SCRATCH "/m/old"));
        char where[256];
        say("in %s\n", getcwd(where, sizeof where));
        show_dir("/");
        show_file("/old" SCRATCH "/m/file");
        show_file("/file");
        int old = (int)MUST(open("/old", O_PATH | O_DIRECTORY));
        TRY(umount("/old"));
        TRY(umount2("/old", MNT_DETACH));
        TRY(fchdir(old));
        MUST(syscall(SYS_getcwd, where, sizeof where));
        say("in %s\n", where);
        MUST(chdir("/"));
        MUST(close(old));
        show_dir("/old");
        /* As bubblewrap and runc do it: the old root over the new one. */
        MUST(mount("second", "/inside", "tmpfs", 0, NULL));
        put_file("/inside/second", "second");
        old = (int)MUST(open("/", O_RDONLY | O_DIRECTORY));
        MUST(chdir("/inside"));
        TRY(syscall(SYS_pivot_root, ".", "."));
        MUST(fchdir(old));
        show_dir(".");
        TRY(umount2(".", MNT_DETACH));
        MUST(chdir("/"));
        show_dir("/");
        show_dir("/..");
        _exit(0);
    }
    finish(child);
    show_dir("/tmp/m");
    TRY(umount("m"));
    MUST(rmdir("m/plain"));
    MUST(rmdir("m"));
}

static void own_kinds(void)
{
    PART("what the kernel shows");
    MUST(mkdir("m", 0755));
    TRY(mount("proc", "m", "proc", MS_NOSUID | MS_RDONLY, NULL));
    char own[32], link[32] = "";
    snprintf(own, sizeof own, "%d", getpid());
    MUST(readlink("m/self", link, sizeof link - 1));
    IS(!strcmp(own, link));
    TRY(mount("covered", "m/sys", "tmpfs", 0, NULL));
    show_dir("m/sys");
    IS(access("/proc/sys/kernel", F_OK) == 0);
    TRY(mount("m/version", "m/uptime", NULL, MS_BIND, NULL));
    char first[8] = "";
    int fd = (int)MUST(open("m/uptime", O_RDONLY));
    MUST(read(fd, first, 5));
    close(fd);
    say("%s\n", first);
    TRY(umount("m/uptime"));
    TRY(umount("m"));
    TRY(umount("m/sys"));
    IS(access("m/sys/kernel", F_OK) == 0);
    TRY(umount("m"));
    TRY(mount("devpts", "m", "devpts", MS_NOSUID | MS_NOEXEC,
              "newinstance,ptmxmode=0666,mode=620"));
    show_place("m/ptmx");
    OPENS("m/ptmx", O_RDWR | O_NOCTTY);
    TRY(umount2("m", MNT_DETACH));
    MUST(rmdir("m"));
}

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "who")) {
        say("user %u of %u, group %u\n", geteuid(), getuid(), getegid());
        return 0;
    }
    umask(022);
    PART("a namespace of its own");
    if (TRY(unshare(CLONE_NEWNS)) < 0)
        return 0;
    TRY(mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL));
    MUST(mount("scratch", SCRATCH, "tmpfs", 0, NULL));
    MUST(chdir(SCRATCH));
    numbers();
    refusals();
    memory();
    binds();
    trees();
    use();
    read_only();
    properties();
    namespaces();
    ended();
    crossing();
    pivots();
    own_kinds();
    return 0;
}
