/* A program that mounts as much and as oddly as it can, and says what came of it. Every round must
 * find as much room as the first one, or something was kept that nobody can reach. */
#include "../c/guest.h"
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>

static int mounts(void)
{
    int count = 0;
    char line[8192];
    FILE *file = fopen("/proc/self/mounts", "r");
    while (file && fgets(line, sizeof line, file))
        count++;
    if (file)
        fclose(file);
    return count;
}

/* Unmounts until nothing is mounted there. */
static void clear(const char *path)
{
    while (umount2(path, MNT_DETACH) == 0)
        ;
}

/* Each bind doubles what there is; then one by one up to the bound. */
static int fill(void)
{
    int before = mounts();
    MUST(mount("none", "/m", "tmpfs", 0, NULL));
    MUST(mkdir("/m/x", 0755));
    while (mount("/m", "/m/x", NULL, MS_BIND | MS_REC, NULL) == 0)
        ;
    int doubled = errno;
    while (mount("/m/x", "/m/x", NULL, MS_BIND, NULL) == 0)
        ;
    say("%s, then %s\n", error_name(doubled), error_name(errno));
    int made = mounts() - before;
    clear("/m");
    say("left over: %d\n", mounts() - before);
    return made;
}

/* Namespaces share the bound, and end with their processes. */
static int unshared(void)
{
    int made = 0, status;
    pid_t child = MUST(fork());
    if (!child) {
        while (made < 255 && unshare(CLONE_NEWNS) == 0)
            made++;
        _exit(made);
    }
    MUST(waitpid(child, &status, 0));
    return WEXITSTATUS(status);
}

/* Directories as deep as they go, mounts at the bottom, each in the one before, and one look at all. */
static void deep(void)
{
    MUST(mount("none", "/m", "tmpfs", 0, NULL));
    MUST(chdir("/m"));
    for (int i = 0; i < 100; i++) {
        for (int depth = 0; depth < 100; depth++) {
            MUST(mkdir("d", 0755));
            MUST(chdir("d"));
        }
        MUST(mount("none", ".", "tmpfs", 0, NULL));
        /* The place itself is covered now; what covers it is found from above. */
        MUST(chdir("../d"));
    }
    say("deep mounts are listed: %s\n", mounts() > 100 ? "yes" : "no");
    MUST(chdir("/"));
    clear("/m");
}

/* More than the sandbox has. */
static void heavy(void)
{
    MUST(mount("none", "/m", "tmpfs", 0, "size=1t"));
    int fd = (int)MUST(open("/m/file", O_CREAT | O_WRONLY, 0600));
    static char bytes[1 << 20];
    memset(bytes, 1, sizeof bytes);
    while (write(fd, bytes, sizeof bytes) > 0)
        ;
    say("a large file: %s\n", error_name(errno));
    MUST(umount2("/m", MNT_DETACH));
    close(fd);
}

int main(void)
{
    mkdir("/m", 0755);
    int first = fill();
    say("mounts: %s\n", first > 4000 && first <= 8192 ? "within the bound" : "NOT BOUNDED");
    for (int round = 0; round < 3; round++)
        say("as many again: %s\n", fill() == first ? "yes" : "no");
    int namespaces = unshared();
    say("namespaces: %s\n", namespaces == 255 ? "each ended with the next" : "NOT ENDED");
    for (int round = 0; round < 20; round++)
        unshared();
    say("as many again: %s\n", fill() == first ? "yes" : "no");
    deep();
    heavy();
    heavy();
    say("as many again: %s\n", fill() == first ? "yes" : "no");
    return 0;
}
