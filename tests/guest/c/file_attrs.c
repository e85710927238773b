/* stat(2), chmod(2), chown(2), utimensat(2), umask(2), access(2), statfs(2)
 * and extended attributes. */
#include "guest.h"
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <sys/xattr.h>
#include <utime.h>

static bool later(struct timespec a, struct timespec b)
{
    return a.tv_sec > b.tv_sec || (a.tv_sec == b.tv_sec && a.tv_nsec > b.tv_nsec);
}

static void pause_for_clock_tick(void)
{
    struct timespec t = {.tv_nsec = 20000000};
    nanosleep(&t, NULL);
}

int main(void)
{
    char *scratch = enter_scratch();
    struct stat st, before;

    PART("stat");
    put_file("f", "12345");
    TRY(stat("f", &st));
    IS(S_ISREG(st.st_mode) && st.st_nlink == 1 && st.st_size == 5 && st.st_blksize > 0);
    IS(st.st_uid == geteuid());
    TRY(stat("absent", &st));
    TRY(stat("", &st));
    TRY(stat("f/x", &st));
    TRY(stat("f", (struct stat *)8));
    TRY(fstat(77, &st));
    TRY(fstat(0, &st));
    TRY(stat("/", &st));
    IS(S_ISDIR(st.st_mode));

    PART("chmod");
    TRY(chmod("f", 0604));
    show_stat("f");
    TRY(chmod("f", 07777));
    show_stat("f");
    TRY(chmod("f", 0170644));
    show_stat("f");
    int fd = MUST(open("f", O_RDONLY));
    TRY(fchmod(fd, 0600));
    show_stat("f");
    TRY(chmod("absent", 0600));
    TRY(fchmod(77, 0600));
    MUST(symlink("f", "s"));
    TRY(chmod("s", 0640));
    show_stat("f");
    MUST(mkdir("d", 0755));
    TRY(chmod("d", 01777));
    show_stat("d");

    PART("umask");
    say("%o\n", umask(0027));
    say("%o\n", umask(07777));
    say("%o\n", umask(0022));

    PART("chown");
    TRY(chown("f", geteuid(), getegid()));
    TRY(chown("f", (uid_t)-1, (gid_t)-1));
    TRY(lchown("s", geteuid(), (gid_t)-1));
    TRY(fchown(fd, geteuid(), (gid_t)-1));
    TRY(chown("absent", 0, 0));
    chmod("f", 06711);
    TRY(chown("f", geteuid(), getegid())); /* clears set-id bits */
    show_stat("f");

    PART("access");
    chmod("f", 0644);
    TRY(access("f", F_OK));
    TRY(access("f", R_OK | W_OK));
    TRY(access("f", X_OK));
    TRY(access("absent", F_OK));
    TRY(access("f", 0100));
    TRY(access("f/x", F_OK));
    chmod("f", 0755);
    TRY(access("f", X_OK));
    TRY(access("d", R_OK | W_OK | X_OK));

    PART("times");
    struct timeval tv[2] = {{.tv_sec = 100, .tv_usec = 7}, {.tv_sec = 200, .tv_usec = 8}};
    TRY(utimes("f", tv));
    stat("f", &st);
    say("%ld.%09ld %ld.%09ld\n", (long)st.st_atim.tv_sec, st.st_atim.tv_nsec,
        (long)st.st_mtim.tv_sec, st.st_mtim.tv_nsec);
    struct timespec ts[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = 300, .tv_nsec = 9}};
    TRY(futimens(fd, ts));
    stat("f", &st);
    say("%ld.%09ld %ld.%09ld\n", (long)st.st_atim.tv_sec, st.st_atim.tv_nsec,
        (long)st.st_mtim.tv_sec, st.st_mtim.tv_nsec);
    ts[1].tv_nsec = 1000000000;
    TRY(utimensat(AT_FDCWD, "f", ts, 0));
    ts[0].tv_sec = -5, ts[0].tv_nsec = 0, ts[1].tv_sec = 1, ts[1].tv_nsec = 0;
    TRY(utimensat(AT_FDCWD, "f", ts, 0));
    stat("f", &st);
    say("%ld %ld\n", (long)st.st_atim.tv_sec, (long)st.st_mtim.tv_sec);
    TRY(utimensat(AT_FDCWD, "s", ts, AT_SYMLINK_NOFOLLOW));
    lstat("s", &st);
    say("%ld %ld\n", (long)st.st_atim.tv_sec, (long)st.st_mtim.tv_sec);
    TRY(utime("f", NULL));
    stat("f", &st);
    IS(st.st_mtim.tv_sec > 1000000000);

    PART("what changes times");
    before = st;
    pause_for_clock_tick();
    put_file("d/child", "");
    struct stat dir_before, dir_after;
    stat("d", &dir_before);
    pause_for_clock_tick();
    MUST(unlink("d/child"));
    stat("d", &dir_after);
    IS(later(dir_after.st_mtim, dir_before.st_mtim));
    IS(later(dir_after.st_ctim, dir_before.st_ctim));
    chmod("f", 0600);
    stat("f", &st);
    IS(later(st.st_ctim, before.st_ctim));
    IS(!later(st.st_mtim, before.st_mtim));
    int wr = MUST(open("f", O_WRONLY));
    MUST(write(wr, "x", 1));
    stat("f", &st);
    IS(later(st.st_mtim, before.st_mtim));
    before = st;
    pause_for_clock_tick();
    MUST(link("f", "f2"));
    stat("f", &st);
    IS(later(st.st_ctim, before.st_ctim) && !later(st.st_mtim, before.st_mtim));
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    IS(!later(st.st_ctim, now) && now.tv_sec - st.st_ctim.tv_sec < 10);

    PART("statfs");
    struct statfs fs;
    TRY(statfs(".", &fs));
    IS(fs.f_bsize > 0 && fs.f_namelen == 255 && fs.f_blocks >= fs.f_bfree);
    TRY(fstatfs(fd, &fs));
    TRY(statfs("absent", &fs));
    TRY(fstatfs(77, &fs));
    struct statvfs vfs;
    TRY(statvfs("/proc", &vfs));
    TRY(statfs("/proc", &fs));
    say("/proc type %lx\n", (unsigned long)fs.f_type);

    PART("extended attributes");
    char value[100];
    TRY(getxattr("absent", "user.x", value, sizeof value));
    TRY(getxattr("f", "trusted_but_no_namespace", value, sizeof value));
    long got = getxattr("f", "user.x", value, sizeof value);
    IS(got == -1 && (errno == ENODATA || errno == ENOTSUP));
    got = getxattr("f", "security.capability", value, sizeof value);
    IS(got == -1 && (errno == ENODATA || errno == ENOTSUP));
    got = getxattr("f", "system.posix_acl_access", value, sizeof value);
    IS(got == -1 && (errno == ENODATA || errno == ENOTSUP));
    got = listxattr("f", value, sizeof value);
    IS(got == 0 || (got == -1 && errno == ENOTSUP));
    TRY(fgetxattr(77, "user.x", value, sizeof value));
    TRY(removexattr("absent", "user.x"));
    got = removexattr("f", "user.x");
    IS(got == -1 && (errno == ENODATA || errno == ENOTSUP));
    TRY(setxattr("absent", "user.x", "v", 1, 0));
    TRY(setxattr("f", "", "v", 1, 0));
    leave_scratch(scratch);
    return 0;
}
