/* read(2), write(2), lseek(2), pread(2), readv(2), preadv2(2), sendfile(2),
 * copy_file_range(2): positions, holes, errors. */
#include "guest.h"
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/uio.h>

int main(void)
{
    char *scratch = enter_scratch();
    char data[64] = {0};
    int fd = MUST(open("f", O_RDWR | O_CREAT, 0644));

    PART("positions");
    TRY(write(fd, "hello world", 11));
    TRY(read(fd, data, 5));
    TRY(lseek(fd, 0, SEEK_CUR));
    TRY(lseek(fd, -5, SEEK_END));
    TRY(read(fd, data, 64));
    say("%.5s\n", data);
    TRY(lseek(fd, -100, SEEK_CUR));
    TRY(lseek(fd, -1, SEEK_SET));
    TRY(lseek(fd, 0, 77));
    TRY(lseek(fd, 2, SEEK_SET));
    TRY(lseek(fd, 3, SEEK_CUR));
    TRY(pread(fd, data, 4, 6));
    say("%.4s\n", data);
    TRY(lseek(fd, 0, SEEK_CUR));
    TRY(pwrite(fd, "HELLO", 5, 0));
    TRY(lseek(fd, 0, SEEK_CUR));
    TRY(pread(fd, data, 4, -1));
    TRY(pwrite(fd, data, 4, -1));
    TRY(pread(fd, data, 4, 100));
    TRY(read(fd, data, 0));
    TRY(write(fd, data, 0));
    show_file("f");

    PART("vectors");
    struct iovec out[3] = {{"one", 3}, {"", 0}, {"three", 5}};
    TRY(lseek(fd, 0, SEEK_SET));
    TRY(writev(fd, out, 3));
    char x[2], y[4], z[10] = {0};
    struct iovec in[3] = {{x, 2}, {y, 4}, {z, 9}};
    TRY(preadv(fd, in, 3, 0));
    say("%.2s|%.4s|%s\n", x, y, z);
    TRY(pwritev(fd, out, 3, 100));
    TRY(lseek(fd, 0, SEEK_END));
    TRY(readv(fd, in, -1));
    TRY(readv(fd, in, 0));
    TRY(readv(fd, in, 1025));
    TRY(readv(fd, (struct iovec *)16, 1));
    struct iovec negative = {data, (size_t)-1};
    TRY(writev(fd, &negative, 1));
    TRY(preadv2(fd, in, 3, 0, 0));
    TRY(lseek(fd, 0, SEEK_SET));
    TRY(preadv2(fd, in, 1, -1, 0));
    TRY(lseek(fd, 0, SEEK_CUR));

    PART("faults");
    char *pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    MUST(munmap(pages + 4096, 4096));
    TRY(read(fd, (void *)8, 10));
    TRY(write(fd, (void *)8, 10));
    TRY(pread(fd, NULL, 1, 0));
    TRY(lseek(fd, 0, SEEK_SET));
    TRY(read(fd, pages + 4092, 8)); /* four bytes fit */
    TRY(lseek(fd, 0, SEEK_CUR));
    TRY(ftruncate(fd, 0));
    memcpy(pages + 4092, "good", 4);
    TRY(pwrite(fd, pages + 4092, 8, 0)); /* four bytes fit */
    struct stat st;
    fstat(fd, &st);
    say("size %ld\n", (long)st.st_size);

    PART("holes and sizes");
    MUST(ftruncate(fd, 0));
    TRY(pwrite(fd, "end", 3, 100000));
    fstat(fd, &st);
    say("size %ld\n", (long)st.st_size);
    TRY(pread(fd, data, 10, 50000));
    int sum = 0;
    for (int i = 0; i < 10; i++)
        sum |= data[i];
    IS(sum == 0);
    TRY(ftruncate(fd, 100001));
    TRY(pread(fd, data, 10, 100000));
    say("%c\n", data[0]);
    TRY(ftruncate(fd, 200000));
    TRY(pread(fd, data, 10, 100000));
    IS(data[0] == 'e' && data[1] == 0 && data[9] == 0);
    TRY(ftruncate(fd, -1));
    TRY(truncate("f", 5));
    TRY(truncate("absent", 5));
    TRY(truncate(".", 5));
    show_stat("f");
    TRY(lseek(fd, 3, SEEK_DATA) >= -1);
    TRY(lseek(fd, 5, SEEK_DATA));
    TRY(lseek(fd, 5, SEEK_HOLE));
    TRY(lseek(fd, 0, SEEK_HOLE));
    MUST(ftruncate(fd, 0));
    MUST(pwrite(fd, "x", 1, 1 << 20));
    TRY(lseek(fd, 0, SEEK_DATA));
    TRY(lseek(fd, 0, SEEK_HOLE));
    TRY(lseek(fd, 1 << 20, SEEK_HOLE));

    PART("space");
    MUST(ftruncate(fd, 0));
    TRY(fallocate(fd, 0, 0, 10000));
    show_stat("f");
    TRY(fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, 20000));
    show_stat("f");
    TRY(fallocate(fd, 0, 0, 0));
    TRY(fallocate(fd, 0, -1, 10));
    TRY(fallocate(fd, 0, 0, -1));
    TRY(fallocate(77, 0, 0, 1));
    MUST(pwrite(fd, "0123456789", 10, 0));
    TRY(fallocate(fd, FALLOC_FL_PUNCH_HOLE, 0, 10));
    TRY(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 2, 3));
    MUST(pread(fd, data, 10, 0));
    for (int i = 0; i < 10; i++)
        if (!data[i])
            data[i] = '.';
    say("%.10s\n", data);
    CODE(posix_fallocate(fd, 0, 30000));
    show_stat("f");
    int ends[2];
    MUST(pipe(ends));
    TRY(fallocate(ends[1], 0, 0, 1));
    TRY(lseek(ends[0], 0, SEEK_CUR));
    TRY(pread(ends[0], data, 1, 0));
    TRY(ftruncate(ends[1], 0));
    TRY(fsync(ends[1]));
    TRY(fsync(fd));
    TRY(fdatasync(fd));
    TRY(posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL));
    CODE(posix_fadvise(ends[0], 0, 0, POSIX_FADV_SEQUENTIAL));
    CODE(posix_fadvise(fd, 0, 0, 99));

    PART("copies in the kernel");
    put_file("from", "some text to copy");
    int from = MUST(open("from", O_RDONLY));
    int to = MUST(open("to", O_RDWR | O_CREAT, 0644));
    off_t offset = 5;
    TRY(sendfile(to, from, &offset, 4));
    say("offset %ld\n", (long)offset);
    TRY(sendfile(to, from, NULL, 100));
    TRY(sendfile(to, from, NULL, 100));
    show_file("to");
    loff_t a = 0, b = 30;
    long copied = copy_file_range(from, &a, to, &b, 9, 0);
    say("copy_file_range %s\n", copied == 9 || errno == EXDEV || errno == ENOSYS ? "fine" : "wrong");
    TRY(copy_file_range(from, NULL, to, NULL, 9, 1));
    TRY(sendfile(from, to, NULL, 1));
    TRY(sendfile(to, ends[0], NULL, 1) < 0);

    PART("an unlinked file");
    put_file("gone", "still here");
    int gone = MUST(open("gone", O_RDWR));
    TRY(unlink("gone"));
    TRY(open("gone", O_RDONLY));
    fstat(gone, &st);
    say("links %lu size %ld\n", (unsigned long)st.st_nlink, (long)st.st_size);
    TRY(pwrite(gone, "ABC", 3, 10));
    TRY(pread(gone, data, 20, 0));
    say("%.13s\n", data);
    char path[64], target[200];
    snprintf(path, sizeof path, "/proc/self/fd/%d", gone);
    ssize_t len = readlink(path, target, sizeof target - 1);
    target[len > 0 ? len : 0] = '\0';
    IS(strstr(target, "/gone (deleted)") != NULL);
    int again = open(path, O_RDONLY);
    TRY(pread(again, data, 20, 0));
    close(again);
    close(gone);

    PART("big");
    size_t big = 3 << 20;
    char *block = malloc(big);
    for (size_t i = 0; i < big; i++)
        block[i] = (char)(i * 31 + i / 4096);
    int large = MUST(open("large", O_RDWR | O_CREAT, 0644));
    TRY(write(large, block, big) == (ssize_t)big);
    char *copy = malloc(big);
    TRY(pread(large, copy, big, 0) == (ssize_t)big);
    IS(memcmp(block, copy, big) == 0);
    leave_scratch(scratch);
    return 0;
}
