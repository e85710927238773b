/* Linux' asynchronous input and output: requests, results, waiting, errors. */
#include "guest.h"
#include <linux/aio_abi.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <sys/wait.h>

static aio_context_t context;

static long setup(unsigned count, aio_context_t *id)
{
    return syscall(SYS_io_setup, count, id);
}

static long destroy(aio_context_t id)
{
    return syscall(SYS_io_destroy, id);
}

static long submit(aio_context_t id, long count, struct iocb **requests)
{
    return syscall(SYS_io_submit, id, count, requests);
}

static long results(long least, long most, struct io_event *events, struct timespec *timeout)
{
    return syscall(SYS_io_getevents, context, least, most, events, timeout);
}

static struct iocb request(int operation, int fd, void *buffer, size_t len, long offset)
{
    struct iocb made = {.aio_lio_opcode = (uint16_t)operation, .aio_fildes = (uint32_t)fd};
    made.aio_buf = (uint64_t)(uintptr_t)buffer;
    made.aio_nbytes = len;
    made.aio_offset = offset;
    made.aio_data = 77;
    return made;
}

/* Submits one request and shows its result. */
static void perform(const char *name, struct iocb one)
{
    struct iocb *list[] = {&one};
    long taken = submit(context, 1, list);
    if (taken != 1) {
        say("%s is not taken: %ld %s\n", name, taken, error_name(errno));
        return;
    }
    struct io_event event;
    MUST(results(1, 1, &event, NULL));
    say("%s: %lld, data %llu\n", name, event.res, event.data);
    IS(event.obj == (uint64_t)(uintptr_t)&one);
}

static void contexts(void)
{
    PART("contexts");
    aio_context_t id = 5;
    TRY(setup(1, &id));
    id = 0;
    TRY(setup(0, &id));
    TRY(setup(1 << 30, &id));
    TRY(setup(1, (void *)8));
    TRY(setup(8, &id));
    TRY(destroy(id));
    TRY(destroy(id));
    TRY(destroy(0));
    TRY(submit(id, 0, NULL));
    context = id;
    struct io_event event;
    TRY(results(0, 1, &event, NULL));
    context = 0;
}

static void requests(void)
{
    PART("requests");
    char *scratch = enter_scratch(), text[64] = "";
    int fd = MUST(open("file", O_RDWR | O_CREAT, 0600)), reader = MUST(open("file", O_RDONLY));
    MUST(setup(8, &context));
    perform("write", request(IOCB_CMD_PWRITE, fd, "hello world", 11, 0));
    perform("write at 20", request(IOCB_CMD_PWRITE, fd, "far", 3, 20));
    perform("read", request(IOCB_CMD_PREAD, fd, text, 5, 6));
    say("\"%s\"\n", text);
    perform("read at the end", request(IOCB_CMD_PREAD, fd, text, 5, 23));
    struct iovec vectors[] = {{text, 2}, {text + 10, 3}};
    perform("readv", request(IOCB_CMD_PREADV, fd, vectors, 2, 0));
    say("\"%.2s\" \"%.3s\"\n", text, text + 10);
    perform("writev", request(IOCB_CMD_PWRITEV, fd, vectors, 2, 30));
    perform("fsync", request(IOCB_CMD_FSYNC, fd, NULL, 0, 0));
    perform("fdsync", request(IOCB_CMD_FDSYNC, fd, NULL, 0, 0));
    perform("write without permission", request(IOCB_CMD_PWRITE, reader, "x", 1, 0));
    perform("read into nothing", request(IOCB_CMD_PREAD, fd, (void *)8, 5, 0));
    perform("bad descriptor", request(IOCB_CMD_PREAD, 99, text, 5, 0));
    perform("unknown", request(99, fd, text, 5, 0));
    struct iocb odd = request(IOCB_CMD_PREAD, fd, text, 5, 0);
    odd.aio_reserved2 = 1;
    perform("reserved", odd);
    say("position %ld\n", (long)lseek(fd, 0, SEEK_CUR));

    PART("several");
    struct iocb first = request(IOCB_CMD_PWRITE, fd, "1", 1, 0), bad = request(99, fd, NULL, 0, 0);
    struct iocb second = request(IOCB_CMD_PWRITE, fd, "2", 1, 1);
    struct iocb *list[] = {&first, &second, &bad, &first};
    TRY(submit(context, 4, list));
    TRY(submit(context, -1, list));
    TRY(submit(context, 0, list));
    TRY(submit(context, 1, (void *)8));
    struct io_event events[8];
    struct timespec none = {0, 0}, soon = {0, 20000000};
    TRY(results(3, 2, events, NULL));
    TRY(results(-1, 2, events, NULL));
    TRY(results(1, 8, events, &none));
    TRY(results(1, 8, events, &none));
    TRY(results(1, 8, events, &soon));
    TRY(syscall(SYS_io_cancel, context, &first, events));

    PART("eventfd");
    int counter = MUST(eventfd(0, 0));
    first.aio_flags = IOCB_FLAG_RESFD;
    first.aio_resfd = (uint32_t)counter;
    TRY(submit(context, 1, list));
    uint64_t count;
    MUST(read(counter, &count, 8));
    say("count %llu\n", (unsigned long long)count);
    first.aio_resfd = (uint32_t)fd;
    TRY(submit(context, 1, list));
    TRY(results(1, 8, events, &none));

    PART("a child has none");
    pid_t child = MUST(fork());
    if (!child) {
        TRY(submit(context, 1, list));
        _exit(0);
    }
    int status;
    MUST(waitpid(child, &status, 0));
    say("status %x\n", status);
    TRY(destroy(context));
    leave_scratch(scratch);
}

int main(void)
{
    contexts();
    requests();
    return 0;
}
