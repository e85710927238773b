/*
 * Ask Thaw to freeze this program, and learn which copy of it this is.
 *
 *     #include "thaw.h"
 *
 *     thaw_before_freeze(close_connections, pool);   // what no two copies may share
 *     thaw_after_thaw(open_connections, pool);
 *     load_everything();
 *     long generation = thaw_freeze();               // copies begin here
 *
 * One file for C and C++, without anything to link: copy it beside your program and
 * include it in one source file, whose hooks are those that are called. It talks to
 * /dev/thaw, which every sandbox has. Outside a sandbox, thaw_freeze() does nothing
 * and returns 0, so that the same program runs anywhere.
 */
#ifndef THAW_H
#define THAW_H

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

/* Most hooks of each kind. */
#define THAW_HOOKS_MAX 32

/* A function to call, with the argument that came with it and, after a thaw, with
 * the generation; before a freeze that is the one that freezes. */
typedef void (*thaw_hook)(void *argument, long generation);

struct thaw_hooks {
    thaw_hook hook[THAW_HOOKS_MAX];
    void *argument[THAW_HOOKS_MAX];
    int count;
};

static struct thaw_hooks thaw_before, thaw_after;

static inline int thaw_add_hook(struct thaw_hooks *hooks, thaw_hook hook, void *argument) {
    if (hooks->count == THAW_HOOKS_MAX) {
        errno = ENOMEM;
        return -1;
    }
    hooks->hook[hooks->count] = hook;
    hooks->argument[hooks->count] = argument;
    hooks->count++;
    return 0;
}

/* Call `hook` before a freeze; the last one given is called first. Returns 0, or -1
 * with ENOMEM if there are too many. */
static inline int thaw_before_freeze(thaw_hook hook, void *argument) {
    return thaw_add_hook(&thaw_before, hook, argument);
}

/* Call `hook` when thaw_freeze() goes on, in the order given: in every copy, and in
 * the original too if it was not ended. Returns as thaw_before_freeze(). */
static inline int thaw_after_thaw(thaw_hook hook, void *argument) {
    return thaw_add_hook(&thaw_after, hook, argument);
}

/* Which copy this is: 0 for the original, n for a copy of the n-th generation; a copy
 * of a copy that was frozen again is of the next generation. -1 with errno if that
 * cannot be read. */
static inline long thaw_generation(void) {
    char text[24];
    int device = open("/dev/thaw", O_RDONLY | O_CLOEXEC);
    if (device < 0) return errno == ENOENT ? 0 : -1;
    ssize_t count = read(device, text, sizeof text - 1);
    int error = errno;
    close(device);
    errno = error;
    if (count < 0) return -1;
    text[count] = 0;
    return strtol(text, NULL, 10);
}

/* Freeze the program here, if somebody wants that, and return thaw_generation(), or
 * -1 with errno.
 *
 * Comes back at once if nobody does (thaw run), or if this is a copy already. All
 * other threads must come to wait for something; the function says
 * freeze = "program" in [entry] of its thaw.toml if it waits for clients earlier. */
static inline long thaw_freeze(void) {
    int device = open("/dev/thaw", O_WRONLY | O_CLOEXEC);
    if (device < 0) return errno == ENOENT ? 0 : -1;
    long which = thaw_generation();
    for (int i = thaw_before.count - 1; i >= 0; i--)
        thaw_before.hook[i](thaw_before.argument[i], which);
    ssize_t written;
    do written = write(device, "freeze", 6);
    while (written < 0 && errno == EINTR);
    int error = errno;
    close(device);
    errno = error;
    if (written < 0) return -1;
    which = thaw_generation();
    for (int i = 0; i < thaw_after.count; i++)
        thaw_after.hook[i](thaw_after.argument[i], which);
    return which;
}

#endif
