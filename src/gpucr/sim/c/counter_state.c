/* The counter's numbers: one u64 and reproducible random bytes, in host memory or in device memory. */
#include "counter.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

#define CHUNK_WORDS (1u << 17) /* 1 MiB */

/* Random bytes are made and compared by several threads: benchmarks fill and verify tens of GiB again and again. */
#define WORKERS 4

static const char PTX[] =
    ".version 7.0\n"
    ".target sm_75\n"
    ".address_size 64\n"
    ".visible .entry gpucr_increment(.param .u64 pointer)\n"
    "{\n"
    "    .reg .b64 %rd<4>;\n"
    "    ld.param.u64 %rd1, [pointer];\n"
    "    cvta.to.global.u64 %rd2, %rd1;\n"
    "    atom.global.add.u64 %rd3, [%rd2], 1;\n"
    "    ret;\n"
    "}\n"
    ".visible .entry gpucr_spin(.param .u64 nanoseconds)\n"
    "{\n"
    "    .reg .pred %p<2>;\n"
    "    .reg .b64 %rd<6>;\n"
    "    ld.param.u64 %rd1, [nanoseconds];\n"
    "    mov.u64 %rd2, %globaltimer;\n"
    "again:\n"
    "    mov.u64 %rd3, %globaltimer;\n"
    "    sub.u64 %rd4, %rd3, %rd2;\n"
    "    setp.lt.u64 %p1, %rd4, %rd1;\n"
    "    @%p1 bra again;\n"
    "    ret;\n"
    "}\n";

struct part {
    void *context;
    device_pointer random;
};

static struct cuda cuda;
static const struct options *options;
static uint64_t host_counter;
static device_pointer counter;
static struct part parts[MAX_DEVICES];
static void *increment, *spin, *busy_stream;
static bool on_gpu;
static uint64_t chunks[WORKERS][CHUNK_WORDS];

static void check(int result, const char *what) {
    const char *text = NULL;
    if (result == 0)
        return;
    if (cuda.error_text(result, &text) != 0 || text == NULL)
        text = "unknown";
    fprintf(stderr, "counter: %s: %s (%d)\n", what, text, result);
    exit(EXIT_FAILURE);
}

/* splitmix64 of the index: any part can be recomputed independently. */
static uint64_t random_word(int device, uint64_t index) {
    uint64_t x = ((uint64_t)device << 48) + index + 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* One thread's share of a device's random bytes: every WORKERS-th MiB, from its own number on. */
struct share {
    int worker, device;
    const struct part *part;
    bool intact;
};

static void *fill_share(void *argument) {
    struct share *share = argument;
    uint64_t *chunk = chunks[share->worker];
    check(cuda.set_current(share->part->context), "cuCtxSetCurrent");
    for (uint64_t mib = (uint64_t)share->worker; mib < options->random_mib; mib += WORKERS) {
        for (uint64_t i = 0; i < CHUNK_WORDS; i++)
            chunk[i] = random_word(share->device, mib * CHUNK_WORDS + i);
        check(cuda.to_device(share->part->random + mib * sizeof chunks[0], chunk, sizeof chunks[0]), "cuMemcpyHtoD");
    }
    return NULL;
}

static void *verify_share(void *argument) {
    struct share *share = argument;
    uint64_t *chunk = chunks[share->worker];
    check(cuda.set_current(share->part->context), "cuCtxSetCurrent");
    for (uint64_t mib = (uint64_t)share->worker; mib < options->random_mib; mib += WORKERS) {
        check(cuda.to_host(chunk, share->part->random + mib * sizeof chunks[0], sizeof chunks[0]), "cuMemcpyDtoH");
        for (uint64_t i = 0; i < CHUNK_WORDS; i++)
            if (chunk[i] != random_word(share->device, mib * CHUNK_WORDS + i))
                share->intact = false;
    }
    return NULL;
}

/* All of one device's random bytes, by temporary threads. False: a share was not intact. */
static bool over_all_random(void *(*work)(void *), int device, const struct part *part) {
    pthread_t threads[WORKERS];
    struct share shares[WORKERS];
    bool intact = true;
    for (int i = 0; i < WORKERS; i++) {
        shares[i] = (struct share){.worker = i, .device = device, .part = part, .intact = true};
        int error = pthread_create(&threads[i], NULL, work, &shares[i]);
        if (error != 0) {
            fprintf(stderr, "counter: pthread_create: %s\n", strerror(error));
            exit(EXIT_FAILURE);
        }
    }
    for (int i = 0; i < WORKERS; i++) {
        pthread_join(threads[i], NULL);
        intact = intact && shares[i].intact;
    }
    return intact;
}

static void open_part(int index) {
    struct part *part = &parts[index];
    int device;
    check(cuda.device_get(&device, options->devices[index]), "cuDeviceGet");
    check(cuda.primary_retain(&part->context, device), "cuDevicePrimaryCtxRetain");
    check(cuda.set_current(part->context), "cuCtxSetCurrent");
    if (options->random_mib > 0) {
        check(cuda.allocate(&part->random, options->random_mib << 20), "cuMemAlloc");
        over_all_random(fill_share, options->devices[index], part);
    }
}

void state_begin(const struct options *given) {
    options = given;
    host_counter = options->start;
}

void state_to_gpu(void) {
    void *module;
    device_pointer managed;
    cuda_bind(&cuda);
    check(cuda.init(0), "cuInit");
    for (int i = options->device_count - 1; i >= 0; i--)
        open_part(i); /* the first device's context is current afterwards: the counter lives there */
    check(cuda.allocate(&counter, sizeof host_counter), "cuMemAlloc");
    check(cuda.to_device(counter, &host_counter, sizeof host_counter), "cuMemcpyHtoD");
    check(cuda.load_module(&module, PTX), "cuModuleLoadData");
    check(cuda.get_function(&increment, module, "gpucr_increment"), "cuModuleGetFunction");
    check(cuda.get_function(&spin, module, "gpucr_spin"), "cuModuleGetFunction");
    check(cuda.stream_create(&busy_stream, STREAM_NON_BLOCKING), "cuStreamCreate");
    if (options->managed)
        check(cuda.allocate_managed(&managed, 1u << 20, MANAGED_GLOBAL), "cuMemAllocManaged");
    on_gpu = true;
}

bool state_on_gpu(void) {
    return on_gpu;
}

uint64_t state_increment(void) {
    uint64_t value;
    void *parameters[] = {&counter};
    if (!on_gpu)
        return ++host_counter;
    check(cuda.set_current(parts[0].context), "cuCtxSetCurrent");
    check(cuda.launch(increment, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL), "cuLaunchKernel");
    check(cuda.stream_synchronize(NULL), "cuStreamSynchronize");
    check(cuda.to_host(&value, counter, sizeof value), "cuMemcpyDtoH");
    return value;
}

bool state_verify(void) {
    bool intact = true;
    for (int i = 0; on_gpu && intact && i < options->device_count; i++) {
        intact = over_all_random(verify_share, options->devices[i], &parts[i]);
    }
    return intact;
}

void state_busy(uint64_t duration_ms) {
    uint64_t duration_ns = duration_ms * 1000000u;
    void *parameters[] = {&duration_ns};
    if (!on_gpu)
        return;
    check(cuda.set_current(parts[0].context), "cuCtxSetCurrent");
    check(cuda.launch(spin, 1, 1, 1, 1, 1, 1, 0, busy_stream, parameters, NULL), "cuLaunchKernel");
}

void state_describe(char text[2 * TEXT_BYTES]) {
    int version = 0;
    char name[TEXT_BYTES] = "";
    if (!on_gpu) {
        strcpy(text, "driver=none device=\"none\"");
        return;
    }
    check(cuda.driver_version(&version), "cuDriverGetVersion");
    check(cuda.device_name(name, sizeof name, options->devices[0]), "cuDeviceGetName");
    snprintf(text, 2 * TEXT_BYTES, "driver=%d device=\"%s\"", version, name);
}
