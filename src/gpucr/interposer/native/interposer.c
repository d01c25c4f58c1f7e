/* Work after a driver call, fork handlers, and the counters. */
#include "interposer.h"

#include <pthread.h>
#include <time.h>

_Atomic int64_t counters[COUNTERS];
_Atomic bool copies_wait;

uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Still counted as inside: the gate is not empty before this is done. */
void after_call(const struct slot *slot, const struct frame *frame, result result) {
    uint64_t first = frame->arguments[0];
    if (slot->role == ENDS_CAPTURE)
        capture_ended((stream)(uintptr_t)first, result);
    if (result != SUCCESS)
        return;
    if (slot->role == BEGINS_CAPTURE)
        capture_began((stream)(uintptr_t)first);
    else if (slot->role == DESTROYS_STREAM)
        capture_forget((stream)(uintptr_t)first);
    else if (slot->role == COPIES && atomic_load_explicit(&copies_wait, memory_order_relaxed) && captures_open() == 0)
        real.cuCtxSynchronize();
    else if (slot->role == COUNTED)
        atomic_fetch_add(&counters[slot->counter], slot->delta);
    else if (symbols_complete() && slot->role == STARTS_CUDA)
        agent_start();
    else if (symbols_complete() && slot->role == DESTROYS_CONTEXT)
        forget_context((context)(uintptr_t)first, 0);
    else if (symbols_complete() && slot->role == DESTROYS_PRIMARY)
        forget_context(NULL, (int)first);
}

/* A child of a CUDA process cannot use CUDA: its tables do not matter, but no lock may stay held. */
static void in_child(void) {
    table_in_child();
    shared_in_child();
    ipc_in_child();
    symbols_in_child();
    gate_in_child();
    agent_in_child();
    room_in_child();
    tracer_in_child();
    hooks_in_child();
}

__attribute__((constructor)) static void prepare(void) {
    symbols_find_libc(); /* before anybody is in a signal handler */
    hooks_prepare();
    pthread_atfork(agent_before_fork, agent_in_parent, in_child);
}
