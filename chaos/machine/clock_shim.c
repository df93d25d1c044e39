/* A wall clock that is off: preloaded before the C library, adds an offset to what it says of CLOCK_REALTIME.
 *
 * The offset, an int64 of nanoseconds, is in the file that ELASTIC3D_CLOCK_OFFSET names, which is mapped: a change is
 * seen at once by all processes that map it, and by those that they fork. It is looked for at the first look at a
 * clock for which there is that name: a process may get its environment after a fork. The monotonic clock is left alone.
 *
 * A wait until a wall time ends when this clock has come to it, also where the clock jumps meanwhile, as in the kernel.
 * It looks every half second: a wait for a condition then returns as if it had been woken for nothing, which POSIX
 * allows.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define SLICE (SECOND / 2)
/* No machine has been up for as many seconds: a later time is one of the wall clock. */
#define WALL 1000000000

static const int64_t none;
static const volatile int64_t *offset;

static void begin(void) {
    const char *path = getenv("ELASTIC3D_CLOCK_OFFSET");
    if (!path)
        return;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    void *page = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    if (file >= 0)
        close(file);
    offset = page == MAP_FAILED ? &none : page;
}

static int64_t off(void) {
    if (!offset)
        begin();
    return offset ? *offset : 0;
}

static int64_t whole(const struct timespec *at) { return at->tv_sec * SECOND + at->tv_nsec; }

static struct timespec parts(int64_t at) {
    int64_t rest = at % SECOND;
    rest += rest < 0 ? SECOND : 0;
    return (struct timespec){.tv_sec = (at - rest) / SECOND, .tv_nsec = rest};
}

static int read_clock(clockid_t clock, struct timespec *at) {
    static int (*next)(clockid_t, struct timespec *);
    if (!next)
        next = dlsym(RTLD_NEXT, "clock_gettime");
    return next(clock, at);
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    int failed = read_clock(clock, at);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI))
        *at = parts(whole(at) + off());
    return failed;
}

int gettimeofday(struct timeval *at, void *zone) {
    static int (*next)(struct timeval *, void *);
    if (!next)
        next = dlsym(RTLD_NEXT, "gettimeofday");
    int failed = next(at, zone);
    if (!failed) {
        struct timespec moved = parts(at->tv_sec * SECOND + at->tv_usec * 1000LL + off());
        at->tv_sec = moved.tv_sec;
        at->tv_usec = moved.tv_nsec / 1000;
    }
    return failed;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at)
        *at = now.tv_sec;
    return now.tv_sec;
}

int timespec_get(struct timespec *at, int base) {
    return base == TIME_UTC && !clock_gettime(CLOCK_REALTIME, at) ? base : 0;
}

/* Return until when to wait by the kernel's clock for `until` by this one; *last: whether that is the end of it. */
static struct timespec slice(const struct timespec *until, int *last) {
    struct timespec now;
    read_clock(CLOCK_REALTIME, &now);
    int64_t end = whole(until) - off(), soon = whole(&now) + SLICE;
    *last = end <= soon;
    return parts(*last ? end : soon);
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!next) {
        /* Without its version an older one is found, of conditions of another size. */
        next = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
        if (!next)
            next = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    }
    if (until->tv_sec < WALL)
        return next(condition, mutex, until);
    int last;
    struct timespec end = slice(until, &last);
    int code = next(condition, mutex, &end);
    return code == ETIMEDOUT && !last ? 0 : code;
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    static int (*next)(sem_t *, const struct timespec *);
    if (!next)
        next = dlsym(RTLD_NEXT, "sem_timedwait");
    for (;;) {
        int last;
        struct timespec end = slice(until, &last);
        int failed = next(semaphore, &end);
        if (!failed || errno != ETIMEDOUT || last)
            return failed;
    }
}
