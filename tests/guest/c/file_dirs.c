/* Reading directories: getdents64(2), readdir(3), seekdir, rewinddir, and
 * entries that come and go meanwhile. */
#include "guest.h"
#include <sys/syscall.h>

struct entry64 {
    uint64_t ino;
    int64_t off;
    unsigned short reclen;
    unsigned char type;
    char name[];
};

static int count_raw(int fd, size_t size)
{
    char *block = malloc(size);
    int count = 0;
    long got;
    while ((got = syscall(SYS_getdents64, fd, block, size)) > 0)
        for (long at = 0; at < got;) {
            struct entry64 *entry = (struct entry64 *)(block + at);
            if (entry->reclen % 8 || entry->ino == 0)
                say("bad entry\n");
            count++;
            at += entry->reclen;
        }
    if (got < 0)
        say("getdents64: %s\n", error_name(errno));
    free(block);
    return count;
}

int main(void)
{
    char *scratch = enter_scratch();
    char name[64];

    PART("types");
    MUST(mkdir("types", 0755));
    put_file("types/file", "");
    MUST(mkdir("types/dir", 0755));
    MUST(symlink("x", "types/link"));
    MUST(mkfifo("types/fifo", 0600));
    DIR *dir = opendir("types");
    struct dirent *entry;
    int types[16] = {0}, dots = 0, matching = 0, total = 0;
    while ((entry = readdir(dir))) {
        struct stat st;
        MUST(fstatat(dirfd(dir), entry->d_name, &st, AT_SYMLINK_NOFOLLOW));
        matching += st.st_ino == entry->d_ino;
        total++;
        types[entry->d_type & 15]++;
        dots += !strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..");
    }
    say("reg %d dir %d lnk %d fifo %d dots %d\n", types[DT_REG], types[DT_DIR], types[DT_LNK],
        types[DT_FIFO], dots);
    IS(matching >= total - 1); /* `..` may be a mount point */
    closedir(dir);

    PART("many entries, several block sizes");
    MUST(mkdir("many", 0755));
    for (int i = 0; i < 500; i++) {
        snprintf(name, sizeof name, "many/%0*d", 1 + i % 40, i);
        MUST(close(MUST(open(name, O_CREAT | O_WRONLY, 0644))));
    }
    int fd = MUST(open("many", O_RDONLY | O_DIRECTORY));
    TRY(count_raw(fd, 32768));
    TRY(count_raw(fd, 32768));
    TRY(lseek(fd, 0, SEEK_SET));
    TRY(count_raw(fd, 300));
    TRY(lseek(fd, 0, SEEK_SET));
    char small[16];
    TRY(syscall(SYS_getdents64, fd, small, sizeof small));
    TRY(syscall(SYS_getdents64, fd, (void *)8, 4096));
    TRY(syscall(SYS_getdents64, 77, small, sizeof small));
    int file = MUST(open("types/file", O_RDONLY));
    TRY(syscall(SYS_getdents64, file, small, sizeof small));

    PART("seekdir and rewinddir");
    dir = opendir("many");
    char *names[600];
    long positions[600];
    int count = 0;
    while (count < 600) {
        positions[count] = telldir(dir);
        if (!(entry = readdir(dir)))
            break;
        names[count++] = strdup(entry->d_name);
    }
    say("count %d\n", count);
    int wrong = 0;
    for (int i = 0; i < count; i += 37) {
        seekdir(dir, positions[i]);
        entry = readdir(dir);
        wrong += !entry || strcmp(entry->d_name, names[i]);
    }
    say("wrong after seekdir %d\n", wrong);
    rewinddir(dir);
    int again = 0;
    while (readdir(dir))
        again++;
    say("after rewinddir %d\n", again);

    PART("unlinking while reading");
    rewinddir(dir);
    int removed = 0;
    while ((entry = readdir(dir)))
        if (entry->d_name[0] != '.' && unlinkat(dirfd(dir), entry->d_name, 0) == 0)
            removed++;
    say("removed %d\n", removed);
    closedir(dir);
    show_dir("many");
    TRY(rmdir("many"));
    TRY(syscall(SYS_getdents64, fd, small, sizeof small));

    PART("creating after rewinddir");
    MUST(mkdir("grow", 0755));
    dir = opendir("grow");
    while (readdir(dir))
        ;
    put_file("grow/new", "");
    rewinddir(dir);
    count = 0;
    while (readdir(dir))
        count++;
    say("count %d\n", count);
    closedir(dir);
    leave_scratch(scratch);
    return 0;
}
