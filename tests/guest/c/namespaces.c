/* Namespaces other than those of mounts and process ids (namespaces(7)), each in a process of its own
 * that begins with a new user namespace, so that it needs no rights. */
#include "guest.h"
#include <arpa/inet.h>
#include <grp.h>
#include <linux/if.h>
#include <linux/nsfs.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/mount.h>
#include <sys/msg.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/utsname.h>

static uid_t own_uid;
static gid_t own_gid;

static int put(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY);
    if (fd < 0)
        return -1;
    int done = (int)write(fd, text, strlen(text));
    int error = errno;
    close(fd);
    errno = error;
    return done;
}

static void show(const char *path)
{
    char text[512];
    int fd = open(path, O_RDONLY);
    ssize_t len = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (len < 0) {
        say("%s: %s\n", path, error_name(errno));
    } else {
        text[len] = 0;
        say("%s: %s", path, text);
    }
    if (fd >= 0)
        close(fd);
}

/* Runs a part in a process of its own. */
static void apart(const char *title, void (*part)(void))
{
    PART(title);
    pid_t child = (pid_t)MUST(fork());
    if (!child) {
        part();
        _exit(0);
    }
    int status;
    MUST(waitpid(child, &status, 0));
    say("status %x\n", status);
}

/* Becomes root of a new user namespace, and whatever else the flags say. */
static void become_root(int flags)
{
    char line[64];
    MUST(unshare(CLONE_NEWUSER | flags));
    MUST(put("/proc/self/setgroups", "deny"));
    snprintf(line, sizeof line, "0 %u 1\n", own_uid);
    MUST(put("/proc/self/uid_map", line));
    snprintf(line, sizeof line, "0 %u 1\n", own_gid);
    MUST(put("/proc/self/gid_map", line));
}

static void users(void)
{
    char line[64], other[64];
    TRY(unshare(CLONE_NEWUSER));
    say("nobody %u %u %u\n", getuid(), geteuid(), getgid());
    TRY(setuid(0));
    TRY(put("/proc/self/uid_map", ""));
    TRY(put("/proc/self/uid_map", "0 0"));
    TRY(put("/proc/self/uid_map", "0 1 0\n"));
    TRY(put("/proc/self/uid_map", "0 1 2\n1 5 1\n"));
    TRY(put("/proc/self/uid_map", "4294967295 1 1\n"));
    snprintf(other, sizeof other, "0 %u 1\n", own_uid + 1);
    IS(put("/proc/self/uid_map", other) == -1 && errno == EPERM);
    snprintf(line, sizeof line, "0 %u 1\n", own_gid);
    IS(put("/proc/self/gid_map", line) == -1 && errno == EPERM);
    show("/proc/self/setgroups");
    TRY(put("/proc/self/setgroups", "never"));
    TRY(put("/proc/self/setgroups", "deny"));
    TRY(put("/proc/self/setgroups", "allow"));
    show("/proc/self/setgroups");
    snprintf(line, sizeof line, "0 %u 1\n", own_uid);
    IS(put("/proc/self/uid_map", line) == (int)strlen(line));
    IS(put("/proc/self/uid_map", line) == -1 && errno == EPERM);
    snprintf(line, sizeof line, "0 %u 1\n", own_gid);
    IS(put("/proc/self/gid_map", line) == (int)strlen(line));
    say("root %u %u %u\n", getuid(), geteuid(), getgid());
    gid_t group = 0;
    TRY(setgroups(1, &group));
    TRY(setuid(1));
    TRY(setuid(0));
    TRY(setresuid(0, 0, 0));
    struct stat st;
    MUST(stat("/proc/self", &st));
    say("own %u %u\n", st.st_uid, st.st_gid);
    TRY(chown("/tmp", 1, -1));
    TRY(unshare(CLONE_NEWUSER));
    say("below %u\n", getuid());
    TRY(put("/proc/self/uid_map", "0 1 1\n"));
    TRY(put("/proc/self/uid_map", "7 0 1\n"));
    say("below %u\n", getuid());
    show("/proc/self/uid_map");
}

static void rights(void)
{
    become_root(0);
    char name[8] = "x";
    struct utsname names;
    MUST(uname(&names));
    TRY(sethostname(name, 1));
    TRY(mount("none", "/tmp", "tmpfs", 0, NULL));
    TRY(chroot("/"));
    TRY(mknod("/tmp/namespaces-device", S_IFCHR | 0600, 0x103));
    TRY(unshare(CLONE_NEWNS));
    TRY(mount("none", "/tmp", "devtmpfs", 0, NULL));
    TRY(mount("none", "/tmp", "none at all", 0, NULL));
    TRY(mount("none", "/tmp", "tmpfs", 0, "uid=5"));
    TRY(mount("none", "/tmp", "tmpfs", 0, NULL));
    struct stat st;
    MUST(stat("/tmp", &st));
    say("%o %u %u\n", st.st_mode, st.st_uid, st.st_gid);
    TRY(mkdir("/tmp/a", 0755));
    TRY(mknod("/tmp/device", S_IFCHR | 0600, 0x103));
    TRY(mknod("/tmp/whiteout", S_IFCHR | 0600, 0));
    TRY(open("/tmp/whiteout", O_RDONLY));
    TRY(mount("/tmp/a", "/tmp/a", NULL, MS_BIND, NULL));
    TRY(umount("/tmp/a"));
    TRY(umount("/proc"));
    TRY(umount("/tmp"));
}

static void names(void)
{
    become_root(0);
    struct utsname before, now;
    MUST(uname(&before));
    int outer = (int)MUST(open("/proc/self/ns/uts", O_RDONLY | O_CLOEXEC));
    TRY(unshare(CLONE_NEWUTS));
    MUST(uname(&now));
    IS(!strcmp(before.nodename, now.nodename));
    TRY(sethostname("inside", 6));
    MUST(uname(&now));
    say("%s\n", now.nodename);
    show("/proc/sys/kernel/hostname");
    TRY(setdomainname("domain", 6));
    show("/proc/sys/kernel/domainname");
    int inner = (int)MUST(open("/proc/self/ns/uts", O_RDONLY | O_CLOEXEC));
    TRY(ioctl(inner, NS_GET_NSTYPE) == CLONE_NEWUTS);
    int users = (int)OK(ioctl(inner, NS_GET_USERNS));
    TRY(ioctl(users, NS_GET_NSTYPE) == CLONE_NEWUSER);
    uid_t owner = 7;
    TRY(ioctl(users, NS_GET_OWNER_UID, &owner));
    say("owner %u\n", owner);
    TRY(ioctl(inner, NS_GET_OWNER_UID, &owner));
    TRY(ioctl(inner, NS_GET_PARENT));
    TRY(ioctl(users, NS_GET_PARENT));
    TRY(ioctl(outer, NS_GET_USERNS));
    TRY(setns(inner, CLONE_NEWIPC));
    TRY(setns(inner, CLONE_NEWUTS));
    TRY(setns(inner, 0));
    TRY(setns(outer, 0));
    TRY(setns(users, 0));
}

static void objects(void)
{
    become_root(0);
    int outside = (int)MUST(msgget(IPC_PRIVATE, 0600));
    TRY(unshare(CLONE_NEWIPC));
    TRY(msgctl(outside, IPC_RMID, NULL));
    TRY(msgget(0x77777, IPC_CREAT | IPC_EXCL | 0600));
    struct msqid_ds state;
    TRY(msgctl(0, IPC_STAT, &state));
    say("%u %u\n", state.msg_perm.uid, state.msg_perm.cuid);
    pid_t child = (pid_t)MUST(fork());
    if (!child) {
        TRY(unshare(CLONE_NEWIPC));
        TRY(msgget(0x77777, 0));
        _exit(0);
    }
    MUST(waitpid(child, NULL, 0));
    TRY(msgget(0x77777, 0));
}

static void memory(void)
{
    become_root(CLONE_NEWIPC);
    int segment = (int)MUST(shmget(IPC_PRIVATE, 8192, IPC_CREAT | 0600));
    void *first = shmat(segment, NULL, 0), *second = shmat(segment, NULL, 0);
    IS(first != (void *)-1 && second != (void *)-1);
    TRY(unshare(CLONE_NEWIPC));
    TRY(shmdt(first));
    TRY(shmdt(first));
    TRY(shmdt(second));
}

/* What a process in a namespace sees of one of the same user outside of it, and the other way round. */
static void look_at(pid_t other)
{
    static const char *const links[] = {"root", "cwd", "exe", "fd/0", "ns/net"};
    static const char *const files[] = {"environ", "maps",  "smaps",    "auxv",
                                        "status",  "stat", "mountinfo", "fd",
                                        "root/etc", "cwd/.", "mem"};
    char path[64], target[64];
    for (size_t at = 0; at < sizeof links / sizeof *links; at++) {
        snprintf(path, sizeof path, "/proc/%d/%s", other, links[at]);
        ssize_t len = readlink(path, target, sizeof target);
        say("%s: %s\n", links[at], len < 0 ? error_name(errno) : "shown");
    }
    for (size_t at = 0; at < sizeof files / sizeof *files; at++) {
        snprintf(path, sizeof path, "/proc/%d/%s", other, files[at]);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        say("%s: %s\n", files[at], fd < 0 ? error_name(errno) : "open");
    }
    snprintf(path, sizeof path, "/proc/%d/comm", other);
    say("comm: %s\n", put(path, "other") < 0 ? error_name(errno) : "written");
    int pidfd = (int)MUST(syscall(SYS_pidfd_open, other, 0));
    int stolen = (int)syscall(SYS_pidfd_getfd, pidfd, 0, 0);
    say("getfd: %s\n", stolen < 0 ? error_name(errno) : "done");
}

static void outsiders(void)
{
    int ready[2], done[2];
    char byte;
    pid_t outside = getpid();
    MUST(pipe(ready));
    MUST(pipe(done));
    pid_t child = (pid_t)MUST(fork());
    if (!child) {
        close(done[1]);
        become_root(0);
        look_at(outside);
        MUST(write(ready[1], "", 1));
        (void)!read(done[0], &byte, 1);
        _exit(0);
    }
    MUST(read(ready[0], &byte, 1));
    PART("the other way round");
    look_at(child);
    close(done[1]);
    MUST(waitpid(child, NULL, 0));
}

/* Several namespaces of a process are entered at once, of which some are those of a parent. */
static void several(void)
{
    int ready[2], done[2];
    char byte;
    become_root(CLONE_NEWUTS);
    MUST(pipe(ready));
    MUST(pipe(done));
    pid_t child = (pid_t)MUST(fork());
    if (!child) {
        close(done[1]);
        MUST(unshare(CLONE_NEWUSER | CLONE_NEWNS));
        MUST(write(ready[1], "", 1));
        (void)!read(done[0], &byte, 1);
        _exit(0);
    }
    MUST(read(ready[0], &byte, 1));
    int pidfd = (int)MUST(syscall(SYS_pidfd_open, child, 0));
    TRY(setns(pidfd, CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWUTS));
    TRY(setns(pidfd, CLONE_NEWUTS));
    close(done[1]);
}

/* Who has sent a signal, and whose child has ended, has an id of the receiver's. */
static void senders(void)
{
    MUST(unshare(CLONE_NEWUSER));
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigaddset(&set, SIGCHLD);
    MUST(sigprocmask(SIG_BLOCK, &set, NULL));
    siginfo_t info;
    MUST(kill(getpid(), SIGUSR1));
    MUST(sigwaitinfo(&set, &info));
    say("sender %u\n", info.si_uid);
    pid_t child = (pid_t)MUST(fork());
    if (!child)
        _exit(0);
    MUST(sigwaitinfo(&set, &info));
    say("child %u\n", info.si_uid);
    MUST(waitid(P_ALL, 0, &info, WEXITED));
    say("ended %u\n", info.si_uid);
}

static void network(void)
{
    become_root(CLONE_NEWNET);
    struct sockaddr_in there = {.sin_family = AF_INET, .sin_port = htons(4711)};
    there.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const struct sockaddr *address = (const struct sockaddr *)&there;
    int udp = (int)MUST(socket(AF_INET, SOCK_DGRAM, 0));
    int tcp = (int)MUST(socket(AF_INET, SOCK_STREAM, 0));
    struct ifreq request = {.ifr_name = "lo"};
    MUST(ioctl(udp, SIOCGIFFLAGS, &request));
    say("flags %x\n", request.ifr_flags);
    TRY(ioctl(udp, SIOCGIFADDR, &request));
    TRY(connect(tcp, address, sizeof there));
    TRY(bind(udp, address, sizeof there));
    TRY(connect(udp, address, sizeof there));
    request.ifr_flags = IFF_UP;
    TRY(ioctl(udp, SIOCSIFFLAGS, &request));
    MUST(ioctl(udp, SIOCGIFFLAGS, &request));
    say("flags %x\n", request.ifr_flags);
    TRY(connect(tcp, address, sizeof there));
    int listener = (int)MUST(socket(AF_INET, SOCK_STREAM, 0));
    TRY(bind(listener, address, sizeof there));
    TRY(listen(listener, 1));
    int client = (int)MUST(socket(AF_INET, SOCK_STREAM, 0));
    TRY(connect(client, address, sizeof there));
    there.sin_addr.s_addr = inet_addr("192.0.2.1");
    int away = (int)MUST(socket(AF_INET, SOCK_STREAM, 0));
    TRY(connect(away, address, sizeof there));
    TRY(bind(away, address, sizeof there));
    struct sockaddr_un name = {.sun_family = AF_UNIX, .sun_path = "\0namespaces"};
    int local = (int)MUST(socket(AF_UNIX, SOCK_STREAM, 0));
    TRY(bind(local, (struct sockaddr *)&name, sizeof name));
    TRY(listen(local, 1));
    TRY(unshare(CLONE_NEWNET));
    int other = (int)MUST(socket(AF_UNIX, SOCK_STREAM, 0));
    TRY(connect(other, (struct sockaddr *)&name, sizeof name));
    TRY(bind(other, (struct sockaddr *)&name, sizeof name));
}

static int nothing(void *unused)
{
    (void)unused;
    return 0;
}

static void flags(void)
{
    static char stack[65536];
    TRY(clone(nothing, stack + sizeof stack, CLONE_NEWUSER | CLONE_FS | SIGCHLD, NULL));
    TRY(clone(nothing, stack + sizeof stack,
              CLONE_NEWUSER | CLONE_VM | CLONE_THREAD | CLONE_SIGHAND, NULL));
    OK(clone(nothing, stack + sizeof stack, CLONE_NEWUSER | CLONE_NEWUTS | CLONE_NEWNET | SIGCHLD,
             NULL));
    int status = 7;
    MUST(wait(&status));
    say("status %x\n", status);
    int uts = (int)MUST(open("/proc/self/ns/uts", O_RDONLY | O_CLOEXEC));
    int users = (int)MUST(open("/proc/self/ns/user", O_RDONLY | O_CLOEXEC));
    TRY(setns(users, CLONE_NEWUSER));
    TRY(setns(1, 0));
    TRY(setns(uts, CLONE_NEWUSER));
    TRY(ioctl(users, NS_GET_PARENT));
}

int main(void)
{
    own_uid = geteuid();
    own_gid = getegid();
    apart("users", users);
    apart("rights", rights);
    apart("names", names);
    apart("objects", objects);
    apart("memory", memory);
    apart("outsiders", outsiders);
    apart("several", several);
    apart("senders", senders);
    apart("network", network);
    apart("flags", flags);
    return 0;
}
