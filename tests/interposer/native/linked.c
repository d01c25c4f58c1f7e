/* A program that is linked with libcuda instead of looking its functions up. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

int cuInit(unsigned), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
int cuMemAlloc_v2(uint64_t *, size_t), cuMemFree_v2(uint64_t);

int main(void) {
    void *context;
    uint64_t pointer;
    if (cuInit(0) != 0 || cuDevicePrimaryCtxRetain(&context, 0) != 0 || cuCtxSetCurrent(context) != 0 ||
        cuMemAlloc_v2(&pointer, 5 << 20) != 0)
        return 1;
    puts("ready");
    fflush(stdout);
    getchar();
    return cuMemFree_v2(pointer);
}
