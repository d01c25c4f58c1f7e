/*
 * Collectives, like NCCL's kernels: a rank's submission is pending until all ranks have submitted theirs with the same
 * number. Nothing runs in the background: a call of the program, or a lock, copies results into device memory, and
 * everything needed for that is in the memory that the ranks share.
 */
#include "collective.h"

#include <stdlib.h>
#include <string.h>

#include "sim.h"

#define MAX_QUEUED (LANE_DEPTH / 2 - 1) /* how far a peer may lag without having taken its own results */
#define LOOK_EVERY_MS 20                /* a peer that died wakes nobody */

struct collective {
    struct communicator *communicator;
    struct stream *stream;
    uint64_t number;  /* counted from 1, the same on all ranks */
    uint64_t pointer; /* to {u64 sum, u64 count} in device memory */
    struct collective *next;
};

static struct collective *pending; /* in the order of submission */

/* When it is done: UINT64_MAX if a rank has not submitted it yet. */
static uint64_t done_ns(const struct collective *collective) {
    const struct communicator *communicator = collective->communicator;
    uint64_t latest = 0;
    for (uint32_t rank = 0; rank < communicator->ranks; rank++) {
        const struct lane *lane = &communicator->lanes[rank];
        if (atomic_load(&lane->submitted) < collective->number)
            return UINT64_MAX;
        uint64_t ready_ns = lane->ready_ns[collective->number % LANE_DEPTH];
        latest = ready_ns > latest ? ready_ns : latest;
    }
    return latest;
}

/* The kernel's effect on this rank: sum += the values of all ranks, count += 1. */
static void take(const struct collective *collective) {
    uint64_t result[2];
    if (memory_read(result, collective->pointer, sizeof result) != SUCCESS)
        return; /* freed under a running kernel: undefined on a GPU too */
    for (uint32_t rank = 0; rank < collective->communicator->ranks; rank++)
        result[0] += collective->communicator->lanes[rank].value[collective->number % LANE_DEPTH];
    result[1]++;
    memory_write(collective->pointer, result, sizeof result);
}

static bool follows_on_stream(const struct collective *collective) {
    for (const struct collective *before = pending; before != collective; before = before->next)
        if (before->stream == collective->stream)
            return true;
    return false;
}

void collectives_take(uint64_t time_ns) {
    for (struct collective **link = &pending; *link != NULL;) {
        struct collective *collective = *link;
        if (done_ns(collective) > time_ns || follows_on_stream(collective)) {
            link = &collective->next;
            continue;
        }
        take(collective);
        *link = collective->next;
        free(collective);
    }
}

uint64_t collectives_done_ns(const struct stream *stream) {
    uint64_t latest = 0;
    for (const struct collective *collective = pending; collective != NULL; collective = collective->next) {
        uint64_t done = stream == collective->stream ? done_ns(collective) : 0;
        latest = done > latest ? done : latest;
    }
    return latest;
}

void collectives_move(const struct stream *from, struct stream *to) {
    for (struct collective *collective = pending; collective != NULL; collective = collective->next)
        if (collective->stream == from)
            collective->stream = to;
}

void collectives_wait(void) {
    struct collective *collective = pending;
    while (collective != NULL && done_ns(collective) != UINT64_MAX)
        collective = collective->next;
    if (collective == NULL)
        return;
    struct communicator *communicator = collective->communicator;
    uint32_t completions = atomic_load(&communicator->completions);
    if (done_ns(collective) != UINT64_MAX)
        return;
    pthread_mutex_unlock(&sim_mutex);
    futex_wait(&communicator->completions, completions, LOOK_EVERY_MS);
    pthread_mutex_lock(&sim_mutex);
}

static uint64_t queued(const struct communicator *communicator) {
    uint64_t count = 0;
    for (const struct collective *collective = pending; collective != NULL; collective = collective->next)
        count += collective->communicator == communicator;
    return count;
}

static void append(struct collective *collective) {
    struct collective **end = &pending;
    while (*end != NULL)
        end = &(*end)->next;
    *end = collective;
}

enum result collective_submit(const struct collective_arguments *arguments, struct stream *stream) {
    struct communicator *communicator = arguments->communicator;
    uint64_t result[2];
    if (atomic_load(&communicator->magic) != COMMUNICATOR_MAGIC || communicator->ranks > MAX_RANKS ||
        arguments->rank >= communicator->ranks)
        return INVALID_VALUE;
    if (memory_read(result, arguments->pointer, sizeof result) != SUCCESS)
        return ILLEGAL_ADDRESS;
    collectives_take(now_ns());
    if (queued(communicator) >= MAX_QUEUED)
        return OUT_OF_MEMORY;
    struct collective *collective = malloc(sizeof *collective);
    if (collective == NULL)
        return OUT_OF_MEMORY;
    struct lane *lane = &communicator->lanes[arguments->rank];
    uint64_t number = atomic_load(&lane->submitted) + 1;
    *collective = (struct collective){communicator, stream, number, arguments->pointer, NULL};
    append(collective);
    lane->value[number % LANE_DEPTH] = arguments->value;
    lane->ready_ns[number % LANE_DEPTH] = arguments->ready_ns;
    atomic_store(&lane->submitted, number);
    if (done_ns(collective) != UINT64_MAX) { /* this rank was the last one */
        atomic_fetch_add(&communicator->completions, 1);
        futex_wake(&communicator->completions);
    }
    return SUCCESS;
}
