/*
 * Exported memory: a file in the state folder whose bytes are the memory. It counts as used for as long as anybody has a
 * descriptor of it, in whichever process, as the driver's does (measured, 580): the one open file description that all
 * of them share holds a lock, which ends with the last of them.
 *
 * While the process that made the memory still has it, it counts there; afterwards for no process (also measured).
 */
#include "kernel.h"
#include "machine.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define SUFFIX ".memory"
#define LOOK_AFTER 1000 /* names alone were read: then for files that nobody has any more */

static bool read_trailer(int fd, struct exported *trailer) {
    struct stat status;
    return fstat(fd, &status) == 0 && status.st_size > (off_t)sizeof *trailer &&
           pread(fd, trailer, sizeof *trailer, status.st_size - (off_t)sizeof *trailer) == (ssize_t)sizeof *trailer &&
           trailer->magic == EXPORTED_MAGIC && trailer->size_bytes == (uint64_t)status.st_size - sizeof *trailer;
}

static uint32_t gpu_number(const uint8_t gpu[UUID_BYTES]) {
    uint32_t number;
    memcpy(&number, gpu, sizeof number);
    return number;
}

/* The name tells the GPU and the size, so that most callers need not open it; and like that of a device file, it tells
 * that the driver takes the file away from a process. */
static int create_file(int folder, const struct exported *content) {
    char name[96];
    uint64_t number = 0;
    for (int attempt = 0; attempt < 100; attempt++) {
        if (!fill_randomly(&number, sizeof number))
            return -1;
        snprintf(name, sizeof name, "nvidia-%016llx-%08x-%llu" SUFFIX, (unsigned long long)number, gpu_number(content->gpu),
                 (unsigned long long)content->size_bytes);
        int fd = openat(folder, name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (fd >= 0 || errno != EEXIST)
            return fd;
    }
    return -1;
}

int exported_create(const struct machine *machine, const struct exported *content) {
    struct exported trailer = *content;
    int folder = ledger_open(machine, true); /* nobody removes it before it has its lock */
    if (folder < 0)
        return -1;
    trailer.magic = EXPORTED_MAGIC;
    trailer.owner = getpid();
    trailer.owner_namespace = pid_namespace_of(getpid());
    process_start_ms(getpid(), &trailer.owner_start_ms);
    int fd = create_file(folder, &trailer);
    if (fd >= 0 && (pwrite(fd, &trailer, sizeof trailer, (off_t)trailer.size_bytes) != (ssize_t)sizeof trailer ||
                    flock(fd, LOCK_EX | LOCK_NB) < 0)) {
        close(fd);
        fd = -1;
    }
    close(folder);
    return fd;
}

void exported_disown(int fd) {
    struct exported trailer;
    if (!read_trailer(fd, &trailer))
        return;
    trailer.owner = 0;
    if (pwrite(fd, &trailer, sizeof trailer, (off_t)trailer.size_bytes) < 0)
        return; /* it counts for its process until that ends */
}

bool exported_is(int fd, struct exported *content) {
    return read_trailer(fd, content);
}

static bool counts_for_its_owner(const struct exported *trailer) {
    uint64_t start_ms;
    if (trailer->owner == 0)
        return false;
    pid_t pid = trailer->owner_namespace == pid_namespace_of(getpid())
                    ? trailer->owner
                    : pid_from_inner(trailer->owner_namespace, trailer->owner);
    return pid < 0 || (process_start_ms(pid, &start_ms) && same_start(start_ms, trailer->owner_start_ms));
}

static void count_one(const struct machine *machine, int folder, const char *name, bool locked, uint64_t used_bytes[MAX_GPUS]) {
    struct exported trailer;
    int fd = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return;
    bool in_use = flock(fd, LOCK_SH | LOCK_NB) < 0;
    if (!in_use && locked)
        unlinkat(folder, name, 0);
    int index = in_use && read_trailer(fd, &trailer) ? machine_find(machine, trailer.gpu) : -1;
    if (index >= 0 && !counts_for_its_owner(&trailer))
        used_bytes[index] += trailer.size_bytes;
    close(fd);
}

static bool is_exported(const char *name) {
    const char *suffix = strrchr(name, '.');
    return suffix != NULL && strcmp(suffix, SUFFIX) == 0;
}

static DIR *entries_of(int folder) {
    int copy = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return copy < 0 ? NULL : fdopendir(copy);
}

void exported_count(const struct machine *machine, int folder, bool locked, uint64_t used_bytes[MAX_GPUS]) {
    DIR *entries = entries_of(folder);
    if (entries == NULL)
        return;
    for (struct dirent *entry; (entry = readdir(entries)) != NULL;)
        if (is_exported(entry->d_name))
            count_one(machine, folder, entry->d_name, locked, used_bytes);
    closedir(entries);
}

bool exported_fits(const struct machine *machine, int folder, const uint64_t free_bytes[MAX_GPUS]) {
    static unsigned looked;
    uint64_t at_most[MAX_GPUS] = {0};
    unsigned long long number, size;
    unsigned gpu;
    DIR *entries = ++looked % LOOK_AFTER == 0 ? NULL : entries_of(folder);
    if (entries == NULL)
        return false;
    for (struct dirent *entry; (entry = readdir(entries)) != NULL;)
        if (is_exported(entry->d_name) && sscanf(entry->d_name, "nvidia-%llx-%x-%llu", &number, &gpu, &size) == 3)
            for (uint32_t i = 0; i < machine->gpu_count; i++)
                if (gpu_number(machine->gpus[i].uuid) == gpu)
                    at_most[i] += size;
    closedir(entries);
    for (uint32_t i = 0; i < machine->gpu_count; i++)
        if (at_most[i] > free_bytes[i])
            return false;
    return true;
}
