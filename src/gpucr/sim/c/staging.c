/*
 * What the driver does to device memory in a checkpoint and a restore: one anonymous populating mapping as big as
 * all of it, filled and drained in ascending order by the restore thread; every handle to the hardware is closed.
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
static char *staging;
static uint64_t staging_bytes;

/* The same pages as device memory and staging, copied by user code: staging may be filled on demand (userfaultfd). */
static char buffer[1 << 20];

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
 * A descriptor that CRIU refuses, as /dev/nvidia* is refused without a plugin. Seen with CRIU 4.1.1: "Can't dump
 * file N of that type [...] (anon anon_inode:[userfaultfd])". The descriptor is used for nothing else.
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
    if (hardware_fd >= 0)
        close(hardware_fd);
    hardware_fd = -1;
    if (hardware_page != NULL)
        map_hardware(PROT_NONE);
}

static bool copy_piece(const struct piece *piece, char *at, bool to_staging) {
    for (uint64_t done = 0; done < piece->size_bytes;) {
        uint64_t part = piece->size_bytes - done < sizeof buffer ? piece->size_bytes - done : sizeof buffer;
        off_t offset = (off_t)(piece->offset + done);
        if (to_staging) {
            if (pread(piece->fd, buffer, part, offset) != (ssize_t)part)
                return false;
            memcpy(at + done, buffer, part);
        } else {
            memcpy(buffer, at + done, part);
            if (pwrite(piece->fd, buffer, part, offset) != (ssize_t)part)
                return false;
        }
        done += part;
    }
    return true;
}

static bool copy_all(bool to_staging, void (*midway)(const struct fault *), const struct fault *fault) {
    uint32_t device = 0, block = 0;
    uint64_t done = 0;
    bool good = true, told = false;
    struct piece piece;
    while (good && memory_next_piece(&device, &block, &piece)) {
        good = copy_piece(&piece, staging + done, to_staging);
        done += piece.size_bytes;
        if (!told && 2 * done >= staging_bytes) {
            told = true;
            midway(fault);
        }
    }
    if (!told)
        midway(fault); /* a process without device memory */
    return good;
}

enum result staging_fill(void (*midway)(const struct fault *), const struct fault *fault) {
    staging = NULL;
    staging_bytes = memory_total_bytes();
    if (staging_bytes > 0) {
        void *start = mmap(NULL, staging_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        if (start == MAP_FAILED)
            return OUT_OF_MEMORY;
        staging = start;
    }
    if (!copy_all(true, midway, fault)) {
        munmap(staging, staging_bytes);
        return UNKNOWN;
    }
    hardware_close();
    return SUCCESS;
}

enum result staging_drain(void (*midway)(const struct fault *), const struct fault *fault) {
    enum result result = hardware_open();
    if (result != SUCCESS)
        return result;
    if (!memory_open_files() || !copy_all(false, midway, fault)) {
        hardware_close();
        return OUT_OF_MEMORY;
    }
    if (staging != NULL)
        munmap(staging, staging_bytes);
    staging = NULL;
    return SUCCESS;
}
