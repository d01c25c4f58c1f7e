/* Nanoseconds per driver call: COUNT calls of one kind in each of THREADS threads. Needs libcuda alone. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int (*init)(unsigned), (*retain)(void **, int), (*use)(void *), (*query)(void *), (*set)(uint64_t, unsigned char, size_t),
    (*copy)(uint64_t, const void *, size_t), (*allocate)(uint64_t *, size_t), (*release)(uint64_t), (*finish)(void);
static void *context;
static const char *kind;
static long count;
static pthread_barrier_t together;

static void *find(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (found == NULL)
        exit(fprintf(stderr, "libcuda has no %s\n", name));
    return found;
}

static int call(uint64_t memory, const char *host) {
    uint64_t large;
    if (strcmp(kind, "query") == 0) {
        int result = query(NULL);
        return result == 600 ? 0 : result; /* not ready is an answer */
    }
    if (strcmp(kind, "launch") == 0)
        return set(memory, 1, 4);
    if (strcmp(kind, "copy") == 0)
        return copy(memory, host, 4096);
    int result = allocate(&large, (size_t)32 << 20);
    return result != 0 ? result : release(large);
}

static void *work(void *failed) {
    static const char host[4096];
    uint64_t memory;
    int result = use(context) | allocate(&memory, 4096);
    pthread_barrier_wait(&together);
    for (long i = 0; i < count && result == 0; i++)
        result = call(memory, host);
    if (result != 0)
        *(int *)failed = result;
    pthread_barrier_wait(&together);
    return NULL;
}

int main(int argc, char **argv) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (argc != 4 || library == NULL)
        return fprintf(stderr, "usage: KIND COUNT THREADS, with libcuda.so.1 in reach\n"), 2;
    init = find(library, "cuInit"), retain = find(library, "cuDevicePrimaryCtxRetain"), use = find(library, "cuCtxSetCurrent");
    query = find(library, "cuStreamQuery"), set = find(library, "cuMemsetD8_v2"), copy = find(library, "cuMemcpyHtoD_v2");
    allocate = find(library, "cuMemAlloc_v2"), release = find(library, "cuMemFree_v2"), finish = find(library, "cuCtxSynchronize");
    kind = argv[1], count = atol(argv[2]);
    int threads = atoi(argv[3]), failed = 0;
    pthread_t thread;
    struct timespec begin, end;
    if (init(0) != 0 || retain(&context, 0) != 0 || use(context) != 0)
        return fprintf(stderr, "CUDA does not start\n"), 1;
    pthread_barrier_init(&together, NULL, threads + 1);
    for (int i = 0; i < threads; i++)
        if (pthread_create(&thread, NULL, work, &failed) != 0)
            return fprintf(stderr, "no thread\n"), 1;
    pthread_barrier_wait(&together);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    pthread_barrier_wait(&together);
    clock_gettime(CLOCK_MONOTONIC, &end);
    if (failed != 0 || finish() != 0)
        return fprintf(stderr, "CUDA result %d\n", failed), 1;
    printf("%.1f\n", ((end.tv_sec - begin.tv_sec) * 1e9 + (double)(end.tv_nsec - begin.tv_nsec)) / (double)count);
    return 0;
}
