/*
 * Device memory. Each GPU in use has a memfd that holds the bytes and an unreadable address range of the same
 * layout, so that device pointers stay what they are while the bytes come and go.
 */
#include "kernel.h"
#include "sim.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define GRAIN_BYTES 512u /* like the driver's: staging is not page-aligned in size */

struct block {
    uint64_t offset, size_bytes;
};

struct memory {
    int fd; /* -1 while checkpointed */
    uint64_t base, span_bytes;
    uint64_t allocated_bytes, managed_bytes;
    struct block *blocks; /* by offset */
    uint32_t block_count, block_room;
};

struct managed {
    void *start;
    uint64_t size_bytes;
    struct memory *memory;
    struct managed *next;
};

struct machine sim_machine;
struct device sim_devices[MAX_GPUS];
int sim_device_count;
int sim_visible_count;
static struct managed *managed_list;

static bool open_file(struct memory *memory) {
    char name[64];
    snprintf(name, sizeof name, DEVICE_FILE_NAME, memory->base);
    memory->fd = new_memory_file(name);
    if (memory->fd < 0)
        return false;
    if (ftruncate(memory->fd, (off_t)memory->span_bytes) == 0)
        return true;
    close(memory->fd);
    memory->fd = -1;
    return false;
}

static struct memory *memory_of(struct device *device) {
    if (device->memory != NULL)
        return device->memory;
    struct memory *memory = calloc(1, sizeof *memory);
    if (memory == NULL)
        return NULL;
    memory->span_bytes = 2 * device->capacity_bytes; /* room for fragmentation; it costs nothing */
    void *base = mmap(NULL, memory->span_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    memory->base = (uint64_t)(uintptr_t)base;
    if (base == MAP_FAILED || !open_file(memory)) {
        if (base != MAP_FAILED)
            munmap(base, memory->span_bytes);
        free(memory);
        return NULL;
    }
    device->memory = memory;
    return memory;
}

static enum result claim(const struct machine *machine, const uint32_t *machine_index, bool is_less) {
    uint64_t wanted[MAX_GPUS] = {0};
    for (int i = 0; i < sim_device_count; i++)
        if (sim_devices[i].memory != NULL)
            wanted[machine_index[i]] += sim_devices[i].memory->allocated_bytes + sim_devices[i].memory->managed_bytes;
    int error = ledger_claim(machine, wanted, is_less);
    if (error == 0)
        return SUCCESS;
    if (error == -ENOMEM)
        return OUT_OF_MEMORY;
    fprintf(stderr, "gpucr simulator: device memory cannot be counted in %s: %s\n", machine->state_dir, strerror(-error));
    return OPERATING_SYSTEM;
}

enum result memory_claim(const struct machine *machine, const uint32_t *machine_index) {
    return claim(machine, machine_index, false);
}

static enum result claim_here(bool is_less) {
    uint32_t machine_index[MAX_GPUS];
    for (int i = 0; i < sim_device_count; i++)
        machine_index[i] = sim_devices[i].machine_index;
    return claim(&sim_machine, machine_index, is_less);
}

/* The first gap that is large enough; its place in the list. */
static bool find_gap(const struct memory *memory, uint64_t size_bytes, uint32_t *place, uint64_t *offset) {
    uint64_t end = 0;
    for (uint32_t i = 0; i <= memory->block_count; i++) {
        uint64_t next = i < memory->block_count ? memory->blocks[i].offset : memory->span_bytes;
        if (next - end >= size_bytes) {
            *place = i;
            *offset = end;
            return true;
        }
        if (i < memory->block_count)
            end = next + memory->blocks[i].size_bytes;
    }
    return false;
}

static bool grow_blocks(struct memory *memory) {
    if (memory->block_count < memory->block_room)
        return true;
    uint32_t room = memory->block_room == 0 ? 16 : 2 * memory->block_room;
    struct block *blocks = realloc(memory->blocks, room * sizeof *blocks);
    if (blocks == NULL)
        return false;
    memory->blocks = blocks;
    memory->block_room = room;
    return true;
}

enum result memory_allocate(struct device *device, uint64_t size_bytes, uint64_t *pointer) {
    struct memory *memory = memory_of(device);
    uint32_t place = 0;
    uint64_t offset = 0;
    if (size_bytes == 0)
        return INVALID_VALUE;
    if (memory == NULL || size_bytes > device->capacity_bytes)
        return OUT_OF_MEMORY;
    size_bytes = (size_bytes + GRAIN_BYTES - 1) / GRAIN_BYTES * GRAIN_BYTES;
    if (!find_gap(memory, size_bytes, &place, &offset) || !grow_blocks(memory))
        return OUT_OF_MEMORY;
    memory->allocated_bytes += size_bytes;
    enum result result = claim_here(false);
    if (result != SUCCESS) {
        memory->allocated_bytes -= size_bytes;
        return result;
    }
    memmove(memory->blocks + place + 1, memory->blocks + place, (memory->block_count - place) * sizeof *memory->blocks);
    memory->blocks[place] = (struct block){offset, size_bytes};
    memory->block_count++;
    *pointer = memory->base + offset;
    return SUCCESS;
}

enum result memory_allocate_managed(struct device *device, uint64_t size_bytes, uint64_t *pointer) {
    struct memory *memory = memory_of(device);
    struct managed *managed = malloc(sizeof *managed);
    if (size_bytes == 0 || memory == NULL || managed == NULL) {
        free(managed);
        return size_bytes == 0 ? INVALID_VALUE : OUT_OF_MEMORY;
    }
    void *start = mmap(NULL, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memory->managed_bytes += size_bytes;
    enum result result = start == MAP_FAILED ? OUT_OF_MEMORY : claim_here(false);
    if (result != SUCCESS) {
        memory->managed_bytes -= size_bytes;
        if (start != MAP_FAILED)
            munmap(start, size_bytes);
        free(managed);
        return result;
    }
    *managed = (struct managed){start, size_bytes, memory, managed_list};
    managed_list = managed;
    *pointer = (uint64_t)(uintptr_t)start;
    return SUCCESS;
}

static bool free_managed(uint64_t pointer) {
    for (struct managed **link = &managed_list; *link != NULL; link = &(*link)->next) {
        struct managed *managed = *link;
        if ((uint64_t)(uintptr_t)managed->start != pointer)
            continue;
        *link = managed->next;
        munmap(managed->start, managed->size_bytes);
        managed->memory->managed_bytes -= managed->size_bytes;
        free(managed);
        return true;
    }
    return false;
}

/* The block that holds [pointer, pointer + size); NULL: not device memory. */
static struct block *block_at(uint64_t pointer, uint64_t size_bytes, struct memory **owner) {
    for (int i = 0; i < sim_device_count; i++) {
        struct memory *memory = sim_devices[i].memory;
        if (memory == NULL || pointer < memory->base || pointer - memory->base >= memory->span_bytes)
            continue;
        uint64_t offset = pointer - memory->base;
        for (uint32_t b = 0; b < memory->block_count; b++) {
            struct block *block = &memory->blocks[b];
            if (offset >= block->offset && offset - block->offset < block->size_bytes &&
                size_bytes <= block->size_bytes - (offset - block->offset)) {
                *owner = memory;
                return block;
            }
        }
    }
    return NULL;
}

bool memory_locate(uint64_t pointer, struct location *at, uint64_t *size_bytes) {
    struct memory *memory;
    const struct block *block = block_at(pointer, 1, &memory);
    if (block == NULL)
        return false;
    *at = (struct location){memory->base, block->offset, getpid(), 0};
    *size_bytes = block->size_bytes;
    return true;
}

int memory_file(uint64_t base) {
    for (int i = 0; i < sim_device_count; i++)
        if (sim_devices[i].memory != NULL && sim_devices[i].memory->base == base)
            return sim_devices[i].memory->fd;
    return -1;
}

struct device *memory_device(uint64_t pointer) {
    struct memory *memory;
    if (block_at(pointer, 1, &memory) == NULL)
        return NULL;
    for (int i = 0; i < sim_device_count; i++)
        if (sim_devices[i].memory == memory)
            return &sim_devices[i];
    return NULL;
}

/* The file and the offset in it of [pointer, pointer + size). False: not device memory. */
static bool bytes_at(uint64_t pointer, uint64_t size_bytes, int *fd, uint64_t *offset) {
    struct memory *memory;
    if (block_at(pointer, size_bytes, &memory) == NULL)
        return view_find(pointer, size_bytes, fd, offset);
    *fd = memory->fd;
    *offset = pointer - memory->base;
    return true;
}

static bool is_managed(uint64_t pointer, uint64_t size_bytes) {
    for (struct managed *managed = managed_list; managed != NULL; managed = managed->next) {
        uint64_t start = (uint64_t)(uintptr_t)managed->start;
        if (pointer >= start && pointer - start < managed->size_bytes &&
            size_bytes <= managed->size_bytes - (pointer - start))
            return true;
    }
    return false;
}

enum result memory_free(uint64_t pointer) {
    struct memory *memory;
    struct block *block = block_at(pointer, 1, &memory);
    if (pointer == 0)
        return SUCCESS;
    if (block == NULL || memory->base + block->offset != pointer) {
        if (!free_managed(pointer))
            return INVALID_VALUE;
        return claim_here(true);
    }
    fallocate(memory->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)block->offset, (off_t)block->size_bytes);
    memory->allocated_bytes -= block->size_bytes;
    memmove(block, block + 1, (size_t)(memory->blocks + memory->block_count - (block + 1)) * sizeof *block);
    memory->block_count--;
    return claim_here(true);
}

/* How much of it is in one mapping: neighbouring ones are read as one range. */
static uint64_t in_one_view(uint64_t pointer, uint64_t size_bytes) {
    uint64_t start, whole;
    if (!view_range(pointer, &start, &whole) || size_bytes <= whole - (pointer - start))
        return size_bytes;
    return whole - (pointer - start);
}

enum result memory_read(void *to, uint64_t pointer, uint64_t size_bytes) {
    uint64_t offset, first = in_one_view(pointer, size_bytes);
    int fd;
    if (first < size_bytes) {
        enum result result = memory_read(to, pointer, first);
        return result == SUCCESS ? memory_read((char *)to + first, pointer + first, size_bytes - first) : result;
    }
    if (is_managed(pointer, size_bytes) || host_memory_holds(pointer, size_bytes)) {
        memcpy(to, (const void *)(uintptr_t)pointer, size_bytes);
        return SUCCESS;
    }
    if (!bytes_at(pointer, size_bytes, &fd, &offset))
        return INVALID_VALUE;
    for (uint64_t done = 0; done < size_bytes;) {
        ssize_t got = pread(fd, (char *)to + done, size_bytes - done, (off_t)(offset + done));
        if (got <= 0)
            return INVALID_VALUE; /* the host range is not writable */
        done += (uint64_t)got;
    }
    return SUCCESS;
}

enum result memory_write(uint64_t pointer, const void *from, uint64_t size_bytes) {
    uint64_t offset, first = in_one_view(pointer, size_bytes);
    int fd;
    if (first < size_bytes) {
        enum result result = memory_write(pointer, from, first);
        return result == SUCCESS ? memory_write(pointer + first, (const char *)from + first, size_bytes - first) : result;
    }
    if (is_managed(pointer, size_bytes) || host_memory_holds(pointer, size_bytes)) {
        memcpy((void *)(uintptr_t)pointer, from, size_bytes);
        return SUCCESS;
    }
    if (!bytes_at(pointer, size_bytes, &fd, &offset))
        return INVALID_VALUE;
    for (uint64_t done = 0; done < size_bytes;) {
        ssize_t put = pwrite(fd, (const char *)from + done, size_bytes - done, (off_t)(offset + done));
        if (put <= 0)
            return INVALID_VALUE;
        done += (uint64_t)put;
    }
    return SUCCESS;
}

/* Large copies and fills go through a small buffer. */
static char buffer[1 << 20];

enum result memory_copy(uint64_t to, uint64_t from, uint64_t size_bytes) {
    enum result result = SUCCESS;
    for (uint64_t done = 0; done < size_bytes && result == SUCCESS;) {
        uint64_t part = size_bytes - done < sizeof buffer ? size_bytes - done : sizeof buffer;
        result = memory_read(buffer, from + done, part);
        if (result == SUCCESS)
            result = memory_write(to + done, buffer, part);
        done += part;
    }
    return result;
}

enum result memory_set(uint64_t pointer, uint8_t value, uint64_t size_bytes) {
    enum result result = SUCCESS;
    memset(buffer, value, sizeof buffer);
    for (uint64_t done = 0; done < size_bytes && result == SUCCESS;) {
        uint64_t part = size_bytes - done < sizeof buffer ? size_bytes - done : sizeof buffer;
        result = memory_write(pointer + done, buffer, part);
        done += part;
    }
    return result;
}

enum result memory_info(const struct device *device, uint64_t *free_bytes, uint64_t *total_bytes) {
    uint64_t used[MAX_GPUS];
    if (ledger_used(&sim_machine, used) != 0)
        return OPERATING_SYSTEM;
    *total_bytes = device->capacity_bytes;
    *free_bytes = device->capacity_bytes - used[device->machine_index];
    return SUCCESS;
}

bool memory_has_managed(void) {
    return managed_list != NULL;
}

uint64_t memory_device_bytes(const struct device *device) {
    return device->memory == NULL ? 0 : device->memory->allocated_bytes;
}

uint64_t memory_total_bytes(void) {
    uint64_t total = 0;
    for (int i = 0; i < sim_device_count; i++)
        total += memory_device_bytes(&sim_devices[i]);
    return total;
}

bool memory_next_piece(uint32_t *device, uint32_t *block, struct piece *piece) {
    for (; *device < (uint32_t)sim_device_count; (*device)++, *block = 0) {
        const struct memory *memory = sim_devices[*device].memory;
        if (memory != NULL && *block < memory->block_count) {
            const struct block *found = &memory->blocks[(*block)++];
            *piece = (struct piece){memory->fd, found->offset, found->size_bytes};
            return true;
        }
    }
    return false;
}

bool memory_open_files(void) {
    for (int i = 0; i < sim_device_count; i++)
        if (sim_devices[i].memory != NULL && !open_file(sim_devices[i].memory)) {
            memory_close_files();
            return false;
        }
    return true;
}

void memory_close_files(void) {
    for (int i = 0; i < sim_device_count; i++) {
        struct memory *memory = sim_devices[i].memory;
        if (memory != NULL && memory->fd >= 0) {
            close(memory->fd);
            memory->fd = -1;
        }
    }
}
