/*
 * Streams that are being captured. While there is one, nothing may be done to the process: many driver calls would
 * invalidate the capture. So the gate lets everybody pass until the last capture has ended, and keeps new ones out.
 */
#include "gate.h"

#include <pthread.h>
#include <stdatomic.h>

#define ROOM 256

struct capture {
    stream stream;
    pthread_t thread;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct capture captures[ROOM];
static _Atomic unsigned count; /* changed with the mutex held */

unsigned captures_open(void) {
    return atomic_load(&count);
}

void capture_began(stream stream) {
    pthread_mutex_lock(&mutex);
    if (count < ROOM) /* nobody captures so many at a time; one too many is not waited for */
        captures[count++] = (struct capture){stream, pthread_self()};
    pthread_mutex_unlock(&mutex);
}

void capture_forget(stream stream) {
    if (captures_open() == 0)
        return;
    pthread_mutex_lock(&mutex);
    for (unsigned i = 0; i < count; i++)
        if (captures[i].stream == stream) {
            captures[i] = captures[count - 1];
            count--;
            break;
        }
    pthread_mutex_unlock(&mutex);
}

/* An end that fails may have ended the capture (it was invalidated) or not (the wrong thread asked): the driver knows. */
void capture_ended(stream stream, result result) {
    int status = 0;
    if (result != SUCCESS && real.cuStreamIsCapturing != NULL && real.cuStreamIsCapturing(stream, &status) == SUCCESS &&
        status != 0)
        return;
    capture_forget(stream);
}

void captures_forget_all(void) {
    pthread_mutex_init(&mutex, NULL);
    count = 0;
}

bool capture_is_mine(void) {
    bool mine = false;
    pthread_mutex_lock(&mutex);
    for (unsigned i = 0; i < count && !mine; i++)
        mine = pthread_equal(captures[i].thread, pthread_self());
    pthread_mutex_unlock(&mutex);
    return mine;
}
