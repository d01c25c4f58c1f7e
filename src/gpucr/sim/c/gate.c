/* The gate in front of every API call, and waiting on the monotonic clock. */
#include "sim.h"

#include <time.h>

pthread_mutex_t sim_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t gate_changed; /* on the monotonic clock */
static unsigned inside;
static _Atomic uint32_t closed; /* futex; set with sim_mutex held */

__attribute__((constructor)) static void prepare(void) {
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&gate_changed, &clock);
}

uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void wait_changed(uint64_t time_ns) {
    struct timespec time = {.tv_sec = (time_t)(time_ns / 1000000000u), .tv_nsec = (long)(time_ns % 1000000000u)};
    pthread_cond_timedwait(&gate_changed, &sim_mutex, &time);
}

void wait_until_ns(uint64_t time_ns) {
    while (now_ns() < time_ns)
        wait_changed(time_ns);
}

void gate_enter(void) {
    pthread_mutex_lock(&sim_mutex);
    while (atomic_load(&closed)) {
        pthread_mutex_unlock(&sim_mutex);
        futex_wait(&closed, 1, 0);
        pthread_mutex_lock(&sim_mutex);
    }
    inside++;
}

void gate_leave(void) {
    inside--;
    pthread_cond_broadcast(&gate_changed);
    pthread_mutex_unlock(&sim_mutex);
}

bool gate_close(uint64_t deadline_ns, const _Atomic uint32_t *give_up) {
    const uint64_t look_every_ns = 5000000; /* give_up is set from another process, which cannot signal us */
    pthread_mutex_lock(&sim_mutex);
    atomic_store(&closed, 1);
    bool idle, over = false;
    while (!(idle = inside == 0 && streams_idle()) && !over) {
        uint64_t until_ns = now_ns() + look_every_ns;
        wait_changed(until_ns < deadline_ns ? until_ns : deadline_ns);
        over = now_ns() >= deadline_ns || atomic_load(give_up) != 0;
    }
    if (!idle)
        gate_open();
    pthread_mutex_unlock(&sim_mutex);
    return idle;
}

/* Without the mutex: a tracer may hold a thread that owns it, in front of the gate, until the process is unlocked. */
void gate_open(void) {
    atomic_store(&closed, 0);
    futex_wake(&closed);
}
