/* memfd_create and seals; files without names; programs that are busy. */
#include "guest.h"
#include <sys/mman.h>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U
#define MFD_EXEC 16U
#endif

static void show_seals(int fd) { say("seals %x\n", (unsigned)fcntl(fd, F_GET_SEALS)); }

int main(void)
{
    char *scratch = enter_scratch();
    char text[256], name[64];

    PART("memory files");
    TRY(memfd_create("x", 0x8000));
    int fd = (int)MUST(memfd_create("name", MFD_CLOEXEC));
    IS(fcntl(fd, F_GETFD) == FD_CLOEXEC);
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t len = readlink(name, text, sizeof text - 1);
    say("%.*s\n", (int)len, text);
    show_seals(fd);
    TRY(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE));
    TRY(write(fd, "12345", 5));
    TRY(lseek(fd, 0, SEEK_END));
    struct stat st;
    MUST(fstat(fd, &st));
    say("mode %o links %lu size %ld\n", st.st_mode, (unsigned long)st.st_nlink, (long)st.st_size);
    close(fd);
    memset(text, 'n', sizeof text);
    text[249] = '\0';
    OK(memfd_create(text, 0));
    text[250] = '\0';
    TRY(memfd_create((text[249] = 'n', text), 0));

    PART("size");
    fd = (int)MUST(memfd_create("sealed", MFD_ALLOW_SEALING));
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    show_seals(fd);
    MUST(write(fd, "0123456789", 10));
    TRY(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK));
    TRY(ftruncate(fd, 9));
    TRY(ftruncate(fd, 20));
    TRY(fcntl(fd, F_ADD_SEALS, F_SEAL_GROW));
    TRY(ftruncate(fd, 21));
    TRY(ftruncate(fd, 20));
    TRY(pwrite(fd, "abcdef", 6, 14));
    TRY(pwrite(fd, "abcdef", 6, 15));
    TRY(pwrite(fd, "abcdef", 6, 20));
    TRY(fallocate(fd, 0, 10, 20));
    TRY(fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, 10));
    TRY(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 2, 3));
    show_seals(fd);

    PART("writing");
    char *map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    IS(map != MAP_FAILED);
    TRY(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE));
    show_seals(fd);
    TRY(fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE));
    TRY(pwrite(fd, "x", 1, 0));
    map[0] = 'M';
    TRY(pread(fd, text, 1, 0));
    say("%c\n", text[0]);
    void *more = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    say("another: %s\n", more == MAP_FAILED ? error_name(errno) : "ok");
    more = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
    say("to read: %s\n", more == MAP_FAILED ? error_name(errno) : "ok");
    TRY(mprotect(more, 4096, PROT_READ | PROT_WRITE));
    char *private = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    IS(private != MAP_FAILED && (private[1] = 'p') == 'p');
    MUST(munmap(map, 4096));
    TRY(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE));
    TRY(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4));
    show_seals(fd);

    PART("through another description");
    int other = (int)MUST(open(name, O_RDWR));
    TRY(write(other, "x", 1));
    TRY(ftruncate(other, 1));
    show_seals(other);
    TRY(fcntl(other, F_ADD_SEALS, F_SEAL_SEAL));
    TRY(fcntl(fd, F_ADD_SEALS, F_SEAL_GROW));
    int reader = (int)MUST(open(name, O_RDONLY));
    TRY(fcntl(reader, F_ADD_SEALS, F_SEAL_GROW));
    TRY(fcntl(fd, F_ADD_SEALS, 0x10000));
    int pipes[2];
    MUST(pipe(pipes));
    TRY(fcntl(pipes[0], F_GET_SEALS));

    PART("the execute bits");
    int no_exec = (int)MUST(memfd_create("data", MFD_NOEXEC_SEAL));
    show_seals(no_exec);
    MUST(fstat(no_exec, &st));
    say("mode %o\n", st.st_mode);
    TRY(fchmod(no_exec, 0700));
    TRY(fchmod(no_exec, 0600));
    TRY(memfd_create("both", MFD_NOEXEC_SEAL | MFD_EXEC));

    PART("files without names");
    int hidden = (int)MUST(open(".", O_TMPFILE | O_RDWR, 0640));
    MUST(write(hidden, "hidden", 6));
    MUST(fstat(hidden, &st));
    say("mode %o links %lu size %ld\n", st.st_mode, (unsigned long)st.st_nlink, (long)st.st_size);
    show_dir(".");
    snprintf(name, sizeof name, "/proc/self/fd/%d", hidden);
    TRY(linkat(AT_FDCWD, name, AT_FDCWD, "found", 0));
    TRY(linkat(AT_FDCWD, name, AT_FDCWD, "found", AT_SYMLINK_FOLLOW));
    TRY(linkat(AT_FDCWD, name, AT_FDCWD, "found", AT_SYMLINK_FOLLOW));
    show_file("found");
    show_stat("found");
    MUST(close(hidden));
    int never = (int)MUST(open(".", O_TMPFILE | O_EXCL | O_RDWR, 0640));
    snprintf(name, sizeof name, "/proc/self/fd/%d", never);
    TRY(linkat(AT_FDCWD, name, AT_FDCWD, "never", AT_SYMLINK_FOLLOW));
    TRY(open(".", O_TMPFILE | O_RDONLY, 0640));
    TRY(open("found", O_TMPFILE | O_RDWR, 0640));
    TRY(open("none", O_TMPFILE | O_RDWR, 0640));
    int lost = (int)MUST(open("found", O_RDWR));
    MUST(unlink("found"));
    snprintf(name, sizeof name, "/proc/self/fd/%d", lost);
    TRY(linkat(AT_FDCWD, name, AT_FDCWD, "revived", AT_SYMLINK_FOLLOW));

    PART("busy programs");
    TRY(open("/proc/self/exe", O_WRONLY));
    TRY(open("/proc/self/exe", O_RDWR));
    TRY(truncate("/proc/self/exe", 10));
    OK(open("/proc/self/exe", O_RDONLY));
    int busy = (int)MUST(open("busy", O_CREAT | O_WRONLY, 0755));
    MUST(write(busy, "#!/bin/true\n", 12));
    char *const arguments[] = {"busy", NULL};
    TRY(execv("busy", arguments));
    leave_scratch(scratch);
    return 0;
}
