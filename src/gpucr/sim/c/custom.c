/*
 * Custom storage, the target's side: each GPU's memory in one piece, in its own file that the caller opens. As with the
 * driver, the process is CHECKPOINTING or RESTORING while the files exist.
 */
#include "kernel.h"
#include "sim.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int files[MAX_GPUS]; /* by device; 0: none, which no file of ours is */
static char buffer[1 << 20];

static bool copy(int to, uint64_t to_offset, int from, uint64_t from_offset, uint64_t size_bytes) {
    for (uint64_t done = 0; done < size_bytes;) {
        size_t part = size_bytes - done < sizeof buffer ? (size_t)(size_bytes - done) : sizeof buffer;
        if (pread(from, buffer, part, (off_t)(from_offset + done)) != (ssize_t)part ||
            pwrite(to, buffer, part, (off_t)(to_offset + done)) != (ssize_t)part)
            return false;
        done += part;
    }
    return true;
}

static enum result copy_all(bool to_files) {
    uint32_t device = 0, block = 0;
    uint64_t filled[MAX_GPUS] = {0};
    struct piece piece;
    while (memory_next_piece(&device, &block, &piece)) {
        uint64_t at = filled[device];
        if (!(to_files ? copy(files[device], at, piece.fd, piece.offset, piece.size_bytes)
                       : copy(piece.fd, piece.offset, files[device], at, piece.size_bytes)))
            return UNKNOWN;
        filled[device] += piece.size_bytes;
    }
    return SUCCESS;
}

enum result custom_make(struct custom_parts *parts) {
    memset(parts, 0, sizeof *parts);
    for (int i = 0; i < sim_device_count; i++) {
        uint64_t size_bytes = memory_device_bytes(&sim_devices[i]);
        if (size_bytes == 0)
            continue;
        files[i] = new_memory_file("gpucr-sim-custom");
        if (files[i] < 0 || ftruncate(files[i], (off_t)size_bytes) < 0) {
            custom_close_files();
            return OUT_OF_MEMORY;
        }
        struct custom_part *part = &parts->list[parts->count++];
        memcpy(part->uuid, sim_devices[i].uuid, UUID_BYTES);
        part->size_bytes = size_bytes;
        part->fd = files[i];
    }
    return SUCCESS;
}

enum result custom_fill(struct custom_parts *parts) {
    enum result result = custom_make(parts);
    if (result == SUCCESS)
        result = copy_all(true);
    if (result != SUCCESS)
        custom_close_files();
    return result;
}

enum result custom_drain(void) {
    return copy_all(false);
}

void custom_close_files(void) {
    for (int i = 0; i < MAX_GPUS; i++) {
        if (files[i] > 0)
            close(files[i]);
        files[i] = 0;
    }
}
