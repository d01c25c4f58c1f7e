#include "carry.h"

#include <sys/mman.h>
#include <unistd.h>

#define FILL_BYTES ((size_t)32 << 20) /* at a time */

static uint32_t away, client = 1; /* only the agent's: no lock needed to read */

bool carry_anything_away(void) {
    return away > 0;
}

static uint32_t code_of(result result) {
    return result == SUCCESS ? DONE : DRIVER_ERROR + (uint32_t)result;
}

static uint64_t first_address(const struct block *block) {
    size_t place = mapping_next(block, 0);
    return place < mappings.count ? ((const struct mapping *)sorted_at(&mappings, place))->start : 0;
}

/* Memory of other processes comes back when its owner exports it again. */
bool carry_may_leave(const struct block *block) {
    return !block->multicast && !block->registered && !block->stays &&
           (block->imported || block->exportable || shared_number(block) >= 0);
}

struct record carry_record(const struct block *block) {
    uint32_t flags = (block->imported ? IMPORTED : 0) | (block->dropped ? AWAY : 0) |
                     (!carry_may_leave(block) && !block->dropped ? CANNOT_LEAVE : 0) | (block->given_out ? SHARED : 0) |
                     (block->multicast ? IS_MULTICAST : 0) | (block->returned ? RETURNED : 0);
    int number = block->imported || block->given_out ? shared_number(block) : -1;
    return (struct record){block->index, block->generation, block->bytes, block->asked.location_type,
                           block->asked.location, flags, block->mappings, first_address(block), number, 0};
}

/* The device whose context handles a block: its own, or one that can access it. */
static int device_of(const struct block *block) {
    if (block->asked.location_type == ON_DEVICE)
        return block->asked.location;
    for (size_t i = mapping_next(block, 0); i < mappings.count; i = mapping_next(block, i + 1)) {
        const struct mapping *mapping = sorted_at(&mappings, i);
        for (unsigned k = 0; k < mapping->access_count; k++)
            if (mapping->access[k].location_type == ON_DEVICE)
                return mapping->access[k].location;
    }
    return 0;
}

static result use_context(const struct block *block) {
    context context = context_of(device_of(block));
    for (int device = 0; context == NULL && device < MAX_DEVICES; device++)
        context = context_of(device);
    return context == NULL ? INVALID_CONTEXT : real.cuCtxSetCurrent(context);
}

uint32_t carry_export(struct block *block, int *descriptor, bool leaves) {
    result result = use_context(block);
    if (result == SUCCESS)
        result = shared_export(block, descriptor);
    if (leaves)
        block->given = result == SUCCESS ? client : 0;
    return code_of(result);
}

void carry_forget_exports(void) {
    client++;
}

static result show(const struct mapping *mapping, handle made) {
    result result = real.cuMemMap(mapping->start, mapping->bytes, mapping->offset, made, 0);
    if (result != SUCCESS || mapping->access_count == 0)
        return result;
    result = real.cuMemSetAccess(mapping->start, mapping->bytes, mapping->access, mapping->access_count);
    if (result != SUCCESS)
        real.cuMemUnmap(mapping->start, mapping->bytes);
    return result;
}

static void hide_before(const struct block *block, size_t end) {
    for (size_t i = mapping_next(block, 0); i < end; i = mapping_next(block, i + 1)) {
        const struct mapping *mapping = sorted_at(&mappings, i);
        real.cuMemUnmap(mapping->start, mapping->bytes);
    }
}

/* At all of its addresses; at none if one fails. */
static result show_everywhere(const struct block *block, handle made) {
    for (size_t i = mapping_next(block, 0); i < mappings.count; i = mapping_next(block, i + 1)) {
        result result = show(sorted_at(&mappings, i), made);
        if (result == SUCCESS)
            continue;
        hide_before(block, i);
        return result;
    }
    return SUCCESS;
}

static result hide_everywhere(const struct block *block) {
    for (size_t i = mapping_next(block, 0); i < mappings.count; i = mapping_next(block, i + 1)) {
        const struct mapping *mapping = sorted_at(&mappings, i);
        result result = real.cuMemUnmap(mapping->start, mapping->bytes);
        if (result == SUCCESS)
            continue;
        for (size_t k = mapping_next(block, 0); k < i; k = mapping_next(block, k + 1)) /* as it was */
            show(sorted_at(&mappings, k), block->real);
        return result;
    }
    return SUCCESS;
}

static result drop(struct block *block) {
    result result = use_context(block);
    if (result == SUCCESS)
        result = hide_everywhere(block);
    if (result != SUCCESS)
        return result;
    result = real.cuMemRelease(block->real);
    if (result != SUCCESS) {
        show_everywhere(block, block->real);
        return result;
    }
    shared_forget(block); /* a descriptor holds the memory as a handle does */
    block->dropped = true;
    away++;
    return SUCCESS;
}

uint32_t carry_drop(enum drops what) {
    for (uint32_t i = 0; i < block_count(); i++) {
        struct block *block = block_at(i);
        bool goes = block->imported ? what != DROP_OWN && carry_may_leave(block)
                                    : what != DROP_IMPORTED && block->given == client;
        result result = block->live && goes && !block->dropped ? drop(block) : SUCCESS;
        if (result != SUCCESS)
            return code_of(result);
    }
    return DONE;
}

/* The block becomes `made`. */
static uint32_t bring_back(struct block *block, handle made, bool exportable) {
    result result = show_everywhere(block, made);
    if (result != SUCCESS) {
        real.cuMemRelease(made);
        return code_of(result);
    }
    block->real = made;
    block->exportable = exportable;
    block->given = 0;
    block->dropped = false;
    away--;
    return DONE;
}

/* Shows memory at an address of our own, for the time of a copy. */
static result show_here(address start, size_t bytes, handle shown, int device) {
    const struct access access = {ON_DEVICE, device, READ_WRITE};
    result result = real.cuMemMap(start, bytes, 0, shown, 0);
    if (result != SUCCESS)
        return result;
    result = real.cuMemSetAccess(start, bytes, &access, 1);
    if (result != SUCCESS)
        real.cuMemUnmap(start, bytes);
    return result;
}

static result copy(handle to, handle from, size_t bytes, int device) {
    const handle ends[] = {to, from};
    address start;
    int mapped = 0;
    result result = real.cuMemAddressReserve(&start, 2 * bytes, 0, 0, 0);
    if (result != SUCCESS)
        return result;
    while (mapped < 2 && (result = show_here(start + mapped * bytes, bytes, ends[mapped], device)) == SUCCESS)
        mapped++;
    if (result == SUCCESS)
        result = real.cuMemcpyDtoD_v2(start, start + bytes, bytes);
    if (result == SUCCESS)
        result = real.cuCtxSynchronize();
    while (mapped-- > 0)
        real.cuMemUnmap(start + mapped * bytes, bytes);
    real.cuMemAddressFree(start, 2 * bytes);
    return result;
}

/* Other memory with the bytes of what was imported; the same again if there is no room, which says `exportable`. */
static handle renewed(const struct block *block, handle imported, bool *exportable) {
    handle made;
    if (create_exportable(&made, block->bytes, &block->asked, exportable) != SUCCESS) {
        *exportable = false;
        return imported;
    }
    if (copy(made, imported, block->bytes, device_of(block)) != SUCCESS) {
        *exportable = false;
        real.cuMemRelease(made);
        return imported;
    }
    real.cuMemRelease(imported);
    return made;
}

/* The block keeps the descriptor; without a free number for it, only other memory can leave again. */
uint32_t carry_import(struct block *block, int descriptor, bool renew) {
    bool exportable = false;
    handle made;
    if (!block->dropped)
        return NOT_AWAY;
    result result = use_context(block);
    if (result == SUCCESS)
        result = real.cuMemImportFromShareableHandle(&made, (void *)(intptr_t)descriptor, POSIX_DESCRIPTOR);
    if (result != SUCCESS)
        return code_of(result);
    shared_keep(block, descriptor);
    if (!block->imported && (renew || shared_number(block) < 0))
        made = renewed(block, made, &exportable);
    if (exportable)
        shared_forget(block);
    uint32_t code = bring_back(block, made, exportable);
    if (code != DONE)
        shared_forget(block);
    else
        block->returned = !block->imported && !exportable;
    return code;
}

uint32_t carry_create(struct block *block, int *descriptor) {
    bool exportable;
    handle made;
    if (!block->dropped || block->imported)
        return NOT_AWAY;
    result result = use_context(block);
    if (result == SUCCESS)
        result = create_exportable(&made, block->bytes, &block->asked, &exportable);
    if (result != SUCCESS)
        return code_of(result);
    result = real.cuMemExportToShareableHandle(descriptor, made, POSIX_DESCRIPTOR, 0);
    if (result != SUCCESS) {
        real.cuMemRelease(made);
        return code_of(result);
    }
    uint32_t code = bring_back(block, made, exportable);
    if (code == DONE)
        block->returned = false;
    if (code == DONE && block->given_out)
        shared_keep(block, *descriptor);
    return code;
}

static uint32_t fill(address start, size_t bytes, int file, uint64_t offset, char *buffer) {
    for (size_t done = 0; done < bytes;) {
        size_t size = bytes - done < FILL_BYTES ? bytes - done : FILL_BYTES;
        ssize_t got = pread(file, buffer, size, (off_t)(offset + done));
        if (got <= 0)
            return NOT_HERE;
        result result = real.cuMemcpyHtoD_v2(start + done, buffer, (size_t)got);
        if (result != SUCCESS)
            return code_of(result);
        done += (size_t)got;
    }
    return code_of(real.cuCtxSynchronize());
}

/* By the process's own context: gpucr's has no room on a full GPU. Slower, since the buffer is not pinned. */
uint32_t carry_fill(struct block *block, int file, uint64_t offset) {
    address start;
    if (block->dropped || block->imported || file < 0)
        return MEMORY_IS_AWAY;
    /* Not malloc: a thread that is stopped may hold its lock. */
    char *buffer = mmap(NULL, FILL_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffer == MAP_FAILED)
        return NO_MEMORY;
    result result = use_context(block);
    if (result == SUCCESS)
        result = real.cuMemAddressReserve(&start, block->bytes, 0, 0, 0);
    uint32_t code = code_of(result);
    if (result == SUCCESS) {
        code = code_of(show_here(start, block->bytes, block->real, device_of(block)));
        if (code == DONE) {
            code = fill(start, block->bytes, file, offset, buffer);
            real.cuMemUnmap(start, block->bytes);
        }
        real.cuMemAddressFree(start, block->bytes);
    }
    munmap(buffer, FILL_BYTES);
    return code;
}
