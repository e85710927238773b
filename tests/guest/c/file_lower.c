/* Files that were there before: argv[1] is a directory that the test has made
 * and that in a sandbox belongs to the read-only lower layer. Changing it works
 * as on Linux; the test checks that the host's files stay as they were.
 *
 *   hello.txt "hello, lower layer\n"   big.bin 3 pages and 123 bytes   empty
 *   dir/{a,b,c}   dir/sub/deep.txt   link -> hello.txt   dangling -> nowhere
 *   loop -> loop   hard1 = hard2   script.sh 755   secret.txt 400 */
#include "guest.h"
#include <sys/mman.h>
#include <sys/sendfile.h>

int main(int argc, char **argv)
{
    struct stat st, other;
    char data[64];
    int fd;

    if (argc < 2)
        return 99;
    MUST(chdir(argv[1]));

    PART("looking");
    show_dir(".");
    show_dir("dir");
    show_stat("hello.txt");
    show_stat("big.bin");
    show_stat("empty");
    show_stat("dir");
    show_stat("link");
    show_stat("script.sh");
    show_stat("secret.txt");
    show_stat("hard1");
    MUST(stat("hard1", &st));
    MUST(stat("hard2", &other));
    IS(st.st_ino == other.st_ino);
    MUST(stat("hello.txt", &st));
    say("mtime %ld.%09ld\n", (long)st.st_mtim.tv_sec, st.st_mtim.tv_nsec);
    show_file("hello.txt");
    show_file("link");
    show_file("empty");
    TRY(open("dangling", O_RDONLY));
    TRY(open("loop", O_RDONLY));
    TRY(open("hello.txt/x", O_RDONLY));
    TRY(readlink("link", data, sizeof data));
    TRY(access("script.sh", X_OK));
    TRY(access("hello.txt", X_OK));
    TRY(open("hello.txt", O_CREAT | O_EXCL | O_WRONLY, 0644));
    MUST(fd = open("big.bin", O_RDONLY));
    TRY(pread(fd, data, 8, 4096 * 3 + 120));
    TRY(lseek(fd, 0, SEEK_END));
    off_t at = 4096;
    int pipes[2];
    MUST(pipe(pipes));
    TRY(sendfile(pipes[1], fd, &at, 16));
    TRY(read(pipes[0], data, 64));
    close(fd);

    PART("writing");
    int reader = MUST(open("hello.txt", O_RDONLY));
    ino_t inode_before = st.st_ino;
    MUST(fd = open("hello.txt", O_WRONLY));
    TRY(write(fd, "HELLO", 5));
    show_file("hello.txt");
    TRY(pread(reader, data, 5, 0));
    say("an earlier reader sees %.5s\n", data);
    close(fd);
    MUST(stat("hello.txt", &st));
    IS(st.st_ino == inode_before);
    MUST(fstat(reader, &st));
    IS(st.st_ino == inode_before);
    MUST(fd = open("empty", O_WRONLY | O_APPEND));
    TRY(write(fd, "no longer", 9));
    close(fd);
    show_stat("empty");
    MUST(fd = open("hard1", O_WRONLY | O_TRUNC));
    MUST(write(fd, "through hard1", 13));
    close(fd);
    show_file("hard2");
    show_stat("hard2");
    TRY(truncate("big.bin", 5000));
    show_stat("big.bin");
    MUST(fd = open("big.bin", O_RDWR));
    TRY(pwrite(fd, "beyond", 6, 9000));
    TRY(pread(fd, data, 8, 4990));
    TRY(pread(fd, data, 8, 5000));
    IS(data[0] == 0 && data[7] == 0);
    close(fd);
    TRY(chmod("dir/a", 0600));
    show_stat("dir/a");
    show_file("dir/a");
    TRY(chmod("dir", 0700));
    show_stat("dir");
    struct timespec times[2] = {{.tv_sec = 5}, {.tv_sec = 6}};
    TRY(utimensat(AT_FDCWD, "dir/b", times, 0));
    MUST(stat("dir/b", &st));
    say("%ld %ld\n", (long)st.st_atim.tv_sec, (long)st.st_mtim.tv_sec);

    PART("mapping");
    MUST(fd = open("script.sh", O_RDWR));
    char *shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    char *private = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    IS(shared != MAP_FAILED && private != MAP_FAILED);
    say("%.9s %.9s\n", shared, private);
    private[0] = '!';
    shared[1] = '?';
    TRY(pread(fd, data, 4, 0));
    say("file %.4s shared %.4s\n", data, shared);
    TRY(pwrite(fd, "ABCD", 4, 0));
    say("shared %.4s private starts with %c\n", shared, private[0]);
    munmap(shared, 4096);
    munmap(private, 4096);
    close(fd);

    PART("removing and creating");
    TRY(unlink("dir/c"));
    TRY(open("dir/c", O_RDONLY));
    show_dir("dir");
    put_file("dir/c", "another");
    show_file("dir/c");
    TRY(unlink("hard2"));
    show_stat("hard1");
    TRY(rmdir("dir"));
    TRY(rmdir("dir/sub"));
    TRY(unlink("dir/sub/deep.txt"));
    TRY(rmdir("dir/sub"));
    TRY(mkdir("dir/sub", 0755));
    show_dir("dir/sub");
    TRY(unlink("link"));
    TRY(symlink("dir", "link"));
    show_file("link/c");
    put_file("dir/.hidden", "");
    show_dir("link");
    MUST(fd = open("secret.txt", O_RDONLY));
    TRY(unlink("secret.txt"));
    TRY(pread(fd, data, 6, 0));
    MUST(fstat(fd, &st));
    say("links %lu\n", (unsigned long)st.st_nlink);
    close(fd);

    PART("renaming");
    TRY(rename("hello.txt", "dir/renamed.txt"));
    show_file("hello.txt");
    show_file("dir/renamed.txt");
    TRY(pread(reader, data, 5, 0));
    TRY(rename("dir", "moved"));
    show_dir("moved");
    show_file("moved/a");
    show_dir("dir");
    TRY(mkdir("dir", 0755));
    show_dir("dir");
    TRY(rename("moved", "dir"));
    show_dir("dir");
    show_file("dir/b");
    show_dir(".");
    return 0;
}
