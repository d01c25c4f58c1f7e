/* The caller's side of the checkpoint API: find the target's control page, post a request, wait for the answer. */
#include "sim.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

struct link {
    int fd;    /* the target's memfd, opened again: a lock of its own */
    int pidfd;
    pid_t leader, restore_tid; /* in the caller's pid namespace */
    struct control *control;
};

static struct control *map_control(const char *path, int *fd) {
    struct stat status;
    *fd = open(path, O_RDWR | O_CLOEXEC);
    if (*fd < 0)
        return NULL;
    if (fstat(*fd, &status) == 0 && status.st_size >= (off_t)sizeof(struct control)) {
        void *page = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
        if (page != MAP_FAILED)
            return page;
    }
    close(*fd);
    return NULL;
}

static bool is_control_of(const struct control *control, pid_t inner_pid) {
    return atomic_load(&control->magic) == CONTROL_MAGIC && control->version == CONTROL_VERSION &&
           control->owner_pid == inner_pid; /* a forked child may hold its parent's descriptor */
}

static enum result find_control(pid_t leader, pid_t inner_pid, struct link *link) {
    char path[300], name[300];
    snprintf(path, sizeof path, "/proc/%d/fd", leader);
    DIR *descriptors = opendir(path);
    if (descriptors == NULL)
        return OPERATING_SYSTEM; /* gone, or permission denied */
    link->control = NULL;
    for (struct dirent *entry; link->control == NULL && (entry = readdir(descriptors)) != NULL;) {
        snprintf(path, sizeof path, "/proc/%d/fd/%s", leader, entry->d_name);
        ssize_t length = readlink(path, name, sizeof name - 1);
        if (length < 0)
            continue;
        name[length] = '\0';
        if (strncmp(name, "/memfd:" CONTROL_NAME, strlen("/memfd:" CONTROL_NAME)) != 0)
            continue;
        link->control = map_control(path, &link->fd);
        if (link->control != NULL && !is_control_of(link->control, inner_pid)) {
            munmap(link->control, sizeof *link->control);
            close(link->fd);
            link->control = NULL;
        }
    }
    closedir(descriptors);
    return link->control == NULL ? NOT_INITIALIZED : SUCCESS;
}

static enum result link_open(pid_t pid, struct link *link) {
    struct process_status status;
    if (pid <= 0 || !process_status(pid, &status) || status.state == 'Z' || status.state == 'X')
        return OPERATING_SYSTEM;
    link->leader = status.leader;
    link->pidfd = (int)syscall(SYS_pidfd_open, status.leader, 0);
    if (link->pidfd < 0)
        return OPERATING_SYSTEM;
    enum result result = find_control(status.leader, status.inner_pid, link);
    if (result != SUCCESS) {
        close(link->pidfd);
        return result;
    }
    link->restore_tid = thread_from_inner(link->leader, link->control->restore_tid);
    return SUCCESS;
}

static void link_close(struct link *link) {
    munmap(link->control, sizeof *link->control);
    close(link->fd);
    close(link->pidfd);
}

/*
 * The pidfd alone is not enough: it does not signal a killed process while a tracer, perhaps our own caller, has not
 * reaped the threads that it held.
 */
static bool target_lives(const struct link *link) {
    struct pollfd ended = {.fd = link->pidfd, .events = POLLIN};
    char state = thread_state(link->leader, link->restore_tid);
    return state != 'X' && state != 'Z' && poll(&ended, 1, 0) == 0;
}

/*
 * The driver queries the restore thread: while that thread is stopped (SIGSTOP, a tracer), no call returns except the
 * one for the thread's id. Measured on driver 580, with all threads stopped and with all but this one; a frozen thread
 * cannot answer either. False: the target died.
 */
static bool wait_runnable(const struct link *link) {
    const uint32_t look_every_ms = 20;
    char state;
    while ((state = thread_state(link->leader, link->restore_tid)) == 'T' || state == 't' ||
           thread_is_frozen(link->leader, link->restore_tid))
        sleep_ms(look_every_ms);
    return target_lives(link);
}

/* Waits until the current request is answered. False: the target died. */
static bool wait_answered(const struct link *link) {
    const uint32_t look_every_ms = 20;
    struct control *control = link->control;
    uint32_t answers;
    while ((answers = atomic_load(&control->answers)) != atomic_load(&control->requests)) {
        futex_wait(&control->answers, answers, look_every_ms);
        if (!target_lives(link))
            return false;
    }
    return true;
}

static void fill_request(struct control *control, const struct request *request, const struct machine *machine) {
    control->action = request->action;
    control->lock_timeout_ms = request->lock_timeout_ms;
    control->pair_count = request->pair_count;
    if (request->pair_count > 0)
        memcpy(control->pairs, request->pairs, request->pair_count * sizeof *request->pairs);
    control->is_custom = request->is_custom;
    control->retained = request->retained;
    control->machine = *machine;
}

static enum result post(const struct link *link, const struct request *request) {
    struct control *control = link->control;
    struct machine machine;
    if (!machine_from_environment(&machine))
        return UNKNOWN;
    /* One caller at a time; the lock goes with the caller, even if it is killed. */
    while (flock(link->fd, LOCK_EX) < 0)
        if (errno != EINTR)
            return OPERATING_SYSTEM;
    /* Unanswered although we hold the lock: its caller died. A lock action that still waits must end. */
    atomic_store(&control->give_up, 1);
    if (!wait_answered(link))
        return OPERATING_SYSTEM;
    atomic_store(&control->give_up, 0);
    fill_request(control, request, &machine);
    atomic_fetch_add(&control->requests, 1);
    futex_wake(&control->requests);
    if (!wait_answered(link))
        return OPERATING_SYSTEM;
    if (request->parts != NULL)
        *request->parts = control->parts;
    return (enum result)control->result;
}

/* True: the call ends here with *result. Faults of the caller are read again at each call. */
static bool caller_fault(enum action action, pid_t pid, enum result *result) {
    static _Atomic uint32_t calls[ACTIONS];
    struct faults faults;
    if (!faults_parse(&faults, "GPUCR_SIM_CALLER_FAULTS")) {
        *result = UNKNOWN;
        return true;
    }
    struct fault fault = faults_pick(&faults, action, pid, atomic_fetch_add(&calls[action], 1) + 1);
    *result = (enum result)fault.value;
    switch (fault.kind) {
    case FAULT_HANG:
        hang();
    case FAULT_DIE:
        kill(pid, SIGKILL);
        *result = OPERATING_SYSTEM;
        return true;
    case FAULT_RESULT:
        return true;
    default:
        fault_wait(&fault);
        return false;
    }
}

enum result control_request(pid_t pid, const struct request *request) {
    struct link link;
    enum result result;
    if (caller_fault(request->action, pid, &result))
        return result;
    result = link_open(pid, &link);
    if (result != SUCCESS)
        return result;
    result = post(&link, request);
    link_close(&link);
    return result;
}

enum result control_state(pid_t pid, int *state) {
    struct link link;
    enum result result;
    if (caller_fault(ACTION_STATE, pid, &result))
        return result;
    result = link_open(pid, &link);
    if (result != SUCCESS)
        return result;
    bool answered = wait_runnable(&link);
    if (answered)
        *state = (int)atomic_load(&link.control->state);
    link_close(&link);
    return answered ? SUCCESS : OPERATING_SYSTEM;
}

enum result control_restore_tid(pid_t pid, int *tid) {
    struct link link;
    enum result result;
    if (caller_fault(ACTION_TID, pid, &result))
        return result;
    result = link_open(pid, &link);
    if (result != SUCCESS)
        return result;
    bool lives = target_lives(&link);
    *tid = link.restore_tid;
    link_close(&link);
    return lives ? SUCCESS : OPERATING_SYSTEM;
}
