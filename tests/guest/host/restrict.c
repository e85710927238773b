/* Starts a program under a restriction that a systemd unit or a container may set:
 *
 *   restrict mdwe -- PROGRAM …           MemoryDenyWriteExecute=
 *   restrict kill NUMBER -- PROGRAM …    SystemCallFilter= without the call
 *   restrict enosys NUMBER -- PROGRAM …  a call that is answered with ENOSYS */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#ifndef PR_SET_MDWE
#define PR_SET_MDWE 65
#endif

static int filter(unsigned number, unsigned action)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, action),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

int main(int argc, char **argv)
{
    int failed = 1, program = 3;
    if (argc > 3 && !strcmp(argv[1], "mdwe"))
        failed = prctl(PR_SET_MDWE, 1, 0, 0, 0);
    if (argc > 4 && !strcmp(argv[1], "kill"))
        failed = filter(atoi(argv[2]), SECCOMP_RET_KILL_PROCESS), program = 4;
    if (argc > 4 && !strcmp(argv[1], "enosys"))
        failed = filter(atoi(argv[2]), SECCOMP_RET_ERRNO | ENOSYS), program = 4;
    if (failed) {
        perror("restrict");
        return 77;
    }
    execv(argv[program], argv + program);
    perror(argv[program]);
    return 78;
}
