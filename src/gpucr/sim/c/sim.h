/* Internal interfaces of the simulated libcuda.so.1. */
#ifndef GPUCR_SIM_H
#define GPUCR_SIM_H

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>

#include "machine.h"

/* The CUresult values that the simulator gives (numbers and texts: results.c). */
enum result {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    PEER_ACCESS_UNSUPPORTED = 217,
    OPERATING_SYSTEM = 304,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    PEER_ACCESS_ALREADY_ENABLED = 704,
    PEER_ACCESS_NOT_ENABLED = 705,
    HOST_MEMORY_ALREADY_REGISTERED = 712,
    HOST_MEMORY_NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
    STREAM_CAPTURE_UNSUPPORTED = 900,
    STREAM_CAPTURE_INVALIDATED = 901,
    UNKNOWN = 999,
};

enum process_state { RUNNING = 0, LOCKED = 1, CHECKPOINTED = 2, FAILED = 3, CHECKPOINTING = 4, RESTORING = 5 };

/* faults.c: ACTION[@PID][#NTH]=RESULT[:failed]|hang|die|delay:MS|until:PATH, comma separated. */
enum action {
    ACTION_STATE, ACTION_TID, ACTION_LOCK, ACTION_CHECKPOINT, ACTION_RESTORE, ACTION_UNLOCK, ACTION_COMPLETE,
    /* a process's own calls: cuMemCreate, and so on */
    ACTION_CREATE, ACTION_EXPORT, ACTION_IMPORT, ACTION_MAP, ACTION_ACCESS, ACTION_CONTEXT, ACTIONS
};

struct fault {
    enum { FAULT_NONE, FAULT_RESULT, FAULT_HANG, FAULT_DIE, FAULT_DELAY, FAULT_UNTIL } kind;
    enum action action;
    pid_t pid;        /* 0: any */
    uint32_t nth;     /* 0: every call, else only this one, counted from 1 */
    uint32_t value;   /* the result, or milliseconds */
    bool then_failed; /* the state afterwards is FAILED */
    char path[256];   /* the file that is waited for */
};
#define MAX_FAULTS 32
struct faults {
    uint32_t count;
    struct fault list[MAX_FAULTS];
};
bool faults_parse(struct faults *faults, const char *variable);
struct fault faults_pick(const struct faults *faults, enum action action, pid_t pid, uint32_t nth);
void fault_wait(const struct fault *fault);
void sleep_ms(uint32_t duration_ms);
void hang(void) __attribute__((noreturn));

/* thread.c */
bool thread_start(void *(*body)(void *)); /* detached, every signal blocked */
void futex_wait(_Atomic uint32_t *word, uint32_t value, uint32_t timeout_ms);
void futex_wake(_Atomic uint32_t *word);

/*
 * gate.c: the one mutex of the library, and the gate that every API call passes. The lock action closes the gate: calls
 * wait in front of it. Threads that wait for a stream are inside and have released the mutex.
 */
extern pthread_mutex_t sim_mutex;
uint64_t now_ns(void);
void wait_until_ns(uint64_t time_ns); /* with sim_mutex held; lets go of it meanwhile */
void gate_enter(void);
void gate_leave(void);
/* Closes the gate and waits for pending work. False: out of time or `give_up` was set; the gate is open again. */
bool gate_close(uint64_t deadline_ns, const _Atomic uint32_t *give_up);
void gate_open(void);

/* memory.c: one memfd per GPU in use holds its bytes; device pointers lie in an unreadable reservation. */
struct device {
    uint32_t machine_index;
    uint8_t uuid[UUID_BYTES];
    uint64_t capacity_bytes;
    struct memory *memory; /* NULL before the first context */
    struct context *primary;
    unsigned primary_users;
};
extern struct machine sim_machine;
/* All GPUs of the machine, those in CUDA_VISIBLE_DEVICES first: only these are usable, but a GPU map names all. */
extern struct device sim_devices[MAX_GPUS];
extern int sim_device_count;
extern int sim_visible_count;

enum result memory_allocate(struct device *device, uint64_t size_bytes, uint64_t *pointer);
enum result memory_allocate_managed(struct device *device, uint64_t size_bytes, uint64_t *pointer);
enum result memory_free(uint64_t pointer);
enum result memory_read(void *to, uint64_t pointer, uint64_t size_bytes);
enum result memory_write(uint64_t pointer, const void *from, uint64_t size_bytes);
enum result memory_copy(uint64_t to, uint64_t from, uint64_t size_bytes);
enum result memory_set(uint64_t pointer, uint8_t value, uint64_t size_bytes);
enum result memory_info(const struct device *device, uint64_t *free_bytes, uint64_t *total_bytes);
bool memory_has_managed(void);
#define DEVICE_FILE_NAME "gpucr-sim-device-%" PRIx64 /* the memfd of one GPU's bytes, by its reservation */
struct location { /* of device memory, of this process or another one */
    uint64_t base;   /* the address of its GPU's reservation in the owner */
    uint64_t offset; /* in the reservation, and in the memfd */
    int32_t owner;
    uint32_t reserved;
};
bool memory_locate(uint64_t pointer, struct location *at, uint64_t *size_bytes); /* the whole allocation */
int memory_file(uint64_t base); /* -1: no such reservation here, or checkpointed */
struct device *memory_device(uint64_t pointer); /* NULL: not device memory of this process */
uint64_t memory_device_bytes(const struct device *device);
uint64_t memory_total_bytes(void);

/* staging.c: device memory to the staging area and back. `midway` is called when half of it is done. */
bool staging_configure(void); /* GPUCR_SIM_STAGING. False (and a line on stderr) if malformed */
enum result hardware_open(void);
void hardware_close(void);
void hardware_look(void); /* reads a mapping of the GPU: ends in SIGSEGV while the hardware is closed */
enum result staging_fill(void (*midway)(const struct fault *), const struct fault *fault);
enum result staging_drain(void (*midway)(const struct fault *), const struct fault *fault);

/* memory.c, for staging.c: the pieces of device memory in ascending order. */
struct piece {
    int fd;
    uint64_t offset, size_bytes;
};
bool memory_next_piece(uint32_t *device, uint32_t *block, struct piece *piece);
bool memory_open_files(void);
void memory_close_files(void);
enum result memory_claim(const struct machine *machine, const uint32_t *machine_index);

/* view.c: addresses of device memory that was mapped there */
bool view_reachable(const struct location *at);
enum view_kind { VIEW_OWN, VIEW_IMPORTED, VIEW_IPC, VIEW_CUSTOM }; /* the first two are mapped with the VMM calls */
enum result view_add(uint64_t address, uint64_t size_bytes, const struct location *at, enum view_kind kind,
                     const int *shared);
bool view_remove(uint64_t address, enum view_kind kind); /* mapped with the VMM calls, or opened by CUDA IPC */
bool view_is_open(enum view_kind kind);
bool view_at(uint64_t address, struct location *at); /* what the VMM calls have mapped there */
bool view_range(uint64_t address, uint64_t *start, uint64_t *size_bytes); /* of that view */
bool view_shows(const struct location *at);
bool view_find(uint64_t pointer, uint64_t size_bytes, int *fd, uint64_t *offset);
void views_close_files(void);

/* host_memory.c, peer.c, vmm.c, event.c */
bool host_memory_holds(uint64_t pointer, uint64_t size_bytes);
void peer_note_copy(uint64_t to, uint64_t from);
bool peer_was_used(void);
bool vmm_is_imported(void);
enum result vmm_take_back(void); /* makes exported memory the process's own again */
void vmm_close_files(void);
bool graph_forbids(void); /* a call forbidden during stream capture: invalidates the capture */
void events_forget_time(void);

/* context.c */
struct context;
extern _Thread_local struct context *current_context;
enum result context_create(struct device *device, struct context **context);
enum result context_destroy(struct context *context);
struct device *context_device(const struct context *context); /* NULL: no such context */

/* execution.c: modules, kernels, streams */
struct stream;
enum result stream_create(unsigned flags, const struct device *device, struct stream **stream);
const struct device *stream_device(const struct stream *stream); /* NULL: no such stream */
enum result stream_destroy(struct stream *stream);
enum result stream_query(struct stream *stream);
enum result stream_wait(struct stream *stream);
enum result stream_done_ns(struct stream *stream, uint64_t *done_ns); /* UINT64_MAX: peers are waited for */
void streams_wait_all(bool blocking_only);
bool streams_idle(void);
void streams_forget_time(void); /* the clock of another machine is another one */
enum result module_load(const void *image, void **module);
enum result module_function(void *module, const char *name, void **function);
int kernel_parameters(const void *function); /* how many; -1: no such kernel */
enum result launch(void *function, uint64_t threads, struct stream *stream, void **parameters);

/* collective.c: work that is pending until all ranks of a job have submitted theirs. With sim_mutex held. */
struct communicator;
struct collective_arguments {
    uint64_t pointer; /* {u64 sum, u64 count} in device memory: sum += the values of all ranks, count += 1 */
    uint64_t value;
    struct communicator *communicator; /* memory that the ranks share */
    uint32_t rank;
    uint64_t ready_ns; /* when the work before it on its stream is done */
};
enum result collective_submit(const struct collective_arguments *arguments, struct stream *stream);
void collectives_take(uint64_t time_ns); /* the results of what was done by then go into device memory */
uint64_t collectives_done_ns(const struct stream *stream); /* 0: none pending; UINT64_MAX: peers are waited for */
void collectives_move(const struct stream *from, struct stream *to);
void collectives_wait(void); /* for peers, a while */

/* control.c and restore_thread.c: the channel over which callers reach the target. */
#define CONTROL_NAME "gpucr-sim-control"
#define CONTROL_MAGIC 0x6c74632d6d697367u
#define CONTROL_VERSION 3

struct gpu_pair {
    uint8_t old_uuid[UUID_BYTES];
    uint8_t new_uuid[UUID_BYTES];
};

/* custom.c: custom storage. What a target hands to its caller: one GPU's memory, in one piece, in a file. */
struct custom_part {
    uint8_t uuid[UUID_BYTES];
    uint64_t size_bytes;
    int32_t fd; /* of the target */
    uint32_t reserved;
};
struct custom_parts {
    uint32_t count;
    struct custom_part list[MAX_GPUS];
};

struct control {
    _Atomic uint64_t magic; /* written last: the page is complete */
    uint32_t version;
    int32_t owner_pid; /* as the target sees itself */
    int32_t restore_tid;
    _Atomic uint32_t state;
    _Atomic uint32_t requests; /* futex; unequal to `answers`: a request is under way */
    _Atomic uint32_t answers;  /* futex */
    _Atomic uint32_t give_up;  /* the caller of the request under way is gone */
    uint32_t action;
    uint32_t result;
    uint32_t lock_timeout_ms;
    uint32_t pair_count;
    struct gpu_pair pairs[MAX_GPUS];
    uint32_t is_custom;
    uint32_t retained; /* a bit for each GPU of the caller's machine whose primary context it has */
    struct custom_parts parts;
    struct machine machine; /* the caller's: a process may come back on another one */
    uint32_t calls[ACTIONS];
};

enum result restore_thread_start(void);
#ifdef GPUCR_SIM_OLD_DRIVER
static inline enum result fault_in_call(enum action action) {
    (void)action;
    return SUCCESS;
}
#else
enum result fault_in_call(enum action action); /* the call's result instead of what it does; SUCCESS: none */
#endif
void control_close_in_child(void);
bool watcher_start(void); /* watcher.c */

struct request {
    enum action action;
    uint32_t lock_timeout_ms;
    uint32_t pair_count;
    const struct gpu_pair *pairs;
    bool is_custom;
    uint32_t retained;
    struct custom_parts *parts; /* the answer, if it is custom */
};
enum result custom_fill(struct custom_parts *parts);  /* device memory to files of ours */
enum result custom_make(struct custom_parts *parts);  /* empty files */
enum result custom_drain(void);                       /* the files to device memory */
void custom_close_files(void);
enum result control_state(pid_t pid, int *state);
enum result control_restore_tid(pid_t pid, int *tid);
enum result control_request(pid_t pid, const struct request *request);

#endif
