/*
 * Which threads are inside the driver: a record per thread, written only by that thread and read by the agent.
 *
 * A thread writes its depth and then checks whether the gate is closed; the agent closes the gate and then reads the
 * depths. Both in sequentially consistent order, so at least one sees the other.
 */
#include "gate.h"
#include "interposer.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define DEEPEST 16 /* calls within calls whose frames are known; deeper ones are only counted */

struct record {
    _Alignas(128) _Atomic pid_t thread; /* 0: free. A record is a cache line of its own */
    _Atomic unsigned depth;
    volatile bool arrives; /* counted, but has not yet seen the gate open */
    const struct slot *_Atomic slot; /* of the outermost call */
    const struct frame *frames[DEEPEST];
    struct record *next;
};

static struct record *_Atomic records; /* only ever grows */
static _Atomic unsigned uncounted;     /* calls of threads for whose record there was no memory */
static _Atomic uint32_t closed;        /* futex */
static bool is_empty; /* the agent's: nobody was inside after the gate was closed, so that nobody is until it opens */
static pthread_key_t at_thread_end;
static pthread_once_t key_once = PTHREAD_ONCE_INIT;
static _Thread_local __attribute__((tls_model("initial-exec"))) struct record *mine;
static _Thread_local __attribute__((tls_model("initial-exec"))) bool passes;

static void let_go(void *record) {
    mine = NULL;
    atomic_store(&((struct record *)record)->depth, 0);
    atomic_store(&((struct record *)record)->thread, 0);
}

static void make_key(void) {
    pthread_key_create(&at_thread_end, let_go);
}

/* A thread that ended inside a call without unwinding has left its record. */
static bool has_ended(pid_t thread) {
    return syscall(SYS_tgkill, getpid(), thread, 0) < 0 && errno == ESRCH;
}

static bool take(struct record *record, pid_t thread) {
    pid_t owner = atomic_load(&record->thread);
    if (owner != 0 && owner != thread && !has_ended(owner))
        return false;
    if (!atomic_compare_exchange_strong(&record->thread, &owner, thread))
        return false;
    atomic_store(&record->depth, 0);
    record->arrives = false;
    return true;
}

/* No malloc: a signal handler may make the thread's first call. */
static struct record *attach(void) {
    int error = errno;
    pid_t thread = (pid_t)syscall(SYS_gettid);
    struct record *record = atomic_load(&records);
    while (record != NULL && !take(record, thread))
        record = record->next;
    if (record == NULL) {
        record = mmap(NULL, sizeof *record, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (record == MAP_FAILED) {
            errno = error;
            return NULL;
        }
        atomic_store(&record->thread, thread);
        record->next = atomic_load(&records);
        while (!atomic_compare_exchange_weak(&records, &record->next, record))
            ;
    }
    mine = record;
    pthread_once(&key_once, make_key);
    pthread_setspecific(at_thread_end, record);
    errno = error;
    return record;
}

static bool on_signal_stack(void) {
    stack_t stack;
    return sigaltstack(NULL, &stack) == 0 && (stack.ss_flags & SS_ONSTACK) != 0;
}

/* Frames abandoned by longjmp lie below the new one, where no live caller's frame can be. */
static unsigned live_depth(const struct record *record, const struct frame *frame) {
    unsigned depth = atomic_load_explicit(&record->depth, memory_order_relaxed);
    if (depth == 0 || depth > DEEPEST || record->frames[depth - 1] > frame || on_signal_stack())
        return depth;
    while (depth > 0 && record->frames[depth - 1] <= frame)
        depth--;
    return depth;
}

void gate_left_up_to(uintptr_t stack_pointer) {
    struct record *record = mine;
    if (record == NULL)
        return;
    unsigned depth = atomic_load_explicit(&record->depth, memory_order_relaxed);
    while (depth > 0 && depth <= DEEPEST && (uintptr_t)record->frames[depth - 1] < stack_pointer)
        depth--;
    atomic_store_explicit(&record->depth, depth, memory_order_release);
}

static bool must_wait(const struct slot *slot) {
    if (!atomic_load(&closed))
        return false;
    return captures_open() == 0 || (slot->role == BEGINS_CAPTURE && !capture_is_mine());
}

static void wait_open(struct record *record, const struct slot *slot, unsigned depth) {
    int error = errno;
    while (must_wait(slot)) {
        atomic_store(&record->depth, 0);
        syscall(SYS_futex, &closed, FUTEX_WAIT_PRIVATE, 1, NULL, NULL, 0);
        atomic_store(&record->depth, depth);
    }
    errno = error;
}

static void *target_of(struct slot *slot) {
    void *target = atomic_load_explicit(&slot->target, memory_order_acquire);
    return target != NULL ? target : symbols_resolve(slot);
}

/*
 * A signal may arrive between any two steps, and its handler may call CUDA and use the entry of `frames` just written,
 * before the depth includes it. So each call restores the entry that it overwrote when it leaves.
 */
static void note(struct record *record, unsigned depth, struct frame *frame) {
    if (depth < DEEPEST) {
        frame->covered = record->frames[depth];
        atomic_signal_fence(memory_order_seq_cst);
        record->frames[depth] = frame;
        atomic_signal_fence(memory_order_seq_cst);
    }
    atomic_store(&record->depth, depth + 1);
}

void *gate_enter(struct slot *slot, struct frame *frame) {
    struct record *record = mine != NULL ? mine : attach();
    if (record == NULL) { /* from now on the gate is never found empty */
        atomic_store(&uncounted, 1);
        return target_of(slot);
    }
    unsigned depth = live_depth(record, frame);
    if (depth == 0)
        atomic_store_explicit(&record->slot, slot, memory_order_relaxed);
    bool arrives = depth == 0 || record->arrives; /* a signal handler's call waits like the interrupted one */
    if (arrives)
        record->arrives = true;
    note(record, depth, frame);
    if (arrives && atomic_load(&closed) && !passes)
        wait_open(record, slot, depth + 1);
    if (arrives)
        record->arrives = depth != 0;
    return target_of(slot);
}

void *gate_leave(struct slot *slot, const struct frame *frame, result result) {
    struct record *record = mine;
    if (result == OUT_OF_MEMORY && !passes && captures_open() == 0 && room_is_made())
        return target_of(slot);
    if (slot->role != ORDINARY)
        after_call(slot, frame, result);
    if (record == NULL)
        return NULL;
    unsigned depth = atomic_load_explicit(&record->depth, memory_order_relaxed);
    while (depth > 1 && depth <= DEEPEST && record->frames[depth - 1] < frame && !on_signal_stack())
        depth--; /* calls within this one that were left by longjmp */
    if (depth == 0)
        return NULL;
    if (depth <= DEEPEST && record->frames[depth - 1] == frame) {
        record->frames[depth - 1] = frame->covered;
        atomic_signal_fence(memory_order_seq_cst);
    }
    atomic_store_explicit(&record->depth, depth - 1, memory_order_release);
    return NULL;
}

/*
 * The stubs' personality routine: a C++ exception, pthread_exit or a cancellation that leaves a call takes the thread
 * out of the count, once for each stub's frame. There is no landing pad: unwinding continues.
 */
int gate_unwind(int version, int actions, uint64_t class, void *exception, void *unwind_context) {
    const int cleanup_phase = 2, continue_unwind = 8;
    (void)version, (void)class, (void)exception, (void)unwind_context;
    if ((actions & cleanup_phase) != 0 && mine != NULL && atomic_load(&mine->depth) > 0)
        atomic_fetch_sub(&mine->depth, 1);
    return continue_unwind;
}

void gate_pass_always(void) {
    passes = true;
}

bool gate_is_closed(void) {
    return atomic_load(&closed) != 0;
}

void gate_close(void) {
    atomic_store(&closed, 1);
}

void gate_open(void) {
    is_empty = false;
    atomic_store(&closed, 0);
    syscall(SYS_futex, &closed, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static unsigned counted_now(void) {
    unsigned inside = atomic_load(&uncounted);
    for (struct record *record = atomic_load(&records); record != NULL; record = record->next) {
        pid_t thread = atomic_load(&record->thread);
        if (thread == 0 || record == mine || atomic_load(&record->depth) == 0)
            continue;
        if (has_ended(thread))
            atomic_store(&record->depth, 0);
        else
            inside++;
    }
    return inside;
}

unsigned gate_inside(void) {
    return is_empty ? 0 : counted_now();
}

int gate_who(const char **function) {
    for (struct record *record = atomic_load(&records); record != NULL; record = record->next) {
        const struct slot *slot = atomic_load_explicit(&record->slot, memory_order_relaxed);
        pid_t thread = atomic_load(&record->thread);
        if (record == mine || thread == 0 || atomic_load(&record->depth) == 0 || slot == NULL)
            continue;
        *function = slot->name;
        return thread;
    }
    return 0;
}

/* Calls pass during a capture: a call that ends a capture may be counted only after the capture has ended. */
static bool is_empty_now(void) {
    return captures_open() == 0 && counted_now() == 0 && captures_open() == 0 && counted_now() == 0;
}

/*
 * A call is briefly counted before it sees that the gate is closed; so later counts mean nothing, and one moment with a
 * count of zero decides.
 */
bool gate_wait_empty(unsigned timeout_ms) {
    const struct timespec moment = {.tv_nsec = 50000};
    uint64_t until_ns = now_ns() + (uint64_t)timeout_ms * 1000000;
    while (!is_empty && !is_empty_now()) {
        if (now_ns() >= until_ns)
            return false;
        nanosleep(&moment, NULL);
    }
    is_empty = true;
    return true;
}

/* A forked child has one thread: the other records are stale, and nobody would open the gate. */
void gate_in_child(void) {
    for (struct record *record = atomic_load(&records); record != NULL; record = record->next)
        if (record != mine) {
            atomic_store(&record->depth, 0);
            atomic_store(&record->thread, 0);
        }
    if (mine != NULL)
        atomic_store(&mine->thread, (pid_t)syscall(SYS_gettid));
    captures_forget_all();
    is_empty = false;
    atomic_store(&closed, 0);
}
