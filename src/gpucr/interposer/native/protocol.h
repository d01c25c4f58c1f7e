/*
 * The protocol of the agent's socket: SOCK_SEQPACKET, one message per packet, little-endian like the machine. A message
 * is a `struct message` and `count` records; descriptors travel beside it, one for each record that says so.
 */
#ifndef GPUCR_INTERPOSER_PROTOCOL_H
#define GPUCR_INTERPOSER_PROTOCOL_H

#include <stdint.h>

#define PROTOCOL_MAGIC 0x49555047u /* "GPUI" */
#define PROTOCOL_VERSION 1
#define MOST_RECORDS 128 /* a message; the kernel passes at most 253 descriptors */

enum operation {
    HELLO = 1,  /* answer: a = its own process id, b = thread id of the agent */
    STATUS,     /* answer: the numbers of `struct status` */
    CLOSE,      /* a = milliseconds to wait. Answer: a = threads inside, b = captures; the gate is closed in any
                   case. If a thread is inside: a `struct inside` */
    OPEN,
    EXPORT,     /* a = first block, b = 1: only what other processes have. Answer: records with a descriptor each; a = the next
                   block, b = 1: that was all */
    DROP,       /* all that was exported is unmapped and released; a: an enum drops. Addresses stay reserved */
    IMPORT,     /* records with a descriptor each, which the blocks keep; a = 1: they get other memory with the same bytes where
                   there is room, and keep nothing */
    CREATE,     /* records: made again, empty, at their addresses. Answer: a descriptor for each */
    LIST,       /* a = first block. Answer: records; a = the next block, b = 1: that was all */
    KEEP,       /* one descriptor, which is kept for whoever asks, with the gate closed; a: an enum kept. None: all that are kept
                   are closed */
    FETCH,      /* a: an enum kept. Answer: that descriptor, if there is one */
    SHARE,      /* from peers: a = address in a range, b = the exporter's token. Answer as for EXPORT, a = next address */
    HOOKS = 14, /* a: an enum hooks, b = milliseconds to wait. The program's own functions are called, with the gate open. Answer:
                   a = how many there are, b = how many have failed */
    FILL = 15, /* records of blocks that are back; a = where the first one's bytes are in the kept memory, those of the others
                  follow. Their bytes are copied from there */
    SHOW = 16, /* as EXPORT, of a program that runs, and keeps its memory */
    LEND = 17, /* one descriptor of a socket, while the other end holds device memory that the program may need (room.c). None: it
                  holds nothing any more */
    DEVICES = 18, /* answer: 16 bytes for each device that CUDA has shown to the program, its GPU's UUID; a = how many */
    TRACE = 13, /* a = 1: processes of this user may trace this one despite Yama; 0: as the program has chosen */
};

enum hooks { BEFORE_FREEZE, AFTER_RESTORE, HOOK_KINDS };
#define LONGEST_HOOK_MS 60000

enum drops { DROP_OWN, DROP_ALL, DROP_IMPORTED };
enum kept { KEPT_MEMORY, KEPT_SHARES /* whose memory is whose */, KEPT };

enum code { /* above DRIVER_ERROR: CUresult + DRIVER_ERROR */
    DONE = 0,
    MALFORMED = 1,
    WRONG_VERSION = 2,
    BUSY = 3,
    GATE_NOT_CLOSED = 4,
    SOMEBODY_INSIDE = 5,
    MEMORY_IS_AWAY = 6,
    UNKNOWN_BLOCK = 7,
    NOT_AWAY = 8,
    NO_DESCRIPTORS = 9,
    NO_MEMORY = 10,
    NO_DRIVER = 11,
    NOT_HERE = 12, /* the kernel does not know it */
    TOO_SLOW = 13, /* a function of the program's still runs */
    GATE_IS_CLOSED = 14,
    CLOSED_BY_PROGRAM = 15, /* a descriptor */
    DRIVER_ERROR = 0x10000,
};

struct message {
    uint32_t magic;
    uint16_t version, operation;
    uint32_t code, count;
    uint64_t a, b;
};
_Static_assert(sizeof(struct message) == 32, "struct message");

enum flag {
    IMPORTED = 1,
    CANNOT_LEAVE = 2,
    AWAY = 4,
    SHARED = 8, /* given to other processes */
    IS_MULTICAST = 16,
    RETURNED = 32, /* its own memory, which the driver takes for imported since it came back by a descriptor */
};

struct record { /* one block */
    uint32_t block, generation;
    uint64_t bytes;
    int32_t location_type, location;
    uint32_t flags, mappings;
    uint64_t address; /* the lowest that shows it; 0: none does */
    int32_t descriptor; /* its number in the process; what is imported there is one open file (kcmp) with its owner's. -1: none */
    uint32_t reserved;
};
_Static_assert(sizeof(struct record) == 48, "struct record");

struct inside { /* one that is: which of its threads, and in which function */
    int32_t thread;
    char function[60]; /* ends with a 0 */
};
_Static_assert(sizeof(struct inside) == 64, "struct inside");

struct uuid { /* of a GPU */
    uint8_t bytes[16];
};
_Static_assert(sizeof(struct uuid) == 16, "struct uuid");

struct status {
    uint64_t gate_closed, inside, captures;
    uint64_t blocks, block_bytes;       /* that can leave */
    uint64_t imported, stuck, stuck_bytes; /* of other processes; that cannot leave */
    uint64_t foreign, captive; /* here, and imported as the driver sees it; of these, that cannot leave */
    uint64_t away;
    uint64_t small, small_bytes, managed, managed_bytes;
    uint64_t multicast, dma_buf; /* dma_buf: existing memory that was exported as one */
    uint64_t arrays, pools, pool_allocations, ipc_memory, ipc_events, peer_access, external;
    uint64_t around; /* libraries that were loaded so that their calls may not pass the gate */
    uint64_t opencl; /* contexts of OpenCL that were made on NVIDIA GPUs */
    uint64_t traceable; /* processes of this user may trace this one (TRACE) */
    uint64_t hooks;     /* the program's own functions (HOOKS) */
};
_Static_assert(sizeof(struct status) == 28 * 8, "struct status");

#endif
