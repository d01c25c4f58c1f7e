/* Interfaces between the parts of the interposer. */
#ifndef GPUCR_INTERPOSER_H
#define GPUCR_INTERPOSER_H

#include "descriptors.h"
#include "gate.h"

#include <signal.h>
#include <stdatomic.h>
#include <sys/types.h>

#define GRANULARITY ((size_t)2 << 20) /* of VMM memory, on every GPU so far */
#define CHUNK_BYTES ((size_t)1 << 30) /* a large allocation is made of several blocks, so that one can be renewed at a time */
#define MAX_DEVICES 64

/* Memory that stays with the driver is counted, so that gpucr knows about it. */
enum counter { ARRAYS, POOLS, POOL_ALLOCATIONS, IPC_MEMORY, IPC_EVENTS, PEER_ACCESS, EXTERNAL, AROUND, OPENCL, COUNTERS };
extern _Atomic int64_t counters[COUNTERS];

/* interposer.c */
extern _Atomic bool copies_wait; /* synchronous copies end when the GPU has done them (SYNC_MEMOPS) */
uint64_t now_ns(void);
void after_call(const struct slot *slot, const struct frame *frame, result result);

/* symbols.c */
void symbols_describe(struct slot *slot);   /* its role, by its name */
void *symbols_resolve(struct slot *slot); /* the target of a stub that a program was linked with */
void symbols_in_child(void);
bool symbols_complete(void);              /* the driver has every function that is needed */

/* opencl.c */
void *opencl_dlsym(void *handle, const char *name);

/* table.c: blocks of physical memory, where they are mapped, and address ranges that were given out */
struct block {
    handle real;
    size_t bytes; /* 0: not known (imported) */
    struct properties asked;
    bool live, imported, exportable;
    bool returned;   /* the process's own memory, which came back by a descriptor: the driver does not export it again */
    bool given_out;  /* by the program, to other processes */
    bool multicast;  /* not memory, but what several GPUs' memory is bound to: it stays with the driver */
    bool registered; /* a dma-buf was made of it */
    bool stays;      /* what it was bound to or exported as cannot be made again */
    bool dropped;    /* away */
    struct owned descriptor; /* by which it went out or came in (shared.c) */
    uint32_t given;  /* to which client of the agent (carry.c counts them) */
    uint16_t generation;
    uint32_t index;
    unsigned references, mappings; /* the program's handles, and addresses that show it */
    address only;                  /* the one address that shows it; 0: there are more, or none */
};
struct mapping {
    address start;
    size_t bytes, offset;
    uint32_t block;
    unsigned access_count;
    struct access *access;
};
enum kind { OWN, SMALL, MANAGED, OPENED /* of another process, by legacy IPC */ };
struct range {
    address start;
    size_t bytes, reserved;
    enum kind kind;
    context context;
    int device;
    bool freed; /* by the program, while a capture was under way */
    bool synchronous;  /* SYNC_MEMOPS was asked for */
    bool registered;   /* SMALL: a dma-buf was made of it */
    uint64_t number;   /* BUFFER_ID, and what tells it from others that were at its address */
    uint64_t origin;   /* OPENED: the exporter's token, and the address there */
    address origin_start;
    unsigned opened;   /* OPENED: how many times */
};
struct sorted { /* records that begin with an address */
    size_t width, count, room;
    char *records;
};
extern struct sorted mappings, ranges;

void table_lock(void);
void table_unlock(void);
void table_in_child(void);
void *sorted_at(const struct sorted *list, size_t place);
size_t sorted_place(const struct sorted *list, address start); /* of the first record at or behind `start` */
void *sorted_insert(struct sorted *list, address start);       /* zeroed but for its start. NULL: no memory */
void sorted_remove(struct sorted *list, size_t place);
uint64_t range_number(void); /* of a new one */
struct range *range_of(address pointer); /* that holds the pointer; NULL */
struct mapping *mapping_of(address pointer);

struct block *block_new(handle real, size_t bytes, const struct properties *asked); /* NULL: no memory */
struct block *block_of(handle virtual);
struct block *block_number(uint32_t index, uint16_t generation);
uint32_t block_index(const struct block *block);
uint32_t block_count(void); /* one more than the highest index */
struct block *block_at(uint32_t index); /* of a live block */
handle block_handle(const struct block *block);
void block_forget_unused(struct block *block); /* releases it when nothing refers to it any more */
struct mapping *mapping_add(address start, size_t bytes, size_t offset, struct block *block);
size_t mapping_next(const struct block *block, size_t place); /* of those that show it, at or behind a place; or the count */
void mapping_remove(size_t place);
bool mapping_set_access(struct mapping *mapping, const struct access *access, size_t count);
void context_note(int device, context context);
context context_of(int device); /* any of the device's that is alive; NULL */
void context_forget(context context);

/* shared.c */
void shared_begin(void); /* many will be kept: once for all of them */
void shared_end(void);
void shared_keep(struct block *block, int descriptor); /* a copy of it */
void shared_forget(struct block *block);
result shared_export(struct block *block, int *descriptor);
int shared_number(const struct block *block); /* the number of what is kept; -1: nothing is */
void shared_in_child(void);

/* vmm.c */
result create_exportable(handle *made, size_t bytes, const struct properties *asked, bool *exportable);

/* allocate.c */
void range_take_apart(address start, size_t reserved); /* its mappings, and the addresses */
void range_give_up(address start, context owner);      /* waits for what uses it; with the table not locked */
void free_what_was_put_off(void); /* with the table locked */
/* A context's memory is freed with it: for the destroyed one, or (NULL) for all gone contexts of a device. */
void forget_context(context destroyed, int device);

/* peers.c: which devices can access a device's memory: itself, and those with peer access */
unsigned peers_access(int owner, struct access access[MAX_DEVICES]);

/* ipc.c: legacy IPC. Another interposer asks for the blocks of a range that this program shares, through its agent. */
uint64_t ipc_token(void);
struct range *ipc_range(address start, uint64_t token); /* that a handle names; NULL: it is gone */
void ipc_in_child(void);

/* tracer.c */
uint32_t tracer_open(bool to_all); /* an enum code */
bool tracer_is_open(void);
void tracer_in_child(void);

/* hooks.c: the program's functions, called by a separate thread */
uint64_t hooks_registered(void);
/* Calls those of `kind` (an enum hooks) and waits for them. Returns an enum code, how many there are, and how many
   failed. */
uint32_t hooks_call(uint64_t kind, uint64_t wait_ms, uint64_t *count, uint64_t *bad);
void hooks_keep_mask(const sigset_t *mask); /* the program's signal mask: theirs */
void hooks_prepare(void);
void hooks_in_child(void);

/* room.c: device memory that gpucr holds while the program runs makes way for the program's */
uint32_t room_lend(int descriptor); /* an enum code. -1: nothing is held any more */
bool room_is_made(void); /* a call has found no memory: whether it is worth another attempt. May wait for gpucr */
void room_in_child(void);

/* serve.c */
void agent_start(void);
bool agent_serves(void);   /* it has a place where it can be found */
void agent_be_found(void); /* makes it listen again, if somebody has removed its name */
void agent_before_fork(void);
void agent_in_parent(void);
void agent_in_child(void);

#endif
