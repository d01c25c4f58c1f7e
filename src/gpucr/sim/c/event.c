/*
 * Events, including interprocess events. Measured on driver 580: the first interprocess event makes a file in /dev/shm
 * whose name has the pid of its process, which keeps it open and mapped; a process that opens the event maps the file,
 * and keeps it mapped after the event is destroyed. Such events come back.
 */
#include "calls.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define INTERPROCESS 0x4u /* CU_EVENT_INTERPROCESS; it needs DISABLE_TIMING */
#define DISABLE_TIMING 0x2u
#define EVENT_MAGIC 0x746e65766d697367u
#define FILE_BYTES 81920u /* as seen with torch */
#define SLOTS (FILE_BYTES / sizeof(_Atomic uint64_t))

struct event {
    _Atomic uint64_t *done_ns; /* when the recorded work is done: `local`, or a slot of a shared file */
    _Atomic uint64_t local;
    struct stream *stream; /* of work that waits for peers; NULL: use done_ns */
    uint32_t slot;
    bool mine; /* its slot, if it has one, is in this process's own file */
    struct event *next;
};

struct event_handle { /* CUipcEventHandle */
    uint64_t magic;
    int32_t owner;
    uint32_t user, slot;
    char reserved[64 - sizeof(uint64_t) - 3 * sizeof(uint32_t)];
};
_Static_assert(sizeof(struct event_handle) == 64, "CUipcEventHandle");

struct foreign { /* a file of another process; it stays mapped */
    int32_t owner;
    uint32_t user;
    _Atomic uint64_t *slots;
    struct foreign *next;
};

static struct event *events;
static struct foreign *foreign_files;
static _Atomic uint64_t *own_slots;
static uint32_t own_slot_count;
static char own_path[64];
static pid_t own_pid;

static void file_path(char path[64], uint32_t user, int32_t owner) {
    snprintf(path, 64, "/dev/shm/cuda.shm.%" PRIx32 ".%" PRIx32 ".1", user, (uint32_t)owner);
}

static _Atomic uint64_t *map_slots(int fd) {
    struct stat status;
    if (fstat(fd, &status) < 0 || status.st_size != FILE_BYTES)
        return NULL;
    void *start = mmap(NULL, FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return start == MAP_FAILED ? NULL : start;
}

static bool own_file(void) {
    if (own_slots != NULL)
        return true;
    own_pid = getpid();
    file_path(own_path, getuid(), own_pid);
    unlink(own_path); /* left by a killed process with the same pid */
    int fd = open(own_path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600); /* stays open, as the driver's */
    if (fd < 0 || ftruncate(fd, FILE_BYTES) < 0)
        return false;
    own_slots = map_slots(fd);
    return own_slots != NULL;
}

__attribute__((destructor)) static void remove_own_file(void) {
    if (own_pid == getpid())
        unlink(own_path);
}

static struct event *known(const struct event *event) {
    for (struct event *each = events; each != NULL; each = each->next)
        if (each == event)
            return each;
    return NULL;
}

static struct event *add(void) {
    struct event *made = calloc(1, sizeof *made);
    if (made == NULL)
        return NULL;
    made->done_ns = &made->local;
    made->mine = true;
    made->next = events;
    events = made;
    return made;
}

static enum result create(struct event **event, unsigned flags) {
    bool shared = (flags & INTERPROCESS) != 0;
    if (current_device() == NULL)
        return INVALID_CONTEXT;
    if (shared && !(flags & DISABLE_TIMING))
        return INVALID_VALUE;
    if (shared && (!own_file() || own_slot_count == SLOTS))
        return OPERATING_SYSTEM;
    *event = add();
    if (*event == NULL)
        return OUT_OF_MEMORY;
    if (shared) {
        (*event)->slot = own_slot_count++;
        (*event)->done_ns = &own_slots[(*event)->slot];
    }
    return SUCCESS;
}

EXPORT int cuEventCreate(struct event **event, unsigned flags) {
    GATED(event == NULL ? INVALID_VALUE : create(event, flags));
}

static enum result record(struct event *event, struct stream *stream) {
    uint64_t done_ns;
    if (known(event) == NULL)
        return INVALID_HANDLE;
    enum result result = stream_done_ns(stream, &done_ns);
    if (result != SUCCESS)
        return result;
    if (done_ns == UINT64_MAX && event->done_ns != &event->local)
        return NOT_SUPPORTED; /* another process could not see when the peers have come */
    event->stream = done_ns == UINT64_MAX ? stream : NULL;
    atomic_store(event->done_ns, done_ns == UINT64_MAX ? 0 : done_ns);
    return SUCCESS;
}

EXPORT int cuEventRecord(struct event *event, struct stream *stream) {
    GATED(record(event, stream));
}

static enum result query(const struct event *event) {
    if (known(event) == NULL)
        return INVALID_HANDLE;
    if (event->stream != NULL)
        return stream_query(event->stream);
    return atomic_load(event->done_ns) > now_ns() ? NOT_READY : SUCCESS;
}

EXPORT int cuEventQuery(struct event *event) {
    GATED(query(event));
}

static enum result synchronize(const struct event *event) {
    if (known(event) == NULL)
        return INVALID_HANDLE;
    if (event->stream != NULL)
        return stream_wait(event->stream);
    wait_until_ns(atomic_load(event->done_ns));
    return SUCCESS;
}

EXPORT int cuEventSynchronize(struct event *event) {
    GATED(synchronize(event));
}

static enum result destroy(const struct event *event) {
    for (struct event **link = &events; *link != NULL; link = &(*link)->next) {
        struct event *each = *link;
        if (each != event)
            continue;
        *link = each->next;
        free(each);
        return SUCCESS;
    }
    return INVALID_HANDLE;
}

EXPORT int cuEventDestroy_v2(struct event *event) {
    GATED(destroy(event));
}

EXPORT int cuEventDestroy(struct event *event) {
    return cuEventDestroy_v2(event);
}

static enum result get_handle(struct event_handle *handle, const struct event *event) {
    if (known(event) == NULL)
        return INVALID_HANDLE;
    if (event->done_ns == &event->local || !event->mine)
        return INVALID_VALUE;
    memset(handle, 0, sizeof *handle);
    handle->magic = EVENT_MAGIC;
    handle->owner = getpid();
    handle->user = getuid();
    handle->slot = event->slot;
    return SUCCESS;
}

EXPORT int cuIpcGetEventHandle(struct event_handle *handle, struct event *event) {
    GATED(handle == NULL ? INVALID_VALUE : get_handle(handle, event));
}

static _Atomic uint64_t *slots_of(const struct event_handle *handle) {
    char path[64];
    for (const struct foreign *each = foreign_files; each != NULL; each = each->next)
        if (each->owner == handle->owner && each->user == handle->user)
            return each->slots;
    struct foreign *made = calloc(1, sizeof *made);
    file_path(path, handle->user, handle->owner);
    int fd = made == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    _Atomic uint64_t *slots = fd < 0 ? NULL : map_slots(fd);
    if (fd >= 0)
        close(fd);
    if (slots == NULL) {
        free(made);
        return NULL;
    }
    *made = (struct foreign){handle->owner, handle->user, slots, foreign_files};
    foreign_files = made;
    return slots;
}

static enum result open_handle(struct event **event, const struct event_handle *handle) {
    if (current_device() == NULL)
        return INVALID_CONTEXT;
    if (handle->magic != EVENT_MAGIC || handle->owner == getpid() || handle->slot >= SLOTS)
        return INVALID_VALUE;
    _Atomic uint64_t *slots = slots_of(handle);
    if (slots == NULL)
        return INVALID_VALUE;
    *event = add();
    if (*event == NULL)
        return OUT_OF_MEMORY;
    (*event)->slot = handle->slot;
    (*event)->done_ns = &slots[handle->slot];
    (*event)->mine = false;
    return SUCCESS;
}

EXPORT int cuIpcOpenEventHandle(struct event **event, struct event_handle handle) {
    GATED(event == NULL ? INVALID_VALUE : open_handle(event, &handle));
}

/* Nothing is pending at a checkpoint, and another machine's clock differs. */
void events_forget_time(void) {
    for (struct event *each = events; each != NULL; each = each->next)
        if (each->mine)
            atomic_store(each->done_ns, 0);
}
