/* A stand-in for the Thaw kernel: speaks the control protocol and does what the
 * first argument of the program to start says. It lets the host side be tested
 * without the kernel. Freestanding, linked at the kernel's address. */
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;

static long call(long n, long a, long b, long c, long d, long e, long f) {
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}
enum { READ = 0, WRITE = 1, MMAP = 9, MPROTECT = 10, RT_SIGACTION = 13, SENDTO = 44, SENDMSG = 46, RECVMSG = 47, PRCTL = 157,
       EXIT_GROUP = 231, PAUSE = 34, GETUID = 102, FORK = 57, WAIT4 = 61 };

void *memset(void *to, int value, u64 n) { u8 *p = to; while (n--) *p++ = value; return to; }
void *memcpy(void *to, const void *from, u64 n) { u8 *p = to; const u8 *q = from; while (n--) *p++ = *q++; return to; }
static u64 length(const char *s) { u64 n = 0; while (s[n]) n++; return n; }
static int same(const char *a, const char *b) { while (*a && *a == *b) a++, b++; return *a == *b; }
static u64 number(const char *s) { u64 n = 0; while (*s >= '0' && *s <= '9') n = n * 10 + *s++ - '0'; return n; }

struct header { u32 kind, len; u64 sequence; };
struct iovec { void *base; u64 len; };
struct msghdr { void *name; u32 namelen; struct iovec *iov; u64 iovlen; void *control; u64 controllen; int flags; };
struct cmsg { u64 len; int level, type; int fds[252]; };

static u8 packet[160 * 1024] __attribute__((aligned(16)));
static struct cmsg rights;
static u64 sequence;

static void send(u32 kind, const void *body, u32 len, u64 seq) {
    struct header header = {kind, len, seq};
    struct iovec parts[2] = {{&header, sizeof header}, {(void *)body, len}};
    struct msghdr message = {0, 0, parts, 2, 0, 0, 0};
    if (call(SENDMSG, 3, (long)&message, 0, 0, 0, 0) < 0) call(EXIT_GROUP, 99, 0, 0, 0, 0, 0);
}
static long receive(void) {
    struct iovec part = {packet, sizeof packet};
    struct msghdr message = {0, 0, &part, 1, &rights, sizeof rights, 0};
    rights.len = 0;
    long n = call(RECVMSG, 3, (long)&message, 0, 0, 0, 0);
    if (n <= 0) call(EXIT_GROUP, 98, 0, 0, 0, 0, 0);
    if (message.controllen == 0) rights.len = 16;
    return n;
}
static int descriptors(void) { return (rights.len - 16) / 4; }
static void say(const char *text) { send(106, text, length(text), 0); }
static void finish(u32 code) {
    u32 body[2] = {code, 0};
    send(105, body, 8, 0);
    call(EXIT_GROUP, code, 0, 0, 0, 0, 0);
}
static void *map(u64 at, u64 len, int prot, int flags, int fd, u64 offset) {
    long result = call(MMAP, at, len, prot, flags, fd, offset);
    if (result < 0 && result > -4096) { say("mmap failed"); call(EXIT_GROUP, 97, 0, 0, 0, 0, 0); }
    return (void *)result;
}

/* A filter that allows everything: only that it exists is checked from outside. */
static void install_filter(void) {
#ifndef NO_FILTER
    struct { u16 code; u8 jt, jf; u32 k; } allow = {6, 0, 0, 0x7fff0000};
    struct { u16 len; void *filter; } program = {1, &allow};
    call(PRCTL, 22 /* PR_SET_SECCOMP */, 2, (long)&program, 0, 0, 0);
#endif
}

/* Sends a request with `body` and reports errno, or the first bytes of the file or tail. */
static void ask(u32 kind, const void *body, u32 len) {
    static char text[256];
    send(kind, body, len, ++sequence);
    long n = receive();
    struct header *header = (void *)packet;
    int errno = *(int *)(packet + 16);
    if (header->kind != 4 || header->sequence != sequence) { say("no reply"); return; }
    memset(text, 0, sizeof text);
    if (errno) {
        memcpy(text, "errno ", 6);
        text[6] = '0' + errno / 10; text[7] = '0' + errno % 10;
    } else if (descriptors() > 0) {
        memcpy(text, "file ", 5);
        call(READ, rights.fds[0], (long)text + 5, 64, 0, 0, 0);
    } else {
        memcpy(text, "data ", 5);
        for (long i = 0; i < n - 24 && i < 200; i++) text[5 + i] = packet[24 + i] ? packet[24 + i] : ' ';
    }
    say(text);
}

struct region { u64 start, len, blob_offset; u32 blob, prot, flags, path_offset, path_len, space; };
struct thread { u32 tid, reserved; u64 registers[27]; };

/* Lays out memory like a frozen program and reports it: kernel heap, a file with
 * a changed page, zero pages, data, a wiped page and a guard. */
static void freeze(int variant) {
    enum { ANON = 0x32, PRIVATE_FILE = 0x12, NO_BLOB = -1 };
    u8 *heap = map(0x7e1000000000, 0x10000, 3, ANON, -1, 0);
    u8 *text = map(0x400000, 0x8000, 3, ANON, -1, 0);
    u8 *data = map(0x600000, 0x100000, 3, ANON, -1, 0);
    u8 *guard = map(0x700000, 0x4000, 3, ANON, -1, 0);
    memset(guard, 0x77, 100);
    call(MPROTECT, (long)guard, 0x4000, 0, 0, 0, 0);
    /* The blob of the test holds page numbers: copy it, then change page 3. */
    for (int page = 0; page < 8; page++) memset(text + page * 4096, page + 1, 4096);
    text[3 * 4096 + 5] = 0xee;
    memset(data, 0xab, 4096);
    memset(data + 0x3000, 0xcd, 10);
    memset(data + 0x80000, 0xef, 8 * 4096);
    memset(data + 0xf0000, 0x55, 4096);

    struct { u8 magic[8]; u32 regions, threads, blobs, auxv, strings, pid, spaces, reserved, processes[2]; } *head = (void *)(heap + 0x1000);
    memcpy(head->magic, "THAWFRZ\0", 8);
    head->regions = 5; head->threads = 1; head->blobs = 1; head->auxv = 32; head->strings = 12; head->pid = 1;
    head->spaces = 1; head->processes[0] = 1;
    struct region *region = (void *)(head + 1);
    region[0] = (struct region){0x400000, 0x8000, 0, 0, 5, 1 << 3, 0, 12, 0};
    region[1] = (struct region){0x600000, 0xf0000, 0, NO_BLOB, 3, 0, 0, 0, 0};
    region[2] = (struct region){0x6f0000, 0x10000, 0, NO_BLOB, 3, 1 << 2, 0, 0, 0};
    region[3] = (struct region){0x700000, 0x4000, 0, NO_BLOB, 0, 0, 0, 0, 0};
    region[4] = (struct region){0x7e1000000000, 0x10000, 0, NO_BLOB, 3, 1, 0, 0, 0};
    struct thread *thread = (void *)(region + 5);
    thread->tid = 1;
    thread->registers[16] = 0x400010; /* rip */
    thread->registers[19] = 0x6000f0; /* rsp */
    u32 *blobs = (void *)(thread + 1);
    blobs[0] = 0; blobs[1] = 0;
    u64 *auxv = (void *)(blobs + 2);
    auxv[0] = 6; auxv[1] = 4096;
    memcpy(auxv + 4, "/bin/example", 12);
    u64 body[3] = {(u64)head, (u64)(auxv + 4) + 12 - (u64)head, 1 /* it waits */};
    switch (variant) { /* Lies of a hostile kernel. */
    case 1: head->regions = 0xffffffff; break;
    case 2: region[1].len = 0x7fffffffffff000; break;
    case 3: region[1].start = 0x404000; break;
    case 4: region[0].start = 0x7e0000000000; region[0].flags = 1; break;
    case 5: body[0] = 0x1000; break;
    case 6: body[1] = 0xffffffffffffffff; break;
    case 7: region[0].blob = 77; break;
    case 8: region[0].path_len = 0xffffffff; break;
    case 9: region[0].blob_offset = 0xfffffffffffff000; break;
    case 10: head->auxv = 0xfffffff0; break;
    case 11: region[1].len = 0x1234; break;
    case 12: region[1].prot = 0xff; break;
    case 13: blobs[0] = 77; break;
    case 14: head->magic[0] = 'X'; break;
    case 15: region[4].flags = 0; break;
    case 16: head->threads = 0; break;
    case 17: head->spaces = 0; break;
    case 18: head->spaces = 0xffffffff; break;
    case 19: head->processes[0] = 4711; break;
    case 20: region[1].space = 1; break;
    }
    send(103, body, sizeof body, 0);
}

static void serve(void);

/* The host knocks with SIGUSR1 so that a computing sandbox looks at its socket. */
static void ignore_knocks(void) {
    struct { u64 handler, flags, restorer, mask; } action = {1 /* SIG_IGN */, 0, 0, 0};
    call(RT_SIGACTION, 10, (long)&action, 0, 8, 0, 0);
}

__attribute__((used)) void start(void) {
    ignore_knocks();
    install_filter();
    send(101, 0, 0, 0);
    serve();
}
__asm__(".globl _start\n_start: xor %ebp,%ebp\n and $-16,%rsp\n call start\n hlt\n");

static void run(char *command, char *argument) {
    if (same(command, "exit")) finish(number(argument));
    else if (same(command, "hang")) return;
    else if (same(command, "blob")) { u32 body[2] = {number(argument), 0}; ask(201, body, 8); }
    else if (same(command, "stat")) ask(202, argument, length(argument));
    else if (same(command, "readlink")) ask(204, argument, length(argument));
    else if (same(command, "open")) ask(205, argument, length(argument));
    else if (same(command, "list")) {
        static char body[256];
        memcpy(body + 8, argument, length(argument));
        ask(203, body, 8 + length(argument));
    }
    else if (same(command, "crash")) *(volatile int *)0 = 1;
    else if (same(command, "spin")) for (;;) __asm__ volatile("pause");
    else if (same(command, "eat")) {
        u64 bytes = number(argument) << 20;
        volatile u8 *memory = map(0, bytes, 3, 0x4022, -1, 0);
        for (u64 at = 0; at < bytes; at += 4096) memory[at] = 1;
        say("full");
    }
    else if (same(command, "share")) {
        u64 bytes = number(argument) << 20;
        volatile u8 *memory = map(0, bytes, 3, 0x4021, -1, 0);
        for (u64 at = 0; at < bytes; at += 4096) memory[at] = 1;
        say("full");
    }
    else if (same(command, "spinners")) {
        for (u64 left = number(argument); left; left--)
            if (call(FORK, 0, 0, 0, 0, 0, 0) == 0) for (;;) __asm__ volatile("pause");
        say("spinning");
        for (;;) __asm__ volatile("pause");
    }
    else if (same(command, "relay")) {
        /* One short process after the other: none of them uses much CPU time. */
        for (;;) {
            if (call(FORK, 0, 0, 0, 0, 0, 0) == 0) {
                for (u64 n = number(argument); n; n--) __asm__ volatile("pause");
                call(EXIT_GROUP, 0, 0, 0, 0, 0, 0);
            }
            call(WAIT4, -1, 0, 0, 0, 0, 0);
        }
    }
    else if (same(command, "explode")) {
        /* As many processes as there can be; then says how many there were. */
        u64 made = 0;
        long result;
        while ((result = call(FORK, 0, 0, 0, 0, 0, 0)) > 0) made++;
        if (result == 0) for (;;) call(PAUSE, 0, 0, 0, 0, 0, 0);
        static char text[] = "00000 EAGAIN";
        for (int place = 4; place >= 0; place--, made /= 10) text[place] = '0' + made % 10;
        if (result != -11) memcpy(text + 6, "ERRORS", 6);
        say(text);
    }
    else if (same(command, "close")) { call(3, 3, 0, 0, 0, 0, 0); for (;;) call(PAUSE, 0, 0, 0, 0, 0, 0); }
    else if (same(command, "write")) call(WRITE, rights.fds[1], (long)argument, length(argument), 0, 0, 0);
    else if (same(command, "console")) { call(WRITE, 4, (long)argument, length(argument), 0, 0, 0); say("written"); }
    else if (same(command, "flood")) { for (;;) send(202, "", 0, ++sequence); }
    else if (same(command, "garbage")) send(4242, argument, length(argument), 0);
    else if (same(command, "ready")) send(101, "", 0, 0);
    else if (same(command, "long")) send(202, packet, 9000, 1);
    else if (same(command, "gift")) {
        struct header header = {102, 32, 0};
        u64 body[4] = {0};
        struct iovec parts[2] = {{&header, 16}, {body, 32}};
        struct { u64 len; int level, type; int fd, pad; } gift = {20, 1, 1, 4, 0};
        struct msghdr message = {0, 0, parts, 2, &gift, 24, 0};
        call(SENDMSG, 3, (long)&message, 0, 0, 0, 0);
    }
    else if (same(command, "freeze")) freeze(number(argument));
    else say("unknown command");
}

struct mapping { u64 start, len, offset; u32 source, blob, prot, flags; };
struct populate { u64 start, len, how; };

/* Maps the image and checks a byte of each kind, touching some of it. */
static void thaw(void) {
    struct {
        u64 index_len, mappings_at; u32 mode, mappings, populates, blobs, index_blobs, unused;
        u8 seed[32]; u64 memory; u32 flags, connections, hostname, reserved;
    } *body = (void *)(packet + 16);
    struct mapping *mapping = (void *)(body + 1);
    int image = rights.fds[0];
    for (u32 i = 0; i < body->mappings; i++) {
        struct mapping *m = mapping + i;
        int fd = m->source == 0 ? image : m->source == 1 ? rights.fds[2 + m->blob] : -1;
        map(m->start, m->len, m->prot, m->source == 2 ? 0x4032 : 0x12, fd, m->offset);
    }
    struct populate *populate = (void *)(mapping + body->mappings);
    for (u32 i = 0; i < body->populates; i++)
        if (call(28, populate[i].start, populate[i].len, populate[i].how ? 23 : 22, 0, 0, 0) < 0) {
            say("populate failed");
            return;
        }
    u8 *text = (u8 *)0x400000, *data = (u8 *)0x600000, *heap = (u8 *)0x7e1000000000;
    int good = text[0] == 1 && text[3 * 4096] == 4 && text[3 * 4096 + 5] == 0xee && text[7 * 4096] == 8 &&
               data[0] == 0xab && data[0x3009] == 0xcd && data[0x300a] == 0 && data[0x5000] == 0 &&
               data[0x87fff] == 0xef && data[0xf0000] == 0 && heap[0x1000] == 'T';
    call(MPROTECT, 0x700000, 0x4000, 1, 0, 0, 0);
    good = good && *(u8 *)0x700063 == 0x77;
    for (int page = 0; page < 8; page++) data[0x80000 + page * 4096] = 1; /* for the working set */
    u64 booted[4] = {1, 2, 3, 4};
    send(102, booted, 32, 0);
    say(good ? "thawed" : "wrong bytes");
}

static void serve(void) {
    for (;;) {
        receive();
        struct header *header = (void *)packet;
        if (header->kind == 1) {
            /* Tail: host name, directory, program, then arguments. */
            static u8 command[sizeof packet];
            memcpy(command, packet, sizeof packet);
            char *at = (char *)command + 16 + 32 + 16 + 10 * 4 + 8;
            for (int skip = 0; skip < 3; skip++) at += length(at) + 1;
            /* The standard streams come behind it. */
            receive();
            if (header->kind != 11 || descriptors() != 3) { say("no standard streams"); continue; }
            run(at, at + length(at) + 1);
        } else if (header->kind == 2) thaw();
        else if (header->kind == 3) say(descriptors() == 1 ? "connected" : "no socket");
        else if (header->kind == 5) finish(100 + *(u32 *)(packet + 16));
        else if (header->kind == 6) say("resumed");
        else if (header->kind == 8) say("asked to freeze");
    }
}
