/* User and group ids, capabilities, secure bits, set-user-ID programs:
 * credentials(7), capabilities(7). Each part runs in a child of its own. What needs
 * the superuser is left out for others, and only capabilities that containers have,
 * too, are named. */
#include "guest.h"
#include <grp.h>
#include <linux/capability.h>
#include <linux/securebits.h>
#include <sys/auxv.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#define BIT(cap) (1ULL << (cap))
static const uint64_t used = BIT(CAP_CHOWN) | BIT(CAP_DAC_OVERRIDE) | BIT(CAP_FOWNER) |
                             BIT(CAP_KILL) | BIT(CAP_SETGID) | BIT(CAP_SETUID) | BIT(CAP_SETPCAP);

struct sets {
    uint64_t effective, permitted, inheritable;
};

static int get(struct sets *sets)
{
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];
    int result = (int)syscall(SYS_capget, &header, data);
    sets->effective = data[0].effective | (uint64_t)data[1].effective << 32;
    sets->permitted = data[0].permitted | (uint64_t)data[1].permitted << 32;
    sets->inheritable = data[0].inheritable | (uint64_t)data[1].inheritable << 32;
    return result;
}

static int set(uint64_t effective, uint64_t permitted, uint64_t inheritable)
{
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {
        {(uint32_t)effective, (uint32_t)permitted, (uint32_t)inheritable},
        {(uint32_t)(effective >> 32), (uint32_t)(permitted >> 32), (uint32_t)(inheritable >> 32)}};
    return (int)syscall(SYS_capset, &header, data);
}

static void show(const char *when)
{
    struct sets sets = {0};
    get(&sets);
    uid_t r, e, s;
    getresuid(&r, &e, &s);
    say("%s: users %u %u %u, effective %llx, permitted %llx, inheritable %llx\n", when, r, e, s,
        (unsigned long long)(sets.effective & used), (unsigned long long)(sets.permitted & used),
        (unsigned long long)(sets.inheritable & used));
}

/* Runs a part in a child. */
static void in_child(const char *name, void (*part)(void))
{
    PART(name);
    pid_t child = fork();
    if (child == 0) {
        part();
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    if (status)
        say("ended with %x\n", status);
}

static void headers(void)
{
    struct __user_cap_header_struct header = {0, 0};
    struct __user_cap_data_struct data[2];
    TRY(syscall(SYS_capget, &header, NULL));
    IS(header.version == _LINUX_CAPABILITY_VERSION_3);
    header.version = 1;
    TRY(syscall(SYS_capget, &header, data));
    header.version = _LINUX_CAPABILITY_VERSION_1;
    TRY(syscall(SYS_capget, &header, data));
    header.pid = -1;
    TRY(syscall(SYS_capget, &header, data));
    header.pid = 0x7ffffff0;
    TRY(syscall(SYS_capget, &header, data));
    TRY(syscall(SYS_capset, &header, data));
    TRY(syscall(SYS_capget, NULL, data));
    TRY(prctl(PR_CAPBSET_READ, 64));
    TRY(prctl(PR_CAPBSET_READ, 1000));
    TRY(prctl(PR_SET_KEEPCAPS, 2));
    TRY(prctl(PR_CAP_AMBIENT, 9, 0, 0, 0));
    TRY(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_IS_SET, 64, 0, 0));
    TRY(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 1, 0, 0));
    TRY(prctl(PR_SET_NO_NEW_PRIVS, 0, 0, 0, 0));
    TRY(prctl(PR_SET_NO_NEW_PRIVS, 1, 1, 0, 0));
    TRY(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0));
    TRY(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    TRY(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0));
}

static void user_goes(void)
{
    show("at first");
    TRY(seteuid(1000));
    show("effective");
    TRY(access("/root", W_OK)); /* asks for the real user */
    TRY(setgid(5));
    TRY(seteuid(0));
    TRY(setuid(1000));
    show("all");
    TRY(setuid(0));
    TRY(setgid(1000));
    TRY(setgroups(0, NULL));
    TRY(setresuid(-1, 0, -1));
    TRY(setresuid(1000, 1000, -1));
    TRY(setreuid(1001, -1));
    TRY(setuid((uid_t)-1));
    TRY(chroot("/"));
    TRY(prctl(PR_CAPBSET_DROP, CAP_KILL));
    TRY(prctl(PR_SET_SECUREBITS, SECBIT_NOROOT));
    TRY(kill(getppid(), 0));
}

/* What setpriv(1) and many servers do: the user first, the group after. */
static void keeps(void)
{
    TRY(prctl(PR_GET_KEEPCAPS));
    TRY(prctl(PR_SET_KEEPCAPS, 1));
    TRY(prctl(PR_GET_KEEPCAPS));
    TRY(setresuid(1000, 1000, 1000));
    show("kept");
    TRY(setresgid(1000, 1000, 1000));
    uint64_t some = BIT(CAP_SETGID) | BIT(CAP_KILL);
    TRY(set(some, some, 0));
    TRY(setgroups(0, NULL));
    TRY(setresgid(1001, 1001, 1001));
    TRY(set(some, some | BIT(CAP_SETUID), 0));
    TRY(set(some | BIT(CAP_SETUID), some, 0));
    TRY(set(0, some, BIT(CAP_SETUID)));
    TRY(set(0, some, some));
    TRY(setresgid(1002, 1002, 1002));
    TRY(kill(getppid(), 0));
    TRY(set(some, some, some));
    TRY(kill(getppid(), 0));
    TRY(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_SETUID, 0, 0));
    TRY(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_KILL, 0, 0));
    TRY(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_IS_SET, CAP_KILL, 0, 0));
    execl("/proc/self/exe", "credentials", "show", "ambient", NULL);
}

static void secure_bits(void)
{
    TRY(prctl(PR_GET_SECUREBITS));
    TRY(prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP | SECBIT_NO_SETUID_FIXUP_LOCKED));
    TRY(prctl(PR_SET_SECUREBITS, 0));
    TRY(prctl(PR_SET_SECUREBITS, 1 << 20));
    TRY(setresuid(1000, 1000, 1000));
    show("without a fix");
    TRY(setresgid(7, 7, 7));
    TRY(setresuid(0, 0, 0));
    TRY(prctl(PR_SET_SECUREBITS,
              SECBIT_NO_SETUID_FIXUP | SECBIT_NO_SETUID_FIXUP_LOCKED | SECBIT_NOROOT));
    execl("/proc/self/exe", "credentials", "show", "no root", NULL);
}

static void bounded(void)
{
    TRY(prctl(PR_CAPBSET_READ, CAP_KILL));
    TRY(prctl(PR_CAPBSET_DROP, CAP_KILL));
    TRY(prctl(PR_CAPBSET_READ, CAP_KILL));
    TRY(prctl(PR_CAPBSET_DROP, 64));
    show("still held");
    execl("/proc/self/exe", "credentials", "show", "bounded", NULL);
}

static char directory[] = "/var/tmp/credentialsXXXXXX";
static char path[64];

static const char *in(const char *name)
{
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return path;
}

static void files(void)
{
    int fd = open(in("private"), O_CREAT | O_RDWR, 0600);
    TRY(chmod(path, 04755));
    uint64_t none = 0, some = BIT(CAP_SETPCAP);
    /* The owner is still the owner, without any capability. */
    TRY(set(none, used, 0));
    TRY(chmod(path, 0600));
    TRY(chown(path, 1, 1));
    TRY(set(used, used, 0));
    TRY(chown(path, 1000, 1000));
    TRY(set(some, used, 0));
    TRY(open(path, O_RDONLY));
    TRY(chmod(path, 0644));
    IS(open(path, O_RDONLY) == -1 ? 0 : 1);
    TRY(open(path, O_WRONLY));
    TRY(set(used, used, 0));
    IS(open(path, O_WRONLY) >= 0);
    TRY(chmod(path, 06755));
    TRY(set(used & ~BIT(CAP_FSETID), used, 0));
    IS(write(fd, "x", 1) == 1);
    struct stat st;
    TRY(stat(path, &st));
    say("mode %o\n", st.st_mode & 07777);
    TRY(setfsuid(1000));
    TRY(setfsuid(-1));
    struct sets sets;
    get(&sets);
    IS(!(sets.effective & BIT(CAP_DAC_OVERRIDE)) && sets.effective & BIT(CAP_KILL));
    TRY(setfsuid(0));
    get(&sets);
    IS(!!(sets.effective & BIT(CAP_DAC_OVERRIDE)));
}

static void peers(void)
{
    int pair[2];
    TRY(seteuid(1000));
    socketpair(AF_UNIX, SOCK_STREAM, 0, pair);
    struct ucred seen;
    socklen_t len = sizeof seen;
    TRY(getsockopt(pair[0], SOL_SOCKET, SO_PEERCRED, &seen, &len));
    say("peer %u, is us %d\n", seen.uid, seen.pid == getpid());
}

/* A copy of this program that belongs to somebody else. */
static void copy_of_this(const char *to)
{
    int from = open("/proc/self/exe", O_RDONLY), out = open(to, O_CREAT | O_WRONLY, 0755);
    char buffer[65536];
    for (ssize_t n; (n = read(from, buffer, sizeof buffer)) > 0;)
        if (write(out, buffer, (size_t)n) != n)
            _exit(1);
    close(out);
}

static void run_as_1000(void)
{
    setgroups(0, NULL);
    setresgid(1000, 1000, 1000);
    setresuid(1000, 1000, 1000);
    execl(path, "credentials", "show", "set-user-ID", NULL);
}

static void run_without_new_rights(void)
{
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    run_as_1000();
}

static void run_as_root(void)
{
    execl(path, "credentials", "show", "set-user-ID", NULL);
}

int main(int argc, char **argv)
{
    if (argc == 3) {
        show(argv[2]);
        gid_t r, e, s;
        getresgid(&r, &e, &s);
        say("groups %u %u %u, secure %lu\n", r, e, s, getauxval(AT_SECURE));
        return 0;
    }
    in_child("headers", headers);
    if (getuid() != 0)
        return 0;
    in_child("the user goes", user_goes);
    in_child("capabilities stay", keeps);
    in_child("secure bits", secure_bits);
    in_child("the bounding set", bounded);
    if (!mkdtemp(directory))
        return 1;
    chmod(directory, 0755);
    in_child("files", files);
    in_child("peers", peers);
    copy_of_this(in("program"));
    struct stat st;
    struct {
        unsigned owner, group, mode;
    } kinds[] = {{0, 0, 04755}, {7, 8, 06755}, {7, 8, 02755}, {7, 8, 02745}, {0, 0, 0755}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        IS(chown(path, kinds[i].owner, kinds[i].group) == 0);
        IS(chmod(path, kinds[i].mode) == 0 && stat(path, &st) == 0);
        in_child("set-user-ID for a user", run_as_1000);
        in_child("set-user-ID for root", run_as_root);
        in_child("no new rights", run_without_new_rights);
    }
    unlink(path);
    unlink(in("private"));
    return rmdir(directory);
}
