/* Storage that does not respond: a library for LD_PRELOAD.

   While the first byte of the file STALL_SWITCH is not 0, calls on files below STALL_ROOT do not return, like
   calls on a network file system whose server is unreachable. All other calls work as usual. The file is mapped,
   so a call costs nothing while the switch is off. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static volatile const char *stalled;
static char root[PATH_MAX];

__attribute__((constructor)) static void begin(void) {
    const char *where = getenv("STALL_ROOT"), *path = getenv("STALL_SWITCH");
    if (!where || !path)
        return;
    int descriptor = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0)
        return;
    void *page = mmap(NULL, 1, PROT_READ, MAP_SHARED, descriptor, 0);
    syscall(SYS_close, descriptor);
    if (page == MAP_FAILED)
        return;
    snprintf(root, sizeof root, "%s", where);
    stalled = page;
}

static void wait_for(const char *path) {
    if (!stalled || !*stalled || !path || strncmp(path, root, strlen(root)) != 0)
        return;
    struct timespec pause = {0, 5000000};
    while (*stalled)
        nanosleep(&pause, NULL);
}

static void wait_for_descriptor(int descriptor) {
    if (!stalled || !*stalled)
        return;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (length <= 0)
        return;
    path[length] = 0;
    wait_for(path);
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) \
        real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define OPENING(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        wait_for(path); \
        return real(path, flags, mode); \
    }
OPENING(open)
OPENING(open64)

#define OPENING_AT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        wait_for(path); \
        return real(folder, path, flags, mode); \
    }
OPENING_AT(openat)
OPENING_AT(openat64)

#define OF_PATH(result, name, declared, given) \
    result name declared { \
        REAL(name); \
        wait_for(path); \
        return real given; \
    }
OF_PATH(int, stat, (const char *path, struct stat *found), (path, found))
OF_PATH(int, lstat, (const char *path, struct stat *found), (path, found))
OF_PATH(int, stat64, (const char *path, struct stat64 *found), (path, found))
OF_PATH(int, lstat64, (const char *path, struct stat64 *found), (path, found))
OF_PATH(int, fstatat, (int folder, const char *path, struct stat *found, int flags), (folder, path, found, flags))
OF_PATH(int, fstatat64, (int folder, const char *path, struct stat64 *found, int flags), (folder, path, found, flags))
OF_PATH(int, access, (const char *path, int mode), (path, mode))
OF_PATH(int, mkdir, (const char *path, mode_t mode), (path, mode))
OF_PATH(int, unlink, (const char *path), (path))
OF_PATH(int, rename, (const char *path, const char *other), (path, other))

#define OF_DESCRIPTOR(result, name, declared, given) \
    result name declared { \
        REAL(name); \
        wait_for_descriptor(descriptor); \
        return real given; \
    }
OF_DESCRIPTOR(ssize_t, write, (int descriptor, const void *data, size_t size), (descriptor, data, size))
OF_DESCRIPTOR(ssize_t, read, (int descriptor, void *data, size_t size), (descriptor, data, size))
OF_DESCRIPTOR(int, fsync, (int descriptor), (descriptor))
OF_DESCRIPTOR(int, fdatasync, (int descriptor), (descriptor))
OF_DESCRIPTOR(int, ftruncate64, (int descriptor, off64_t size), (descriptor, size))
