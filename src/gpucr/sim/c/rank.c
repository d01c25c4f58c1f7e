/*
 * One rank: works for a while, submits an all-reduce, and so on forever. It can run ahead of the others by its queue
 * length. The value of step n is n * (rank + 1), so the sum in device memory shows whether a step was lost or doubled.
 */
#include "ranks.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "collective.h"
#include "cuda.h"

#define STATUS_BYTES 128
#define CHUNK_WORDS (1u << 13) /* 64 KiB of the random bytes are compared in each step */

static const char PTX[] =
    ".version 7.0\n"
    ".target sm_75\n"
    ".address_size 64\n"
    ".visible .entry gpucr_allreduce(.param .u64 pointer, .param .u64 value, .param .u64 communicator,\n"
    "                                .param .u32 rank)\n"
    "{\n"
    "    trap;\n" /* the simulator has its own: see no_real_driver */
    "}\n"
    ".visible .entry gpucr_spin(.param .u64 nanoseconds)\n"
    "{\n"
    "    trap;\n"
    "}\n";

static const struct job *job;
static uint32_t rank;
static struct cuda cuda;
static struct communicator *communicator;
static device_pointer totals, random_bytes; /* {u64 sum, u64 count}, and reproducible random bytes */
static void *allreduce, *spin, *compute_stream, *streams[LANE_DEPTH];
static uint64_t submitted, chunk[CHUNK_WORDS];
static bool intact = true;
static volatile sig_atomic_t paused;

static void fail(const char *what) {
    fprintf(stderr, "rank %u: %s: %s\n", rank, what, strerror(errno));
    exit(EXIT_FAILURE);
}

static void check(int result, const char *what) {
    const char *text = NULL;
    if (result == 0)
        return;
    if (cuda.error_text(result, &text) != 0 || text == NULL)
        text = "unknown";
    fprintf(stderr, "rank %u: %s: %s (%d)\n", rank, what, text, result);
    exit(EXIT_FAILURE);
}

static uint64_t splitmix64(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static void sleep_us(uint64_t duration_us) {
    struct timespec left = {.tv_sec = (time_t)(duration_us / 1000000),
                            .tv_nsec = (long)(duration_us % 1000000) * 1000};
    while (nanosleep(&left, &left) < 0 && errno == EINTR)
        ;
}

/* --- what all ranks share ---------------------------------------------------------------------------------- */

static void *map_segment(int flags) {
    int fd = open(job->segment, O_RDWR | O_CLOEXEC | flags, 0600);
    if (fd < 0)
        return NULL;
    struct stat status;
    size_t size = COMMUNICATOR_BYTES(job->ranks);
    if (((flags & O_CREAT) && ftruncate(fd, (off_t)size) < 0) || fstat(fd, &status) < 0)
        fail(job->segment);
    void *segment = NULL;
    if ((size_t)status.st_size == size) { /* otherwise rank 0 has only just made it */
        segment = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (segment == MAP_FAILED)
            fail("mmap");
    }
    close(fd);
    return segment;
}

/* Rank 0 makes the file; when all have mapped it, it is unlinked, and only the mappings are left. */
static void join(void) {
    const uint64_t look_every_us = 500;
    if (rank == 0) {
        communicator = map_segment(O_CREAT | O_EXCL);
        if (communicator == NULL)
            fail(job->segment);
        communicator->ranks = job->ranks;
        atomic_store(&communicator->magic, COMMUNICATOR_MAGIC);
    }
    while (communicator == NULL && (communicator = map_segment(0)) == NULL)
        sleep_us(look_every_us);
    while (atomic_load(&communicator->magic) != COMMUNICATOR_MAGIC)
        sleep_us(look_every_us);
    atomic_fetch_add(&communicator->joined, 1);
    while (atomic_load(&communicator->joined) < job->ranks)
        sleep_us(look_every_us);
    if (rank == 0)
        unlink(job->segment);
}

/* --- device memory ----------------------------------------------------------------------------------------- */

static void make_chunk(uint64_t index) {
    for (uint64_t i = 0; i < CHUNK_WORDS; i++)
        chunk[i] = splitmix64(((uint64_t)rank << 48) + index * CHUNK_WORDS + i);
}

static void no_real_driver(int device) {
    char name[64] = "";
    check(cuda.device_name(name, sizeof name, device), "cuDeviceGetName");
    if (strcmp(name, "Simulated GPU") != 0) {
        fprintf(stderr, "ranks: the collectives are the simulated driver's own, and this is the driver of a %s\n", name);
        exit(EXIT_FAILURE);
    }
}

static void start_cuda(void) {
    void *context, *module;
    int count, device;
    uint64_t nothing[2] = {0, 0};
    cuda_bind(&cuda);
    check(cuda.init(0), "cuInit");
    check(cuda.device_count(&count), "cuDeviceGetCount");
    check(cuda.device_get(&device, (int)rank % count), "cuDeviceGet");
    no_real_driver(device);
    check(cuda.primary_retain(&context, device), "cuDevicePrimaryCtxRetain");
    check(cuda.set_current(context), "cuCtxSetCurrent");
    check(cuda.allocate(&totals, sizeof nothing), "cuMemAlloc");
    check(cuda.to_device(totals, nothing, sizeof nothing), "cuMemcpyHtoD");
    if (job->random_mib > 0)
        check(cuda.allocate(&random_bytes, job->random_mib << 20), "cuMemAlloc");
    for (uint64_t index = 0; index < (job->random_mib << 20) / sizeof chunk; index++) {
        make_chunk(index);
        check(cuda.to_device(random_bytes + index * sizeof chunk, chunk, sizeof chunk), "cuMemcpyHtoD");
    }
    check(cuda.load_module(&module, PTX), "cuModuleLoadData");
    check(cuda.get_function(&allreduce, module, "gpucr_allreduce"), "cuModuleGetFunction");
    check(cuda.get_function(&spin, module, "gpucr_spin"), "cuModuleGetFunction");
    check(cuda.stream_create(&compute_stream, STREAM_NON_BLOCKING), "cuStreamCreate");
    for (uint32_t i = 0; i < job->queue; i++)
        check(cuda.stream_create(&streams[i], STREAM_NON_BLOCKING), "cuStreamCreate");
}

static void compare_chunk(uint64_t index) {
    static uint64_t found[CHUNK_WORDS];
    make_chunk(index);
    check(cuda.to_host(found, random_bytes + index * sizeof found, sizeof found), "cuMemcpyDtoH");
    intact = intact && memcmp(found, chunk, sizeof found) == 0;
}

/* --- steps ------------------------------------------------------------------------------------------------- */

/* The sum after `count` steps: of n * (rank + 1), over all ranks and all n from 1 to count. */
static uint64_t expected_sum(uint64_t count) {
    return count * (count + 1) / 2 * ((uint64_t)job->ranks * (job->ranks + 1) / 2);
}

/* One write of always the same length: the file never grows, and a reader finds a whole line. */
static void write_status(int fd) {
    uint64_t result[2]; /* sum and count */
    char line[STATUS_BYTES + 1];
    check(cuda.to_host(result, totals, sizeof result), "cuMemcpyDtoH");
    intact = intact && result[0] == expected_sum(result[1]) && result[1] <= submitted;
    int length = snprintf(line, sizeof line, "rank=%u pid=%d steps=%" PRIu64 " sum=%" PRIu64 " memory=%s end=%" PRIu64,
                          rank, getpid(), result[1], result[0], intact ? "ok" : "corrupt", result[1]);
    memset(line + length, ' ', (size_t)(STATUS_BYTES - 1 - length));
    line[STATUS_BYTES - 1] = '\n';
    if (pwrite(fd, line, STATUS_BYTES, 0) != STATUS_BYTES)
        fail("status");
}

static void work(void) {
    uint64_t random = splitmix64(((uint64_t)rank << 32) + submitted) % 2001, gpu_ns = job->gpu_us * 1000;
    uint64_t swing_us = job->step_us * job->skew_percent / 100;
    sleep_us(job->step_us - swing_us + swing_us * random / 1000);
    while (paused)
        sleep_us(1000);
    if (gpu_ns > 0) {
        void *parameters[] = {&gpu_ns};
        check(cuda.launch(spin, 1, 1, 1, 1, 1, 1, 0, compute_stream, parameters, NULL), "cuLaunchKernel");
        check(cuda.stream_synchronize(compute_stream), "cuStreamSynchronize");
    }
}

static void submit(void) {
    uint64_t value = ++submitted * (rank + 1);
    void *parameters[] = {&totals, &value, &communicator, &rank};
    void *stream = streams[submitted % job->queue];
    check(cuda.launch(allreduce, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL), "cuLaunchKernel");
    /* the next one's stream: with a queue of one this very collective, else the oldest that is under way */
    check(cuda.stream_synchronize(streams[(submitted + 1) % job->queue]), "cuStreamSynchronize");
}

static void on_pause(int signal_number) {
    paused = signal_number == SIGUSR1;
}

void rank_run(const struct job *given, uint32_t number, int ready_fd) {
    char path[4096];
    job = given;
    rank = number;
    signal(SIGUSR1, on_pause);
    signal(SIGUSR2, on_pause);
    snprintf(path, sizeof path, "%s/rank-%03u", job->status_dir, rank);
    int status_fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (status_fd < 0)
        fail(path);
    join();
    start_cuda();
    uint64_t chunks = (job->random_mib << 20) / sizeof chunk;
    while (true) {
        work();
        submit();
        if (chunks > 0)
            compare_chunk(submitted % chunks);
        write_status(status_fd);
        if (submitted == 1) {
            if (write(ready_fd, "", 1) != 1)
                fail("ready");
            close(ready_fd);
        }
    }
}
