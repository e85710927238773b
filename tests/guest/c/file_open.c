/* open(2), creat(2), close(2): flags and errors. */
#include "guest.h"

int main(void)
{
    char *scratch = enter_scratch();
    int fd;
    struct stat st;

    PART("creating");
    TRY(open("new", O_RDONLY));
    TRY(fd = open("new", O_RDWR | O_CREAT | O_EXCL, 0640));
    TRY(fcntl(fd, F_GETFL) & O_ACCMODE);
    TRY(close(fd));
    TRY(close(fd));
    TRY(open("new", O_RDWR | O_CREAT | O_EXCL, 0640));
    show_stat("new");
    umask(077);
    TRY(close(creat("masked", 0666)));
    show_stat("masked");
    umask(0);
    TRY(close(open("all", O_CREAT | O_WRONLY, 07777)));
    show_stat("all");
    umask(022);
    TRY(fd = open("readonly-mode", O_CREAT | O_RDWR, 0400));
    TRY(write(fd, "x", 1));
    close(fd);

    PART("access modes");
    put_file("text", "0123456789");
    fd = MUST(open("text", O_RDONLY));
    TRY(write(fd, "x", 1));
    TRY(ftruncate(fd, 0));
    close(fd);
    fd = MUST(open("text", O_WRONLY));
    char data[20];
    TRY(read(fd, data, 4));
    TRY(pread(fd, data, 4, 0));
    close(fd);
    TRY(open("text", O_RDONLY | O_DIRECTORY));
    TRY(open("text/below", O_RDONLY));
    TRY(open("text/", O_RDONLY));
    TRY(open("text/.", O_RDONLY));
    TRY(open("text/..", O_RDONLY));
    fd = MUST(open("text", O_PATH));
    TRY(read(fd, data, 4));
    TRY(write(fd, data, 4));
    TRY(lseek(fd, 0, SEEK_SET));
    TRY(fchmod(fd, 0600));
    TRY(ftruncate(fd, 0));
    TRY(fstat(fd, &st));
    TRY(fcntl(fd, F_GETFL) == (O_PATH | (fcntl(fd, F_GETFL) & 0100000)));
    close(fd);

    PART("truncating and appending");
    fd = MUST(open("text", O_WRONLY | O_TRUNC));
    MUST(write(fd, "abc", 3));
    close(fd);
    show_file("text");
    fd = MUST(open("text", O_RDWR | O_APPEND));
    TRY(lseek(fd, 0, SEEK_CUR));
    TRY(write(fd, "def", 3));
    TRY(lseek(fd, 0, SEEK_CUR));
    TRY(lseek(fd, 0, SEEK_SET));
    TRY(write(fd, "ghi", 3));
    TRY(pwrite(fd, "jkl", 3, 0)); /* appends on Linux: pwrite(2), BUGS */
    close(fd);
    show_file("text");

    PART("directories");
    MUST(mkdir("dir", 0755));
    TRY(open("dir", O_WRONLY));
    TRY(open("dir", O_RDWR));
    TRY(open("dir", O_RDONLY | O_CREAT, 0644));
    TRY(open("dir", O_RDONLY | O_TRUNC));
    TRY(open("dir/new/", O_WRONLY | O_CREAT, 0644));
    TRY(open("absent/new", O_WRONLY | O_CREAT, 0644));
    fd = TRY(open("dir", O_RDONLY | O_DIRECTORY));
    TRY(read(fd, data, 4));
    TRY(pread(fd, data, 4, 0));
    TRY(write(fd, data, 4));
    close(fd);
    TRY(open("dir", O_TMPFILE | O_RDONLY, 0600));
    fd = open("dir", O_TMPFILE | O_RDWR, 0600);
    if (fd >= 0) {
        TRY(write(fd, "temporary", 9));
        TRY(fstat(fd, &st));
        IS(st.st_nlink == 0 && st.st_size == 9);
        char link_path[64];
        snprintf(link_path, sizeof link_path, "/proc/self/fd/%d", fd);
        TRY(linkat(AT_FDCWD, link_path, AT_FDCWD, "dir/named", AT_SYMLINK_FOLLOW));
        show_file("dir/named");
        close(fd);
    } else {
        say("O_TMPFILE: %s\n", error_name(errno));
    }

    PART("links of open files");
    int modes[] = {O_RDONLY, O_WRONLY, O_RDWR, O_PATH};
    for (int i = 0; i < 4; i++) {
        char name[64];
        struct stat link;
        fd = MUST(open("text", modes[i]));
        snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
        MUST(lstat(name, &link));
        say("mode %o size %ld\n", link.st_mode, (long)link.st_size);
        close(fd);
    }

    PART("symbolic links");
    MUST(symlink("text", "link"));
    MUST(symlink("absent", "dangling"));
    MUST(symlink("self", "self"));
    TRY(open("link", O_RDONLY | O_NOFOLLOW));
    TRY(open("self", O_RDONLY));
    TRY(open("dangling", O_RDONLY));
    TRY(open("dangling", O_WRONLY | O_CREAT | O_EXCL, 0644));
    TRY(close(open("dangling", O_WRONLY | O_CREAT, 0644)));
    show_stat("absent");
    fd = TRY(open("link", O_PATH | O_NOFOLLOW));
    TRY(fstat(fd, &st));
    IS(S_ISLNK(st.st_mode));
    TRY(readlinkat(fd, "", data, sizeof data));
    close(fd);

    PART("bad arguments");
    TRY(open("", O_RDONLY));
    TRY(open((char *)1, O_RDONLY));
    TRY(open(NULL, O_RDONLY));
    char name[5000];
    memset(name, 'n', sizeof name);
    name[256] = '\0';
    TRY(open(name, O_RDONLY));
    TRY(open(name, O_WRONLY | O_CREAT, 0644));
    name[255] = '\0';
    TRY(close(open(name, O_WRONLY | O_CREAT, 0644)));
    TRY(unlink(name));
    for (int i = 0; i + 1 < (int)sizeof name; i += 2)
        memcpy(name + i, "./", 2);
    name[4999] = '\0';
    TRY(open(name, O_RDONLY));
    name[4094] = '\0';
    TRY(close(open(name, O_RDONLY)));
    name[4095] = '\0';
    memcpy(name + 4094, "/", 2);
    TRY(close(open(name, O_RDONLY)));
    TRY(read(77, data, 1));
    TRY(read(-1, data, 1));
    TRY(close(-1));

    PART("lowest descriptor");
    int a = MUST(open("text", O_RDONLY)), b = MUST(open("text", O_RDONLY));
    int c = MUST(open("text", O_RDONLY));
    say("%d %d %d\n", a, b, c);
    close(b);
    close(a);
    TRY(open("text", O_RDONLY));
    TRY(open("text", O_RDONLY));
    TRY(open("text", O_RDONLY));
    leave_scratch(scratch);
    return 0;
}
