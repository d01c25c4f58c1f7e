/*
 * The memory that the ranks of one job share for their collectives, like the segment of NCCL's shared-memory transport:
 * rank 0 makes a file in /dev/shm, all map it, then it is unlinked. The program makes it; the library works on it.
 */
#ifndef GPUCR_SIM_COLLECTIVE_H
#define GPUCR_SIM_COLLECTIVE_H

#include <stdatomic.h>
#include <stdint.h>

#define COMMUNICATOR_MAGIC 0x6d6f632d6d697367u
#define MAX_RANKS 256
#define LANE_DEPTH 64u /* power of two: a number modulo it finds its place */

/* One rank's part: only that rank writes it, so it is never half-written, wherever the rank is interrupted. */
struct lane {
    _Atomic uint64_t submitted; /* collectives; written last */
    uint64_t value[LANE_DEPTH];
    uint64_t ready_ns[LANE_DEPTH]; /* when the work before it on its stream is done */
};

struct communicator {
    _Atomic uint64_t magic; /* written last */
    uint32_t ranks;
    _Atomic uint32_t joined;
    _Atomic uint32_t completions; /* futex: changes whenever a collective has been submitted by all */
    struct lane lanes[];
};

#define COMMUNICATOR_BYTES(ranks) (sizeof(struct communicator) + (ranks) * sizeof(struct lane))

#endif
