/*
 * How to recognise a block that several processes share: the descriptor by which it was exported or imported is kept
 * for the block's lifetime. From outside, kcmp(2) shows which descriptors of two processes are one open file, and so
 * who owns an imported block. Everything here needs the table locked; nobody forks meanwhile (table.c).
 */
#include "interposer.h"

#include <fcntl.h>

void shared_forget(struct block *block) {
    descriptor_close(&block->descriptor);
}

/* Without a free number the block has no descriptor: it is known to be shared, but not with whom. */
void shared_keep(struct block *block, int descriptor) {
    shared_forget(block);
    block->descriptor = descriptor_own(descriptor_copy_high(descriptor));
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
