/* dup(2), dup2(2), dup3(2), fcntl(2), close_range(2), descriptor limits, file
 * locks, ioctl(2) errors, tables that processes share. */
#include "guest.h"
#include <linux/close_range.h>
#include <sched.h>
#include <sys/file.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>

static pid_t sharing_descriptors(void)
{
    return (pid_t)syscall(SYS_clone, CLONE_FILES | SIGCHLD, 0, 0, 0, 0);
}

/* A table that two processes share: each sees what the other does, until one of them executes a
 * program or asks for a table of its own. */
static void shared_table(char *own_path)
{
    char *argv[] = {own_path, "leave", NULL}, *envp[] = {NULL};
    int status;

    PART("a shared table");
    int fd = (int)MUST(open("/", O_RDONLY | O_CLOEXEC));
    pid_t pid = sharing_descriptors();
    if (pid == 0)
        _exit(dup2(fd, 40) == 40 ? 3 : 4);
    MUST(waitpid(pid, &status, 0));
    say("status %x\n", status);
    TRY(fcntl(40, F_GETFD));
    TRY(close(40));
    pid = sharing_descriptors();
    if (pid == 0) {
        execve(own_path, argv, envp);
        _exit(4);
    }
    MUST(waitpid(pid, &status, 0));
    say("status %x\n", status);
    TRY(fcntl(fd, F_GETFD));
    pid = sharing_descriptors();
    if (pid == 0) {
        int unshared = (int)syscall(SYS_close_range, fd, fd, CLOSE_RANGE_UNSHARE);
        _exit(unshared == 0 && fcntl(fd, F_GETFD) == -1 ? 5 : 6);
    }
    MUST(waitpid(pid, &status, 0));
    say("status %x\n", status);
    TRY(fcntl(fd, F_GETFD));
    close(fd);
}

int main(int argc, char **argv)
{
    char *own_path = realpath(argv[0], NULL);
    if (argc > 1 && !strcmp(argv[1], "leave"))
        return 3;
    char *scratch = enter_scratch();
    char data[16];

    PART("dup");
    int fd = TRY(open("f", O_CREAT | O_RDWR | O_CLOEXEC, 0644));
    TRY(write(fd, "0123456789", 10));
    int twin = TRY(dup(fd));
    TRY(fcntl(fd, F_GETFD));
    TRY(fcntl(twin, F_GETFD));
    TRY(lseek(twin, 3, SEEK_SET));
    TRY(lseek(fd, 0, SEEK_CUR));
    TRY(dup(99));
    TRY(dup(-1));
    TRY(dup2(fd, 20));
    TRY(dup2(fd, fd));
    TRY(dup2(99, 99));
    TRY(dup2(99, 20));
    TRY(fcntl(20, F_GETFD));
    TRY(dup2(fd, -1));
    TRY(dup2(fd, 1 << 30));
    TRY(dup3(fd, 21, O_CLOEXEC));
    TRY(fcntl(21, F_GETFD));
    TRY(dup3(fd, fd, 0));
    TRY(dup3(fd, 22, O_APPEND));

    PART("fcntl");
    TRY(fcntl(fd, F_DUPFD, 30));
    TRY(fcntl(fd, F_DUPFD, 30));
    TRY(fcntl(fd, F_DUPFD_CLOEXEC, 40));
    TRY(fcntl(40, F_GETFD));
    TRY(fcntl(fd, F_DUPFD, -1));
    TRY(fcntl(fd, F_DUPFD, 1 << 30));
    TRY(fcntl(twin, F_SETFD, FD_CLOEXEC));
    TRY(fcntl(twin, F_GETFD));
    TRY(fcntl(fd, F_SETFL, O_APPEND | O_NONBLOCK | O_WRONLY | O_EXCL));
    say("flags %o\n", fcntl(fd, F_GETFL) & ~0100000);
    say("shared flags %o\n", fcntl(twin, F_GETFL) & ~0100000);
    TRY(lseek(fd, 0, SEEK_SET));
    TRY(write(fd, "ab", 2));
    TRY(lseek(fd, 0, SEEK_CUR));
    TRY(fcntl(fd, F_SETFL, 0));
    TRY(fcntl(fd, 9999, 0));
    TRY(fcntl(99, F_GETFD));
    TRY(fcntl(fd, F_GETOWN));
    TRY(fcntl(fd, F_GET_SEALS));

    PART("close_range");
    TRY(close_range(30, 35, 0));
    TRY(fcntl(30, F_GETFD));
    TRY(fcntl(40, F_GETFD));
    TRY(close_range(20, 21, CLOSE_RANGE_CLOEXEC));
    TRY(fcntl(20, F_GETFD));
    TRY(close_range(5, 4, 0));
    TRY(close_range(5, 6, 64));
    TRY(close_range(20, ~0U, 0));
    TRY(fcntl(21, F_GETFD));
    TRY(fcntl(twin, F_GETFD));

    PART("the limit");
    struct rlimit limit = {.rlim_cur = 10, .rlim_max = 10};
    struct rlimit old;
    MUST(getrlimit(RLIMIT_NOFILE, &old));
    limit.rlim_max = old.rlim_max;
    TRY(setrlimit(RLIMIT_NOFILE, &limit));
    int last = -1, next;
    while ((next = open("f", O_RDONLY)) >= 0)
        last = next;
    say("last %d then %s\n", last, error_name(errno));
    TRY(dup(0));
    TRY(dup2(0, 10));
    TRY(fcntl(0, F_DUPFD, 10));
    int ends[2];
    TRY(pipe(ends));
    TRY(close(last));
    TRY(pipe(ends));
    TRY(open("f", O_RDONLY));
    close_range(5, ~0U, 0);
    TRY(setrlimit(RLIMIT_NOFILE, &old));

    PART("many");
    int count = 0;
    while (count < 900 && open("f", O_RDONLY) >= 0)
        count++;
    say("opened %d\n", count);
    TRY(close_range(5, ~0U, 0));

    PART("locks");
    int other = MUST(open("f", O_RDWR));
    TRY(flock(fd, LOCK_SH));
    TRY(flock(other, LOCK_SH | LOCK_NB));
    TRY(flock(other, LOCK_EX | LOCK_NB));
    TRY(flock(fd, LOCK_UN));
    TRY(flock(other, LOCK_EX | LOCK_NB));
    TRY(flock(fd, LOCK_SH | LOCK_NB));
    TRY(flock(fd, 64));
    TRY(flock(99, LOCK_SH));
    TRY(flock(other, LOCK_UN));
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 2, .l_len = 5};
    TRY(fcntl(fd, F_SETLK, &lock));
    TRY(fcntl(other, F_SETLK, &lock)); /* the same process: no conflict */
    lock.l_type = F_RDLCK;
    TRY(fcntl(fd, F_GETLK, &lock));
    say("type %d\n", lock.l_type == F_UNLCK);
    lock.l_type = F_UNLCK;
    TRY(fcntl(fd, F_SETLK, &lock));
    lock = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 4};
    TRY(fcntl(fd, F_OFD_SETLK, &lock));
    TRY(fcntl(other, F_OFD_SETLK, &lock));
    lock.l_start = 4;
    TRY(fcntl(other, F_OFD_SETLK, &lock));
    lock = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 100};
    TRY(fcntl(other, F_OFD_GETLK, &lock));
    say("type %d start %ld len %ld pid %d\n", lock.l_type == F_WRLCK, (long)lock.l_start,
        (long)lock.l_len, lock.l_pid);
    TRY(fcntl(other, F_SETLK, (struct flock *)8));
    lock.l_type = 77;
    TRY(fcntl(other, F_SETLK, &lock));

    PART("ioctl");
    int number = 5;
    TRY(ioctl(fd, TCGETS, data));
    TRY(ioctl(fd, TIOCGWINSZ, data));
    TRY(ioctl(99, TCGETS, data));
    TRY(ioctl(fd, 0x12345678, data));
    TRY(isatty(fd));
    int pipes[2];
    MUST(pipe(pipes));
    TRY(ioctl(pipes[0], FIONBIO, &number));
    TRY(read(pipes[0], data, 1));
    TRY(ioctl(pipes[0], FIOCLEX));
    TRY(fcntl(pipes[0], F_GETFD));
    TRY(ioctl(pipes[0], FIONCLEX));
    TRY(fcntl(pipes[0], F_GETFD));
    TRY(ioctl(fd, FIONREAD, &number));
    int in_memory = memfd_create("one", 0), second = memfd_create("second", 0);
    TRY(ioctl(in_memory, FICLONE, second));
    TRY(ioctl(in_memory, FICLONERANGE, &(struct file_clone_range){.src_fd = second}));
    shared_table(own_path);
    leave_scratch(scratch);
    return 0;
}
