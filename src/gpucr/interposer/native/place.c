#include "place.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#define FOLDER_VARIABLE "GPUCR_INTERPOSER_DIR"
#define USUAL_FOLDER "/tmp/gpucr-interposer-%u" /* the user; client.py knows it too */
#define NAME_BYTES sizeof "4194304.4294967295.ffff" /* an address has little room */
#define FOLDER_BYTES (sizeof((struct sockaddr_un *)NULL)->sun_path - NAME_BYTES)
#define SHORTER sizeof "ffff" /* one name than the other */
#define BACKLOG 16

static struct place {
    struct sockaddr_un bound;
    char found[FOLDER_BYTES + NAME_BYTES - SHORTER]; /* "": this file system has no links */
    char folder[FOLDER_BYTES];
    bool is_alone; /* in its folder */
    struct identity file; /* that both names lead to */
    unsigned namespace;
    pid_t process;
} place;

/* 0: no /proc here. Looks no file up: see descriptors.c. */
static unsigned pid_namespace(void) {
    char name[sizeof "pid:[4294967295]"] = "";
    ssize_t length = readlink("/proc/self/ns/pid", name, sizeof name - 1);
    return length > 5 ? (unsigned)strtoul(name + 5, NULL, 10) : 0;
}

/* --- folders ------------------------------------------------------------------------------------------------------ */

/* Only ours, and not a link that somebody else put there. */
static bool is_private(const char *path) {
    struct stat status;
    int folder = open(path, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (folder < 0)
        return false;
    bool private = syscall(SYS_fstat, folder, &status) == 0 && status.st_uid == geteuid() && (status.st_mode & 077) == 0;
    close(folder);
    return private;
}

static bool usual_folder(char path[FOLDER_BYTES]) {
    const char *wanted = getenv(FOLDER_VARIABLE);
    int length = wanted != NULL ? snprintf(path, FOLDER_BYTES, "%s", wanted)
                                : snprintf(path, FOLDER_BYTES, USUAL_FOLDER, geteuid());
    return length > 0 && (size_t)length < FOLDER_BYTES && path[0] == '/';
}

static unsigned random_number(void) {
    unsigned number;
    return syscall(SYS_getrandom, &number, sizeof number, 0) == sizeof number ? number : (unsigned)getpid();
}

/* Everybody can make the usual one in /tmp, for another user too: then one that nobody knows beforehand. */
static bool make_folder(struct place *new) {
    if (!usual_folder(new->folder))
        return false;
    mkdir(new->folder, 0700);
    if (is_private(new->folder))
        return true;
    if (getenv(FOLDER_VARIABLE) != NULL)
        return false;
    snprintf(new->folder, FOLDER_BYTES, USUAL_FOLDER "-%08x", geteuid(), random_number());
    new->is_alone = mkdir(new->folder, 0700) == 0;
    return new->is_alone && is_private(new->folder);
}

/* Left by killed processes. Those of other namespaces cannot be checked. */
static void remove_left(const char *folder) {
    DIR *names = opendir(folder);
    const struct dirent *entry;
    while (names != NULL && (entry = readdir(names)) != NULL) {
        char *rest;
        long process = strtol(entry->d_name, &rest, 10);
        if (process > 0 && *rest == '.' && strtoul(rest + 1, NULL, 10) == place.namespace &&
            kill((pid_t)process, 0) < 0 && errno == ESRCH)
            unlinkat(dirfd(names), entry->d_name, 0);
    }
    if (names != NULL)
        closedir(names);
}

/* --- our own ------------------------------------------------------------------------------------------------------ */

static bool look_up(const char *path, struct identity *file) {
    int found = open(path, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    bool is_there = descriptor_identify(found, file);
    if (found >= 0)
        close(found);
    return is_there;
}

static bool leads_to_ours(const char *path) {
    struct identity file;
    return look_up(path, &file) && file.device == place.file.device && file.inode == place.file.inode;
}

bool place_is_in_order(void) {
    return place.process == getpid() && place.namespace == pid_namespace() && leads_to_ours(place.bound.sun_path) &&
           (place.found[0] == '\0' || leads_to_ours(place.found));
}

bool place_is_ours(int number) {
    struct sockaddr_un name = {0};
    socklen_t size = sizeof name;
    return number >= 0 && getsockname(number, (struct sockaddr *)&name, &size) == 0 && name.sun_family == AF_UNIX &&
           strncmp(name.sun_path, place.bound.sun_path, sizeof name.sun_path) == 0;
}

/* The bound name may be a clone's by now, which can be found without it. The other one of a restored process is the
   original's, which may still live. */
void place_leave(void) {
    if (place.process != getpid())
        return;
    unlink(place.bound.sun_path);
    if (place.namespace == pid_namespace())
        unlink(place.found);
    if (place.is_alone)
        rmdir(place.folder);
}

static int bound_socket(const struct sockaddr_un *address) {
    int made = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (made >= 0 && bind(made, (const struct sockaddr *)address, sizeof *address) == 0 && listen(made, BACKLOG) == 0)
        return made;
    if (made >= 0)
        close(made);
    return -1;
}

struct owned place_listen(void) {
    struct place new = {.process = getpid(), .namespace = pid_namespace(), .bound.sun_family = AF_UNIX};
    bool is_first = place.process != getpid();
    if (!make_folder(&new))
        return NOTHING_OWNED;
    snprintf(new.found, sizeof new.found, "%s/%d.%u", new.folder, (int)new.process, new.namespace);
    snprintf(new.bound.sun_path, sizeof new.bound.sun_path, "%s.%04x", new.found, random_number() & 0xffff);
    struct owned listening = descriptor_keep(bound_socket(&new.bound));
    if (listening.number < 0 || !look_up(new.bound.sun_path, &new.file)) {
        descriptor_close(&listening);
        unlink(new.bound.sun_path);
        return NOTHING_OWNED;
    }
    place_leave();
    place = new;
    unlink(new.found); /* of a process that had this number */
    if (link(new.bound.sun_path, new.found) < 0)
        place.found[0] = '\0';
    if (is_first)
        remove_left(new.folder);
    return listening;
}

/* --- those of others ---------------------------------------------------------------------------------------------- */

/* Root's too: a peer may have given up root's rights. */
static bool is_agent_of(int connection, int process) {
    struct ucred peer;
    socklen_t size = sizeof peer;
    return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.pid == process &&
           (peer.uid == 0 || peer.uid == geteuid());
}

static int connect_at(const char *path, int process) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char folder[sizeof address.sun_path];
    size_t length = strlen(path);
    if (length >= sizeof address.sun_path)
        return -1;
    memcpy(address.sun_path, path, length + 1);
    memcpy(folder, path, length + 1);
    *strrchr(folder, '/') = '\0';
    int connection = is_private(folder) ? socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0) : -1;
    if (connection < 0)
        return -1;
    if (connect(connection, (const struct sockaddr *)&address, sizeof address) == 0 && is_agent_of(connection, process))
        return connection;
    close(connection);
    return -1;
}

/* "…/PID.NAMESPACE.XXXX", of any namespace: the kernel's word on it (SO_PEERCRED) decides. */
static bool may_be_of(const char *path, int process) {
    const char *name = strrchr(path, '/');
    char *rest;
    if (path[0] != '/' || name == NULL || strtol(name + 1, &rest, 10) != process || *rest != '.')
        return false;
    strtoul(rest + 1, &rest, 10);
    return *rest == '.' && strlen(rest + 1) == 4;
}

/* "address: references protocol flags type state inode path" */
static const char *path_in(const char *line) {
    for (int i = 0; i < 7; i++) {
        line += strcspn(line, " ");
        line += strspn(line, " ");
    }
    return line;
}

/* Where the process is restored, has another folder, or the program has overwritten its environment. Not by stdio: see
   descriptors.c. */
static int connect_to_listed(int process) {
    char text[4096];
    size_t filled = 0;
    int connection = -1, list = open("/proc/self/net/unix", O_RDONLY | O_CLOEXEC);
    ssize_t got;
    while (list >= 0 && connection < 0 && (got = read(list, text + filled, sizeof text - 1 - filled)) > 0) {
        char *line = text, *end;
        filled += (size_t)got;
        text[filled] = '\0';
        for (; connection < 0 && (end = strchr(line, '\n')) != NULL; line = end + 1) {
            *end = '\0';
            if (may_be_of(path_in(line), process))
                connection = connect_at(path_in(line), process);
        }
        filled = strlen(line) < sizeof text - 1 ? strlen(line) : 0; /* longer ones are no name of ours */
        memmove(text, line, filled);
    }
    if (list >= 0)
        close(list);
    return connection;
}

struct owned place_connect(int process) {
    char folder[FOLDER_BYTES], path[FOLDER_BYTES + NAME_BYTES];
    int connection = -1;
    if (usual_folder(folder)) {
        snprintf(path, sizeof path, "%s/%d.%u", folder, process, pid_namespace());
        connection = connect_at(path, process);
    }
    return descriptor_keep(connection >= 0 ? connection : connect_to_listed(process));
}
