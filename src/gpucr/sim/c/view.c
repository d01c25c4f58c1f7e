/*
 * Views: addresses of device memory that cannot be found from the address itself, of this process (memory mapped with
 * the VMM calls) or of another one (CUDA IPC, imported VMM memory). Driver 580 does not bring back those of another
 * process.
 *
 * The bytes of a GPU are in a memfd whose name has the address of its reservation. Another process's memfd is looked up
 * below /proc at first use, and again after a checkpoint, since the other process has made a new file by then.
 */
#include "sim.h"

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct view {
    uint64_t address, size_bytes;
    struct location at;
    enum view_kind kind;
    int fd; /* of another process's memory; -1: not open */
    const int *shared; /* memory with its own file (VMM); NULL, or -1 in it: none */
    struct view *next;
};

static struct view *views;

static int open_foreign(const struct location *at) {
    char path[300], name[300], wanted[64];
    snprintf(wanted, sizeof wanted, "/memfd:" DEVICE_FILE_NAME, at->base);
    snprintf(path, sizeof path, "/proc/%d/fd", at->owner);
    DIR *descriptors = opendir(path);
    int fd = -1;
    if (descriptors == NULL)
        return -1;
    for (struct dirent *entry; fd < 0 && (entry = readdir(descriptors)) != NULL;) {
        snprintf(path, sizeof path, "/proc/%d/fd/%s", at->owner, entry->d_name);
        ssize_t length = readlink(path, name, sizeof name - 1);
        if (length < 0)
            continue;
        name[length] = '\0';
        if (strncmp(name, wanted, strlen(wanted)) == 0)
            fd = open(path, O_RDWR | O_CLOEXEC);
    }
    closedir(descriptors);
    return fd;
}

bool view_reachable(const struct location *at) {
    int fd = at->owner == getpid() ? memory_file(at->base) : open_foreign(at);
    if (fd >= 0 && at->owner != getpid())
        close(fd);
    return fd >= 0;
}

enum result view_add(uint64_t address, uint64_t size_bytes, const struct location *at, enum view_kind kind,
                     const int *shared) {
    struct view *made = calloc(1, sizeof *made);
    if (made == NULL)
        return OUT_OF_MEMORY;
    *made = (struct view){address, size_bytes, *at, kind, -1, shared, views};
    views = made;
    return SUCCESS;
}

bool view_remove(uint64_t address, enum view_kind kind) {
    for (struct view **link = &views; *link != NULL; link = &(*link)->next) {
        struct view *view = *link;
        if (view->address != address || (view->kind < VIEW_IPC ? VIEW_OWN : view->kind) != kind)
            continue;
        *link = view->next;
        if (view->fd >= 0)
            close(view->fd);
        free(view);
        return true;
    }
    return false;
}

bool view_is_open(enum view_kind kind) {
    for (const struct view *view = views; view != NULL; view = view->next)
        if (view->kind == kind)
            return true;
    return false;
}

bool view_shows(const struct location *at) {
    for (const struct view *view = views; view != NULL; view = view->next)
        if (view->at.owner == at->owner && view->at.base == at->base && view->at.offset == at->offset)
            return true;
    return false;
}

bool view_at(uint64_t address, struct location *at) {
    for (const struct view *view = views; view != NULL; view = view->next)
        if (view->kind < VIEW_IPC && address >= view->address && address - view->address < view->size_bytes) {
            *at = view->at;
            return true;
        }
    return false;
}

bool view_range(uint64_t address, uint64_t *start, uint64_t *size_bytes) {
    for (const struct view *view = views; view != NULL; view = view->next)
        if (address >= view->address && address - view->address < view->size_bytes) {
            *start = view->address;
            *size_bytes = view->size_bytes;
            return true;
        }
    return false;
}

bool view_find(uint64_t pointer, uint64_t size_bytes, int *fd, uint64_t *offset) {
    for (struct view *view = views; view != NULL; view = view->next) {
        if (pointer < view->address || pointer - view->address >= view->size_bytes ||
            size_bytes > view->size_bytes - (pointer - view->address))
            continue;
        *offset = view->at.offset + (pointer - view->address);
        if (view->shared != NULL && *view->shared >= 0) {
            *offset = pointer - view->address;
            *fd = *view->shared;
        } else if (view->at.owner == getpid()) {
            *fd = memory_file(view->at.base);
        } else {
            if (view->fd < 0)
                view->fd = open_foreign(&view->at);
            *fd = view->fd;
        }
        return *fd >= 0;
    }
    return false;
}

void views_close_files(void) {
    for (struct view *view = views; view != NULL; view = view->next)
        if (view->fd >= 0) {
            close(view->fd);
            view->fd = -1;
        }
}
