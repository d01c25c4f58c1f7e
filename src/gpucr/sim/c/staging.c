/*
 * Handles device memory in a checkpoint and a restore like the driver: anonymous populating mappings as big as all of
 * it, filled and drained in ascending order by the restore thread; every handle to the hardware is closed.
 */
#include "sim.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static int hardware_fd = -1;
static char *hardware_page; /* as the driver's mappings of /dev/nvidia*: a `---p` reservation while checkpointed */

/* GPUCR_SIM_STAGING: one mapping, as driver 580 was seen to ask for, also for two GPUs; the others are what if. */
enum { ONE, PER_GPU, LATE };
static const char *const LAYOUTS[] = {"one", "per-gpu", "late", NULL};
static int layout = ONE;

struct mapping {
    char *start; /* NULL: not asked for yet */
    uint64_t size_bytes;
};
static struct mapping mappings[MAX_GPUS]; /* in the order in which they are filled and drained */
static uint32_t mapping_count;

struct position {
    uint32_t mapping;
    uint64_t offset;
};

/* The same pages as device memory and staging, copied by user code: staging may be filled on demand (userfaultfd). */
static char buffer[1 << 20];

bool staging_configure(void) {
    return environment_word("GPUCR_SIM_STAGING", LAYOUTS, &layout);
}

static bool map_hardware(int protection) {
    const size_t size_bytes = 4096;
    int fixed = hardware_page == NULL ? 0 : MAP_FIXED;
    void *page = mmap(hardware_page, size_bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | fixed, -1, 0);
    if (page == MAP_FAILED)
        return false;
    hardware_page = page;
    return true;
}

/*
 * A descriptor that CRIU refuses, as /dev/nvidia* is refused without a plugin. Seen with CRIU 4.1.1: "Can't dump file N
 * of that type [...] (anon anon_inode:[userfaultfd])". The descriptor has no other use.
 */
enum result hardware_open(void) {
    if (hardware_fd >= 0)
        return SUCCESS;
    if (!map_hardware(PROT_READ))
        return OPERATING_SYSTEM;
    hardware_fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);
    if (hardware_fd < 0) {
        fprintf(stderr, "gpucr simulator: userfaultfd: %s (Linux 5.11 or newer, not blocked by seccomp, is needed)\n",
                strerror(errno));
        map_hardware(PROT_NONE);
        return OPERATING_SYSTEM;
    }
    return SUCCESS;
}

void hardware_look(void) {
    (void)*(volatile const char *)hardware_page;
}

void hardware_close(void) {
    memory_close_files();
    views_close_files();
    if (driver_generation() < DRIVER_FUTURE)
        vmm_close_files();
    if (hardware_fd >= 0)
        close(hardware_fd);
    hardware_fd = -1;
    if (hardware_page != NULL)
        map_hardware(PROT_NONE);
}

static void plan_mapping(uint64_t size_bytes) {
    if (size_bytes > 0)
        mappings[mapping_count++] = (struct mapping){NULL, size_bytes};
}

static void plan_mappings(void) {
    uint64_t total_bytes = memory_total_bytes();
    mapping_count = 0;
    if (layout == PER_GPU) {
        for (int i = 0; i < sim_device_count; i++)
            plan_mapping(memory_device_bytes(&sim_devices[i]));
    } else if (layout == LATE) {
        plan_mapping(total_bytes / 2);
        plan_mapping(total_bytes - total_bytes / 2);
    } else {
        plan_mapping(total_bytes);
    }
}

static bool map_staging(struct mapping *mapping) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE;
    void *start = mmap(NULL, mapping->size_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (start == MAP_FAILED)
        return false;
    mapping->start = start;
    return true;
}

static void unmap_staging(void) {
    for (uint32_t i = 0; i < mapping_count; i++)
        if (mappings[i].start != NULL)
            munmap(mappings[i].start, mappings[i].size_bytes);
    mapping_count = 0;
}

/* Copies the next part of a piece, limited by one mapping and the buffer; returns its size, or 0 if it cannot be
   copied. */
static uint64_t copy_part(const struct piece *piece, uint64_t done, const struct mapping *mapping, uint64_t offset,
                          bool to_staging) {
    uint64_t size_bytes = piece->size_bytes - done;
    off_t in_file = (off_t)(piece->offset + done);
    if (size_bytes > mapping->size_bytes - offset)
        size_bytes = mapping->size_bytes - offset;
    if (size_bytes > sizeof buffer)
        size_bytes = sizeof buffer;
    if (to_staging) {
        if (pread(piece->fd, buffer, size_bytes, in_file) != (ssize_t)size_bytes)
            return 0;
        memcpy(mapping->start + offset, buffer, size_bytes);
    } else {
        memcpy(buffer, mapping->start + offset, size_bytes);
        if (pwrite(piece->fd, buffer, size_bytes, in_file) != (ssize_t)size_bytes)
            return 0;
    }
    return size_bytes;
}

static enum result copy_piece(const struct piece *piece, struct position *at, bool to_staging) {
    for (uint64_t done = 0; done < piece->size_bytes;) {
        struct mapping *mapping = &mappings[at->mapping];
        if (at->offset == mapping->size_bytes) {
            *at = (struct position){at->mapping + 1, 0};
            continue;
        }
        if (mapping->start == NULL && !map_staging(mapping))
            return OUT_OF_MEMORY;
        uint64_t copied = copy_part(piece, done, mapping, at->offset, to_staging);
        if (copied == 0)
            return UNKNOWN;
        done += copied;
        at->offset += copied;
    }
    return SUCCESS;
}

static enum result copy_all(bool to_staging, void (*midway)(const struct fault *), const struct fault *fault) {
    uint32_t device = 0, block = 0;
    uint64_t done = 0, total_bytes = memory_total_bytes();
    struct position at = {0, 0};
    enum result result = SUCCESS;
    bool told = false;
    struct piece piece;
    while (result == SUCCESS && memory_next_piece(&device, &block, &piece)) {
        result = copy_piece(&piece, &at, to_staging);
        done += piece.size_bytes;
        if (!told && 2 * done >= total_bytes) {
            told = true;
            midway(fault);
        }
    }
    if (!told)
        midway(fault); /* a process without device memory */
    return result;
}

enum result staging_fill(void (*midway)(const struct fault *), const struct fault *fault) {
    plan_mappings();
    enum result result = SUCCESS;
    for (uint32_t i = 0; layout != LATE && i < mapping_count; i++)
        if (!map_staging(&mappings[i]))
            result = OUT_OF_MEMORY;
    if (result == SUCCESS)
        result = copy_all(true, midway, fault);
    if (result == SUCCESS)
        hardware_close();
    else
        unmap_staging();
    return result;
}

enum result staging_drain(void (*midway)(const struct fault *), const struct fault *fault) {
    enum result result = hardware_open();
    if (result != SUCCESS)
        return result;
    if (!memory_open_files() || copy_all(false, midway, fault) != SUCCESS) {
        hardware_close();
        return OUT_OF_MEMORY;
    }
    unmap_staging();
    return SUCCESS;
}
