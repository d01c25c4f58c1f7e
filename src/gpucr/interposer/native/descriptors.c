#include "descriptors.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HIGHEST_START 4096 /* the kernel's table of descriptors, which each fork copies, is as large as the highest */

/* The upper half of the numbers: the program's own stay low, so select() keeps working. */
int descriptor_copy_high(int number) {
    struct rlimit limit;
    int lowest = 3;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0)
        lowest = limit.rlim_cur / 2 < HIGHEST_START ? (int)(limit.rlim_cur / 2) : HIGHEST_START;
    return fcntl(number, F_DUPFD_CLOEXEC, lowest);
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
