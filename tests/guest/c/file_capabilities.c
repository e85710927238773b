/* Capabilities of files: which values security.capability takes, what execve(2) makes of them,
 * and what takes them away (capabilities(7), "File capabilities"). What needs the superuser is
 * left out for others, and only capabilities that containers have, too, are named. */
#include "guest.h"
#include <linux/capability.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <sys/xattr.h>

#define BIT(cap) (1U << (cap))
#define NAME "security.capability"

static const uint32_t used = BIT(CAP_CHOWN) | BIT(CAP_DAC_OVERRIDE) | BIT(CAP_FOWNER) |
                             BIT(CAP_KILL) | BIT(CAP_SETGID) | BIT(CAP_SETUID) | BIT(CAP_SETPCAP);

struct value {
    uint32_t magic, permitted, inheritable, high[2], root;
};

#define VERSION_2 20
#define VERSION_3 24

static int set_caps(const char *path, uint32_t permitted, uint32_t inheritable, bool effective)
{
    struct value value = {0x02000000U | effective, permitted, inheritable, {0, 0}, 0};
    return setxattr(path, NAME, &value, VERSION_2, 0);
}

static void show_value(const char *path)
{
    unsigned char value[64];
    ssize_t len = lgetxattr(path, NAME, value, sizeof value);
    if (len < 0) {
        say("capabilities of %s: %s\n", path, error_name(errno));
        return;
    }
    say("capabilities of %s:", path);
    for (ssize_t i = 0; i < len; i++)
        say(" %02x", value[i]);
    say("\n");
}

static void show_sets(const char *when)
{
    char line[256];
    FILE *status = fopen("/proc/self/status", "r");
    say("%s: user %u, effective %u, secure %lu", when, getuid(), geteuid(), getauxval(AT_SECURE));
    while (status && fgets(line, sizeof line, status)) {
        unsigned long long set;
        char name[8];
        if (sscanf(line, "Cap%7[^:]: %llx", name, &set) == 2 && strcmp(name, "Bnd"))
            say(", %s %llx", name, set & used);
    }
    say(", dumpable %d\n", prctl(PR_GET_DUMPABLE) == 1);
}

static void become_user(void)
{
    MUST(syscall(SYS_setresgid, 1000, 1000, 1000));
    MUST(syscall(SYS_setresuid, 1000, 1000, 1000));
}

static void set_own(uint32_t effective, uint32_t permitted, uint32_t inheritable)
{
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{effective, permitted, inheritable}, {0, 0, 0}};
    MUST(syscall(SYS_capset, &header, data));
}

static void nothing(void) {}

static void no_new_privileges(void)
{
    MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
}

static void bounded(void)
{
    MUST(prctl(PR_CAPBSET_DROP, CAP_KILL));
}

static void heir(void)
{
    set_own(used, used, BIT(CAP_KILL) | BIT(CAP_CHOWN));
}

/* Runs a program as a user, or as who the preparation has made of root. */
static void run(const char *name, const char *path, void (*prepare)(void), bool by_user)
{
    pid_t child = fork();
    if (child == 0) {
        prepare();
        if (by_user)
            become_user();
        execl(path, "program", "show", name, NULL);
        say("%s: %s\n", name, error_name(errno));
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    if (status)
        say("ended with %x\n", status);
}

static void ambient(void)
{
    MUST(prctl(PR_SET_KEEPCAPS, 1));
    become_user();
    set_own(BIT(CAP_KILL), BIT(CAP_KILL), BIT(CAP_KILL));
    MUST(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_KILL, 0, 0));
}

static void copy_self(const char *to)
{
    char buffer[65536];
    int in = (int)MUST(open("/proc/self/exe", O_RDONLY));
    int out = (int)MUST(open(to, O_WRONLY | O_CREAT | O_TRUNC, 0755));
    ssize_t count;
    while ((count = MUST(read(in, buffer, sizeof buffer))) > 0)
        MUST(write(out, buffer, (size_t)count));
    close(in);
    close(out);
}

static void values(void)
{
    struct value value = {0x02000001U, BIT(CAP_KILL), BIT(CAP_CHOWN), {1, 0}, 0};
    put_file("file", "");
    TRY(setxattr("file", NAME, &value, 4, 0));
    TRY(setxattr("file", NAME, &value, VERSION_2 - 1, 0));
    TRY(setxattr("file", NAME, &value, VERSION_3, 0));
    TRY(setxattr("file", NAME, "?", 1, 0));
    TRY(setxattr("file", NAME, &value, VERSION_2, XATTR_REPLACE));
    TRY(setxattr("file", NAME, &value, VERSION_2, XATTR_CREATE));
    show_value("file");
    value.magic = 0x03000001U;
    TRY(setxattr("file", NAME, &value, VERSION_2, 0));
    TRY(setxattr("file", NAME, &value, VERSION_3, 0));
    show_value("file");
    value.root = 1000;
    TRY(setxattr("file", NAME, &value, VERSION_3, 0));
    show_value("file");
    value.magic = 0x01000001U;
    TRY(setxattr("file", NAME, &value, 12, 0));
    TRY(removexattr("file", NAME));
    TRY(removexattr("file", NAME));
    show_value("file");
    MUST(symlink("nowhere", "link"));
    value.magic = 0x02000000U;
    TRY(lsetxattr("link", NAME, &value, VERSION_2, 0));
    show_value("link");
}

static void executions(const char *scratch)
{
    uint32_t kill = BIT(CAP_KILL), both = BIT(CAP_KILL) | BIT(CAP_CHOWN);
    copy_self("program");
    run("without", "./program", nothing, true);
    MUST(set_caps("program", both, 0, true));
    run("effective", "./program", nothing, true);
    run("no new privileges", "./program", no_new_privileges, true);
    run("bounded", "./program", bounded, true);
    run("by root", "./program", nothing, false);
    run("ambient", "./program", ambient, false);
    MUST(set_caps("program", both, 0, false));
    run("permitted", "./program", nothing, true);
    run("permitted, bounded", "./program", bounded, true);
    MUST(set_caps("program", 0, kill, true));
    run("inheritable", "./program", heir, true);
    run("inheritable, of nobody", "./program", nothing, true);
    MUST(set_caps("program", 0, 0, false));
    run("empty, ambient", "./program", ambient, false);
    run("empty, by root", "./program", nothing, false);
    MUST(set_caps("program", kill, 0, true));
    MUST(chmod("program", 04755));
    run("set-user-ID", "./program", nothing, true);
    MUST(removexattr("program", NAME));
    run("set-user-ID alone", "./program", nothing, true);
    MUST(chmod("program", 0755));
    run("ambient alone", "./program", ambient, false);
    struct value value = {0x03000001U, kill, 0, {0, 0}, 1000};
    MUST(setxattr("program", NAME, &value, VERSION_3, 0));
    run("of another namespace", "./program", nothing, true);

    PART("scripts and links");
    char text[PATH_MAX + 64];
    snprintf(text, sizeof text, "#!%s/program show\n", scratch);
    put_file("script", text);
    MUST(chmod("script", 0755));
    MUST(removexattr("program", NAME));
    MUST(set_caps("script", kill, 0, true));
    run("script", "./script", nothing, true);
    MUST(set_caps("program", kill, 0, true));
    run("interpreter", "./script", nothing, true);
    MUST(symlink("program", "way"));
    run("by a link", "./way", nothing, true);
    MUST(link("program", "second"));
    run("by another name", "./second", nothing, true);
    MUST(rename("second", "third"));
    run("after a rename", "./third", nothing, true);
}

/* What each change leaves. */
static void changes(void)
{
    struct timespec times[2] = {{1, 0}, {1, 0}};
    char *map;
    int fd;
#define CHANGE(what)                                                                               \
    put_file("changed", "text");                                                                   \
    MUST(set_caps("changed", 1, 0, false));                                                        \
    MUST(setxattr("changed", "user.a", "1", 1, 0));                                                \
    fd = (int)MUST(open("changed", O_RDWR));                                                       \
    TRY(what);                                                                                     \
    close(fd);                                                                                     \
    show_value("changed");                                                                         \
    TRY(getxattr("changed", "user.a", NULL, 0))
    CHANGE(write(fd, "x", 1));
    CHANGE(write(fd, "x", 0));
    CHANGE(pwrite(fd, "x", 1, 10));
    CHANGE(ftruncate(fd, 2));
    CHANGE(truncate("changed", 4));
    CHANGE(close(open("changed", O_WRONLY | O_TRUNC)));
    CHANGE(close(open("changed", O_WRONLY)));
    CHANGE(read(fd, times, 1));
    CHANGE(chown("changed", 7, 8));
    CHANGE(chown("changed", (uid_t)-1, (gid_t)-1));
    CHANGE(fchown(fd, 0, 0));
    CHANGE(chmod("changed", 0700));
    CHANGE(utimensat(AT_FDCWD, "changed", times, 0));
    CHANGE(rename("changed", "changed"));
    CHANGE(setxattr("changed", "user.b", "2", 1, 0));
    CHANGE((map = mmap(NULL, 1, PROT_WRITE, MAP_SHARED, fd, 0)) != MAP_FAILED && (*map = 'y'));
    MUST(mkdir("directory", 0755));
    MUST(set_caps("directory", 1, 0, false));
    TRY(chown("directory", 7, 8));
    show_value("directory");
    TRY(lchown("link", 7, 8));
    show_value("link");
}

static void by_others(void)
{
    struct value value = {0x02000001U, BIT(CAP_KILL), 0, {0, 0}, 0};
    put_file("own", "");
    if (geteuid() == 0) {
        MUST(chown("own", 1000, 1000));
        MUST(chmod(".", 0777));
        become_user();
    }
    TRY(setxattr("own", NAME, &value, VERSION_2, 0));
    TRY(setxattr("own", NAME, &value, VERSION_3, 0));
    TRY(setxattr("own", "security.other", "x", 1, 0));
    TRY(removexattr("own", NAME));
    show_value("own");
}

/* For crates/e2e/tests/containers.rs. */
static void show_attributes(const char *path)
{
    char list[1024], value[256];
    ssize_t len = llistxattr(path, list, sizeof list);
    say("%s:", path);
    for (char *name = list; name < list + len; name += strlen(name) + 1) {
        ssize_t size = lgetxattr(path, name, value, sizeof value);
        if (strcmp(name, NAME))
            say(" %s=%.*s", name, (int)size, value);
        else
            say(" %s(%zd)", name, size);
    }
    say("\n");
}

int main(int argc, char **argv)
{
    if (argc > 2 && !strcmp(argv[1], "attributes")) {
        for (int i = 2; i < argc; i++)
            show_attributes(argv[i]);
        return 0;
    }
    if (argc > 2 && !strcmp(argv[1], "show")) {
        show_sets(argv[2]);
        return 0;
    }
    char *scratch = enter_scratch();
    MUST(chmod(".", 0755));
    if (geteuid() == 0) {
        PART("values");
        values();
        PART("executions");
        executions(scratch);
        PART("changes");
        changes();
    }
    PART("by others");
    pid_t child = fork();
    if (child == 0) {
        by_others();
        _exit(0);
    }
    waitpid(child, NULL, 0);
    leave_scratch(scratch);
    return 0;
}
