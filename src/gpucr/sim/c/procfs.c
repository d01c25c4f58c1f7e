/* Data about other processes from /proc. */
#include "machine.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool read_text(const char *path, char *text, size_t size) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    size_t length = 0;
    ssize_t got;
    while (length < size - 1 && (got = read(fd, text + length, size - 1 - length)) > 0)
        length += (size_t)got;
    close(fd);
    text[length] = '\0';
    return length > 0;
}

/* The last number in the line that begins with `field`: NStgid and NSpid list the namespaces outside in. */
static pid_t last_number(const char *text, const char *field) {
    const char *line = strstr(text, field);
    if (line == NULL)
        return -1;
    line += strlen(field);
    pid_t number = -1;
    while (*line != '\n' && *line != '\0') {
        char *end;
        long value = strtol(line, &end, 10);
        if (end == line)
            break;
        number = (pid_t)value;
        line = end;
    }
    return number;
}

bool process_status(pid_t pid, struct process_status *status) {
    char path[64], text[4096];
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    if (!read_text(path, text, sizeof text))
        return false;
    const char *state = strstr(text, "\nState:\t");
    status->state = '?';
    if (state != NULL)
        status->state = state[8];
    status->leader = last_number(text, "\nTgid:");
    status->inner_pid = last_number(text, "\nNStgid:");
    return status->leader > 0 && status->inner_pid > 0;
}

/*
 * How far the boot clock of our time namespace is ahead of the machine's: /proc adds it to every start time that we
 * read. CRIU 4.2.1 was seen to restore a process into a time namespace of its own.
 */
static int64_t boot_offset_ms(void) {
    char text[512];
    long long seconds, nanoseconds;
    if (!read_text("/proc/self/timens_offsets", text, sizeof text))
        return 0;
    const char *line = strstr(text, "boottime");
    if (line == NULL || sscanf(line, "boottime %lld %lld", &seconds, &nanoseconds) != 2)
        return 0;
    return seconds * 1000 + nanoseconds / 1000000;
}

bool process_start_ms(pid_t pid, uint64_t *start_ms) {
    char path[64], text[1024], state;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    if (!read_text(path, text, sizeof text))
        return false;
    const char *behind_name = strrchr(text, ')'); /* the name in parentheses may hold anything, ")" too */
    unsigned long long ticks;
    if (behind_name == NULL ||
        sscanf(behind_name + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
               &state, &ticks) != 2)
        return false;
    *start_ms = (uint64_t)((int64_t)(ticks * 1000 / (uint64_t)sysconf(_SC_CLK_TCK)) - boot_offset_ms());
    return state != 'Z' && state != 'X';
}

/* The offset of a time namespace is no multiple of a tick: readers in two of them may round differently. */
bool same_start(uint64_t one_ms, uint64_t other_ms) {
    uint64_t apart_ms = one_ms > other_ms ? one_ms - other_ms : other_ms - one_ms;
    return apart_ms <= 2 * 1000 / (uint64_t)sysconf(_SC_CLK_TCK);
}

char thread_state(pid_t leader, pid_t tid) {
    char path[96], text[4096];
    snprintf(path, sizeof path, "/proc/%d/task/%d/status", leader, tid);
    const char *state = read_text(path, text, sizeof text) ? strstr(text, "\nState:\t") : NULL;
    return state == NULL ? 'X' : state[8];
}

/* A process frozen by a version 2 cgroup looks asleep; it waits where signals are taken (seen with Linux 6.18). */
bool thread_is_frozen(pid_t leader, pid_t tid) {
    char path[96], text[4096];
    snprintf(path, sizeof path, "/proc/%d/task/%d/wchan", leader, tid);
    return read_text(path, text, sizeof text) &&
           (strcmp(text, "get_signal") == 0 || strcmp(text, "do_freezer_trap") == 0);
}

uint64_t pid_namespace_of(pid_t pid) {
    char path[64];
    struct stat status;
    snprintf(path, sizeof path, "/proc/%d/ns/pid", pid);
    return stat(path, &status) == 0 ? status.st_ino : 0;
}

pid_t pid_from_inner(uint64_t pid_namespace, pid_t inner_pid) {
    DIR *processes = opendir("/proc");
    pid_t found = -1;
    if (processes == NULL)
        return -1;
    for (struct dirent *entry; found < 0 && (entry = readdir(processes)) != NULL;) {
        pid_t pid = (pid_t)atoi(entry->d_name);
        struct process_status status;
        if (pid > 0 && pid_namespace_of(pid) == pid_namespace && process_status(pid, &status) &&
            status.inner_pid == inner_pid)
            found = pid;
    }
    closedir(processes);
    return found;
}

pid_t thread_from_inner(pid_t leader, pid_t inner_tid) {
    char path[96], text[4096];
    snprintf(path, sizeof path, "/proc/%d/task", leader);
    DIR *tasks = opendir(path);
    pid_t found = -1;
    if (tasks == NULL)
        return -1;
    for (struct dirent *entry; found < 0 && (entry = readdir(tasks)) != NULL;) {
        pid_t tid = (pid_t)atoi(entry->d_name);
        snprintf(path, sizeof path, "/proc/%d/task/%d/status", leader, tid);
        if (tid > 0 && read_text(path, text, sizeof text) && last_number(text, "\nNSpid:") == inner_tid)
            found = tid;
    }
    closedir(tasks);
    return found;
}
