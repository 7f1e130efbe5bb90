/* Shifts the wall clock of a process by as many seconds as the file says that SOAK_CLOCK names, from
 * one moment to the next, as an administrator or a time service does. Loaded with LD_PRELOAD. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *shift;

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("SOAK_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *mapped = mmap(NULL, sizeof *shift, PROT_READ, MAP_SHARED, fd, 0);
    shift = mapped == MAP_FAILED ? NULL : mapped;
    close(fd);
}

static int64_t seconds(void)
{
    return shift ? *shift : 0;
}

int clock_gettime(clockid_t clock, struct timespec *at)
{
    int result = syscall(SYS_clock_gettime, clock, at);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        at->tv_sec += seconds();
    return result;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone)
{
    int result = syscall(SYS_gettimeofday, at, zone);
    if (result == 0)
        at->tv_sec += seconds();
    return result;
}

time_t time(time_t *at)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at)
        *at = now.tv_sec;
    return now.tv_sec;
}
