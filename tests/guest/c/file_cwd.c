/* The working directory: chdir(2), fchdir(2), getcwd(3), also after it was
 * renamed and removed; `..` and paths with dots and slashes. */
#include "guest.h"

static char *scratch;

/* Prints the working directory relative to the scratch directory. */
static void where(void)
{
    char path[PATH_MAX];
    if (!getcwd(path, sizeof path))
        say("getcwd: %s\n", error_name(errno));
    else if (!strncmp(path, scratch, strlen(scratch)))
        say("in ~%s\n", path + strlen(scratch));
    else
        say("in %s\n", path);
}

int main(void)
{
    char small[4];
    struct stat a, b;

    scratch = enter_scratch();
    where();
    MUST(mkdir("x", 0755));
    MUST(mkdir("x/y", 0755));
    MUST(mkdir("x/y/z", 0755));
    TRY(chdir("x/y/z"));
    where();
    TRY(chdir(".."));
    where();
    TRY(chdir("./../y//z/.././."));
    where();
    TRY(rename("../../x", "../../renamed"));
    where();
    TRY(rename("../y", "../q"));
    where();
    TRY(chdir("z"));
    where();
    IS(getcwd(small, sizeof small) == NULL && errno == ERANGE);
    IS(getcwd(small, 0) == NULL && errno == EINVAL);
    TRY(syscall(SYS_getcwd, (void *)8, 4096));
    TRY(chdir("absent"));
    TRY(chdir(""));
    put_file("file", "");
    TRY(chdir("file"));
    MUST(unlink("file"));
    TRY(rmdir("../z"));
    where();
    TRY(stat(".", &a));
    TRY(open("file", O_CREAT | O_WRONLY, 0644));
    TRY(mkdir("sub", 0755));
    TRY(stat("..", &b));
    TRY(chdir(".."));
    where();
    TRY(chdir(scratch));
    MUST(symlink("renamed/q", "link"));
    TRY(chdir("link"));
    where();
    TRY(chdir(".."));
    where();
    TRY(chdir("/"));
    where();
    TRY(chdir("/.."));
    where();
    TRY(stat("/", &a));
    TRY(stat("/../..", &b));
    IS(a.st_ino == b.st_ino);
    TRY(stat("//tmp//.//", &a));
    TRY(stat("/tmp", &b));
    IS(a.st_ino == b.st_ino && a.st_dev == b.st_dev);
    leave_scratch(scratch);
    return 0;
}
