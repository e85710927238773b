/* fallocate, holes, copy_file_range, statx, renameat2, large directories. */
#include "guest.h"
#include <sys/mman.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>

static void content(const char *what, int fd)
{
    char text[128];
    ssize_t got = pread(fd, text, sizeof text, 0);
    say("%s: %ld bytes \"", what, (long)got);
    for (ssize_t i = 0; i < got; i++)
        say("%c", text[i] ? text[i] : '.');
    say("\"\n");
}

static long blocks(int fd)
{
    struct stat st;
    MUST(fstat(fd, &st));
    return (long)st.st_blocks;
}

int main(void)
{
    char *scratch = enter_scratch();
    struct stat st;

    PART("fallocate");
    int fd = (int)MUST(open("file", O_CREAT | O_RDWR, 0644));
    MUST(write(fd, "0123456789", 10));
    TRY(fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, 100000));
    MUST(fstat(fd, &st));
    say("size %ld\n", (long)st.st_size);
    IS(blocks(fd) >= 100000 / 512);
    TRY(fallocate(fd, 0, 0, 20));
    content("grown", fd);
    TRY(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 2, 3));
    content("punched", fd);
    TRY(fallocate(fd, FALLOC_FL_ZERO_RANGE, 8, 20));
    content("zeroed", fd);
    TRY(fallocate(fd, FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, 0, 50));
    content("all zeroed", fd);
    TRY(fallocate(fd, FALLOC_FL_PUNCH_HOLE, 0, 1));
    TRY(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, 0, 1));
    TRY(fallocate(fd, 0x1000, 0, 1));
    TRY(fallocate(fd, 0, 0, 0));
    TRY(fallocate(fd, 0, -1, 10));
    TRY(fallocate(fd, 0, 10, -1));
    TRY(fallocate(fd, 0, LONG_MAX, 10));
    int reader = (int)MUST(open("file", O_RDONLY)), pipes[2];
    TRY(fallocate(reader, 0, 0, 1));
    MUST(pipe(pipes));
    TRY(fallocate(pipes[1], 0, 0, 1));
    int null = (int)MUST(open("/dev/null", O_RDWR));
    TRY(fallocate(null, 0, 0, 1));

    PART("holes");
    int sparse = (int)MUST(open("sparse", O_CREAT | O_RDWR, 0644));
    MUST(pwrite(sparse, "data", 4, 1 << 20));
    MUST(ftruncate(sparse, 3 << 20));
    TRY(lseek(sparse, 0, SEEK_DATA));
    TRY(lseek(sparse, 0, SEEK_HOLE));
    TRY(lseek(sparse, 1 << 20, SEEK_HOLE));
    TRY(lseek(sparse, 2 << 20, SEEK_DATA));
    TRY(lseek(sparse, 3 << 20, SEEK_HOLE));
    TRY(lseek(sparse, -1, SEEK_DATA));
    IS(blocks(sparse) < 100);

    PART("copy_file_range");
    int from = (int)MUST(open("from", O_CREAT | O_RDWR, 0644));
    int to = (int)MUST(open("to", O_CREAT | O_RDWR, 0644));
    MUST(write(from, "abcdefghij", 10));
    MUST(lseek(from, 0, SEEK_SET));
    TRY(copy_file_range(from, NULL, to, NULL, 4, 0));
    TRY(copy_file_range(from, NULL, to, NULL, 100, 0));
    TRY(copy_file_range(from, NULL, to, NULL, 100, 0));
    content("copied", to);
    off_t in = 2, out = 20;
    TRY(copy_file_range(from, &in, to, &out, 3, 0));
    say("in %ld out %ld position %ld\n", (long)in, (long)out, (long)lseek(to, 0, SEEK_CUR));
    content("copied behind the end", to);
    in = 0, out = 2;
    TRY(copy_file_range(from, &in, from, &out, 5, 0));
    in = 0, out = 5;
    TRY(copy_file_range(from, &in, from, &out, 5, 0));
    content("inside one file", from);
    TRY(copy_file_range(from, NULL, to, NULL, 1, 1));
    TRY(copy_file_range(from, NULL, reader, NULL, 1, 0));
    TRY(copy_file_range(pipes[0], NULL, to, NULL, 1, 0));
    int append = (int)MUST(open("to", O_WRONLY | O_APPEND));
    TRY(copy_file_range(from, NULL, append, NULL, 1, 0));
    int here = (int)MUST(open(".", O_RDONLY));
    TRY(copy_file_range(here, NULL, to, NULL, 1, 0));

    PART("statfs and statx");
    struct statfs fs;
    TRY(statfs(".", &fs));
    IS(fs.f_bsize == 4096 && fs.f_namelen == 255 && fs.f_blocks >= fs.f_bfree);
    TRY(statfs("none", &fs));
    TRY(statfs("file/x", &fs));
    TRY(fstatfs(999, &fs));
    struct statvfs vfs;
    TRY(statvfs("/proc", &vfs));
    struct statx more;
    TRY(statx(AT_FDCWD, "to", 0, STATX_BASIC_STATS | STATX_BTIME, &more));
    say("size %lu mode %o links %u mask %x\n", (unsigned long)more.stx_size, more.stx_mode,
        more.stx_nlink, more.stx_mask & STATX_BASIC_STATS);
    TRY(statx(to, "", AT_EMPTY_PATH, STATX_SIZE, &more));
    TRY(statx(to, "", 0, STATX_SIZE, &more));
    TRY(statx(AT_FDCWD, "to", 0x10000, STATX_SIZE, &more));
    TRY(statx(AT_FDCWD, "to", AT_STATX_FORCE_SYNC, STATX_SIZE, &more));
    TRY(statx(AT_FDCWD, "to", AT_STATX_FORCE_SYNC | AT_STATX_DONT_SYNC, STATX_SIZE, &more));
    TRY(statx(AT_FDCWD, "to", 0, 0x80000000U, &more));

    PART("renameat2");
    put_file("a", "a");
    put_file("b", "b");
    MUST(mkdir("d", 0755));
    TRY(renameat2(AT_FDCWD, "a", AT_FDCWD, "b", RENAME_NOREPLACE));
    TRY(renameat2(AT_FDCWD, "a", AT_FDCWD, "c", RENAME_NOREPLACE));
    TRY(renameat2(AT_FDCWD, "c", AT_FDCWD, "none", RENAME_EXCHANGE));
    TRY(renameat2(AT_FDCWD, "c", AT_FDCWD, "d", RENAME_EXCHANGE));
    show_stat("c");
    show_file("d");
    TRY(renameat2(AT_FDCWD, "c", AT_FDCWD, "c/inside", 0));
    TRY(renameat2(AT_FDCWD, "c", AT_FDCWD, "d", RENAME_EXCHANGE | RENAME_NOREPLACE));
    TRY(renameat2(AT_FDCWD, "c", AT_FDCWD, "d", 0x100));

    PART("a large directory");
    MUST(mkdir("large", 0755));
    char name[64];
    enum { COUNT = 20000 };
    for (int i = 0; i < COUNT; i++) {
        snprintf(name, sizeof name, "large/entry-%05d", i);
        MUST(mknod(name, S_IFREG | 0644, 0));
    }
    DIR *dir = opendir("large");
    struct dirent *entry;
    int seen = 0, twice = 0;
    static char found[COUNT];
    long middle = -1;
    char at_middle[64] = "";
    while ((entry = readdir(dir))) {
        int number;
        if (sscanf(entry->d_name, "entry-%d", &number) != 1)
            continue;
        twice += found[number];
        found[number] = 1;
        if (++seen == COUNT / 2) {
            middle = telldir(dir);
            entry = readdir(dir);
            strcpy(at_middle, entry->d_name);
            sscanf(entry->d_name, "entry-%d", &number);
            twice += found[number];
            found[number] = 1;
            seen++;
        }
    }
    say("seen %d twice %d\n", seen, twice);
    seekdir(dir, middle);
    entry = readdir(dir);
    IS(entry && !strcmp(entry->d_name, at_middle));
    rewinddir(dir);
    int removed = 0;
    while ((entry = readdir(dir)))
        if (unlinkat(dirfd(dir), entry->d_name, 0) == 0)
            removed++;
    say("removed %d while reading\n", removed);
    rewinddir(dir);
    seen = 0;
    while (readdir(dir))
        seen++;
    say("left %d\n", seen);
    closedir(dir);
    TRY(rmdir("large"));

    PART("links");
    MUST(mkdir("links", 0755));
    for (int i = 0; i < 100; i++) {
        snprintf(name, sizeof name, "links/%d", i);
        MUST(link("b", name));
    }
    show_stat("b");
    for (int i = 0; i < 99; i++) {
        snprintf(name, sizeof name, "links/%d", i);
        MUST(unlink(name));
    }
    show_stat("b");
    int open_file = (int)MUST(open("b", O_RDONLY));
    MUST(unlink("b"));
    MUST(unlink("links/99"));
    MUST(fstat(open_file, &st));
    say("links %lu\n", (unsigned long)st.st_nlink);

    PART("..");
    MUST(mkdir("up", 0755));
    MUST(mkdir("up/down", 0755));
    MUST(chdir("up/down"));
    MUST(rename("../../up/down", "../../elsewhere"));
    TRY(access("../up", F_OK));
    MUST(rmdir("../elsewhere"));
    TRY(access("..", F_OK));
    TRY(open(".", O_RDONLY) >= 0);
    TRY(open("new", O_CREAT | O_RDWR, 0644));
    char where[64];
    IS(getcwd(where, sizeof where) == NULL && errno == ENOENT);
    leave_scratch(scratch);
    return 0;
}
