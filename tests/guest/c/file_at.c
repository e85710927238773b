/* The *at family: directory descriptors, AT_FDCWD, AT_EMPTY_PATH, flags. */
#include "guest.h"
#include <linux/openat2.h>
#include <sys/sysmacros.h>

int main(void)
{
    char *scratch = enter_scratch();
    struct stat st;
    struct statx sx;
    char data[100];

    MUST(mkdir("d", 0755));
    put_file("d/f", "file in d");
    put_file("top", "file at top");
    MUST(symlink("f", "d/s"));
    int dir = MUST(open("d", O_RDONLY | O_DIRECTORY));
    int path = MUST(open("d", O_PATH | O_DIRECTORY));
    int file = MUST(open("d/f", O_RDONLY));

    PART("openat");
    TRY(close(openat(dir, "f", O_RDONLY)));
    TRY(close(openat(path, "f", O_RDONLY)));
    TRY(openat(dir, "absent", O_RDONLY));
    TRY(openat(file, "f", O_RDONLY));
    TRY(openat(77, "f", O_RDONLY));
    TRY(openat(-1, "f", O_RDONLY));
    TRY(close(openat(77, scratch, O_RDONLY)));
    TRY(close(openat(dir, "../top", O_RDONLY)));
    TRY(close(openat(dir, ".", O_RDONLY)));
    TRY(openat(dir, "", O_RDONLY));
    TRY(close(openat(AT_FDCWD, "top", O_RDONLY)));

    PART("fstatat, statx");
    TRY(fstatat(dir, "f", &st, 0));
    say("size %ld\n", (long)st.st_size);
    TRY(fstatat(dir, "s", &st, AT_SYMLINK_NOFOLLOW));
    IS(S_ISLNK(st.st_mode));
    TRY(fstatat(dir, "s", &st, 0));
    IS(S_ISREG(st.st_mode));
    TRY(fstatat(file, "", &st, AT_EMPTY_PATH));
    IS(S_ISREG(st.st_mode));
    TRY(fstatat(file, "", &st, 0));
    TRY(fstatat(dir, "f", &st, 0x40000000));
    TRY(fstatat(AT_FDCWD, "", &st, AT_EMPTY_PATH));
    IS(S_ISDIR(st.st_mode));
    TRY(statx(dir, "f", 0, STATX_BASIC_STATS, &sx));
    IS((sx.stx_mask & STATX_BASIC_STATS) == STATX_BASIC_STATS);
    say("mode %o size %lu links %u blksize>0 %d\n", sx.stx_mode, (unsigned long)sx.stx_size,
        sx.stx_nlink, sx.stx_blksize > 0);
    MUST(fstatat(dir, "f", &st, 0));
    IS(sx.stx_ino == st.st_ino);
    IS(makedev(sx.stx_dev_major, sx.stx_dev_minor) == st.st_dev);
    TRY(statx(file, "", AT_EMPTY_PATH, STATX_SIZE, &sx));
    TRY(statx(file, "", 0, STATX_SIZE, &sx));
    TRY(statx(dir, "f", 0, 0x80000000, &sx)); /* STATX__RESERVED */
    TRY(statx(dir, "f", AT_STATX_FORCE_SYNC | AT_STATX_DONT_SYNC, STATX_SIZE, &sx));
    TRY(statx(dir, "f", 0, STATX_SIZE, (struct statx *)8));

    PART("names");
    TRY(mkdirat(dir, "sub", 0755));
    TRY(mkdirat(dir, "sub", 0755));
    TRY(mkdirat(file, "sub", 0755));
    TRY(unlinkat(dir, "sub", 0));
    TRY(unlinkat(dir, "sub", AT_REMOVEDIR));
    TRY(unlinkat(dir, "f", AT_REMOVEDIR));
    TRY(unlinkat(dir, "f", 0x1000000));
    TRY(symlinkat("target", dir, "sl"));
    TRY(readlinkat(dir, "sl", data, sizeof data));
    TRY(linkat(dir, "f", AT_FDCWD, "hard", 0));
    TRY(linkat(dir, "f", AT_FDCWD, "hard2", 0x1000000));
    TRY(renameat(AT_FDCWD, "hard", dir, "moved"));
    TRY(renameat(dir, "moved", 77, "moved"));
    show_dir("d");

    PART("attributes");
    TRY(fchmodat(dir, "f", 0600, 0));
    TRY(faccessat(dir, "f", R_OK, 0));
    TRY(faccessat(dir, "absent", F_OK, 0));
    TRY(faccessat(dir, "f", 8, 0));
    TRY(faccessat(dir, "sl", F_OK, AT_SYMLINK_NOFOLLOW));
    TRY(faccessat(dir, "sl", F_OK, 0));
    struct timespec times[2] = {{.tv_sec = 1000, .tv_nsec = 5}, {.tv_sec = 2000, .tv_nsec = UTIME_OMIT}};
    TRY(utimensat(dir, "f", times, 0));
    MUST(fstatat(dir, "f", &st, 0));
    say("atime %ld.%09ld\n", (long)st.st_atim.tv_sec, st.st_atim.tv_nsec);
    IS(st.st_mtim.tv_sec != 2000);
    TRY(utimensat(file, NULL, times, 0));
    TRY(utimensat(dir, "absent", times, 0));
    TRY(fchownat(dir, "f", (uid_t)-1, (gid_t)-1, 0));
    TRY(fchownat(file, "", (uid_t)-1, (gid_t)-1, AT_EMPTY_PATH));

    PART("openat2");
    struct open_how how = {.flags = O_RDONLY, .resolve = RESOLVE_BENEATH};
    long got = syscall(SYS_openat2, dir, "f", &how, sizeof how);
    if (got < 0 && errno == ENOSYS) {
        say("openat2 is optional\n");
    } else {
        close((int)got);
        say("openat2 is optional\n");
        if (syscall(SYS_openat2, dir, "../top", &how, sizeof how) >= 0 || errno != EXDEV)
            say("RESOLVE_BENEATH let a path out\n");
        how.resolve = RESOLVE_NO_SYMLINKS;
        if (syscall(SYS_openat2, dir, "s", &how, sizeof how) >= 0 || errno != ELOOP)
            say("RESOLVE_NO_SYMLINKS followed a link\n");
    }

    PART("a directory that is gone");
    MUST(mkdir("gone", 0755));
    int gone = MUST(open("gone", O_RDONLY | O_DIRECTORY));
    TRY(rmdir("gone"));
    TRY(openat(gone, "x", O_RDONLY));
    TRY(openat(gone, "x", O_WRONLY | O_CREAT, 0644));
    TRY(mkdirat(gone, "x", 0755));
    TRY(close(openat(gone, ".", O_RDONLY)));
    MUST(fstat(gone, &st));
    say("links %lu\n", (unsigned long)st.st_nlink);
    TRY(fchdir(gone));
    errno = 0;
    IS(getcwd(data, sizeof data) == NULL && errno == ENOENT);
    TRY(open("x", O_WRONLY | O_CREAT, 0644));
    TRY(fchdir(dir));
    TRY(fchdir(file));
    leave_scratch(scratch);
    return 0;
}
