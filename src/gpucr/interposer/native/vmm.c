/* The VMM calls of the program. Its handles are virtual: the driver's change when memory has been away. */
#include "replaced.h"

/* With a descriptor type added, so that the memory can leave; as asked where the driver refuses that. */
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

result replaced_cuMemExportToShareableHandle(void *shareable, handle virtual, int type, unsigned long long flags) {
    table_lock();
    const struct block *block = block_of(virtual);
    result result = real.cuMemExportToShareableHandle(shareable, block != NULL ? block->real : virtual, type, flags);
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
    table_unlock();
    return result;
}

/* Memory of cuMemAlloc has no handle, as with the driver. */
result replaced_cuMemRetainAllocationHandle(handle *virtual, void *pointer) {
    const struct range *range;
    table_lock();
    struct mapping *mapping = mapping_of((address)(uintptr_t)pointer);
    result result = INVALID_VALUE;
    if (virtual == NULL || mapping == NULL) {
        result = real.cuMemRetainAllocationHandle(virtual, pointer);
    } else if ((range = range_of(mapping->start)) == NULL || range->kind != OWN) {
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

result replaced_cuMulticastBindMem(handle multicast, size_t multicast_offset, handle virtual, size_t offset,
                                   size_t bytes, unsigned long long flags) {
    table_lock();
    const struct block *block = block_of(virtual);
    result result = real.cuMulticastBindMem(multicast, multicast_offset, block != NULL ? block->real : virtual, offset,
                                            bytes, flags);
    table_unlock();
    return result;
}
