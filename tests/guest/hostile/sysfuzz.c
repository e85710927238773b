/* A fuzzer of the Thaw kernel's system calls, from inside a sandbox.
 *
 *   sysfuzz [--seed N] [--seconds N] [--batches N] [--first N] [--calls N]
 *           [--threads N] [--only NUMBER[,NUMBER...]] [--skip NUMBER[,NUMBER...]] [--verbose]
 *
 * The calls come from calls.h, which the kernel's table of system calls
 * generates, so that a new call is covered by itself. Arguments are valid,
 * border and wild: descriptors of every kind, pointers to valid, read-only,
 * inaccessible and missing memory and into the kernel, sizes and flags at their
 * limits, structures with plausible and implausible fields.
 *
 * A batch is a child process with some threads that make a number of calls each.
 * The parent makes no wild call itself: it starts a batch, kills it when its time
 * is over, kills everything that the batch has left, and goes on. All numbers
 * of a batch follow from the seed and the batch's number, so that
 * `--seed S --first B --batches 1 --threads 1` repeats one (the order of several
 * threads cannot be repeated). `--verbose` prints every call before it is made.
 *
 * Exit code 0: all batches could be ended. 3: a process did not end by SIGKILL.
 * The test looks for panics of the kernel from outside.
 *
 * It runs only in a sandbox: on a host it would do damage. */
#include "../c/guest.h"
#include "calls.h"
#include <arpa/inet.h>
#include <linux/futex.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/prctl.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <termios.h>
#include <ucontext.h>

#define PAGE 4096UL
#define KERNEL_BASE 0x7e0000000000UL
#define LAYOUT_END 0x7f0000000000UL
#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ------------------------------------------------------------ what is called */

struct call {
    long number;
    const char *name;
    const char *arguments; /* f: descriptor, i: number, x: flags or an address, s: string, o: mode */
};

static const struct call calls[] = {
#define CALL(number, name, arguments) {number, #name, arguments},
    THAW_CALLS(CALL)
#undef CALL
};

/* ------------------------------------------------------------ options */

static uint64_t seed = 1;
static long seconds = 5, batches = LONG_MAX, first_batch, calls_a_thread = 400, threads_wanted = 3;
static bool verbose;

struct numbers {
    long of[64];
    size_t count;
};

static struct numbers only, skipped;

/* ------------------------------------------------------------ random numbers */

struct random {
    uint64_t state;
    bool tame; /* the present call gets arguments that are valid, most of the time */
};

static uint64_t next(struct random *random)
{
    uint64_t z = random->state += 0x9e3779b97f4a7c15UL;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9UL;
    z = (z ^ z >> 27) * 0x94d049bb133111ebUL;
    return z ^ z >> 31;
}

static uint64_t below(struct random *random, uint64_t limit)
{
    return next(random) % limit;
}

static bool one_in(struct random *random, uint64_t chances)
{
    return below(random, chances) == 0;
}

#define PICK(random, array) ((array)[below(random, COUNT(array))])

/* ------------------------------------------------------------ what parent and batch share */

#define THREADS_MAX 8

struct shared {
    uint64_t calls;              /* made so far */
    uint64_t succeeded;          /* of these */
    uint64_t of_number[512];     /* made, by number */
    long last[THREADS_MAX][7];   /* what each thread called last */
};

static struct shared *shared;

/* ------------------------------------------------------------ a batch's things */

#define ARENA_PAGES 96
#define FDS_MAX 96
#define LOG_FD 1000

static char *arena;      /* readable and writable, then a page without access */
static char *read_only;  /* two pages */
static char *no_access;  /* two pages */
static char *past_file;  /* a shared mapping, of which the file holds one page */
static int fds[FDS_MAX];
static size_t fd_count;
/* Where in `fds` the descriptors of a kind lie that some calls are for. */
static struct group {
    size_t first, end;
} files, directories, sockets, events;
static long results[16]; /* of the last calls */
static pid_t parent_pid;
static long ipc_ids[3];

struct worker {
    struct random random;
    int index;
    volatile pid_t tid;
    volatile long made;
    volatile bool over;
};

static struct worker workers[THREADS_MAX];

static long call6(long number, const long *a)
{
    long result;
    register long r10 __asm__("r10") = a[3];
    register long r8 __asm__("r8") = a[4];
    register long r9 __asm__("r9") = a[5];
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "0"(number), "D"(a[0]), "S"(a[1]), "d"(a[2]), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}

/* A call that may return twice: the second time, without touching any memory,
 * the thread exits. */
static long call_twice(long number, const long *a)
{
    long result;
    register long r10 __asm__("r10") = a[3];
    register long r8 __asm__("r8") = a[4];
    register long r9 __asm__("r9") = a[5];
    __asm__ volatile("syscall\n"
                     "test %%rax, %%rax\n"
                     "jnz 1f\n"
                     "mov $60, %%eax\n"
                     "xor %%edi, %%edi\n"
                     "syscall\n"
                     "1:"
                     : "=a"(result)
                     : "0"(number), "D"(a[0]), "S"(a[1]), "d"(a[2]), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}

/* Returns from a signal that never was, with registers from the arena. */
static void return_from_nothing(void *stack)
{
    __asm__ volatile("mov %0, %%rsp\n"
                     "mov $15, %%eax\n"
                     "syscall\n"
                     "mov $60, %%eax\n"
                     "syscall\n"
                     :
                     : "r"(stack)
                     : "memory");
}

/* ------------------------------------------------------------ values */

static const uint64_t borders[] = {
    0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 63, 64, 65, 100, 127, 128,
    255, 256, 511, 512, 1023, 1024, 1025, 4095, 4096, 4097, 8191, 8192, 65535, 65536, 1 << 20,
    999999999, 1000000000, 0x7ffffffe, 0x7fffffff, 0x80000000, 0x80000001, 0xfffffffe, 0xffffffff,
    0x100000000, 0x100000001, 1UL << 40, 1UL << 46, 1UL << 47, (1UL << 47) - PAGE, 1UL << 62,
    0x7ffffffffffff000, 0x7ffffffffffffffe, 0x7fffffffffffffff, 0x8000000000000000, 0x8000000000000001,
    (uint64_t)-1, (uint64_t)-2, (uint64_t)-100, (uint64_t)-4095, (uint64_t)-4096, (uint64_t)-4097,
    (uint64_t)INT_MIN, KERNEL_BASE, LAYOUT_END, LAYOUT_END - 1,
};

/* Calls that end the caller, or whose effects would reach the parent, are made in a
 * special way; the rest of these numbers serve to tell arguments apart. */
enum {
    NR_RT_SIGRETURN = 15, NR_CLONE = 56, NR_FORK = 57, NR_VFORK = 58, NR_EXIT = 60, NR_KILL = 62,
    NR_SIGQUEUE = 129, NR_TKILL = 200, NR_EXIT_GROUP = 231, NR_TGKILL = 234, NR_TGSIGQUEUE = 297,
    NR_PRLIMIT = 302, NR_PIDFD_OPEN = 434, NR_CLONE3 = 435, NR_PTRACE = 101,
};

static bool is_tame(struct random *random)
{
    return random->tame && below(random, 12);
}

static long any_fd(struct random *random)
{
    if (is_tame(random) && fd_count)
        return fds[below(random, fd_count)];
    switch (below(random, 16)) {
    case 0: return (long)PICK(random, borders);
    case 1: return AT_FDCWD;
    case 2: return results[below(random, COUNT(results))];
    case 3: return (long)below(random, 64);
    default: return fd_count ? fds[below(random, fd_count)] : 0;
    }
}

static uint64_t kernel_addresses[] = {
    KERNEL_BASE, KERNEL_BASE + PAGE, KERNEL_BASE - 8, KERNEL_BASE - PAGE, KERNEL_BASE + (1UL << 30),
    KERNEL_BASE + (64UL << 30), LAYOUT_END - PAGE, LAYOUT_END, LAYOUT_END + PAGE, 0x10000, 0x11000,
    0x7fff00000000, 0x7ffffffff000, 0x7fffffffffff, 0x800000000000, 0xffff800000000000,
    0xffffffffff600000, 0xfffffffffffff000, 0xdead000000000000, PAGE, 8, 1,
};

static void *valid_memory(struct random *random)
{
    uint64_t at = below(random, (ARENA_PAGES - 2) * PAGE);
    return arena + (one_in(random, 8) ? at : at & ~63UL);
}

static void *any_pointer(struct random *random)
{
    if (is_tame(random))
        return valid_memory(random);
    switch (below(random, 24)) {
    case 0: return NULL;
    case 1: return arena + ARENA_PAGES * PAGE - PICK(random, borders) % (2 * PAGE);
    case 2: return read_only + below(random, 2 * PAGE);
    case 3: return no_access + below(random, 2 * PAGE);
    case 4: return past_file + below(random, 4 * PAGE);
    case 5: return (void *)PICK(random, kernel_addresses);
    case 6: return (void *)(PICK(random, kernel_addresses) + below(random, PAGE));
    case 7: return (void *)PICK(random, borders);
    case 8: return arena + (below(random, ARENA_PAGES) << 12);
    case 9: return (void *)results[below(random, COUNT(results))];
    default: return valid_memory(random);
    }
}

static const char *const paths[] = {
    "", ".", "..", "/", "a", "b", "c", "d", "d/a", "d/b", "d/d/d", "a/b", "link", "dangling", "loop",
    "loop/x", "fifo", "sock", "./././a", "d/../a", "../a", "//tmp//", "/tmp", "/bind", "/bind/a",
    "/bind/d", "/bind/d/a", "/bind/link", "/bind/..", "/lower", "/lower/file", "/lower/link",
    "/lower/sub", "/lower/sub/deep", "/proc", "/proc/self", "/proc/self/maps", "/proc/self/mem",
    "/proc/self/status", "/proc/self/stat", "/proc/self/fd", "/proc/self/fd/3", "/proc/self/fd/10",
    "/proc/self/exe", "/proc/self/cwd", "/proc/self/root", "/proc/self/root/tmp/a", "/proc/self/task",
    "/proc/self/environ", "/proc/self/cmdline", "/proc/self/smaps", "/proc/self/limits",
    "/proc/self/mountinfo", "/proc/self/comm", "/proc/self/oom_score_adj", "/proc/1/maps",
    "/proc/1/fd", "/proc/thread-self", "/proc/meminfo", "/proc/cpuinfo", "/proc/stat", "/proc/uptime",
    "/proc/loadavg", "/proc/net/tcp", "/proc/net/unix", "/proc/net/udp", "/proc/net/dev",
    "/proc/sys/kernel/hostname", "/proc/sys/kernel/random/uuid", "/proc/sys/vm/overcommit_memory",
    "/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg", "/proc/999999/stat", "/dev",
    "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/ptmx",
    "/dev/pts", "/dev/pts/0", "/dev/pts/1", "/dev/shm", "/dev/shm/a", "/dev/fd/3", "/dev/stdin", "/sys",
    "/sys/devices/system/cpu", "/sys/devices/system/cpu/online", "/etc/resolv.conf", "/etc/hosts",
    "user.a", "user.", "security.capability", "trusted.x", "system.posix_acl_access", "\xff\xfe",
    "thaw", "memfd", "\n",
};

static char *put_path(struct random *random, char *at)
{
    switch (below(random, 20)) {
    case 0: /* a component of 254 to 257 bytes */
        memset(at, 'n', 260);
        at[254 + below(random, 4)] = '\0';
        break;
    case 1: { /* about PATH_MAX bytes */
        size_t len = 4090 + below(random, 10);
        for (size_t i = 0; i < len; i++)
            at[i] = i % 2 ? '/' : '.';
        at[len] = '\0';
        break;
    }
    case 2: /* deep */
        for (int i = 0; i < 40; i++)
            memcpy(at + 2 * i, "d/", 3);
        break;
    case 3:
        snprintf(at, 64, "/proc/self/fd/%ld", any_fd(random));
        break;
    case 4:
        snprintf(at, 64, "/proc/%ld/stat", (long)PICK(random, borders));
        break;
    case 5:
        snprintf(at, 64, "%s/%s", PICK(random, paths), PICK(random, paths));
        break;
    default: strcpy(at, PICK(random, paths));
    }
    return at;
}

static void *any_string(struct random *random)
{
    switch (below(random, 16)) {
    case 0: return any_pointer(random);
    case 1: { /* without an end before the page without access */
        char *end = arena + ARENA_PAGES * PAGE;
        size_t len = below(random, 64);
        memset(end - len, 'x', len);
        return end - len;
    }
    default: return put_path(random, arena + (below(random, ARENA_PAGES - 4) << 12));
    }
}

static const uint64_t flag_words[] = {
    0, 0, 1, 2, 3, 4, 7, 8, 0x10, 0x20, 0x22, 0x32, 0x40, 0x80, 0x100, 0x400, 0x800, 0x1000, 0x4000,
    O_CREAT | O_RDWR, O_CREAT | O_RDWR | O_TRUNC, O_CREAT | O_EXCL | O_WRONLY, O_PATH, O_DIRECTORY,
    O_TMPFILE | O_RDWR, O_NONBLOCK, O_CLOEXEC, O_CLOEXEC | O_NONBLOCK, O_APPEND | O_WRONLY, O_NOFOLLOW,
    AT_SYMLINK_NOFOLLOW, AT_EMPTY_PATH, AT_REMOVEDIR, MAP_PRIVATE | MAP_ANONYMOUS,
    MAP_SHARED | MAP_ANONYMOUS, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, MAP_PRIVATE | MAP_POPULATE,
    MAP_SHARED, MAP_PRIVATE, MAP_SHARED | MAP_FIXED, MS_SYNC, MSG_DONTWAIT, MSG_DONTWAIT | MSG_PEEK,
    MSG_DONTWAIT | MSG_TRUNC, MSG_OOB, MSG_WAITALL, MSG_CMSG_CLOEXEC, MSG_NOSIGNAL | MSG_MORE,
    IPC_CREAT | 0600, IPC_NOWAIT, WNOHANG, WNOHANG | WUNTRACED | WCONTINUED, SIGCHLD,
    CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM,
    CLONE_VM | CLONE_VFORK | SIGCHLD, CLONE_FILES | SIGCHLD, CLONE_PIDFD | SIGCHLD,
    CLONE_PARENT_SETTID | CLONE_CHILD_CLEARTID | CLONE_CHILD_SETTID | SIGCHLD, CLONE_PARENT | SIGCHLD,
    CLONE_NEWNS, CLONE_NEWUSER, EPOLLIN | EPOLLET, FUTEX_PRIVATE_FLAG | FUTEX_WAKE,
};

static uint64_t any_flags(struct random *random)
{
    if (is_tame(random))
        return one_in(random, 3) ? 0 : PICK(random, flag_words);
    switch (below(random, 8)) {
    case 0: return PICK(random, borders);
    case 1: return 1UL << below(random, 64);
    case 2: return (1UL << below(random, 32)) | (1UL << below(random, 32));
    case 3: return next(random) & next(random) & 0xffffffff;
    default: return PICK(random, flag_words);
    }
}

static uint64_t any_size(struct random *random)
{
    if (is_tame(random))
        return below(random, 200);
    switch (below(random, 4)) {
    case 0: return PICK(random, borders);
    case 1: return below(random, 64);
    case 2: return PAGE * below(random, 32) + below(random, 3) - 1;
    default: return below(random, 3 * PAGE);
    }
}

/* ------------------------------------------------------------ structures */

/* A time that is soon over, most of the time. */
static void put_time(struct random *random, uint64_t *at)
{
    at[0] = one_in(random, 12) ? PICK(random, borders) : 0;
    at[1] = one_in(random, 8) ? PICK(random, borders) : below(random, 2000000);
}

static size_t put_address(struct random *random, char *at)
{
    memset(at, 0, 128);
    switch (below(random, 6)) {
    case 0: {
        struct sockaddr_in *in = (void *)at;
        in->sin_family = AF_INET;
        in->sin_port = htons((uint16_t)(one_in(random, 3) ? PICK(random, borders) : 20000 + below(random, 4)));
        in->sin_addr.s_addr = one_in(random, 4) ? (uint32_t)next(random) : htonl(INADDR_LOOPBACK);
        return sizeof *in;
    }
    case 1: {
        struct sockaddr_in6 *in = (void *)at;
        in->sin6_family = AF_INET6;
        in->sin6_port = htons((uint16_t)(20000 + below(random, 4)));
        in->sin6_addr = one_in(random, 4) ? in6addr_any : in6addr_loopback;
        return sizeof *in;
    }
    case 2: {
        struct sockaddr_un *un = (void *)at;
        un->sun_family = AF_UNIX;
        strcpy(un->sun_path + one_in(random, 2), one_in(random, 2) ? "sock" : "a");
        return below(random, 112);
    }
    case 3: {
        struct sockaddr_nl *nl = (void *)at;
        nl->nl_family = AF_NETLINK;
        nl->nl_pid = (uint32_t)PICK(random, borders);
        nl->nl_groups = (uint32_t)PICK(random, borders);
        return sizeof *nl;
    }
    case 4: return 0; /* AF_UNSPEC */
    default:
        *(uint16_t *)at = (uint16_t)PICK(random, borders);
        return below(random, 128);
    }
}

static void put_vector(struct random *random, struct iovec *at, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        bool plain = !one_in(random, 4);
        at[i].iov_base = plain ? valid_memory(random) : any_pointer(random);
        at[i].iov_len = plain ? below(random, 256) : any_size(random);
    }
}

static void put_message(struct random *random, char *at)
{
    struct msghdr *message = (void *)at;
    char *control = at + 128, *address = at + 512;
    struct iovec *vector = (void *)(at + 640);
    memset(at, 0, 768);
    put_vector(random, vector, 4);
    message->msg_iov = one_in(random, 8) ? any_pointer(random) : vector;
    message->msg_iovlen = one_in(random, 8) ? PICK(random, borders) : below(random, 4);
    if (one_in(random, 3)) {
        message->msg_namelen = (socklen_t)put_address(random, address);
        message->msg_name = address;
    }
    if (one_in(random, 2)) {
        message->msg_control = one_in(random, 8) ? any_pointer(random) : control;
        message->msg_controllen = one_in(random, 4) ? PICK(random, borders) : 24 + 8 * below(random, 8);
        for (size_t off = 0; off < 256;) {
            struct cmsghdr *one = (void *)(control + off);
            size_t count = below(random, 5);
            one->cmsg_len = one_in(random, 4) ? PICK(random, borders) : CMSG_LEN(4 * count);
            one->cmsg_level = one_in(random, 8) ? (int)PICK(random, borders) : SOL_SOCKET;
            one->cmsg_type = one_in(random, 8) ? (int)PICK(random, borders) : 1 + (int)below(random, 2);
            int *data = (int *)CMSG_DATA(one);
            for (size_t i = 0; i < count; i++)
                data[i] = one_in(random, 4) ? getpid() : (int)any_fd(random);
            off += CMSG_SPACE(4 * count);
        }
    }
}

static void put_netlink(struct random *random, char *at)
{
    for (int i = 0; i < 3; i++, at += 64) {
        struct nlmsghdr *header = (void *)at;
        memset(at, 0, 64);
        header->nlmsg_len = (uint32_t)(one_in(random, 3) ? PICK(random, borders) : 16 + below(random, 48));
        header->nlmsg_type = (uint16_t)(one_in(random, 3) ? PICK(random, borders) : 16 + below(random, 100));
        header->nlmsg_flags = (uint16_t)(NLM_F_REQUEST | NLM_F_DUMP * below(random, 2) | NLM_F_ACK);
        for (size_t i = 16; i < 64; i += 2)
            *(uint16_t *)(at + i) = one_in(random, 3) ? (uint16_t)PICK(random, borders) : 0;
    }
}

/* Something plausible at an address of the arena; it may reach up to 1 KiB. */
static void put_structure(struct random *random, char *at)
{
    uint64_t *words = (void *)at;
    switch (below(random, 22)) {
    case 0: memset(at, 0, 256); break;
    case 1:
        for (int i = 0; i < 32; i++)
            words[i] = PICK(random, borders);
        break;
    case 2:
        for (int i = 0; i < 32; i++)
            words[i] = (uint64_t)(one_in(random, 2) ? any_pointer(random) : valid_memory(random));
        break;
    case 3: put_vector(random, (void *)at, 16); break;
    case 4: put_message(random, at); break;
    case 5: put_address(random, at); break;
    case 6:
        for (int i = 0; i < 4; i++)
            put_time(random, words + 2 * i);
        break;
    case 7: { /* pollfd, epoll_event */
        for (int i = 0; i < 16; i++) {
            ((int *)at)[2 * i] = (int)any_fd(random);
            ((int *)at)[2 * i + 1] = (int)any_flags(random);
        }
        break;
    }
    case 8:
        for (int i = 0; i < 32; i++)
            ((int *)at)[i] = (int)any_fd(random);
        break;
    case 9: /* sigset, sigaction, stack_t */
        words[0] = one_in(random, 2) ? (uint64_t)SIG_IGN : one_in(random, 2) ? 0 : next(random);
        words[1] = any_flags(random);
        words[2] = (uint64_t)any_pointer(random);
        words[3] = next(random);
        break;
    case 10: put_netlink(random, at); break;
    case 11: { /* flock, sembuf */
        uint16_t *shorts = (void *)at;
        shorts[0] = (uint16_t)below(random, 4);
        shorts[1] = (uint16_t)below(random, 4);
        words[1] = PICK(random, borders);
        words[2] = PICK(random, borders);
        words[3] = 0;
        break;
    }
    case 12: { /* sembuf */
        int16_t *shorts = (void *)at;
        for (int i = 0; i < 48; i++)
            shorts[i] = (int16_t)(i % 3 == 2 ? IPC_NOWAIT * below(random, 2) : (uint64_t)PICK(random, borders));
        break;
    }
    case 13: { /* clone_args, open_how, sched_attr */
        for (int i = 0; i < 11; i++)
            words[i] = one_in(random, 3) ? any_flags(random) : 0;
        words[4] = SIGCHLD;
        break;
    }
    case 14: { /* sigevent */
        int *ints = (void *)at;
        words[0] = next(random);
        ints[2] = (int)below(random, 66);
        ints[3] = (int)below(random, 5);
        ints[4] = getpid();
        break;
    }
    case 15: { /* msgbuf: a type, then text */
        words[0] = one_in(random, 3) ? PICK(random, borders) : 1;
        break;
    }
    case 16:
        for (int i = 0; i < 32; i++)
            words[i] = next(random);
        break;
    case 17: put_path(random, at); break;
    case 18: { /* a list of futexes whose owner ends: to itself, or wild */
        words[0] = (uint64_t)at;
        words[1] = PICK(random, borders);
        words[2] = (uint64_t)any_pointer(random);
        break;
    }
    case 19: { /* siginfo */
        int *ints = (void *)at;
        memset(at, 0, 128);
        ints[0] = (int)below(random, 66);
        ints[2] = (int)(one_in(random, 2) ? -1 : (int)PICK(random, borders));
        break;
    }
    case 20: { /* mmsghdr */
        put_message(random, at);
        break;
    }
    default: break; /* as it is */
    }
}

/* ------------------------------------------------------------ arguments */

static const uint32_t ioctls[] = {
    0x5401, 0x5402, 0x5403, 0x5404, 0x5405, 0x5409, 0x540a, 0x540b, 0x540c, 0x540d, 0x540e, 0x540f, 0x5410,
    0x5411, 0x5412, 0x5413, 0x5414, 0x541b, 0x5421, 0x5422, 0x5423, 0x5424, 0x5429, 0x5450, 0x5451, 0x5452,
    0x80045430, 0x40045431, 0x80045438, 0x80045439, 0x80045440, 0x5441, 0x8901, 0x8902, 0x8903, 0x8904,
    0x8905, 0x8906, 0x8907, 0x8910, 0x8912, 0x8913, 0x8914, 0x8915, 0x8916, 0x8919, 0x891b, 0x891d, 0x8921,
    0x8927, 0x8933, 0x8942, 0x40049409, 0x4020940d, 0x80086601, 0x40086602, 0xc020660b, 0x1268, 0x80081272,
    0x4000000, 0x7f000000,
};

/* The descriptors that a call is for, as far as its number says so. */
static const struct group *group_of(long number)
{
    bool is_of_sockets = (number >= 42 && number <= 55) || number == 288 || number == 299 || number == 307;
    bool is_of_events = number == 232 || number == 233 || number == 281 || number == 441 || number == 254 ||
                        number == 255 || number == 282 || number == 289 || number == 286 || number == 287 ||
                        number == 424 || number == 438;
    bool is_of_directories = (number >= 257 && number <= 269) || number == 78 || number == 217 ||
                             number == 316 || number == 332 || number == 437 || number == 439;
    bool is_of_files = number == 0 || number == 1 || (number >= 17 && number <= 20) || number == 8 ||
                       (number >= 72 && number <= 77) || number == 9 || number == 285 || number == 326;
    return is_of_sockets       ? &sockets
           : is_of_events      ? &events
           : is_of_directories ? &directories
           : is_of_files       ? &files
                               : NULL;
}

/* The argument `index` of `call`. */
static long argument(struct random *random, const struct call *call, int index)
{
    if (call->number == 16 && index == 1 && !one_in(random, 8))
        return PICK(random, ioctls);
    /* Sizes of signal sets are 8, or the call looks no further. */
    bool is_set_size = (call->number == 13 && index == 3) || (call->number == 14 && index == 3) ||
                       (call->number == 127 && index == 1) || (call->number == 128 && index == 3) ||
                       (call->number == 130 && index == 1) || (call->number == 271 && index == 4) ||
                       (call->number == 281 && index == 5) || (call->number == 441 && index == 5);
    if (is_set_size && !one_in(random, 8))
        return 8;
    const struct group *group = group_of(call->number);
    switch (call->arguments[index]) {
    case 'f':
        if (is_tame(random) && group && group->end > group->first)
            return fds[group->first + below(random, group->end - group->first)];
        return any_fd(random);
    case 's': return (long)any_string(random);
    case 'o': return one_in(random, 8) ? (long)PICK(random, borders) : (long)below(random, 010000);
    case 'x':
        if (one_in(random, 3))
            return (long)any_flags(random);
        void *pointer = any_pointer(random);
        if ((char *)pointer >= arena && (char *)pointer < arena + (ARENA_PAGES - 2) * PAGE && !one_in(random, 4))
            put_structure(random, pointer);
        return (long)pointer;
    default:
        switch (below(random, 8)) {
        case 0: return results[below(random, COUNT(results))];
        case 1: return getpid();
        case 2: return ipc_ids[below(random, COUNT(ipc_ids))];
        case 3: return (long)any_flags(random);
        case 4: case 5: return (long)below(random, 48);
        default: return (long)any_size(random);
        }
    }
}

/* Keeps signals and limits of a batch from its parent. */
static void spare_the_parent(long number, long *a)
{
    bool by_process = number == NR_KILL || number == NR_SIGQUEUE || number == NR_TKILL ||
                      number == NR_TGKILL || number == NR_TGSIGQUEUE || number == NR_PRLIMIT ||
                      number == NR_PIDFD_OPEN;
    for (int i = 0; by_process && i < 2; i++) {
        bool is_process = i == 0 || number == NR_TGKILL || number == NR_TGSIGQUEUE;
        int pid = (int)a[i];
        if (is_process && (pid == parent_pid || pid == 1 || pid == 0 || (pid < 0 && pid > -100000)))
            a[i] = getpid();
    }
    /* SIGKILL and SIGSTOP end a batch early. */
    int signal_at = number == NR_KILL || number == NR_TKILL || number == NR_SIGQUEUE ? 1
                    : number == NR_TGKILL || number == NR_TGSIGQUEUE                 ? 2
                                                                                     : -1;
    if (signal_at > 0 && ((int)a[signal_at] == SIGKILL || (int)a[signal_at] == SIGSTOP) && a[5] % 16)
        a[signal_at] = SIGURG;
}

static void log_call(const struct worker *worker, const struct call *call, const long *a)
{
    char line[256];
    int len = snprintf(line, sizeof line, "[%d.%d] %s(%#lx, %#lx, %#lx, %#lx, %#lx, %#lx)\n", getpid(),
                       worker->index, call->name, a[0], a[1], a[2], a[3], a[4], a[5]);
    syscall(SYS_write, LOG_FD, line, (size_t)len);
}

static bool has(const struct numbers *numbers, long number)
{
    for (size_t i = 0; i < numbers->count; i++)
        if (numbers->of[i] == number)
            return true;
    return false;
}

static bool is_selected(long number)
{
    return !has(&skipped, number) && (only.count == 0 || has(&only, number));
}

/* Something that a program would do, so that there is state to act on. */
static void freshen(struct random *random)
{
    if (fd_count)
        fcntl(fds[below(random, fd_count)], F_SETFL, O_NONBLOCK);
    mprotect(arena, ARENA_PAGES * PAGE, PROT_READ | PROT_WRITE);
}

static void one_call(struct worker *worker)
{
    struct random *random = &worker->random;
    const struct call *call = &calls[below(random, COUNT(calls))];
    long a[6];
    size_t count = strlen(call->arguments);
    random->tame = !one_in(random, 3);
    for (size_t i = 0; i < 6; i++)
        a[i] = i < count ? 0 : (long)next(random);
    for (int i = 0; call->arguments[i]; i++)
        a[i] = argument(random, call, i);
    static const struct call unknown = {0, "unknown", ""};
    long number = call->number;
    if (one_in(random, 200)) {
        call = &unknown;
        number = (long)(one_in(random, 2) ? PICK(random, borders) : below(random, 512));
        for (size_t i = 0; i < COUNT(calls); i++)
            if (calls[i].number == number)
                return;
    }
    bool ends = number == NR_EXIT || number == NR_EXIT_GROUP || number == NR_RT_SIGRETURN;
    if ((ends && !one_in(random, 64)) || !is_selected(number))
        return;
    spare_the_parent(number, a);
    if (verbose)
        log_call(worker, call, a);
    long *last = shared->last[worker->index];
    last[0] = number;
    memcpy(last + 1, a, sizeof a);
    __atomic_add_fetch(&shared->calls, 1, __ATOMIC_RELAXED);
    if (number >= 0 && number < (long)COUNT(shared->of_number))
        __atomic_add_fetch(&shared->of_number[number], 1, __ATOMIC_RELAXED);
    long result;
    switch (number) {
    case NR_RT_SIGRETURN: {
        char *stack = arena + (below(random, ARENA_PAGES - 4) << 12);
        for (int i = 0; i < 4; i++)
            put_structure(random, stack + 256 * i);
        return_from_nothing(one_in(random, 4) ? any_pointer(random) : stack + 8 * below(random, 64));
        return;
    }
    case NR_CLONE: case NR_CLONE3: case NR_FORK: case NR_VFORK:
        result = call_twice(number, a);
        break;
    default: result = call6(number, a);
    }
    last[0] = -1;
    if (result >= 0 || result < -4095) {
        __atomic_add_fetch(&shared->succeeded, 1, __ATOMIC_RELAXED);
        results[below(random, COUNT(results))] = result;
        if (result > 2 && result < 4096 && fd_count && one_in(random, 4))
            fds[below(random, fd_count)] = (int)result;
    }
}

/* ------------------------------------------------------------ a batch */

static void *work(void *argument)
{
    struct worker *worker = argument;
    worker->tid = (pid_t)syscall(SYS_gettid);
    for (long i = 0; i < calls_a_thread; i++) {
        if (i % 32 == 0)
            freshen(&worker->random);
        one_call(worker);
        worker->made = i;
    }
    worker->over = true;
    return NULL;
}

static void hold(int fd)
{
    if (fd >= 0 && fd_count < FDS_MAX)
        fds[fd_count++] = fd;
}

static void hold_pair(const int *pair)
{
    hold(pair[0]);
    hold(pair[1]);
}

static void open_sockets(void)
{
    int pair[2];
    sockets.first = fd_count;
    for (int kind = SOCK_STREAM; kind <= SOCK_SEQPACKET; kind++)
        if (kind != SOCK_RAW && kind != SOCK_RDM && socketpair(AF_UNIX, kind | SOCK_NONBLOCK, 0, pair) == 0)
            hold_pair(pair);
    int domains[] = {AF_INET, AF_INET6};
    for (size_t i = 0; i < COUNT(domains); i++) {
        struct sockaddr_in6 address = {.sin6_family = (sa_family_t)domains[i]};
        socklen_t len = domains[i] == AF_INET ? sizeof(struct sockaddr_in) : sizeof address;
        int listener = socket(domains[i], SOCK_STREAM | SOCK_NONBLOCK, 0);
        int client = socket(domains[i], SOCK_STREAM | SOCK_NONBLOCK, 0);
        bind(listener, (void *)&address, len);
        listen(listener, 3);
        getsockname(listener, (void *)&address, &len);
        connect(client, (void *)&address, len);
        hold(listener);
        hold(client);
        hold(accept(listener, NULL, NULL));
        hold(socket(domains[i], SOCK_STREAM, 0));
        int datagrams = socket(domains[i], SOCK_DGRAM | SOCK_NONBLOCK, 0);
        memset(&address, 0, sizeof address);
        address.sin6_family = (sa_family_t)domains[i];
        bind(datagrams, (void *)&address, len);
        getsockname(datagrams, (void *)&address, &len);
        connect(datagrams, (void *)&address, len);
        hold(datagrams);
    }
    struct sockaddr_un name = {.sun_family = AF_UNIX, .sun_path = "sock"};
    int local = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0);
    bind(local, (void *)&name, sizeof name);
    listen(local, 2);
    hold(local);
    hold(socket(AF_NETLINK, SOCK_RAW | SOCK_NONBLOCK, NETLINK_ROUTE));
    sockets.end = fd_count;
}

static void open_files(void)
{
    static const char *const names[] = {
        "a", "/lower/file", "/bind/a", "/proc/self/maps", "/proc/self/status", "/proc/net/tcp",
        "/proc/self/mem", "/dev/null", "/dev/zero", "/dev/urandom", "/proc/self/comm", "fifo",
    };
    mkdir("d", 0777);
    mkdir("/bind/d", 0777);
    symlink("a", "link");
    symlink("nowhere", "dangling");
    symlink("loop", "loop");
    mkfifo("fifo", 0666);
    close(open("d/a", O_CREAT | O_RDWR, 0666));
    files.first = fd_count;
    for (size_t i = 0; i < COUNT(names); i++) {
        int fd = open(names[i], O_RDWR | O_CREAT | O_NONBLOCK, 0666);
        hold(fd >= 0 ? fd : open(names[i], O_RDONLY | O_NONBLOCK));
    }
    files.end = directories.first = fd_count;
    static const char *const opened[] = {".", "d", "/", "/proc", "/proc/self/fd", "/bind", "/lower", "/dev/pts"};
    for (size_t i = 0; i < COUNT(opened); i++)
        hold(open(opened[i], O_RDONLY | O_DIRECTORY));
    directories.end = fd_count;
    hold(open("a", O_PATH));
    hold(open("link", O_PATH | O_NOFOLLOW));
    hold(open(".", O_TMPFILE | O_RDWR, 0600));
    int master = open("/dev/ptmx", O_RDWR | O_NONBLOCK | O_NOCTTY);
    unlockpt(master);
    hold(master);
    hold(open(ptsname(master) ? ptsname(master) : "/dev/pts/0", O_RDWR | O_NONBLOCK));
    int memory = memfd_create("memfd", MFD_ALLOW_SEALING);
    ftruncate(memory, PAGE);
    hold(memory);
    past_file = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
}

static void open_descriptors(void)
{
    int pair[2];
    if (pipe2(pair, O_NONBLOCK) == 0)
        hold_pair(pair);
    if (pipe2(pair, 0) == 0)
        hold_pair(pair);
    open_files();
    open_sockets();
    sigset_t set;
    sigfillset(&set);
    int counter = eventfd(1, EFD_NONBLOCK);
    int epoll = epoll_create1(0);
    for (size_t i = 0; i < fd_count; i += 3) {
        struct epoll_event event = {.events = EPOLLIN | EPOLLOUT, .data.u64 = i};
        epoll_ctl(epoll, EPOLL_CTL_ADD, fds[i], &event);
    }
    events.first = fd_count;
    hold(counter);
    hold(epoll);
    hold(epoll_create1(0));
    hold(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK));
    hold(signalfd(-1, &set, SFD_NONBLOCK));
    int watch = inotify_init1(IN_NONBLOCK);
    inotify_add_watch(watch, ".", IN_ALL_EVENTS);
    hold(watch);
    hold((int)syscall(SYS_pidfd_open, getpid(), 0));
    events.end = fd_count;
    ipc_ids[0] = shmget(IPC_PRIVATE, 3 * PAGE, IPC_CREAT | 0600);
    ipc_ids[1] = semget(IPC_PRIVATE, 4, IPC_CREAT | 0600);
    ipc_ids[2] = msgget(IPC_PRIVATE, IPC_CREAT | 0600);
}

static void map_memory(void)
{
    int any = MAP_PRIVATE | MAP_ANONYMOUS;
    arena = mmap(NULL, (ARENA_PAGES + 1) * PAGE, PROT_READ | PROT_WRITE, any, -1, 0);
    mprotect(arena + ARENA_PAGES * PAGE, PAGE, PROT_NONE);
    read_only = mmap(NULL, 2 * PAGE, PROT_READ, any, -1, 0);
    no_access = mmap(NULL, 2 * PAGE, PROT_NONE, any, -1, 0);
}

static void wake(int signal)
{
    (void)signal;
}

/* Threads that wait get a signal, so that they go on with the next call. */
static void interrupt_workers(long count)
{
    long seen[THREADS_MAX] = {0};
    for (int tick = 0; tick < 1000; tick++) {
        struct timespec short_time = {0, 2000000};
        clock_nanosleep(CLOCK_MONOTONIC, 0, &short_time, NULL);
        bool over = true;
        for (long i = 0; i < count; i++) {
            over &= workers[i].over;
            if (!workers[i].over && workers[i].made == seen[i])
                syscall(SYS_tgkill, getpid(), workers[i].tid, tick % 2 ? SIGUSR1 : SIGRTMAX);
            seen[i] = workers[i].made;
        }
        if (over)
            return;
    }
}

static void run_batch(long batch)
{
    struct random random = {seed * 0x100000001b3UL + (uint64_t)batch, false};
    setsid();
    dup2(2, LOG_FD);
    fcntl(LOG_FD, F_SETFD, FD_CLOEXEC);
    for (int signal = 1; signal <= 64; signal++)
        if (signal != SIGSEGV && signal != SIGBUS && signal != SIGILL && signal != SIGFPE && signal != SIGTRAP) {
            struct sigaction action = {.sa_handler = wake};
            sigaction(signal, &action, NULL);
        }
    map_memory();
    open_descriptors();
    if (batch % 16 == 0 && !verbose) {
        for (int fd = 0; fd < 3; fd++)
            hold(fd);
    } else {
        int null = open("/dev/null", O_RDWR);
        for (int fd = 0; fd < 3; fd++)
            dup2(null, fd);
    }
    for (size_t at = 0; at + 1024 < ARENA_PAGES * PAGE; at += 1024)
        put_structure(&random, arena + at);
    /* Two processes share the descriptors. */
    if (below(&random, 4) == 0 && threads_wanted > 1 && fork() == 0)
        random.state ^= 0x5555;
    for (long i = 0; i < threads_wanted; i++) {
        workers[i].random.state = next(&random);
        workers[i].index = (int)i;
        pthread_t thread;
        if (threads_wanted == 1)
            work(&workers[i]);
        else if (pthread_create(&thread, NULL, work, &workers[i]))
            workers[i].over = true;
    }
    if (threads_wanted > 1)
        interrupt_workers(threads_wanted);
    syscall(SYS_exit_group, 0);
}

/* ------------------------------------------------------------ the parent */

/* As say(), with patience: a batch can make standard output non-blocking. */
__attribute__((format(printf, 1, 2))) static void report(const char *format, ...)
{
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    int len = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    for (int done = 0; done < len;) {
        ssize_t put = write(1, line + done, (size_t)(len - done));
        if (put > 0) {
            done += (int)put;
        } else if (put < 0 && errno == EAGAIN) {
            struct pollfd out = {1, POLLOUT, 0};
            poll(&out, 1, 100);
        } else {
            _exit(111);
        }
    }
}

static uint64_t now_ms(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000 + (uint64_t)time.tv_nsec / 1000000;
}

/* Waits for a child; false if it has not ended in time. */
static bool ends_within(pid_t child, uint64_t limit_ms)
{
    uint64_t end = now_ms() + limit_ms;
    for (;;) {
        int status;
        pid_t ended = waitpid(child, &status, WNOHANG | __WALL);
        if (ended == child || (ended < 0 && errno == ECHILD))
            return true;
        if (ended > 0)
            continue;
        if (now_ms() >= end)
            return false;
        struct timespec short_time = {0, 1000000};
        nanosleep(&short_time, NULL);
    }
}

static void remove_ipc(void)
{
    for (int i = 0; i < 64; i++) {
        struct shmid_ds segment;
        struct semid_ds semaphore;
        struct msqid_ds queue;
        int id = shmctl(i, SHM_STAT, &segment);
        if (id >= 0)
            shmctl(id, IPC_RMID, NULL);
        if ((id = semctl(i, 0, SEM_STAT, &semaphore)) >= 0)
            semctl(id, 0, IPC_RMID);
        if ((id = msgctl(i, MSG_STAT, (void *)&queue)) >= 0)
            msgctl(id, IPC_RMID, NULL);
    }
}

static void stuck(long batch, const char *reason)
{
    report("sysfuzz: stuck: seed %lu batch %ld: %s\n", seed, batch, reason);
    for (long i = 0; i < threads_wanted; i++) {
        const long *last = shared->last[i];
        report("sysfuzz: thread %ld last called %ld(%#lx, %#lx, %#lx, %#lx, %#lx, %#lx)\n", i, last[0],
               last[1], last[2], last[3], last[4], last[5], last[6]);
    }
    _exit(3);
}

/* Kernel memory in use, in KiB. */
static long slab(void)
{
    char text[4096], *at;
    int fd = open("/proc/meminfo", O_RDONLY);
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    text[got > 0 ? got : 0] = '\0';
    return (at = strstr(text, "\nSlab:")) ? atol(at + 6) : 0;
}

/* Runs a batch in a directory of its own, and removes all that it leaves. */
static void watch_batch(long batch)
{
    static const char scratch[] = "/tmp/batch";
    mkdir(scratch, 0777);
    chdir(scratch);
    memset(shared->last, 0xff, sizeof shared->last);
    pid_t child = fork();
    if (child < 0) {
        report("sysfuzz: fork: %s\n", error_name(errno));
        _exit(4);
    }
    if (child == 0)
        run_batch(batch);
    if (!ends_within(child, 4000)) {
        kill(child, SIGKILL);
        if (!ends_within(child, 20000))
            stuck(batch, "the batch did not end by SIGKILL");
    }
    kill(-1, SIGKILL);
    uint64_t end = now_ms() + 20000;
    while (waitpid(-1, NULL, WNOHANG | __WALL) >= 0 || errno != ECHILD) {
        if (now_ms() >= end)
            stuck(batch, "a process that the batch left did not end by SIGKILL");
        kill(-1, SIGKILL);
        sched_yield();
    }
    chdir("/");
    chmod(scratch, 0777);
    remove_tree(scratch);
    remove_tree("/dev/shm/a");
    remove_ipc();
}

static long option(int argc, char **argv, const char *name, long otherwise)
{
    for (int i = 1; i + 1 < argc; i++)
        if (!strcmp(argv[i], name))
            return strtol(argv[i + 1], NULL, 0);
    return otherwise;
}

static void read_numbers(int argc, char **argv, const char *name, struct numbers *numbers)
{
    for (int i = 1; i + 1 < argc; i++) {
        char *text = strcmp(argv[i], name) ? NULL : strtok(argv[i + 1], ",");
        for (; text && numbers->count < COUNT(numbers->of); text = strtok(NULL, ","))
            numbers->of[numbers->count++] = atol(text);
    }
}

static void read_options(int argc, char **argv)
{
    seed = (uint64_t)option(argc, argv, "--seed", 1);
    seconds = option(argc, argv, "--seconds", 5);
    batches = option(argc, argv, "--batches", LONG_MAX);
    first_batch = option(argc, argv, "--first", 0);
    calls_a_thread = option(argc, argv, "--calls", 400);
    threads_wanted = option(argc, argv, "--threads", 3);
    if (threads_wanted < 1 || threads_wanted > THREADS_MAX)
        threads_wanted = 1;
    for (int i = 1; i < argc; i++) {
        verbose |= !strcmp(argv[i], "--verbose");
    }
    read_numbers(argc, argv, "--only", &only);
    read_numbers(argc, argv, "--skip", &skipped);
}

int main(int argc, char **argv)
{
    /* A batch has executed this program again. */
    if (argc < 2 || strncmp(argv[1], "--", 2))
        return 0;
    read_options(argc, argv);
    /* Outside a sandbox nothing is mapped there, and this ends the program. */
    (void)*(volatile char *)KERNEL_BASE;
    parent_pid = getpid();
    for (int signal = 1; signal <= 64; signal++)
        if (signal != SIGCHLD && signal != SIGSEGV && signal != SIGBUS)
            sigaction(signal, &(struct sigaction){.sa_handler = SIG_IGN}, NULL);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    report("sysfuzz: seed %lu\n", seed);
    /* As a batch may leave it: what follows the link goes on for ever. */
    symlink("/proc/self/fd", "/dev/shm/a");
    uint64_t end = now_ms() + 1000 * (uint64_t)seconds;
    long batch = first_batch;
    long before = 0;
    while (batch - first_batch < batches && now_ms() < end) {
        watch_batch(batch++);
        /* Tables and caches have grown by then. */
        if (batch - first_batch == 20)
            before = slab();
    }
    size_t called = 0;
    for (size_t i = 0; i < COUNT(calls); i++)
        called += shared->of_number[calls[i].number] > 0;
    report("sysfuzz: seed %lu batches %ld calls %lu succeeded %lu kinds %zu of %zu heap %ld KiB\n", seed,
           batch - first_batch, shared->calls, shared->succeeded, called, COUNT(calls),
           before ? slab() - before : 0);
    report("sysfuzz: done\n");
    return 0;
}
