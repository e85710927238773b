/* System V message queues: types, lengths, waiting, limits and errors. */
#include "guest.h"
#include <sys/ipc.h>
#include <sys/msg.h>
#include <sys/wait.h>

struct message {
    long type;
    char text[9000];
};

enum { NOBODY = 65534 };
static int id;

static long send_text(long type, const char *text, int flags)
{
    struct message message = {.type = type};
    strcpy(message.text, text);
    return msgsnd(id, &message, strlen(text), flags);
}

static void take(long type, size_t room, int flags)
{
    struct message message;
    ssize_t got = msgrcv(id, &message, room, type, flags);
    if (got < 0)
        say("take %ld: %s\n", type, error_name(errno));
    else
        say("take %ld: type %ld \"%.*s\"\n", type, message.type, (int)got, message.text);
}

static struct msqid_ds status(void)
{
    struct msqid_ds found;
    MUST(msgctl(id, IPC_STAT, &found));
    return found;
}

static void finish(pid_t child)
{
    int code;
    MUST(waitpid(child, &code, 0));
    say("status %x\n", code);
}

/* Waits until a child sleeps: it has nothing to wait for but the queue. */
static void settle(pid_t child)
{
    char path[64], line[256], *state;
    snprintf(path, sizeof path, "/proc/%d/stat", child);
    do {
        usleep(2000);
        int fd = MUST(open(path, O_RDONLY));
        ssize_t len = MUST(read(fd, line, sizeof line - 1));
        close(fd);
        line[len] = 0;
        state = strrchr(line, ')');
    } while (!state || (state[2] != 'S' && state[2] != 'Z'));
}

static void nothing(int signal)
{
    (void)signal;
}

static void keys(void)
{
    PART("keys");
    key_t key = 0x6d68 + getpid();
    TRY(msgget(key, 0));
    id = OK(msgget(key, IPC_CREAT | 0620));
    IS(msgget(key, 0) == id);
    TRY(msgget(key, IPC_CREAT | IPC_EXCL));
    struct msqid_ds found = status();
    say("mode %o, %lu messages, %lu bytes at most\n", found.msg_perm.mode,
        (unsigned long)found.msg_qnum, (unsigned long)found.msg_qbytes);
    IS(found.msg_stime == 0 && found.msg_rtime == 0 && found.msg_ctime > 0);
    IS(found.msg_lspid == 0 && found.msg_lrpid == 0);
}

static void types(void)
{
    PART("types");
    long order[] = {5, 3, 4, 3, 9};
    for (int i = 0; i < 5; i++)
        send_text(order[i], (char[]){(char)('a' + i), 0}, 0);
    say("%lu messages of %lu bytes\n", (unsigned long)status().msg_qnum,
        (unsigned long)status().__msg_cbytes);
    IS(status().msg_lspid == getpid());
    take(4, 10, 0);
    take(-5, 10, 0);
    take(5, 10, MSG_EXCEPT);
    take(7, 10, IPC_NOWAIT);
    take(-4, 10, IPC_NOWAIT);
    take(0, 10, 0);
    take(0, 10, 0);
    take(0, 10, IPC_NOWAIT);
    IS(status().msg_lrpid == getpid() && status().msg_rtime > 0);

    PART("lengths");
    TRY(send_text(1, "long text", 0));
    take(0, 4, 0);
    take(0, 4, MSG_NOERROR);
    TRY(send_text(1, "", 0));
    take(0, 0, 0);
    struct message message = {.type = 1};
    TRY(msgsnd(id, &message, 8192, 0));
    TRY(msgsnd(id, &message, 8193, 0));
    TRY(msgsnd(id, &message, 8192, IPC_NOWAIT));
    TRY(msgsnd(id, &message, 0, IPC_NOWAIT));
    TRY(msgsnd(id, &message, 1, IPC_NOWAIT));
    say("%lu bytes\n", (unsigned long)status().__msg_cbytes);
    TRY(msgrcv(id, &message, 9000, 0, 0));
    TRY(msgrcv(id, &message, 9000, 0, 0));
    TRY(msgrcv(id, &message, 9000, 0, 0));

    PART("errors");
    message.type = 0;
    TRY(msgsnd(id, &message, 1, 0));
    message.type = -1;
    TRY(msgsnd(id, &message, 1, 0));
    message.type = 1;
    TRY(msgsnd(-1, &message, 1, 0));
    TRY(msgsnd(id + 1, &message, 1, 0));
    TRY(msgsnd(id, (void *)8, 1, 0));
    TRY(msgsnd(id, &message, (size_t)-1, 0));
    TRY(msgrcv(id, &message, (size_t)-1, 0, IPC_NOWAIT));
    TRY(msgrcv(-1, &message, 1, 0, IPC_NOWAIT));
    TRY(send_text(1, "lost", 0));
    TRY(msgrcv(id, (void *)8, 10, 0, 0));
    TRY(msgrcv(id, &message, 10, 0, IPC_NOWAIT));
    TRY(msgrcv(id, &message, 10, 0, MSG_COPY));
    TRY(msgctl(id, 77, NULL));
    TRY(msgctl(-1, IPC_RMID, NULL));
    TRY(msgctl(id, IPC_STAT, (void *)8));
}

static void waiting(void)
{
    PART("waiting");
    pid_t small = MUST(fork());
    if (!small) {
        struct message message;
        _exit(msgrcv(id, &message, 2, 7, 0) == -1 && errno == E2BIG ? 2 : 99);
    }
    settle(small);
    pid_t any = MUST(fork());
    if (!any) {
        struct message message;
        _exit(msgrcv(id, &message, 10, 0, 0) == 4 ? 3 : 99);
    }
    settle(any);
    TRY(send_text(7, "four", 0));
    say("%lu messages\n", (unsigned long)status().msg_qnum);
    IS(status().msg_lrpid == any);
    finish(small);
    finish(any);

    struct message message = {.type = 1};
    MUST(msgsnd(id, &message, 8192, 0));
    MUST(msgsnd(id, &message, 8192, 0));
    pid_t sender = MUST(fork());
    if (!sender)
        _exit(msgsnd(id, &message, 8000, 0) == 0 ? 4 : 99);
    settle(sender);
    say("%lu messages\n", (unsigned long)status().msg_qnum);
    TRY(msgrcv(id, &message, 9000, 0, 0));
    finish(sender);
    say("%lu messages\n", (unsigned long)status().msg_qnum);
    MUST(msgrcv(id, &message, 9000, 0, 0));
    MUST(msgrcv(id, &message, 9000, 0, 0));

    struct sigaction action = {.sa_handler = nothing, .sa_flags = SA_RESTART};
    MUST(sigaction(SIGUSR1, &action, NULL));
    pid_t interrupted = MUST(fork());
    if (!interrupted)
        _exit(msgrcv(id, &message, 10, 0, 0) == -1 && errno == EINTR ? 5 : 99);
    settle(interrupted);
    MUST(kill(interrupted, SIGUSR1));
    finish(interrupted);

    /* A change of the queue lets those who wait look again. */
    pid_t patient = MUST(fork());
    if (!patient)
        _exit(msgrcv(id, &message, 10, 0, 0) == 5 ? 6 : 99);
    settle(patient);
    struct msqid_ds found = status();
    found.msg_qbytes = 100;
    found.msg_perm.mode = 0600;
    TRY(msgctl(id, IPC_SET, &found));
    TRY(send_text(1, "again", 0));
    finish(patient);
    TRY(msgsnd(id, &message, 101, IPC_NOWAIT));
    say("mode %o, %lu bytes at most\n", status().msg_perm.mode,
        (unsigned long)status().msg_qbytes);
}

static void permissions(void)
{
    PART("permissions");
    pid_t child = MUST(fork());
    if (!child) {
        if (geteuid() == 0)
            MUST(setresuid(NOBODY, NOBODY, NOBODY));
        id = (int)MUST(msgget(IPC_PRIVATE, 0200));
        TRY(send_text(1, "text", 0));
        take(0, 10, IPC_NOWAIT);
        struct msqid_ds found = {.msg_qbytes = 20000};
        TRY(msgctl(id, IPC_STAT, &found));
        found.msg_perm.uid = geteuid();
        found.msg_perm.gid = getegid();
        found.msg_perm.mode = 0600;
        TRY(msgctl(id, IPC_SET, &found));
        found.msg_qbytes = 16384;
        TRY(msgctl(id, IPC_SET, &found));
        take(0, 10, IPC_NOWAIT);
        TRY(msgctl(id, IPC_RMID, NULL));
        _exit(0);
    }
    finish(child);
}

static void removal(void)
{
    PART("removal");
    pid_t child = MUST(fork());
    if (!child) {
        struct message message;
        _exit(msgrcv(id, &message, 10, 0, 0) == -1 && errno == EIDRM ? 7 : 99);
    }
    settle(child);
    TRY(msgctl(id, IPC_RMID, NULL));
    finish(child);
    TRY(msgctl(id, IPC_RMID, NULL));
    TRY(send_text(1, "x", 0));
    struct msginfo info;
    IS(msgctl(0, IPC_INFO, (struct msqid_ds *)&info) >= 0);
    say("%d %d\n", info.msgmax, info.msgmnb);
}

int main(void)
{
    keys();
    types();
    waiting();
    permissions();
    removal();
    return 0;
}
