/* The counter program: its options, its numbers on the GPU, its network side. */
#ifndef GPUCR_SIM_COUNTER_H
#define GPUCR_SIM_COUNTER_H

#include <stdbool.h>
#include <stdint.h>

#define MAX_DEVICES 16
#define MAX_CHILDREN 64
#define TEXT_BYTES 128

struct options {
    int port;
    uint64_t random_mib;
    uint64_t start;
    int devices[MAX_DEVICES];
    int device_count;
    bool managed;
    bool no_cuda;
    bool cpu_parent;
    bool by_file;
    bool no_shm;
    int children;
    const char *cuda_after; /* NULL: at once */
};

/* counter_state.c. Every failure of the driver ends the program with the driver's text. */
void state_begin(const struct options *options); /* host memory only */
void state_to_gpu(void);
bool state_on_gpu(void);
uint64_t state_increment(void);
bool state_verify(void);
void state_busy(uint64_t duration_ms);
void state_describe(char text[2 * TEXT_BYTES]); /* driver=13000 device="NAME" */

#endif
