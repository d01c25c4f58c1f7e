/*
 * Descriptors that blocks keep. A block that came by a descriptor keeps it, because the driver does not export imported
 * memory again: the next time it leaves by the same one. And a block that several processes share keeps the one by which
 * it was exported or imported: from outside, kcmp(2) shows which descriptors of two processes are one open file, and so
 * who owns an imported block. Everything here needs the table locked; nobody forks meanwhile (table.c).
 */
#include "interposer.h"

#include <fcntl.h>
#include <sys/resource.h>

#define HIGHEST_LIMIT 65536 /* a table of descriptors is as large as its highest number */

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
    if (limit.rlim_cur < limit.rlim_max && limit.rlim_cur <= HIGHEST_LIMIT)
        setrlimit(RLIMIT_NOFILE, &higher);
}

void shared_end(void) {
    if (--raised == 0 && limit.rlim_cur < limit.rlim_max && limit.rlim_cur <= HIGHEST_LIMIT)
        setrlimit(RLIMIT_NOFILE, &limit);
}

static int copy_behind(int descriptor) {
    bool behind = limit.rlim_cur < limit.rlim_max && limit.rlim_cur <= HIGHEST_LIMIT;
    int copy = behind ? fcntl(descriptor, F_DUPFD_CLOEXEC, (int)limit.rlim_cur) : -1;
    return copy >= 0 ? copy : descriptor_copy_upper(descriptor, limit.rlim_cur);
}

void shared_forget(struct block *block) {
    descriptor_close(&block->descriptor);
}

/* Without a free number the block has no descriptor: it cannot leave, or it is not known with whom it is shared. */
void shared_keep(struct block *block, int descriptor) {
    shared_forget(block);
    shared_begin();
    block->descriptor = descriptor_own(copy_behind(descriptor));
    shared_end();
}

/* One export serves all importers, so it is one open file everywhere. */
result shared_export(struct block *block, int *descriptor) {
    if (descriptor_is_ours(&block->descriptor)) {
        *descriptor = fcntl(block->descriptor.number, F_DUPFD_CLOEXEC, 3);
        return *descriptor >= 0 ? SUCCESS : OPERATING_SYSTEM;
    }
    block->descriptor = NOTHING_OWNED;
    result result = real.cuMemExportToShareableHandle(descriptor, block->real, POSIX_DESCRIPTOR, 0);
    if (result == SUCCESS && block->given_out)
        shared_keep(block, *descriptor);
    return result;
}

int shared_number(const struct block *block) {
    return descriptor_is_ours(&block->descriptor) ? block->descriptor.number : -1;
}

void shared_in_child(void) {
    for (uint32_t i = 0; i < block_count(); i++)
        if (block_at(i)->live)
            shared_forget(block_at(i));
}
