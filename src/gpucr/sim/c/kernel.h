/* System calls that C libraries before 2.30 have no functions for: the wheel is for 2.17. */
#ifndef GPUCR_SIM_KERNEL_H
#define GPUCR_SIM_KERNEL_H

#include <linux/memfd.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static inline int new_memory_file(const char *name) {
    return (int)syscall(SYS_memfd_create, name, MFD_CLOEXEC);
}

static inline bool fill_randomly(void *bytes, size_t size) {
    return syscall(SYS_getrandom, bytes, size, 0) == (long)size;
}

static inline pid_t own_thread(void) {
    return (pid_t)syscall(SYS_gettid);
}

#endif
