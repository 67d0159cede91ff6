/* A process that preloads this sees a wall clock that is an hour ahead. Clocks that measure spans of time stay. */
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += 3600;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int failed = syscall(SYS_gettimeofday, now, zone);
    if (!failed) now->tv_sec += 3600;
    return failed;
}

time_t time(time_t *now) {
    struct timespec ahead;
    clock_gettime(CLOCK_REALTIME, &ahead);
    if (now) *now = ahead.tv_sec;
    return ahead.tv_sec;
}
