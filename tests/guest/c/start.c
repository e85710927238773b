/* What a program finds at its start: arguments, environment, auxiliary vector
 * (getauxval(3)), stack alignment, descriptors, signal state. */
#include "guest.h"
#include <elf.h>
#include <link.h>
#include <sys/auxv.h>
#include <sys/prctl.h>

extern char **environ;

static int constructed;
__attribute__((constructor)) static void construct(void) { constructed = 1; }
static void at_exit_runs(void) { say("atexit handler ran\n"); }
static __thread int thread_local_value = 42;
static int zeroed[5000];

static int find(struct dl_phdr_info *info, size_t size, void *data)
{
    (void)size;
    ++*(int *)data;
    return info->dlpi_phnum == 0;
}

int main(int argc, char **argv)
{
    PART("arguments and environment");
    say("argc %d\n", argc);
    for (int i = 1; i < argc; i++)
        say("argv[%d] %zu bytes \"%.200s\"\n", i, strlen(argv[i]), argv[i]);
    IS(argv[argc] == NULL);
    const char *base = strrchr(argv[0], '/');
    IS(base != NULL || argv[0][0] != '\0');
    const char *value = getenv("GUEST_VALUE");
    say("GUEST_VALUE %s\n", value ? value : "(none)");
    IS((char *)environ == (char *)(argv + argc + 1));

    PART("auxiliary vector");
    say("AT_PAGESZ %lu\n", getauxval(AT_PAGESZ));
    say("AT_CLKTCK %lu\n", getauxval(AT_CLKTCK));
    say("AT_SECURE %lu\n", getauxval(AT_SECURE));
    say("AT_PHENT %lu\n", getauxval(AT_PHENT));
    say("AT_FLAGS %lu\n", getauxval(AT_FLAGS));
    IS(getauxval(AT_PHNUM) >= 4 && getauxval(AT_PHNUM) < 40);
    IS(getauxval(AT_ENTRY) != 0);
    IS(getauxval(AT_HWCAP) != 0);
    IS(getauxval(AT_UID) == getuid() && getauxval(AT_EUID) == geteuid());
    IS(getauxval(AT_GID) == getgid() && getauxval(AT_EGID) == getegid());
    const char *platform = (const char *)getauxval(AT_PLATFORM);
    say("AT_PLATFORM %s\n", platform ? platform : "(none)");
    const char *name = (const char *)getauxval(AT_EXECFN);
    IS(name && access(name, X_OK) == 0);
    const unsigned char *random = (const unsigned char *)getauxval(AT_RANDOM);
    int nonzero = 0;
    for (int i = 0; random && i < 16; i++)
        nonzero += random[i] != 0;
    IS(nonzero > 8);
    const ElfW(Phdr) *header = (const ElfW(Phdr) *)getauxval(AT_PHDR);
    int loads = 0, stack = 0;
    for (unsigned long i = 0; i < getauxval(AT_PHNUM); i++) {
        loads += header[i].p_type == PT_LOAD;
        stack += header[i].p_type == PT_GNU_STACK;
    }
    IS(loads >= 2 && stack == 1);
    const ElfW(Ehdr) *vdso = (const ElfW(Ehdr) *)getauxval(AT_SYSINFO_EHDR);
    IS(!vdso || memcmp(vdso->e_ident, ELFMAG, SELFMAG) == 0);
    int objects = 0;
    dl_iterate_phdr(find, &objects);
    IS(objects >= 1);

    PART("memory at start");
    IS(constructed == 1);
    IS(thread_local_value == 42);
    int sum = 0;
    for (int i = 0; i < 5000; i++)
        sum |= zeroed[i];
    IS(sum == 0);
    IS(sbrk(0) != (void *)-1);
    IS(((uintptr_t)__builtin_frame_address(0) & 15) == 0);

    PART("descriptors and signals at start");
    for (int fd = 0; fd < 10; fd++)
        say("fd %d %s\n", fd, fcntl(fd, F_GETFD) < 0 ? "closed" : "open");
    sigset_t mask;
    MUST(sigprocmask(SIG_SETMASK, NULL, &mask));
    int blocked = 0;
    for (int i = 1; i < 65; i++)
        blocked += sigismember(&mask, i) == 1;
    IS(blocked == 0);
    struct sigaction action;
    MUST(sigaction(SIGTERM, NULL, &action));
    IS(action.sa_handler == SIG_DFL);
    char comm[16] = "";
    MUST(prctl(PR_GET_NAME, comm));
    say("name %s\n", comm);

    atexit(at_exit_runs);
    return 7;
}
