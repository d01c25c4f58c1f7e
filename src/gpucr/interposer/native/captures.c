/*
 * Streams that are being captured. During a capture the process must be left alone: many driver calls would invalidate
 * it. So the gate lets every call pass until the last capture has ended, and blocks new captures.
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
    if (count < ROOM) /* more than anyone captures at a time; excess ones are not waited for */
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

/* A failed end may have ended the capture (it was invalidated) or not (wrong thread): ask the driver. */
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
