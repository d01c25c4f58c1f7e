#include "socket.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define FOLDER_VARIABLE "GPUCR_INTERPOSER_DIR"
#define NAME_FORMAT "%d.%u" /* process, pid namespace: an address has little room */
#define NAME_BYTES sizeof "4194304.4294967295"
#define SPARES 16

/* Only ours, and not a link that somebody else put there. */
static bool open_folder(const char *path, int *folder) {
    struct stat status;
    if (mkdir(path, 0700) < 0 && errno != EEXIST)
        return false;
    *folder = open(path, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (*folder < 0)
        return false;
    if (fstat(*folder, &status) == 0 && status.st_uid == geteuid() && (status.st_mode & 077) == 0)
        return true;
    close(*folder);
    return false;
}

/* Pid namespaces reuse the same numbers, and a job and its clone may share the folder. 0: no /proc here. */
static unsigned pid_namespace(void) {
    struct stat status;
    return stat("/proc/self/ns/pid", &status) == 0 ? (unsigned)status.st_ino : 0;
}

/* Where the agent of a process of this user and this pid namespace listens. */
static bool find_address(int process, struct sockaddr_un *address, int *folder, char name[NAME_BYTES]) {
    char path[sizeof address->sun_path - NAME_BYTES];
    const char *wanted = getenv(FOLDER_VARIABLE);
    int length = wanted != NULL ? snprintf(path, sizeof path, "%s", wanted)
                                : snprintf(path, sizeof path, "/tmp/gpucr-interposer-%u", geteuid());
    if (length < 0 || (size_t)length >= sizeof path || path[0] != '/' || !open_folder(path, folder))
        return false;
    snprintf(name, NAME_BYTES, NAME_FORMAT, process, pid_namespace());
    address->sun_family = AF_UNIX;
    strcpy(stpcpy(stpcpy(address->sun_path, path), "/"), name); /* there is room: see `path` */
    return true;
}

/* Those of this user and of root. */
static bool may_speak(int connection) {
    struct ucred peer;
    socklen_t size = sizeof peer;
    return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && (peer.uid == 0 || peer.uid == geteuid());
}

int socket_connect(int process) {
    struct sockaddr_un address = {0};
    char name[NAME_BYTES];
    int folder;
    if (!find_address(process, &address, &folder, name))
        return -1;
    close(folder);
    int connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (connection < 0)
        return -1;
    if (connect(connection, (const struct sockaddr *)&address, sizeof address) == 0 && may_speak(connection))
        return connection;
    close(connection);
    return -1;
}

/* Where this process listens, and the file that its socket made there. */
static struct {
    struct sockaddr_un address;
    struct stat file;
    unsigned namespace;
    pid_t process;
} place;

static bool is_at_its_place(void) {
    struct stat now;
    return place.process == getpid() && lstat(place.address.sun_path, &now) == 0 && now.st_ino == place.file.st_ino &&
           now.st_dev == place.file.st_dev;
}

bool socket_can_be_found(void) {
    return is_at_its_place() && place.namespace == pid_namespace();
}

void socket_leave(void) {
    if (is_at_its_place())
        unlink(place.address.sun_path);
}

/* Left by killed processes. Those of other namespaces cannot be checked. */
static void remove_left(int folder) {
    int readable = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *names = readable >= 0 ? fdopendir(readable) : NULL;
    const struct dirent *entry;
    while (names != NULL && (entry = readdir(names)) != NULL) {
        char *rest;
        long process = strtol(entry->d_name, &rest, 10);
        if (process > 0 && *rest == '.' && strtoul(rest + 1, NULL, 10) == place.namespace &&
            kill((pid_t)process, 0) < 0 && errno == ESRCH)
            unlinkat(folder, entry->d_name, 0);
    }
    if (names != NULL)
        closedir(names);
}

int socket_listen(void) {
    struct sockaddr_un address = {0};
    char name[NAME_BYTES];
    int folder, listening;
    place.process = getpid();
    place.namespace = pid_namespace();
    if (!find_address(getpid(), &address, &folder, name))
        return -1;
    remove_left(folder);
    unlinkat(folder, name, 0); /* of a process that had this number */
    close(folder);
    listening = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listening < 0)
        return -1;
    if (bind(listening, (const struct sockaddr *)&address, sizeof address) < 0 || listen(listening, 4) < 0 ||
        lstat(address.sun_path, &place.file) < 0) {
        close(listening);
        return -1;
    }
    place.address = address;
    return listening;
}

int socket_accept(int listening) {
    int client = accept4(listening, NULL, NULL, SOCK_CLOEXEC);
    if (client < 0)
        return -1;
    if (may_speak(client))
        return client;
    close(client);
    return -1;
}

void packet_close(struct packet *packet) {
    while (packet->descriptor_count > 0)
        close(packet->descriptors[--packet->descriptor_count]);
}

/* The control buffer holds MOST_RECORDS; the kernel closes what does not fit. */
static void take_descriptors(struct msghdr *message, struct packet *packet) {
    for (struct cmsghdr *control = CMSG_FIRSTHDR(message); control != NULL; control = CMSG_NXTHDR(message, control)) {
        if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS)
            continue;
        packet->descriptor_count = (unsigned)((control->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(packet->descriptors, CMSG_DATA(control), packet->descriptor_count * sizeof(int));
    }
}

enum received socket_receive(int client, struct packet *packet) {
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof packet->descriptors)];
    struct iovec parts[] = {{&packet->head, sizeof packet->head}, {packet->records, sizeof packet->records}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2, .msg_control = control, .msg_controllen = sizeof control};
    packet->descriptor_count = 0;
    ssize_t got = recvmsg(client, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got < 0)
        return errno == EAGAIN || errno == EINTR ? NOTHING : GONE;
    if (got == 0)
        return GONE;
    take_descriptors(&message, packet);
    const struct message *head = &packet->head;
    bool well = (message.msg_flags & MSG_TRUNC) == 0 && (size_t)got >= sizeof *head && head->magic == PROTOCOL_MAGIC &&
                head->count <= MOST_RECORDS && (size_t)got == sizeof *head + head->count * sizeof(struct record);
    return well ? WELL : BAD;
}

bool socket_send(int client, const struct packet *packet, const void *payload, unsigned payload_bytes) {
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof packet->descriptors)] = {0};
    struct iovec parts[] = {{(void *)&packet->head, sizeof packet->head}, {(void *)payload, payload_bytes}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    if (packet->descriptor_count > 0) {
        size_t bytes = packet->descriptor_count * sizeof(int);
        message.msg_control = control;
        message.msg_controllen = CMSG_SPACE(bytes);
        struct cmsghdr *first = CMSG_FIRSTHDR(&message);
        first->cmsg_level = SOL_SOCKET;
        first->cmsg_type = SCM_RIGHTS;
        first->cmsg_len = CMSG_LEN(bytes);
        memcpy(CMSG_DATA(first), packet->descriptors, bytes);
    }
    return sendmsg(client, &message, MSG_NOSIGNAL) >= 0;
}

static int spares[SPARES];
static unsigned spare_count;

void spares_take(void) {
    while (spare_count < SPARES && (spares[spare_count] = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0)
        spare_count++;
}

void spares_give(void) {
    while (spare_count > 0)
        close(spares[--spare_count]);
}
