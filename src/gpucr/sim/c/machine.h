/* The simulated machine as both libraries see it: its GPUs, /proc, and the ledger of device memory in use. */
#ifndef GPUCR_SIM_MACHINE_H
#define GPUCR_SIM_MACHINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define MAX_GPUS 16
#define UUID_BYTES 16
#define EXPORT __attribute__((visibility("default")))

struct gpu {
    uint8_t uuid[UUID_BYTES];
    uint64_t capacity_bytes;
};

/* Plain data without pointers: a caller hands its machine to the target through shared memory. */
struct machine {
    char name[64];
    char state_dir[192];
    uint32_t gpu_count;
    struct gpu gpus[MAX_GPUS];
};

/* machine.c: GPUCR_SIM_GPUS, GPUCR_SIM_MACHINE, GPUCR_SIM_STATE. False (and a line on stderr) if malformed. */
bool machine_from_environment(struct machine *machine);
int machine_find(const struct machine *machine, const uint8_t uuid[UUID_BYTES]); /* index or -1 */
void gpu_name(uint32_t index, char *text, size_t size);
void uuid_text(const uint8_t uuid[UUID_BYTES], char text[41]); /* GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx */
uint64_t environment_number(const char *name, uint64_t otherwise);
/* The variable's place in the NULL-terminated list; unset: *chosen stays. False (and a line on stderr): none of them. */
bool environment_word(const char *name, const char *const words[], int *chosen);

/* abilities.c */
enum generation { DRIVER_580, DRIVER_610, DRIVER_615, DRIVER_FUTURE };
enum generation driver_generation(void);
bool machine_has_peers(void); /* NVLink, or PCIe that lets GPUs read each other */
bool machine_has_mig(void);

/* procfs.c */
struct process_status {
    char state;       /* R, S, Z, ... */
    pid_t leader;     /* thread-group leader, in the pid namespace of /proc */
    pid_t inner_pid;  /* the leader's pid as the process itself sees it */
};
bool process_status(pid_t pid, struct process_status *status);
bool process_start_ms(pid_t pid, uint64_t *start_ms); /* after boot. False: no such process, or a zombie */
bool same_start(uint64_t one_ms, uint64_t other_ms);
uint64_t pid_namespace_of(pid_t pid); /* 0: no such process, or not ours to look into */
pid_t pid_from_inner(uint64_t pid_namespace, pid_t inner_pid); /* -1: no such process can be seen */
pid_t thread_from_inner(pid_t leader, pid_t inner_tid); /* -1: no such thread */
bool thread_is_frozen(pid_t leader, pid_t tid);
char thread_state(pid_t leader, pid_t tid); /* R, S, T, t, Z, ...; X: no such thread */

/* ledger.c: one small file per process that holds device memory. All return 0 or a negative errno. */
struct holding {
    pid_t pid; /* 0: not to be seen from here */
    bool mine; /* pids of several namespaces can be equal */
    uint64_t bytes[MAX_GPUS]; /* by index in the machine */
};
/* -ENOMEM: no room. `is_less`: than before, so that there is. */
int ledger_claim(const struct machine *machine, const uint64_t wanted_bytes[MAX_GPUS], bool is_less);
int ledger_release(const struct machine *machine);
int ledger_read(const struct machine *machine, struct holding *holdings, size_t room, size_t *count);
int ledger_used(const struct machine *machine, uint64_t used_bytes[MAX_GPUS]);
int ledger_open(const struct machine *machine, bool locked); /* the state folder */

/* exported.c */
#define EXPORTED_MAGIC 0x6d6d762d6d697368u
struct exported { /* behind the bytes in such a file */
    uint64_t magic, size_bytes, owner_namespace, owner_start_ms;
    int32_t owner; /* as it sees itself; 0: it has freed the memory */
    uint8_t gpu[UUID_BYTES];
    uint8_t properties[32]; /* CUmemAllocationProp */
    uint32_t reserved;
};
int exported_create(const struct machine *machine, const struct exported *content); /* -1: failed */
void exported_disown(int fd);                              /* its maker has freed the memory, others have it */
bool exported_is(int fd, struct exported *content);        /* false: it is something else */
/* Whether all of them together, which may count for processes too, are no more than this. False: look closely. */
bool exported_fits(const struct machine *machine, int folder, const uint64_t free_bytes[MAX_GPUS]);
/* Adds what counts for no process. `locked`: the folder is, and files that nobody has any more are removed. */
void exported_count(const struct machine *machine, int folder, bool locked, uint64_t used_bytes[MAX_GPUS]);

#endif
