/* The ranks program: what the parent hands to each rank. */
#ifndef GPUCR_SIM_RANKS_H
#define GPUCR_SIM_RANKS_H

#include <stdint.h>

struct job {
    uint32_t ranks;
    const char *status_dir;
    uint64_t step_us, gpu_us; /* between two collectives: on the CPU, and then on the GPU */
    uint64_t skew_percent;    /* a step takes step_us, plus or minus so much of it */
    uint32_t queue;           /* collectives under way before a rank waits for the oldest */
    uint64_t random_mib;
    char segment[64]; /* the file that rank 0 makes for all */
};

/* rank.c: one rank's whole life. Says on `ready_fd` when its first step is done. */
void rank_run(const struct job *job, uint32_t rank, int ready_fd) __attribute__((noreturn));

#endif
