/* File mappings: private and shared, of files in the upper and lower layer,
 * SIGBUS beyond the end, msync(2), growing and shrinking files. */
#include "guest.h"
#include <setjmp.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define PAGE 4096UL
#define RW (PROT_READ | PROT_WRITE)

static sigjmp_buf back;
static volatile bool armed; /* a fault is expected */
static volatile sig_atomic_t seen_signal, seen_code;
static char *volatile seen_address;

static void on_fault(int signal, siginfo_t *info, void *context)
{
    (void)context;
    if (!armed)
        _exit(97);
    seen_signal = signal;
    seen_code = info->si_code;
    seen_address = info->si_addr;
    siglongjmp(back, 1);
}

static void peek(const char *what, volatile char *at)
{
    armed = true;
    if (sigsetjmp(back, 1) == 0)
        say("%s: %d\n", what, *at);
    else
        say("%s: %s code %d address %s\n", what, sigabbrev_np(seen_signal), seen_code,
            seen_address == at ? "right" : "wrong");
    armed = false;
}

static void poke(const char *what, volatile char *at)
{
    armed = true;
    if (sigsetjmp(back, 1) == 0) {
        *at = 'p';
        say("%s: written\n", what);
    } else {
        say("%s: %s code %d address %s\n", what, sigabbrev_np(seen_signal), seen_code,
            seen_address == at ? "right" : "wrong");
    }
    armed = false;
}

int main(int argc, char **argv)
{
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    MUST(sigaction(SIGSEGV, &action, NULL));
    MUST(sigaction(SIGBUS, &action, NULL));
    char *scratch = enter_scratch();
    char data[32] = {0};

    PART("private mapping of an upper file");
    int fd = MUST(open("f", O_RDWR | O_CREAT, 0644));
    MUST(ftruncate(fd, 3 * PAGE + 10));
    MUST(pwrite(fd, "start", 5, 0));
    MUST(pwrite(fd, "page2", 5, 2 * PAGE));
    MUST(pwrite(fd, "tail", 4, 3 * PAGE));
    char *p = mmap(NULL, 6 * PAGE, RW, MAP_PRIVATE, fd, 0);
    IS(p != MAP_FAILED);
    say("%.5s %.5s %.4s\n", p, p + 2 * PAGE, p + 3 * PAGE);
    peek("after the end, in the last page", p + 4 * PAGE - 1);
    peek("beyond the end", p + 4 * PAGE);
    p[0] = 'S';
    MUST(pread(fd, data, 5, 0));
    say("file %.5s memory %.5s\n", data, p);
    TRY(munmap(p, 6 * PAGE));
    p = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, fd, 2 * PAGE);
    say("%.5s\n", p);
    munmap(p, PAGE);
    errno = 0;
    IS(mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, fd, 100) == MAP_FAILED && errno == EINVAL);

    PART("shared mapping of an upper file");
    p = mmap(NULL, 3 * PAGE, RW, MAP_SHARED, fd, 0);
    char *q = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, 0);
    IS(p != MAP_FAILED && q != MAP_FAILED);
    strcpy(p, "written through memory");
    MUST(pread(fd, data, 22, 0));
    say("file \"%s\", other mapping \"%s\"\n", data, q);
    MUST(pwrite(fd, "WRITTEN", 7, 0));
    say("memory \"%s\"\n", p);
    TRY(msync(p, PAGE, MS_SYNC));
    TRY(msync(p, PAGE, MS_ASYNC));
    TRY(msync(p, PAGE, MS_ASYNC | MS_SYNC));
    TRY(msync(p + 1, PAGE, MS_SYNC));
    TRY(msync(p, PAGE, 64));
    int other = MUST(open("f", O_RDONLY));
    MUST(pread(other, data, 7, 0));
    say("another descriptor \"%.7s\"\n", data);
    MUST(unlink("f"));
    p[1] = '-';
    MUST(pread(other, data, 7, 0));
    say("after unlink \"%.7s\"\n", data);
    TRY(close(fd));
    TRY(close(other));
    p[2] = '+';
    say("after close \"%.7s\"\n", q);
    TRY(munmap(p, 3 * PAGE));
    TRY(munmap(q, PAGE));

    PART("growing and shrinking under a mapping");
    fd = MUST(open("g", O_RDWR | O_CREAT, 0644));
    p = mmap(NULL, 4 * PAGE, RW, MAP_SHARED, fd, 0);
    peek("empty file", p);
    MUST(ftruncate(fd, 2 * PAGE));
    peek("grown", p + PAGE);
    p[PAGE + 5] = 'x';
    peek("beyond", p + 2 * PAGE);
    MUST(ftruncate(fd, PAGE));
    peek("cut off", p + PAGE + 5);
    peek("kept", p);
    MUST(ftruncate(fd, 2 * PAGE));
    peek("grown again", p + PAGE + 5);
    MUST(pwrite(fd, "abcdef", 6, 100));
    MUST(ftruncate(fd, 103));
    say("zero after the end: %d %d\n", p[102], p[103]);
    TRY(munmap(p, 4 * PAGE));

    PART("a private mapping of a file that shrinks and grows");
    fd = MUST(open("shrinking", O_RDWR | O_CREAT, 0644));
    char *letters = malloc(4 * PAGE);
    memset(letters, 'f', 4 * PAGE);
    MUST(write(fd, letters, 4 * PAGE));
    p = mmap(NULL, 4 * PAGE, RW, MAP_PRIVATE, fd, 0);
    p[0] = p[PAGE] = p[3 * PAGE] = 'w';
    peek("not written", p + 2 * PAGE);
    MUST(ftruncate(fd, PAGE + 10));
    peek("written", p);
    peek("written, with the end", p + PAGE);
    peek("cut off", p + 2 * PAGE);
    poke("written and cut off", p + 3 * PAGE);
    TRY(pread(fd, p + 2 * PAGE, 1, 0));
    TRY(pwrite(fd, p + 3 * PAGE, 1, 0));
    MUST(ftruncate(fd, 4 * PAGE));
    MUST(pwrite(fd, "new", 3, 3 * PAGE + 1));
    peek("written, longer again", p + PAGE);
    peek("longer again", p + 2 * PAGE);
    say("longer again, with new bytes: %d %.3s\n", p[3 * PAGE], p + 3 * PAGE + 1);
    p[2 * PAGE] = 'w';
    MUST(pread(fd, data, 1, 2 * PAGE));
    say("memory %c, file %d\n", p[2 * PAGE], data[0]);
    MUST(close(MUST(open("shrinking", O_WRONLY | O_TRUNC))));
    peek("emptied", p);
    MUST(pwrite(fd, letters, 3 * PAGE, 0));
    peek("written again", p + PAGE);
    TRY(mprotect(p, 4 * PAGE, PROT_READ));
    poke("read only", p);
    poke("read only, seen", p + PAGE);
    TRY(mprotect(p, 4 * PAGE, RW));
    p[0] = p[PAGE] = 'w';
    q = mremap(p, 4 * PAGE, 8 * PAGE, MREMAP_MAYMOVE, NULL);
    IS(q != MAP_FAILED);
    say("moved: %c %c %c\n", q[0], q[PAGE], q[2 * PAGE]);
    peek("moved, beyond the end", q + 3 * PAGE);
    MUST(ftruncate(fd, 7 * PAGE));
    poke("moved, longer again", q + 3 * PAGE);
    peek("more of it, longer again", q + 6 * PAGE);
    peek("more of it, beyond the end", q + 7 * PAGE);
    TRY(madvise(q, 8 * PAGE, MADV_DONTNEED));
    say("dropped: %c %c %d\n", q[0], q[PAGE], q[3 * PAGE]);
    peek("dropped, beyond the end", q + 7 * PAGE);
    q[0] = 'w';
    TRY(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, PAGE));
    peek("a copy of what is a hole now", q);
    TRY(munmap(q, 8 * PAGE));
    p = mmap(NULL, PAGE, RW, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    peek("other memory", p);
    TRY(munmap(p, PAGE));

    PART("a file that shrinks under mappings of several processes");
    MUST(ftruncate(fd, 0));
    MUST(pwrite(fd, letters, 3 * PAGE, 0));
    p = mmap(NULL, 3 * PAGE, RW, MAP_PRIVATE, fd, 0);
    char *shared = mmap(NULL, 3 * PAGE, RW, MAP_SHARED, fd, 0);
    p[PAGE] = p[2 * PAGE] = 'w';
    int cut[2], seen[2];
    MUST(pipe(cut));
    MUST(pipe(seen));
    pid_t reader = MUST(fork());
    if (!reader) {
        say("child: %c %c %c %c\n", p[0], p[PAGE], p[2 * PAGE], shared[2 * PAGE]);
        p[2 * PAGE] = 'c';
        MUST(write(seen[1], "x", 1));
        MUST(read(cut[0], data, 1));
        peek("child, written", p + PAGE);
        peek("child, cut off", p + 2 * PAGE);
        peek("child, shared and cut off", shared + 2 * PAGE);
        MUST(ftruncate(fd, 3 * PAGE));
        peek("child, longer again", p + 2 * PAGE);
        poke("child, shared and longer again", shared + 2 * PAGE);
        _exit(0);
    }
    MUST(read(seen[0], data, 1));
    MUST(ftruncate(fd, 2 * PAGE));
    peek("written", p + PAGE);
    peek("cut off", p + 2 * PAGE);
    peek("shared and cut off", shared + 2 * PAGE);
    MUST(write(cut[1], "x", 1));
    MUST(waitpid(reader, NULL, 0));
    peek("longer again", p + 2 * PAGE);
    peek("shared and longer again", shared + 2 * PAGE);
    TRY(munmap(p, 3 * PAGE));
    TRY(munmap(shared, 3 * PAGE));
    free(letters);

    PART("rights");
    int read_only = MUST(open("g", O_RDONLY)), write_only = MUST(open("g", O_WRONLY));
    errno = 0;
    IS(mmap(NULL, PAGE, RW, MAP_SHARED, read_only, 0) == MAP_FAILED && errno == EACCES);
    IS(mmap(NULL, PAGE, RW, MAP_PRIVATE, read_only, 0) != MAP_FAILED);
    errno = 0;
    IS(mmap(NULL, PAGE, PROT_WRITE, MAP_SHARED, write_only, 0) == MAP_FAILED && errno == EACCES);
    int path = MUST(open("g", O_PATH));
    errno = 0;
    IS(mmap(NULL, PAGE, PROT_READ, MAP_SHARED, path, 0) == MAP_FAILED && errno == EBADF);
    TRY(mmap(NULL, PAGE, PROT_READ, 0x1f, read_only, 0)); /* no such type of mapping */

    PART("reading into a mapping of the same file");
    fd = MUST(open("h", O_RDWR | O_CREAT, 0644));
    MUST(ftruncate(fd, 2 * PAGE));
    MUST(pwrite(fd, "copy me", 7, PAGE));
    p = mmap(NULL, 2 * PAGE, RW, MAP_SHARED, fd, 0);
    TRY(pread(fd, p, 7, PAGE));
    TRY(pwrite(fd, p, 7, 100));
    say("%.7s %.7s\n", p, p + 100);
    char *executable = mmap(NULL, PAGE, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0);
    IS(executable != MAP_FAILED);

    PART("shared mappings that may not be written, or not be touched");
    q = mmap(NULL, 2 * PAGE, PROT_READ, MAP_SHARED, fd, 0);
    poke("before it was read", q + PAGE);
    peek("read", q + PAGE);
    poke("after it was read", q + PAGE);
    TRY(pread(fd, q, 1, 0));
    TRY(mprotect(q, PAGE, PROT_NONE));
    peek("not to be read", q);
    poke("not to be written", q);
    TRY(mprotect(q, PAGE, RW));
    poke("to be written", q);
    say("%.2s\n", q);

    PART("a hole below mappings of several processes");
    fd = MUST(open("holes", O_RDWR | O_CREAT, 0644));
    MUST(ftruncate(fd, 3 * PAGE));
    p = mmap(NULL, 3 * PAGE, RW, MAP_SHARED, fd, 0);
    memset(p, 'a', 3 * PAGE);
    int told[2], done[2];
    MUST(pipe(told));
    MUST(pipe(done));
    pid_t child = MUST(fork());
    char letter;
    if (!child) {
        say("child: %c %c\n", p[0], p[PAGE]);
        MUST(write(done[1], "x", 1));
        MUST(read(told[0], &letter, 1));
        say("child: %d %d %c\n", p[0], p[PAGE], p[2 * PAGE]);
        memcpy(p + PAGE, "child", 6);
        _exit(0);
    }
    MUST(read(done[0], &letter, 1));
    TRY(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 2 * PAGE));
    say("%d %d %c\n", p[0], p[PAGE], p[2 * PAGE]);
    MUST(pread(fd, &letter, 1, PAGE));
    say("%d\n", letter);
    memcpy(p, "parent", 7);
    MUST(write(told[1], "x", 1));
    MUST(waitpid(child, NULL, 0));
    char both[16];
    MUST(pread(fd, both, 7, 0));
    MUST(pread(fd, both + 7, 6, PAGE));
    say("%s %s, mapped %s\n", both, both + 7, p + PAGE);

    if (argc > 1) {
        PART("a lower file");
        char name[PATH_MAX];
        snprintf(name, sizeof name, "%s/big.bin", argv[1]);
        fd = MUST(open(name, O_RDONLY));
        p = mmap(NULL, 8 * PAGE, RW, MAP_PRIVATE, fd, 0);
        q = mmap(NULL, 8 * PAGE, PROT_READ, MAP_SHARED, fd, 0);
        IS(p != MAP_FAILED && q != MAP_FAILED);
        char *content = malloc(4 * PAGE);
        ssize_t len = pread(fd, content, 4 * PAGE, 0);
        say("bytes %ld\n", (long)len);
        IS(memcmp(p, content, (size_t)len) == 0 && memcmp(q, content, (size_t)len) == 0);
        peek("end of the last page", p + 4 * PAGE - 1);
        peek("beyond the end", p + 4 * PAGE);
        peek("beyond the end, shared", q + 5 * PAGE);
        p[5] = 'X';
        IS(q[5] == content[5] && p[6] == content[6]);
        errno = 0;
        IS(mmap(NULL, PAGE, RW, MAP_SHARED, fd, 0) == MAP_FAILED && errno == EACCES);
    }
    leave_scratch(scratch);
    return 0;
}
