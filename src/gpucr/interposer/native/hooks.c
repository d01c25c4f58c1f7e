/* The program's callbacks: before it is frozen, and when it continues (gpucr.h is the program's side). */
#include "interposer.h"
#include "protocol.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>

#define MOST_HOOKS 16
#define EXPORT __attribute__((visibility("default")))

struct hook {
    int (*function)(void *);
    void *data;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t ended; /* on the monotonic clock */
static struct hook hooks[HOOK_KINDS][MOST_HOOKS];
static unsigned registered[HOOK_KINDS];
static bool running; /* a thread is calling some; possibly nobody waits for it any more */
static enum hooks called;
static unsigned failed;
static sigset_t program_mask; /* the agent's thread blocks all signals; threads started by a hook must not */

static int add(enum hooks kind, int (*function)(void *), void *data) {
    pthread_mutex_lock(&mutex);
    bool fits = function != NULL && registered[kind] < MOST_HOOKS;
    if (fits)
        hooks[kind][registered[kind]++] = (struct hook){function, data};
    pthread_mutex_unlock(&mutex);
    return fits ? 0 : -1;
}

EXPORT int gpucr_before_freeze(int (*function)(void *), void *data) {
    return add(BEFORE_FREEZE, function, data);
}

EXPORT int gpucr_after_restore(int (*function)(void *), void *data) {
    return add(AFTER_RESTORE, function, data);
}

uint64_t hooks_registered(void) {
    pthread_mutex_lock(&mutex);
    uint64_t count = registered[BEFORE_FREEZE] + registered[AFTER_RESTORE];
    pthread_mutex_unlock(&mutex);
    return count;
}

/* Those registered when it began, in order; the program may register more meanwhile. */
static void *call(void *unused) {
    (void)unused;
    struct hook chosen[MOST_HOOKS];
    pthread_sigmask(SIG_SETMASK, &program_mask, NULL);
    pthread_mutex_lock(&mutex);
    unsigned count = registered[called];
    for (unsigned i = 0; i < count; i++)
        chosen[i] = hooks[called][i];
    pthread_mutex_unlock(&mutex);
    unsigned bad = 0;
    for (unsigned i = 0; i < count; i++)
        bad += chosen[i].function(chosen[i].data) != 0;
    pthread_mutex_lock(&mutex);
    failed = bad;
    running = false;
    pthread_cond_signal(&ended);
    pthread_mutex_unlock(&mutex);
    return NULL;
}

static bool begin(enum hooks kind) {
    pthread_t thread;
    called = kind;
    running = pthread_create(&thread, NULL, call, NULL) == 0;
    if (running)
        pthread_detach(thread);
    return running;
}

uint32_t hooks_call(uint64_t kind, uint64_t wait_ms, uint64_t *count, uint64_t *bad) {
    if (kind >= HOOK_KINDS || wait_ms > LONGEST_HOOK_MS)
        return MALFORMED;
    struct timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_sec += (time_t)(wait_ms / 1000);
    end.tv_nsec += (long)(wait_ms % 1000) * 1000000;
    end.tv_sec += end.tv_nsec / 1000000000;
    end.tv_nsec %= 1000000000;
    uint32_t code = DONE;
    pthread_mutex_lock(&mutex);
    *count = registered[kind];
    if (running)
        code = TOO_SLOW; /* left from the last call */
    else if (*count > 0 && !begin((enum hooks)kind))
        code = NO_MEMORY;
    while (code == DONE && running)
        if (pthread_cond_timedwait(&ended, &mutex, &end) == ETIMEDOUT && running)
            code = TOO_SLOW;
    *bad = code == DONE && *count > 0 ? failed : 0;
    pthread_mutex_unlock(&mutex);
    return code;
}

void hooks_keep_mask(const sigset_t *mask) {
    program_mask = *mask;
}

/* pthread_cond_clockwait came with glibc 2.30. */
void hooks_prepare(void) {
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&ended, &clock);
}

/* Registrations belong to the parent. */
void hooks_in_child(void) {
    pthread_mutex_init(&mutex, NULL);
    hooks_prepare();
    running = false;
    registered[BEFORE_FREEZE] = registered[AFTER_RESTORE] = 0;
}
