/* The program's VMM calls. Its handles are virtual: the driver's change when memory has been away. */
#include "replaced.h"

/* With a descriptor type added, so that the memory can leave; unchanged if the driver refuses that. */
result create_exportable(handle *made, size_t bytes, const struct properties *asked, bool *exportable) {
    struct properties properties = *asked;
    properties.handle_types |= POSIX_DESCRIPTOR;
    result result = real.cuMemCreate(made, bytes, &properties, 0);
    *exportable = result == SUCCESS;
    if (result == SUCCESS || result == OUT_OF_MEMORY || properties.handle_types == asked->handle_types)
        return result;
    return real.cuMemCreate(made, bytes, asked, 0);
}

static result keep(handle *virtual, handle made, size_t bytes, const struct properties *asked, bool exportable,
                   bool imported) {
    struct block *block = block_new(made, bytes, asked);
    if (block == NULL) {
        real.cuMemRelease(made);
        return OUT_OF_MEMORY;
    }
    block->exportable = exportable;
    block->imported = imported;
    *virtual = block_handle(block);
    return SUCCESS;
}

static void note_current_context(void) {
    int device;
    context current = NULL;
    if (real.cuCtxGetDevice(&device) == SUCCESS && real.cuCtxGetCurrent(&current) == SUCCESS)
        context_note(device, current);
}

result replaced_cuMemCreate(handle *virtual, size_t bytes, const struct properties *asked, unsigned long long flags) {
    handle made;
    bool exportable;
    if (virtual == NULL || asked == NULL || flags != 0 || asked->type != PINNED)
        return real.cuMemCreate(virtual, bytes, asked, flags);
    table_lock();
    note_current_context();
    free_what_was_put_off();
    result result = create_exportable(&made, bytes, asked, &exportable);
    if (result == SUCCESS)
        result = keep(virtual, made, bytes, asked, exportable, false);
    table_unlock();
    return result;
}

result replaced_cuMemRelease(handle virtual) {
    table_lock();
    struct block *block = block_of(virtual);
    result result = SUCCESS;
    if (block == NULL) {
        result = real.cuMemRelease(virtual);
    } else if (block->references == 0) {
        result = INVALID_VALUE;
    } else {
        block->references--;
        block_forget_unused(block);
    }
    table_unlock();
    return result;
}

result replaced_cuMemMap(address start, size_t bytes, size_t offset, handle virtual, unsigned long long flags) {
    table_lock();
    struct block *block = block_of(virtual);
    result result = real.cuMemMap(start, bytes, offset, block != NULL ? block->real : virtual, flags);
    if (result == SUCCESS && block != NULL && mapping_add(start, bytes, offset, block) == NULL) {
        real.cuMemUnmap(start, bytes);
        result = OUT_OF_MEMORY;
    }
    table_unlock();
    return result;
}

result replaced_cuMemUnmap(address start, size_t bytes) {
    table_lock();
    result result = real.cuMemUnmap(start, bytes);
    size_t place = sorted_place(&mappings, start);
    while (result == SUCCESS && place < mappings.count) {
        const struct mapping *mapping = sorted_at(&mappings, place);
        if (mapping->start + mapping->bytes > start + bytes)
            break;
        mapping_remove(place);
    }
    table_unlock();
    return result;
}

result replaced_cuMemSetAccess(address start, size_t bytes, const struct access *access, size_t count) {
    table_lock();
    result result = real.cuMemSetAccess(start, bytes, access, count);
    for (size_t place = sorted_place(&mappings, start); result == SUCCESS && place < mappings.count; place++) {
        struct mapping *mapping = sorted_at(&mappings, place);
        if (mapping->start >= start + bytes)
            break;
        if (!mapping_set_access(mapping, access, count))
            result = OUT_OF_MEMORY;
    }
    table_unlock();
    return result;
}

/* Memory without a descriptor (FABRIC) cannot be recreated: such a block stays with the driver. */
static result export_block(void *shareable, struct block *block, int type, unsigned long long flags) {
    if ((block->asked.handle_types & type) == 0)
        return INVALID_VALUE; /* the descriptor type was added here */
    if (block->imported || block->multicast || type != POSIX_DESCRIPTOR || flags != 0 || shareable == NULL) {
        result result = real.cuMemExportToShareableHandle(shareable, block->real, type, flags);
        if (result == SUCCESS)
            block->stays = true;
        return result;
    }
    block->given_out = true;
    return shared_export(block, shareable);
}

result replaced_cuMemExportToShareableHandle(void *shareable, handle virtual, int type, unsigned long long flags) {
    table_lock();
    struct block *block = block_of(virtual);
    result result = block != NULL ? export_block(shareable, block, type, flags)
                                  : real.cuMemExportToShareableHandle(shareable, virtual, type, flags);
    table_unlock();
    return result;
}

result replaced_cuMemImportFromShareableHandle(handle *virtual, void *shareable, int type) {
    struct properties properties = {0};
    handle made;
    if (virtual == NULL)
        return INVALID_VALUE;
    table_lock();
    note_current_context();
    result result = real.cuMemImportFromShareableHandle(&made, shareable, type);
    if (result == SUCCESS && real.cuMemGetAllocationPropertiesFromHandle != NULL)
        real.cuMemGetAllocationPropertiesFromHandle(&properties, made);
    if (result == SUCCESS)
        result = keep(virtual, made, 0, &properties, false, true);
    if (result == SUCCESS && type == POSIX_DESCRIPTOR)
        shared_keep(block_of(*virtual), (int)(intptr_t)shareable);
    table_unlock();
    return result;
}

/* Memory of cuMemAlloc and of legacy IPC has no handle, as with the driver. */
result replaced_cuMemRetainAllocationHandle(handle *virtual, void *pointer) {
    const struct range *range;
    table_lock();
    struct mapping *mapping = mapping_of((address)(uintptr_t)pointer);
    result result = INVALID_VALUE;
    if (virtual == NULL || mapping == NULL) {
        result = real.cuMemRetainAllocationHandle(virtual, pointer);
    } else if ((range = range_of(mapping->start)) == NULL || (range->kind != OWN && range->kind != OPENED)) {
        struct block *block = block_at(mapping->block);
        block->references++;
        *virtual = block_handle(block);
        result = SUCCESS;
    }
    table_unlock();
    return result;
}

result replaced_cuMemGetAllocationPropertiesFromHandle(struct properties *properties, handle virtual) {
    table_lock();
    const struct block *block = block_of(virtual);
    result result = SUCCESS;
    if (block == NULL || properties == NULL)
        result = real.cuMemGetAllocationPropertiesFromHandle(properties, block != NULL ? block->real : virtual);
    else
        *properties = block->asked;
    table_unlock();
    return result;
}

/* --- multicast: passed through; what stands for it has a virtual handle like any other, and cannot leave ------------- */

static struct block *multicast_of(handle virtual) {
    struct block *block = block_of(virtual);
    if (block != NULL)
        block->multicast = true; /* also one that was imported as if it were memory */
    return block;
}

static handle real_of(const struct block *block, handle virtual) {
    return block != NULL ? block->real : virtual;
}

result replaced_cuMulticastCreate(handle *virtual, const void *properties) {
    static const struct properties any = {.handle_types = -1};
    handle made;
    if (virtual == NULL)
        return real.cuMulticastCreate(virtual, properties);
    table_lock();
    result result = real.cuMulticastCreate(&made, properties);
    if (result == SUCCESS)
        result = keep(virtual, made, 0, &any, false, false);
    if (result == SUCCESS)
        multicast_of(*virtual);
    table_unlock();
    return result;
}

result replaced_cuMulticastAddDevice(handle multicast, int device) {
    table_lock();
    result result = real.cuMulticastAddDevice(real_of(multicast_of(multicast), multicast), device);
    table_unlock();
    return result;
}

/* The bound memory stays where it is too. */
result replaced_cuMulticastBindMem(handle multicast, size_t multicast_offset, handle virtual, size_t offset,
                                   size_t bytes, unsigned long long flags) {
    table_lock();
    struct block *block = block_of(virtual);
    result result = real.cuMulticastBindMem(real_of(multicast_of(multicast), multicast), multicast_offset,
                                            real_of(block, virtual), offset, bytes, flags);
    if (result == SUCCESS && block != NULL)
        block->stays = true;
    table_unlock();
    return result;
}

result replaced_cuMulticastBindAddr(handle multicast, size_t multicast_offset, address start, size_t bytes,
                                    unsigned long long flags) {
    table_lock();
    struct mapping *mapping = mapping_of(start);
    result result = real.cuMulticastBindAddr(real_of(multicast_of(multicast), multicast), multicast_offset, start, bytes,
                                             flags);
    if (result == SUCCESS && mapping != NULL)
        block_at(mapping->block)->stays = true;
    table_unlock();
    return result;
}

result replaced_cuMulticastUnbind(handle multicast, int device, size_t offset, size_t bytes) {
    table_lock();
    result result = real.cuMulticastUnbind(real_of(multicast_of(multicast), multicast), device, offset, bytes);
    table_unlock();
    return result;
}

/* --- sparse arrays: their memory cannot be removed while they exist ---------------------------------- */

struct array_part { /* CUarrayMapInfo */
    int resource_type;
    void *resource;
    int subresource_type;
    uint64_t subresource[4];
    int operation, handle_type;
    handle memory;
    unsigned long long offset;
    unsigned device_mask, flags, reserved[2];
};
_Static_assert(sizeof(struct array_part) == 96, "CUarrayMapInfo");

typedef result map_arrays(void *, unsigned, stream);

static result map_array_parts(map_arrays *function, void *list, unsigned count, stream stream) {
    enum { MOST_PARTS = 64 };
    struct array_part parts[MOST_PARTS], *asked = list;
    result result = SUCCESS;
    if (asked == NULL || count == 0)
        return function(list, count, stream);
    table_lock();
    for (unsigned done = 0; result == SUCCESS && done < count;) {
        unsigned part_count = count - done < MOST_PARTS ? count - done : MOST_PARTS;
        for (unsigned i = 0; i < part_count; i++) {
            struct block *block = block_of(asked[done + i].memory);
            parts[i] = asked[done + i];
            parts[i].memory = real_of(block, parts[i].memory);
            if (block != NULL)
                block->stays = true;
        }
        result = function(parts, part_count, stream);
        done += part_count;
    }
    table_unlock();
    return result;
}

result replaced_cuMemMapArrayAsync(void *list, unsigned count, stream stream) {
    return map_array_parts(real.cuMemMapArrayAsync, list, count, stream);
}

result replaced_cuMemMapArrayAsync_ptsz(void *list, unsigned count, stream stream) {
    return map_array_parts(real.cuMemMapArrayAsync_ptsz, list, count, stream);
}
