/* graph.c: what the launch of a kernel needs to know of stream capture. */
#ifndef GPUCR_SIM_GRAPH_H
#define GPUCR_SIM_GRAPH_H

#include "calls.h"

bool graph_captures(const struct stream *stream);
enum result graph_take(void *function, uint64_t threads, void **parameters); /* instead of the launch */

#endif
