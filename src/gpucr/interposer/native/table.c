/* The tables. Everything here needs the table locked. */
#include "interposer.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define VIRTUAL ((handle)0x6771 << 48) /* no driver gives such a handle: they are small numbers or addresses */

struct sorted mappings = {.width = sizeof(struct mapping)}, ranges = {.width = sizeof(struct range)};
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int cancel_state; /* of the thread that has the table */
static struct block **blocks;
static uint32_t count, room;
static context contexts[MAX_DEVICES];

/* The driver may contain cancellation points; a thread must not end with a half-changed table. */
void table_lock(void) {
    int state;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    pthread_mutex_lock(&mutex);
    cancel_state = state;
}

void table_unlock(void) {
    int state = cancel_state;
    pthread_mutex_unlock(&mutex);
    pthread_setcancelstate(state, NULL);
}

void table_in_child(void) { /* the forking thread had it locked */
    pthread_mutex_init(&mutex, NULL);
    pthread_setcancelstate(cancel_state, NULL);
}

/* --- sorted records ------------------------------------------------------------------------------------------ */

void *sorted_at(const struct sorted *list, size_t place) {
    return list->records + place * list->width;
}

static address start_at(const struct sorted *list, size_t place) {
    return *(address *)sorted_at(list, place);
}

size_t sorted_place(const struct sorted *list, address start) {
    size_t low = 0, high = list->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (start_at(list, middle) < start)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

void *sorted_insert(struct sorted *list, address start) {
    if (list->count == list->room) {
        size_t wanted = list->room == 0 ? 64 : 2 * list->room;
        char *grown = realloc(list->records, wanted * list->width);
        if (grown == NULL)
            return NULL;
        list->records = grown;
        list->room = wanted;
    }
    size_t place = sorted_place(list, start);
    char *record = sorted_at(list, place);
    memmove(record + list->width, record, (list->count - place) * list->width);
    memset(record, 0, list->width);
    *(address *)record = start;
    list->count++;
    return record;
}

void sorted_remove(struct sorted *list, size_t place) {
    char *record = sorted_at(list, place);
    list->count--;
    memmove(record, record + list->width, (list->count - place) * list->width);
}

/* The last record that begins at or before the pointer; NULL: there is none. */
static void *before(const struct sorted *list, address pointer) {
    size_t place = sorted_place(list, pointer);
    if (place < list->count && start_at(list, place) == pointer)
        return sorted_at(list, place);
    return place == 0 ? NULL : sorted_at(list, place - 1);
}

uint64_t range_number(void) {
    static uint64_t last;
    return ++last;
}

struct range *range_of(address pointer) {
    struct range *range = before(&ranges, pointer);
    return range != NULL && pointer - range->start < range->bytes ? range : NULL;
}

struct mapping *mapping_of(address pointer) {
    struct mapping *mapping = before(&mappings, pointer);
    return mapping != NULL && pointer - mapping->start < mapping->bytes ? mapping : NULL;
}

/* --- blocks --------------------------------------------------------------------------------------------------- */

static bool more_blocks(void) {
    if (count < room)
        return true;
    uint32_t wanted = room == 0 ? 64 : 2 * room;
    struct block **grown = realloc(blocks, wanted * sizeof *grown);
    if (grown == NULL)
        return false;
    blocks = grown;
    room = wanted;
    return true;
}

static struct block *free_block(void) {
    for (uint32_t i = 0; i < count; i++)
        if (!blocks[i]->live)
            return blocks[i];
    if (!more_blocks())
        return NULL;
    struct block *made = calloc(1, sizeof *made);
    if (made == NULL)
        return NULL;
    made->index = count;
    blocks[count++] = made;
    return made;
}

struct block *block_new(handle real_handle, size_t bytes, const struct properties *asked) {
    struct block *block = free_block();
    if (block == NULL)
        return NULL;
    *block = (struct block){.real = real_handle, .bytes = bytes, .asked = *asked, .live = true, .references = 1,
                            .descriptor = NOTHING_OWNED, .index = block->index, .generation = (uint16_t)(block->generation + 1)};
    return block;
}

uint32_t block_count(void) {
    return count;
}

struct block *block_at(uint32_t index) {
    return blocks[index];
}

uint32_t block_index(const struct block *block) {
    return block->index;
}

handle block_handle(const struct block *block) {
    return VIRTUAL | (handle)block->generation << 32 | block_index(block);
}

struct block *block_number(uint32_t index, uint16_t generation) {
    return index < count && blocks[index]->live && blocks[index]->generation == generation ? blocks[index] : NULL;
}

struct block *block_of(handle virtual) {
    if (virtual >> 48 != VIRTUAL >> 48)
        return NULL;
    return block_number((uint32_t)virtual, (uint16_t)(virtual >> 32));
}

void block_forget_unused(struct block *block) {
    if (block->references > 0 || block->mappings > 0)
        return;
    if (!block->dropped)
        real.cuMemRelease(block->real);
    shared_forget(block);
    block->live = false;
}

/* --- mappings ------------------------------------------------------------------------------------------------- */

struct mapping *mapping_add(address start, size_t bytes, size_t offset, struct block *block) {
    struct mapping *mapping = sorted_insert(&mappings, start);
    if (mapping == NULL)
        return NULL;
    mapping->bytes = bytes;
    mapping->offset = offset;
    mapping->block = block_index(block);
    block->only = block->mappings == 0 ? start : 0;
    block->mappings++;
    return mapping;
}

size_t mapping_next(const struct block *block, size_t place) {
    if (block->only != 0) {
        size_t found = sorted_place(&mappings, block->only);
        return found >= place ? found : mappings.count;
    }
    while (block->mappings > 0 && place < mappings.count &&
           ((const struct mapping *)sorted_at(&mappings, place))->block != block->index)
        place++;
    return block->mappings > 0 ? place : mappings.count;
}

void mapping_remove(size_t place) {
    struct mapping *mapping = sorted_at(&mappings, place);
    struct block *block = blocks[mapping->block];
    free(mapping->access);
    sorted_remove(&mappings, place);
    block->mappings--;
    block->only = 0;
    block_forget_unused(block);
}

bool mapping_set_access(struct mapping *mapping, const struct access *access, size_t access_count) {
    for (size_t i = 0; i < access_count; i++) {
        unsigned place = 0;
        while (place < mapping->access_count && (mapping->access[place].location != access[i].location ||
                                                 mapping->access[place].location_type != access[i].location_type))
            place++;
        if (place == mapping->access_count) {
            struct access *grown = realloc(mapping->access, (place + 1) * sizeof *grown);
            if (grown == NULL)
                return false;
            mapping->access = grown;
            mapping->access_count++;
        }
        mapping->access[place] = access[i];
    }
    return true;
}

/* --- contexts, for the agent, which has none of its own -------------------------------------------------------- */

void context_note(int device, context context) {
    if (device >= 0 && device < MAX_DEVICES)
        contexts[device] = context;
}

context context_of(int device) {
    return device >= 0 && device < MAX_DEVICES ? contexts[device] : NULL;
}

void context_forget(context context) {
    for (int i = 0; i < MAX_DEVICES; i++)
        if (contexts[i] == context)
            contexts[i] = NULL;
}
