/* rename(2), link(2), unlink(2), mkdir(2), rmdir(2), symlink(2), readlink(2),
 * mknod(2) and their errors. */
#include "guest.h"
#include <sys/sysmacros.h>

int main(void)
{
    char *scratch = enter_scratch();
    char target[300];

    PART("mkdir and rmdir");
    TRY(mkdir("d", 0777));
    TRY(mkdir("d", 0777));
    TRY(mkdir("d/", 0777));
    TRY(mkdir("d/e/f", 0777));
    TRY(mkdir("d/e/", 0700));
    show_stat("d/e");
    TRY(mkdir("", 0777));
    TRY(mkdir(".", 0777));
    TRY(mkdir("..", 0777));
    TRY(mkdir("/", 0777));
    TRY(rmdir("d"));
    TRY(rmdir("d/e/."));
    TRY(rmdir("d/e/.."));
    TRY(rmdir("d/e/"));
    TRY(rmdir("d/e"));
    TRY(rmdir("."));
    put_file("file", "text");
    TRY(rmdir("file"));
    TRY(mkdir("file/x", 0777));
    TRY(unlink("d"));
    TRY(unlink("absent"));
    TRY(unlink("file/"));
    TRY(unlink(""));
    TRY(rmdir("/"));

    PART("rename of files");
    put_file("a", "A");
    put_file("b", "B");
    TRY(rename("a", "b"));
    show_file("b");
    show_file("a");
    TRY(rename("a", "b"));
    TRY(rename("b", "b"));
    TRY(rename("b", "d"));
    TRY(rename("b", "d/"));
    TRY(rename("b", "absent/b"));
    TRY(rename("b/", "c"));
    TRY(rename("b", "file/c"));
    TRY(link("b", "hard"));
    TRY(rename("b", "hard")); /* same inode: both stay */
    show_stat("b");
    show_stat("hard");
    TRY(unlink("hard"));

    PART("rename of directories");
    MUST(mkdir("empty", 0755));
    MUST(mkdir("full", 0755));
    put_file("full/x", "X");
    TRY(rename("d", "file"));
    TRY(rename("d", "full"));
    TRY(rename("full", "empty"));
    show_dir(".");
    show_dir("empty");
    TRY(rename("empty", "empty/inside"));
    TRY(rename("empty", "empty/x/inside"));
    MUST(mkdir("empty/sub", 0755));
    TRY(rename("empty/sub", "empty"));
    TRY(rename("empty/sub", "moved/"));
    show_dir(".");
    TRY(rename(".", "dot"));
    TRY(rename("moved", "."));
    TRY(rename("moved", ".."));
    TRY(rename("", "x"));
    TRY(rename("moved", ""));

    PART("renameat2");
    put_file("p", "P");
    put_file("q", "Q");
    TRY(syscall(SYS_renameat2, AT_FDCWD, "p", AT_FDCWD, "q", 1)); /* RENAME_NOREPLACE */
    TRY(syscall(SYS_renameat2, AT_FDCWD, "p", AT_FDCWD, "r", 1));
    TRY(syscall(SYS_renameat2, AT_FDCWD, "q", AT_FDCWD, "r", 2)); /* RENAME_EXCHANGE */
    show_file("q");
    show_file("r");
    TRY(syscall(SYS_renameat2, AT_FDCWD, "q", AT_FDCWD, "absent", 2));
    TRY(syscall(SYS_renameat2, AT_FDCWD, "q", AT_FDCWD, "r", 3));
    TRY(syscall(SYS_renameat2, AT_FDCWD, "q", AT_FDCWD, "r", 64));
    TRY(syscall(SYS_renameat2, AT_FDCWD, "q", AT_FDCWD, "moved", 2));
    show_stat("q");
    show_file("moved");

    PART("hard links");
    put_file("one", "1");
    TRY(link("one", "two"));
    TRY(link("one", "two"));
    TRY(link("absent", "three"));
    TRY(link("d", "three"));
    TRY(link("one", "d/two"));
    show_stat("one");
    put_file("two", "22");
    show_file("one");
    TRY(unlink("one"));
    show_stat("two");
    show_file("d/two");
    struct stat first, second;
    MUST(stat("two", &first));
    MUST(stat("d/two", &second));
    IS(first.st_ino == second.st_ino && first.st_dev == second.st_dev);

    PART("symbolic links");
    TRY(symlink("two", "s"));
    TRY(symlink("two", "s"));
    TRY(symlink("", "nothing"));
    TRY(symlink("x", ""));
    TRY(symlink("x", "absent/s"));
    TRY(readlink("s", target, sizeof target));
    TRY(readlink("s", target, 2));
    TRY(readlink("s", target, 0));
    TRY(readlink("two", target, sizeof target));
    TRY(readlink("absent", target, sizeof target));
    TRY(readlink("d", target, sizeof target));
    show_stat("s");
    TRY(link("s", "hard-to-link"));
    show_stat("hard-to-link");
    TRY(linkat(AT_FDCWD, "s", AT_FDCWD, "hard-to-file", AT_SYMLINK_FOLLOW));
    show_stat("hard-to-file");
    MUST(symlink("d", "sd"));
    TRY(rmdir("sd"));
    TRY(unlink("sd/"));
    TRY(mkdir("sd", 0777));
    TRY(mkdir("sd/new", 0777));
    show_dir("d");
    TRY(rename("s", "s2"));
    TRY(readlink("s2", target, sizeof target));
    MUST(symlink("loop2", "loop1"));
    MUST(symlink("loop1", "loop2"));
    struct stat st;
    TRY(stat("loop1", &st));
    TRY(lstat("loop1", &st));
    TRY(chdir("loop1"));
    TRY(stat("loop1/x", &st));
    char chain[20], next[20];
    put_file("chain0", "end of the chain");
    for (int i = 1; i <= 42; i++) {
        snprintf(chain, sizeof chain, "chain%d", i);
        snprintf(next, sizeof next, "chain%d", i - 1);
        MUST(symlink(next, chain));
    }
    TRY(stat("chain40", &st));
    TRY(stat("chain41", &st));
    char longest[PATH_MAX + 1];
    memset(longest, 'l', sizeof longest);
    longest[PATH_MAX] = '\0';
    TRY(symlink(longest, "too-long"));
    longest[PATH_MAX - 1] = '\0';
    TRY(symlink(longest, "longest"));
    TRY(stat("longest", &st));
    TRY(readlink("longest", longest, sizeof longest) == PATH_MAX - 1);
    unlink("longest");

    PART("special files");
    TRY(mkfifo("fifo", 0644));
    TRY(mkfifo("fifo", 0644));
    show_stat("fifo");
    TRY(mknod("plain", S_IFREG | 0600, 0));
    show_stat("plain");
    TRY(mknod("dir", S_IFDIR | 0700, 0));
    TRY(mknod("odd", 0130000 | 0700, 0));

    PART("many names");
    MUST(mkdir("many", 0755));
    char name[32];
    for (int i = 0; i < 600; i++) {
        snprintf(name, sizeof name, "many/entry-%d", i);
        MUST(close(MUST(open(name, O_CREAT | O_WRONLY, 0644))));
    }
    for (int i = 0; i < 600; i += 2) {
        snprintf(name, sizeof name, "many/entry-%d", i);
        MUST(unlink(name));
    }
    TRY(rmdir("many"));
    int left = 0;
    DIR *dir = opendir("many");
    while (readdir(dir))
        left++;
    closedir(dir);
    say("left %d\n", left);
    leave_scratch(scratch);
    return 0;
}
