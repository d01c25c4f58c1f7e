/* A libcuda.so.1 for tests of the gate: calls that call back, that take many arguments, and a driver that does nothing. */
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#define NOTHING(name) \
    int name(void) { return 0; }

NOTHING(cuInit)
NOTHING(cuMemAlloc_v2)
NOTHING(cuMemFree_v2)
NOTHING(cuMemCreate)
NOTHING(cuMemRelease)
NOTHING(cuMemAddressReserve)
NOTHING(cuMemAddressFree)
NOTHING(cuMemMap)
NOTHING(cuMemUnmap)
NOTHING(cuMemSetAccess)
NOTHING(cuMemExportToShareableHandle)
NOTHING(cuMemImportFromShareableHandle)
NOTHING(cuMemcpyHtoD_v2)
NOTHING(cuCtxGetCurrent)
NOTHING(cuCtxSetCurrent)
NOTHING(cuCtxGetDevice)
NOTHING(cuCtxSynchronize)
NOTHING(cuMemcpyDtoD_v2)
NOTHING(cuStreamBeginCapture_v2)
NOTHING(cuStreamDestroy_v2)

static int capturing;

int cuTestCapturing(int value) {
    capturing = value;
    return 0;
}

int cuStreamIsCapturing(void *stream, int *status) {
    (void)stream;
    *status = capturing;
    return 0;
}

int cuStreamEndCapture(void *stream, void *graph) {
    (void)stream;
    return graph == NULL ? 901 : 0;
}

int cuTestCall(void (*callback)(void *), void *argument) {
    callback(argument);
    return 0;
}

int cuTestWait(int seconds) {
    while ((seconds = (int)sleep((unsigned)seconds)) > 0)
        ;
    return 0;
}

struct handle {
    char bytes[64];
};

/* As many words on the stack as the longest list of the driver, doubles, and a struct by value. */
int cuTestSum(long a, long b, long c, long d, long e, long f, long g, long h, long i, long j, long k, long l, long m, long n,
              long o, long p, double x, double y) {
    return (int)(a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * h + 9 * i + 10 * j + 11 * k + 12 * l + 13 * m +
                 14 * n + 15 * o + 16 * p + (long)(100 * x) + (long)(1000 * y));
}

int cuTestStruct(int *sum, struct handle handle, unsigned flags) {
    *sum = 0;
    for (size_t i = 0; i < sizeof handle.bytes; i++)
        *sum += handle.bytes[i];
    return (int)flags;
}
