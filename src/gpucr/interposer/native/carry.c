#include "carry.h"

static uint32_t away, client = 1; /* only the agent's: no lock needed to read */

bool carry_anything_away(void) {
    return away > 0;
}

static uint32_t code_of(result result) {
    return result == SUCCESS ? DONE : DRIVER_ERROR + (uint32_t)result;
}

static uint64_t first_address(const struct block *block) {
    for (size_t i = 0; i < mappings.count; i++) {
        const struct mapping *mapping = sorted_at(&mappings, i);
        if (mapping->block == block->index)
            return mapping->start;
    }
    return 0;
}

/* Imported memory comes back when its owner exports it again. */
bool carry_may_leave(const struct block *block) {
    return !block->multicast && !block->registered && (block->imported || block->exportable);
}

struct record carry_record(const struct block *block) {
    uint32_t flags = (block->imported ? IMPORTED : 0) | (block->dropped ? AWAY : 0) |
                     (!carry_may_leave(block) && !block->dropped ? CANNOT_LEAVE : 0) | (block->given_out ? SHARED : 0) |
                     (block->multicast ? IS_MULTICAST : 0);
    return (struct record){block->index, block->generation, block->bytes, block->asked.location_type,
                           block->asked.location, flags, block->mappings, first_address(block), shared_number(block), 0};
}

/* The device whose context handles a block: its own, or one that can access it. */
static int device_of(const struct block *block) {
    if (block->asked.location_type == ON_DEVICE)
        return block->asked.location;
    for (size_t i = 0; i < mappings.count; i++) {
        const struct mapping *mapping = sorted_at(&mappings, i);
        for (unsigned k = 0; mapping->block == block->index && k < mapping->access_count; k++)
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

uint32_t carry_export(struct block *block, int *descriptor) {
    result result = use_context(block);
    if (result == SUCCESS)
        result = shared_export(block, descriptor);
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
    for (size_t i = 0; i < end; i++) {
        const struct mapping *mapping = sorted_at(&mappings, i);
        if (mapping->block == block->index)
            real.cuMemUnmap(mapping->start, mapping->bytes);
    }
}

/* At all of its addresses; at none if one fails. */
static result show_everywhere(const struct block *block, handle made) {
    for (size_t i = 0; i < mappings.count; i++) {
        const struct mapping *mapping = sorted_at(&mappings, i);
        result result = mapping->block == block->index ? show(mapping, made) : SUCCESS;
        if (result == SUCCESS)
            continue;
        hide_before(block, i);
        return result;
    }
    return SUCCESS;
}

static result hide_everywhere(const struct block *block) {
    for (size_t i = 0; i < mappings.count; i++) {
        const struct mapping *mapping = sorted_at(&mappings, i);
        result result = mapping->block == block->index ? real.cuMemUnmap(mapping->start, mapping->bytes) : SUCCESS;
        if (result == SUCCESS)
            continue;
        for (size_t k = 0; k < i; k++) { /* as it was */
            const struct mapping *hidden = sorted_at(&mappings, k);
            if (hidden->block == block->index)
                show(hidden, block->real);
        }
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

static result copy(handle to, handle from, size_t bytes, int device) {
    const struct access access = {ON_DEVICE, device, READ_WRITE};
    const handle ends[] = {to, from};
    address start;
    int mapped = 0;
    result result = real.cuMemAddressReserve(&start, 2 * bytes, 0, 0, 0);
    if (result != SUCCESS)
        return result;
    while (mapped < 2 && (result = real.cuMemMap(start + mapped * bytes, bytes, 0, ends[mapped], 0)) == SUCCESS) {
        mapped++;
        result = real.cuMemSetAccess(start + (mapped - 1) * bytes, bytes, &access, 1);
        if (result != SUCCESS)
            break;
    }
    if (result == SUCCESS)
        result = real.cuMemcpyDtoD_v2(start, start + bytes, bytes);
    if (result == SUCCESS)
        result = real.cuCtxSynchronize();
    while (mapped-- > 0)
        real.cuMemUnmap(start + mapped * bytes, bytes);
    real.cuMemAddressFree(start, 2 * bytes);
    return result;
}

/*
 * Imported memory cannot be exported again (result 1), so it is copied into the process's own memory. If there is no
 * room for that, the imported memory stays in use: the block cannot leave a second time, and is marked so.
 */
static handle renewed(const struct block *block, handle imported, bool *exportable) {
    handle made;
    *exportable = false;
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
    if (renew && !block->imported)
        made = renewed(block, made, &exportable);
    uint32_t code = bring_back(block, made, exportable);
    if (code == DONE && !exportable && (block->imported || block->given_out))
        shared_keep(block, descriptor);
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
    if (code == DONE && block->given_out)
        shared_keep(block, *descriptor);
    return code;
}
