/* What every guest program uses to report what it sees.
 *
 * A program prints only what must be the same on Linux and in a sandbox: names
 * of errors, counts, contents. Never a process id, an inode number, an address
 * or a time. Everything goes out by write(2) at once, so that the last line
 * before a crash is not lost. */
#ifndef GUEST_H
#define GUEST_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

__attribute__((format(printf, 1, 2), unused)) static void say(const char *format, ...)
{
    char line[4096];
    va_list arguments;
    va_start(arguments, format);
    int len = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    if (len >= (int)sizeof line)
        len = (int)sizeof line - 1;
    for (int done = 0; done < len;) {
        ssize_t put = write(1, line + done, (size_t)(len - done));
        if (put <= 0)
            _exit(111);
        done += (int)put;
    }
}

__attribute__((unused)) static const char *error_name(int error)
{
    const char *name = strerrorname_np(error);
    return name ? name : "unknown error";
}

/* Prints a heading. */
#define PART(text) say("-- %s\n", text)

/* Calls, prints the source text with the result or the error's name, and
 * returns the result. For results that are the same everywhere. */
#define TRY(call)                                                                                  \
    ({                                                                                             \
        errno = 0;                                                                                 \
        long result_ = (long)(call);                                                               \
        if (result_ == -1)                                                                         \
            say("%s = %s\n", #call, error_name(errno));                                            \
        else                                                                                       \
            say("%s = %ld\n", #call, result_);                                                     \
        result_;                                                                                   \
    })

/* The same for results that differ from run to run (addresses, sizes). */
#define OK(call)                                                                                   \
    ({                                                                                             \
        errno = 0;                                                                                 \
        long result_ = (long)(call);                                                               \
        say("%s: %s\n", #call, result_ == -1 ? error_name(errno) : "ok");                          \
        result_;                                                                                   \
    })

/* For functions that return an error number (posix_fallocate, pthread_*). */
#define CODE(call)                                                                                 \
    ({                                                                                             \
        int code_ = (call);                                                                        \
        say("%s = %s\n", #call, code_ ? error_name(code_) : "0");                                  \
        code_;                                                                                     \
    })

/* Prints whether a condition holds. */
#define IS(condition) say("%s: %s\n", #condition, (condition) ? "yes" : "no")

/* Calls something that the rest of the program depends on. */
#define MUST(call)                                                                                 \
    ({                                                                                             \
        errno = 0;                                                                                 \
        long result_ = (long)(call);                                                               \
        if (result_ == -1) {                                                                       \
            say("%s:%d: %s failed with %s\n", __FILE__, __LINE__, #call, error_name(errno));       \
            _exit(99);                                                                             \
        }                                                                                          \
        result_;                                                                                   \
    })

/* Enters a fresh, empty directory. */
__attribute__((unused)) static char *enter_scratch(void)
{
    static char path[] = "/tmp/thaw-guest-XXXXXX";
    if (!mkdtemp(path)) {
        say("mkdtemp: %s\n", error_name(errno));
        _exit(99);
    }
    MUST(chdir(path));
    umask(022);
    return path;
}

/* Removes what enter_scratch has made; `rm -r` without a child process. */
__attribute__((unused)) static void remove_tree(const char *path);

#include <dirent.h>
__attribute__((unused)) static void remove_tree(const char *path)
{
    /* A link is removed, not followed: one to /proc/self/fd leads on for ever. */
    if (unlink(path) == 0)
        return;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (dir) {
        struct dirent *entry;
        while ((entry = readdir(dir))) {
            if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
                continue;
            char below[PATH_MAX];
            snprintf(below, sizeof below, "%s/%s", path, entry->d_name);
            remove_tree(below);
        }
        closedir(dir);
    }
    rmdir(path);
}

__attribute__((unused)) static void leave_scratch(char *path)
{
    MUST(chdir("/"));
    remove_tree(path);
}

/* Creates a file with the given text. */
__attribute__((unused)) static void put_file(const char *path, const char *text)
{
    int fd = (int)MUST(open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644));
    MUST(write(fd, text, strlen(text)));
    MUST(close(fd));
}

/* Prints a file's text, or why it cannot be read. */
__attribute__((unused)) static void show_file(const char *path)
{
    char text[512];
    int fd = open(path, O_RDONLY);
    ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (got < 0) {
        say("%s: %s\n", path, error_name(errno));
    } else {
        text[got] = '\0';
        say("%s: \"%s\"\n", path, text);
    }
    if (fd >= 0)
        close(fd);
}

/* Prints type and permissions, links and size of a file, but no inode number,
 * and no size or links of a directory, which differ among file systems. */
__attribute__((unused)) static void show_stat(const char *path)
{
    struct stat st;
    if (lstat(path, &st) < 0)
        say("stat %s: %s\n", path, error_name(errno));
    else if (S_ISDIR(st.st_mode))
        say("stat %s: mode %o\n", path, st.st_mode);
    else
        say("stat %s: mode %o links %lu size %ld\n", path, st.st_mode, (unsigned long)st.st_nlink,
            (long)st.st_size);
}

__attribute__((unused)) static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Prints the sorted names of a directory. */
__attribute__((unused)) static void show_dir(const char *path)
{
    char *names[1024];
    size_t count = 0;
    DIR *dir = opendir(path);
    if (!dir) {
        say("ls %s: %s\n", path, error_name(errno));
        return;
    }
    struct dirent *entry;
    while (count < 1024 && (entry = readdir(dir)))
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
            names[count++] = strdup(entry->d_name);
    closedir(dir);
    qsort(names, count, sizeof *names, by_name);
    say("ls %s:", path);
    for (size_t i = 0; i < count; i++) {
        say(" %s", names[i]);
        free(names[i]);
    }
    say("\n");
}

/* Waits for a child or tracee, and says what has come without ids; returns its status. */
__attribute__((unused)) static int await_child(pid_t pid, const char *what)
{
    int status = 0;
    if (waitpid(pid, &status, __WALL) < 0)
        say("%s: wait: %s\n", what, error_name(errno));
    else if (WIFSTOPPED(status))
        say("%s: stopped by %#x, event %d\n", what, WSTOPSIG(status), status >> 16);
    else if (WIFSIGNALED(status))
        say("%s: killed by %d\n", what, WTERMSIG(status));
    else
        say("%s: exited with %d\n", what, WEXITSTATUS(status));
    return status;
}

#endif
