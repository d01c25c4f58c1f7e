/*
 * Legacy CUDA IPC (cuIpcGet/Open/CloseMemHandle) for memory that the interposer backs, for which the driver makes no
 * handles: a handle names a range of a process, and a process that opens it asks the owner's agent for descriptors of
 * the blocks. From then on they are ordinary imported blocks.
 *
 * The driver's own handles (small allocations, programs without the interposer) are passed through, and what they open
 * is counted: while it is open the process does not survive the driver's checkpoint.
 */
#include "place.h"
#include "replaced.h"
#include "socket.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAGIC 0x6370692d72637067u
#define ANSWER_MS 30000
#define FOUND_MS 5000
#define AGAIN_MS 5

struct named_range { /* what is in the handle's 64 bytes */
    uint64_t magic, token, start, bytes, reserved;
    int32_t process, unused;
};
_Static_assert(sizeof(struct named_range) <= sizeof(struct ipc_handle), "CUipcMemHandle");

static _Atomic uint64_t token;

/* Distinguishes this process from an earlier one with the same pid. */
uint64_t ipc_token(void) {
    uint64_t made = 0, none = 0;
    if (atomic_load(&token) == 0) {
        if (syscall(SYS_getrandom, &made, sizeof made, 0) != sizeof made || made == 0)
            made = now_ns();
        atomic_compare_exchange_strong(&token, &none, made);
    }
    return atomic_load(&token);
}

void ipc_in_child(void) {
    atomic_store(&token, 0);
}

static struct range *own_range(address pointer) {
    struct range *range = range_of(pointer);
    return range != NULL && range->kind == OWN && !range->freed ? range : NULL;
}

/* A handle's token is the process's plus the range's number, so a later allocation at the same address differs. */
struct range *ipc_range(address start, uint64_t asked) {
    struct range *range = own_range(start);
    return range != NULL && ipc_token() + range->number == asked ? range : NULL;
}

/* --- the exporter ------------------------------------------------------------------------------------------------------ */

static result give_out(const struct range *range) {
    for (size_t place = sorted_place(&mappings, range->start); place < mappings.count; place++) {
        const struct mapping *mapping = sorted_at(&mappings, place);
        if (mapping->start >= range->start + range->reserved)
            break;
        struct block *block = block_at(mapping->block);
        int descriptor;
        block->given_out = true;
        result result = shared_export(block, &descriptor);
        if (result != SUCCESS)
            return result;
        close(descriptor);
        if (shared_number(block) < 0)
            return OPERATING_SYSTEM; /* no descriptor is free, so the agent could not send any */
    }
    return SUCCESS;
}

result replaced_cuIpcGetMemHandle(struct ipc_handle *handle, address pointer) {
    agent_be_found();
    table_lock();
    const struct range *range = own_range(pointer);
    result result = handle == NULL || range == NULL ? real.cuIpcGetMemHandle(handle, pointer) : give_out(range);
    if (result == SUCCESS && range != NULL) {
        const struct named_range named = {.magic = MAGIC, .token = ipc_token() + range->number, .start = range->start,
                                          .bytes = range->bytes, .reserved = range->reserved, .process = getpid()};
        memset(handle, 0, sizeof *handle);
        memcpy(handle, &named, sizeof named);
    }
    table_unlock();
    return result;
}

/* --- the importer ------------------------------------------------------------------------------------------------------ */

struct opening {
    struct named_range named;
    address start; /* here */
    size_t done;
    int device;
    context context;
    struct packet *packet;
};

static bool is_alive(int process) {
    return kill(process, 0) == 0 || errno != ESRCH;
}

static void wait_a_moment(void) {
    poll(NULL, 0, AGAIN_MS);
}

/* An agent that was restored, or whose name was removed, is soon found again. */
static struct owned connect_to(int process) {
    uint64_t until_ns = now_ns() + (uint64_t)FOUND_MS * 1000000;
    struct owned connection = place_connect(process);
    while (connection.number < 0 && is_alive(process) && now_ns() < until_ns) {
        wait_a_moment();
        connection = place_connect(process);
    }
    return connection;
}

/* On return the answer's descriptors are open but not yet registered: nobody may fork then. */
static bool ask(const struct opening *opening, struct owned *connection) {
    struct packet *packet = opening->packet;
    struct pollfd answered = {.events = POLLIN};
    packet->head = (struct message){PROTOCOL_MAGIC, PROTOCOL_VERSION, SHARE, 0, 0, opening->named.start + opening->done,
                                    opening->named.token};
    packet->descriptor_count = 0;
    *connection = connect_to(opening->named.process);
    answered.fd = connection->number;
    if (socket_send(connection, packet, NULL, 0) && poll(&answered, 1, ANSWER_MS) > 0)
        return true;
    descriptor_close(connection);
    return false;
}

static result show(struct opening *opening, const struct record *record, int descriptor) {
    struct access access[MAX_DEVICES];
    unsigned access_count = peers_access(opening->device, access);
    struct properties properties = {0};
    struct mapping *mapping = NULL;
    address start = opening->start + opening->done;
    handle made;
    if (record->bytes == 0 || record->bytes > opening->named.reserved - opening->done)
        return INVALID_VALUE;
    result result = real.cuMemImportFromShareableHandle(&made, (void *)(intptr_t)descriptor, POSIX_DESCRIPTOR);
    if (result != SUCCESS)
        return result;
    if (real.cuMemGetAllocationPropertiesFromHandle != NULL)
        real.cuMemGetAllocationPropertiesFromHandle(&properties, made);
    struct block *block = block_new(made, 0, &properties);
    if (block == NULL) {
        real.cuMemRelease(made);
        return OUT_OF_MEMORY;
    }
    block->imported = true;
    result = real.cuMemMap(start, record->bytes, 0, made, 0);
    if (result == SUCCESS && (mapping = mapping_add(start, record->bytes, 0, block)) == NULL) {
        real.cuMemUnmap(start, record->bytes);
        result = OUT_OF_MEMORY;
    }
    block->references = 0;
    if (result == SUCCESS) {
        shared_keep(block, descriptor);
        opening->done += record->bytes;
        result = real.cuMemSetAccess(start, record->bytes, access, access_count);
    } else {
        block_forget_unused(block);
    }
    return result == SUCCESS && !mapping_set_access(mapping, access, access_count) ? OUT_OF_MEMORY : result;
}

/* Handles one answer. With the table locked. `again`: there is none, or the memory is away. */
static result take(struct opening *opening, const struct owned *connection, bool *again) {
    struct packet *packet = opening->packet;
    result result = INVALID_VALUE;
    enum received received = socket_receive(connection, packet);
    *again = received == GONE || (received == WELL && packet->head.code == MEMORY_IS_AWAY);
    if (received == WELL && packet->head.code == DONE && packet->head.count > 0 &&
        packet->head.count == packet->descriptor_count)
        result = SUCCESS;
    for (unsigned i = 0; result == SUCCESS && i < packet->head.count; i++)
        result = descriptor_is_ours(&packet->descriptors[i])
                     ? show(opening, &packet->records[i], packet->descriptors[i].number)
                     : OPERATING_SYSTEM;
    packet_close(packet);
    return result;
}

static result take_all(struct opening *opening) {
    uint64_t until_ns = now_ns() + (uint64_t)ANSWER_MS * 1000000;
    while (opening->done < opening->named.reserved) {
        struct owned connection;
        bool again;
        if (!ask(opening, &connection))
            return INVALID_VALUE;
        table_lock();
        result result = take(opening, &connection, &again);
        table_unlock();
        descriptor_close(&connection);
        if (result != SUCCESS && !(again && now_ns() < until_ns))
            return result;
        if (result != SUCCESS)
            wait_a_moment(); /* its owner is frozen, or its agent had another client */
    }
    return SUCCESS;
}

static struct range *opened_before(const struct named_range *named, int device) {
    for (size_t i = 0; i < ranges.count; i++) {
        struct range *range = sorted_at(&ranges, i);
        if (range->kind == OPENED && !range->freed && range->origin == named->token && range->origin_start == named->start &&
            range->device == device)
            return range;
    }
    return NULL;
}

static bool open_again(const struct opening *opening, address *pointer) {
    table_lock();
    struct range *range = opened_before(&opening->named, opening->device);
    if (range != NULL) {
        range->opened++;
        *pointer = range->start;
    }
    table_unlock();
    return range != NULL;
}

static result note(const struct opening *opening) {
    struct range *range = sorted_insert(&ranges, opening->start);
    if (range == NULL)
        return OUT_OF_MEMORY;
    range->kind = OPENED;
    range->bytes = opening->named.bytes;
    range->reserved = opening->named.reserved;
    range->context = opening->context;
    range->device = opening->device;
    range->number = range_number();
    range->origin = opening->named.token;
    range->origin_start = opening->named.start;
    range->opened = 1;
    return SUCCESS;
}

static result open_new(struct opening *opening, address *pointer) {
    result result = real.cuMemAddressReserve(&opening->start, opening->named.reserved, 0, 0, 0);
    if (result != SUCCESS)
        return result;
    result = take_all(opening);
    table_lock();
    if (result == SUCCESS)
        result = note(opening);
    if (result == SUCCESS)
        *pointer = opening->start;
    else
        range_take_apart(opening->start, opening->named.reserved);
    table_unlock();
    return result;
}

static result open_named(address *pointer, const struct named_range *named) {
    struct opening opening = {.named = *named};
    if (named->reserved == 0 || named->reserved % GRANULARITY != 0 || named->bytes > named->reserved)
        return INVALID_VALUE;
    if (real.cuCtxGetDevice(&opening.device) != SUCCESS || real.cuCtxGetCurrent(&opening.context) != SUCCESS ||
        named->process == getpid())
        return INVALID_CONTEXT;
    table_lock();
    context_note(opening.device, opening.context);
    table_unlock();
    if (open_again(&opening, pointer))
        return SUCCESS;
    opening.packet = malloc(sizeof *opening.packet);
    if (opening.packet == NULL)
        return OUT_OF_MEMORY;
    result result = open_new(&opening, pointer);
    free(opening.packet);
    return result;
}

typedef result opens(address *, struct ipc_handle, unsigned);

static result open_handle(opens *function, address *pointer, const struct ipc_handle *handle, unsigned flags) {
    struct named_range named;
    memcpy(&named, handle, sizeof named);
    if (pointer != NULL && named.magic == MAGIC)
        return open_named(pointer, &named);
    result result = function(pointer, *handle, flags);
    if (result == SUCCESS)
        atomic_fetch_add(&counters[IPC_MEMORY], 1);
    return result;
}

result replaced_cuIpcOpenMemHandle(address *pointer, struct ipc_handle handle, unsigned flags) {
    return open_handle(real.cuIpcOpenMemHandle, pointer, &handle, flags);
}

result replaced_cuIpcOpenMemHandle_v2(address *pointer, struct ipc_handle handle, unsigned flags) {
    return open_handle(real.cuIpcOpenMemHandle_v2, pointer, &handle, flags);
}

static result close_native(address pointer) {
    result result = real.cuIpcCloseMemHandle(pointer);
    if (result == SUCCESS)
        atomic_fetch_sub(&counters[IPC_MEMORY], 1);
    return result;
}

result replaced_cuIpcCloseMemHandle(address pointer) {
    table_lock();
    struct range *range = range_of(pointer);
    bool ours = range != NULL && range->kind == OPENED && range->start == pointer;
    context owner = ours ? range->context : NULL;
    bool last = ours && --range->opened == 0;
    if (last)
        range->freed = true; /* nobody can reopen it meanwhile */
    table_unlock();
    if (!ours)
        return close_native(pointer);
    if (last)
        range_give_up(pointer, owner);
    return SUCCESS;
}
