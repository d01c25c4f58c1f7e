/*
 * The target's side of the checkpoint API: a thread that waits on the control page and performs the four actions. The
 * page is a memfd, which a caller finds under /proc/PID/fd regardless of namespaces, and which CRIU dumps and restores
 * together with its mapping.
 */
#include "kernel.h"
#include "sim.h"

#include <errno.h>
#include <fcntl.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static struct control *control;
static int control_fd = -1;
static struct faults faults;
static uint32_t fixed_cost_ms;
static sem_t serving;

/* GPUCR_SIM_RESTORE_OOM: what a restore that runs out of device memory leaves. */
enum { STUCK, RECOVERABLE, STATE_FAILED };
static const char *const WITHOUT_MEMORY[] = {"stuck", "recoverable", "failed", NULL};
static int without_memory = STUCK;
/* Measured on driver 580: still CHECKPOINTED, but every later restore gives 304, even if memory is free by then. */
static bool stuck;
/* Checkpointed to custom storage: there is no staging. */
static bool without_staging;

#define LOCK_COST_MS 1

static void midway(const struct fault *fault) {
    if (fault->kind == FAULT_HANG)
        hang();
    if (fault->kind == FAULT_DIE)
        kill(getpid(), SIGKILL);
}

static enum result do_lock(const struct fault *fault) {
    uint64_t timeout_ns = (uint64_t)control->lock_timeout_ms * 1000000u;
    if (control->state != RUNNING)
        return ILLEGAL_STATE;
    if (!gate_close(timeout_ns == 0 ? UINT64_MAX : now_ns() + timeout_ns, &control->give_up))
        return NOT_READY;
    midway(fault);
    sleep_ms(LOCK_COST_MS);
    control->state = LOCKED;
    return SUCCESS;
}

static enum result leave_gpus(void) {
    streams_forget_time();
    events_forget_time();
    ledger_release(&sim_machine);
    control->state = CHECKPOINTED;
    return SUCCESS;
}

/* Whether the caller holds the primary contexts of all GPUs with memory, by index in its machine. */
static bool is_retained(const uint32_t machine_index[MAX_GPUS]) {
    for (int i = 0; i < sim_device_count; i++)
        if (memory_device_bytes(&sim_devices[i]) > 0 && !(control->retained & 1u << machine_index[i]))
            return false;
    return true;
}

static enum result begin_custom_checkpoint(const struct fault *fault) {
    uint32_t machine_index[MAX_GPUS];
    for (int i = 0; i < sim_device_count; i++)
        machine_index[i] = sim_devices[i].machine_index;
    if (!is_retained(machine_index))
        return INVALID_CONTEXT;
    enum result result = custom_fill(&control->parts);
    if (result != SUCCESS)
        return result;
    midway(fault);
    control->state = CHECKPOINTING;
    return SUCCESS;
}

static enum result do_checkpoint(const struct fault *fault) {
    if (control->state != LOCKED)
        return ILLEGAL_STATE;
    if (memory_has_managed())
        return NOT_SUPPORTED;
    sleep_ms(fixed_cost_ms);
    enum result result = vmm_take_back();
    if (result == SUCCESS && control->is_custom)
        return begin_custom_checkpoint(fault);
    if (result == SUCCESS)
        result = staging_fill(midway, fault);
    return result != SUCCESS ? result : leave_gpus();
}

/*
 * The machine's index for each device, by the map or, without one, by the same UUID. False: not a valid map. Measured on
 * driver 580: a map names every GPU of the machine, also those that CUDA_VISIBLE_DEVICES hides from the process.
 */
static bool map_devices(const struct machine *machine, uint32_t machine_index[MAX_GPUS]) {
    uint32_t taken = 0;
    if (control->pair_count != 0 && control->pair_count != (uint32_t)sim_device_count)
        return false;
    for (int i = 0; i < sim_device_count; i++) {
        const uint8_t *new_uuid = control->pair_count == 0 ? sim_devices[i].uuid : NULL;
        for (uint32_t p = 0; p < control->pair_count; p++)
            if (memcmp(control->pairs[p].old_uuid, sim_devices[i].uuid, UUID_BYTES) == 0)
                new_uuid = control->pairs[p].new_uuid;
        int index = new_uuid == NULL ? -1 : machine_find(machine, new_uuid);
        if (index < 0 || (taken & 1u << index))
            return false;
        taken |= 1u << index;
        machine_index[i] = (uint32_t)index;
    }
    return true;
}

static void adopt(const struct machine *machine, const uint32_t machine_index[MAX_GPUS]) {
    sim_machine = *machine;
    for (int i = 0; i < sim_device_count; i++) {
        const struct gpu *gpu = &machine->gpus[machine_index[i]];
        sim_devices[i].machine_index = machine_index[i];
        sim_devices[i].capacity_bytes = gpu->capacity_bytes;
        memcpy(sim_devices[i].uuid, gpu->uuid, UUID_BYTES);
    }
}

static void run_out_of_memory(void) {
    stuck = without_memory == STUCK;
    if (without_memory == STATE_FAILED)
        control->state = FAILED;
}

/*
 * Measured on driver 580: the checkpoint succeeds, and no restore brings it back. Memory opened from another process
 * counts while it is open, only in the opener: the owner comes back. A peer copy counts for good.
 */
static enum result refuse_shared(void) {
    enum generation driver = driver_generation();
    if (vmm_is_imported() && driver < DRIVER_FUTURE)
        return NOT_SUPPORTED;
    if (view_is_open(VIEW_IPC) && driver < DRIVER_610)
        return INVALID_VALUE;
    if (peer_was_used() && driver < DRIVER_FUTURE) {
        stuck = true;
        return INVALID_VALUE;
    }
    return SUCCESS;
}

static enum result begin_custom_restore(const struct fault *fault) {
    enum result result = hardware_open();
    if (result == SUCCESS && (!memory_open_files() || custom_make(&control->parts) != SUCCESS)) {
        hardware_close();
        result = OUT_OF_MEMORY;
    }
    if (result == SUCCESS)
        midway(fault);
    return result;
}

/* Report the GPUs to which the memory goes, not those that it left. */
static void tell_new_uuids(void) {
    for (uint32_t part = 0, i = 0; i < (uint32_t)sim_device_count; i++)
        if (memory_device_bytes(&sim_devices[i]) > 0)
            memcpy(control->parts.list[part++].uuid, sim_devices[i].uuid, UUID_BYTES);
}

static enum result do_restore(const struct fault *fault) {
    struct machine machine = control->machine;
    uint32_t machine_index[MAX_GPUS];
    if (control->state != CHECKPOINTED)
        return ILLEGAL_STATE;
    if (stuck)
        return OPERATING_SYSTEM;
    if (!control->is_custom != !without_staging) /* an assumption: it comes back the way it left */
        return ILLEGAL_STATE;
    if (!map_devices(&machine, machine_index))
        return INVALID_VALUE;
    if (control->is_custom && !is_retained(machine_index))
        return INVALID_CONTEXT;
    sleep_ms(fixed_cost_ms);
    enum result result = refuse_shared();
    if (result != SUCCESS)
        return result;
    result = memory_claim(&machine, machine_index);
    if (result == SUCCESS) {
        result = control->is_custom ? begin_custom_restore(fault) : staging_drain(midway, fault);
        if (result != SUCCESS)
            ledger_release(&machine);
    }
    if (result == OUT_OF_MEMORY)
        run_out_of_memory();
    if (result != SUCCESS)
        return result;
    adopt(&machine, machine_index);
    if (control->is_custom)
        tell_new_uuids();
    control->state = control->is_custom ? RESTORING : LOCKED;
    return SUCCESS;
}

/* cuCheckpointOperationComplete: completes a custom checkpoint or restore. */
static enum result do_complete(const struct fault *fault) {
    if (control->state != CHECKPOINTING && control->state != RESTORING)
        return ILLEGAL_STATE;
    midway(fault);
    if (control->state == CHECKPOINTING) {
        custom_close_files();
        hardware_close();
        without_staging = true;
        return leave_gpus();
    }
    enum result result = custom_drain();
    if (result != SUCCESS)
        return result;
    custom_close_files();
    without_staging = false;
    control->state = LOCKED;
    return SUCCESS;
}

static enum result do_unlock(const struct fault *fault) {
    if (control->state != LOCKED)
        return ILLEGAL_STATE;
    midway(fault);
    sleep_ms(LOCK_COST_MS);
    control->state = RUNNING;
    gate_open();
    return SUCCESS;
}

static enum result perform(enum action action) {
    if (action > ACTION_COMPLETE)
        return INVALID_VALUE;
    struct fault fault = faults_pick(&faults, action, 0, ++control->calls[action]);
    fault_wait(&fault);
    if (fault.kind == FAULT_RESULT) {
        if (fault.then_failed)
            control->state = FAILED;
        return (enum result)fault.value;
    }
    switch (action) {
    case ACTION_LOCK:
        return do_lock(&fault);
    case ACTION_CHECKPOINT:
        return do_checkpoint(&fault);
    case ACTION_RESTORE:
        return do_restore(&fault);
    case ACTION_UNLOCK:
        return do_unlock(&fault);
    case ACTION_COMPLETE:
        return do_complete(&fault);
    default:
        return INVALID_VALUE;
    }
}

enum result fault_in_call(enum action action) {
    struct fault fault = faults_pick(&faults, action, 0, ++control->calls[action]);
    fault_wait(&fault);
    midway(&fault);
    return fault.kind == FAULT_RESULT ? (enum result)fault.value : SUCCESS;
}

static void *serve(void *unused) {
    (void)unused;
    control->restore_tid = own_thread();
    atomic_store(&control->magic, CONTROL_MAGIC);
    sem_post(&serving);
    while (true) {
        uint32_t requests = atomic_load(&control->requests);
        if (requests == atomic_load(&control->answers)) {
            futex_wait(&control->requests, requests, 0);
            continue;
        }
        control->result = perform((enum action)control->action);
        atomic_store(&control->answers, requests);
        futex_wake(&control->answers);
    }
    return NULL;
}

static bool control_create(void) {
    control_fd = new_memory_file(CONTROL_NAME);
    if (control_fd < 0 || ftruncate(control_fd, sizeof *control) < 0)
        return false;
    control = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, control_fd, 0);
    if (control == MAP_FAILED)
        return false;
    madvise(control, sizeof *control, MADV_DONTFORK);
    control->version = CONTROL_VERSION;
    control->owner_pid = getpid();
    return true;
}

static bool start_serving(void) {
    sem_init(&serving, 0, 0);
    if (!thread_start(serve))
        return false;
    while (sem_wait(&serving) < 0 && errno == EINTR)
        ;
    return true;
}

enum result restore_thread_start(void) {
    if (!faults_parse(&faults, "GPUCR_SIM_FAULTS") || !staging_configure() ||
        !environment_word("GPUCR_SIM_RESTORE_OOM", WITHOUT_MEMORY, &without_memory))
        return UNKNOWN;
    fixed_cost_ms = (uint32_t)environment_number("GPUCR_SIM_FIXED_COST_MS", 300);
    if (!control_create() || !start_serving()) {
        if (control_fd >= 0)
            close(control_fd);
        control_fd = -1;
        return OPERATING_SYSTEM;
    }
    return SUCCESS;
}

void control_close_in_child(void) {
    close(control_fd);
    control_fd = -1;
}
