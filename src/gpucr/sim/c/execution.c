/*
 * Modules, kernels and streams. A kernel is identified by its entry name in the PTX; the simulator runs the built-in
 * with that name. Work takes effect at submission, but every call that could observe that waits until its time has passed.
 */
#include "blake3.h"
#include "sim.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define STREAM_NON_BLOCKING 1u

struct stream {
    unsigned flags;
    const struct device *device; /* NULL: that of the current context */
    uint64_t busy_until_ns;
    struct stream *next;
};

struct kernel {
    const char *name;
    enum result (*run)(uint64_t threads, struct stream *stream, void **parameters);
};

static struct stream default_stream;
static struct stream *streams = &default_stream;

static struct stream *stream_known(struct stream *stream) {
    /* 1 and 2 are the handles of the legacy and the per-thread default stream */
    if ((uintptr_t)stream <= 2)
        return &default_stream;
    for (struct stream *known = streams; known != NULL; known = known->next)
        if (known == stream)
            return known;
    return NULL;
}

const struct device *stream_device(const struct stream *stream) {
    stream = stream_known((struct stream *)(uintptr_t)stream);
    if (stream == NULL || stream->device != NULL)
        return stream == NULL ? NULL : stream->device;
    return current_context == NULL ? NULL : context_device(current_context);
}

enum result stream_create(unsigned flags, const struct device *device, struct stream **stream) {
    struct stream *made = calloc(1, sizeof *made);
    if (made == NULL)
        return OUT_OF_MEMORY;
    made->flags = flags;
    made->device = device;
    made->next = streams->next;
    streams->next = made;
    *stream = made;
    return SUCCESS;
}

enum result stream_destroy(struct stream *stream) {
    for (struct stream *before = streams; before != NULL; before = before->next) {
        if (before->next != stream || stream == NULL)
            continue;
        /* the driver lets running work finish: it stays pending on the default stream */
        if (stream->busy_until_ns > default_stream.busy_until_ns)
            default_stream.busy_until_ns = stream->busy_until_ns;
        collectives_move(stream, &default_stream);
        before->next = stream->next;
        free(stream);
        return SUCCESS;
    }
    return INVALID_HANDLE;
}

/* When the stream has nothing pending any more (by `now`: it has nothing), UINT64_MAX where peers are waited for. */
static uint64_t busy_until_ns(const struct stream *stream, uint64_t now) {
    collectives_take(now);
    uint64_t done = collectives_done_ns(stream);
    return done > stream->busy_until_ns ? done : stream->busy_until_ns;
}

static uint64_t all_busy_until_ns(bool blocking_only, uint64_t now) {
    uint64_t latest = 0;
    for (const struct stream *stream = streams; stream != NULL; stream = stream->next) {
        bool counts = !(blocking_only && (stream->flags & STREAM_NON_BLOCKING));
        uint64_t until = counts ? busy_until_ns(stream, now) : 0;
        latest = until > latest ? until : latest;
    }
    return latest;
}

static void wait_for(uint64_t until_ns) {
    if (until_ns == UINT64_MAX)
        collectives_wait();
    else
        wait_until_ns(until_ns);
}

enum result stream_query(struct stream *stream) {
    uint64_t now = now_ns();
    stream = stream_known(stream);
    if (stream == NULL)
        return INVALID_HANDLE;
    return busy_until_ns(stream, now) > now ? NOT_READY : SUCCESS;
}

enum result stream_done_ns(struct stream *stream, uint64_t *done_ns) {
    stream = stream_known(stream);
    if (stream == NULL)
        return INVALID_HANDLE;
    *done_ns = busy_until_ns(stream, now_ns());
    return SUCCESS;
}

enum result stream_wait(struct stream *stream) {
    stream = stream_known(stream);
    if (stream == NULL)
        return INVALID_HANDLE;
    for (uint64_t now = now_ns(), until; (until = busy_until_ns(stream, now)) > now; now = now_ns())
        wait_for(until);
    return SUCCESS;
}

void streams_wait_all(bool blocking_only) {
    for (uint64_t now = now_ns(), until; (until = all_busy_until_ns(blocking_only, now)) > now; now = now_ns())
        wait_for(until);
}

bool streams_idle(void) {
    uint64_t now = now_ns();
    return all_busy_until_ns(false, now) <= now;
}

void streams_forget_time(void) {
    for (struct stream *stream = streams; stream != NULL; stream = stream->next)
        stream->busy_until_ns = 0;
}

static enum result run_increment(uint64_t threads, struct stream *stream, void **parameters) {
    uint64_t pointer, value;
    (void)stream;
    memcpy(&pointer, parameters[0], sizeof pointer);
    if (memory_read(&value, pointer, sizeof value) != SUCCESS)
        return ILLEGAL_ADDRESS;
    value += threads;
    return memory_write(pointer, &value, sizeof value);
}

static enum result run_spin(uint64_t threads, struct stream *stream, void **parameters) {
    uint64_t duration_ns, now = now_ns();
    (void)threads;
    memcpy(&duration_ns, parameters[0], sizeof duration_ns);
    stream->busy_until_ns = (stream->busy_until_ns > now ? stream->busy_until_ns : now) + duration_ns;
    return SUCCESS;
}

static enum result run_allreduce(uint64_t threads, struct stream *stream, void **parameters) {
    struct collective_arguments arguments;
    uint64_t now = now_ns();
    (void)threads;
    memcpy(&arguments.pointer, parameters[0], sizeof arguments.pointer);
    memcpy(&arguments.value, parameters[1], sizeof arguments.value);
    memcpy(&arguments.communicator, parameters[2], sizeof arguments.communicator);
    memcpy(&arguments.rank, parameters[3], sizeof arguments.rank);
    /* Work queued behind another collective is ready when that is done. */
    arguments.ready_ns = stream->busy_until_ns > now ? stream->busy_until_ns : now;
    return collective_submit(&arguments, stream);
}

/* The second kernel does all of it: nobody looks at what the first one leaves. */
static enum result run_digest_groups(uint64_t threads, struct stream *stream, void **parameters) {
    (void)threads, (void)stream, (void)parameters;
    return SUCCESS;
}

static enum result digest_piece(uint64_t from, uint64_t size, const uint32_t key[8], uint32_t flags, uint64_t to) {
    uint8_t digest[32], *data = malloc(size == 0 ? 1 : size);
    bool is_done = data != NULL && memory_read(data, from, size) == SUCCESS && blake3(digest, key, flags, data, size);
    free(data);
    return is_done && memory_write(to, digest, sizeof digest) == SUCCESS ? SUCCESS : ILLEGAL_ADDRESS;
}

static enum result run_digest_pieces(uint64_t threads, struct stream *stream, void **parameters) {
    uint64_t data, length, key_at, digests;
    uint32_t piece_bytes, flags, key[8];
    (void)stream;
    memcpy(&data, parameters[0], sizeof data);
    memcpy(&length, parameters[1], sizeof length);
    memcpy(&piece_bytes, parameters[2], sizeof piece_bytes);
    memcpy(&key_at, parameters[3], sizeof key_at);
    memcpy(&flags, parameters[4], sizeof flags);
    memcpy(&digests, parameters[6], sizeof digests);
    if (piece_bytes == 0 || memory_read(key, key_at, sizeof key) != SUCCESS)
        return ILLEGAL_ADDRESS;
    enum result result = SUCCESS;
    for (uint64_t piece = 0; piece < threads / 256 && result == SUCCESS; piece++) {
        uint64_t start = piece * piece_bytes, left = length - start;
        result = digest_piece(data + start, left < piece_bytes ? left : piece_bytes, key, flags, digests + 32 * piece);
    }
    return result;
}

static const struct kernel KERNELS[] = {
    {"gpucr_digest_groups", run_digest_groups},
    {"gpucr_digest_pieces", run_digest_pieces},
    {"gpucr_increment", run_increment},
    {"gpucr_spin", run_spin},
    {"gpucr_allreduce", run_allreduce},
};

enum result module_load(const void *image, void **module) {
    const char *ptx = image;
    if (ptx == NULL)
        return INVALID_VALUE;
    /* cubins and fat binaries begin with other bytes than text, and are not run here */
    if (!isspace((unsigned char)*ptx) && *ptx != '.' && *ptx != '/')
        return INVALID_IMAGE;
    if (strstr(ptx, ".version") == NULL || strstr(ptx, ".target") == NULL)
        return INVALID_IMAGE;
    *module = strdup(ptx);
    return *module == NULL ? OUT_OF_MEMORY : SUCCESS;
}

static bool has_entry(const char *ptx, const char *name) {
    const char *at = ptx;
    while ((at = strstr(at, ".entry")) != NULL) {
        at += strlen(".entry");
        at += strspn(at, " \t\r\n");
        size_t length = strlen(name);
        if (strncmp(at, name, length) == 0 && !isalnum((unsigned char)at[length]) && at[length] != '_' &&
            at[length] != '$')
            return true;
    }
    return false;
}

enum result module_function(void *module, const char *name, void **function) {
    if (module == NULL || name == NULL)
        return INVALID_VALUE;
    if (!has_entry(module, name))
        return NOT_FOUND;
    for (size_t i = 0; i < sizeof KERNELS / sizeof *KERNELS; i++)
        if (strcmp(KERNELS[i].name, name) == 0) {
            *function = (void *)(uintptr_t)&KERNELS[i];
            return SUCCESS;
        }
    return NOT_SUPPORTED; /* the module has it, but the simulator does not run PTX */
}

int kernel_parameters(const void *function) {
    const struct kernel *kernel = function;
    bool known = kernel >= KERNELS && kernel < KERNELS + sizeof KERNELS / sizeof *KERNELS;
    return known ? 1 : -1;
}

enum result launch(void *function, uint64_t threads, struct stream *stream, void **parameters) {
    const struct kernel *kernel = function;
    stream = stream_known(stream);
    if (stream == NULL || kernel < KERNELS || kernel >= KERNELS + sizeof KERNELS / sizeof *KERNELS)
        return INVALID_HANDLE;
    if (threads == 0 || parameters == NULL)
        return INVALID_VALUE;
    return kernel->run(threads, stream, parameters);
}
