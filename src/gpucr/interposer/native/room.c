/*
 * While the program runs, gpucr can hold device memory: a context of its own, and what the program has freed meanwhile. A
 * call that finds no memory asks for it through the socket of LEND, waits until gpucr has let go, and is made again. So the
 * program never runs out of memory because of gpucr. Who holds nothing any more, or dies, closes its end.
 */
#include "interposer.h"
#include "protocol.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#define LONGEST_WAIT_MS 20000
#define SHORTLY_NS 2000000000u /* a call that began before memory was let go may fail after that: it is repeated too */

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct owned lender = {.number = -1};
static _Atomic bool lent;
static _Atomic uint64_t over_ns; /* when it was let go; 0: never */
static _Thread_local __attribute__((tls_model("initial-exec"))) bool was_repeated;

static void end(void) {
    if (!atomic_load(&lent))
        return;
    descriptor_close(&lender);
    atomic_store(&over_ns, now_ns());
    atomic_store(&lent, false);
}

uint32_t room_lend(int descriptor) {
    uint32_t code = DONE;
    if (descriptor < 0 && !atomic_load(&lent))
        return DONE;
    pthread_mutex_lock(&mutex);
    end();
    if (descriptor >= 0) {
        lender = descriptor_own(descriptor_copy_high(descriptor));
        code = lender.number >= 0 ? DONE : NO_DESCRIPTORS;
        atomic_store(&lent, code == DONE);
    }
    pthread_mutex_unlock(&mutex);
    return code;
}

/* With the mutex held: whoever else finds no memory waits for the same answer. */
static void ask(void) {
    const uint64_t until_ns = now_ns() + (uint64_t)LONGEST_WAIT_MS * 1000000;
    char byte = 0;
    if (!descriptor_is_ours(&lender) || send(lender.number, &byte, 1, MSG_NOSIGNAL | MSG_DONTWAIT) != 1)
        return;
    struct pollfd answer = {lender.number, POLLIN, 0};
    for (uint64_t now; (now = now_ns()) < until_ns;) {
        if (poll(&answer, 1, (int)((until_ns - now) / 1000000) + 1) >= 0 || errno != EINTR)
            break;
    }
}

bool room_is_made(void) {
    int error = errno;
    bool again = false;
    if (atomic_load(&lent)) {
        pthread_mutex_lock(&mutex);
        if (atomic_load(&lent))
            ask();
        end();
        pthread_mutex_unlock(&mutex);
        again = true;
    } else if (!was_repeated) {
        uint64_t over = atomic_load(&over_ns);
        again = over != 0 && now_ns() - over < SHORTLY_NS;
    }
    was_repeated = again;
    errno = error;
    return again;
}

void room_in_child(void) {
    pthread_mutex_init(&mutex, NULL);
    end();
}
