/* What every way to write to a file has to respect: RLIMIT_FSIZE with SIGXFSZ, and
 * that a write or truncation by anyone but root takes set-user-ID and set-group-ID
 * away, whichever call it is. */
#include "guest.h"
#include <linux/falloc.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/uio.h>
#include <sys/wait.h>

enum { LIMIT = 10000, SOURCE = 20000 };

static int exceeded, source, out, pair[2];
static loff_t at;
static char data[SOURCE];

static void count_signal(int signal)
{
    (void)signal;
    exceeded++;
}

/* A call that has written, or not: its result, the signals, and the file after it. */
#define WRITES(call)                                                                               \
    do {                                                                                           \
        exceeded = 0;                                                                              \
        TRY(call);                                                                                 \
        after();                                                                                   \
    } while (0)

static void after(void)
{
    struct stat st;
    MUST(fstat(out, &st));
    say("  %d signals, size %ld, position %ld\n", exceeded, (long)st.st_size,
        (long)lseek(out, 0, SEEK_CUR));
}

static void fresh(const char *name, off_t size)
{
    if (out > 0)
        close(out);
    unlink(name);
    out = (int)MUST(open(name, O_RDWR | O_CREAT | O_TRUNC, 0644));
    MUST(ftruncate(out, size));
    MUST(lseek(source, 0, SEEK_SET));
}

static void fill_pipe(size_t len)
{
    if (pair[0] > 0) {
        close(pair[0]);
        close(pair[1]);
    }
    MUST(pipe2(pair, O_NONBLOCK));
    MUST(write(pair[1], data, len));
}

static void limit_to(rlim_t bytes)
{
    struct rlimit limit;
    MUST(getrlimit(RLIMIT_FSIZE, &limit));
    limit.rlim_cur = bytes;
    MUST(setrlimit(RLIMIT_FSIZE, &limit));
}

static void limits(void)
{
    struct iovec parts[2] = {{data, 6000}, {data, 6000}};
    signal(SIGXFSZ, count_signal);
    limit_to(LIMIT);

    PART("write");
    fresh("out", 0);
    WRITES(write(out, data, 9000));
    WRITES(write(out, data, 9000));
    WRITES(write(out, data, 1));
    WRITES(write(out, data, 0));
    WRITES(pwrite(out, data, 10, 9995));
    WRITES(pwrite(out, data, 10, 10000));
    WRITES(pwrite(out, data, 10, 5000));
    WRITES(pwritev2(out, parts, 2, 0, 0));
    WRITES(pwritev2(out, parts, 2, -1, RWF_APPEND));
    fresh("out", 0);
    WRITES(writev(out, parts, 2));
    WRITES(writev(out, parts, 2));
    MUST(fcntl(out, F_SETFL, O_APPEND));
    WRITES(write(out, data, 10));
    WRITES(pwrite(out, data, 10, 0));

    PART("sendfile");
    fresh("out", 0);
    WRITES(sendfile(out, source, NULL, 9000));
    WRITES(sendfile(out, source, NULL, 9000));
    WRITES(sendfile(out, source, NULL, 9000));
    say("source at %ld\n", (long)lseek(source, 0, SEEK_CUR));

    PART("copy_file_range");
    fresh("out", 0);
    WRITES(copy_file_range(source, NULL, out, NULL, 9000, 0));
    WRITES(copy_file_range(source, NULL, out, NULL, 9000, 0));
    WRITES(copy_file_range(source, NULL, out, NULL, 9000, 0));
    say("source at %ld\n", (long)lseek(source, 0, SEEK_CUR));
    at = 12000;
    WRITES(copy_file_range(source, NULL, out, &at, 10, 0));

    PART("splice");
    fresh("out", 0);
    fill_pipe(12000);
    WRITES(splice(pair[0], NULL, out, NULL, 12000, 0));
    WRITES(splice(pair[0], NULL, out, NULL, 12000, 0));
    WRITES(read(pair[0], data, sizeof data));
    fill_pipe(100);
    at = 10000;
    WRITES(splice(pair[0], NULL, out, &at, 100, 0));
    at = 9999;
    WRITES(splice(pair[0], NULL, out, &at, 100, 0));
    say("at %ld\n", (long)at);

    PART("size");
    fresh("out", 0);
    WRITES(ftruncate(out, 10000));
    WRITES(ftruncate(out, 10001));
    WRITES(truncate("out", 10001));
    WRITES(fallocate(out, 0, 5000, 5001));
    WRITES(fallocate(out, 0, 0, 10000));
    WRITES(fallocate(out, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 20000));
    limit_to(RLIM_INFINITY);
    fresh("out", 20000);
    limit_to(LIMIT);
    WRITES(ftruncate(out, 15000));
    WRITES(truncate("out", 14000));
    WRITES(ftruncate(out, 14000));
    WRITES(ftruncate(out, 14001));
    WRITES(fallocate(out, 0, 12000, 1000));
    WRITES(pwrite(out, data, 10, 12000));

    PART("through a mapping");
    char *page = mmap(NULL, 16384, PROT_READ | PROT_WRITE, MAP_SHARED, out, 0);
    page[12288] = 'x';
    after();
    MUST(munmap(page, 16384));

    PART("memory files");
    close(out);
    out = (int)MUST(syscall(SYS_memfd_create, "x", 0));
    WRITES(write(out, data, 12000));
    WRITES(write(out, data, 12000));
    WRITES(sendfile(out, source, NULL, 10));
    WRITES(ftruncate(out, 10001));

    PART("what is no file has no limit");
    limit_to(1);
    fill_pipe(100);
    MUST(lseek(source, 0, SEEK_SET));
    WRITES(sendfile(pair[1], source, NULL, 100));
    int null = (int)MUST(open("/dev/null", O_WRONLY));
    WRITES(write(null, data, 100));
    WRITES(sendfile(null, source, NULL, 100));
    limit_to(0);
    WRITES(write(null, data, 100));
    close(null);

    PART("without a handler");
    for (int i = 0; i < 3; i++) {
        int status;
        pid_t pid = fork();
        if (pid == 0) {
            signal(SIGXFSZ, i == 2 ? SIG_IGN : SIG_DFL);
            MUST(setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0}));
            fresh("other", 0);
            if (i == 0)
                sendfile(out, source, NULL, 1);
            else
                copy_file_range(source, NULL, out, NULL, 1, 0);
            _exit(errno == EFBIG ? 1 : 2);
        }
        MUST(waitpid(pid, &status, 0));
        say("status %x\n", status & 0xff7f);
    }
    limit_to(RLIM_INFINITY);
}

/* Which way to write. */
static const char *const ways[] = {
    "write",     "pwrite",  "writev",         "pwritev2",        "sendfile", "copy_file_range",
    "splice",    "ftruncate", "truncate",     "the same size",   "fallocate", "keep size",
    "punch",     "O_TRUNC", "nothing",        "a failed write",  "mapping",  "append",
};

static void write_by(int way)
{
    struct iovec part = {data, 10};
    loff_t place = 0;
    MUST(lseek(source, 0, SEEK_SET));
    switch (way) {
    case 0: MUST(write(out, data, 10)); break;
    case 1: MUST(pwrite(out, data, 10, 5)); break;
    case 2: MUST(writev(out, &part, 1)); break;
    case 3: MUST(pwritev2(out, &part, 1, 0, 0)); break;
    case 4: MUST(sendfile(out, source, NULL, 10)); break;
    case 5: MUST(copy_file_range(source, NULL, out, NULL, 10, 0)); break;
    case 6:
        fill_pipe(10);
        MUST(splice(pair[0], NULL, out, &place, 10, 0));
        break;
    case 7: MUST(ftruncate(out, 3)); break;
    case 8: MUST(truncate("marked", 3)); break;
    case 9: MUST(ftruncate(out, 100)); break;
    case 10: MUST(fallocate(out, 0, 0, 200)); break;
    case 11: MUST(fallocate(out, FALLOC_FL_KEEP_SIZE, 0, 200)); break;
    case 12: MUST(fallocate(out, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 50)); break;
    case 13: close((int)MUST(open("marked", O_WRONLY | O_TRUNC))); break;
    case 14: MUST(write(out, data, 0)); break;
    case 15: MUST(write(out, (void *)8, 10) == -1 ? 0 : -1); break;
    case 16: {
        char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, out, 0);
        page[0] = 'm';
        munmap(page, 4096);
        break;
    }
    case 17:
        MUST(fcntl(out, F_SETFL, O_APPEND));
        MUST(write(out, data, 10));
        break;
    }
}

/* What is left of the mode of a file after a write by somebody. */
static unsigned mode_after(int way, unsigned mode, bool as_root)
{
    struct stat st;
    int status;
    fresh("marked", 100);
    MUST(fchown(out, 1234, 1234));
    MUST(fchmod(out, mode));
    pid_t pid = fork();
    if (pid == 0) {
        if (!as_root) {
            MUST(setresgid(1234, 1234, 1234));
            MUST(setresuid(1234, 1234, 1234));
        }
        write_by(way);
        _exit(0);
    }
    MUST(waitpid(pid, &status, 0));
    if (status)
        say("%s ends with %x\n", ways[way], status);
    MUST(fstat(out, &st));
    return st.st_mode & 07777;
}

static void privileges(void)
{
    PART("set-user-ID and set-group-ID");
    MUST(chmod(".", 0777));
    for (int way = 0; way < (int)(sizeof ways / sizeof *ways); way++)
        say("%s: %o %o, by root %o\n", ways[way], mode_after(way, 06777, false),
            mode_after(way, 06767, false), mode_after(way, 06777, true));
}

static void seals(void)
{
    char path[64];
    PART("seals, by way of a path");
    close(out);
    out = (int)MUST(syscall(SYS_memfd_create, "x", MFD_ALLOW_SEALING));
    MUST(ftruncate(out, 100));
    MUST(fcntl(out, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW));
    snprintf(path, sizeof path, "/proc/self/fd/%d", out);
    WRITES(truncate(path, 50));
    WRITES(truncate(path, 150));
    WRITES(truncate(path, 100));
    WRITES(open(path, O_RDWR | O_TRUNC));
    MUST(fcntl(out, F_ADD_SEALS, F_SEAL_WRITE));
    WRITES(sendfile(out, source, NULL, 10));
    fill_pipe(10);
    at = 0;
    WRITES(splice(pair[0], NULL, out, &at, 10, 0));
    WRITES(read(pair[0], data, sizeof data));
}

/* What somebody who watches a file has heard of. */
static void heard(int watch)
{
    char buffer[4096];
    ssize_t got = read(watch, buffer, sizeof buffer);
    say("  heard:");
    for (ssize_t at = 0; at < got;) {
        struct inotify_event *event = (void *)(buffer + at);
        say(" %s%x", event->wd == 1 ? "source " : "", event->mask);
        at += (ssize_t)(sizeof *event + event->len);
    }
    say("\n");
}

static void watchers(void)
{
    struct iovec part = {data, 10};
    PART("watchers");
    fresh("watched", 0);
    int watch = (int)MUST(inotify_init1(IN_NONBLOCK));
    MUST(inotify_add_watch(watch, "source", IN_ACCESS | IN_MODIFY));
    MUST(inotify_add_watch(watch, "watched", IN_ACCESS | IN_MODIFY));
    TRY(sendfile(out, source, NULL, 10));
    heard(watch);
    TRY(copy_file_range(source, NULL, out, NULL, 10, 0));
    heard(watch);
    fill_pipe(10);
    TRY(splice(pair[0], NULL, out, NULL, 10, 0));
    heard(watch);
    TRY(splice(pair[0], NULL, out, NULL, 10, SPLICE_F_NONBLOCK));
    heard(watch);
    TRY(splice(source, NULL, pair[1], NULL, 10, 0));
    heard(watch);
    TRY(pwritev2(out, &part, 1, -1, RWF_APPEND));
    heard(watch);
    close(watch);
}

int main(void)
{
    char *scratch = enter_scratch();
    source = (int)MUST(open("source", O_RDWR | O_CREAT | O_TRUNC, 0644));
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = "0123456789"[i % 10];
    MUST(write(source, data, sizeof data));
    limits();
    seals();
    watchers();
    if (geteuid() == 0)
        privileges();
    leave_scratch(scratch);
    return 0;
}
