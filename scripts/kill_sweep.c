/* Counts the file operations of a program below one folder, and kills the program at one of them or lets that one fail.

   scripts/kill_sweep.py compiles this file and loads it with LD_PRELOAD. An operation is a call that changes what is on the disk: it
   opens a file to write, writes, syncs, cuts, renames or removes a file, or makes or removes a directory. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

/* At MOMENT and STOP, the signal comes from outside. */
enum { COUNT, KILL, TORN, FULL, BROKEN, MOMENT, STOP };

static char folder[PATH_MAX];
static size_t folder_length;
static long chosen;
static int mode = COUNT;
/* Shared by all processes of the program. */
static long *counter;

/* Start to count. `file` holds the counter; `mode` is what happens at operation `number`, counted from 1. */
void kill_sweep_arm(const char *below, const char *file, long number, int what)
{
    int handle = open(file, O_RDWR);
    void *found = mmap(NULL, sizeof(long), PROT_READ | PROT_WRITE, MAP_SHARED, handle, 0);
    close(handle);
    if (found == MAP_FAILED || !realpath(below, folder))
        abort();
    folder_length = strlen(folder);
    chosen = number;
    mode = what;
    counter = found;
}

__attribute__((constructor)) static void arm_from_environment(void)
{
    const char *below = getenv("KILL_SWEEP_FOLDER");
    if (below)
        kill_sweep_arm(below, getenv("KILL_SWEEP_COUNTER"), atol(getenv("KILL_SWEEP_NUMBER")), atoi(getenv("KILL_SWEEP_MODE")));
}

static int is_below(const char *path)
{
    return !strncmp(path, folder, folder_length) && (path[folder_length] == '/' || !path[folder_length]);
}

static int handle_is_below(int handle)
{
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0)
        return 0;
    path[length] = 0;
    return is_below(path);
}

static int path_is_below(int directory, const char *path)
{
    char whole[PATH_MAX], place[PATH_MAX];
    if (!path)
        return 0;
    if (path[0] == '/')
        return is_below(path);
    if (directory != AT_FDCWD)
        return handle_is_below(directory);
    if (!getcwd(place, sizeof place) || snprintf(whole, sizeof whole, "%s/%s", place, path) >= (int)sizeof whole)
        return 0;
    return is_below(whole);
}

/* What happens to this operation: 0: nothing. TORN: half of it is done before the kill. Otherwise errno is set, and it fails. */
static int met(int needs_room)
{
    if (!counter)
        return 0;
    long number = __atomic_add_fetch(counter, 1, __ATOMIC_SEQ_CST);
    if (mode == KILL && number == chosen)
        kill(getpid(), SIGKILL);
    if (mode == TORN && number == chosen)
        return TORN;
    /* A disk that is full stays full. */
    if (mode == FULL && number >= chosen && needs_room) {
        errno = ENOSPC;
        return FULL;
    }
    if (mode == BROKEN && number == chosen) {
        errno = EIO;
        return BROKEN;
    }
    return 0;
}

static int fails(int happens)
{
    if (happens == TORN)
        kill(getpid(), SIGKILL);
    return happens;
}

#define REAL(name) static __typeof__(name) *real; if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define WRITES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC))

#define OPENING(name, parameters, directory, ...)                               \
    int name parameters                                                         \
    {                                                                           \
        REAL(name);                                                             \
        va_list more;                                                           \
        va_start(more, flags);                                                  \
        mode_t rights = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(more, mode_t) : 0; \
        va_end(more);                                                           \
        if (counter && WRITES(flags) && path_is_below(directory, path) && fails(met(flags & O_CREAT))) \
            return -1;                                                          \
        return real(__VA_ARGS__);                                               \
    }
#define OPEN(name) OPENING(name, (const char *path, int flags, ...), AT_FDCWD, path, flags, rights)
#define OPENAT(name) \
    OPENING(name, (int directory, const char *path, int flags, ...), directory, directory, path, flags, rights)
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                             \
    FILE *name(const char *path, const char *how)                               \
    {                                                                           \
        REAL(name);                                                             \
        if (counter && strpbrk(how, "wa+") && path_is_below(AT_FDCWD, path) && fails(met(1))) \
            return NULL;                                                        \
        return real(path, how);                                                 \
    }
FOPEN(fopen)
FOPEN(fopen64)

ssize_t write(int handle, const void *data, size_t size)
{
    REAL(write);
    if (counter && handle_is_below(handle)) {
        int happens = met(1);
        if (happens == TORN)
            real(handle, data, size / 2);
        if (fails(happens))
            return -1;
    }
    return real(handle, data, size);
}

ssize_t writev(int handle, const struct iovec *parts, int count)
{
    REAL(writev);
    if (counter && handle_is_below(handle) && fails(met(1)))
        return -1;
    return real(handle, parts, count);
}

#define PWRITE(name, offset_type)                                               \
    ssize_t name(int handle, const void *data, size_t size, offset_type offset) \
    {                                                                           \
        REAL(name);                                                             \
        if (counter && handle_is_below(handle)) {                               \
            int happens = met(1);                                               \
            if (happens == TORN)                                                \
                real(handle, data, size / 2, offset);                           \
            if (fails(happens))                                                 \
                return -1;                                                      \
        }                                                                       \
        return real(handle, data, size, offset);                                \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define ON_HANDLE(name, parameters, arguments, room)                            \
    int name parameters                                                         \
    {                                                                           \
        REAL(name);                                                             \
        if (counter && handle_is_below(handle) && fails(met(room)))             \
            return -1;                                                          \
        return real arguments;                                                  \
    }
ON_HANDLE(fsync, (int handle), (handle), 1)
ON_HANDLE(fdatasync, (int handle), (handle), 1)
ON_HANDLE(ftruncate, (int handle, off_t size), (handle, size), 0)
ON_HANDLE(ftruncate64, (int handle, off64_t size), (handle, size), 0)

#define ON_PATH(name, parameters, arguments, directory, path, room)             \
    int name parameters                                                         \
    {                                                                           \
        REAL(name);                                                             \
        if (counter && path_is_below(directory, path) && fails(met(room)))      \
            return -1;                                                          \
        return real arguments;                                                  \
    }
ON_PATH(rename, (const char *from, const char *to), (from, to), AT_FDCWD, to, 1)
ON_PATH(renameat, (int a, const char *from, int b, const char *to), (a, from, b, to), b, to, 1)
ON_PATH(unlink, (const char *path), (path), AT_FDCWD, path, 0)
ON_PATH(unlinkat, (int directory, const char *path, int flags), (directory, path, flags), directory, path, 0)
ON_PATH(mkdir, (const char *path, mode_t rights), (path, rights), AT_FDCWD, path, 1)
ON_PATH(mkdirat, (int directory, const char *path, mode_t rights), (directory, path, rights), directory, path, 1)
ON_PATH(rmdir, (const char *path), (path), AT_FDCWD, path, 0)
ON_PATH(link, (const char *from, const char *to), (from, to), AT_FDCWD, to, 1)
ON_PATH(symlink, (const char *from, const char *to), (from, to), AT_FDCWD, to, 1)

ssize_t sendfile(int to, int from, off_t *offset, size_t count)
{
    static ssize_t (*real)(int, int, off_t *, size_t);
    if (!real)
        real = (ssize_t (*)(int, int, off_t *, size_t))dlsym(RTLD_NEXT, "sendfile");
    if (counter && handle_is_below(to)) {
        int happens = met(1);
        if (happens == TORN)
            real(to, from, offset, count / 2);
        if (fails(happens))
            return -1;
    }
    return real(to, from, offset, count);
}
