/*
 * The ledger: how much memory each process holds on each GPU. A folder with one small text file per process, named
 * PIDNS-PID.use, changed under a lock on the folder. Exported memory is beside them (exported.c). No descriptor into it stays open: CRIU would have to dump it.
 *
 * Readers take no lock: a program that watches GPUs can be stopped, or dumped, at any instruction, and processes whose
 * device memory comes back meanwhile would wait forever. Entries are created atomically, by renaming.
 */
#include "machine.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define FIRST_PID_NAMESPACE 0xEFFFFFFCu /* PROC_PID_INIT_INO of the kernel: all processes can be seen from it */

static uint64_t own_pid_namespace(void) {
    return pid_namespace_of(getpid());
}

static int open_folder(const struct machine *machine) {
    if (mkdir(machine->state_dir, 0700) < 0 && errno != EEXIST)
        return -errno;
    int folder = open(machine->state_dir, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    return folder < 0 ? -errno : folder;
}

/* The folder, locked until it is closed. */
static int open_locked(const struct machine *machine) {
    int folder = open_folder(machine);
    if (folder < 0)
        return folder;
    while (flock(folder, LOCK_EX) < 0)
        if (errno != EINTR) {
            int error = errno;
            close(folder);
            return -error;
        }
    return folder;
}

int ledger_open(const struct machine *machine, bool locked) {
    return locked ? open_locked(machine) : open_folder(machine);
}

static void entry_name(char *name, size_t size, uint64_t pid_namespace, pid_t pid) {
    snprintf(name, size, "%" PRIu64 "-%d.use", pid_namespace, pid);
}

/* False: the entry's process is gone, or the file is not ours. */
static bool read_entry(const struct machine *machine, int folder, const char *name, struct holding *holding) {
    uint64_t pid_namespace, start, start_now;
    int pid, end = 0;
    if (sscanf(name, "%" SCNu64 "-%d.use%n", &pid_namespace, &pid, &end) != 2 || end == 0 || name[end] != '\0')
        return false;
    int fd = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "r");
    if (file == NULL) {
        if (fd >= 0)
            close(fd);
        return false;
    }
    memset(holding, 0, sizeof *holding);
    holding->pid = pid;
    holding->mine = pid == getpid() && pid_namespace == own_pid_namespace();
    bool good = fscanf(file, "start %" SCNu64 "\n", &start) == 1;
    char digits[2 * UUID_BYTES + 1];
    uint64_t bytes;
    while (good && fscanf(file, "gpu %32s %" SCNu64 "\n", digits, &bytes) == 2) {
        uint8_t uuid[UUID_BYTES] = {0};
        for (int i = 0; i < UUID_BYTES; i++)
            if (sscanf(digits + 2 * i, "%2hhx", &uuid[i]) != 1)
                good = false;
        int index = machine_find(machine, uuid);
        if (index >= 0)
            holding->bytes[index] = bytes;
    }
    fclose(file);
    if (pid_namespace != own_pid_namespace()) {
        /* Like NVML, which reports pids in the caller's namespace. */
        pid = pid_from_inner(pid_namespace, pid);
        holding->pid = pid < 0 ? 0 : pid;
        if (pid < 0) /* invisible from here: it counts until a reader can see that it is gone */
            return good && own_pid_namespace() != FIRST_PID_NAMESPACE;
    }
    return good && process_start_ms(pid, &start_now) && same_start(start_now, start);
}

/* Without a lock, entries of dead processes must stay: they could belong to another process by now. */
static int read_entries(const struct machine *machine, int folder, bool locked, struct holding *holdings, size_t room,
                        size_t *count) {
    int copy = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *entries = copy < 0 ? NULL : fdopendir(copy);
    if (entries == NULL)
        return -errno;
    *count = 0;
    for (struct dirent *entry; (entry = readdir(entries)) != NULL;) {
        struct holding holding;
        const char *suffix = strrchr(entry->d_name, '.');
        if (suffix == NULL || strcmp(suffix, ".use") != 0)
            continue;
        if (read_entry(machine, folder, entry->d_name, &holding)) {
            if (*count < room)
                holdings[(*count)++] = holding;
        } else if (locked) {
            unlinkat(folder, entry->d_name, 0);
        }
    }
    closedir(entries);
    return 0;
}

int ledger_read(const struct machine *machine, struct holding *holdings, size_t room, size_t *count) {
    int folder = open_folder(machine);
    if (folder < 0)
        return folder;
    int result = read_entries(machine, folder, false, holdings, room, count);
    close(folder);
    return result;
}

#define MAX_PROCESSES 1024

static void add_up(const struct holding *holdings, size_t count, bool with_mine, uint64_t used_bytes[MAX_GPUS]) {
    memset(used_bytes, 0, MAX_GPUS * sizeof *used_bytes);
    for (size_t i = 0; i < count; i++)
        for (uint32_t gpu = 0; gpu < MAX_GPUS && (with_mine || !holdings[i].mine); gpu++)
            used_bytes[gpu] += holdings[i].bytes[gpu];
}

int ledger_used(const struct machine *machine, uint64_t used_bytes[MAX_GPUS]) {
    struct holding holdings[MAX_PROCESSES];
    size_t count = 0;
    int folder = open_folder(machine);
    if (folder < 0)
        return folder;
    int result = read_entries(machine, folder, false, holdings, MAX_PROCESSES, &count);
    if (result == 0) {
        add_up(holdings, count, true, used_bytes);
        exported_count(machine, folder, false, used_bytes);
    }
    close(folder);
    return result;
}

static int write_own(const struct machine *machine, int folder, const uint64_t bytes[MAX_GPUS]) {
    char name[64];
    uint64_t start = 0;
    if (!process_start_ms(getpid(), &start))
        return -ESRCH;
    entry_name(name, sizeof name, own_pid_namespace(), getpid());
    int fd = openat(folder, "new", O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "w");
    if (file == NULL)
        return -errno;
    fprintf(file, "start %" PRIu64 "\n", start);
    for (uint32_t gpu = 0; gpu < machine->gpu_count; gpu++) {
        if (bytes[gpu] == 0)
            continue;
        fprintf(file, "gpu ");
        for (int i = 0; i < UUID_BYTES; i++)
            fprintf(file, "%02x", machine->gpus[gpu].uuid[i]);
        fprintf(file, " %" PRIu64 "\n", bytes[gpu]);
    }
    if (fclose(file) != 0 || renameat(folder, "new", folder, name) < 0)
        return -errno;
    return 0;
}

static bool has_room(const struct machine *machine, int folder, const uint64_t wanted_bytes[MAX_GPUS],
                     uint64_t others[MAX_GPUS]) {
    uint64_t free_bytes[MAX_GPUS] = {0};
    for (uint32_t gpu = 0; gpu < machine->gpu_count; gpu++) {
        uint64_t taken = others[gpu] + wanted_bytes[gpu], capacity = machine->gpus[gpu].capacity_bytes;
        if (wanted_bytes[gpu] > 0 && taken > capacity)
            return false;
        free_bytes[gpu] = wanted_bytes[gpu] > 0 ? capacity - taken : UINT64_MAX;
    }
    if (exported_fits(machine, folder, free_bytes))
        return true;
    exported_count(machine, folder, true, others);
    for (uint32_t gpu = 0; gpu < machine->gpu_count; gpu++)
        if (wanted_bytes[gpu] > 0 && others[gpu] + wanted_bytes[gpu] > machine->gpus[gpu].capacity_bytes)
            return false;
    return true;
}

int ledger_claim(const struct machine *machine, const uint64_t wanted_bytes[MAX_GPUS], bool is_less) {
    struct holding holdings[MAX_PROCESSES];
    uint64_t others[MAX_GPUS];
    size_t count = 0;
    int folder = open_locked(machine);
    if (folder < 0)
        return folder;
    int result = 0;
    if (!is_less) {
        result = read_entries(machine, folder, true, holdings, MAX_PROCESSES, &count);
        if (result == 0) {
            add_up(holdings, count, false, others);
            result = has_room(machine, folder, wanted_bytes, others) ? 0 : -ENOMEM;
        }
    }
    if (result == 0)
        result = write_own(machine, folder, wanted_bytes);
    close(folder);
    return result;
}

int ledger_release(const struct machine *machine) {
    char name[64];
    int folder = open_locked(machine);
    if (folder < 0)
        return folder;
    entry_name(name, sizeof name, own_pid_namespace(), getpid());
    int result = unlinkat(folder, name, 0) < 0 && errno != ENOENT ? -errno : 0;
    close(folder);
    return result;
}
