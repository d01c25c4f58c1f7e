/*
 * Descriptors that blocks keep. A block that came by a descriptor keeps it, because the driver does not export imported
 * memory again: the next time it leaves by the same one. And a block that several processes share keeps the one by which
 * it was exported or imported: from outside, kcmp(2) shows which descriptors of two processes are one open file, and so
 * who owns an imported block. Everything here needs the table locked; nobody forks meanwhile (table.c).
 */
#include "interposer.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define HIGHEST_START 65536 /* a table of descriptors is as large as its highest number */

static struct rlimit limit; /* the program's own, while it is raised */
static unsigned raised;

/*
 * The program must not find fewer free numbers than it had, and select() takes low ones only. So ours lie behind its soft
 * limit, which is raised for as long as it takes to get one; where it cannot be, in the upper half of the numbers.
 */
void shared_begin(void) {
    if (raised++ > 0 || getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return;
    struct rlimit higher = {limit.rlim_max, limit.rlim_max};
    if (limit.rlim_cur < limit.rlim_max && limit.rlim_cur <= HIGHEST_START)
        setrlimit(RLIMIT_NOFILE, &higher);
}

void shared_end(void) {
    if (--raised == 0 && limit.rlim_cur < limit.rlim_max && limit.rlim_cur <= HIGHEST_START)
        setrlimit(RLIMIT_NOFILE, &limit);
}

static int high_copy(int descriptor) {
    rlim_t half = limit.rlim_cur / 2 < HIGHEST_START ? limit.rlim_cur / 2 : HIGHEST_START;
    bool behind = limit.rlim_cur < limit.rlim_max && limit.rlim_cur <= HIGHEST_START;
    int copy = behind ? fcntl(descriptor, F_DUPFD_CLOEXEC, (int)limit.rlim_cur) : -1;
    return copy >= 0 ? copy : fcntl(descriptor, F_DUPFD_CLOEXEC, half > 3 ? (int)half : 3);
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

/* Without a free number the block has no descriptor: it cannot leave, or it is not known with whom it is shared. */
void shared_keep(struct block *block, int descriptor) {
    struct stat status;
    shared_forget(block);
    shared_begin();
    int copy = high_copy(descriptor);
    shared_end();
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
