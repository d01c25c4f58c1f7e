/* Graphs made by stream capture: kernels launched into a capturing stream are recorded instead of run. */
#include "graph.h"

#include <stdlib.h>
#include <string.h>

struct node {
    void *function;
    uint64_t threads;
    uint64_t parameter; /* the kernels that a graph can hold have one */
    struct node *next;
};

struct graph {
    struct node *first, **last;
};

/* One capture at a time: it is a property of the stream, and the simulator's streams know nothing about graphs. */
static struct stream *capturing;
static struct graph *captured;
static bool spoilt; /* invalidated by a forbidden call; the capture lasts until it is ended */

bool graph_captures(const struct stream *stream) {
    return capturing != NULL && stream == capturing;
}

bool graph_forbids(void) {
    spoilt = capturing != NULL;
    return spoilt;
}

enum result graph_take(void *function, uint64_t threads, void **parameters) {
    struct node *node = calloc(1, sizeof *node);
    if (node == NULL)
        return OUT_OF_MEMORY;
    if (parameters == NULL || kernel_parameters(function) != 1) {
        free(node);
        return kernel_parameters(function) < 0 ? INVALID_HANDLE : NOT_SUPPORTED;
    }
    node->function = function;
    node->threads = threads;
    memcpy(&node->parameter, parameters[0], sizeof node->parameter);
    *captured->last = node;
    captured->last = &node->next;
    return SUCCESS;
}

static struct graph *new_graph(void) {
    struct graph *graph = calloc(1, sizeof *graph);
    if (graph != NULL)
        graph->last = &graph->first;
    return graph;
}

static enum result begin(struct stream *stream) {
    if ((uintptr_t)stream <= 2 || stream_query(stream) == INVALID_HANDLE)
        return STREAM_CAPTURE_UNSUPPORTED; /* the default stream cannot be captured */
    if (capturing != NULL)
        return NOT_SUPPORTED;
    captured = new_graph();
    if (captured == NULL)
        return OUT_OF_MEMORY;
    capturing = stream;
    spoilt = false;
    return SUCCESS;
}

EXPORT int cuStreamBeginCapture_v2(struct stream *stream, int mode) {
    (void)mode;
    GATED(current_device() == NULL ? INVALID_CONTEXT : begin(stream));
}

static void destroy(struct graph *graph) {
    while (graph->first != NULL) {
        struct node *node = graph->first;
        graph->first = node->next;
        free(node);
    }
    free(graph);
}

static enum result end(struct stream *stream, struct graph **graph) {
    if (!graph_captures(stream))
        return INVALID_VALUE;
    *graph = spoilt ? NULL : captured;
    if (spoilt)
        destroy(captured);
    capturing = NULL;
    captured = NULL;
    return spoilt ? STREAM_CAPTURE_INVALIDATED : SUCCESS;
}

static enum result is_capturing(const struct stream *stream, int *status) {
    *status = !graph_captures(stream) ? 0 : spoilt ? 2 : 1;
    return SUCCESS;
}

EXPORT int cuStreamIsCapturing(struct stream *stream, int *status) {
    GATED(status == NULL ? INVALID_VALUE : is_capturing(stream, status));
}

EXPORT int cuStreamEndCapture(struct stream *stream, struct graph **graph) {
    GATED(graph == NULL ? INVALID_VALUE : end(stream, graph));
}

/* An executable graph is a copy: its source graph may be destroyed. */
static enum result instantiate(struct graph **executable, const struct graph *graph) {
    struct graph *copy = new_graph();
    if (copy == NULL)
        return OUT_OF_MEMORY;
    for (const struct node *node = graph->first; node != NULL; node = node->next) {
        struct node *made = malloc(sizeof *made);
        if (made == NULL) {
            destroy(copy);
            return OUT_OF_MEMORY;
        }
        *made = *node;
        made->next = NULL;
        *copy->last = made;
        copy->last = &made->next;
    }
    *executable = copy;
    return SUCCESS;
}

EXPORT int cuGraphInstantiateWithFlags(struct graph **executable, struct graph *graph, unsigned long long flags) {
    GATED(executable == NULL || graph == NULL || flags != 0 ? INVALID_VALUE : instantiate(executable, graph));
}

static enum result run(const struct graph *graph, struct stream *stream) {
    enum result result = SUCCESS;
    for (struct node *node = graph->first; node != NULL && result == SUCCESS; node = node->next) {
        void *parameters[] = {&node->parameter};
        result = launch(node->function, node->threads, stream, parameters);
    }
    return result;
}

EXPORT int cuGraphLaunch(struct graph *executable, struct stream *stream) {
    GATED(executable == NULL ? INVALID_VALUE : run(executable, stream));
}

static enum result destroy_known(struct graph *graph) {
    if (graph == NULL)
        return INVALID_VALUE;
    destroy(graph);
    return SUCCESS;
}

EXPORT int cuGraphExecDestroy(struct graph *executable) {
    GATED(destroy_known(executable));
}

EXPORT int cuGraphDestroy(struct graph *graph) {
    GATED(destroy_known(graph));
}
