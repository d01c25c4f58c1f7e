/*
 * How to recognise a block that several processes share: the descriptor by which it was exported or imported is kept
 * for the block's lifetime. From outside, kcmp(2) shows which descriptors of two processes are one open file, and so
 * who owns an imported block. Everything here needs the table locked; nobody forks meanwhile (table.c).
 */
#include "interposer.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define HIGHEST_START 65536 /* a table of descriptors is as large as its highest number */

/* The upper half of the numbers: the program's own descriptors stay low, so select() keeps working. */
static int high_copy(int descriptor) {
    struct rlimit limit;
    int lowest = 3;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0)
        lowest = limit.rlim_cur / 2 < HIGHEST_START ? (int)(limit.rlim_cur / 2) : HIGHEST_START;
    return fcntl(descriptor, F_DUPFD_CLOEXEC, lowest);
}

/* The program may have closed every descriptor it found, and reused its number. */
static bool is_still_ours(const struct block *block) {
    struct stat status;
    return block->descriptor >= 0 && fstat(block->descriptor, &status) == 0 && status.st_dev == block->device &&
           status.st_ino == block->inode;
}

void shared_forget(struct block *block) {
    if (is_still_ours(block))
        close(block->descriptor);
    block->descriptor = -1;
}

/* Without a free number the block has no descriptor: it is known to be shared, but not with whom. */
void shared_keep(struct block *block, int descriptor) {
    struct stat status;
    shared_forget(block);
    int copy = high_copy(descriptor);
    if (copy < 0)
        return;
    if (fstat(copy, &status) != 0) {
        close(copy);
        return;
    }
    block->descriptor = copy;
    block->device = status.st_dev;
    block->inode = status.st_ino;
}

/* One export serves all importers, so it is one open file everywhere. */
result shared_export(struct block *block, int *descriptor) {
    if (is_still_ours(block)) {
        *descriptor = fcntl(block->descriptor, F_DUPFD_CLOEXEC, 3);
        return *descriptor >= 0 ? SUCCESS : OPERATING_SYSTEM;
    }
    block->descriptor = -1;
    result result = real.cuMemExportToShareableHandle(descriptor, block->real, POSIX_DESCRIPTOR, 0);
    if (result == SUCCESS && block->given_out)
        shared_keep(block, *descriptor);
    return result;
}

int shared_number(const struct block *block) {
    return is_still_ours(block) ? block->descriptor : -1;
}

void shared_in_child(void) {
    for (uint32_t i = 0; i < block_count(); i++)
        if (block_at(i)->live)
            shared_forget(block_at(i));
}
