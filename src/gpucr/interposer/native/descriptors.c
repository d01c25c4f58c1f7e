#include "descriptors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HIGHEST_START 4096 /* the kernel's table of descriptors, which each fork copies, is as large as the highest */

int descriptor_copy_upper(int number, rlim_t limit) {
    rlim_t half = limit / 2 < HIGHEST_START ? limit / 2 : HIGHEST_START;
    return fcntl(number, F_DUPFD_CLOEXEC, half > 3 ? (int)half : 3);
}

int descriptor_copy_high(int number) {
    struct rlimit limit;
    return descriptor_copy_upper(number, getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : 0);
}

/* By the plain system call. glibc 2.33 to 2.38 make a path's look-up of it, which a program may have forbidden itself. */
bool descriptor_identify(int number, struct identity *file) {
    struct stat status;
    if (number < 0 || syscall(SYS_fstat, number, &status) != 0)
        return false;
    *file = (struct identity){status.st_dev, status.st_ino};
    return true;
}

struct owned descriptor_own(int number) {
    struct owned owned = {.number = number};
    return descriptor_identify(number, &owned.file) ? owned : NOTHING_OWNED;
}

struct owned descriptor_keep(int number) {
    int copy = number >= 0 ? descriptor_copy_high(number) : -1;
    if (copy < 0)
        return descriptor_own(number);
    close(number);
    return descriptor_own(copy);
}

bool descriptor_is_ours(const struct owned *owned) {
    struct identity now;
    return descriptor_identify(owned->number, &now) && now.device == owned->file.device &&
           now.inode == owned->file.inode;
}

void descriptor_close(struct owned *owned) {
    if (descriptor_is_ours(owned))
        close(owned->number);
    *owned = NOTHING_OWNED;
}
