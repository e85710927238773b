/* A program that tries to leave its sandbox.
 *
 * It makes system calls by two doors: `guest` executes a `syscall` instruction
 * of its own, `kernel` calls the Thaw kernel's host-call instruction, whose
 * address the test passes in THAW_TEST_HOSTCALL (rax = number, rdi, rsi, rdx,
 * r10, r8, r9 = arguments, result in rax). Results are printed; the test
 * compares them with the list of allowed host calls, and looks from outside
 * whether anything has changed.
 *
 *   hostile DOOR sweep FIRST LAST   every number, with arguments that no call accepts
 *   hostile DOOR attack FIRST       a list of plausible attacks, from number FIRST on
 *   hostile int80 FIRST LAST        32-bit calls
 *   hostile syscall32, sysenter32   32-bit calls by the other ways
 *   hostile descriptors             what is behind every descriptor number
 *   hostile offsets                 reads that would move offsets others share
 *   hostile console                 forged lines on the console, and attempts to read it
 *   hostile flood                   lines without end on the console
 *   hostile broker                  forged messages on the control socket
 *   hostile garbage SEED            nonsense on the control socket
 *   hostile explode                 host processes without end, each using a processor
 *
 * NEVER run this outside a sandbox. It refuses to, as far as it can tell.
 *
 * The environment names what the attacks aim at: WATCH, a directory of the
 * host; VICTIM, a process of the host; PORT, a TCP port on the host's loopback
 * address. */
#include "../c/guest.h"
#include <arpa/inet.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>

#define PAGE 4096UL
#define BAD 0x5a5a5a5a5a5a5a5bL /* no address, no descriptor, not aligned */

extern long call_address(void *address, long number, const long *arguments);
__asm__(".text\n"
        "call_address:\n"
        " push %rbx\n push %rbp\n push %r12\n push %r13\n push %r14\n push %r15\n push %r15\n"
        " mov %rdi, %r11\n mov %rsi, %rax\n mov %rdx, %rbx\n"
        " mov 0(%rbx), %rdi\n mov 8(%rbx), %rsi\n mov 16(%rbx), %rdx\n"
        " mov 24(%rbx), %r10\n mov 32(%rbx), %r8\n mov 40(%rbx), %r9\n"
        " call *%r11\n"
        " pop %r15\n pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbp\n pop %rbx\n ret\n");

static long call_guest(long number, const long *arguments)
{
    long result;
    register long r10 __asm__("r10") = arguments[3];
    register long r8 __asm__("r8") = arguments[4];
    register long r9 __asm__("r9") = arguments[5];
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "0"(number), "D"(arguments[0]), "S"(arguments[1]), "d"(arguments[2]), "r"(r10),
                       "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}

/* Makes a call of 32 bits by an instruction of two bytes in code of 32 bits; does not come back. */
static void call_in_32_bits(const unsigned char instruction[2])
{
    unsigned char code[] = {0xb8, 20, 0, 0, 0, instruction[0], instruction[1], 0x0f, 0x0b};
    unsigned char *page = mmap(NULL, 8192, PROT_READ | PROT_WRITE | PROT_EXEC,
                               MAP_32BIT | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memcpy(page, code, sizeof code);
    __asm__ volatile("mov %0, %%rsp; push $0x23; push %1; lretq"
                     :: "r"(page + 8000), "r"((unsigned long)page));
}

static long call_int80(long number, long argument)
{
    long result;
    __asm__ volatile("int $0x80"
                     : "=a"(result)
                     : "0"(number), "b"(argument), "c"(argument), "d"(argument), "S"(argument), "D"(argument)
                     : "r8", "r9", "r10", "r11", "memory");
    return (int)result;
}

static void *host_call_address;
static bool by_kernel;

static long call(long number, const long *arguments)
{
    return by_kernel ? call_address(host_call_address, number, arguments) : call_guest(number, arguments);
}

/* Makes a host call with up to six arguments. */
#define HOST(number, ...) call_address(host_call_address, number, (const long[6]){__VA_ARGS__})

static void report(const char *what, long number, const char *name, long result)
{
    if (result < 0 && result > -4096)
        say("%s %ld %s %s\n", what, number, name, error_name((int)-result));
    else
        say("%s %ld %s ok\n", what, number, name);
}

/* Numbers that do not come back when the guest's own kernel serves them. */
static bool is_final(long number)
{
    number &= ~0x40000000L;
    return number == SYS_exit || number == SYS_exit_group || number == SYS_rt_sigreturn ||
           number == SYS_pause || number == SYS_fork || number == SYS_vfork || number == SYS_clone ||
           number == SYS_clone3 || number == 335; /* uretprobe: SIGILL, see the test */
}

static void sweep(long first, long last)
{
    const long bad[6] = {BAD, BAD, BAD, BAD, BAD, BAD};
    for (long number = first; number <= last; number++) {
        if (by_kernel ? number == SYS_exit_group : is_final(number)) {
            say("skip %ld\n", number);
            continue;
        }
        say("at %ld\n", number);
        report("sweep", number, "-", call(number, bad));
    }
}

static const char *watch(const char *below)
{
    static char paths[64][256];
    static int next;
    char *path = paths[next++ % 64];
    snprintf(path, sizeof paths[0], "%s/%s", getenv("WATCH"), below);
    return path;
}

struct attack {
    long number;
    const char *name;
    long arguments[6];
};

#define A(number, name, ...) {number, name, {__VA_ARGS__}}
#define P(pointer) (long)(pointer)

static void attacks(long first)
{
    static char page[PAGE] __attribute__((aligned(4096)));
    static char buffer[PAGE];
    long victim = atol(getenv("VICTIM"));
    struct sockaddr_in loopback = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(getenv("PORT"))),
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct iovec local = {buffer, sizeof buffer}, remote = {(void *)0x400000, 16};
    char *const no_strings[] = {NULL};
    struct timespec zero = {0};
    long words[16] = {0};
    long cr_arguments[11] = {0};
    static struct { unsigned handle_bytes; int handle_type; unsigned char handle[128]; } handle = {128, 1, {0}};

    const struct attack list[] = {
        /* Files of the host. */
        A(SYS_open, "open-create", P(watch("new-open")), O_CREAT | O_RDWR, 0666),
        A(SYS_open, "open-read", P(watch("secret")), O_RDONLY),
        A(SYS_openat, "openat-create", AT_FDCWD, P(watch("new-openat")), O_CREAT | O_RDWR, 0666),
        A(SYS_openat, "openat-fd3", 3, P(watch("secret")), O_RDONLY),
        A(SYS_openat2, "openat2", AT_FDCWD, P(watch("secret")), P(words), 24),
        A(SYS_creat, "creat", P(watch("new-creat")), 0666),
        A(SYS_mkdir, "mkdir", P(watch("new-mkdir")), 0777),
        A(SYS_mkdirat, "mkdirat", AT_FDCWD, P(watch("new-mkdirat")), 0777),
        A(SYS_mknod, "mknod", P(watch("new-mknod")), S_IFREG | 0666, 0),
        A(SYS_symlink, "symlink", P("x"), P(watch("new-symlink"))),
        A(SYS_link, "link", P(watch("secret")), P(watch("new-link"))),
        A(SYS_rename, "rename", P(watch("secret")), P(watch("renamed"))),
        A(SYS_unlink, "unlink", P(watch("secret"))),
        A(SYS_unlinkat, "unlinkat", AT_FDCWD, P(watch("secret")), 0),
        A(SYS_rmdir, "rmdir", P(watch("empty"))),
        A(SYS_truncate, "truncate", P(watch("secret")), 0),
        A(SYS_chmod, "chmod", P(watch("secret")), 0777),
        A(SYS_chown, "chown", P(watch("secret")), 1, 1),
        A(SYS_utimensat, "utimensat", AT_FDCWD, P(watch("secret")), 0, 0),
        A(SYS_setxattr, "setxattr", P(watch("secret")), P("user.x"), P("v"), 1, 0),
        A(SYS_stat, "stat", P(watch("secret")), P(buffer)),
        A(SYS_statx, "statx", AT_FDCWD, P(watch("secret")), 0, 0xfff, P(buffer)),
        A(SYS_access, "access", P(watch("secret")), 0),
        A(SYS_readlink, "readlink", P("/proc/self/exe"), P(buffer), 100),
        A(SYS_getcwd, "getcwd", P(buffer), sizeof buffer),
        A(SYS_chdir, "chdir", P("/")),
        A(SYS_chroot, "chroot", P("/")),
        A(SYS_name_to_handle_at, "name_to_handle_at", AT_FDCWD, P("/"), P(&handle), P(words), 0),
        A(SYS_open_by_handle_at, "open_by_handle_at", 3, P(&handle), O_RDONLY),
        A(SYS_memfd_create, "memfd_create", P("x"), 0),
        A(SYS_ftruncate, "ftruncate", 4, 0),
        A(SYS_fallocate, "fallocate", 4, 0, 0, 100),
        A(SYS_getdents64, "getdents64", 3, P(buffer), 100),
        A(SYS_swapon, "swapon", P(watch("secret")), 0),
        A(SYS_acct, "acct", P(watch("secret"))),
        A(SYS_mount, "mount", P("none"), P(watch("empty")), P("tmpfs"), 0, 0),
        A(SYS_umount2, "umount2", P("/proc"), 2),
        A(SYS_pivot_root, "pivot_root", P("/"), P("/")),
        A(428, "open_tree", AT_FDCWD, P("/"), 1),
        A(429, "move_mount", 3, P(""), AT_FDCWD, P("/"), 4),
        A(430, "fsopen", P("tmpfs"), 0),
        A(433, "fspick", AT_FDCWD, P("/"), 0),
        A(SYS_fanotify_init, "fanotify_init", 0, 0),
        A(SYS_inotify_init1, "inotify_init1", 0),
        A(SYS_quotactl, "quotactl", 0x800002, 0, 0, 0),
        /* Processes of the host. */
        A(SYS_kill, "kill-victim", victim, SIGKILL),
        A(SYS_kill, "kill-parent", 1, SIGTERM),
        A(SYS_tkill, "tkill", victim, SIGKILL),
        A(SYS_tgkill, "tgkill", victim, victim, SIGKILL),
        A(SYS_rt_sigqueueinfo, "rt_sigqueueinfo", victim, SIGTERM, P(words)),
        A(SYS_ptrace, "ptrace-attach", 16, victim, 0, 0),
        A(SYS_ptrace, "ptrace-traceme", 0, 0, 0, 0),
        A(SYS_process_vm_readv, "process_vm_readv", victim, P(&local), 1, P(&remote), 1, 0),
        A(SYS_process_vm_writev, "process_vm_writev", victim, P(&local), 1, P(&remote), 1, 0),
        A(SYS_pidfd_open, "pidfd_open-victim", victim, 0),
        A(SYS_pidfd_open, "pidfd_open-1", 1, 0),
        A(438, "pidfd_getfd", 3, 0, 0),
        A(SYS_kcmp, "kcmp", 1, victim, 0, 0, 0),
        A(SYS_prlimit64, "prlimit64", victim, 7, 0, P(words)),
        A(SYS_sched_setaffinity, "sched_setaffinity", victim, 8, P(words)),
        A(SYS_setpriority, "setpriority", 0, victim, 19),
        A(SYS_migrate_pages, "migrate_pages", victim, 8, P(words), P(words)),
        A(SYS_getsid, "getsid", 0),
        A(SYS_getppid, "getppid", 0),
        A(SYS_wait4, "wait4", -1, 0, 1, 0),
        A(SYS_setpgid, "setpgid", 0, 0),
        A(SYS_setsid, "setsid", 0),
        /* New processes and programs. Not for the guest's own door. */
        A(SYS_fork, "fork", 0),
        A(SYS_vfork, "vfork", 0),
        A(SYS_clone, "clone", SIGCHLD, 0, 0, 0, 0),
        A(SYS_clone, "clone-newuser", 0x10000000 | SIGCHLD, 0, 0, 0, 0),
        A(SYS_clone3, "clone3", P(cr_arguments), 88),
        A(SYS_execve, "execve", P("/bin/sh"), P(no_strings), P(no_strings)),
        A(SYS_execveat, "execveat", 4, P(""), P(no_strings), P(no_strings), AT_EMPTY_PATH),
        A(SYS_exit, "exit", 77),
        /* The network. */
        A(SYS_socket, "socket-inet", AF_INET, SOCK_STREAM, 0),
        A(SYS_socket, "socket-unix", AF_UNIX, SOCK_STREAM, 0),
        A(SYS_socket, "socket-netlink", AF_NETLINK, SOCK_RAW, 0),
        A(SYS_socket, "socket-vsock", 40, SOCK_STREAM, 0),
        A(SYS_socketpair, "socketpair", AF_UNIX, SOCK_STREAM, 0, P(words)),
        A(SYS_connect, "connect", 3, P(&loopback), sizeof loopback),
        A(SYS_bind, "bind", 3, P(&loopback), sizeof loopback),
        A(SYS_listen, "listen", 3, 5),
        A(SYS_accept4, "accept4", 3, 0, 0, 0),
        A(SYS_sendto, "sendto-address", 3, P(buffer), 4, 0x40, P(&loopback), sizeof loopback),
        A(SYS_sendto, "sendto-fastopen", 3, P(buffer), 4, 0x20000040, P(&loopback), sizeof loopback),
        A(SYS_sendto, "sendto-oob", 3, P(buffer), 4, 0x41, 0, 0),
        A(SYS_recvfrom, "recvfrom-address", 3, P(buffer), 4, 0x40, P(page), P(words)),
        A(SYS_recvfrom, "recvfrom-errqueue", 3, P(buffer), 4, 0x2040, 0, 0),
        A(SYS_recvmsg, "recvmsg-errqueue", 3, P(words), 0x2040),
        A(SYS_sendmsg, "sendmsg", 3, P(words), 0x40),
        A(SYS_sendmmsg, "sendmmsg", 3, P(words), 1, 0x40),
        A(SYS_recvmmsg, "recvmmsg", 3, P(words), 1, 0x40, 0),
        A(SYS_setsockopt, "setsockopt", 3, SOL_SOCKET, SO_PASSCRED, P(words), 4),
        A(SYS_getsockopt, "getsockopt-peercred", 3, SOL_SOCKET, SO_PEERCRED, P(words), P(page)),
        A(SYS_getpeername, "getpeername", 3, P(buffer), P(words)),
        /* Descriptors. */
        A(SYS_dup, "dup", 3),
        A(SYS_dup2, "dup2", 3, 9),
        A(SYS_fcntl, "fcntl-dupfd", 3, F_DUPFD, 100),
        A(SYS_fcntl, "fcntl-setown", 3, 8, victim),
        A(SYS_fcntl, "fcntl-setfl", 3, F_SETFL, O_ASYNC),
        A(SYS_ioctl, "ioctl-tiocsti", 0, 0x5412, P("x")),
        A(SYS_ioctl, "ioctl-tiocsti-2", 2, 0x5412, P("x")),
        A(SYS_ioctl, "ioctl-tioclinux", 0, 0x541c, P("\x03")),
        A(SYS_ioctl, "ioctl-fionread", 3, 0x541b, P(words)),
        A(SYS_splice, "splice", 0, 0, 1, 0, 10, 2),
        A(SYS_tee, "tee", 0, 1, 10, 2),
        A(SYS_vmsplice, "vmsplice", 1, P(&local), 1, 2),
        A(SYS_sendfile, "sendfile", 1, 4, 0, 10),
        A(SYS_pipe2, "pipe2", P(words), 0),
        A(SYS_eventfd2, "eventfd2", 0, 0),
        A(SYS_epoll_create1, "epoll_create1", 0),
        A(SYS_signalfd4, "signalfd4", -1, P(words), 8, 0),
        A(SYS_timerfd_create, "timerfd_create", 1, 0),
        A(SYS_close_range, "close_range", 1000, 2000, 4),
        /* The kernel's own tools. */
        A(SYS_bpf, "bpf", 0, P(words), 48),
        A(SYS_io_uring_setup, "io_uring_setup", 8, P(page)),
        A(SYS_io_setup, "io_setup", 8, P(words)),
        A(SYS_userfaultfd, "userfaultfd", 1),
        A(SYS_perf_event_open, "perf_event_open", P(words), 0, -1, -1, 0),
        A(SYS_keyctl, "keyctl", 0, -3, 1),
        A(SYS_add_key, "add_key", P("user"), P("x"), P("v"), 1, -3),
        A(SYS_request_key, "request_key", P("user"), P("x"), 0, 0),
        A(SYS_setns, "setns", 3, 0),
        A(SYS_unshare, "unshare-user", 0x10000000),
        A(SYS_unshare, "unshare-files", 0x400),
        A(SYS_seccomp, "seccomp", 1, 0, P(words)),
        A(SYS_prctl, "prctl-dumpable", 4, 1),
        A(SYS_prctl, "prctl-seccomp", 22, 1),
        A(SYS_prctl, "prctl-keepcaps", 8, 1),
        A(SYS_prctl, "prctl-set-name", 15, P("x")),
        A(SYS_prctl, "prctl-ptracer", 0x59616d61, victim),
        A(SYS_arch_prctl, "arch_prctl-get-fs", 0x1003, P(words)),
        A(SYS_personality, "personality", 0x0040000),
        A(SYS_modify_ldt, "modify_ldt", 1, P(words), 16),
        A(SYS_iopl, "iopl", 3),
        A(SYS_ioperm, "ioperm", 0, 10, 1),
        A(SYS_landlock_create_ruleset, "landlock", 0, 0, 1),
        A(SYS_init_module, "init_module", P(buffer), 10, P("")),
        A(SYS_finit_module, "finit_module", 4, P(""), 0),
        A(SYS_delete_module, "delete_module", P("x"), 0),
        A(SYS_kexec_load, "kexec_load", 0, 0, P(words), 0),
        A(SYS_syslog, "syslog", 3, P(buffer), 100),
        A(SYS_sethostname, "sethostname", P("hostile"), 7),
        A(SYS_setdomainname, "setdomainname", P("hostile"), 7),
        A(SYS_clock_adjtime, "clock_adjtime", 0, P(page)),
        A(SYS_vhangup, "vhangup", 0),
        /* Credentials and limits. */
        A(SYS_setuid, "setuid", 0),
        A(SYS_setgid, "setgid", 0),
        A(SYS_setresuid, "setresuid", 0, 0, 0),
        A(SYS_setgroups, "setgroups", 0, 0),
        A(SYS_setfsuid, "setfsuid", 0),
        A(SYS_capset, "capset", P(words), P(words)),
        A(SYS_setrlimit, "setrlimit", 4, P(words)),
        A(SYS_getuid, "getuid", 0),
        /* System V and POSIX objects. */
        A(SYS_shmget, "shmget", 0, 4096, 01666),
        A(SYS_shmat, "shmat", 0, 0, 0),
        A(SYS_msgget, "msgget", 0, 01666),
        A(SYS_semget, "semget", 0, 1, 01666),
        A(SYS_mq_open, "mq_open", P("hostile"), O_CREAT | O_RDWR, 0666, 0),
        /* Time, signals, waiting: the kernel of the sandbox rules over these. */
        A(SYS_timer_create, "timer_create", 0, 0, P(words)),
        A(SYS_setitimer, "setitimer", 0, P(words), 0),
        A(SYS_alarm, "alarm", 0),
        A(SYS_nanosleep, "nanosleep", P(&zero), 0),
        A(SYS_uname, "uname", P(buffer)),
        A(SYS_sysinfo, "sysinfo", P(buffer)),
        A(SYS_getrandom, "getrandom", P(buffer), 16, 0),
        A(SYS_futex, "futex", P(words), 1, 1, 0, 0, 0),
        A(SYS_rt_sigprocmask, "rt_sigprocmask", 0, 0, P(buffer), 8),
        A(SYS_rt_sigaction, "rt_sigaction-sigsys", SIGSYS, 0, P(buffer), 8),
        A(SYS_sigaltstack, "sigaltstack", 0, P(buffer)),
        A(SYS_set_tid_address, "set_tid_address", 0),
        /* Allowed calls with arguments that must not pass. */
        A(SYS_clock_gettime, "clock_gettime-realtime", CLOCK_REALTIME, P(words)),
        A(SYS_clock_gettime, "clock_gettime-process", CLOCK_PROCESS_CPUTIME_ID, P(words)),
        A(SYS_clock_gettime, "clock_gettime-descriptor", ~4u << 3 | 3, P(words)),
        A(SYS_clock_gettime, "clock_gettime-high-half", -6, P(words)),
        A(SYS_mmap, "mmap-growsdown", 0, PAGE, 3, 0x122, -1, 0),
        A(SYS_mmap, "mmap-locked", 0, PAGE, 3, 0x2022, -1, 0),
        A(SYS_mmap, "mmap-hugetlb", 0, PAGE, 3, 0x40022, -1, 0),
        A(SYS_mmap, "mmap-high-flags", 0, PAGE, 3, 0x100000022, -1, 0),
        A(SYS_mmap, "mmap-high-prot", 0, PAGE, 0x100000003, 0x22, -1, 0),
        A(SYS_mmap, "mmap-strange-prot", 0, PAGE, 0x1000003, 0x22, -1, 0),
        A(SYS_mprotect, "mprotect-growsdown", P(page), PAGE, 0x1000003),
        A(SYS_madvise, "madvise", P(page), PAGE, 9),
        A(SYS_madvise, "madvise-mergeable", P(page), PAGE, 12),
        A(SYS_madvise, "madvise-hwpoison", P(page), PAGE, 100),
        A(SYS_madvise, "madvise-soft-offline", P(page), PAGE, 101),
        A(SYS_madvise, "madvise-dontfork", P(page), PAGE, 10),
        A(SYS_mremap, "mremap-dontunmap", P(page), PAGE, PAGE, 5, 0),
        A(SYS_msync, "msync", P(page), PAGE, 4),
        A(SYS_mlock, "mlock", P(page), PAGE),
        A(SYS_mincore, "mincore", P(page), PAGE, P(buffer)),
        A(SYS_remap_file_pages, "remap_file_pages", P(page), PAGE, 0, 0, 0),
        A(SYS_pkey_alloc, "pkey_alloc", 0, 0),
        A(SYS_brk, "brk", 0),
        A(SYS_pwrite64, "pwrite64", 4, P(buffer), 1, 0),
        A(SYS_writev, "writev", 4, P(&local), 0),
        A(SYS_lseek, "lseek", 4, 0, 0),
        A(SYS_process_madvise, "process_madvise", 3, P(&local), 1, 4, 0),
        A(447, "memfd_secret", 0),
        A(462, "mseal", P(page), PAGE, 0),
        A(463, "setxattrat", AT_FDCWD, P(watch("secret")), 0, P("user.x"), P(words), 16),
        A(999, "no-such-call", 0),
        A(0x40000000 | SYS_getppid, "x32-getppid", 0),
        A(0x40000000 | SYS_open, "x32-open", P(watch("secret")), O_RDONLY),
        A(0x40000000 | 520, "x32-execve", P("/bin/sh"), 0, 0),
        A(0x100000000L | SYS_open, "high-half-open", P(watch("secret")), O_RDONLY),
    };
    for (long i = first; i < (long)(sizeof list / sizeof *list); i++) {
        const struct attack *attack = &list[i];
        if (!by_kernel && (is_final(attack->number) || attack->number == SYS_execve ||
                           attack->number == SYS_execveat || (attack->number & 0xffff) == 520 ||
                           !strcmp(attack->name, "kill-parent") ||
                           /* Strict mode allows no more calls. */
                           !strcmp(attack->name, "prctl-seccomp")))
            continue;
        say("at %ld\n", i);
        report("attack", attack->number & 0xffffffff, attack->name, call(attack->number, attack->arguments));
    }
    say("secret after: ");
    show_file(watch("secret"));
}

/* What the sandbox process holds: only what the host gave it, and nothing that
 * can be written except the standard streams, the console and the sockets. */
static void descriptors(void)
{
    char data[16];
    for (long fd = 0; fd < 1100; fd++) {
        /* An empty message on the control socket ends the sandbox. */
        long open = fd == 3 ? 0 : HOST(SYS_write, fd, (long)data, 0);
        long socket = HOST(SYS_recvfrom, fd, (long)data, 1, MSG_PEEK | MSG_DONTWAIT, 0, 0);
        long shared = HOST(SYS_mmap, 0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        long private = HOST(SYS_mmap, 0, PAGE, PROT_READ, MAP_PRIVATE, fd, 0);
        long read = fd == 3 ? 0 : HOST(SYS_read, fd, (long)data, 0);
        if (open == -EBADF && socket == -EBADF && shared == -EBADF && private == -EBADF)
            continue;
        say("descriptor %ld write %s socket %s writable-mapping %s mapping %s read %s\n", fd,
            open < 0 ? error_name((int)-open) : "ok", socket == -ENOTSOCK ? "no" : "yes",
            shared < 0 && shared > -4096 ? error_name((int)-shared) : "ok",
            private < 0 && private > -4096 ? error_name((int)-private) : "ok",
            read < 0 ? error_name((int)-read) : "ok");
    }
}

/* Tries to move the offset of every file that the sandbox holds, which other
 * sandboxes would see move: by reading it, and by reading it where reading is
 * allowed. A file is what can be read at an offset of one's own. */
static void offsets(void)
{
    char data[16];
    for (long fd = 0; fd < 1100; fd++) {
        long file = HOST(SYS_pread64, fd, (long)data, sizeof data, 0, 0, 0);
        long moved = HOST(SYS_read, fd, (long)data, sizeof data, 0, 0, 0);
        long renumbered = HOST(SYS_dup2, fd, 0, 0, 0, 0, 0);
        if (file == -EBADF)
            continue;
        say("offset %ld file %s read %s bytes %ld renumbered %s\n", fd, file > 0 ? "yes" : "no",
            moved < 0 ? error_name((int)-moved) : "ok", moved < 0 ? 0 : moved,
            renumbered < 0 ? error_name((int)-renumbered) : "ok");
    }
}

/* The console: other people read it on a terminal. */
static void console(int endless)
{
    static const char forged[] = "\x1b[2J\x1b]0;forged\x07thaw: all is well\n\xe2\x80\xae";
    static char lines[4096];
    char data[16];
    memset(lines, '\n', sizeof lines);
    HOST(SYS_write, 4, (long)forged, sizeof forged - 1);
    long read = HOST(SYS_read, 4, (long)data, sizeof data);
    say("console read %s\n", read < 0 ? error_name((int)-read) : "ok");
    while (endless)
        HOST(SYS_write, 4, (long)lines, sizeof lines);
}

/* Sends one request to the broker and prints what comes back. */
static void ask(const char *what, unsigned kind, const void *body, size_t len)
{
    static struct { uint32_t kind, len; uint64_t sequence; char body[70000]; } out, in;
    static uint64_t sequence = 1000000;
    union { struct cmsghdr header; char bytes[CMSG_SPACE(sizeof(int) * 4)]; } control;
    struct pollfd_ { int fd; short events, revents; } p = {3, 1, 0};
    struct timespec second = {.tv_sec = 3};

    out.kind = kind;
    out.len = (uint32_t)len;
    out.sequence = ++sequence;
    memcpy(out.body, body, len);
    long sent = HOST(SYS_sendto, 3, (long)&out, (long)(16 + len), MSG_NOSIGNAL, 0, 0);
    if (sent < 0) {
        say("broker %s: cannot send: %s\n", what, error_name((int)-sent));
        return;
    }
    for (;;) {
        if (HOST(SYS_ppoll, (long)&p, 1, (long)&second, 0, 8) != 1) {
            say("broker %s: no answer\n", what);
            return;
        }
        struct iovec one = {&in, sizeof in};
        struct msghdr message = {.msg_iov = &one, .msg_iovlen = 1, .msg_control = &control,
                                 .msg_controllen = sizeof control};
        long got = HOST(SYS_recvmsg, 3, (long)&message, MSG_DONTWAIT, 0, 0, 0);
        if (got <= 0) {
            say("broker %s: closed\n", what);
            return;
        }
        if (in.sequence != sequence)
            continue;
        int error;
        memcpy(&error, in.body, sizeof error);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        if (error || !header || header->cmsg_type != SCM_RIGHTS) {
            say("broker %s: %s, tail of %s\n", what, error ? error_name(error) : "no error",
                got > 24 ? "some bytes" : "nothing");
            return;
        }
        int fd;
        memcpy(&fd, CMSG_DATA(header), sizeof fd);
        char data[40] = "";
        long read = HOST(SYS_pread64, fd, (long)data, sizeof data - 1, 0, 0, 0);
        long wrote = HOST(SYS_write, fd, (long)"X", 1, 0, 0, 0);
        long shared = HOST(SYS_mmap, 0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        data[read > 0 ? read : 0] = '\0';
        data[strcspn(data, "\n")] = '\0';
        say("broker %s: descriptor with \"%s\", write %s, writable mapping %s\n", what, data,
            wrote < 0 ? error_name((int)-wrote) : "ok",
            shared < 0 && shared > -4096 ? error_name((int)-shared) : "ok");
        return;
    }
}

enum { OPEN_BLOB = 201, FS_STAT, FS_LIST, FS_READLINK, FS_OPEN };

static void broker(void)
{
    static const char *const paths[] = {
        "inside.txt", "../secret", "a/../../secret", "/etc/passwd", "link-to-secret", "link-up/secret",
        "..", "", "/", ".", "a/./b", "inside.txt/", "fifo", "a//inside.txt", "\xff\xfe", "a/b\0c",
    };
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        char what[100];
        for (unsigned kind = FS_STAT; kind <= FS_OPEN; kind++) {
            if (kind == FS_LIST)
                continue;
            snprintf(what, sizeof what, "%u \"%s\"", kind, paths[i][0] == '\xff' ? "not utf-8" : paths[i]);
            ask(what, kind, paths[i], strlen(paths[i]));
        }
        char list[200] = {0};
        memcpy(list + 8, paths[i], strlen(paths[i]));
        snprintf(what, sizeof what, "%u \"%s\"", FS_LIST, paths[i][0] == '\xff' ? "not utf-8" : paths[i]);
        ask(what, FS_LIST, list, 8 + strlen(paths[i]));
    }
    ask("201 a blob that does not exist", OPEN_BLOB, (uint32_t[2]){12345678, 0}, 8);
}

static uint64_t state;
static uint64_t next_random(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

/* Messages of every kind with nonsense in them; the host must survive. */
static void garbage(uint64_t seed)
{
    static char message[200000];
    state = seed | 1;
    for (int i = 0; i < 300; i++) {
        uint32_t kind = next_random() % 3 ? 100 + (uint32_t)(next_random() % 8)
                                          : 200 + (uint32_t)(next_random() % 8);
        size_t len = next_random() % 7 ? next_random() % 300 : next_random() % 170000;
        for (size_t k = 0; k < len; k++)
            message[k] = (char)next_random();
        uint32_t claimed = next_random() % 2 ? (uint32_t)(len > 16 ? len - 16 : 0) : (uint32_t)next_random();
        if (len >= 16) {
            memcpy(message, &kind, 4);
            memcpy(message + 4, &claimed, 4);
        }
        HOST(SYS_sendto, 3, (long)message, (long)len, MSG_NOSIGNAL | MSG_DONTWAIT, 0, 0);
    }
    say("garbage sent\n");
}

/*
 * Waits for a client, which makes this an entry point, and takes the mode and
 * its arguments from the path of its request: /kernel/sweep/0/600. What is said
 * goes to the client from there on. Returns how many words there are.
 */
static int serve(char **words, int most)
{
    static char request[4096];
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons(8080)};
    int listener = socket(AF_INET, SOCK_STREAM, 0), count = 1;
    if (bind(listener, (struct sockaddr *)&any, sizeof any) || listen(listener, 8))
        _exit(3);
    int client = accept(listener, NULL, NULL);
    if (client < 0 || read(client, request, sizeof request - 1) <= 0 || dup2(client, 1) != 1)
        _exit(4);
    close(client);
    strtok(request, " /");
    for (char *word; count < most && (word = strtok(NULL, " /")) && strcmp(word, "HTTP");)
        words[count++] = word;
    return count;
}

/* Makes host processes behind the kernel's back until the host refuses. All of them
 * compute, and so does this one afterwards. */
static void explode(void)
{
    long made = 0, result;
    while ((result = HOST(SYS_clone, CLONE_FILES | SIGCHLD)) > 0)
        made++;
    if (result == 0)
        for (;;)
            __asm__ volatile("pause");
    say("made %ld processes, then %ld\n", made, result);
    for (;;)
        __asm__ volatile("pause");
}

int main(int argc, char **argv)
{
    char *served[8] = {0};
    const char *address = getenv("THAW_TEST_HOSTCALL");
    if (!address || !getenv("WATCH") || argc < 2) {
        say("hostile runs only in a sandbox, started by its test\n");
        return 2;
    }
    host_call_address = (void *)strtoul(address, NULL, 16);
    /* Outside a sandbox nothing is mapped there, and this ends the program. */
    volatile unsigned char probe = *(volatile unsigned char *)host_call_address;
    (void)probe;

    if (!strcmp(argv[1], "serve")) {
        argc = serve(served, 8);
        argv = served;
        if (argc < 2)
            return 5;
    }
    long first = argc > 3 ? strtol(argv[3], NULL, 0) : 0, last = argc > 4 ? strtol(argv[4], NULL, 0) : 0;
    if (!strcmp(argv[1], "syscall32"))
        call_in_32_bits((const unsigned char[]){0x0f, 0x05});
    if (!strcmp(argv[1], "sysenter32"))
        call_in_32_bits((const unsigned char[]){0x0f, 0x34});
    if (!strcmp(argv[1], "sysenter"))
        __asm__ volatile("sysenter");
    if (!strcmp(argv[1], "int80")) {
        for (long number = strtol(argv[2], NULL, 0); number <= first; number++) {
            say("at %ld\n", number);
            report("int80", number, "-", call_int80(number, 0x5a5a5a5b));
        }
    } else if (!strcmp(argv[1], "descriptors")) {
        descriptors();
    } else if (!strcmp(argv[1], "offsets")) {
        offsets();
    } else if (!strcmp(argv[1], "console") || !strcmp(argv[1], "flood")) {
        console(!strcmp(argv[1], "flood"));
    } else if (!strcmp(argv[1], "broker")) {
        broker();
    } else if (!strcmp(argv[1], "explode")) {
        explode();
    } else if (!strcmp(argv[1], "garbage")) {
        garbage(strtoul(argv[2], NULL, 0));
    } else {
        by_kernel = !strcmp(argv[1], "kernel");
        if (!strcmp(argv[2], "sweep"))
            sweep(first, last);
        else
            attacks(first);
    }
    say("done\n");
    return 0;
}
