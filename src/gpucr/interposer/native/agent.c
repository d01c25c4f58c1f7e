#include "agent.h"
#include "carry.h"

#include <fcntl.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LONGEST_CLOSE_MS 60000

struct packet asked, answer;
static struct uuid devices[MAX_DEVICES];
static unsigned device_count;

static void count_ranges(struct status *status) {
    for (size_t i = 0; i < ranges.count; i++) {
        const struct range *range = sorted_at(&ranges, i);
        if (range->kind == SMALL) {
            status->small++;
            status->small_bytes += range->bytes;
            status->dma_buf += range->registered;
        } else if (range->kind == MANAGED) {
            status->managed++;
            status->managed_bytes += range->bytes;
        }
    }
}

static void count_blocks(struct status *status) {
    for (uint32_t i = 0; i < block_count(); i++) {
        const struct block *block = block_at(i);
        if (!block->live)
            continue;
        status->away += block->dropped;
        status->multicast += block->multicast;
        status->dma_buf += block->registered;
        bool foreign = !block->dropped && (block->imported || block->returned);
        status->foreign += foreign;
        status->captive += foreign && !carry_may_leave(block);
        if (block->multicast) {
            continue;
        } else if (block->imported) {
            status->imported++;
        } else if (carry_may_leave(block) || block->dropped) {
            status->blocks++;
            status->block_bytes += block->bytes;
        } else {
            status->stuck++;
            status->stuck_bytes += block->bytes;
        }
    }
}

static struct status status_now(void) {
    struct status status = {.gate_closed = gate_is_closed(), .inside = gate_inside(), .captures = captures_open()};
    uint64_t *counted = &status.arrays;
    count_ranges(&status);
    count_blocks(&status);
    for (int i = 0; i < COUNTERS; i++)
        counted[i] = (uint64_t)atomic_load(&counters[i]);
    status.traceable = tracer_is_open();
    status.hooks = hooks_registered();
    return status;
}

/* In a call of cuInit's, and kept: later the driver may be away, or the process on other GPUs. */
void agent_see_devices(void) {
    device_count = 0;
    while (real.cuDeviceGetUuid != NULL && device_count < MAX_DEVICES
           && real.cuDeviceGetUuid(&devices[device_count], (int)device_count) == SUCCESS)
        device_count++;
}

static uint32_t do_close(void) {
    uint64_t wait_ms = asked.head.a < LONGEST_CLOSE_MS ? asked.head.a : LONGEST_CLOSE_MS;
    gate_close();
    gate_wait_empty((unsigned)wait_ms);
    answer.head.a = gate_inside();
    answer.head.b = captures_open();
    return DONE;
}

static uint32_t do_hooks(void) {
    if (gate_is_closed())
        return GATE_IS_CLOSED; /* they may call CUDA */
    return hooks_call(asked.head.a, asked.head.b, &answer.head.a, &answer.head.b);
}

/* Kept data is needed for memory that is away, not filled yet, or not yet visible to peers. */
static bool is_whole(void) {
    return !carry_anything_away() && !kept_anything();
}

void agent_open_if_whole(void) {
    if (!is_whole())
        return;
    carry_forget_exports();
    gate_open();
}

static void add(const struct block *block) {
    answer.records[answer.head.count++] = carry_record(block);
}

/* Peers keep their memory even if it cannot leave: then through the kept descriptor. */
static bool goes_out(const struct block *block, bool to_peers) {
    if (!block->live || block->imported || block->dropped)
        return false;
    return to_peers ? block->given_out && (carry_may_leave(block) || shared_number(block) >= 0) : carry_may_leave(block);
}

/* As many as a message holds, or as there are descriptors for. */
static uint32_t do_export(void) {
    uint64_t index = asked.head.a;
    uint32_t code = DONE;
    for (; index < block_count() && answer.head.count < MOST_RECORDS; index++) {
        struct block *block = block_at((uint32_t)index);
        if (!goes_out(block, asked.head.b == 1))
            continue;
        int made;
        code = carry_export(block, &made, asked.head.operation == EXPORT);
        if (code != DONE)
            break;
        packet_add(&answer, made);
        add(block);
    }
    answer.head.a = index;
    answer.head.b = index >= block_count();
    return answer.head.count > 0 ? DONE : code; /* retried with the next batch */
}

static uint32_t do_list(void) {
    uint64_t index = asked.head.a;
    for (; index < block_count() && answer.head.count < MOST_RECORDS; index++) {
        const struct block *block = block_at((uint32_t)index);
        if (block->live)
            add(block);
    }
    answer.head.a = index;
    answer.head.b = index >= block_count();
    return DONE;
}

static uint32_t bring_back(const struct record *record, unsigned place) {
    struct block *block = block_number(record->block, (uint16_t)record->generation);
    if (block == NULL)
        return UNKNOWN_BLOCK;
    uint32_t code;
    int made;
    if (asked.head.operation == IMPORT) {
        struct owned *given = &asked.descriptors[place];
        code = descriptor_is_ours(given) ? carry_import(block, given->number, asked.head.a == 1) : CLOSED_BY_PROGRAM;
        descriptor_close(given); /* at once: the memory behind it may be needed for the next one */
    } else {
        code = carry_create(block, &made);
        if (code == DONE)
            packet_add(&answer, made);
    }
    if (code == DONE)
        add(block);
    return code;
}

/* In the order of the records, up to the first failure: the answer lists those that are back. */
static uint32_t do_bring_back(void) {
    uint32_t code = DONE;
    if (asked.head.operation == IMPORT && asked.descriptor_count != asked.head.count)
        return NO_DESCRIPTORS;
    shared_begin();
    for (unsigned i = 0; i < asked.head.count && code == DONE; i++)
        code = bring_back(&asked.records[i], i);
    shared_end();
    if (asked.head.operation == CREATE && answer.head.count > 0)
        return DONE; /* the client repeats the rest: descriptors may have run out */
    return code;
}

static uint32_t do_fill(void) {
    uint64_t offset = asked.head.a;
    uint32_t code = DONE;
    for (unsigned i = 0; i < asked.head.count && code == DONE; i++) {
        struct block *block = block_number(asked.records[i].block, (uint16_t)asked.records[i].generation);
        code = block != NULL ? carry_fill(block, kept_number(KEPT_MEMORY), offset) : UNKNOWN_BLOCK;
        offset += block != NULL ? block->bytes : 0;
    }
    return code;
}

/* A capture must be left alone; the client asks again. */
static uint32_t do_show(void) {
    return captures_open() == 0 ? do_export() : SOMEBODY_INSIDE;
}

static uint32_t do_lend(void) {
    if (asked.descriptor_count > 1)
        return MALFORMED;
    return room_lend(asked.descriptor_count == 1 ? asked.descriptors[0].number : -1);
}

static uint32_t on_memory(void) {
    if (!gate_is_closed())
        return GATE_NOT_CLOSED;
    if (!gate_wait_empty(0))
        return SOMEBODY_INSIDE;
    if (asked.head.operation == EXPORT)
        return do_export();
    if (asked.head.operation == FILL)
        return do_fill();
    if (asked.head.operation != DROP)
        return do_bring_back();
    return asked.head.a <= DROP_IMPORTED ? carry_drop((enum drops)asked.head.a) : MALFORMED;
}

/* For a peer that opens this process's memory by legacy IPC. */
static uint32_t do_share(void) {
    address start = asked.head.a;
    const struct range *range = ipc_range(start, asked.head.b);
    if (range == NULL)
        return UNKNOWN_BLOCK;
    address end = range->start + range->reserved;
    while (start < end && answer.head.count < MOST_RECORDS) {
        const struct mapping *mapping = mapping_of(start);
        struct block *block = mapping != NULL && mapping->start == start ? block_at(mapping->block) : NULL;
        if (block == NULL || !block->given_out)
            return UNKNOWN_BLOCK;
        if (block->dropped)
            return MEMORY_IS_AWAY;
        int copy = fcntl(shared_number(block), F_DUPFD_CLOEXEC, 3);
        if (copy < 0)
            return answer.head.count > 0 ? DONE : NO_DESCRIPTORS; /* the client repeats the rest */
        packet_add(&answer, copy);
        add(block);
        start += mapping->bytes;
    }
    answer.head.a = start;
    answer.head.b = start >= end;
    return DONE;
}

static uint32_t answer_hello(void) {
    answer.head.a = (uint64_t)getpid();
    answer.head.b = (uint64_t)syscall(SYS_gettid);
    return DONE;
}

static uint32_t on_memory_locked(void) {
    table_lock();
    uint32_t code = asked.head.operation == LIST    ? do_list()
                    : asked.head.operation == SHARE ? do_share()
                    : asked.head.operation == SHOW  ? do_show()
                                                    : on_memory();
    table_unlock();
    return code;
}

bool agent_takes_long(void) {
    return asked.head.operation == CLOSE || asked.head.operation == HOOKS;
}

bool agent_only_looks(void) {
    return asked.head.operation == STATUS || asked.head.operation == LIST || asked.head.operation == SHARE
           || asked.head.operation == DEVICES;
}

bool agent_takes_hold(void) {
    switch (asked.head.operation) {
    case CLOSE:
    case EXPORT:
    case DROP:
    case IMPORT:
    case CREATE:
    case FILL:
    case KEEP:
    case FETCH:
    case SHOW:
    case LEND:
        return true;
    default:
        return false;
    }
}

uint32_t agent_perform(void) {
    switch (asked.head.operation) {
    case HELLO:
        return answer_hello();
    case STATUS:
        return DONE;
    case DEVICES:
        answer.head.a = device_count;
        return DONE;
    case OPEN: /* opened after the answer: the program may exit at once, and the agent with it */
        return is_whole() ? DONE : MEMORY_IS_AWAY;
    case EXPORT:
    case DROP:
    case IMPORT:
    case CREATE:
    case FILL:
    case LIST:
    case SHARE:
    case SHOW:
        return on_memory_locked();
    case LEND:
        return do_lend();
    case KEEP:
        return kept_take(&asked);
    case FETCH:
        return kept_give(asked.head.a, &answer);
    case TRACE:
        return tracer_open(asked.head.a == 1);
    case CLOSE:
        return do_close();
    case HOOKS:
        return do_hooks();
    default:
        return MALFORMED;
    }
}

static struct inside who_is_inside(void) {
    struct inside who = {0};
    const char *function = "";
    who.thread = gate_who(&function);
    strncpy(who.function, function, sizeof who.function - 1);
    return who;
}

bool agent_reply(const struct owned *connection) {
    struct status status;
    struct inside inside;
    const void *payload = answer.records;
    unsigned bytes = answer.head.count * (unsigned)sizeof(struct record);
    if (asked.head.operation == STATUS && answer.head.code == DONE) {
        table_lock();
        status = status_now();
        table_unlock();
        payload = &status;
        bytes = sizeof status;
    } else if (asked.head.operation == DEVICES && answer.head.code == DONE) {
        payload = devices;
        bytes = (unsigned)(device_count * sizeof *devices);
    } else if (asked.head.operation == CLOSE && answer.head.code == DONE && answer.head.a != 0) {
        inside = who_is_inside();
        payload = &inside;
        bytes = sizeof inside;
    }
    return socket_send(connection, &answer, payload, bytes);
}
