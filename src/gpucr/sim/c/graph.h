/* graph.c: what a kernel launch needs to know about stream capture. */
#ifndef GPUCR_SIM_GRAPH_H
#define GPUCR_SIM_GRAPH_H

#include "calls.h"

bool graph_captures(const struct stream *stream);
enum result graph_take(void *function, uint64_t threads, void **parameters); /* instead of the launch */

#endif
